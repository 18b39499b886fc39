"""Replaying in the trainer the experts that the engine chose: vLLM returns them, TRL's batches carry them, the model's forward takes them.

Facts of vLLM 0.25.1 that this rests on (`enable_return_routed_experts`): a finished completion has ``routed_experts``, uint8 or uint16
``[tokens, hidden layers, top_k]``, one row for each token that went through the engine. These are all tokens of the prompt, cached ones
included, and of the completion, except the last, which was sampled and never fed back. Ids are those of the model, before any
redistribution among ranks. Layers without experts have zeros, and so has everything if the engine's kernels route by themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swapq.errors import SwapqError, UnsupportedError
from swapq.nn.replay import replay_routing
from swapq_trl.adapters import is_adapted
from swapq_trl.generation import VLLMGeneration

__all__ = ["RoutedGeneration", "RoutedSequence", "RoutingReplay", "padded"]

KEY = "routed_experts"  # in TRL's batches

_Base: Any = object  # in use: the trainer that follows in the method resolution order


@dataclass(frozen=True, slots=True)
class RoutedSequence:
    """One completion and what the engine's routers chose for it."""

    ids: list[int]
    """Prompt and completion."""
    prompt: int
    """Tokens of the prompt."""
    experts: Tensor
    """int8 or int16 ``[len(ids) - 1, layers, top_k]``; the last token was sampled and never routed."""

    @classmethod
    def of(cls, output: Any) -> "RoutedSequence":
        """From a ``RequestOutput`` of vLLM with one completion.

        Raises:
            UnsupportedError: the engine did not return experts, or its kernels do not say what they chose.
            SwapqError: experts for another number of tokens.
        """
        completion = output.outputs[0]
        prompt, sampled = list(output.prompt_token_ids), list(completion.token_ids)
        what, found = f"request {output.request_id}", completion.routed_experts
        if found is None:
            raise UnsupportedError(
                f"replay_routing: {what} came back without routed_experts although the engine was built with "
                "enable_return_routed_experts=True; this vLLM, or its model runner, does not return them"
            )
        rows = len(prompt) + len(sampled) - 1
        if found.ndim != 3 or found.shape[0] != rows:
            raise SwapqError(
                f"replay_routing: {what} has {len(prompt)} + {len(sampled)} tokens, so experts are expected as [{rows}, layers, top_k]; "
                f"the engine returned {list(found.shape)}"
            )
        experts = torch.from_numpy(found.astype("int32"))
        if not experts.any():
            raise UnsupportedError(
                f"replay_routing: the engine returned expert 0 for every token and layer of {what}: its kernels route by themselves "
                "and record nothing; choose another moe_backend in engine_options"
            )
        return cls(prompt + sampled, len(prompt), experts.to(torch.int8 if experts.max() < 128 else torch.int16))


def padded(sequences: Sequence[RoutedSequence], input_ids: Tensor, attention_mask: Tensor, completion: int) -> Tensor:
    """The experts of a batch as TRL lays its tokens out: prompts padded on the left, completions on the right.

    Args:
        input_ids: int64 ``[batch, prompt + completion]``, which must be the sequences' own tokens.
        attention_mask: the same shape; 0 where there is padding or a sequence that is masked as a whole.
        completion: padded length of the completions.

    Returns:
        int8 or int16 ``[batch, prompt + completion, layers, top_k]`` on the CPU; -1 where there is no record.

    Raises:
        SwapqError: the sequences are not the batch's.
    """
    batch, width = input_ids.shape
    if batch != len(sequences):
        raise SwapqError(
            f"replay_routing: the batch has {batch} sequences, the engine's last call generated {len(sequences)}"
        )
    rows = input_ids.tolist()
    wide = any(sequence.experts.dtype == torch.int16 for sequence in sequences)
    shape = (batch, width, *sequences[0].experts.shape[1:])
    experts = torch.full(shape, -1, dtype=torch.int16 if wide else torch.int8)
    for i, sequence in enumerate(sequences):
        start, length = width - completion - sequence.prompt, len(sequence.ids)
        if start < 0 or rows[i][start : start + length] != sequence.ids:
            raise SwapqError(
                f"replay_routing: row {i} of the batch does not hold the {length} tokens that the engine returned experts for; the batch "
                "was reordered or its tokens were changed"
            )
        experts[i, start : start + length - 1] = sequence.experts
    experts[attention_mask.cpu() == 0] = -1
    return experts


class RoutedGeneration(VLLMGeneration):
    """A `VLLMGeneration` whose engine returns the experts it chose, and which keeps those of its last call.

    Attributes:
        sequences: one for each completion of the last `generate`, in its order.
    """

    sequences: Sequence[RoutedSequence] = ()

    def _build_engine(self, source: str) -> Any:
        self.engine_options["enable_return_routed_experts"] = True
        try:
            return super()._build_engine(source)
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                "replay_routing: the engine was not built with enable_return_routed_experts=True, which vLLM offers on GPUs, without "
                f"pipeline or context parallelism; leave replay_routing out if this is what stands in the way: {error}"
            ) from error

    def generate(self, prompts: Any, *args: Any, **kwargs: Any) -> tuple:
        if self.enable_sleep_mode and self._llm_weights_sleeping:
            self.sync_weights()  # as TRL would, but before listening: a sync generates too
        self.sequences = ()
        engine: Any = self.llm
        listener: Any = _Listener(engine)
        self.llm = listener
        try:
            result = super().generate(prompts, *args, **kwargs)
        finally:
            self.llm = engine
        start = 0
        if self.tensor_parallel_size > 1:  # each rank of a group generates for all of them
            start = torch.distributed.get_rank(group=self.tp_group) * len(prompts)
        self.sequences = [RoutedSequence.of(output) for output in listener.outputs[start : start + len(prompts)]]
        return result


class _Listener:
    """An engine that remembers what its `generate` returned."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.outputs = engine, list[Any]()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.outputs = self.engine.generate(*args, **kwargs)
        return self.outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class RoutingReplay(_Base):
    """What `replay_routing=True` adds to the GRPO trainer.

    Experts travel in TRL's batches under `routed_experts`, one row for each sequence, so they are shuffled, split and reused with it. Every
    forward of the policy over rollouts replays them; a reference model routes by itself.
    """

    model: Any
    _generation_class: type[VLLMGeneration]

    def __init__(self, *args: Any, replay_routing: bool = False, **kwargs: Any) -> None:
        self._replays = replay_routing
        self._scoring = False
        self._record: Tensor | None = None
        super().__init__(*args, **kwargs)
        if replay_routing and not self.use_vllm:
            raise UnsupportedError(
                "replay_routing=True replays what a vLLM engine chose, but the trainer was built with use_vllm=False"
            )

    def _check_config(self, config: Any) -> None:
        super()._check_config(config)
        if self._replays and config.vllm_mode != "colocate":
            raise UnsupportedError(
                f"replay_routing=True with vllm_mode={config.vllm_mode!r}: TRL's client does not pass on the experts that a server "
                "returns; use vllm_mode='colocate'"
            )

    def _build_generation(self, generation_kwargs: dict[str, Any] | None) -> VLLMGeneration:
        if self._replays:
            self._generation_class = RoutedGeneration
            for name in ("tools", "environment_factories", "rollout_func"):
                if getattr(self, name, None):
                    raise UnsupportedError(
                        f"replay_routing=True with {name}: a completion put together from several calls of the engine has no single "
                        "record; leave one of the two out"
                    )
            if self.beta != 0.0 and is_adapted(self.model):
                raise UnsupportedError(
                    f"replay_routing=True with beta={self.beta} and an adapter: the reference is the same model without its adapter, and "
                    "would replay the policy's experts; use beta=0.0"
                )
        return super()._build_generation(generation_kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self._replays:
            return super()._generate_and_score_completions(inputs)
        self._scoring, self._record = True, None
        try:
            output = super()._generate_and_score_completions(inputs)
            ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
            mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
            output[KEY] = self._scored_record(ids, mask, output["completion_ids"].size(1))
        finally:
            self._scoring, self._record = False, None
        return output

    def _scored_record(self, ids: Tensor, mask: Tensor, completion: int) -> Tensor:
        """The record of the batch that has just been generated, laid out once."""
        if self._record is None:
            self._record = padded(self.vllm_generation.sequences, ids, mask, completion)
        return self._record

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._record = inputs.get(KEY)
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._record = None

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        record = self._record
        if self._scoring:
            record = self._scored_record(input_ids, attention_mask, logits_to_keep)
        if record is None or model is getattr(self, "ref_model", None):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if kwargs.get("pixel_values") is not None:
            raise UnsupportedError(
                "replay_routing=True with images: an image's tokens are not the same in the trainer and the engine"
            )
        first = self._first_logps is not None and not self._first_logps  # the weights are those that were sampled with
        replaying = _Replaying(model, record)
        result = super()._get_per_token_logps_and_entropies(
            replaying, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )
        if first:
            changed, pairs = self.accelerator.gather(replaying.counts.unsqueeze(0)).sum(dim=0).tolist()
            mode = "train" if self.model.training else "eval"
            self._metrics[mode]["swapq/replay_changed_fraction"].append(changed / max(pairs, 1))
        return result


class _Replaying:
    """A model that TRL calls with one part of a batch after the other, each with its part of the record."""

    def __init__(self, model: Any, record: Tensor) -> None:
        self.model, self.record, self.at = model, record, 0
        self.counts: Tensor = torch.zeros(2, dtype=torch.int64)

    def __call__(self, input_ids: Tensor, **inputs: Any) -> Any:
        part = self.record[self.at : self.at + len(input_ids)]  # [sequences, tokens, layers, top_k]
        self.at += len(input_ids)
        with replay_routing(self.model, part.to(input_ids.device).flatten(0, 1).transpose(0, 1)) as routing:
            output = self.model(input_ids=input_ids, **inputs)
        self.counts = self.counts.to(routing.counts.device) + routing.counts
        return output
