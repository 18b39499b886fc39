"""Quantized linears in the engine: merged, column, row and replicated, with the trainer's linear as forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.platforms import current_platform

from swapq import formats
from swapq.errors import CheckpointError, UnsupportedError
from swapq.formats import Parts
from swapq.kernels import dispatch
from swapq_vllm.built import built
from swapq_vllm.compat import captures_graphs
from swapq_vllm.loading import Arrivals, guard_linear, guard_tiles
from swapq_vllm.operands import Operands
from swapq_vllm.ops import KERNELS_TAKE, stacked_linear
from swapq_vllm.soundness import Stored, unsound

__all__ = ["SwapqLinearMethod"]


class SwapqLinearMethod(LinearMethodBase):
    """A linear whose shards are all in one format.

    Args:
        prefix: the layer's name, for messages.
        fmt: a format without an FP32 scale over a whole weight.
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
            FormatError, UnsupportedError: tensor parallelism would cut a block, or there is no kernel for the graphs to be captured.
        """
        form = formats.get(self.format)
        form.check_length(input_size_per_partition, name=f"{self.prefix} (input size {input_size} on this rank)")
        self._require_whole_tiles(input_size_per_partition, input_size, output_partition_sizes, output_size)
        self._require_kernels(sum(output_partition_sizes), input_size_per_partition)
        shapes = form.part_shapes((sum(output_partition_sizes), input_size_per_partition), scope=form.default_scope)
        whole = form.part_shapes((1, input_size), scope=form.default_scope)
        self.arrivals = Arrivals({(shard,): name for shard, name in self.names.items()})
        columns = {form.suffixes[part]: whole[part][-1] for part in form.suffixes}
        loaders = dict.fromkeys(form.suffixes, guard_linear(layer, self.arrivals, columns))
        self.tiles: list[int] | None = None
        if form.tile_rows > 1:
            merged = len(self.names) > 1  # else one weight on disk, whatever the engine calls its parts
            self.sizes = list(output_partition_sizes) if merged else [sum(output_partition_sizes)]
            self.tiles = [-(-size // form.tile_rows) for size in self.sizes]
            shapes["scales"] = (sum(self.tiles), shapes["scales"][-1])
            loaders["scales"] = guard_tiles(layer, self.arrivals, self.tiles)
        for part, name in form.suffixes.items():
            parameter = nn.Parameter(torch.empty(shapes[part], dtype=form.dtypes[part]), requires_grad=False)
            layer.register_parameter(name, parameter)
            for attribute, value in {"input_dim": 1, "output_dim": 0, "weight_loader": loaders[part]}.items():
                setattr(parameter, attribute, value)
        self.counts: Tensor | None = None
        layer.swapq_operands = None

    def _require_kernels(self, rows: int, columns: int) -> None:
        """Said when the engine is built: a capture would fail with an error about streams."""
        if captures_graphs() and not dispatch.fast(
            torch.device("cuda"), self.format, self.activations, (rows, columns)
        ):
            raise UnsupportedError(
                f"{self.prefix}: a {self.format} linear of {rows} x {columns} with {self.activations} rows has no kernel on this GPU that "
                f"a CUDA graph can hold ({KERNELS_TAKE}); start with enforce_eager=True, or keep this layer in BF16 (`keep_bf16`)"
            )

    def _require_whole_tiles(self, columns: int, every_column: int, rows: list[int], every_row: int) -> None:
        """Ranks may cut a weight between its tiles only; without a cut the last tile of each part may be partial."""
        form = formats.get(self.format)
        cut = (columns != every_column and columns % form.block) or (
            sum(rows) != every_row and (any(size % form.tile_rows for size in rows) or len(self.names) != len(rows))
        )
        cut = cut and form.tile_rows > 1
        if cut:
            raise UnsupportedError(
                f"{self.prefix}: {every_row} x {every_column} over the ranks is {rows} x {columns} here, which cuts a {self.format} block; "
                "use a smaller tensor_parallel_size, or keep this layer in BF16 (`keep_bf16`)"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Validate what was loaded; on the CPU, refresh the expanded operand.

        Raises:
            CheckpointError: a tensor that did not come, or codes or scales that are not finite.
        """
        built(self)
        suffixes = formats.get(self.format).suffixes
        slots = list(self.arrivals.expected)
        self.arrivals.require(layer, {name: slots for name in suffixes.values()})
        self.require_sound(layer)
        self.after_copies(layer)

    def takes_copies(self, layer: Any) -> bool:
        """Whether bytes copied into the live parameters are loaded, once :meth:`after_copies` ran: the layout is the checkpoint's."""
        return True

    def after_copies(self, layer: Any) -> None:
        """Refresh what is derived, in place: CUDA graphs hold its addresses, and an engine that slept may have lost its bytes."""
        if self.tiles is not None and any(size % formats.get(self.format).tile_rows for size in self.sizes[:-1]):
            counts = torch.tensor(self._rows_per_tile(), device="cpu")
            self.counts = counts.to(layer.weight.device) if self.counts is None else self.counts.copy_(counts)
        if not current_platform.is_cpu():
            return
        if layer.swapq_operands is None:
            layer.swapq_operands = Operands(self._parts(layer), self.format)
        else:
            layer.swapq_operands.refresh(self._parts(layer))

    def stored(self, layer: Any) -> list[Stored]:
        """What :meth:`require_sound` looks at, part by part."""
        suffixes = formats.get(self.format).suffixes
        return [Stored(getattr(layer, name).data, self.format, part) for part, name in suffixes.items()]

    def disagrees(self, layer: Any) -> None:
        """Nothing here must agree with something else."""

    def require_sound(self, layer: Any) -> None:
        """Raise if codes or scales hold values that no quantizer writes.

        Raises:
            CheckpointError: naming the checkpoint's tensors.
        """
        for part, name in formats.get(self.format).suffixes.items():
            bad = unsound(getattr(layer, name).data, self.format, part)
            if bool(bad.any()):
                row = int(bad.any(1).nonzero()[0])
                raise CheckpointError(
                    f"{' + '.join(self.names.values())}: {name} holds values that are not finite, first in row {row} of {self.prefix}; "
                    "the checkpoint or the trainer's weights are damaged"
                )

    def _parts(self, layer: Any) -> Parts:
        scales = getattr(layer, formats.get(self.format).suffixes["scales"]).data
        if self.counts is None:
            return Parts(layer.weight.data, scales)
        # parts of a merged linear have tiles of their own; where one ends in a partial tile, every row of the weight gets its scales
        return Parts(layer.weight.data, scales.repeat_interleave(self.counts, dim=0, output_size=sum(self.sizes)))

    def _rows_per_tile(self) -> list[int]:
        tile = formats.get(self.format).tile_rows
        return [min(tile, size - start) for size in self.sizes for start in range(0, size, tile)]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x [..., K]`` to BF16 ``[..., N]``, rows quantized on the way in."""
        if layer.swapq_operands is not None:
            return stacked_linear(x, layer.swapq_operands.tensors, bias, "", self.activations)
        return stacked_linear(x, list(self._parts(layer)[:2]), bias, self.format, self.activations)

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """The parameter itself: its layout does not change."""
        return getattr(layer, name)
