"""Quantized routed experts in the engine: the checkpoint's codes and scales as parameters, the trainer's expert block as forward."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, FusedMoeWeightScaleSupported
from vllm.platforms import current_platform

from swapq import formats
from swapq.errors import CheckpointError, UnsupportedError
from swapq.formats import Parts
from swapq_vllm.built import built
from swapq_vllm.compat import captures_graphs
from swapq_vllm.loading import Arrivals, guard_experts
from swapq_vllm.operands import Operands
from swapq_vllm.ops import KERNELS_TAKE, capturable, routed_experts
from swapq_vllm.soundness import Stored, any_damage, can_be_unsound, unsound

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

__all__ = ["SwapqExpertsMethod"]

#: vLLM's activation -> transformers' name, and whether rows hold a gate half
_GATES = {
    "silu": ("silu", True),
    "gelu": ("gelu", True),
    "gelu_tanh": ("gelu_pytorch_tanh", True),
    "silu_no_mul": ("silu", False),
    "gelu_no_mul": ("gelu", False),
    "gelu_tanh_no_mul": ("gelu_pytorch_tanh", False),
    "relu2_no_mul": ("relu2", False),
}
_FIRST, _SECOND = "w13_weight", "w2_weight"


class SwapqExpertsMethod(FusedMoEMethodBase):
    """Experts in one format. The runtime layout is the checkpoint's, so first load, reload and update are one path.

    Args:
        moe: vLLM's description of the layer.
        prefix: the layer's name, for messages.
        fmt: format of every expert's weights.
        activations: format of the rows.
        expert_tp: tensor-parallel size that the recipe states.
        names: ``(expert, "w1" | "w2" | "w3")`` to the checkpoint name of the weight.
    """

    def __init__(
        self,
        moe: "FusedMoEConfig",
        *,
        prefix: str,
        fmt: str,
        activations: str,
        expert_tp: int,
        names: Mapping[tuple[int, str], str],
    ) -> None:
        super().__init__(moe)
        self.prefix, self.format, self.activations, self.expert_tp = prefix, fmt, activations, expert_tp
        self.names = dict(names)
        self.act, self.gated = "silu", True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Nothing is padded: a padded block would have another scale."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register parameters in checkpoint layout.

        Raises:
            UnsupportedError: a tensor-parallel size, an activation or an option under which the engine would not be the trainer.
        """
        tp = self.moe.moe_parallel_config.tp_size
        self._require_supported(layer, tp, hidden_size, intermediate_size_per_partition)
        form = formats.get(self.format)
        halves = 2 if self.gated else 1
        inner = intermediate_size_per_partition
        stacks = {_FIRST: (halves * inner, hidden_size), _SECOND: (hidden_size, inner)}
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        whole = {"w1": (inner * tp, hidden_size), "w3": (inner * tp, hidden_size), "w2": (hidden_size, inner * tp)}
        self.arrivals = Arrivals(self.names)
        for stack, (rows, columns) in stacks.items():
            local = form.part_shapes((num_experts, rows, columns), scope=self._scope(stack, rows))
            for part, suffix in form.suffixes.items():
                name = stack + suffix.removeprefix("weight")
                shape = (num_experts, halves) if part == "global_scale" and stack == _FIRST else local[part]
                parameter = nn.Parameter(torch.empty(shape, dtype=form.dtypes[part]), requires_grad=False)
                layer.register_parameter(name, parameter)
                if part != "codes":
                    kind = (
                        FusedMoeWeightScaleSupported.TENSOR
                        if part == "global_scale"
                        else FusedMoeWeightScaleSupported.BLOCK
                    )
                    parameter.quant_method = kind.value  # type: ignore[attr-defined]
                for shard in ("w1", "w3") if stack == _FIRST else ("w2",):
                    shapes[name, shard] = form.part_shapes(whole[shard], scope=form.default_scope)[part]
        for name in {name for name, _ in shapes}:
            getattr(layer, name).weight_loader = guard_experts(layer, self.arrivals, shapes)
        layer.swapq_operands = None

    def _require_supported(self, layer: Any, tp: int, hidden: int, inner: int) -> None:
        if tp != self.expert_tp:
            raise UnsupportedError(
                f"{self.prefix}: the engine splits experts over {tp} ranks, but the recipe says expert_tp={self.expert_tp}, which decides "
                f"how far a row scale reaches; start with tensor_parallel_size={self.expert_tp} (or expert parallelism), or convert with "
                f"expert_tp={tp}"
            )
        act = layer.activation.value
        if act not in _GATES:
            raise UnsupportedError(
                f"{self.prefix}: activation {act!r} has no exact counterpart here; known are {', '.join(_GATES)}"
            )
        self.act, self.gated = _GATES[act]
        shapes = ((2 * inner, hidden), (hidden, inner))
        if captures_graphs() and not capturable(
            torch.device("cuda"), self.format, self.activations, self.act, self.gated, *shapes
        ):
            raise UnsupportedError(
                f"{self.prefix}: {self.format} experts with {self.activations} rows, hidden size {hidden}, intermediate size {inner} and "
                f"activation {act} have no kernels on this GPU that a CUDA graph can hold ({KERNELS_TAKE}, gated experts); start with "
                "enforce_eager=True"
            )
        options = {
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
            "swiglu_limit": getattr(layer, "swiglu_limit", None) is not None,
            "expert biases": self.moe.has_bias,
            "padded tensor parallelism": getattr(self.moe, "tp_shard_with_padding", False),
        }
        for option, on in options.items():
            if on:
                raise UnsupportedError(
                    f"{self.prefix}: this model uses {option}, which swapq's expert block does not; serve it in BF16"
                )
        form = formats.get(self.format)
        form.check_length(hidden, name=f"{self.prefix} (hidden size)")
        form.check_length(inner, name=f"{self.prefix} (intermediate size {inner * tp} over {tp} ranks)")
        if tp > 1 and inner % form.block:
            raise UnsupportedError(
                f"{self.prefix}: intermediate size {inner * tp} over {tp} ranks is {inner} each, which cuts a {self.format} block of "
                f"{form.block}; use fewer ranks, or expert parallelism"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Validate what was loaded; on the CPU, refresh the expanded operands.

        Raises:
            CheckpointError: a tensor that did not come, a scale or code that is not finite, gate and up with different FP32 scales.
        """
        built(self)
        here = [slot for slot in self.names if layer._map_global_expert_id_to_local_expert_id(slot[0]) != -1]
        self.arrivals.require(
            layer,
            {
                name: [slot for slot in here if (slot[1] == "w2") == name.startswith("w2")]
                for name in layer._parameters
                if name.startswith((_FIRST, _SECOND))
            },
        )
        self.require_sound(layer)
        self.after_copies(layer)

    def takes_copies(self, layer: Any) -> bool:
        """Whether bytes copied into the live parameters are loaded, once :meth:`after_copies` ran: the layout is the checkpoint's."""
        return True

    def after_copies(self, layer: Any) -> None:
        """On the CPU, refresh the expanded operands, in place."""
        if current_platform.is_cpu():
            self._refresh(layer)

    def stored(self, layer: Any) -> list[Stored]:
        """What :meth:`require_sound` looks at, part by part."""
        return [Stored(tensor, self.format, part) for _, part, tensor in self._stored(layer)]

    def disagrees(self, layer: Any) -> Tensor | None:
        """Bool ``[local experts]``: whose gate and up have different FP32 scales; None where they have none."""
        if not self.gated or not hasattr(layer, f"{_FIRST}_scale_2"):
            return None
        pair = getattr(layer, f"{_FIRST}_scale_2").data
        return pair[:, 0] != pair[:, 1]

    def _stored(self, layer: Any) -> Iterator[tuple[str, str, Tensor]]:
        """Parameter name, part and tensor ``[local experts, ...]``."""
        for stack in (_FIRST, _SECOND):
            for part, suffix in formats.get(self.format).suffixes.items():
                name = stack + suffix.removeprefix("weight")
                yield name, part, getattr(layer, name).data

    def _damage(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        """What is looked at, and where it is wrong: bool ``[local experts, ...]``, of its size, so one is made when the last is gone."""
        for name, part, tensor in self._stored(layer):
            if can_be_unsound(self.format, part):
                yield name, unsound(tensor, self.format, part)
        apart = self.disagrees(layer)
        if apart is not None:
            yield "gate and up", apart

    def require_sound(self, layer: Any) -> None:
        """Raise if a code or scale is one that no quantizer writes, or gate and up have different FP32 scales.

        Raises:
            CheckpointError: naming the checkpoint's tensors.
        """
        if not bool(any_damage([(layer, self)])):
            return
        here = [slot for slot in self.names if layer._map_global_expert_id_to_local_expert_id(slot[0]) != -1]
        name, wrong = next((n, b) for n, b in self._damage(layer) if bool(b.any()))
        local = int(wrong.reshape(wrong.shape[0], -1).any(1).nonzero()[0])
        shards = ("w2",) if name.startswith(_SECOND) else ("w1", "w3")
        expert = next(e for e, _ in here if layer._map_global_expert_id_to_local_expert_id(e) == local)
        weights = [self.names[expert, shard] for shard in shards if (expert, shard) in self.names]
        if name == "gate and up":
            pair = getattr(layer, f"{_FIRST}_scale_2").data[local].tolist()
            both = f"{weights[0]}_scale_2 is {pair[0]} and {weights[1]}_scale_2 is {pair[1]}"
            raise CheckpointError(f"{both}; gate and up of an expert share one scale: export or send them again")
        suffix = name.rpartition("weight")[2]
        raise CheckpointError(
            f"{' or '.join(w + suffix for w in weights)} holds values that no quantizer writes (NaN, Inf or a negative scale); "
            "the checkpoint or the trainer's weights are damaged"
        )

    def _parts(self, layer: Any, stack: str) -> Parts:
        global_scale = getattr(layer, f"{stack}_scale_2", None)
        if global_scale is not None:
            global_scale = global_scale.data[:, 0] if stack == _FIRST else global_scale.data
        scales = stack + formats.get(self.format).suffixes["scales"].removeprefix("weight")
        return Parts(getattr(layer, stack).data, getattr(layer, scales).data, global_scale)

    def _scope(self, stack: str, rows: int) -> str:
        return formats.get(self.format).scope_of_stack(rows, 2 if stack == _FIRST and self.gated else 1)

    def _refresh(self, layer: Any) -> None:
        if layer.swapq_operands is None:
            layer.swapq_operands = tuple(
                Operands(self._parts(layer, stack), self.format, self._scope(stack, getattr(layer, stack).shape[1]))
                for stack in (_FIRST, _SECOND)
            )
            return
        for operand, stack in zip(layer.swapq_operands, (_FIRST, _SECOND), strict=True):
            operand.refresh(self._parts(layer, stack))

    def weights(self, layer: Any) -> tuple[list[Tensor], list[Tensor], str]:
        """The op's ``gate_up``, ``down`` and ``stored``."""
        if layer.swapq_operands is not None:
            first, second = layer.swapq_operands
            return first.tensors, second.tensors, ""
        stacks = [[t for t in self._parts(layer, stack) if t is not None] for stack in (_FIRST, _SECOND)]
        scope = self._scope(_FIRST, getattr(layer, _FIRST).shape[1])
        default = scope == formats.get(self.format).default_scope
        return stacks[0], stacks[1], self.format if default else f"{self.format}:{scope}"

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The expert block; shared experts and reductions over ranks are vLLM's part."""
        gate_up, down, stored = self.weights(layer)
        return routed_experts(
            x, topk_weights, topk_ids, layer.expert_map, gate_up, down, stored, self.activations, self.act, self.gated
        )

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """vLLM 0.25 asks for its modular kernel's first half and would replace this method by it; there is none."""

    def get_fused_moe_quant_config(self, layer: Any) -> "FusedMoEQuantConfig | None":
        """None: no kernel of vLLM's runs these experts."""
        return None

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """The parameter itself: its layout does not change."""
        return getattr(layer, name)
