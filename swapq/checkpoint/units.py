"""Units of a checkpoint conversion: source tensors that must be seen together, and the tensors they become. Made from headers alone.

An expert's gate and up are one unit, since they share a scale; every other tensor is a unit of its own, and each expert of a fused
3-D tensor is one. So the largest unit bounds what a worker holds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from swapq import formats
from swapq.anatomy import Anatomy, ExpertsLayout, TensorInfo
from swapq.checkpoint.arena import aligned
from swapq.checkpoint.layouts import Layout, Stored
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import Folder, TensorHeader
from swapq.plan import Plan, PlanEntry

__all__ = ["BLOCK", "Copy", "Expand", "Quantize", "Slab", "Target", "Unit", "units_of"]

#: tile of a block-FP8 source
BLOCK = 128
#: bytes of a tensor that goes through as it is are moved in pieces of this size
COPY_BUFFER = 1 << 18


@dataclass(frozen=True, slots=True)
class Slab:
    """A contiguous matrix inside a source file. ``scale`` is set for block-FP8; ``transposed`` slabs are stored ``[in, out]``."""

    name: str
    file: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, int]
    transposed: bool = False
    scale: TensorHeader | None = None

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def source_bytes(self) -> int:
        return self.elements * self.dtype.itemsize + (self.scale.nbytes if self.scale else 0)

    @property
    def arena_bytes(self) -> int:
        """The source's bytes and, where they are not the BF16 matrix already, that matrix."""
        other = self.dtype != torch.bfloat16 or self.transposed
        return aligned(self.elements * self.dtype.itemsize) + (aligned(2 * self.elements) if other else 0)

    @property
    def float_bytes(self) -> int:
        """float32 values and scales while a block-FP8 slab is dequantized."""
        return 8 * self.elements + self.scale.nbytes if self.scale else 0


@dataclass(frozen=True, slots=True)
class Target:
    """One quantized weight: rows of a slab. ``unpacked``: bytes of codes that are packed only to be stored, 0 in most formats."""

    weight: str
    fmt: str
    slab: int
    first: int
    rows: int
    unpacked: int


@dataclass(frozen=True, slots=True)
class Quantize:
    """Weights that share one amax (NVFP4), or one weight."""

    slabs: tuple[Slab, ...]
    targets: tuple[Target, ...]
    outputs: tuple[Stored, ...]

    @property
    def source_bytes(self) -> int:
        return sum(s.source_bytes for s in self.slabs)

    @property
    def arena_bytes(self) -> int:
        """The source, its BF16 form, codes and scales; codes that are packed to be stored also as they are before."""
        made = sum(aligned(o.nbytes) for o in self.outputs) + sum(aligned(t.unpacked) for t in self.targets)
        return sum(s.arena_bytes for s in self.slabs) + made

    @property
    def held_bytes(self) -> int:
        """What a worker holds at most while it works on this unit."""
        return self.arena_bytes + max(s.float_bytes for s in self.slabs)


@dataclass(frozen=True, slots=True)
class Expand:
    """A block-FP8 weight that stays unquantized: it comes out as BF16."""

    slab: Slab
    outputs: tuple[Stored, ...]

    @property
    def source_bytes(self) -> int:
        return self.slab.source_bytes

    @property
    def arena_bytes(self) -> int:
        return self.slab.arena_bytes

    @property
    def held_bytes(self) -> int:
        return self.arena_bytes + self.slab.float_bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor whose bytes go through as they are."""

    source: TensorHeader
    outputs: tuple[Stored, ...]

    @property
    def source_bytes(self) -> int:
        return self.source.nbytes

    @property
    def arena_bytes(self) -> int:
        return aligned(min(self.source.nbytes, COPY_BUFFER))

    @property
    def held_bytes(self) -> int:
        return self.arena_bytes


Unit = Quantize | Expand | Copy

_SCALES = ("_scale_inv", ".weight_scale", ".weight_scale_2", ".weight_global_scale")
_LOW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int32)
#: dtypes in which the scale of a block-FP8 weight is a number
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def units_of(plan: Plan, folder: Folder, layout: Layout) -> list[Unit]:
    """Every unit, in the order of the source.

    Raises:
        UnsupportedError: a format that the layout cannot hold, or a family that no engine reads per expert.
        CheckpointError: a block-FP8 weight without its scale.
    """
    layout.require(plan)
    made: list[Unit] = []
    paired: set[str] = set()
    by_weight = _sources(plan)
    for entry, info in zip(plan.entries, plan.anatomy.tensors, strict=True):
        _check_scale_name(entry.name, folder)
        if entry.format == "dropped":
            continue
        if not entry.quantized:
            made.append(_kept(folder.tensors[entry.name], folder))
        elif entry.name not in paired:
            made.extend(_quantized(entry, info, plan.anatomy, folder, layout, by_weight, paired))
    return made


def _check_scale_name(name: str, folder: Folder) -> None:
    """A scale belongs to a low-precision weight beside it: alone, or beside a plain one, it says that something is missing or wrong."""
    suffix = next((s for s in _SCALES if name.endswith(s)), None)
    if suffix is None:
        return
    weight = f"{name.removesuffix(suffix)}{'' if suffix == '_scale_inv' else '.weight'}"
    found = folder.tensors.get(weight)
    if found is None or found.dtype not in _LOW:
        state = "missing" if found is None else f"{found.dtype}, which has no scale"
        raise CheckpointError(
            f"{name}: is the scale of a quantized weight, and {weight} is {state}; the checkpoint is damaged, download it again"
        )


def _sources(plan: Plan) -> dict[str, str]:
    """Quantized weight -> source tensor that holds it."""
    return {weight: entry.name for entry in plan for weight in entry.tensors}


def _kept(header: TensorHeader, folder: Folder) -> Unit:
    if header.dtype != torch.float8_e4m3fn:
        return Copy(header, (Stored(header.name, header.dtype, header.shape),))
    slab = _slab(header, 0, _matrix(header), folder)
    return Expand(slab, (Stored(header.name, torch.bfloat16, header.shape),))


def _matrix(header: TensorHeader) -> tuple[int, int]:
    if len(header.shape) != 2:
        raise CheckpointError(f"{header.name}: shape {list(header.shape)} is not a matrix; this source is not known")
    return header.shape[0], header.shape[1]


def _slab(
    header: TensorHeader, start: int, shape: tuple[int, int], folder: Folder, *, transposed: bool = False
) -> Slab:
    scale = None
    if header.dtype == torch.float8_e4m3fn:
        scale = folder.tensors.get(f"{header.name}_scale_inv")
        if scale is None:
            raise CheckpointError(f"{header.name}: FP8 without {header.name}_scale_inv; the checkpoint is incomplete")
        tiles = (-(-header.shape[-2] // BLOCK), -(-header.shape[-1] // BLOCK))
        if scale.dtype not in _SCALE_DTYPES or scale.shape != tiles:
            raise CheckpointError(
                f"{scale.name}: {str(scale.dtype).removeprefix('torch.')} {list(scale.shape)}, expected floats {list(tiles)}, one a "
                f"tile of {BLOCK} x {BLOCK} of {header.name} {list(header.shape)}"
            )
    return Slab(header.name, header.file, header.start + start, header.dtype, shape, transposed, scale)


def _quantized(
    entry: PlanEntry,
    info: TensorInfo,
    anatomy: Anatomy,
    folder: Folder,
    layout: Layout,
    by_weight: Mapping[str, str],
    paired: set[str],
) -> Iterator[Unit]:
    header, experts = folder.tensors[entry.name], anatomy.layout_of(info)
    if info.expert is None or experts is None:
        yield _alone(header, entry, folder, layout)
        return
    if experts.unreadable:
        raise UnsupportedError(
            f"{entry.name}: {experts.unreadable} ({anatomy.family}); convert it live with swapq.convert to train it"
        )
    if info.expert.fused:
        yield from _stacked(entry, header, experts, folder, layout)
        return
    expert = info.expert.expert or 0
    if info.expert.projection == "down" or not experts.gated:
        yield _alone(header, entry, folder, layout)
        return
    pair = [by_weight[experts.hub_weight(expert, side)] for side in ("gate", "up")]
    paired.update(pair)
    slabs = [_slab(h, 0, _matrix(h), folder) for h in (folder.tensors[name] for name in pair)]
    weights = [(experts.hub_weight(expert, "gate"), 0, 0), (experts.hub_weight(expert, "up"), 1, 0)]
    yield _unit(slabs, weights, entry.format, layout)


def _alone(header: TensorHeader, entry: PlanEntry, folder: Folder, layout: Layout) -> Unit:
    return _unit([_slab(header, 0, _matrix(header), folder)], [(entry.tensors[0], 0, 0)], entry.format, layout)


def _stacked(
    entry: PlanEntry, header: TensorHeader, experts: ExpertsLayout, folder: Folder, layout: Layout
) -> Iterator[Unit]:
    """One unit per expert of a 3-D tensor."""
    _, rows, columns = header.shape
    each = rows * columns * header.dtype.itemsize
    sides = len(entry.tensors) // experts.num_experts
    for expert in range(experts.num_experts):
        slab = _slab(header, expert * each, (rows, columns), folder, transposed=experts.transposed)
        weights = entry.tensors[expert * sides : (expert + 1) * sides]
        yield _unit([slab], [(w, 0, i * experts.intermediate) for i, w in enumerate(weights)], entry.format, layout)


def _unit(slabs: list[Slab], weights: list[tuple[str, int, int]], fmt: str, layout: Layout) -> Quantize:
    targets, outputs = [], []
    for weight, index, first in weights:
        slab = slabs[index]
        n, k = slab.shape[::-1] if slab.transposed else slab.shape
        sharing = sum(1 for _, other, _ in weights if other == index)
        rows = n // sharing
        targets.append(Target(weight, fmt, index, first, rows, rows * k if formats.get(fmt).packs else 0))
        outputs += layout.stored(weight, fmt, (rows, k))
    return Quantize(tuple(slabs), tuple(targets), tuple(outputs))
