"""Functions that run in the engine's process; the first argument is the engine. Updates: ``updates.py``; faulty ones: ``faults.py``."""

import gc
import os
from typing import Any

import torch
from torch import Tensor

from tests.vllm.stack import stacked

PROMPTS = [[(i * 7 + j * 3) % 64 for j in range(12)] for i in range(6)]


def score(llm: Any) -> Tensor:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    return torch.tensor([[next(iter(position.values())).logprob for position in o.prompt_logprobs[1:]] for o in out])


def weights(directory: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(os.path.join(directory, "model.safetensors"))


def _model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


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
        return sent, {n: tensor_digest(t) for n, t in stacked(weights(folder), llm).items()}


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker


def generated_from_a_long_prompt(llm: Any) -> tuple[list[tuple[int, float]], int]:
    """Tokens with their log-probabilities, and how many tokens of the prompt were cached."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [j * 5 % 64 for j in range(40)]}], params, use_tqdm=False)[0]
    tokens = [next(iter(position.items())) for position in out.outputs[0].logprobs]
    return [(token, found.logprob) for token, found in tokens], out.num_cached_tokens


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


def verify_workers(llm: Any, directory: str) -> list[dict[str, list[str]]]:
    """What every worker of an engine with several says about a checkpoint's digests."""
    from swapq.digest import tensor_digest

    return llm.collective_rpc("swapq_verify", args=({n: tensor_digest(t) for n, t in weights(directory).items()},))


def verify_tied_head(llm: Any, directory: str, differ: bool) -> list[str]:
    """What a worker calls wrong when a sender names the head of a model whose head is its embedding."""
    from swapq.digest import tensor_digest
    from swapq_vllm.worker import WorkerExtension

    digests = {n: tensor_digest(t) for n, t in weights(directory).items()}
    digests["lm_head.weight"] = "0" * 32 if differ else digests["model.embed_tokens.weight"]
    return WorkerExtension.swapq_verify(worker_of(llm), digests)["wrong"]


def verify(llm: Any, directory: str, spoilt: str | None) -> tuple[dict[str, int], str]:
    """The worker method of a server: counts by kind, and whether the engine serves afterwards."""
    from swapq.digest import tensor_digest
    from swapq.errors import SyncError
    from swapq_vllm.worker import WorkerExtension

    digests = {n: tensor_digest(t) for n, t in weights(directory).items()}
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
