"""Layer sensitivity: what each quantized layer costs, measured by giving it back its BF16 weights, one layer at a time.

The measure is KL(BF16 model || model with one layer in BF16) of the next-token distributions on a few prompts: no reference to a task. The
model is loaded once; a layer in BF16 is its masters' own forward, so nothing is copied.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swapq.convert import convert, is_converted, plan_of, swapped_modules
from swapq.errors import UnsupportedError
from swapq.nn.storage import QuantizedStorage
from swapq.recipe import Recipe

__all__ = ["LayerGain", "Sensitivity", "in_bf16", "measure_sensitivity"]

Logits = list[Tensor]


@dataclass(frozen=True, slots=True)
class LayerGain:
    """One decoder layer.

    Attributes:
        layer: its number.
        pattern: what names it in ``keep_bf16``.
        kl: KL that remains, in nats per token, with this layer alone in BF16.
        gain: by how much that is below the KL of all layers quantized.
        bytes: how much larger a checkpoint is with the layer in BF16.
    """

    layer: int
    pattern: str
    kl: float
    gain: float
    bytes: int


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The layers, the one that matters most first, and what to do about it.

    Attributes:
        recipe: what was measured, without exceptions for whole layers.
        original: the recipe that was asked about.
        kl: KL with every layer quantized, in nats per token.
        layers: ranked by gain.
        tokens: predictions that each figure is a mean over.
    """

    recipe: Recipe
    original: Recipe
    kl: float
    layers: tuple[LayerGain, ...]
    tokens: int

    def kept(self, keep: int | None = None) -> tuple[LayerGain, ...]:
        """The layers worth an exception: ``keep`` of them (default: as many as the recipe keeps), and only those that gain anything."""
        total = len(self.layers)
        if keep is None:
            first, last = self.original.first_layers_bf16, self.original.last_layers_bf16
            keep = Recipe.layer_count(first, total) + Recipe.layer_count(last, total) or max(
                1, math.floor(0.15 * total + 0.5)
            )
        return tuple(layer for layer in self.layers[: max(0, min(keep, total - 1))] if layer.gain > 0)

    def proposal(self, keep: int | None = None) -> Recipe:
        """The recipe with its most sensitive layers in BF16, in place of the first and last ones."""
        patterns = [layer.pattern for layer in sorted(self.kept(keep), key=lambda layer: layer.layer)]
        return self.recipe.replace(name=f"{self.original.name}-tuned", keep_bf16=[*self.recipe.keep_bf16, *patterns])

    def to_dict(self, keep: int | None = None) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "recipe": self.original.to_dict(),
            "kl": self.kl,
            "tokens": self.tokens,
            "layers": [
                {"layer": x.layer, "pattern": x.pattern, "kl": x.kl, "gain": x.gain, "bytes": x.bytes}
                for x in self.layers
            ],
            "proposal": self.proposal(keep).to_dict(),
        }


@contextmanager
def in_bf16(modules: Iterable[QuantizedStorage]) -> Iterator[None]:
    """Compute with the masters of these modules, unquantized, inside the context."""
    changed = [(module, module.spec) for module in modules]
    try:
        for module, spec in changed:
            module.spec = replace(spec, backward="bf16")
        yield
    finally:
        for module, spec in changed:
            module.spec = spec


def measure_sensitivity(
    model: nn.Module,
    recipe: "Recipe | str",
    batches: Sequence[Tensor],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Sensitivity:
    """Convert ``model`` (in place) and measure every layer that the recipe quantizes.

    Args:
        model: a plain causal LM with masters.
        recipe: its exceptions for first and last layers are left out, so that every layer is measured; ``keep_bf16`` stays.
        batches: token ids ``[B, T]`` each, without padding.
        progress: told forwards done and their number.

    Raises:
        UnsupportedError: a converted model, no token to predict, or no layer to measure.
    """
    if is_converted(model):
        raise UnsupportedError("sensitivity is measured on a plain model; load it afresh")
    tokens = sum(ids.shape[0] * (ids.shape[1] - 1) for ids in batches)
    if tokens < 1:
        raise UnsupportedError("the prompts are too short: sensitivity needs at least two tokens in one of them")
    original = Recipe.resolve(recipe)
    # every layer's gain is measured on the policy that is served: masters stay, and each forward quantizes them
    trained = {"backward": "dequantized"} if not original.matched else {}
    bare = original.replace(first_layers_bf16=0, last_layers_bf16=0, **trained)
    convert(model.eval(), bare)
    layers = _layers(model)
    if not layers:
        raise UnsupportedError(
            f"recipe {original.name!r} quantizes no decoder layer of this model; nothing can be ranked"
        )
    total, done = len(layers) + 2, 0

    def forward() -> Logits:
        nonlocal done
        with torch.no_grad():
            found = [model(ids).logits[:, :-1].float().log_softmax(-1) for ids in batches]
        done += 1
        progress(done, total)
        return found

    with in_bf16(swapped_modules(model)):
        reference = forward()
    everything = _kl(reference, forward())
    gains = []
    for number, (modules, pattern) in layers.items():
        with in_bf16(modules):
            kl = _kl(reference, forward())
        gains.append(LayerGain(number, pattern, kl, everything - kl, _extra_bytes(model, pattern)))
    ranked = tuple(sorted(gains, key=lambda layer: (-layer.gain, layer.layer)))
    return Sensitivity(original.replace(first_layers_bf16=0, last_layers_bf16=0), original, everything, ranked, tokens)


def _layers(model: nn.Module) -> dict[int, tuple[list[QuantizedStorage], str]]:
    """Layer number -> its swapped modules and the pattern that names it."""
    numbers = {info.name: info.layer for info in plan_of(model).anatomy.tensors}
    found: dict[int, tuple[list[QuantizedStorage], str]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedStorage):
            continue
        layer = next((numbers.get(f"{name}.{weight}") for weight in module.weight_names()), None)
        match = None if layer is None else re.search(rf"([^.]+\.{layer})(?:\.|$)", name)
        if layer is not None and match is not None:
            found.setdefault(layer, ([], match.group(1)))[0].append(module)
    return dict(sorted(found.items()))


def _extra_bytes(model: nn.Module, pattern: str) -> int:
    inside = re.compile(rf"(?:^|\.){re.escape(pattern)}(?:\.|$)")
    entries = (e for e in plan_of(model) if e.quantized and inside.search(e.name))
    return sum(2 * math.prod(e.shape) - e.bytes_after for e in entries)


def _kl(reference: Logits, other: Logits) -> float:
    """Mean KL(reference || other) in nats per token."""
    total = sum(
        float(F.kl_div(b.double(), a.double(), log_target=True, reduction="sum"))
        for a, b in zip(reference, other, strict=True)
    )
    return total / sum(a.shape[0] * a.shape[1] for a in reference)
