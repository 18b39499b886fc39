"""A trainer of `swapq_trl` in server mode, in a process of its own, beside a server that a test has started."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
import torch

from tests.trl.jobs import PROMPTS, logged, outcome, own_digests, tiny, trainer

__all__ = ["export", "judge", "outlived", "train"]

STEPS = 3
#: what a sum in another order may change, as in colocate mode
ROUNDING = {"nvfp4-rl": 0.15, "mxfp8-rl": 0.05}


def _converted(recipe: str) -> Any:
    import swapq

    model = tiny()
    model.config.max_position_embeddings = 512  # for an answer so long that a sync meets it
    return swapq.convert(model, recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))


def export(recipe: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """What the server starts from: the trainer's model before any step, with a tokenizer."""
    from arithmetic.model import build_tokenizer

    import swapq

    swapq.export(_converted(recipe).to(dtype), folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def train(recipe: str, url: str, group_port: int, transfer: str = "nccl", **options: Any) -> dict[str, Any]:
    """Three steps, then the server is asked from all sides."""
    if transfer == "file":
        _use_file_client()
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
    with _other_weights(model):
        built.sync_weights()
        others = _scores(client)

    generation._iter_named_params, honest = _flipped(generation), generation._iter_named_params
    faulty = outcome(built.sync_weights) | {"paused": _is_paused(url)}
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
        "paused": _is_paused(url),
        "seconds": [ready, trained],
        "device": str(built.accelerator.device),
    }


def outlived(recipe: str, url: str, store: str) -> dict[str, Any]:
    """Answers of a server with a KV connector before and after updates, during one, and what is refused."""
    from tests.vllm.connector import ForgettingConnector

    _use_file_client()
    model = _converted(recipe)

    def connect() -> Any:
        return trainer(model, steps=1, vllm_mode="server", vllm_server_base_url=url, vllm_group_port=0)

    built = connect()

    found: dict[str, Any] = {}
    built.sync_weights()
    found["first"] = [_from_a_long_prompt(url), _from_a_long_prompt(url)]
    with _other_weights(model):
        built.sync_weights()
        found["others"] = _from_a_long_prompt(url)
    built.sync_weights()
    found["restored"] = _from_a_long_prompt(url)

    undisturbed = _Streamed(url).result()
    running = _Streamed(url)
    assert running.begun.wait(60)
    with _other_weights(model):
        found["running_at_the_sync"] = running.is_running()
        built.sync_weights()
        found["over_others"] = _Streamed(url).result() != undisturbed
    found["undisturbed"] = running.result() == undisturbed
    built.sync_weights()

    with _other_weights(model):
        lock = Path(store) / ForgettingConnector.LOCK
        lock.touch()
        found["failed"] = outcome(built.sync_weights)
        found["paused"] = _is_paused(url)
        lock.unlink()
    found["after_failing"] = _from_a_long_prompt(url)[0]
    built.vllm_generation.vllm_client._post(f"{url}/collective_rpc", json={"method": "connector_keeps"})
    found["keeping"] = outcome(connect)
    return found


class _Streamed:
    """A long answer that the server gives token by token, to a client that is not the trainer."""

    def __init__(self, url: str) -> None:
        self.url, self.logprobs, self.begun = url, [], threading.Event()  # type: str, list[float], threading.Event
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        body = _completion(self.url, PROMPTS[0], 400) | {"stream": True}
        with requests.post(f"{self.url}/v1/completions", json=body, stream=True, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[len(b"data: ") :])["choices"]:
                        self.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                    self.begun.set()

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> list[float]:
        self.thread.join(120)
        assert len(self.logprobs) == 400
        return self.logprobs


def _is_paused(url: str) -> bool:
    return requests.get(f"{url}/is_paused", timeout=60).json()["is_paused"]


def _completion(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    model = requests.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 0, "ignore_eos": True}


def _from_a_long_prompt(url: str) -> list[Any]:
    """Log-probabilities of an answer, and how many tokens of the prompt were cached."""
    body = _completion(url, [j * 5 % 64 for j in range(40)], 4)
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=60).json()
    cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return [answer["choices"][0]["logprobs"]["token_logprobs"], cached]


def _use_file_client() -> None:
    import trl.generation.vllm_generation as trl_generation

    from tests.trl.file_transfer import FileClient

    trl_generation.VLLMClient = FileClient


@contextmanager
def _other_weights(model: Any) -> Iterator[None]:
    """Meanwhile every parameter is larger."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    yield
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])


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
    assert result["faulty"]["paused"], "half an update may be served"
    assert result["refused"]["error"] == "SyncError"
    assert not result["paused"]
