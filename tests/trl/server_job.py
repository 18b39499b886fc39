"""A trainer of `swapq_trl` in server mode, in a process of its own, beside a server that a test has started."""

import time
from pathlib import Path
from typing import Any

import torch

from tests.trl.jobs import PROMPTS, logged, outcome, own_digests, tiny, trainer

__all__ = ["export", "judge", "train"]

STEPS = 3
#: what a sum in another order may change, as in colocate mode
ROUNDING = {"nvfp4-rl": 0.15, "mxfp8-rl": 0.05}


def _converted(recipe: str) -> Any:
    import swapq

    return swapq.convert(tiny(), recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))


def export(recipe: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """What the server starts from: the trainer's model before any step, with a tokenizer."""
    from arithmetic.model import build_tokenizer

    import swapq

    swapq.export(_converted(recipe).to(dtype), folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def train(recipe: str, url: str, group_port: int, transfer: str = "nccl", **options: Any) -> dict[str, Any]:
    """Three steps, then the server is asked from all sides."""
    import trl.generation.vllm_generation as trl_generation

    if transfer == "file":
        from tests.trl.file_transfer import FileClient

        trl_generation.VLLMClient = FileClient
    start = time.perf_counter()
    model = _converted(recipe)
    built = trainer(
        model, steps=STEPS, vllm_mode="server", vllm_server_base_url=url, vllm_group_port=group_port, **options
    )
    generation = built.vllm_generation
    client = generation.vllm_client

    def answers(method: str, **arguments: Any) -> list[Any]:
        return client._post(f"{url}/collective_rpc", json={"method": method, "kwargs": arguments})["results"]

    compared: list[dict[str, int]] = []
    send = generation.sync_weights

    def watched() -> Any:
        report = send()
        for found in answers("swapq_verify", expected_digests=own_digests(model)):
            compared.append({kind: len(names) for kind, names in found.items()})
        return report

    generation.sync_weights = watched
    ready = time.perf_counter() - start
    built.train()
    trained = time.perf_counter() - start - ready

    report = built.sync_weights()
    generation.sync_weights = send
    held, own = answers("swapq_digests"), own_digests(model)
    scores = _scores(client)
    built.sync_weights()
    again = _scores(client)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    built.sync_weights()
    others = _scores(client)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])

    generation._iter_named_params, honest = _flipped(generation), generation._iter_named_params
    faulty = outcome(built.sync_weights)
    refused = outcome(lambda: generation.generate(PROMPTS, None, 1))
    generation._iter_named_params = honest
    built.sync_weights()
    return {
        "history": logged(built),
        "compared": compared,
        "unlike": [
            name for found in held for name in sorted(found.keys() | own.keys()) if found.get(name) != own.get(name)
        ],
        "digests": len(own),
        "report": [report.seconds, report.bytes, report.tensors, report.verified],
        "scores": [scores, again, others, _scores(client)],
        "faulty": faulty,
        "refused": refused,
        "seconds": [ready, trained],
        "device": str(built.accelerator.device),
    }


def _scores(client: Any) -> list[Any]:
    """Greedy tokens of fixed prompts, with log-probabilities. One prompt at a time: how a server batches them depends on the moment."""
    found = []
    for prompt in PROMPTS:
        output = client.generate(prompts=[prompt], temperature=0.0, max_tokens=6, logprobs=0)
        found.append([output["completion_ids"], output["logprobs"]])
    return found


def _flipped(generation: Any) -> Any:
    """What is sent, with a byte flipped after its digest was taken."""
    honest = generation._iter_named_params

    def tensors() -> Any:
        for name, tensor in honest():
            if name == "model.layers.1.mlp.experts.3.down_proj.weight":
                tensor.view(torch.uint8)[3, 5] ^= 1
            yield name, tensor

    return tensors


def judge(recipe: str, result: dict[str, Any], started: float) -> None:
    """Assert what must hold of :func:`train`, and print its figures."""
    rows, (seconds, size, tensors, verified) = result["history"], result["report"]
    mismatch = [row["swapq/mismatch_abs_mean"] for row in rows]
    print(
        f"\n{recipe}, server mode on {result['device']}: mean |log-probability difference| by step "
        f"{', '.join(f'{m:.5f}' for m in mismatch)}; {verified} of {tensors} tensors verified ({result['digests']} digests), "
        f"{size} bytes, {seconds:.3f} s a sync; server up in {started:.0f} s, trainer in {result['seconds'][0]:.0f} s, "
        f"{len(rows)} steps in {result['seconds'][1]:.0f} s"
    )
    assert [row["step"] for row in rows] == [1, 2, 3]
    for found in result["compared"]:
        assert found == {"equal": result["digests"], "wrong": 0, "unreadable": 0, "unsent": 0, "unknown": 0}
    assert len(result["compared"]) == STEPS + 1
    assert verified == tensors == result["digests"]
    for row in rows:
        assert row["swapq/sync_tensors_verified"] == tensors
        assert row["swapq/sync_bytes"] == size
        assert 0 < row["swapq/mismatch_abs_mean"] < ROUNDING[recipe]
        assert row["grad_norm"] > 0
    first, again, others, restored = result["scores"]
    assert again == first, "the same weights sent twice"
    assert others != first, "other weights"
    assert restored == first, "the first weights again, after an update that failed"
    assert result["faulty"]["error"] == "SyncError"
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in result["faulty"]["message"]
    assert result["refused"]["error"] == "SyncError"
