"""TRL's vLLM backend with an engine that starts from the trainer's own bytes and is updated by verified syncs."""

import logging
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration as _VLLMGeneration
from trl.generation.vllm_generation import empty_cache
from trl.trainer.utils import ensure_master_addr_port

from swapq.checkpoint.export import export
from swapq.convert import is_converted, recipe_of
from swapq.diagnostics import audit
from swapq.diagnostics.audit import running as runs_in
from swapq.digest import Digests
from swapq.errors import SyncError, UnsupportedError
from swapq_trl import server
from swapq_trl.adapters import Merge, check_adapters, merged
from swapq_trl.report import SyncReport
from swapq_trl.selftest import Scores, fixed_scores, require_equal
from swapq_trl.sending import NamedTensors, Sending, as_packed, as_sent, plain_model, sent_tensors, with_digests

__all__ = ["VLLMGeneration", "is_sharded"]

logger = logging.getLogger(__name__)

# what makes the engine the trainer's policy, and what the trainer's own arguments say
_FIXED_OPTIONS = {
    "model",
    "dtype",
    "quantization",
    "load_format",
    "logprobs_mode",
    "distributed_executor_backend",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "enable_sleep_mode",
    "model_impl",
    "seed",
    "trust_remote_code",
}


class VLLMGeneration(_VLLMGeneration):
    """TRL's `VLLMGeneration` whose engine provably serves the trainer's policy.

    - Colocate mode builds the engine from an export of the converted model, and updates it as one transaction. Quantized experts go
      over stacked, one tensor per part and layer.
    - Server mode streams codes and scales under checkpoint names, expert by expert.
    - The first sync is a self-test: the same weights sent again must give the same log-probabilities.
    - After a sync that failed nothing is generated: the engine may hold half an update.

    Args:
        approximate_lora: allow LoRA on linears that the recipe quantizes; see `docs/trl.md`.
        engine_options: more arguments of `vllm.LLM` for the colocated engine, e.g. `{"enforce_eager": True}`.

    The other arguments are TRL's.
    """

    def __init__(
        self,
        model: Any,
        accelerator: Any,
        *args: Any,
        approximate_lora: bool = False,
        engine_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        import swapq_vllm  # noqa: F401  # says what to install where vLLM is missing; a server's client needs it too

        self.engine_options = dict(engine_options or {})
        fixed = sorted(_FIXED_OPTIONS & set(self.engine_options))
        if fixed:
            raise UnsupportedError(
                f"engine_options: {', '.join(fixed)} cannot be chosen, since the engine would then not be the trainer's "
                "policy or not know its place among the processes; leave them out"
            )
        self.last_report: SyncReport | None = None
        self.last_logprobs: list[list[float]] | None = None
        self._failed: str | None = None
        self._tested = False
        self._sent = Digests()
        self._start: tuple[Scores, dict[str, str]] | None = None
        self._stacked: frozenset[str] = frozenset()
        self._open: Sending | None = None
        if is_converted(model):
            recipe_of(model).require_rollout("an engine samples for the trainer")
            check_adapters(model, approximate=approximate_lora, sharded=is_sharded(accelerator))
        super().__init__(model, accelerator, *args, **kwargs)

    # Building the engine

    def _init_vllm(self) -> None:
        if self.mode != "colocate":
            super()._init_vllm()
            if self.accelerator.is_main_process:
                if is_converted(self.model):
                    _require_same_formats(plain_model(self.model), server.running(self.vllm_client))
                server.require_forgetting(self.vllm_client)
            return
        if self.accelerator.num_processes % self.tensor_parallel_size != 0:
            raise UnsupportedError(
                f"vllm_tensor_parallel_size: {self.tensor_parallel_size} does not divide the number of processes, "
                f"{self.accelerator.num_processes}"
            )
        if self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            groups = [list(range(start, start + size)) for start in range(0, self.accelerator.num_processes, size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        # vLLM's external launcher reads its place in the world from the environment
        os.environ["RANK"] = str(self.accelerator.process_index)
        os.environ["LOCAL_RANK"] = str(self.accelerator.local_process_index)
        os.environ["WORLD_SIZE"] = str(self.accelerator.num_processes)
        if self.accelerator.num_processes == 1 and not torch.distributed.is_initialized():
            # Accelerate leaves 29500 on a CPU, where two jobs on one machine would meet; nobody joins a world of one
            os.environ["MASTER_PORT"] = _free_port()
        ensure_master_addr_port()
        with tempfile.TemporaryDirectory(prefix="swapq-engine-") as folder:
            self.llm = self._build_engine(self._engine_source(Path(folder)))
            from swapq_vllm.receiver import running, served_tensors, stacked_experts

            _require_same_formats(plain_model(self.model), running(self.llm))
            # read while the folder exists: the engine looks its tensors' names up there
            held = as_sent(
                plain_model(self.model), served_tensors(self.llm, stacked=True), self._engine_dtype(), fresh=False
            )
            digests = Digests()
            deque(with_digests(held, digests), maxlen=0)
            self._start = (fixed_scores(self.llm), digests.result())
            self._stacked = stacked_experts(self.llm) if is_converted(self.model) else frozenset()
            self.accelerator.wait_for_everyone()
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        self._llm_weights_sleeping = self.enable_sleep_mode
        # the main process loads weights alone in some launchers; without this, others run into their next collective
        self.accelerator.wait_for_everyone()

    def _engine_source(self, folder: Path) -> str:
        """What the engine is built from: an export of the converted model, or what TRL would use."""
        name = getattr(plain_model(self.model), "name_or_path", "")
        if not is_converted(self.model) and name:
            return name
        shared = [str(folder)]
        broadcast_object_list(shared, from_process=0)
        if self.accelerator.is_main_process:
            with merged(self.model) as model:
                if is_converted(model):
                    export(model, folder)
                else:
                    model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
        if not (Path(shared[0]) / "config.json").is_file():
            raise UnsupportedError(
                f"{shared[0]}: the main process wrote the engine's weights there, but process "
                f"{self.accelerator.process_index} cannot see them; set TMPDIR to a folder that all nodes share"
            )
        return shared[0]

    def _build_engine(self, source: str) -> Any:
        from vllm import LLM

        options = {
            "max_num_batched_tokens": 4096,
            **self.engine_options,
        }  # TRL's value; vLLM's own misleads its profiler
        return LLM(
            model=source,
            # a converted model computes in BF16 whatever the dtype of its masters
            dtype="bfloat16" if is_converted(self.model) else "auto",
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            enable_sleep_mode=self.enable_sleep_mode,
            model_impl=self.model_impl,
            distributed_executor_backend="external_launcher",
            seed=self.accelerator.process_index // self.tensor_parallel_size,
            logprobs_mode="processed_logprobs",  # of the policy that samples, after temperature and top-p
            trust_remote_code=self.trust_remote_code,
            **options,
        )

    # Syncing

    def _iter_named_params(self) -> NamedTensors:
        """Name and tensor of everything the engine must hold. Every process must walk it to its end."""
        self._sent = Digests()
        return as_packed(self._sending(with_digests(self._tensors(None), self._sent)))

    def _tensors(self, merge: Merge | None) -> NamedTensors:
        flattened = super()._iter_named_params if self._dist.is_zero3 or self._dist.fsdp_version == 1 else None
        return sent_tensors(
            self.model,
            self._engine_dtype(),
            flattened=flattened,
            merge=merge,
            stacked=self._stacked,
            fresh=self.mode != "colocate",
        )

    def _sending(self, tensors: Sending) -> Sending:
        """`tensors`, which the end of the sync closes."""
        self._open = tensors
        return tensors

    def _engine_dtype(self) -> torch.dtype:
        if self.mode == "colocate":
            return _torch_dtype(self.llm.llm_engine.model_config.dtype)
        return torch.bfloat16 if is_converted(self.model) else _torch_dtype(self.model.config.dtype)

    def sync_weights(self) -> SyncReport:
        """Send the model's weights to the engine as one verified update.

        Raises:
            SyncError: the engine does not hold exactly the weights that were sent. Nothing can be generated afterwards.
        """
        self._failed = "a weight sync did not finish"
        try:
            report = self._send_to_server() if self.mode == "server" else self._send_to_engine()
        except Exception as error:
            self._failed = str(error)
            raise
        finally:
            if self._open is not None:
                self._open.close()  # a walk that stopped half way has adapters merged and their modules out of the model
        self._failed = None
        self.last_report = report
        return report

    def _send_to_engine(self) -> SyncReport:
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            empty_cache()
            self.llm.wake_up(tags=["weights"])
            self._llm_weights_sleeping = False
        report, digests = self._update()
        if not self._tested:
            self._self_test(digests)
            self._tested = True
        return report

    def _update(self) -> tuple[SyncReport, Digests]:
        """One transaction, and the digests of what was sent."""
        from swapq_vllm.receiver import apply_update

        start = time.perf_counter()
        merge, digests = Merge(), Digests()
        done = apply_update(self.llm, self._sending(with_digests(self._tensors(merge), digests)), digests)
        seconds = time.perf_counter() - start
        if merge.changed_fraction is not None:
            logger.warning(
                "the adapters change %.2f %% of the codes of the quantized linears they adapt; the rest of their effect "
                "is not served",
                100 * merge.changed_fraction,
            )
        return SyncReport(seconds, done.bytes, done.tensors, done.verified, merge.changed_fraction), digests

    def _self_test(self, digests: Mapping[str, str]) -> None:
        """What was sent again must not change the engine, and neither the first update if it is what the engine started with."""
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        scores = fixed_scores(self.llm)
        if self._start is not None:
            start_scores, start_digests = self._start
            if start_digests and all(digests.get(name) == value for name, value in start_digests.items()):
                require_equal(start_scores, scores, "the weights the engine was built from were sent to it")
            self._start = None  # not before it passed: sent again, the same weights must not pass unseen
        self._update()
        require_equal(scores, fixed_scores(self.llm), "the same weights were sent twice")

    def _send_to_server(self) -> SyncReport:
        start = time.perf_counter()
        verified = 0
        if self.accelerator.is_main_process:
            with server.resting(self.vllm_client):
                super().sync_weights()
                verified = self._verify_server()
        else:
            super().sync_weights()
        metadata: Any = self._weight_metadata  # TRL's list of (name, dtype, shape), the same at every sync
        sizes = [_torch_dtype(dtype).itemsize * torch.Size(shape).numel() for _, dtype, shape in metadata]
        return SyncReport(time.perf_counter() - start, sum(sizes), len(sizes), verified)

    def _verify_server(self) -> int:
        """Tensors that every worker of the server has compared with the digests of what was sent."""
        try:
            return server.verified(self.vllm_client, self._sent)
        except server.CannotTell:
            if is_converted(self.model):
                raise
            return 0  # any vLLM server may serve an unquantized model; without the extension nothing is compared

    # Generating

    def generate(self, *args: Any, **kwargs: Any) -> tuple:
        """Generate as TRL does; refused while the engine's weights are not known to be the trainer's."""
        if self._failed is not None:
            raise SyncError(f"nothing is generated, the engine's weights are not the trainer's: {self._failed}")
        result = super().generate(*args, **kwargs)
        logprobs = result[2]
        self.last_logprobs = (
            None if logprobs is None else [[_number(token[0]) for token in sequence] for sequence in logprobs]
        )
        return result


def _free_port() -> str:
    """A port of the system's choice. TRL's own looks at 29500 first, where two jobs that start together both find it free."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return str(probe.getsockname()[1])


def _require_same_formats(model: Any, engine: Mapping[str, tuple[str, str]]) -> None:
    """Digests cannot see rows that one side alone quantizes; the layers that compute can tell."""
    different = audit(runs_in(model, served=True), engine) if is_converted(model) else {}
    if different:
        name, (ours, theirs) = next(iter(different.items()))
        raise SyncError(
            f"{name} runs as {ours} in the trainer and as {theirs} in the engine ({len(different)} such weights); start the engine "
            "from an export of this model"
        )


def _torch_dtype(dtype: Any) -> torch.dtype:
    """A dtype given as one, by name, or not at all (bfloat16)."""
    return dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype or "bfloat16")


def _number(value: float | None) -> float:
    """vLLM's missing log-probabilities arrive as None."""
    return float("nan") if value is None else value


def is_sharded(accelerator: Any) -> bool:
    """Whether parameters will be sharded by FSDP or ZeRO-3."""
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    zero3 = deepspeed is not None and deepspeed.zero_stage == 3
    return zero3 or getattr(accelerator.state, "fsdp_plugin", None) is not None
