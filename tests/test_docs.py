"""What README and docs say can be followed: links lead somewhere, commands and options exist, promised tests are there."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

from swapq.anatomy import FAMILIES
from swapq.checkpoint import layouts
from swapq.cli import app
from swapq.support import matrix

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BY_NAME = {str(page.relative_to(ROOT)): page for page in PAGES}
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that name this language."""
    return [
        body for said, body in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M) if said == language
    ]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of a block without a language: its page and its words. ``[--option]`` is an option, ``·`` stands between two."""
    for name, page in BY_NAME.items():
        for line in "\n".join(blocks(page)).replace("\\\n", " ").splitlines():
            if line.startswith(("swapq ", "python ")):
                for one in line.partition(" #")[0].split("·"):
                    yield name, shlex.split(re.sub(r"[\[\]]", " ", one))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_relative_link_leads_to_a_file_and_a_heading(name: str) -> None:
    page = BY_NAME[name]
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link}: no such file"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize(("page", "words"), [c for c in commands() if c[1][0] == "swapq"])
def test_every_swapq_command_has_a_place_for_each_of_its_words(page: str, words: list[str]) -> None:
    parser = COMMANDS[words[1]].make_parser(COMMANDS[words[1]].make_context(words[1], [], resilient_parsing=True))
    _, rest, _ = parser.parse_args(words[2:])
    assert rest == [], f"{page}: nothing takes {rest}"


@pytest.mark.parametrize(("page", "words"), [c for c in commands() if c[1][0] == "python"])
def test_every_script_exists_and_knows_its_options(page: str, words: list[str]) -> None:
    module = words[1] == "-m"
    script = ROOT / (Path(*words[2].split(".")) / "__main__.py" if module else words[1])
    assert script.is_file(), page
    known = set(re.findall(r'"(--[a-z-]+)"', script.read_text()))
    assert {word for word in words[2:] if word.startswith("--")} <= known, page


@pytest.mark.parametrize("name", BY_NAME)
def test_every_test_that_a_page_promises_is_there(name: str) -> None:
    there = {found for file in ROOT.glob("tests/**/*.py") for found in re.findall(r"def (test_\w+)", file.read_text())}
    assert set(re.findall(r"`(test_\w+)`", BY_NAME[name].read_text())) <= there


@pytest.mark.parametrize(("page", "code"), [(n, c) for n, p in BY_NAME.items() for c in blocks(p, "python")])
def test_every_python_snippet_is_python_and_imports_what_is_there(page: str, code: str) -> None:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("swapq"):
            module = __import__(str(node.module), fromlist=["_"])
            assert all(hasattr(module, alias.name) for alias in node.names), page


def test_the_page_lists_the_families_that_the_code_knows_under_their_own_spelling() -> None:
    text = BY_NAME["docs/checkpoints.md"].read_text().partition("## Families")[2].partition("## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    listed = {name: spelling for spelling, names in rows[1:] for name in re.findall(r"`(\w+)`", names)}
    assert set(listed) == set(FAMILIES)
    for name, spelling in listed.items():
        family = FAMILIES[name]
        if not family.interleaved:
            gate, up, down = family.projections
            expected = [f"{family.block[1]}.experts.0.{gate or up}", *([up] if gate else []), down]
            assert re.findall(r"`([^`]+)`", spelling) == expected, name


def test_the_page_of_recipes_has_the_table_that_the_command_prints() -> None:
    text = BY_NAME["docs/recipes.md"].read_text().partition("| training \\ rollout |")[2].partition("\n\n")[0]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    told = {(row[0], rollout): status for row in rows for rollout, status in zip(head, row[1:], strict=True)}
    assert told == {(p.training, p.rollout): p.status for p in matrix()}
    after = BY_NAME["docs/recipes.md"].read_text().partition(text)[2].partition("## ")[0]
    assert set(re.findall(r"`(\w+)`: ", after)) == set(told.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_on_some_page(command: str) -> None:
    written = " ".join(page.read_text() for page in PAGES)
    for option in COMMANDS[command].params:
        name = option.opts[0]
        assert not name.startswith("--") or re.search(rf"{name}\b", written), f"swapq {command} {name}"


def test_the_help_of_convert_names_every_layout() -> None:
    (layout,) = [option for option in COMMANDS["convert"].params if "--layout" in option.opts]
    assert all(name in layout.help for name in layouts.names())
