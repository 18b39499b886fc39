"""The examples are scripts beside their packages: their folder is not on the path of the tests."""

import importlib
import sys
from types import ModuleType

from tests.helpers.warm import ROOT

__all__ = ["import_example"]


def import_example(name: str) -> ModuleType:
    """Import a module of `examples/`, as a script in that folder would."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)
