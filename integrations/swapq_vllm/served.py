"""What one worker serves: its model, where every checkpoint tensor lives in it, and at which addresses."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from swapq.digest import Digests
from swapq.errors import SyncError
from swapq_vllm.compat import abandon_reload, derives_weights
from swapq_vllm.headers import engine_headers
from swapq_vllm.placement import Layouts, Placement, trace
from swapq_vllm.soundness import any_damage
from swapq_vllm.stacks import Stack, stacks_of
from swapq_vllm.unquantized import adopt, load_layout, takes_copies

__all__ = ["Served"]


class Served:
    """The weights of one worker. One object lives as long as the model."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.addresses = self._addresses()

    @classmethod
    def of(cls, worker: Any) -> "Served":
        """The one object of ``worker`` (vLLM's wrapper or the worker itself)."""
        worker = getattr(worker, "worker", worker)
        kept = worker.get_model().__dict__  # with the model, so that both go together
        if "swapq_served" not in kept:
            kept["swapq_served"] = cls(worker)
        return kept["swapq_served"]

    @property
    def model(self) -> nn.Module:
        return self.worker.get_model()

    @cached_property
    def placements(self) -> dict[str, Placement]:
        """Every tensor of the checkpoint that the engine was started from, and where it lives."""
        runner = self.worker.model_runner
        headers = engine_headers(runner.model_config, runner.load_config)
        return trace(self.model, headers.items())

    @cached_property
    def required(self) -> dict[str, None]:
        """Names of the tensors that fill a place here, in the checkpoint's order: an update must bring each of them."""
        return dict.fromkeys(name for name, placement in self.placements.items() if placement.pieces)

    @cached_property
    def tied(self) -> dict[str, str]:
        """Live names that share the parameter of another -> that other: a sender may name both."""
        first = {id(parameter): name for name, parameter in self.model.named_parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """Wire name of every stack of experts that is copied into live parameters as a whole."""
        return stacks_of(self.model)

    @cached_property
    def stack_of(self) -> dict[str, str]:
        """Checkpoint name of every tensor that a stack stands for -> the stack's name."""
        return {name: stack.name for stack in self.stacks.values() for name in stack.covers}

    @cached_property
    def required_unstacked(self) -> frozenset[str]:
        """Those of :attr:`required` that no stack stands for."""
        return frozenset(name for name in self.required if name not in self.stack_of)

    @cached_property
    def _places(self) -> list[tuple[nn.Module, str]]:
        """Every layer and name of a tensor in it that an update fills."""
        pieces = [piece for placement in self.placements.values() for piece in placement.pieces]
        found = [(piece.layer, piece.name) for piece in pieces]
        return list(dict.fromkeys(found + [(stack.layer, stack.parameter) for stack in self.stacks.values()]))

    @cached_property
    def stacked_experts(self) -> frozenset[str]:
        """Checkpoint names of the experts modules that :attr:`stacks` are of."""
        return frozenset(name.rsplit(".", 2)[0] for name in self.stacks)

    @cached_property
    def takes_copies(self) -> bool:
        """Whether every tensor may be copied into the live parameters; else those that are no stacks go through vLLM's reload."""
        pieces = [piece for placement in self.placements.values() for piece in placement.pieces]
        layers = {id(piece.layer): piece.layer for piece in pieces}
        return (
            not derives_weights(self.model)
            and all(piece.source is not None for piece in pieces)
            and all(takes_copies(layer) for layer in layers.values())
            and all(
                load_layout(layer, name) is getattr(layer, name) and getattr(layer, name).is_contiguous()
                for layer, name in {(piece.layer, piece.name) for piece in pieces}
            )
        )

    def begin(self) -> None:
        """Prepare for an update: what is known of the model is learned before vLLM takes its parameters apart."""
        adopt(self.model)
        _ = self.placements, self.tied, self.stacks, self.takes_copies
        self.live = self._live()

    def damage(self, layers: Mapping[int, nn.Module]) -> Tensor | None:
        """0-dim bool on the device: whether copies left in ``layers`` what no quantizer writes. Nothing waits for it."""
        looked = _quantized(layers)
        return any_damage(looked) if looked else None

    def settle(self, layers: Mapping[int, nn.Module], damage: Tensor | None) -> None:
        """After copies into ``layers``: what is derived from their tensors is refreshed, and :meth:`damage` found before is refused.

        Raises:
            CheckpointError: naming the tensors of the first layer that is damaged.
        """
        looked = _quantized(layers)
        if damage is not None and bool(damage):
            for layer, method in looked:
                method.require_sound(layer)
        for layer, method in looked:
            method.after_copies(layer)

    def abandon(self) -> None:
        """After a failed update: no parameter stays on the meta device, so that the next update can begin."""
        abandon_reload(self.model)

    def tensors(self, *, stacked: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and tensor of everything that can be read back; ``stacked``: experts as the stacks that a sender may send."""
        adopt(self.model)
        layouts, given = Layouts(), set[str]()
        for stack in self.stacks.values() if stacked else ():
            given.update(stack.covers)
            if stack.whole:
                yield stack.name, getattr(stack.layer, stack.parameter).data
        for name, placement in self.placements.items():
            if name in given:
                continue
            tensor = placement.served(layouts)
            if tensor is not None:
                yield name, tensor

    def running(self) -> dict[str, tuple[str, str]]:
        """Checkpoint name of every weight matrix that this rank holds a part of -> formats of the weight and of its rows."""
        found = {}
        for name, placement in self.placements.items():
            if placement.pieces and len(placement.meta.shape) > 1 and name.endswith((".weight", ".weight_packed")):
                layer, parameter = placement.pieces[0].layer, placement.pieces[0].name
                found[name.removesuffix("_packed")] = _runs(layer, getattr(layer, parameter))
        return found

    def verify(self, expected: Mapping[str, str]) -> dict[str, list[str]]:
        """Compare what is held now with the sender's digests, of tensors in the engine's dtype or in that of its checkpoint.

        Returns:
            Names under ``equal``, ``wrong``, ``unreadable`` (not held whole by this rank, or in a layout that cannot be read back),
            ``unsent`` (held, but without a digest from the sender) and ``unknown`` (a digest of a name that the checkpoint has not).
        """
        adopt(self.model)
        found: dict[str, list[str]] = {"equal": [], "wrong": [], "unreadable": [], "unsent": []}
        layouts, digests, held = Layouts(), Digests(), Digests()
        for name, placement in self.placements.items():
            if not placement.pieces:
                continue
            tensor = placement.held(layouts)
            if name not in expected:
                found["unsent"].append(name)
            elif tensor is None:
                found["unreadable"].append(name)
            else:
                stored = placement.as_stored(tensor)
                digests.add(name, stored)
                if stored is not tensor:
                    held.add(name, tensor)
        as_stored, as_held = digests.result(), held.result()
        for name, value in as_stored.items():
            found["equal" if expected[name] in (value, as_held.get(name)) else "wrong"].append(name)
        for name, other in self.tied.items():  # the sender's copy of what the engine holds once
            if name in expected and other in as_stored and expected[name] not in (as_stored[other], as_held.get(other)):
                found["wrong"].append(name)
        found["unknown"] = sorted(set(expected) - set(self.placements) - set(self.tied))
        return found

    def require_same_addresses(self) -> None:
        """Raise if an update moved a tensor: captured graphs would read the old one, and so would what was read back of a copy."""
        now = self._addresses()
        moved = sorted(name for name, address in self.addresses.items() if now.get(name) != address)
        if self.takes_copies and not moved:
            live = self._live()
            moved = sorted(
                f"{name} of {type(layer).__name__}"
                for (layer, name), tensor in self.live.items()
                if (layer, name) not in live or live[layer, name].data_ptr() != tensor.data_ptr()
            )
        if moved:
            raise SyncError(
                f"the update moved {len(moved)} live tensors, first {moved[0]}; compiled graphs would read the old ones: restart the engine"
            )

    def _live(self) -> dict[tuple[nn.Module, str], Tensor]:
        found = {}
        for layer, name in self._places:
            for tensor in (layer._parameters.get(name), layer._buffers.get(name)):
                if tensor is not None:
                    found[layer, name] = tensor.data
        return found

    def _addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self.model.named_parameters()}


def _quantized(layers: Mapping[int, nn.Module]) -> list[tuple[nn.Module, Any]]:
    """Those of ``layers`` that hold codes, with their methods."""
    methods = [(layer, getattr(layer, "quant_method", None)) for layer in layers.values()]
    return [(layer, method) for layer, method in methods if hasattr(method, "require_sound")]


def _runs(layer: nn.Module, weight: Tensor) -> tuple[str, str]:
    """What a layer computes in; of a method that is not swapq's, its name and what it holds."""
    method: Any = getattr(layer, "quant_method", None)
    if hasattr(method, "format") and hasattr(method, "activations"):
        return method.format, method.activations
    if weight.element_size() > 1:
        return "bf16", "bf16"
    return f"{str(weight.dtype).removeprefix('torch.')} of {type(method).__name__}", "unknown"
