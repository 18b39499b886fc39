"""Quantized linears in the engine: merged, column, row and replicated, with the trainer's linear as forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.platforms import current_platform

from swapq import formats
from swapq.errors import CheckpointError
from swapq.formats import Parts
from swapq_vllm.built import built
from swapq_vllm.loading import Arrivals, guard_linear
from swapq_vllm.operands import Operands
from swapq_vllm.ops import stacked_linear
from swapq_vllm.soundness import unsound

__all__ = ["SwapqLinearMethod"]


class SwapqLinearMethod(LinearMethodBase):
    """A linear whose shards are all in one format.

    Args:
        prefix: the layer's name, for messages.
        fmt: ``"mxfp8"``.
        activations: format of the rows.
        names: shard id (None for a linear that is not merged) to the checkpoint name of the weight.
    """

    def __init__(self, *, prefix: str, fmt: str, activations: str, names: Mapping[Any, str]) -> None:
        self.prefix, self.format, self.activations = prefix, fmt, activations
        self.names = dict(names)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register codes and scales in checkpoint layout.

        Raises:
            FormatError: tensor parallelism would cut a block.
        """
        form = formats.get(self.format)
        form.check_length(input_size_per_partition, name=f"{self.prefix} (input size {input_size} on this rank)")
        shapes = form.part_shapes((sum(output_partition_sizes), input_size_per_partition), scope=form.default_scope)
        whole = form.part_shapes((1, input_size), scope=form.default_scope)
        self.arrivals = Arrivals({(shard,): name for shard, name in self.names.items()})
        loader = guard_linear(layer, self.arrivals, {form.suffixes[part]: whole[part][-1] for part in form.suffixes})
        for part, name in form.suffixes.items():
            parameter = nn.Parameter(torch.empty(shapes[part], dtype=form.dtypes[part]), requires_grad=False)
            layer.register_parameter(name, parameter)
            for attribute, value in {"input_dim": 1, "output_dim": 0, "weight_loader": loader}.items():
                setattr(parameter, attribute, value)
        layer.swapq_operands = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Validate what was loaded; on the CPU, refresh the expanded operand.

        Raises:
            CheckpointError: a tensor that did not come, or codes or scales that are not finite.
        """
        built(self)
        suffixes = formats.get(self.format).suffixes
        slots = list(self.arrivals.expected)
        self.arrivals.require(layer, {name: slots for name in suffixes.values()})
        for part, name in suffixes.items():
            bad = unsound(getattr(layer, name).data, self.format, part)
            if bool(bad.any()):
                row = int(bad.any(1).nonzero()[0])
                raise CheckpointError(
                    f"{' + '.join(self.names.values())}: {name} holds values that are not finite, first in row {row} of {self.prefix}; "
                    "the checkpoint or the trainer's weights are damaged"
                )
        if not current_platform.is_cpu():
            return
        if layer.swapq_operands is None:
            layer.swapq_operands = Operands(self._parts(layer), self.format)
        else:
            layer.swapq_operands.refresh(self._parts(layer))

    def _parts(self, layer: Any) -> Parts:
        return Parts(layer.weight.data, layer.weight_scale.data)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` to BF16 ``[..., N]``, rows quantized on the way in."""
        if layer.swapq_operands is not None:
            return stacked_linear(x, layer.swapq_operands.tensors, bias, "", self.activations)
        return stacked_linear(x, list(self._parts(layer)[:2]), bias, self.format, self.activations)

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """The parameter itself: its layout does not change."""
        return getattr(layer, name)
