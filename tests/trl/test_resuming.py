"""A resumed trainer goes on from the checkpoint, whole: the run that was interrupted and the one that was not end with the same bits."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeForCausalLM, TrainerCallback

import swapq
from swapq.errors import CheckpointError, UnsupportedError
from tests.trl.jobs import tiny, trainer

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
KINDS = [("GRPO", "nvfp4-rl"), ("RLOO", "mxfp8-rl"), ("GRPO", None)]


def built(folder: Path, kind: str = "GRPO", recipe: str | None = "nvfp4-rl", *, seed: int = 0, **options: Any) -> Any:
    """A trainer without an engine that saves at step 2; `seed`: of its start model."""
    model = tiny(seed=seed)
    if options.pop("added", False):
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    if options.pop("half", False):
        model = model.to(torch.bfloat16)
    if recipe is not None:
        swapq.convert(model, recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    settings = {"use_vllm": False, "engine_options": None, "save_strategy": "steps", "save_steps": 2, "steps": 4}
    return trainer(model, kind, output_dir=str(folder), **(settings | options))


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def moments(built: Any) -> dict[str, dict[str, Tensor]]:
    """Parameter's name -> what the optimizer keeps for it."""
    inner = getattr(built.optimizer, "optimizer", built.optimizer)
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    return {names[id(parameter)]: dict(state) for parameter, state in inner.state.items()}


class Start(TrainerCallback):
    """What a trainer holds when its first step begins."""

    def on_train_begin(self, *arguments: Any, model: Any = None, optimizer: Any = None, **_: Any) -> None:
        self.weights = weights(model)
        inner = getattr(optimizer, "optimizer", optimizer)
        self.moments = {parameter: state["exp_avg"].clone() for parameter, state in inner.state.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", params=KINDS, ids=["GRPO-nvfp4-rl", "RLOO-mxfp8-rl", "GRPO-unconverted"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, tuple[str, Any]]:
    """A trainer after four steps without an interruption, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    done = built(folder, *request.param)
    done.train()
    return done, folder, request.param


def test_interrupted_and_resumed_ends_with_the_bits_of_the_whole_run(
    whole: tuple[Any, Path, tuple[str, Any]], tmp_path: Path
) -> None:
    done, folder, kind = whole
    resumed = built(tmp_path, *kind, seed=7)  # a start model that has nothing of the checkpoint
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert same(weights(resumed.model), weights(done.model))
    ours, theirs = moments(resumed), moments(done)
    assert ours.keys() == theirs.keys() == weights(done.model).keys()
    assert all(same(ours[name], theirs[name]) for name in ours)
    experts = load_file(folder / "checkpoint-2" / "model.safetensors")[EXPERT]
    assert not torch.equal(load_file(folder / "checkpoint-4" / "model.safetensors")[EXPERT], experts)


def test_weights_and_moments_before_the_first_step_are_those_of_the_checkpoint(
    whole: tuple[Any, Path, tuple[str, Any]], tmp_path: Path
) -> None:
    _, folder, kind = whole
    checkpoint = folder / "checkpoint-2"
    resumed, start = built(tmp_path, *kind, seed=7), Start()
    resumed.add_callback(start)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(start.weights, weights(Qwen3MoeForCausalLM.from_pretrained(checkpoint)))
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    inner = getattr(resumed.optimizer, "optimizer", resumed.optimizer)
    order = [parameter for group in inner.param_groups for parameter in group["params"]]
    assert len(order) == len(saved) == len(start.moments)
    for index, parameter in enumerate(order):
        assert saved[index]["exp_avg"].shape == parameter.shape
        assert torch.equal(start.moments[parameter], saved[index]["exp_avg"])


def test_bf16_masters_and_a_sharded_checkpoint_resume_alike(tmp_path: Path) -> None:
    done = built(tmp_path / "a", half=True)
    done.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"
    loaded = Qwen3MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    (checkpoint / "model.safetensors").unlink()
    loaded.save_pretrained(checkpoint, max_shard_size="100KB")
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    resumed = built(tmp_path / "b", half=True, seed=7)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(weights(resumed.model), weights(done.model))


def test_a_checkpoint_that_lacks_an_expert_stops_the_run_by_name(
    whole: tuple[Any, Path, tuple[str, Any]], tmp_path: Path
) -> None:
    _, folder, kind = whole
    damaged = tmp_path / "checkpoint-2"
    shutil.copytree(folder / "checkpoint-2", damaged)
    tensors = load_file(damaged / "model.safetensors")
    del tensors[EXPERT]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    resumed = built(tmp_path, *kind)
    with pytest.raises(CheckpointError, match=f"missing: {EXPERT}"):
        resumed.train(resume_from_checkpoint=str(damaged))
    assert resumed.state.global_step == 0


def test_a_checkpoint_of_another_transformers_is_restored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, checkpoint = tiny(), tmp_path / "checkpoint-2"
    saved.save_pretrained(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"transformers_version": "5.0.0"}))
    resumed = built(tmp_path, seed=7)
    with caplog.at_level("WARNING", "swapq_trl.resuming"):
        resumed._load_from_checkpoint(str(checkpoint))
    assert "saved by transformers 5.0.0" in caplog.text
    assert same(weights(resumed.model), weights(saved))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    torch.save({}, tmp_path / "checkpoint-2" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles are not read"):
        built(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_what_is_no_checkpoint_is_refused_as_transformers_does(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        built(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (tmp_path / "checkpoint-2" / "pytorch_model_fsdp.bin").touch()
    save_file({}, tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(ValueError, match="only supported when using PyTorch FSDP"):
        built(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def judged(folder: Path, spoil: Callable[[], Any] = lambda: None, **keywords: Any) -> Any:
    """A trainer whose best step is the second; `spoil` is called after the last evaluation."""
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "reward", "greater_is_better": True, "per_device_eval_batch_size": 8}
    done = built(folder, eval_dataset=[{"prompt": "1+2="}] * 8, save_total_limit=4, **options, **keywords)
    rewards = iter([1.0, 9.0, 2.0, 3.0])
    evaluate = done.evaluate

    def judge(*arguments: Any, **keywords: Any) -> Any:
        found = evaluate(*arguments, **keywords) | {"eval_reward": next(rewards)}
        if done.state.global_step == 4:
            spoil()
        return found

    done.evaluate = judge
    return done


def test_the_best_model_is_loaded_whole_at_the_end(tmp_path: Path) -> None:
    done = judged(tmp_path)
    done.train()
    assert done.state.best_model_checkpoint.endswith("checkpoint-2")
    best, last = (Qwen3MoeForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    assert same(weights(done.model), weights(best))
    assert not torch.equal(last.model.layers[1].mlp.experts.down_proj, best.model.layers[1].mlp.experts.down_proj)


LORA = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])}


@pytest.mark.parametrize("keywords", [{}, LORA], ids=["whole", "adapters"])
def test_a_best_model_that_is_gone_is_an_error(tmp_path: Path, keywords: dict[str, Any]) -> None:
    best = tmp_path / "checkpoint-2"
    done = judged(tmp_path, lambda: shutil.rmtree(best), **keywords)
    with pytest.raises(CheckpointError, match=r"best model \(step 2, .*9\.0\).*checkpoint-2 is no longer there"):
        done.train()
    best.mkdir()
    with pytest.raises(CheckpointError, match=r"checkpoint-2 holds none of (adapter_)?model\.safetensors"):
        done._load_best_model()


def test_adapters_are_resumed_as_transformers_does(tmp_path: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    done = built(tmp_path / "a", peft_config=config)
    done.train()
    checkpoint = tmp_path / "a" / "checkpoint-2"
    with safe_open(checkpoint / "adapter_model.safetensors", framework="pt") as file:
        assert file.keys()
    assert not (checkpoint / "model.safetensors").exists()
    resumed = built(tmp_path / "b", peft_config=config)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(weights(resumed.model), weights(done.model))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("adapter_model.safetensors", r"holds adapters \(adapter_model\.safetensors\) and no whole model"),
        ("trainer_state.json", r"holds the states of a Trainer \(trainer_state\.json\) and not its model"),
    ],
)
def test_a_checkpoint_without_a_whole_model_says_what_it_holds(tmp_path: Path, name: str, said: str) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=said):
        built(tmp_path, recipe=None)._load_from_checkpoint(str(tmp_path))


def test_adapters_that_transformers_added_are_refused_by_name(tmp_path: Path) -> None:
    done = built(tmp_path, recipe=None, added=True)
    done.train()
    assert not (tmp_path / "checkpoint-2" / "model.safetensors").exists()
    resumed = built(tmp_path, recipe=None, added=True)
    with pytest.raises(UnsupportedError, match=r"adapters that `add_adapter` put into it.*`peft_config`"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed.state.best_model_checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.raises(UnsupportedError, match="adapters that `add_adapter` put into it"):
        resumed._load_best_model()


def test_a_checkpoint_that_was_not_written_whole_is_not_to_be_downloaded(tmp_path: Path) -> None:
    done = built(tmp_path, recipe=None, steps=2)
    done.train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"cut short.*resume from an earlier checkpoint"):
        built(tmp_path, recipe=None).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
