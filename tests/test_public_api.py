"""The public surface: adding, renaming or dropping a name, a parameter or a recipe field is a decision, made here."""

import dataclasses
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import swapq
from swapq import errors

SIGNATURES = {
    "convert": "(model, recipe='nvfp4-rl', *, trainable=True, **overrides)",
    "convert_checkpoint": (
        "(source, destination, recipe, *, layout='swapq', workers=1, overwrite=False, resume=True, max_shard_size='5GB', progress=True)"
    ),
    "digest": "(x)",
    "export": "(model, directory, *, layout='swapq', max_shard_size='5GB')",
    "frozen_weights": "(model)",
    "is_converted": "(model)",
    "load_checkpoint": "(model, directory)",
    "plan": "(model_or_directory, recipe, *, tp=1, ep=1)",
    "quantize": "(x, fmt, *, scope=None, axis=-1, amax=None, block=None)",
    "recipe_of": "(model)",
    "record_routing": "(model)",
    "replay_routing": "(model, experts)",
    "verify": "(directory, *, source=None, progress=False)",
}
NAMES = {"Plan", "QTensor", "Recipe", "SwapqConfig", "SwapqError", "__version__", *SIGNATURES}
RECIPE_FIELDS = [
    "name",
    "weights",
    "activations",
    "backward",
    "keep_bf16",
    "first_layers_bf16",
    "last_layers_bf16",
    "expert_tp",
    "force_rollout",
]
COMMANDS = {"card", "convert", "doctor", "inspect", "plan", "recipes", "sensitivity", "verify"}
ROOT = Path(swapq.__file__).parent


def test_the_public_names_are_these() -> None:
    assert set(swapq.__all__) == NAMES


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_signature_is_this(name: str) -> None:
    signature = inspect.signature(getattr(swapq, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == SIGNATURES[name]


def test_the_recipe_fields_are_these() -> None:
    assert [f.name for f in dataclasses.fields(swapq.Recipe)] == RECIPE_FIELDS


def test_the_commands_are_these() -> None:
    from typer.main import get_command

    from swapq.cli import app

    assert set(get_command(app).commands) == COMMANDS  # type: ignore[attr-defined]


def test_every_error_has_one_base_class() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), swapq.SwapqError)


def test_every_public_name_is_documented() -> None:
    for name in set(swapq.__all__) - {"__version__"}:
        assert (getattr(swapq, name).__doc__ or "").strip(), name


def test_every_module_says_what_it_is_for() -> None:
    for module in pkgutil.walk_packages([str(ROOT)], "swapq."):
        if module.name != "swapq.__main__":
            assert (sys.modules.get(module.name) or __import__(module.name, fromlist=["_"])).__doc__, module.name


def test_the_library_never_imports_the_engine_or_the_trainer() -> None:
    above = ("vllm", "trl", "swapq_vllm", "swapq_trl")
    script = f"import sys, swapq, swapq.cli, swapq.doctor; print([m for m in {above} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    assert out.stderr == "", "importing swapq is silent"
