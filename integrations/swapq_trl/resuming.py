"""Resuming: every tensor of the model gets the checkpoint's value, or the run stops with names.

Transformers' Trainer loads a checkpoint by the model's own names and goes on when they are missing. Experts are saved one by one and held
fused, so it would train on with those of the start model. Optimizer, scheduler and random states are restored by transformers.
"""

import logging
from pathlib import Path
from typing import Any

from swapq.checkpoint.restore import load_checkpoint
from swapq.errors import CheckpointError, UnsupportedError
from swapq.headers import INDEX_NAME, SINGLE_NAME, read_json
from swapq_trl.adapters import has_added_adapters, is_adapted

__all__ = ["Resuming"]

logger = logging.getLogger(__name__)

_Base: Any = object  # in use: the trainer that follows in the method resolution order
#: whole models; the last two are pickles, which are refused by name
_WHOLE = (SINGLE_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
#: adapters that PEFT saved
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


class Resuming(_Base):
    """Loads checkpoints of whole models with `swapq.load_checkpoint`; those of adapters, FSDP and DeepSpeed as transformers does."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._last_loaded_step = -1  # whatever the engine holds, it is not this
        self._refuse_added()
        if not self._loads_whole(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self._warn_of_other_version(Path(resume_from_checkpoint))
        load_checkpoint(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._last_loaded_step = -1
        best = self.state.best_model_checkpoint
        self._refuse_added()
        self._require_best(best)
        if not self._loads_whole(best):
            super()._load_best_model()
            return
        logger.info("loading the best model from %s (score: %s)", best, self.state.best_metric)
        load_checkpoint(self.model, best)

    def _refuse_added(self) -> None:
        """Checkpoints of a model with transformers' own adapters hold these alone, and its Trainer cannot load them."""
        if has_added_adapters(self.model):
            raise UnsupportedError(
                "the model carries adapters that `add_adapter` put into it, whose checkpoints the Trainer cannot load back; give the "
                "trainer `peft_config` and a model without adapters"
            )

    def _require_best(self, folder: str) -> None:
        """Transformers only warns when the best model is not there, and the run ends with the last one in its place."""
        path = Path(folder)
        sharded = (
            self.is_fsdp_enabled or self.is_deepspeed_enabled
        )  # which have files of their own, and say what they miss
        names = _ADAPTERS if is_adapted(self.model) else _WHOLE
        if path.is_dir() and (sharded or any((path / name).is_file() for name in names)):
            return
        what = f"holds none of {', '.join(names)}" if path.is_dir() else "is no longer there"
        raise CheckpointError(
            f"the best model (step {self.state.best_global_step}, {self.args.metric_for_best_model} {self.state.best_metric}) cannot be "
            f"loaded at the end: {folder} {what}. The trainer holds the last model, not the best; keep the folder of the best checkpoint, "
            "and where several nodes train, on each of them (save_on_each_node)"
        )

    def _loads_whole(self, folder: str) -> bool:
        """Whether `folder` is to hold a whole model, for a model that is neither sharded nor adapted; what it lacks is said by name."""
        if is_adapted(self.model) or self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        if any(Path(folder).glob("pytorch_model_fsdp*")):
            return False  # transformers says that FSDP must read it
        return any((Path(folder) / name).is_file() for name in (*_WHOLE, *_ADAPTERS, "trainer_state.json"))

    @staticmethod
    def _warn_of_other_version(folder: Path) -> None:
        """As transformers does: its optimizer and scheduler states come from that version too."""
        from transformers import __version__

        config = folder / "config.json"
        version = read_json(config).get("transformers_version") if config.is_file() else None
        if version not in (None, __version__):
            logger.warning(
                "%s was saved by transformers %s, this is %s: resuming may not go on as that run would have",
                folder,
                version,
                __version__,
            )
