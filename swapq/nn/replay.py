"""Routing replay: a model's forward with experts that were chosen elsewhere, and the recording of those that it chooses itself.

A family's own code computes the weights. Inside the block that holds router and experts, the one ``topk`` over all experts returns the
given ids, and the values that the model itself computed at those ids; whatever the family does before and after it (softmax, groups,
bias, normalisation, scaling) stays its own. So a model's own choice replayed changes no bit, and gradients reach the router through the
weights.
"""

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from swapq.errors import SwapqError, UnsupportedError

__all__ = ["Routing", "record_routing", "replay_routing"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(frozen=True, slots=True)
class _Block:
    """A module that holds a router and the experts it chooses from."""

    name: str
    module: nn.Module
    num_experts: int
    layer: int
    """Number of the hidden layer."""
    place: int
    """Number among the layers that have experts."""


class Routing:
    """The experts of one forward, replayed into it or recorded from it.

    Attributes:
        layers: names of the blocks with routed experts, in order.
        counts: int64 ``[2]``, on the model's device: pairs of a token and a layer whose own choice was another set of experts, and all
            pairs that have a record. Recomputation in the backward pass does not count.
    """

    def __init__(self, blocks: list[_Block], given: Tensor | None, places: list[int]) -> None:
        self._blocks, self._places = blocks, places
        self._given: Any = given
        self._recorded: dict[int, Tensor] = {}
        self._used: set[int] = set()
        self.layers = [block.name for block in blocks]
        self.counts = torch.zeros(2, dtype=torch.int64)

    @property
    def experts(self) -> Tensor:
        """int64 ``[layers with experts, tokens, top_k]``: what the last forward chose.

        Raises:
            SwapqError: no whole forward has run.
        """
        missing = [block.name for block in self._blocks if block.place not in self._recorded]
        if missing:
            raise SwapqError(f"routing: no forward has passed {missing[0]} yet; call the model inside `record_routing`")
        return torch.stack([self._recorded[block.place] for block in self._blocks])

    @property
    def changed_fraction(self) -> float:
        """Fraction of the pairs of a token and a layer whose own choice was another set of experts; 0 without any pair."""
        changed, pairs = self.counts.tolist()
        return changed / pairs if pairs else 0.0

    @property
    def replays(self) -> bool:
        """Whether experts are given, and not recorded."""
        return self._given is not None

    def record(self, block: _Block, ids: Tensor) -> None:
        """Keep the ids ``[tokens, top_k]`` that the block's tokens go to."""
        if not _recomputed():
            self._recorded[block.place] = ids.detach()

    def choose(self, block: _Block, topk: Callable[[], Any], scores: Tensor, k: int) -> Any:
        """What the block's ``topk`` over ``scores`` ``[tokens, experts]`` returns: values and int64 ids ``[tokens, k]``."""
        recomputed = _recomputed()
        given = self._given[self._places[block.place]]
        if given.shape != (scores.shape[0], k):
            raise SwapqError(
                f"replay: {block.name} routes {scores.shape[0]} tokens to {k} experts each, but the record has "
                f"{given.shape[0]} tokens and {given.shape[1]} experts; give one row for every position of the batch, padding included"
            )
        if not recomputed:
            if block.place in self._used:
                raise SwapqError(
                    f"replay: {block.name} is called a second time; a record is of one forward, so open `replay_routing` anew for each"
                )
            self._used.add(block.place)
        given = given.to(scores.device, torch.int64)
        with torch.no_grad():  # the same operations when recomputed: selective checkpointing counts them
            own = topk()[1]
            known = given[:, :1] >= 0
            other = (own.sort(dim=-1).values != given.sort(dim=-1).values).any(dim=-1, keepdim=True)
            counted = torch.stack([(other & known).sum(), known.sum()])
            given = torch.where(known, given, own)
        if not recomputed:
            self.counts = self.counts.to(counted.device) + counted
        return torch.return_types.topk((scores.gather(-1, given), given))

    def require_whole(self) -> None:
        """Raise unless every layer was replayed: the others were computed by code that replay does not reach."""
        missed = [block.name for block in self._blocks if block.place not in self._used]
        if not self._used:
            raise SwapqError(
                f"replay: no forward reached {missed[0]}, so the experts that were given went nowhere; call the model that was given, "
                "inside `replay_routing`"
            )
        if missed:
            raise UnsupportedError(
                f"replay: the forward went past {missed[0]} without its `forward` being called ({len(missed)} such layers); kernels or "
                "compiled code stand in its place, turn them off"
            )


def _recomputed() -> bool:
    """Whether this is a layer that checkpointing runs again, inside the backward pass."""
    return torch._C._current_graph_task_id() != -1


@contextmanager
def replay_routing(model: nn.Module, experts: Tensor) -> Iterator[Routing]:
    """Inside, one forward of ``model`` sends each token to the given experts. The weights are the model's own probabilities at those ids.

    ```python
    with swapq.replay_routing(model, experts) as routing:
        loss = model(input_ids, labels=labels).loss
    loss.backward()                     # layers that are checkpointed replay the same experts
    print(routing.changed_fraction)
    ```

    Args:
        model: a transformers MoE, converted or not, alone or inside PEFT's, DDP's or FSDP2's wrapper.
        experts: integers ``[layers, tokens, top_k]``; ``tokens`` is batch x sequence, in the order of the flattened batch. ``layers`` are
            all hidden layers (rows of dense ones are not read) or those with experts. Where a token's ids are -1, the router's own
            choice stays.

    Raises:
        SwapqError: a record of another shape, with ids that are no experts or that repeat, no forward inside, or a second one.
        UnsupportedError: a model without routed experts, a compiled one, or a router whose choice is no ``topk`` over its experts.
    """
    blocks = _blocks(model)
    places = _places(model, blocks, experts)
    device = next(model.parameters()).device
    # a copy, since recomputation reads it again when the caller may have filled its buffer anew; offloaded weights are on no device
    experts = experts.to(experts.device if device.type == "meta" else device, copy=True)
    _check_ids(experts, blocks, places)
    routing = Routing(blocks, experts, places)
    with _tapped(blocks, routing), _checkpointed(model, routing):
        yield routing
    routing.require_whole()


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Inside, the experts that tokens go to are kept: ``.experts`` of the last forward, as :func:`replay_routing` takes it.

    They are the choices of the model's routers, or what a replay around it or inside it gives.
    """
    blocks = _blocks(model)
    routing = Routing(blocks, None, [])
    with _tapped(blocks, routing):
        yield routing


# Standing between a router and its experts


class _Choice(TorchFunctionMode):
    """Answers the ``topk`` over all experts inside one call of a block: the innermost replay decides, whoever records is told."""

    def __init__(self, block: _Block, held: Sequence[tuple[_Block, Routing]]) -> None:
        super().__init__()
        self.block, self.answered = block, 0
        self.replay = next((one for one in reversed(held) if one[1].replays), None)
        self.records = [one for one in held if not one[1].replays]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        scores = args[0] if args else kwargs["input"]
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        if scores.dim() != 2 or scores.shape[-1] != self.block.num_experts or dim not in (-1, 1):
            return func(*args, **kwargs)  # over groups of experts, or over tokens
        self.answered += 1
        if self.replay is None:
            answer = func(*args, **kwargs)
        else:
            k = args[1] if len(args) > 1 else kwargs["k"]
            block, routing = self.replay
            answer = routing.choose(block, lambda: func(*args, **kwargs), scores, int(k))
        for block, routing in self.records:
            routing.record(block, answer[1])
        return answer


class _Tap:
    """Stands in for one block's ``forward`` while any routing is replayed or recorded."""

    def __init__(self) -> None:
        self.open: list[tuple[_Block, Routing]] = []
        self.forward: Any = None
        self.before: Any = None

    def push(self, block: _Block, routing: Routing) -> tuple[_Block, Routing]:
        """The mark with which `pop` takes this routing away again."""
        if not self.open:
            module = block.module
            self.before, self.forward = module.__dict__.get("forward"), module.forward
            self.__wrapped__ = self.forward  # for those who ask for its signature
            module.forward = self
        mark = (block, routing)
        self.open.append(mark)
        return mark

    def pop(self, module: nn.Module, mark: tuple[_Block, Routing]) -> None:
        """Contexts may be left in any order: generators are."""
        del self.open[next(i for i, one in enumerate(self.open) if one is mark)]
        if not self.open:
            del module.__dict__["forward"]
            if self.before is not None:
                module.__dict__["forward"] = self.before
            self.before = self.forward = self.__wrapped__ = None

    @torch.compiler.disable(reason="swapq replays or records routing here")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self.open[-1][0]
        with _Choice(block, self.open) as choice:
            output = self.forward(*args, **kwargs)
        if choice.answered != 1:
            raise UnsupportedError(
                f"replay: {block.name} ({type(block.module).__name__}) chose {choice.answered} times by `topk` over its "
                f"{block.num_experts} experts where once is expected; routing of this kind cannot be replayed"
            )
        return output

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise SwapqError(
            f"replay: {self.open[-1][0].name if self.open else 'a block'} cannot be copied while its routing is replayed or recorded: the "
            "copy would run the original's weights; copy the model outside of the context"
        )


_TAPS: "weakref.WeakKeyDictionary[nn.Module, _Tap]" = weakref.WeakKeyDictionary()


@contextmanager
def _tapped(blocks: list[_Block], routing: Routing) -> Iterator[None]:
    with ExitStack() as stack:
        for block in blocks:
            tap = _TAPS.setdefault(block.module, _Tap())
            stack.callback(tap.pop, block.module, tap.push(block, routing))
        yield


@contextmanager
def _checkpointed(model: nn.Module, routing: Routing) -> Iterator[None]:
    """Layers that are checkpointed inside replay the same experts when they are recomputed, wherever the backward pass runs."""

    def bound(layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        inside = set(layer.modules())
        blocks = [block for block in routing._blocks if block.module in inside]

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            @wraps(function, assigned=())
            def replayed(*a: Any, **k: Any) -> Any:
                with _tapped(blocks, routing):
                    return function(*a, **k)

            return checkpoint(replayed, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for module in model.modules():
            for name in ("_gradient_checkpointing_func", "checkpoint_fn"):  # of transformers, of torch's wrapper
                held = module.__dict__.get(name)
                if callable(held):
                    setattr(module, name, bound(module, held))
                    stack.callback(setattr, module, name, held)
        yield


# Finding routers, checking records


def _blocks(model: nn.Module) -> list[_Block]:
    """The modules that route, in the order of their layers."""
    blocks: dict[str, _Block] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"replay: {name or type(module).__name__} is compiled by torch.compile; routing is replayed in plain modules only"
            )
        prefix, found, _ = name.rpartition(".experts")
        layer = _LAYER.search(f"{name}.")
        if not found or layer is None:
            continue
        if isinstance(module, nn.ModuleList):
            raise UnsupportedError(
                f"replay: {name} is a list of modules, whose block decides by itself which to call; only models with fused experts can "
                "be replayed"
            )
        count = _num_experts(module)
        if count is not None:
            blocks.setdefault(prefix, _Block(prefix, modules[prefix], count, int(layer[1]), len(blocks)))
    if not blocks:
        raise UnsupportedError(f"replay: {type(model).__name__} has no routed experts")
    return list(blocks.values())


def _num_experts(module: nn.Module) -> int | None:
    layout = getattr(module, "swapq_layout", None)
    if layout is not None:
        return layout.num_experts
    return next((p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 3), None)


def _places(model: nn.Module, blocks: list[_Block], experts: Tensor) -> list[int]:
    """For each block, its row of the record."""
    if not isinstance(experts, Tensor):
        raise SwapqError(
            f"replay: experts has the type {type(experts).__name__}; expected a tensor of integers [layers, tokens, top_k]"
        )
    if experts.dim() != 3 or experts.is_floating_point() or experts.is_complex() or experts.dtype == torch.bool:
        raise SwapqError(
            f"replay: experts has shape {list(experts.shape)} and dtype {experts.dtype}; expected integers [layers, tokens, top_k]"
        )
    config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "num_hidden_layers", len(blocks))
    if experts.shape[0] == len(blocks):
        return [block.place for block in blocks]
    if experts.shape[0] == hidden:
        return [block.layer for block in blocks]
    raise SwapqError(
        f"replay: experts has {experts.shape[0]} layers, shape {list(experts.shape)}; the model has {hidden} hidden layers, "
        f"{len(blocks)} of them with experts"
    )


def _check_ids(experts: Tensor, blocks: list[_Block], places: list[int]) -> None:
    """Every token has either a record, of experts that exist and differ, or none."""
    bad = []
    for block in blocks:
        ids = experts[places[block.place]].to(torch.int64)
        none = ids < 0
        wrong = (ids < -1) | (ids >= block.num_experts) | (none != none[:, :1])
        ordered = ids.sort(dim=-1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        bad.append(wrong.any(dim=-1) | repeated.any(dim=-1))
    if not bool(torch.stack(bad).any()):  # one look for all layers, since a look waits for the device
        return
    block, rows = next((block, rows) for block, rows in zip(blocks, bad, strict=True) if bool(rows.any()))
    token = int(rows.nonzero()[0])
    found = experts[places[block.place], token].tolist()
    raise SwapqError(
        f"replay: {block.name}: token {token} has the experts {found}; expected {len(found)} different ids below {block.num_experts}, "
        "or -1 everywhere for no record"
    )
