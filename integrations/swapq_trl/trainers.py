"""Drop-in TRL trainers: the engine starts from the trainer's bytes, every sync is verified, the mismatch is logged."""

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOTrainer as _GRPOTrainer
from trl import RLOOTrainer as _RLOOTrainer

from swapq.convert import convert, is_converted, recipe_of
from swapq.diagnostics.mismatch import MismatchSums
from swapq.diagnostics.reference import ReferenceKL, completion_logps
from swapq.diagnostics.spikes import SpikeMeter
from swapq.errors import SyncError, UnsupportedError
from swapq_trl.generation import VLLMGeneration, is_sharded
from swapq_trl.replay import RoutingReplay
from swapq_trl.report import SyncReport
from swapq_trl.resuming import Resuming
from swapq_trl.rounding import round_as_served

__all__ = ["GRPOTrainer", "RLOOTrainer"]

logger = logging.getLogger(__name__)

_Base: Any = object  # in use: the TRL trainer that follows in the method resolution order


class _SwapqTrainer(_Base):
    """What both trainers add to TRL's: their own `VLLMGeneration`, `sync_weights` and the `swapq/` metrics.

    TRL constructs its `VLLMGeneration` by name inside `__init__`, where nothing can be injected. So the TRL part of the
    construction runs as if without vLLM, and the engine is built right after it, from the same arguments.
    """

    model: Any
    vllm_generation: Any
    _generation_class: type[VLLMGeneration] = VLLMGeneration

    def __init__(
        self,
        *args: Any,
        approximate_lora: bool = False,
        engine_options: Mapping[str, Any] | None = None,
        reference_model: Any = None,
        **kwargs: Any,
    ) -> None:
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        config = bound.arguments.get("args")
        self._first_logps: list[torch.Tensor] | None = None
        self._spikes = SpikeMeter()
        self._reference = reference_model
        self._engine_arguments: dict[str, Any] = {
            "approximate_lora": approximate_lora,
            "engine_options": engine_options,
        }
        if config is None or not config.use_vllm:
            super().__init__(*args, **kwargs)
            self._match_policies()
            return
        self._check_config(config)
        # the options below are meant for vLLM; without it TRL would hand them to transformers
        generation_kwargs = config.generation_kwargs
        config.use_vllm, config.generation_kwargs = False, None
        try:
            super().__init__(*args, **kwargs)
        finally:
            config.use_vllm, config.generation_kwargs = True, generation_kwargs
        self._match_policies()
        self.use_vllm = True
        self.vllm_generation = self._build_generation(generation_kwargs)
        self._last_loaded_step = -1  # TRL's mark of the step whose weights the engine holds

    def _match_policies(self) -> None:
        """What a converted model needs for trainer, engine and reference to be policies of one recipe."""
        if self._reference is not None:
            self._reference = self._reference.to(self.accelerator.device).eval().requires_grad_(False)
        if not is_converted(self.model):
            return
        if not recipe_of(self.model).matched:
            logger.warning("%s; the mismatch is logged as swapq/mismatch_*", recipe_of(self.model).policies)
        reference = getattr(self, "ref_model", None)
        if is_sharded(self.accelerator):
            if reference is not None and not is_converted(reference):
                logger.warning(
                    "the reference model is sharded already and stays unconverted: the KL term compares a quantized policy "
                    "with a BF16 reference"
                )
            return  # a sharded model's mixed precision rounds every parameter itself
        models = [self.model]
        if reference is not None:  # TRL loads it afresh, from the unconverted folder
            reference = self.accelerator.unwrap_model(reference)
            if not is_converted(reference):
                convert(reference, recipe_of(self.model))
            models.append(reference)
        if self.accelerator.mixed_precision == "bf16":
            for model in models:
                round_as_served(model)

    def _check_config(self, config: Any) -> None:
        """Checks that TRL makes only on its vLLM path."""

    def _build_generation(self, generation_kwargs: dict[str, Any] | None) -> VLLMGeneration:
        """The engine, from the arguments TRL would have given it."""
        config = self.args
        return self._generation_class(
            model=self.model,
            accelerator=self.accelerator,
            processing_class=self.processing_class,
            mode=config.vllm_mode,
            structured_outputs_regex=config.vllm_structured_outputs_regex,
            server_base_url=config.vllm_server_base_url,
            server_host=config.vllm_server_host,
            server_port=config.vllm_server_port,
            group_port=config.vllm_group_port,
            server_timeout=config.vllm_server_timeout,
            tensor_parallel_size=config.vllm_tensor_parallel_size,
            gpu_memory_utilization=config.vllm_gpu_memory_utilization,
            max_model_length=config.vllm_max_model_length,
            max_num_seqs=config.per_device_train_batch_size
            * config.vllm_tensor_parallel_size
            * config.steps_per_generation,
            enable_sleep_mode=config.vllm_enable_sleep_mode,
            model_impl=config.vllm_model_impl,
            trust_remote_code=config.trust_remote_code,
            repetition_penalty=self.repetition_penalty,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_completion_length=self.max_completion_length,
            logprobs=0,  # the sampled token's log-probability, for the correction and the mismatch
            generation_kwargs=generation_kwargs,
            **self._engine_arguments,
        )

    def sync_weights(self) -> SyncReport:
        """Send the trainer's weights to the engine now, as one verified update.

        Returns:
            Seconds, bytes, tensors sent, and tensors whose bytes were compared on both sides.

        Raises:
            SyncError: the engine does not hold exactly the trainer's weights, or there is no engine.
        """
        if not self.use_vllm:
            raise SyncError("there is no engine to send weights to: the trainer was built with `use_vllm=False`")
        report = self.vllm_generation.sync_weights()
        self._last_loaded_step = self.state.global_step
        return report

    # Metrics

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._first_logps = []
        try:
            output = super()._generate_and_score_completions(inputs)
            trainer_logps = self._policy_logps(output)
        finally:
            self._first_logps = None
        if self.use_vllm:
            mode = "train" if self.model.training else "eval"
            report = self.vllm_generation.last_report  # of the sync that gave the engine the weights it sampled with
            for name, value in report.metrics().items() if report else ():
                self._metrics[mode][name].append(value)
            if is_converted(self.model):
                self._metrics[mode]["swapq/one_policy"].append(float(recipe_of(self.model).matched))
            rollout_logps = self._rollout_logps(output)
            if trainer_logps is not None and rollout_logps is not None:
                self._log_mismatch(mode, trainer_logps, rollout_logps, output)
        if self._reference is not None:
            self._log_reference("train" if self.model.training else "eval", trainer_logps, output)
        return output

    def _log_reference(self, mode: str, policy_logps: torch.Tensor | None, output: dict[str, Any]) -> None:
        """KL against the BF16 model given as `reference_model`: a diagnostic, which no loss sees."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        keep, batch = output["completion_ids"].size(1), self.args.per_device_train_batch_size
        if policy_logps is None:
            with torch.no_grad():
                policy_logps = self._get_per_token_logps_and_entropies(self.model, ids, attention, keep, batch)[0]
        reference_logps = completion_logps(
            self._reference, ids, attention, keep, temperature=self.temperature, batch_size=batch
        )
        sums = self._summed(MismatchSums.of(reference_logps, policy_logps, self._counted(output)))
        for name, value in ReferenceKL.of(sums).to_dict("swapq/reference_kl_").items():
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL does, with the gradient norm over its recent median: a spike is several times the usual."""
        if "grad_norm" in logs:
            ratio = self._spikes.ratio(float(logs["grad_norm"]))
            if ratio is not None:
                logs["swapq/grad_norm_ratio"] = ratio
            if self._spikes.is_spike(ratio):
                logger.warning(
                    "step %d: the gradient norm %.3g is %.1f times its recent median",
                    self.state.global_step,
                    logs["grad_norm"],
                    ratio,
                )
        super().log(logs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        if self._first_logps is not None and not self._first_logps:
            self._first_logps.append(result[0].detach())
        return result

    def _policy_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        """The trainer's log-probabilities of the sampled tokens under the weights they were sampled with."""
        raise NotImplementedError

    def _rollout_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        """The engine's log-probabilities of the sampled tokens."""
        raise NotImplementedError

    def _correction(self) -> dict[str, Any]:
        """Mode and bounds of the importance-sampling correction, as `MismatchSums.of` takes them."""
        return {}

    def _log_mismatch(
        self, mode: str, trainer_logps: torch.Tensor, rollout_logps: torch.Tensor, output: dict[str, Any]
    ) -> None:
        sums = MismatchSums.of(trainer_logps, rollout_logps, self._counted(output), **self._correction())
        figures = self._summed(sums).result()
        for name, value in figures.to_dict("swapq/mismatch_").items():
            self._metrics[mode][name].append(value)

    @staticmethod
    def _counted(output: dict[str, Any]) -> torch.Tensor:
        """The completion tokens that the model sampled: those of tools do not count."""
        mask = output["completion_mask"]
        return mask if output.get("tool_mask") is None else mask * output["tool_mask"]

    def _summed(self, sums: MismatchSums) -> MismatchSums:
        """The sums of all processes."""
        gather = self.accelerator.gather
        return sums.reduced(lambda x: gather(x.unsqueeze(0)).sum(dim=0), lambda x: gather(x.unsqueeze(0)).max())


class GRPOTrainer(RoutingReplay, Resuming, _SwapqTrainer, _GRPOTrainer):
    """TRL's `GRPOTrainer` with a rollout engine that serves the trainer's own quantized policy.

    Same arguments as TRL's, and `approximate_lora` and `engine_options` of `VLLMGeneration`. `reference_model`, a BF16 model, adds
    the KL of the policy against it to the metrics; it is never part of the loss. `replay_routing=True` computes the policy with the
    experts that the engine chose (`docs/trl.md`). A model converted with `swapq.convert` is rolled out from the same codes and scales it
    is trained with; an unconverted one is rolled out as TRL does, with a weight sync that works on a CPU too.
    """

    _tag_names = [*_GRPOTrainer._tag_names, "swapq"]  # noqa: RUF012  as TRL declares it

    def _check_config(self, config: Any) -> None:
        super()._check_config(config)
        corrected = config.vllm_importance_sampling_correction
        if config.loss_type == "vespo" and corrected and not config.vllm_importance_sampling_mode.startswith("token"):
            raise UnsupportedError(
                "loss_type 'vespo' needs vllm_importance_sampling_mode 'token_truncate' or 'token_mask'; got "
                f"{config.vllm_importance_sampling_mode!r}"
            )

    def _build_generation(self, generation_kwargs: dict[str, Any] | None) -> VLLMGeneration:
        generation = super()._build_generation(generation_kwargs)
        if self.vllm_mode == "server" and self.vllm_importance_sampling_correction and self.accelerator.is_main_process:
            logprobs_mode = generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
            if logprobs_mode != "processed_logprobs":
                logger.warning(
                    "the vLLM server runs with --logprobs-mode %s, which biases the importance-sampling correction and "
                    "every mismatch figure; restart it with --logprobs-mode processed_logprobs",
                    logprobs_mode,
                )
        return generation

    def _correction(self) -> dict[str, Any]:
        if not self.vllm_importance_sampling_correction:
            return {}
        return {
            "mode": self.vllm_importance_sampling_mode,
            "clip_min": self.vllm_importance_sampling_clip_min,
            "clip_max": self.vllm_importance_sampling_clip_max,
        }

    def _policy_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        return output.get("old_per_token_logps")

    def _rollout_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        return output.get("sampling_per_token_logps")

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        # without the correction TRL scores the rollouts only here, in the first pass over them
        rollout_logps = inputs.get("sampling_per_token_logps")
        if not self.use_vllm or rollout_logps is None or "old_per_token_logps" in inputs:
            return super()._compute_loss(model, inputs)
        self._first_logps = []
        try:
            loss = super()._compute_loss(model, inputs)
            self._log_mismatch("train" if model.training else "eval", self._first_logps[0], rollout_logps, inputs)
        finally:
            self._first_logps = None
        return loss


class RLOOTrainer(Resuming, _SwapqTrainer, _RLOOTrainer):
    """TRL's `RLOOTrainer` with a rollout engine that serves the trainer's own quantized policy.

    Same arguments as TRL's, and those of :class:`GRPOTrainer` but `replay_routing`.
    """

    _tag_names = [*_RLOOTrainer._tag_names, "swapq"]  # noqa: RUF012  as TRL declares it

    def _policy_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        # RLOO keeps only sums per sequence; the policy is the first model it scores
        return self._first_logps[0] if self._first_logps else None

    def _rollout_logps(self, output: dict[str, Any]) -> torch.Tensor | None:
        logps = self.vllm_generation.last_logprobs
        if logps is None:
            return None
        width = output["completion_mask"].size(1)
        padded = [row + [0.0] * (width - len(row)) for row in logps]
        return torch.tensor(padded, dtype=torch.float32, device=output["completion_mask"].device)
