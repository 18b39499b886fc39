"""``swapq.export``: the quantized checkpoint of a live model, which vLLM and transformers open by its config alone."""

import copy
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import track
from torch import Tensor, nn
from transformers import PreTrainedModel

from swapq import formats
from swapq.checkpoint import layouts
from swapq.checkpoint.layouts import Layout
from swapq.checkpoint.ranks import Ranks
from swapq.checkpoint.record import (
    EXPORT,
    LOCK_NAME,
    RECORD_NAME,
    SCRATCH_NAME,
    Progress,
    exported,
    read_record,
    strangers,
)
from swapq.checkpoint.tensors import base_model, checkpoint_tensors, quantization_config
from swapq.checkpoint.writer import ShardWriter, write_json
from swapq.convert import plan_of
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import SHARD_NAME

__all__ = ["export"]

#: what goes before new shards come, the config first
_REPLACES = ("config.json", "hf_quant_config.json", RECORD_NAME)
#: what comes beside shards and configs
_WRITES = ("generation_config.json",)


def export(
    model: nn.Module, directory: "str | os.PathLike[str]", *, layout: str = "swapq", max_shard_size: "int | str" = "5GB"
) -> None:
    """Write the quantized checkpoint of a converted model: config, generation config, safetensors shards and their record.

    Quantized weights are written as codes and scales per expert; everything else keeps its dtype. The config comes after all that a
    loader reads, so a folder without it is one that was not finished; an export that fails leaves an earlier one as it was. Save the
    tokenizer beside it with its own ``save_pretrained``.

    In a process group rank 0 writes. Every rank calls this for a sharded model (FSDP2), gathers, and returns when the folder is whole or
    raises when it is not; of an unsharded one (DDP) the call of another rank does nothing, so it does not matter who calls.

    Tensors that are not quantized keep their dtype, so FP32 masters give FP32 tensors beside the codes. Engines round them to BF16 when
    they load; ``export(model.to(torch.bfloat16), ...)`` writes them so. The codes are the same bytes either way (contract section 0).

    Args:
        model: converted by ``swapq.convert`` (trainable or not), possibly wrapped in DDP, FSDP or ``torch.compile``.
        directory: made if missing; an earlier export in it is replaced.
        layout: one of :func:`swapq.checkpoint.layouts.names`. The folder holds the bytes that ``convert_checkpoint`` makes of the same
            weights. ``swapq.json`` comes with them: the recipe, and a hash of each shard and config for ``verify``.
        max_shard_size: bytes, or a string such as ``"5GB"``.

    Raises:
        RecipeError: a recipe that is not for rollouts.
        UnsupportedError: not converted, an unknown layout or one that cannot hold a format, PEFT adapters, or a family no engine reads
            per expert.
        FormatError: a master that is not finite, by name.
        CheckpointError: the directory is a file, or holds a checkpoint that is no export, such as the source of the model; or
            another rank failed.
    """
    target = layouts.get(layout)
    root, folder = base_model(model), Path(directory)
    if not isinstance(root, PreTrainedModel):
        raise UnsupportedError(f"export needs a transformers model, whose config it writes; got {type(root).__name__}")
    the_plan = plan_of(root)
    the_plan.recipe.require_rollout("export writes what engines serve")
    target.require(the_plan)
    described = quantization_config(root) if layout == "swapq" else target.quantization_config(the_plan)
    extra_files = target.extra_files(the_plan)
    ranks = Ranks.of(root)
    if not (ranks.writes or ranks.sharded):
        return

    def announce(planned: Mapping[str, int]) -> None:
        Progress.start_export(folder, layout, planned)  # a killed export is known as ours by it

    def write() -> None:
        gathered = checkpoint_tensors(root)
        try:
            tensors: Any = gathered if layout == "swapq" else _relaid(gathered, the_plan.quantized, target)
            with ShardWriter(folder, max_shard_size, replaces=_REPLACES, announce=announce) as writer:
                for name, tensor in track(tensors, description="Exporting", transient=True, disable=_small(root)):
                    writer.add(name, tensor)
            _finish(root, folder, described, extra_files)
            write_json(folder / RECORD_NAME, exported(the_plan.recipe, layout, folder))
            shutil.rmtree(folder / SCRATCH_NAME, ignore_errors=True)
        finally:
            _exhaust(gathered)  # after a failed write, too: the other ranks are still gathering

    ranks.attempt(lambda: _check_destination(folder) if ranks.writes else None)
    ranks.attempt(write if ranks.writes else lambda: _exhaust(checkpoint_tensors(root)))


def _exhaust(tensors: Iterable[Any]) -> None:
    for _ in tensors:
        pass


def _finish(
    root: PreTrainedModel, folder: Path, described: dict[str, Any], extra_files: Mapping[str, Mapping[str, Any]]
) -> None:
    """Everything beside the shards, the config last."""
    if root.can_generate() and root.generation_config is not None:
        root.generation_config.save_pretrained(folder)
    config = copy.deepcopy(root.config)
    config.architectures = [type(root).__name__.removeprefix("FSDP")]
    config.dtype = str(root.dtype).removeprefix("torch.")
    content = json.loads(config.to_json_string())  # which spells infinities as JSON can
    for part in (content, *(v for v in content.values() if isinstance(v, dict))):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
    content["quantization_config"] = described
    for name, extra in extra_files.items():
        write_json(folder / name, extra)
    write_json(folder / "config.json", content)


def _relaid(
    tensors: Iterable[tuple[str, Tensor]], quantized: Mapping[str, str], layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of layout ``swapq`` as another layout stores them, each weight when its last part has come."""
    ours = layouts.get("swapq")
    owners = {
        stored.name: weight
        for weight, fmt in quantized.items()
        for stored in ours.stored(weight, fmt, (formats.get(fmt).block,) * 2)
    }
    missing = Counter(owners.values())
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        weight = owners.get(name)
        if weight is None:
            yield name, tensor
            continue
        parts.setdefault(weight, {})[name] = tensor.cpu()
        missing[weight] -= 1
        if not missing[weight]:
            fmt = quantized[weight]
            yield from layout.encode(weight, fmt, ours.decode(weight, fmt, parts.pop(weight))).items()


def _check_destination(folder: Path) -> None:
    """Refuse to replace what is no export: the source's weights, which may be mapped or the only copy, most of all."""
    if folder.is_symlink() and not folder.exists():
        raise CheckpointError(
            f"{folder} is a link to {os.readlink(folder)}, which is not there; name a directory to export to"
        )
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name a directory to export to")
    if not folder.is_dir():
        return
    read_record(folder)  # refuses what is none
    scratch = folder / SCRATCH_NAME
    if os.path.lexists(scratch):
        progress = Progress.read(scratch)
        converting = (scratch / LOCK_NAME).exists() if progress is None else progress.fingerprint != EXPORT
        if converting or scratch.is_symlink():
            raise CheckpointError(
                f"{folder} holds an unfinished conversion ({SCRATCH_NAME}); finish it with its own command, or choose another directory"
            )
    foreign = [n for n in strangers(folder, _WRITES) if SHARD_NAME.fullmatch(n) or not n.endswith(".safetensors")]
    if "hf_quant_config.json" in foreign:
        raise CheckpointError(
            f"{folder}: hf_quant_config.json describes another checkpoint, and readers would believe it; choose another directory"
        )
    if foreign:
        raise CheckpointError(
            f"{folder} holds {foreign[0]}, which swapq did not write: a checkpoint or a part of one, perhaps the model's own source; an "
            "export never replaces one, choose another directory"
        )


def _small(model: nn.Module) -> bool:
    """Whether writing takes too short a time for a progress bar."""
    return sum(p.numel() for p in model.parameters()) < 200_000_000
