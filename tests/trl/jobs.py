"""What runs in a process of its own: trainers with a real engine. Each job returns plain facts for a test to judge."""

import copy
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from tests.helpers.recipes import tiny as tiny_recipe  # noqa: E402  the path comes first

PROMPTS = [[4, 5, 13, 6, 17], [3, 13, 3, 17], [12, 13, 5, 17], [4, 9, 13, 4, 9, 17]]


def tiny(layers: int = 2, *, seed: int = 0, scale: float = 3.0) -> Any:
    """A random Qwen3-MoE whose experts matter: larger weights than the default, so that a wrong expert is seen."""
    from arithmetic.model import model_config
    from transformers import Qwen3MoeForCausalLM

    config = model_config()
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(scale)
    return model


def digits(completions: list[str], **_: Any) -> list[float]:
    """A reward that even a random model's samples differ in."""
    return [float(sum(character.isalnum() and character < "h" for character in text)) for text in completions]


def trainer(model: Any, kind: str = "GRPO", *, steps: int = 2, **options: Any) -> Any:
    """A trainer of `swapq_trl` with small batches and a learning rate that changes every weight."""
    import trl
    from arithmetic.model import build_tokenizer
    from arithmetic.task import prompts

    import swapq_trl

    own = ("peft_config", "eval_dataset", "rollout_func")
    own += ("approximate_lora", "engine_options", "reference_model", "replay_routing")
    keywords = {name: options.pop(name) for name in own if name in options}
    settings: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/trainer",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "max_completion_length": 6,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.05,
        "vllm_max_model_length": 48,
        "router_aux_loss_coef": 0.0,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **options,
    }
    if kind == "GRPO":
        settings.setdefault("vllm_importance_sampling_mode", "token_truncate")
    return getattr(swapq_trl, f"{kind}Trainer")(
        model,
        [digits],
        args=getattr(trl, f"{kind}Config")(**settings),
        train_dataset=prompts(64, 0),
        processing_class=build_tokenizer(),
        **{"engine_options": {"enforce_eager": True}, **keywords},
    )


def scores(llm: Any) -> list[list[float]]:
    from swapq_trl.selftest import fixed_scores

    return fixed_scores(llm)


def engine_addresses(llm: Any) -> dict[str, int]:
    worker = llm.llm_engine.model_executor.driver_worker
    return {name: parameter.data_ptr() for name, parameter in worker.model_runner.model.named_parameters()}


def served(llm: Any) -> dict[str, str]:
    """Digests of what the engine holds, BF16 where it was started from FP32 masters."""
    from swapq.digest import tensor_digest
    from swapq.formats import is_scale
    from swapq_vllm.receiver import served_tensors

    def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
        widened = tensor.dtype == torch.float32 and not is_scale(name)
        return tensor.to(torch.bfloat16) if widened else tensor

    return {name: tensor_digest(held(name, tensor)) for name, tensor in served_tensors(llm)}


def own_digests(model: Any) -> dict[str, str]:
    """Digests of the model's own tensors in BF16, computed without the sending code."""
    from swapq.checkpoint.tensors import checkpoint_tensors
    from swapq.digest import tensor_digest

    lowered = copy.deepcopy(model).to(torch.bfloat16)
    return {name: tensor_digest(tensor) for name, tensor in checkpoint_tensors(lowered)}


def logged(built: Any) -> list[dict[str, Any]]:
    return [row for row in built.state.log_history if "reward" in row or "eval_reward" in row]


def train(recipe: str, backward: str | None = None, **options: Any) -> dict[str, Any]:
    """Two steps; then the sync is looked at from all sides."""
    import psutil

    import swapq

    model = tiny()
    overrides: dict[str, Any] = {} if backward is None else {"backward": backward}
    if recipe == "nvfp4-rl":
        overrides["last_layers_bf16"] = 0
    swapq.convert(model, tiny_recipe(recipe), **overrides)
    built = trainer(model, save_strategy="steps", save_steps=2, **options)
    llm = built.vllm_generation.llm
    start = served(llm)
    start_own = own_digests(model)
    equal_at_sync = []
    send = built.vllm_generation.sync_weights

    def watched() -> Any:
        report = send()
        equal_at_sync.append(served(llm) == own_digests(model))
        return report

    built.vllm_generation.sync_weights = watched
    built.train()
    first = built.sync_weights()
    built.vllm_generation.sync_weights = send

    addresses, baseline = engine_addresses(llm), scores(llm)
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    memory, others = [], []
    for shift in (1e-1, 2e-1, 0.0):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name] * (1 + shift))
        built.sync_weights()
        others.append(scores(llm))
        memory.append(psutil.Process().memory_info().rss)
    history, last_loaded = logged(built), built._last_loaded_step == built.state.global_step
    return {
        "resumed": resumed(built, tiny_recipe(recipe), **overrides),
        "start_equal": start == start_own,
        "start_count": len(start),
        "equal_at_sync": equal_at_sync,
        "history": history,
        "report": [first.seconds, first.bytes, first.tensors, first.verified],
        "expected_bytes": sum(t.nbytes for t in sent(built)),
        "moved": addresses != engine_addresses(llm),
        "changed_between": others[0] != baseline and others[1] != others[0],
        "fourth_equals_first": others[2] == baseline,
        "memory": memory,
        "tags": list(built.model.model_tags or []),
        "name": type(built).__name__,
        "last_loaded": last_loaded,
    }


def resumed(built: Any, recipe: Any, **overrides: Any) -> dict[str, Any]:
    """Resume, from its checkpoint of step 2, a trainer whose model was changed after that step and sent to the engine."""
    from transformers import Qwen3MoeForCausalLM

    import swapq

    checkpoint = f"{built.args.output_dir}/checkpoint-2"
    saved = own_digests(swapq.convert(Qwen3MoeForCausalLM.from_pretrained(checkpoint), recipe, **overrides))
    with torch.no_grad():
        for parameter in built.model.parameters():
            parameter.mul_(1.3)
    built.sync_weights()
    llm, send, syncs = built.vllm_generation.llm, built.vllm_generation.sync_weights, []
    before = served(llm) == saved

    def watched() -> Any:
        report = send()
        syncs.append([built.state.global_step, served(llm) == saved, report.verified == report.tensors])
        return report

    built.vllm_generation.sync_weights = watched
    built.args.max_steps = 3
    built.train(resume_from_checkpoint=checkpoint)
    return {"before": before, "syncs": syncs, "step": built.state.global_step}


def sent(built: Any) -> Iterator[torch.Tensor]:
    return (tensor for _, tensor in built.vllm_generation._iter_named_params())


def faults(recipe: str) -> dict[str, Any]:
    """Everything that can go wrong in a sync, one after the other on one engine; each must name what is wrong."""
    import swapq
    from swapq.errors import SwapqError

    model = tiny()
    swapq.convert(model, recipe, last_layers_bf16=0)
    built = trainer(model)
    generation = built.vllm_generation
    self_test = drift(built)
    built.sync_weights()
    honest, right = generation._tensors, scores(generation.llm)
    name = "model.layers.1.mlp.experts.down_proj.weight"  # all experts of the layer, as they go over

    def altered(change: Any) -> Any:
        def tensors(merge: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for key, tensor in honest(merge):
                yield from change(key, tensor)

        return tensors

    def drop(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not key.startswith(name.removesuffix("weight")):
            yield key, tensor

    def rename(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield (key + "x" if key == name else key), tensor

    def unquantized(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield key, (torch.zeros(128, 64, dtype=torch.bfloat16) if key == name else tensor)

    def broken(key: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if key == name:
            raise RuntimeError("the quantizer failed")
        yield key, tensor

    outcomes: dict[str, Any] = {"self_test": self_test}
    for label, change in {"drop": drop, "rename": rename, "unquantized": unquantized, "broken": broken}.items():
        generation._tensors = altered(change)
        outcomes[label] = outcome(built.sync_weights)
        outcomes[label]["generates"] = outcome(lambda: generation.generate(PROMPTS, None, 1))
        generation._tensors = honest
        built.sync_weights()
        outcomes[label]["healed"] = scores(generation.llm) == right

    # a byte flipped between the sender's digest and the engine
    import swapq_trl.generation as module

    original = module.with_digests

    def flipping(tensors: Any, digests: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        for key, tensor in original(tensors, digests):
            if key == name:
                tensor.view(torch.uint8)[3, 5] ^= 1
            yield key, tensor

    module.with_digests = flipping
    outcomes["flip"] = outcome(built.sync_weights)
    outcomes["flip"]["generates"] = outcome(lambda: generation.generate(PROMPTS, None, 1))
    # the same fault inside training stops the run
    built._last_loaded_step = -1
    outcomes["train"] = outcome(built.train)
    outcomes["train"]["steps"] = built.state.global_step
    module.with_digests = original

    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[3, 1, 2] = float("nan")
    outcomes["nan"] = outcome(built.sync_weights)
    outcomes["is_swapq_error"] = issubclass(SwapqError, ValueError)
    return outcomes


def outcome(call: Any) -> dict[str, Any]:
    """Type and message of what a call raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test judges it
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": None, "message": ""}


def drift(built: Any) -> dict[str, Any]:
    """An engine whose log-probabilities change although its weights do not is noticed at the first sync."""
    import swapq_trl.generation as module

    honest = module.fixed_scores

    def moved(shifts: Iterator[float]) -> Any:
        def scores(llm: Any) -> list[list[float]]:
            shift = next(shifts)
            return [[value + shift for value in row] for row in honest(llm)]

        return scores

    module.fixed_scores = moved(itertools.repeat(0.25))  # wrong since the first update, and the same ever after
    since_start = outcome(built.sync_weights)
    sent_again = outcome(built.sync_weights)
    module.fixed_scores = moved(itertools.count(0.0, 0.25))
    noticed = outcome(built.sync_weights)
    refused = outcome(lambda: built.vllm_generation.generate(PROMPTS, None, 1))
    module.fixed_scores = honest
    return {"since_start": since_start, "sent_again": sent_again, "noticed": noticed, "refused": refused}


def options(kind: str, recipe: str | dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A short training with other TRL settings."""
    from arithmetic.task import prompts

    import swapq

    model = tiny()
    if settings.get("beta"):  # TRL loads the reference from the folder the model came from
        model.save_pretrained(settings["output_dir"])
        model = type(model).from_pretrained(settings["output_dir"])
    if settings.pop("watch_reference", False):
        settings["reference_model"] = copy.deepcopy(model).to(torch.bfloat16)
    if recipe:
        swapq.convert(model, tiny_recipe(recipe), **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    if settings.pop("evaluate", False):
        settings |= {
            "eval_dataset": prompts(8, 1),
            "eval_strategy": "steps",
            "eval_steps": 1,
            "per_device_eval_batch_size": 8,
        }
    built = trainer(model, kind, **settings)
    syncs = []
    if built.use_vllm:
        plain = built.vllm_generation.sync_weights

        def counted() -> Any:
            syncs.append(built.state.global_step)
            return plain()

        built.vllm_generation.sync_weights = counted
    built.train()
    return {"history": logged(built), "syncs": list(syncs), "sync": outcome(built.sync_weights)}


def refused(recipe: str) -> dict[str, Any]:
    """What building a trainer with an engine raises."""
    import swapq

    model = swapq.convert(tiny(), tiny_recipe(recipe))
    return outcome(lambda: trainer(model))


def lora(recipe: str, *, targets: list[str], approximate: bool = False) -> dict[str, Any]:
    """LoRA on a converted model: what is served is the merged model, and masters are as they were."""
    import peft

    import swapq

    model = tiny()
    swapq.convert(model, recipe, **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets, task_type="CAUSAL_LM")
    built = trainer(model, peft_config=config, approximate_lora=approximate)
    base = built.model.get_base_model()
    masters = {name: p.detach().clone() for name, p in base.named_parameters() if "lora_" not in name}
    warnings = warned("swapq_trl.generation")
    built.train()
    report = built.sync_weights()
    unchanged = all(torch.equal(p, masters[name]) for name, p in base.named_parameters() if name in masters)
    served_now = served(built.vllm_generation.llm)
    left_alone = interrupted(built, model=built.model)
    merged = built.model.merge_and_unload()
    return {
        "history": logged(built),
        "left_alone_by_a_failed_sync": left_alone,
        "masters_unchanged": unchanged,
        "served_equals_merged": served_now == own_digests(merged),
        "verified": report.verified,
        "tensors": report.tensors,
        "codes_changed": report.lora_codes_changed,
        "warnings": warnings,
    }


def interrupted(built: Any, model: Any) -> bool:
    """Whether a sync that fails half way leaves the model's modules and parameters as they were, while its error is still held."""
    import swapq_vllm.receiver as receiver
    from swapq.errors import SyncError

    modules = {name: id(module) for name, module in model.named_modules()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    honest, errors = receiver.apply_update, []

    def failing(llm: Any, tensors: Any, digests: Any) -> Any:
        next(tensors)
        raise SyncError("the engine is gone")

    receiver.apply_update = failing
    try:
        built.sync_weights()
    except SyncError as error:
        errors.append(error)
    finally:
        receiver.apply_update = honest
    return (
        len(errors) == 1
        and modules == {name: id(module) for name, module in model.named_modules()}
        and all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    )


def warned(logger: str) -> list[str]:
    """A list that fills with what ``logger`` warns about."""
    import logging

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    messages: list[str] = []
    logging.getLogger(logger).addHandler(Listener(logging.WARNING))
    return messages
