"""Functions that run in the engine's process; the first argument is the engine."""

import gc
import os
from typing import Any

import torch
from torch import Tensor

from tests.vllm.stack import stacked

PROMPTS = [[(i * 7 + j * 3) % 64 for j in range(12)] for i in range(6)]


def _logprobs(llm: Any) -> Tensor:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return torch.tensor([[next(iter(position.values())).logprob for position in o.prompt_logprobs[1:]] for o in out])


def _weights(directory: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(os.path.join(directory, "model.safetensors"))


def _model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def _model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner


def score(llm: Any) -> Tensor:
    return _logprobs(llm)


def generate(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=1.0, seed=1, detokenize=False, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in out]


def methods(llm: Any) -> dict[str, str]:
    return {n: type(m.quant_method).__name__ for n, m in _model(llm).named_modules() if hasattr(m, "quant_method")}


def running(llm: Any) -> dict[str, tuple[str, str]]:
    from swapq_vllm.receiver import running

    return running(llm)


def running_with_bf16_rows(llm: Any, path: str) -> dict[str, tuple[str, str]]:
    """The same while one layer leaves its rows as they are, which no digest can see."""
    method = _model(llm).get_submodule(path).quant_method
    honest, method.activations = method.activations, "bf16"
    try:
        return running(llm)
    finally:
        method.activations = honest


def served(llm: Any) -> dict[str, Tensor]:
    from swapq_vllm.receiver import served_tensors

    return {name: tensor.clone() for name, tensor in served_tensors(llm)}


def served_digests(llm: Any) -> dict[str, str]:
    from swapq_vllm.receiver import served_digests

    return served_digests(llm)


def update(llm: Any, directory: str) -> Any:
    """One verified update with the tensors of a checkpoint; the report as a dictionary."""
    import dataclasses

    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update

    weights = _weights(directory)
    return dataclasses.asdict(apply_update(llm, weights.items(), {n: tensor_digest(t) for n, t in weights.items()}))


def stacked_update(llm: Any, directory: str) -> Any:
    """One verified update whose quantized experts come as stacks; the report, and the names of the stacks."""
    import dataclasses

    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update

    weights = stacked(_weights(directory), llm)
    report = apply_update(llm, weights.items(), {n: tensor_digest(t) for n, t in weights.items()})
    return dataclasses.asdict(report), sorted(
        n for n in weights if "_proj." in n and ".experts." in n and "experts." in n
    )


def stacked_update_and_score(llm: Any, directory: str) -> Tensor:
    stacked_update(llm, directory)
    return _logprobs(llm)


def sent_stacks(llm: Any, seed: int, recipe: str, overrides: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of a model's tensors as the trainer sends them, and of stacks built from its export."""
    import tempfile

    import swapq
    from swapq.checkpoint.tensors import checkpoint_tensors
    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import stacked_experts
    from tests.vllm.conftest import tiny

    model = swapq.convert(tiny(seed), recipe, **overrides)
    sent = {n: tensor_digest(t) for n, t in checkpoint_tensors(model, stacked=stacked_experts(llm))}
    with tempfile.TemporaryDirectory() as folder:
        swapq.export(model, folder)
        return sent, {n: tensor_digest(t) for n, t in stacked(_weights(folder), llm).items()}


def reloaded_score(llm: Any, directory: str) -> Tensor:
    """Log-probabilities after an update all of whose tensors went through vLLM's reload, one by one."""
    from swapq_vllm.served import Served

    served = Served.of(_worker(llm))
    honest = served.takes_copies
    served.takes_copies = False
    try:
        update(llm, directory)
    finally:
        served.takes_copies = honest
    return _logprobs(llm)


def _worker(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def reloads(llm: Any, directory: str, as_stacks: bool) -> int:
    """How often an update used vLLM's reload."""
    runner = _model_runner(llm)
    calls, honest = [], type(runner).reload_weights

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return honest(self, *args, **kwargs)

    type(runner).reload_weights = counted
    try:
        (stacked_update if as_stacks else update)(llm, directory)
    finally:
        type(runner).reload_weights = honest
    return len(calls)


def reads_of_an_update(llm: Any, directory: str, as_stacks: bool) -> tuple[int, list[str]]:
    """How many tensors a verified update sent; then, in order, what the host asked of tensors, and "sums" for each one digested."""
    import sys

    from swapq.digest import Digests
    from swapq_trl.sending import with_digests
    from swapq_vllm.receiver import apply_update
    from tests.helpers.reads import Reads

    weights = stacked(_weights(directory), llm) if as_stacks else _weights(directory)
    module, digests = sys.modules[Digests.__module__], Digests()
    one, many = module.add_word_sums, module.add_many_word_sums
    with Reads() as reads:

        def noted(words: Tensor, into: Tensor) -> None:
            reads.names.append("sums")
            one(words, into)

        def all_noted(words: list[Tensor], into: Tensor) -> None:
            reads.names += ["sums"] * len(words)
            many(words, into)

        module.add_word_sums, module.add_many_word_sums = noted, all_noted
        try:
            apply_update(llm, with_digests(iter(weights.items()), digests), digests)
        finally:
            module.add_word_sums, module.add_many_word_sums = one, many
    return len(weights), reads.names


def prefix_cache_after_an_update(llm: Any, directory: str) -> dict[str, int]:
    """Blocks of the KV cache that hold a prefix before an update and after it, that the update visits, and in all."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    every, visited, honest = list(pool.blocks), [], KVCacheBlock.reset_hash
    prompts = [{"prompt_token_ids": [(i * 5 + j) % 64 for j in range(40)]} for i in range(3)]
    llm.generate(prompts, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    before = sum(block.block_hash is not None for block in every)

    def noted(block: Any) -> None:
        visited.append(block.block_id)
        honest(block)

    KVCacheBlock.reset_hash = noted
    try:
        stacked_update(llm, directory)
    finally:
        KVCacheBlock.reset_hash = honest
    return {
        "before": before,
        "visited": len(visited),
        "after": sum(block.block_hash is not None for block in every) + len(pool.cached_block_hash_to_block),
        "same list": pool.blocks == every,
        "all": len(every),
    }


def update_with_a_request_begun(llm: Any, directory: str, preempted: bool) -> tuple[str, bool, bool]:
    """An update while a request runs, or waits since it was preempted and holds no blocks: the error, whether the request then ends as it
    does undisturbed, and whether the engine holds what it held."""
    from vllm import SamplingParams

    from swapq.errors import SyncError

    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    undisturbed = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    before, said = served_digests(llm), "nothing"
    llm.llm_engine.add_request("begun", prompt, params)
    for _ in range(3):
        llm.llm_engine.step()
    if preempted:
        llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache(reset_running_requests=True)
    try:
        stacked_update(llm, directory)
    except SyncError as error:
        said = str(error)
    tokens: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
    return said, tokens == list(undisturbed), served_digests(llm) == before


def generated_from_a_long_prompt(llm: Any) -> tuple[list[tuple[int, float]], int]:
    """Tokens with their log-probabilities, and how many tokens of the prompt were cached."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [j * 5 % 64 for j in range(40)]}], params, use_tqdm=False)[0]
    tokens = [next(iter(position.items())) for position in out.outputs[0].logprobs]
    return [(token, found.logprob) for token, found in tokens], out.num_cached_tokens


def update_with_a_connector_that_keeps(llm: Any, directory: str) -> tuple[str, bool]:
    """An update of an engine whose KV connector has no ``reset_cache``: the error, and whether the engine holds what it held."""
    from swapq.errors import UnsupportedError

    kind = type(llm.llm_engine.engine_core.engine_core.scheduler.connector)
    honest, before, said = kind.reset_cache, served_digests(llm), "nothing"
    del kind.reset_cache
    try:
        update(llm, directory)
    except UnsupportedError as error:
        said = str(error)
    finally:
        kind.reset_cache = honest
    return said, served_digests(llm) == before


def update_with_tied_head(llm: Any, directory: str, differ: bool) -> str:
    """An update that names the head of a model whose head is its embedding: the error."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    weights = _weights(directory)
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

    weights = _weights(directory)
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

    weights = stacked(_weights(directory), llm) if as_stacks else _weights(directory)

    def send() -> Any:
        for each, tensor in weights.items():
            if each == name:
                raise KeyboardInterrupt
            yield each, tensor

    try:
        apply_update(llm, send())
    except KeyboardInterrupt:
        try:
            _logprobs(llm)
        except SyncError as error:
            return str(error)
    return "serves"


def update_asleep(llm: Any, directory: str) -> str:
    """An update of an engine whose weights sleep: the error, and whether the engine was left as it was."""
    from swapq.errors import SyncError

    tags, before = llm.llm_engine.model_executor.sleeping_tags, served_digests(llm)
    tags |= {"weights", "kv_cache"}
    try:
        update(llm, directory)
    except SyncError as error:
        tags.clear()
        return str(error) if served_digests(llm) == before else "changed"
    finally:
        tags.clear()
    return "nothing"


def update_and_score(llm: Any, directory: str) -> Tensor:
    update(llm, directory)
    return _logprobs(llm)


def update_from_one_buffer(llm: Any, directory: str) -> dict[str, str]:
    """A sender that overwrites its buffer as soon as it is asked for the next tensor."""
    from swapq_vllm.receiver import apply_update, served_digests

    weights = _weights(directory)
    buffer = torch.empty(max(t.numel() * t.element_size() for t in weights.values()), dtype=torch.uint8)

    def send() -> Any:
        for name, tensor in weights.items():
            raw = buffer[: tensor.numel() * tensor.element_size()]
            raw.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
            yield name, raw.view(tensor.dtype).reshape(tensor.shape)
            buffer.fill_(0x55)

    apply_update(llm, send())
    return served_digests(llm)


def update_from_views(llm: Any, directory: str) -> dict[str, str]:
    """A sender whose tensors are views of one storage, each at an offset of its own."""
    from swapq.digest import tensor_digest
    from swapq_vllm.receiver import apply_update, served_digests

    weights = _weights(directory)
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in weights.values()]
    whole = torch.cat([torch.nn.functional.pad(r, (16, -r.numel() % 16)) for r in raw])
    sent, start = {}, 0
    for (name, tensor), r in zip(weights.items(), raw, strict=True):
        sent[name] = whole[start + 16 : start + 16 + r.numel()].view(tensor.dtype).view(tensor.shape)
        start += 16 + r.numel() + -r.numel() % 16
    apply_update(llm, sent.items(), {n: tensor_digest(t) for n, t in sent.items()})
    return served_digests(llm)


def update_with_poisoned_memory(llm: Any, directory: str) -> Tensor:
    """An update and a score during which every uninitialized tensor is filled with NaN (integers: the largest value)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        update(llm, directory)
        return _logprobs(llm)
    finally:
        torch.use_deterministic_algorithms(False)


def addresses(llm: Any) -> dict[str, int]:
    """Addresses of every parameter and of the operands that the CPU engine keeps."""
    found = {name: p.data_ptr() for name, p in _model(llm).named_parameters()}
    for name, module in _model(llm).named_modules():
        operands = getattr(module, "swapq_operands", None)
        for i, operand in enumerate(operands if isinstance(operands, tuple) else [operands] if operands else []):
            found |= {f"{name}.operand{i}.{j}": t.data_ptr() for j, t in enumerate(operand.tensors)}
    return found


def tensor_bytes(llm: Any) -> int:
    """Bytes of all storages that live tensors hold."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def experts(llm: Any, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The expert block of the live engine."""
    module = _model(llm).model.layers[layer].mlp.experts.routed_experts
    with torch.inference_mode():
        return module.quant_method.apply(module, x, weights, ids.to(torch.int32), None, None).clone()


def linear(llm: Any, path: str, x: Tensor) -> Tensor:
    """A linear of the live engine."""
    module = _model(llm).get_submodule(path)
    with torch.inference_mode():
        return module.quant_method.apply(module, x, None).clone()


def faulty_update(llm: Any, directory: str, fault: str, name: str, as_stacks: bool = False) -> tuple[str, str]:
    """An update with one fault: the error it raised, and what a request raised afterwards ("served" if nothing)."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.receiver import apply_update

    good = stacked(_weights(directory), llm) if as_stacks else _weights(directory)
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
        items.append(next(i for i in _weights(directory).items() if i[0].startswith(name.split("gate_up")[0])))
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
        _logprobs(llm)
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

    weights = _weights(directory)
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
        weights = stacked(_weights(directory), llm) if as_stacks else _weights(directory)
        apply_update(llm, weights.items())
    except SyncError as error:
        return str(error)
    finally:
        Ledger.compare_held = compare
    return "nothing"


def update_workers(llm: Any, directory: str) -> tuple[list[dict[str, Any]], Tensor]:
    """Every worker spoils its experts and receives stacks: what each says, and the scores afterwards."""
    held = llm.collective_rpc("receive_stacks", args=(directory,))
    llm.reset_prefix_cache()
    return held, _logprobs(llm)


def verify_workers(llm: Any, directory: str) -> list[dict[str, list[str]]]:
    """What every worker of an engine with several says about a checkpoint's digests."""
    from swapq.digest import tensor_digest

    return llm.collective_rpc("swapq_verify", args=({n: tensor_digest(t) for n, t in _weights(directory).items()},))


def verify_tied_head(llm: Any, directory: str, differ: bool) -> list[str]:
    """What a worker calls wrong when a sender names the head of a model whose head is its embedding."""
    from swapq.digest import tensor_digest
    from swapq_vllm.worker import WorkerExtension

    digests = {n: tensor_digest(t) for n, t in _weights(directory).items()}
    digests["lm_head.weight"] = "0" * 32 if differ else digests["model.embed_tokens.weight"]
    return WorkerExtension.swapq_verify(_worker(llm), digests)["wrong"]


def verify(llm: Any, directory: str, spoilt: str | None) -> tuple[dict[str, int], str]:
    """The worker method of a server: counts by kind, and whether the engine serves afterwards."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.worker import WorkerExtension

    digests = {n: tensor_digest(t) for n, t in _weights(directory).items()}
    if spoilt is not None:
        digests[spoilt] = "0" * 32
    worker = llm.llm_engine.model_executor.driver_worker.worker
    found = WorkerExtension.swapq_verify(worker, digests)
    closed = "execute_model" in worker.model_runner.__dict__
    if closed:
        try:
            worker.model_runner.execute_model(None)
        except SyncError as error:
            return {k: len(v) for k, v in found.items()}, str(error)
    return {k: len(v) for k, v in found.items()}, "serves"
