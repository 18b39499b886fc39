"""A report is one page that needs nothing else, and says so when it cannot be made."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swapq.diagnostics.report import Panel, draw_curves, write_report
from swapq.errors import SwapqError, UnsupportedError

HISTORY = [
    {"step": step, "reward": 0.1 * step, "swapq/mismatch_abs_mean": 0.01, "swapq/sync_seconds": 0.2, "note": "text"}
    for step in range(1, 30)
]


class Links(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    page = write_report(HISTORY, tmp_path, title="A run", tables={"Learning": {"steps": 29, "rate": 0.25}})
    text = page.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert links.found
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "0.25" in text


def test_values_and_titles_are_escaped(tmp_path: Path) -> None:
    page = write_report(HISTORY, tmp_path, title="<script>1</script>", tables={"<b>": {"a&b": "<i>"}})
    text = page.read_text(encoding="utf-8")
    assert "<script>1" not in text
    assert "<i>" not in text
    assert "a&amp;b" in text


def test_the_folder_holds_the_curves_and_valid_json(tmp_path: Path) -> None:
    write_report([*HISTORY, {"step": 30, "reward": float("nan")}], tmp_path / "new", title="A run")
    assert (tmp_path / "new" / "curves.png").read_bytes().startswith(b"\x89PNG")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = json.loads((tmp_path / "new" / "history.json").read_text(), parse_constant=refuse)
    assert rows[-1] == {"step": 30, "reward": None}


def test_a_panel_without_values_is_left_out_and_no_value_at_all_is_refused(tmp_path: Path) -> None:
    draw_curves(HISTORY, tmp_path / "one.png", [Panel("Reward", {"reward": "reward"}), Panel("None", {"x": "absent"})])
    with pytest.raises(SwapqError, match="absent"):
        draw_curves(HISTORY, tmp_path / "none.png", [Panel("None", {"x": "absent"})])
    assert not (tmp_path / "none.png").exists()


def test_a_log_scale_survives_zeros(tmp_path: Path) -> None:
    rows = [{"step": 1, "k3": 0.0}, {"step": 2, "k3": 1e-5}]
    assert draw_curves(rows, tmp_path / "zero.png", [Panel("KL", {"k3": "k3"}, log_scale=True)]).exists()


def test_a_missing_matplotlib_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'swapq\[report\]'"):
        write_report(HISTORY, tmp_path, title="A run")
