"""An experts module's codes and scales stacked, one tensor per part: what travels to an engine that holds them stacked itself.

Names are those of single experts without the number, gate and up as one: ``model.layers.3.mlp.experts.gate_up_proj.weight``,
``....weight_scale``, ``model.layers.3.mlp.experts.down_proj.weight`` (a family without a gate: ``up_proj``). No file has such names.
"""

from collections.abc import Iterator

from torch import Tensor

from swapq import formats
from swapq.anatomy import ExpertsLayout
from swapq.errors import UnsupportedError
from swapq.formats import Format
from swapq.nn.experts import SwapqExperts

__all__ = ["refuse_interleaved", "stack_names", "stacked_tensors"]


def stack_names(prefix: str, form: Format, *, gated: bool) -> dict[str, dict[str, str]]:
    """Part -> name of its stack, for the first linear (``"up"``) and the second (``"down"``).

    Args:
        prefix: the experts' name in a checkpoint, ``model.layers.3.mlp.experts``.
        form: format of the weights.
        gated: whether gate and up stand in the first stack, gate rows first.
    """
    stems = {"up": f"{prefix}.{'gate_up_proj' if gated else 'up_proj'}", "down": f"{prefix}.down_proj"}
    return {side: {part: f"{stem}.{s}" for part, s in form.suffixes.items()} for side, stem in stems.items()}


def stacked_tensors(module: SwapqExperts) -> Iterator[tuple[str, Tensor]]:
    """``(name, tensor [E, ...])`` of every part: codes, block scales, and FP32 scales ``[E, 2]`` of gate and up, ``[E]`` of down.

    Fresh where the module has masters, views of what it holds otherwise. The first linear's tensors can be freed before the second is
    quantized.

    Raises:
        UnsupportedError: gate and up are interleaved.
    """
    layout, form = module.swapq_layout, formats.get(module.spec.weights)
    refuse_interleaved(layout)
    names = stack_names(layout.hub_prefix, form, gated=layout.gated)
    for side, weight in (("up", module.up_name), ("down", module.down_name)):
        parts = module.stored_parts(weight)
        for part in list(parts):
            tensor = parts.pop(part)
            if part == "global_scale" and side == "up":
                tensor = tensor[:, None].expand(-1, 2 if layout.gated else 1)
            yield names[side][part], tensor.contiguous()


def refuse_interleaved(layout: ExpertsLayout) -> None:
    """Refuse a family whose experts no engine reads in checkpoint layout."""
    if layout.unreadable:
        raise UnsupportedError(
            f"{layout.prefix}: {layout.unreadable}; train it and keep the masters with save_pretrained, but do not export it"
        )
