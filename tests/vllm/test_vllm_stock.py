"""Stock vLLM without the plugin: INT4 linears of compressed-tensors run in its own kernel; INT4 experts are read as far as a CPU goes."""

import json
from pathlib import Path

import pytest
import torch

import swapq
from swapq.checkpoint import layouts
from tests.helpers import recipes
from tests.vllm import inside, loader
from tests.vllm.conftest import tiny
from tests.vllm.engine import Engine

pytestmark = pytest.mark.vllm
SIZES = {"hidden_size": 128, "head_dim": 64}


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor(inside.PROMPTS)
    with torch.no_grad():
        every = model(ids).logits.float().log_softmax(-1)
    return every[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "src"
    tiny(**SIZES).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("fmt", ["int4", "int4_g32"])
def test_stock_vllm_serves_int4_linears_as_we_compute_them(source: Path, tmp_path: Path, fmt: str) -> None:
    recipe = {"name": "attention", "weights": {"attention": fmt}, "activations": "bf16", "backward": "dequantized"}
    swapq.convert_checkpoint(source, tmp_path / "out", recipe, layout="compressed-tensors", progress=False)
    engine = Engine(tmp_path / "out", enforce_eager=True)
    try:
        theirs = engine(inside.score)
        assert "CompressedTensorsLinearMethod" in engine(inside.methods).values()
    finally:
        engine.close()
    ours, plain = logprobs(swapq.convert(tiny(**SIZES), recipe)), logprobs(tiny(**SIZES))
    assert (theirs - ours).abs().mean() < 0.1 * (plain - ours).abs().mean()


def test_stock_vllm_takes_int4_experts_for_what_they_are(source: Path, tmp_path: Path) -> None:
    """The CPU build has no kernel for them: it must get as far as looking for one, with every argument right."""
    swapq.convert_checkpoint(
        source, tmp_path / "out", recipes.tiny("int4-qat"), layout="compressed-tensors", progress=False
    )
    engine = Engine(None)
    try:
        assert "No WNA16 MoE backend" in engine(loader.load, str(tmp_path / "out"))
    finally:
        engine.close()


def test_the_names_of_int4_experts_are_those_that_stock_vllm_registers(source: Path, tmp_path: Path) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors_moe
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    swapq.convert_checkpoint(
        source, tmp_path / "out", recipes.tiny("int4-qat"), layout="compressed-tensors", progress=False
    )
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = CompressedTensorsConfig.from_config(described)
    scheme = parsed.get_scheme_dict(torch.nn.Linear(2, 2), "model.layers.0.mlp.experts.0.gate_proj")
    assert scheme is not None
    assert (scheme["weights"].num_bits, scheme["weights"].group_size, scheme["input_activations"]) == (4, 32, None)
    assert parsed.get_scheme_dict(torch.nn.Linear(2, 2), "model.layers.0.self_attn.q_proj") is None
    code = "".join(path.read_text() for path in Path(compressed_tensors_moe.__file__).parent.glob("*moe*.py"))
    for stored in layouts.get("compressed-tensors").stored("x.weight", "int4_g32", (32, 32)):
        assert f'"w13_{stored.name.removeprefix("x.")}"' in code
