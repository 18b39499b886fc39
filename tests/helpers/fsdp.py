"""One training step of a converted model under FSDP2 beside the same step of the whole model, as facts for a test to judge.

Masters are FP32, gathered in BF16 and reduced in FP32, as Accelerate does with ``bf16``. The whole model holds the same masters in BF16.
"""

import copy
import filecmp
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

import swapq
from tests.helpers.models import qwen3_moe
from tests.helpers.ranks import WORLD, shard, train_step, whole_gradients

__all__ = ["CASES", "judge", "steps"]

#: recipe, backward mode
CASES = [("nvfp4-rl", "dequantized"), ("mxfp8-rl", "low_precision"), ("mxfp8-rl", "high_precision")]
RATE = 0.5
#: sizes that the kernels of a GPU take, and enough tokens for experts with many rows and with few
SIZES: dict[str, object] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "attn_implementation": "eager",  # whose gradients do not depend on the order in which blocks finish
}


def build(recipe: str, backward: str, device: torch.device) -> PreTrainedModel:
    """The converted model with FP32 masters."""
    model = qwen3_moe(**SIZES).to(device)
    return swapq.convert(model, recipe, backward=backward, last_layers_bf16=0)


def in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose parameters are BF16; buffers (RoPE's frequencies) stay as they are, as FSDP leaves them."""
    lowered = copy.deepcopy(model)
    for p in lowered.parameters():
        p.data = p.data.to(torch.bfloat16)
    return lowered


def batch(device: torch.device, half: int | None = None) -> Tensor:
    ids = torch.randint(3, 64, (2 * WORLD, 48), generator=torch.Generator().manual_seed(1)).to(device)
    return ids if half is None else ids[2 * half : 2 * half + 2]


def steps(rank: int, device: torch.device, folder: str) -> None:
    """Every case, one after the other; rank 0 writes what all ranks found to ``folder``."""
    for recipe, backward in CASES:
        found = one_step(rank, device, Path(folder) / f"{recipe}-{backward}", recipe, backward)
        everywhere: list[Any] = [None] * WORLD
        dist.all_gather_object(everywhere, found)
        if rank == 0:
            (Path(folder) / f"{recipe}-{backward}.json").write_text(json.dumps(everywhere))


def one_step(rank: int, device: torch.device, folder: Path, recipe: str, backward: str) -> dict[str, Any]:
    """What this rank saw."""
    model = build(recipe, backward, device)
    plain = in_bf16(model)
    alone = swapq.digest(model)
    if rank == 0:
        swapq.export(copy.deepcopy(model), folder / "alone")
    with torch.no_grad():
        expected = plain(batch(device)).logits

    shard(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=RATE
    )  # before a forward: what it gathers is no parameter to train
    found: dict[str, Any] = {"codes_as_alone": _different(alone, swapq.digest(model))}
    swapq.export(model, folder / "sharded")
    if rank == 0:
        found["files_as_alone"] = _different_files(folder / "alone", folder / "sharded")
    with torch.no_grad():
        logits = model(batch(device)).logits
    found["logits"] = _difference(logits, expected)
    found["codes_as_alone"] += _different(alone, swapq.digest(model))  # the root is gathered since that forward

    gradients: dict[str, Tensor] = {}
    for half in range(WORLD):
        plain.zero_grad()
        train_step(plain, batch(device, half))
        for name, grad in whole_gradients(plain).items():
            gradients[name] = gradients.get(name, 0) + grad.float() / WORLD
    start = time.perf_counter()
    train_step(model, batch(device, rank))
    found["gradients"] = {name: _difference(grad, gradients[name]) for name, grad in whole_gradients(model).items()}
    optimizer.step()
    found["seconds"] = time.perf_counter() - start

    after = swapq.digest(model)
    swapq.export(model, folder / "after")
    found["changed"] = len(_different(alone, after))
    found["after"] = after
    found["file_after"] = _different(after, swapq.digest(folder / "after"))
    stepped = build(recipe, backward, device)
    with torch.no_grad():
        for name, p in stepped.named_parameters():
            p.add_(gradients[name], alpha=-RATE)
    found["unlike_one_process"] = _different(swapq.digest(stepped), after)
    return found


def _different(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Names that are not in both, or not with the same digest."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def _different_files(a: Path, b: Path) -> list[str]:
    names = {p.name for folder in (a, b) for p in folder.iterdir()}
    return sorted(filecmp.cmpfiles(a, b, names, shallow=False)[1] + filecmp.cmpfiles(a, b, names, shallow=False)[2])


def _difference(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Elements that differ, their largest difference, and the difference's norm beside that of what was expected."""
    a, b = found.detach().double(), expected.detach().double()
    return {
        "elements": a.numel(),
        "unequal": int((a != b).sum()),
        "largest": float((a - b).abs().max()),
        "relative": float((a - b).norm() / b.norm().clamp_min(1e-30)),
    }


def judge(folder: Path, recipe: str, backward: str) -> None:
    """Assert what must hold of the facts of one case, and print its figures."""
    ranks = json.loads((folder / f"{recipe}-{backward}.json").read_text())
    assert len(ranks) == WORLD
    first = ranks[0]
    gradients = first["gradients"]
    equal = sum(g["unequal"] == 0 for g in gradients.values())
    worst = max(gradients, key=lambda name: gradients[name]["relative"])
    print(
        f"\n{recipe}, {backward}: {len(first['after'])} digests; logits {first['logits']['unequal']} of "
        f"{first['logits']['elements']} unequal (largest {first['logits']['largest']:.3g}); gradients {equal} of {len(gradients)} "
        f"bit-equal, worst {worst} {gradients[worst]['relative']:.2e}; {first['changed']} tensors changed by the step, "
        f"{len(first['unlike_one_process'])} of them unlike one process's step; {first['seconds']:.2f} s"
    )
    assert first["files_as_alone"] == []
    for rank, found in enumerate(ranks):
        assert found["codes_as_alone"] == [], f"rank {rank}"
        assert found["logits"]["unequal"] == 0, f"rank {rank}: {found['logits']}"
        assert found["gradients"] == gradients, f"rank {rank} gathered other gradients than rank 0"
        assert found["after"] == first["after"], f"rank {rank} holds other weights after the step"
        assert found["file_after"] == [], f"rank {rank}"
        # most of the tensors: an expert without a token keeps its codes
        assert found["changed"] > len(found["after"]) / 2
    assert gradients[worst]["relative"] < 2**-8, f"{worst}: {gradients[worst]}"
    if equal == len(gradients):
        assert first["unlike_one_process"] == [], (
            f"the same gradients made other weights: {first['unlike_one_process']}"
        )
