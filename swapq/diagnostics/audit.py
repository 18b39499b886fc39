"""The audit: which formats each weight is computed in on two sides of RL, and where they differ.

Digests prove that both sides hold the same bytes. They cannot see an engine that reads right codes and leaves the rows in BF16; the audit
asks the modules that compute.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from swapq import anatomy
from swapq.anatomy.names import role_of
from swapq.checkpoint.described import describe_folder
from swapq.checkpoint.tensors import base_model
from swapq.convert import is_converted, plan_of, swapped_modules
from swapq.headers import read_folder
from swapq.recipe import FORMATS

__all__ = ["Runs", "audit", "running"]


class Runs(NamedTuple):
    """Formats that one weight, and the rows in front of it, are computed in."""

    weights: str
    activations: str

    def __str__(self) -> str:
        return f"{self.weights} with {self.activations} rows"


BF16 = Runs("bf16", "bf16")


def running(side: "nn.Module | str | os.PathLike[str]", *, served: bool = False) -> dict[str, Runs]:
    """Checkpoint name of every linear and expert weight -> what it runs in.

    ``served`` asks of a model what an engine of its export runs, which differs where training is BF16 and the rollout is not.

    Of a model this is read from its modules as they are now; of a folder, from what its config promises a reader. An engine's is
    ``swapq_vllm.receiver.running(llm)``.

    Raises:
        AnatomyError: a model of an unknown family.
        CheckpointError: a folder that is damaged or contradicts itself.
    """
    if isinstance(side, nn.Module):
        root = base_model(side)
        found = plan_of(root).anatomy if is_converted(root) else anatomy.of_model(root)
        plain = {name: BF16 for info in found.tensors if info.linear for name in found.hub_weights(info)}
        quantizing = (m for m in swapped_modules(root) if served or not m.trains_in_bf16)
        specs = {name: m.spec for m in quantizing for name in m.hub_weights()}
        return plain | {name: Runs(spec.weights, spec.activations) for name, spec in specs.items()}
    described = describe_folder(read_folder(side))
    recipe = described.recipe
    return {
        name: Runs(fmt, recipe.activations_of(role_of(name)) if recipe else FORMATS[fmt].activations[0])
        for name, fmt in described.quantized.items()
    }


def audit(
    one: "nn.Module | str | os.PathLike[str] | Mapping[str, tuple[str, str]]",
    other: "nn.Module | str | os.PathLike[str] | Mapping[str, tuple[str, str]]",
) -> dict[str, tuple[Runs, Runs]]:
    """Weights that the two sides compute differently: name -> what each runs. Empty means that no layer differs.

    Args:
        one: a model, a checkpoint folder, or what :func:`running` gave.
        other: the same, or what an engine's ``running`` gave. An engine's rank is asked only for the weights that it holds.

    Raises:
        AnatomyError, CheckpointError: see :func:`running`.
    """
    ours, theirs = (
        {n: Runs(*r) for n, r in side.items()} if isinstance(side, Mapping) else running(side) for side in (one, other)
    )
    names = theirs if isinstance(other, Mapping) else ours | theirs
    pairs = {name: (ours.get(name, BF16), theirs.get(name, BF16)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
