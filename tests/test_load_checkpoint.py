"""``swapq.load_checkpoint``: a saved model comes back tensor by tensor, fused experts included, or is refused by name."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.core_model_loading import ConversionOps, Interleave, WeightConverter

import swapq
from swapq.checkpoint import restore
from swapq.errors import CheckpointError, UnsupportedError
from tests.helpers.models import FAMILIES, qwen3_moe
from tests.helpers.recipes import tiny

EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"


def other(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **sizes: object) -> PreTrainedModel:
    """A model of the family in which no value is that of the family's model."""
    model = FAMILIES[family](**sizes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 masters", "bf16 masters"])
@pytest.mark.parametrize("size", ["5GB", "50KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_has_the_checkpoints_value(tmp_path: Path, family: str, size: str, dtype: torch.dtype) -> None:
    saved = FAMILIES[family]().to(dtype)
    saved.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "50KB")
    model = other(family, dtype)
    before = dict(model.named_parameters())
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))
    assert equal(values(model), values(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)))
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4-rl", "mxfp8-rl"])
def test_a_converted_model_has_its_masters_back(tmp_path: Path, recipe: str) -> None:
    saved, model = (swapq.convert(m, tiny(recipe)) for m in (qwen3_moe(), other()))
    saved.save_pretrained(tmp_path)
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))
    assert swapq.digest(model) == swapq.digest(saved)


def test_a_start_model_from_a_folder_is_restored_like_a_new_one(tmp_path: Path) -> None:
    other().save_pretrained(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")  # which remembers the rules it was loaded by
    saved = qwen3_moe()
    saved.save_pretrained(tmp_path / "saved")
    swapq.load_checkpoint(model, tmp_path / "saved")
    assert equal(values(model), values(saved))


def test_experts_stored_fused_are_loaded_too(tmp_path: Path) -> None:
    saved = qwen3_moe()
    save_file(saved.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = other()
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_start_model_from_a_folder_of_fused_experts_is_restored_like_a_new_one(tmp_path: Path, family: str) -> None:
    start = other(family)
    start.save_pretrained(tmp_path / "start")  # the config, and the tensors under the model's own names
    save_file(start.state_dict(), tmp_path / "start" / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start")  # it remembers no rule, since none was needed
    remembered = model._weight_conversions
    saved = FAMILIES[family]()
    saved.save_pretrained(tmp_path / "saved")
    swapq.load_checkpoint(model, tmp_path / "saved")
    assert equal(values(model), values(saved))
    assert model._weight_conversions is remembered
    model.save_pretrained(tmp_path / "fused")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    swapq.load_checkpoint(again, tmp_path / "fused")
    assert equal(values(again), values(saved))


class OneWay(ConversionOps):
    """As the operation that opens an FP8 folder: it has no way back."""

    def convert(self, *arguments: Any, **keywords: Any) -> Any:
        raise ValueError("Undefined Operation encountered!")

    reverse_op = property(lambda self: self)


def test_a_start_model_whose_rules_have_no_way_back_is_restored_by_those_of_its_class(tmp_path: Path) -> None:
    saved, model = qwen3_moe(), other()
    saved.save_pretrained(tmp_path)
    model._weight_conversions = [WeightConverter("experts.up", "experts.gate_up_proj", operations=[OneWay()])]
    with pytest.raises(ValueError, match="Undefined Operation"):
        model.save_pretrained(tmp_path / "never")
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))


def fuse_layer_1(saved: PreTrainedModel) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]
        tensors.update({n: t for n, t in saved.state_dict().items() if n.startswith("model.layers.1.mlp.experts.")})

    return change


def test_one_layer_may_be_fused_and_another_not(tmp_path: Path) -> None:
    saved, model = qwen3_moe(), other()
    saved.save_pretrained(tmp_path)
    edit(tmp_path, fuse_layer_1(saved))
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))
    edit(tmp_path, drop_fused)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.experts\.down_proj\."):
        swapq.load_checkpoint(model, tmp_path)


def drop_fused(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj"]


def test_a_parameter_stored_fused_and_one_by_one_is_refused(tmp_path: Path) -> None:
    saved, model = qwen3_moe(), other()
    before = values(model)
    saved.save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update(saved.state_dict()))
    with pytest.raises(CheckpointError, match=r"unexpected: .*experts\."):
        swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), before)


def test_a_model_in_wrappers_is_the_model_inside(tmp_path: Path) -> None:
    saved, model = qwen3_moe(), other()
    saved.save_pretrained(tmp_path)
    swapq.load_checkpoint(torch.compile(model), tmp_path)  # type: ignore[arg-type]
    assert equal(values(model), values(saved))


def test_tied_embeddings_are_stored_once_and_are_one_tensor_afterwards(tmp_path: Path) -> None:
    saved, model = qwen3_moe(tie_word_embeddings=True), other(tie_word_embeddings=True)
    saved.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), values(saved))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tied_embeddings_stored_with_two_values_are_refused(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not hold the checkpoint's value of .*tied tensor"):
        swapq.load_checkpoint(other(tie_word_embeddings=True), tmp_path)


def test_nan_is_a_value_like_others(tmp_path: Path) -> None:
    saved, model = qwen3_moe(), other()
    with torch.no_grad():
        saved.model.layers[1].mlp.experts.down_proj[2, 3, 4] = float("nan")
    saved.save_pretrained(tmp_path)
    swapq.load_checkpoint(model, tmp_path)
    assert model.model.layers[1].mlp.experts.down_proj[2, 3, 4].isnan()


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors[EXPERT]


def rename(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.8.down_proj.weight"] = tensors.pop(EXPERT)


def reshape(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT] = tensors[EXPERT].T.contiguous()


def recode(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT] = tensors[EXPERT].view(torch.int32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop, rf"missing: {EXPERT}\."),
        (rename, rf"missing: {EXPERT}; unexpected: model.layers.1.mlp.experts.8.down_proj.weight"),
        (reshape, rf"of another shape: {EXPERT} \[32, 64\] for \[64, 32\]"),
        (recode, rf"of a dtype that would be rounded: {EXPERT} torch.int32 for torch.float32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named_before_anything_changes(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], said: str
) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    edit(tmp_path, change)
    model = other()
    before = values(model)
    with pytest.raises(CheckpointError, match=said):
        swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), before)


def test_values_are_widened_but_never_rounded(tmp_path: Path) -> None:
    qwen3_moe().to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    qwen3_moe().save_pretrained(tmp_path / "fp32")
    model = other()
    swapq.load_checkpoint(model, tmp_path / "bf16")
    assert equal(values(model), values(qwen3_moe().to(torch.bfloat16).float()))
    with pytest.raises(CheckpointError, match=r"rounded: .* torch.float32 for torch.bfloat16"):
        swapq.load_checkpoint(other(dtype=torch.bfloat16), tmp_path / "fp32")


def test_an_export_is_no_checkpoint_of_masters(tmp_path: Path) -> None:
    swapq.export(swapq.convert(qwen3_moe(), "nvfp4-rl", last_layers_bf16=0), tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected: .*scale"):
        swapq.load_checkpoint(other(), tmp_path)


def test_models_without_masters_of_their_own_are_refused(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="holds codes and no masters"):
        swapq.load_checkpoint(swapq.convert(qwen3_moe(), "nvfp4-rl", trainable=False, last_layers_bf16=0), tmp_path)
    adapted = peft.get_peft_model(qwen3_moe(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="PEFT adapters"):
        swapq.load_checkpoint(adapted, tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors", "optimizer.pt"],
            r"holds adapters \(adapter_model\.safetensors\)",
        ),
        (
            ["adapter_config.json", "adapter_model.bin"],
            r"holds adapters \(adapter_model\.bin\) and no whole model; load them with PEFT",
        ),
        (["judge/adapter_config.json"], r"holds adapters \(judge/adapter_config\.json\)"),
        (
            ["optimizer.pt", "trainer_state.json"],
            r"states of a Trainer \(trainer_state\.json, optimizer\.pt\) and not its model",
        ),
        (["optimizer.pt", "pytorch_model_fsdp_0/x"], r"shards of FSDP or DeepSpeed \(pytorch_model_fsdp_0\)"),
        (["trainer_state.json", "global_step2/x"], r"shards of FSDP or DeepSpeed \(global_step2\)"),
        (
            ["checkpoint-2/trainer_state.json", "checkpoint-2/model.safetensors"],
            r"holds checkpoints \(checkpoint-2\) and is none",
        ),
        (["optimizer.pt", "pytorch_model.bin"], "pickles are not read"),
        (["weights.pt"], r"holds weights\.pt and no safetensors; pickles are not read"),
    ],
)
def test_a_folder_without_a_whole_model_says_what_it_holds(tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        save_file({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=said) as refused:
        swapq.load_checkpoint(other(), tmp_path)
    assert ("pickles" in str(refused.value)) == ("pickles" in said)


@pytest.mark.parametrize("left", [5, 500, 100_000])
def test_a_cut_file_of_a_run_is_not_to_be_downloaded(tmp_path: Path, left: int) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    os.truncate(tmp_path / "model.safetensors", left)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*; download it again$"):
        swapq.load_checkpoint(other(), tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*resume from an earlier checkpoint") as refused:
        swapq.load_checkpoint(other(), tmp_path)
    assert "download" not in str(refused.value)


def test_a_shard_that_a_run_did_not_write_is_not_to_be_downloaded(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path, max_shard_size="50KB")
    (tmp_path / "optimizer.pt").touch()
    max(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"the index names .*resume from an earlier checkpoint") as refused:
        swapq.load_checkpoint(other(), tmp_path)
    assert "download" not in str(refused.value)
    assert str(refused.value).count(str(tmp_path)) == 1


def test_adapters_that_transformers_added_are_refused(tmp_path: Path) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    model = other()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match=r"carries PEFT adapters \(model\.layers\.0\.self_attn\.q_proj is"):
        swapq.load_checkpoint(model, tmp_path)


def on_cpu(model: PreTrainedModel, folder: Path) -> nn.Module:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def on_disk(model: PreTrainedModel, folder: Path) -> nn.Module:
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def one_layer(model: PreTrainedModel, folder: Path) -> nn.Module:
    accelerate.cpu_offload(model.model.layers[1], execution_device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("offload", [on_cpu, on_disk, one_layer])
def test_an_offloaded_model_is_refused_before_the_checkpoint_is_looked_at(
    tmp_path: Path, offload: Callable[[PreTrainedModel, Path], nn.Module]
) -> None:
    with pytest.raises(UnsupportedError, match=r": offloaded by Accelerate.*before the model is offloaded"):
        swapq.load_checkpoint(offload(other(), tmp_path), tmp_path / "nowhere")


def test_a_model_on_meta_is_refused_before_the_checkpoint_is_looked_at(tmp_path: Path) -> None:
    config = qwen3_moe().config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight.*: built without memory \(device meta\)"):
        swapq.load_checkpoint(model, tmp_path / "nowhere")


class WithState(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"step": 1}, None, torch.ones(2)], ids=["object", "none", "tensor"])
def test_state_that_is_no_parameter_is_refused_by_name(tmp_path: Path, state: Any) -> None:
    model = other()
    model.model.counter = WithState(state)
    with pytest.raises(UnsupportedError, match=r"^model\.counter\._extra_state: in the model's state and no parameter"):
        swapq.load_checkpoint(model, tmp_path / "nowhere")


@pytest.mark.parametrize(
    "shared",
    [torch.ones(1, 64).expand(64, 64), torch.ones(64, 1).expand(64, 64), torch.ones(127).as_strided((64, 64), (1, 1))],
    ids=["rows", "columns", "windows"],
)
def test_values_that_share_a_place_in_memory_are_refused_by_name(tmp_path: Path, shared: Tensor) -> None:
    model = other()
    model.lm_head.weight = nn.Parameter(shared)
    with pytest.raises(UnsupportedError, match=r"^lm_head\.weight: several values share one place"):
        swapq.load_checkpoint(model, tmp_path / "nowhere")


def failing(monkeypatch: pytest.MonkeyPatch, at: int, error: Exception) -> None:
    """Reading the tensor with this number, counted from 0, fails."""
    honest, count = restore.safe_open, itertools.count()

    class Failing:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            self.file = honest(*arguments, **keywords)

        def __enter__(self) -> "Failing":
            return self

        def __exit__(self, *arguments: Any) -> None:
            pass

        def get_tensor(self, name: str) -> Tensor:
            if next(count) == at:
                raise error
            return self.file.get_tensor(name)

    monkeypatch.setattr(restore, "safe_open", Failing)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), SafetensorError("bad"), MemoryError("no more")])
@pytest.mark.parametrize(
    ("at", "said"),
    [
        (0, "nothing was loaded, the model is as it was$"),
        (30, r"half loaded: 30 of 69 tensors, the last \S+\. Do not train on: build the model again"),
        (69, r"every tensor was written, but they could not all be compared with the checkpoint\. Do not train on"),
    ],
    ids=["first", "middle", "comparison"],
)
def test_a_read_error_says_what_became_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, said: str, error: Exception
) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    model = other()
    before = values(model)
    failing(monkeypatch, at, error)
    with pytest.raises(CheckpointError, match=rf"reading stopped \({type(error).__name__}: .*\); .*{said}"):
        swapq.load_checkpoint(model, tmp_path)
    assert equal(values(model), before) == (at == 0)


def test_a_family_that_stores_values_in_another_order_is_refused_by_name(tmp_path: Path) -> None:
    model = other()
    model._weight_conversions = [WeightConverter("experts.up", "experts.gate_up_proj", operations=[Interleave(dim=1)])]
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts\.up.* stores its values in another order"):
        swapq.load_checkpoint(model, tmp_path)


def test_a_tensor_that_was_not_restored_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qwen3_moe().save_pretrained(tmp_path)
    honest = restore._held

    def elsewhere(*arguments: Any) -> Any:
        held = honest(*arguments)
        return held | {EXPERT: held[EXPERT]._replace(memory=held[EXPERT].memory.clone())}

    monkeypatch.setattr(restore, "_held", elsewhere)
    with pytest.raises(CheckpointError, match=rf"does not hold the checkpoint's value of {EXPERT};"):
        swapq.load_checkpoint(other(), tmp_path)


def test_a_stock_trainer_resumes_right_from_a_model_that_was_loaded_first(tmp_path: Path) -> None:
    ids = torch.randint(3, 64, (32, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    def run(start: PreTrainedModel, resume: Path | None) -> dict[str, Tensor]:
        model = swapq.convert(start, "nvfp4-rl", last_layers_bf16=0)
        if resume is not None:
            swapq.load_checkpoint(model, resume)
        settings = {"max_steps": 3, "save_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none"}
        arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, disable_tqdm=True, **settings)
        Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume and str(resume))
        return values(model)

    whole = run(qwen3_moe(), None)
    assert equal(run(other(), tmp_path / "checkpoint-2"), whole)
