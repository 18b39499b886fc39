"""A checkpoint that is not what its configuration says never serves: vLLM's own loader stops, and the tensor is named."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.vllm import loader
from tests.vllm.conftest import Exports
from tests.vllm.engine import Engine, EngineError

pytestmark = pytest.mark.vllm

Tensors = dict[str, Tensor]
Config = dict[str, Any]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def process() -> Iterator[Engine]:
    engine = Engine(None)
    yield engine
    engine.close()


def broken(source: Path, into: Path, change: Callable[[Tensors, Config], None]) -> str:
    """A copy of a checkpoint with tensors and configuration changed."""
    shutil.copytree(source, into)
    tensors = load_file(into / "model.safetensors")
    config = json.loads((into / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    return str(into)


def _quantized(config: Config, fmt: str) -> list[str]:
    return config["quantization_config"]["quantized"][fmt]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _rename(tensors: Tensors, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


CASES: dict[str, tuple[str, Callable[[Tensors, Config], Any], str, str]] = {
    "missing codes": ("nvfp4-rl", lambda t, c: t.pop(EXPERT), EXPERT, "missing"),
    "missing block scales": ("nvfp4-rl", lambda t, c: t.pop(EXPERT + "_scale"), EXPERT + "_scale", "missing"),
    "missing FP32 scale": ("nvfp4-rl", lambda t, c: t.pop(EXPERT + "_scale_2"), EXPERT + "_scale_2", "missing"),
    "missing MXFP8 scales of a linear": ("mxfp8-rl", lambda t, c: t.pop(Q + "_scale"), Q + "_scale", "missing"),
    "misspelt scale": (
        "mxfp8-rl",
        lambda t, c: _rename(t, Q + "_scale", Q.replace("q_proj", "Q_proj") + "_scale"),
        "Q_proj",
        "lists",
    ),
    "a scale more": (
        "nvfp4-rl",
        lambda t, c: t.update({Q + "_scale": torch.ones(4)}),
        Q + "_scale",
        "belongs to no weight",
    ),
    "an expert more": (
        "nvfp4-rl",
        lambda t, c: t.update({EXPERT.replace(".3.", ".9."): t[EXPERT].clone()}),
        "experts.9",
        "lists",
    ),
    "BF16 where codes belong": (
        "nvfp4-rl",
        lambda t, c: t.update({EXPERT: torch.zeros(64, 64, dtype=torch.bfloat16)}),
        EXPERT,
        "bfloat16",
    ),
    "E8M0 where uint8 belongs": (
        "mxfp8-rl",
        lambda t, c: t.update({EXPERT + "_scale": t[EXPERT + "_scale"].view(torch.float8_e8m0fnu)}),
        EXPERT + "_scale",
        "float8_e8m0fnu",
    ),
    "block scales of another shape": (
        "nvfp4-rl",
        lambda t, c: t.update({EXPERT + "_scale": t[EXPERT + "_scale"][:, :2].contiguous()}),
        EXPERT + "_scale",
        "[64, 2]",
    ),
    "FP32 scale of shape [1]": (
        "nvfp4-rl",
        lambda t, c: t.update({EXPERT + "_scale_2": t[EXPERT + "_scale_2"].reshape(1)}),
        EXPERT + "_scale_2",
        "[1]",
    ),
    "an expert of another size": (
        "nvfp4-rl",
        lambda t, c: t.update(
            {EXPERT: t[EXPERT][:32].contiguous(), EXPERT + "_scale": t[EXPERT + "_scale"][:32].contiguous()}
        ),
        EXPERT,
        "[64, 32]",
    ),
    "a linear of another size": (
        "mxfp8-rl",
        lambda t, c: t.update({Q: t[Q][:32].contiguous(), Q + "_scale": t[Q + "_scale"][:32].contiguous()}),
        Q,
        "does not fit",
    ),
    "NaN in NVFP4 block scales": (
        "nvfp4-rl",
        lambda t, c: _bytes(t[EXPERT + "_scale"])[7:8].fill_(0x7F),
        EXPERT + "_scale",
        "NaN",
    ),
    "negative NVFP4 block scale": (
        "nvfp4-rl",
        lambda t, c: _bytes(t[EXPERT + "_scale"])[7:8].fill_(0xB0),
        EXPERT + "_scale",
        "negative",
    ),
    "NaN in E8M0 scales": (
        "mxfp8-rl",
        lambda t, c: _bytes(t[EXPERT + "_scale"])[7:8].fill_(0xFF),
        EXPERT + "_scale",
        "NaN",
    ),
    "NaN in MXFP8 codes": ("mxfp8-rl", lambda t, c: _bytes(t[EXPERT])[7:8].fill_(0x7F), EXPERT, "NaN"),
    "NaN in scales of a linear": ("mxfp8-rl", lambda t, c: _bytes(t[Q + "_scale"])[7:8].fill_(0xFF), Q, "not finite"),
    "infinite FP32 scale": (
        "nvfp4-rl",
        lambda t, c: t[EXPERT + "_scale_2"].fill_(torch.inf),
        EXPERT + "_scale_2",
        "Inf",
    ),
    "zero FP32 scale": (
        "nvfp4-rl",
        lambda t, c: t[EXPERT + "_scale_2"].fill_(0),
        EXPERT + "_scale_2",
        "no quantizer writes",
    ),
    "gate and up with two scales": (
        "nvfp4-rl",
        lambda t, c: t[EXPERT + "_scale_2"].mul_(2),
        EXPERT + "_scale_2",
        "share one scale",
    ),
    "another expert_tp": (
        "nvfp4-rl",
        lambda t, c: c["quantization_config"]["recipe"].update(expert_tp=2),
        "layers.0.mlp.experts",
        "expert_tp=2",
    ),
    "an expert not listed": (
        "nvfp4-rl",
        lambda t, c: (_quantized(c, "nvfp4").remove(EXPERT), [t.pop(EXPERT + s) for s in ("", "_scale", "_scale_2")]),
        "layers.0.mlp.experts",
        "mixes bf16 and nvfp4",
    ),
    "a listed weight that is no quantized layer": (
        "mxfp8-rl",
        lambda t, c: (
            _quantized(c, "mxfp8").append("model.embed_tokens.weight"),
            t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn)}),
            t.update({"model.embed_tokens.weight_scale": torch.ones(64, 2, dtype=torch.uint8)}),
        ),
        "model.embed_tokens.weight",
        "no layer",
    ),
    "an unknown version": (
        "nvfp4-rl",
        lambda t, c: c["quantization_config"].update(version=2),
        "version 2",
        "reads version 1",
    ),
    "an unknown format": (
        "nvfp4-rl",
        lambda t, c: c["quantization_config"]["quantized"].update(int3=["x.weight"]),
        "int3",
        "this plugin runs",
    ),
    "a file cut short": ("nvfp4-rl", lambda t, c: None, "model.safetensors", "cut short"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(process: Engine, exports: Exports, tmp_path: Path, case: str) -> None:
    recipe, change, name, says = CASES[case]
    folder = broken(exports(recipe), tmp_path / "broken", change)
    if case == "a file cut short":
        shard = Path(folder) / "model.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1024])
    message = process(loader.load, folder)
    assert message != "loaded"
    assert name in message
    assert says in message


@pytest.mark.parametrize("recipe", ["nvfp4-rl", "mxfp8-rl", "bf16"])
def test_a_sound_checkpoint_loads_twice_alike(process: Engine, exports: Exports, recipe: str) -> None:
    assert process(loader.load_twice, str(exports(recipe)))


def test_a_shared_format_in_a_merged_linear_is_demanded(process: Engine, exports: Exports, tmp_path: Path) -> None:
    def unlist_q(tensors: Tensors, config: Config) -> None:
        _quantized(config, "mxfp8").remove(Q)
        tensors.pop(Q + "_scale")
        tensors[Q] = tensors[Q].to(torch.bfloat16)

    message = process(loader.load, broken(exports("mxfp8-rl"), tmp_path / "broken", unlist_q))
    assert "model.layers.0.self_attn.qkv_proj" in message
    assert "mixes bf16 and mxfp8" in message


def test_the_engine_itself_does_not_start(exports: Exports, tmp_path: Path) -> None:
    folder = broken(exports("nvfp4-rl"), tmp_path / "broken", lambda t, c: t[EXPERT + "_scale_2"].mul_(2))
    with pytest.raises(EngineError, match="share one scale"):
        Engine(folder, enforce_eager=True)
