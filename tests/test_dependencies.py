"""What the packages import is what pyproject.toml installs: without the extras for `swapq`, with `trl` for `swapq_trl`."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = {"swapq", "swapq_trl", "swapq_vllm"}
#: module -> why it is not named in pyproject.toml
ELSEWHERE = {
    "triton": "comes with torch's builds for CUDA; the modules of GPU kernels import it, and only GPUs need them",
    "cuda": "comes with torch's builds for CUDA; asked for when a kernel is compiled",
    "llvmlite": "comes with numba",
    "vllm": "installed by its own instructions, which depend on the machine",
}
#: modules whose first line may ask for what only some machines have, because only such machines import them
LAZY = ("swapq/kernels/", "integrations/swapq_vllm/", "integrations/swapq_trl/selftest.py")


def named(requirements: list[str]) -> set[str]:
    """Top-level modules of requirements."""
    return {Requirement(line).name.replace("-", "_") for line in requirements}


def imports(file: Path) -> Iterator[tuple[str, bool, int]]:
    """Top-level module, whether it is imported with the file, and the line."""
    tree = ast.parse(file.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        else:
            continue
        above: ast.AST | None = node
        while isinstance(above := parents.get(above), ast.If | ast.Try) and "TYPE_CHECKING" not in ast.dump(above):
            pass
        for module in modules:
            yield module.partition(".")[0], isinstance(above, ast.Module), node.lineno


def allowed(file: str, at_once: bool) -> set[str]:
    own = named(PROJECT["dependencies"]) | OURS
    if file.startswith("integrations/swapq_trl/"):
        own |= named(EXTRAS["trl"])
    if at_once and not file.startswith(LAZY):
        return own
    return own | set(ELSEWHERE) | {name for extra in EXTRAS.values() for name in named(extra)}


@pytest.mark.parametrize("package", ["swapq", "integrations/swapq_trl", "integrations/swapq_vllm"])
def test_every_import_is_of_what_pyproject_installs(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for module, at_once, line in imports(path):
            if module not in sys.stdlib_module_names:
                assert module in allowed(file, at_once), f"{file}:{line} imports {module}"


def test_every_dependency_that_is_named_is_imported() -> None:
    files = [*(ROOT / "swapq").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    imported = {module for path in files for module, _, _ in imports(path)}
    assert named(PROJECT["dependencies"]) <= imported


def closure(requirements: list[str]) -> set[str]:
    """Distributions that an installation of these brings, by what the ones in this environment say."""
    found: set[str] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *requirement.extras):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            if (key := f"{name}[{extra}]") in found:
                continue
            found |= {name, key}
            for line in metadata.requires(name) or ():
                inner = Requirement(line)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    inner.marker = None
                    left.append(inner)
    return found


def run_without(missing: set[str], script: str, there: set[str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``script`` where these modules are not installed, nor, if given, any distribution but those ``there``."""
    hiding = (
        "import sys\n"
        "from packaging.utils import canonicalize_name\n"
        f"there = {None if there is None else sorted({*there, 'swapq'})!r}\n"
        f"missing = {sorted(missing)!r}\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        return None if name.partition('.')[0] in missing else self.finder.find_spec(name, path, target)\n"
        "    def find_distributions(self, *args):\n"
        "        found = getattr(self.finder, 'find_distributions', lambda *args: [])(*args)\n"
        "        return [one for one in found if there is None or canonicalize_name(one.metadata['Name']) in there]\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
    )
    return subprocess.run([sys.executable, "-c", hiding + script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("extra", "statement"),
    [
        (
            None,
            "import swapq, swapq.cli, swapq.checkpoint.card, swapq.checkpoint.upload, swapq.diagnostics.sensitivity",
        ),
        ("trl", "import swapq_trl, swapq_trl.server, swapq_trl.adapters"),
    ],
)
def test_the_packages_import_with_nothing_but_what_their_extra_installs(extra: str | None, statement: str) -> None:
    """Every module of any other distribution of this environment is missing, as in a fresh one."""
    if extra:
        pytest.importorskip(extra)
    there = closure([*PROJECT["dependencies"], *EXTRAS.get(extra or "", [])])
    missing = {
        module
        for module, owners in metadata.packages_distributions().items()
        if module not in OURS and not {canonicalize_name(owner) for owner in owners} & there
    }
    done = run_without(missing, statement, there)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("missing", "statement", "says"),
    [
        ("trl", "import swapq_trl", "pip install 'swapq[trl]'"),
        ("trl", "from swapq_trl.trainers import GRPOTrainer", "pip install 'swapq[trl]'"),
        ("vllm", "import swapq_vllm", "https://docs.vllm.ai/"),
        ("vllm", "from swapq_vllm.receiver import apply_update", "https://docs.vllm.ai/"),
        ("vllm", "from swapq_trl.generation import VLLMGeneration as V; V(None, None, mode='server')", "https://docs.vllm.ai/"),
        ("vllm", "from swapq_trl.generation import VLLMGeneration as V; V(None, None, mode='colocate')", "https://docs.vllm.ai/"),
    ],
)  # fmt: skip
def test_a_missing_package_is_one_line_that_says_how_to_install_it(missing: str, statement: str, says: str) -> None:
    pytest.importorskip("trl")
    script = (
        "import swapq\n"
        f"try:\n    {statement}\n"
        "except ImportError as error:\n"
        "    assert isinstance(error, swapq.SwapqError), repr(error)\n"
        "    print(error)\n"
    )
    done = run_without({missing}, script)
    assert done.returncode == 0, done.stderr[-2000:]
    assert says in done.stdout
    assert len(done.stdout.splitlines()) == 1
