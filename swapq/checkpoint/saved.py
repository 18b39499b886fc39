"""The folder of a checkpoint that a training run saved: what is said when no whole model is there, or half of one."""

import os
from pathlib import Path

from swapq.errors import CheckpointError
from swapq.headers import INDEX_NAME, SINGLE_NAME, Folder, folder_path, read_folder

__all__ = ["read_saved"]

#: what a Trainer saves beside the model
_STATES = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "training_args.bin")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json")
#: pickles that are a whole model
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def read_saved(directory: str | os.PathLike[str]) -> Folder:
    """`read_folder`, with what to do about a run's own checkpoint, which cannot be downloaded again.

    Raises:
        CheckpointError: adapters alone; the states of a Trainer without the model; shards of FSDP or DeepSpeed; a run's output folder in
            place of one of its checkpoints; a file that the run did not write whole; and whatever `read_folder` refuses.
    """
    path = folder_path(directory)
    present = {entry.name for entry in path.iterdir()}
    states = [name for name in _STATES if name in present]
    whole = [name for name in (SINGLE_NAME, INDEX_NAME, *_PICKLED) if name in present]
    if not whole:
        _refuse_parts(path, present, states)
    try:
        return read_folder(path)
    except CheckpointError as error:
        said, download, _ = str(error).partition("; download")
        if not (states and download):
            raise
        raise CheckpointError(
            f"{path}: {said.removeprefix(f'{path}: ')}. A training run saved this folder ({states[0]} is there) and was likely stopped "
            "meanwhile: resume from an earlier checkpoint, or copy the folder again if it was copied"
        ) from None


def _refuse_parts(path: Path, present: set[str], states: list[str]) -> None:
    """Say which part of a model a folder holds that has no whole one."""
    if any(name.endswith(".safetensors") and not name.startswith("adapter_model") for name in present):
        return
    adapters = [name for name in _ADAPTERS if name in present]
    adapters += sorted(
        str(f.relative_to(path)) for f in path.glob("*/adapter_config.json")
    )  # PEFT's place for named ones
    if adapters:
        raise CheckpointError(
            f"{path}: holds adapters ({adapters[0]}) and no whole model; load them with PEFT (PeftModel.from_pretrained) on the model that "
            "they were trained on"
        )
    shards = sorted(name for name in present if name.startswith(("pytorch_model_fsdp", "global_step")))
    if shards:
        raise CheckpointError(
            f"{path}: holds the shards of FSDP or DeepSpeed ({shards[0]}) and no whole model; resume with the processes that saved it, "
            "or merge them first (accelerate merge-weights, zero_to_fp32.py)"
        )
    if states:
        raise CheckpointError(
            f"{path}: holds the states of a Trainer ({', '.join(states)}) and not its model: {SINGLE_NAME} is not there, nor {INDEX_NAME} "
            "with its shards; give a checkpoint that has them"
        )
    runs = sorted(f.parent.name for f in path.glob("checkpoint-*/trainer_state.json"))
    if runs:
        raise CheckpointError(
            f"{path}: holds checkpoints ({', '.join(runs)}) and is none; give the folder of one of them"
        )
