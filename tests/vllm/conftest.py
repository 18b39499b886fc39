"""Tiny Qwen3-MoE checkpoints in each recipe, and one engine for each that all modules share, one after the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapq
from tests.helpers.models import qwen3_moe
from tests.vllm.engine import Engine

pytest.importorskip("vllm")

#: recipe, and what it overrides: some BF16 experts beside the quantized ones
RECIPES: dict[str, dict[str, object]] = {
    "nvfp4-rl": {"last_layers_bf16": 1},
    "mxfp8-rl": {"last_layers_bf16": 1},
    "fp8-block-rl": {"last_layers_bf16": 1},
    "int4-qat": {"last_layers_bf16": 1, "weights": {"routed_experts": "int4_g32"}},
    "bf16": {},
}
#: recipes that quantize linears outside the experts
LINEARS = ("mxfp8-rl", "fp8-block-rl")


def tiny(seed: int = 0, **sizes: object) -> torch.nn.Module:
    """Two layers, eight experts; expert weights large enough to matter for the log-probabilities."""
    model = qwen3_moe(**({"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 64} | sizes)).to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() > 1 else 1 + noise * 0.05)
    return model.eval()


class Exports:
    """Checkpoint folders by recipe and seed, written once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __call__(self, recipe: str, seed: int = 0) -> Path:
        path = self.root / f"{recipe}-{seed}"
        if not path.exists():
            swapq.export(swapq.convert(tiny(seed), recipe, **RECIPES[recipe]), path)
        return path


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="session")
def recipe(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def engine(exports: Exports, recipe: str) -> Iterator[Engine]:
    engine = Engine(exports(recipe), enforce_eager=True)
    yield engine
    engine.close()
