"""Which pairs of training and rollout are supported, and why not the others. Recipes obey the same table, so nothing here is advice.

A recipe describes both sides at once: rollout in the formats of its weights, and training in the same, or in BF16 where ``backward``
is ``bf16``. So a pair of two different quantized formats cannot even be written down.
"""

from typing import NamedTuple

from swapq.recipe_rules import FORMATS

__all__ = ["Pair", "matrix", "pair"]


class Pair(NamedTuple):
    """What becomes of one pair.

    Attributes:
        training, rollout: formats.
        status: ``matched`` (one policy), ``differs`` (two policies: allowed, labelled, measured), ``forced`` (refused unless the recipe
            sets ``force_rollout``) or ``refused``.
        reason: why.
    """

    training: str
    rollout: str
    status: str
    reason: str


def pair(training: str, rollout: str) -> Pair:
    """The pair of two formats of ``FORMATS``."""
    if training == rollout:
        why = FORMATS[rollout].no_rollout
        return Pair(
            training,
            rollout,
            "forced" if why else "matched",
            why or "the same codes, scales and expert block on both sides",
        )
    if training != "bf16":
        return Pair(
            training,
            rollout,
            "refused",
            "one recipe decides both sides: a policy trained in one format is served in it",
        )
    if "bf16" in FORMATS[rollout].backward:
        return Pair(
            training,
            rollout,
            "differs",
            "two policies: the trainer scores what another policy sampled; the mismatch is logged",
        )
    return Pair(training, rollout, "refused", "the trainer would score another policy than the one that was sampled")


def matrix() -> list[Pair]:
    """Every pair, training by training."""
    return [pair(training, rollout) for training in FORMATS for rollout in FORMATS]
