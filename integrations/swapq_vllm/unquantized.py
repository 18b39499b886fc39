"""What the recipe keeps in BF16: vLLM's own methods, made right across weight updates and readable for verification.

Two faults of the CPU engine are repaired here. Experts are prepacked at the first load only, so after a reload raw weights sit
under a kernel that reads packed ones. Ordinary linears hand their weight to a GEMM library and drop the parameter, so nothing can
tell what is served. Each method says through ``load_layout`` what a parameter holds in the layout in which it was loaded.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from swapq_vllm.built import built
from swapq_vllm.packing import unpack_experts, weight_by_product

if TYPE_CHECKING:
    pass

__all__ = [
    "Bf16EmbeddingMethod",
    "Bf16ExpertsMethod",
    "Bf16LinearMethod",
    "adopt",
    "load_layout",
    "reads_by_product",
    "takes_copies",
]


class _Once:
    """A callable that remembers whether it ran."""

    def __init__(self, function: Any) -> None:
        self.function, self.ran = function, False

    def __call__(self, layer: Any) -> None:
        self.ran = True
        self.function(layer)


class Bf16ExpertsMethod(UnquantizedFusedMoEMethod):
    """BF16 experts whose CPU kernel gets its packed weights at every load, not only at the first."""

    def process_weights_after_loading(self, layer: Any) -> None:
        built(self)
        experts: Any = None if self.moe_kernel is None else self.moe_kernel.fused_experts
        if experts is None or not current_platform.is_cpu():
            super().process_weights_after_loading(layer)
            return
        prepack = _Once(experts.process_weights_after_loading)
        experts.process_weights_after_loading = prepack  # a version that repairs this itself must not pack twice
        try:
            super().process_weights_after_loading(layer)
        finally:
            del experts.process_weights_after_loading
        if not prepack.ran:
            prepack(layer)

    def takes_copies(self, layer: Any) -> bool:
        """Whether bytes copied into the live parameters are loaded: not where the backend keeps them in a layout of its own."""
        return not current_platform.is_cpu() and self.load_layout(layer, "w13_weight") is layer.w13_weight

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """Parameter ``name`` as it was loaded; None where the backend's own layout cannot be undone."""
        live = getattr(layer, name)
        if not current_platform.is_cpu():
            plain = getattr(self.unquantized_backend, "name", "") in ("TRITON", "BATCHED_TRITON")
            return live if plain else None
        if not name.endswith("_weight"):
            return live
        unpacked = unpack_experts(live, self.moe_kernel)
        return None if unpacked is None else self._without_padding(unpacked, name)

    def _without_padding(self, weight: Tensor, name: str) -> Tensor:
        size = self.moe.intermediate_size_per_partition
        if name == "w2_weight":
            return weight[:, :, :size]
        halves = weight.unflatten(1, (2, -1)) if self.moe.is_act_and_mul else weight.unsqueeze(1)
        return halves[:, :, :size].flatten(1, 2)


class Bf16LinearMethod(UnquantizedLinearMethod):
    """A BF16 linear that on the CPU multiplies by its live parameter, as the trainer does."""

    def process_weights_after_loading(self, layer: Any) -> None:
        built(self)
        if not current_platform.is_cpu():
            super().process_weights_after_loading(layer)
            return
        layer.cpu_linear = F.linear  # some layers call it themselves
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):  # latent attention takes this weight in and drops it
            layer.__dict__.setdefault("swapq_kept", layer.weight)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if current_platform.is_cpu():
            return F.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)

    def takes_copies(self, layer: Any) -> bool:
        """Whether bytes copied into the live parameters are loaded."""
        return True

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """The parameter itself: its layout does not change."""
        return layer.__dict__.get("swapq_kept", layer.weight) if name == "weight" else getattr(layer, name)


class Bf16EmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embedding and LM head, whose CPU projection multiplies by the live parameter."""

    def process_weights_after_loading(self, layer: Any) -> None:
        built(self)
        if current_platform.is_cpu():
            layer.cpu_linear = F.linear
        else:
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if current_platform.is_cpu():
            return F.linear(x, layer.weight, bias)
        return super().apply(layer, x, bias)

    def takes_copies(self, layer: Any) -> bool:
        """Whether bytes copied into the live parameters are loaded."""
        return True

    def load_layout(self, layer: Any, name: str) -> Tensor | None:
        """The parameter itself: its layout does not change."""
        return getattr(layer, name)


def adopt(model: nn.Module) -> None:
    """Make the BF16 layers of ``model`` fit for an update.

    vLLM's own BF16 experts (of a plain BF16 checkpoint) get the repaired method, and weights that latent attention dropped come back.
    """
    for module in model.modules():
        if "swapq_kept" in module.__dict__:
            module.register_parameter("weight", module.__dict__["swapq_kept"])
        method = getattr(module, "quant_method", None)
        if type(method) is UnquantizedFusedMoEMethod:
            method.__class__ = Bf16ExpertsMethod


def load_layout(layer: Any, name: str) -> Tensor | None:
    """Tensor ``name`` of ``layer`` in the layout in which it was loaded; None where only vLLM knows how it is held."""
    method: Any = getattr(layer, "quant_method", None)
    live: torch.Tensor = getattr(layer, name)
    if hasattr(method, "load_layout"):
        return method.load_layout(layer, name)
    if method is None or isinstance(method, UnquantizedEmbeddingMethod):
        return live
    if not isinstance(method, UnquantizedLinearMethod):
        return None
    return weight_by_product(layer) if reads_by_product(layer, name) else live


def takes_copies(layer: Any) -> bool:
    """Whether bytes copied into the live tensors of ``layer`` are loaded; else only vLLM's loaders know what must happen to them."""
    method: Any = getattr(layer, "quant_method", None)
    if hasattr(method, "takes_copies"):
        return method.takes_copies(layer)
    if method is None:
        return not hasattr(layer, "process_weights_after_loading")
    return type(method) in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod) and current_platform.is_cuda()


def reads_by_product(layer: Any, name: str) -> bool:
    """Whether tensor ``name`` can be read back only by a product with the identity: it is exact, but loses the sign of zero.

    Such are the linears that a model class builds without the quantization configuration (routers): vLLM's CPU engine packs their
    weight and drops the parameter.
    """
    own = type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod
    return own and name == "weight" and current_platform.is_cpu()
