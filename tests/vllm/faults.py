"""Updates with a fault, or at a bad moment, in the engine's process: what each raised; the first argument is the engine."""

from typing import Any

import torch
from torch import Tensor

from tests.vllm import inside, updates
from tests.vllm.stack import stacked


def update_with_a_request_begun(llm: Any, directory: str, preempted: bool) -> tuple[str, bool, bool]:
    """An update while a request runs, or waits since it was preempted and holds no blocks: the error, whether the request then ends as it
    does undisturbed, and whether the engine holds what it held."""
    from vllm import SamplingParams

    from swapq.errors import SyncError

    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": inside.PROMPTS[0]}
    undisturbed = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    before, said = inside.served_digests(llm), "nothing"
    llm.llm_engine.add_request("begun", prompt, params)
    for _ in range(3):
        llm.llm_engine.step()
    if preempted:
        llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
    try:
        updates.stacked_update(llm, directory)
    except SyncError as error:
        said = str(error)
    tokens: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
    return said, tokens == list(undisturbed), inside.served_digests(llm) == before


def update_with_a_connector_that_keeps(llm: Any, directory: str) -> tuple[str, bool]:
    """An update of an engine whose KV connector has no ``reset_cache``: the error, and whether the engine holds what it held."""
    from swapq.errors import UnsupportedError

    kind = type(llm.llm_engine.engine_core.engine_core.scheduler.connector)
    honest, before, said = kind.reset_cache, inside.served_digests(llm), "nothing"
    del kind.reset_cache
    try:
        updates.update(llm, directory)
    except UnsupportedError as error:
        said = str(error)
    finally:
        kind.reset_cache = honest
    return said, inside.served_digests(llm) == before


def update_with_tied_head(llm: Any, directory: str, differ: bool) -> str:
    """An update that names the head of a model whose head is its embedding: the error."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    weights = inside.weights(directory)
    head = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"] = head + 1 if differ else head
    try:
        apply_update(llm, weights.items(), {n: tensor_digest(t) for n, t in weights.items()})
    except SyncError as error:
        return str(error)
    return "nothing"


def half_stacked_update(llm: Any, directory: str, layer: str, side: str) -> str:
    """An update in which one linear of a layer's experts comes as stacks and the other one by one: the error."""
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    weights = inside.weights(directory)
    whole = stacked(weights, llm)
    sent = {n: t for n, t in whole.items() if not n.startswith(layer) or side in n}
    sent |= {n: t for n, t in weights.items() if n.startswith(layer) and (".down_proj." in n) != (side == "down_proj")}
    try:
        apply_update(llm, sent.items())
    except SyncError as error:
        return str(error)
    return "nothing"


def interrupted_update(llm: Any, directory: str, name: str, as_stacks: bool) -> str:
    """An update that the user interrupts before ``name``: whether the engine serves afterwards."""
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    weights = stacked(inside.weights(directory), llm) if as_stacks else inside.weights(directory)

    def send() -> Any:
        for each, tensor in weights.items():
            if each == name:
                raise KeyboardInterrupt
            yield each, tensor

    try:
        apply_update(llm, send())
    except KeyboardInterrupt:
        try:
            inside.score(llm)
        except SyncError as error:
            return str(error)
    return "serves"


def update_asleep(llm: Any, directory: str) -> str:
    """An update of an engine whose weights sleep: the error, and whether the engine was left as it was."""
    from swapq.errors import SyncError

    tags, before = llm.llm_engine.model_executor.sleeping_tags, inside.served_digests(llm)
    tags |= {"weights", "kv_cache"}
    try:
        updates.update(llm, directory)
    except SyncError as error:
        tags.clear()
        return str(error) if inside.served_digests(llm) == before else "changed"
    finally:
        tags.clear()
    return "nothing"


def faulty_update(llm: Any, directory: str, fault: str, name: str, as_stacks: bool = False) -> tuple[str, str]:
    """An update with one fault: the error it raised, and what a request raised afterwards ("served" if nothing)."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    good = stacked(inside.weights(directory), llm) if as_stacks else inside.weights(directory)
    digests = {n: tensor_digest(t) for n, t in good.items()}
    items = list(good.items())
    if fault == "missing":
        items = [i for i in items if i[0] != name]
    elif fault == "misnamed":
        items = [(n + "s" if n == name else n, t) for n, t in items]
    elif fault == "repeated":
        items.append((name, good[name]))
    elif fault == "flipped":
        good[name].view(torch.uint8).view(-1)[5] ^= 1
    elif fault == "bf16":
        items = [(n, torch.zeros(t.shape, dtype=torch.bfloat16) if n == name else t) for n, t in items]
    elif fault == "shape":
        items = [(n, t[:-1] if n == name else t) for n, t in items]
    elif fault == "nan_scale":
        good[name].view(torch.uint8).view(-1)[5] = 0xFF
        digests = None
    elif fault == "stale":
        digests[name] = tensor_digest(torch.zeros_like(good[name]))
    elif fault == "undigested":
        del digests[name]
    elif fault == "unequal":
        good[name][3, 1] *= 2
        digests = None
    elif fault == "both ways":
        items.append(next(i for i in inside.weights(directory).items() if i[0].startswith(name.split("gate_up")[0])))
    elif fault == "e8m0":
        items = [(n, t.view(torch.float8_e8m0fnu) if n == name else t) for n, t in items]
    elif fault == "raises":
        items = _raising(items, name)
    raised = "nothing"
    try:
        apply_update(llm, items, digests)
    except SyncError as error:
        raised = str(error)
    try:
        inside.score(llm)
    except SyncError as error:
        return raised, str(error)
    return raised, "served"


def _raising(items: list[tuple[str, Tensor]], name: str) -> Any:
    for n, t in items:
        if n == name:
            raise RuntimeError(f"quantizing {name} failed")
        yield n, t


def scale_pair(llm: Any, directory: str, name: str) -> str:
    """An update whose gate scale differs from its up scale: the error."""
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    weights = inside.weights(directory)
    weights[name] = weights[name] * 2
    try:
        apply_update(llm, weights.items())
    except SyncError as error:
        return str(error)
    return "nothing"


def changed_after_arrival(llm: Any, directory: str, name: str, as_stacks: bool = False) -> str:
    """An update after which one byte of the live tensor is wrong: the error."""
    from swapq.errors import SyncError
    from swapq_vllm.ledger import Ledger
    from swapq_vllm.receiver import apply_update

    compare = Ledger.compare_held

    def spoil_and_compare(self: Ledger) -> Any:
        piece = self.served.placements[name].pieces[0]
        live = getattr(piece.layer, piece.name).data
        live.view(torch.uint8).view(-1)[piece.live.offset * live.element_size()] ^= 1
        return compare(self)

    Ledger.compare_held = spoil_and_compare
    try:
        weights = stacked(inside.weights(directory), llm) if as_stacks else inside.weights(directory)
        apply_update(llm, weights.items())
    except SyncError as error:
        return str(error)
    finally:
        Ledger.compare_held = compare
    return "nothing"
