"""Jobs of routing replay on a real engine. On a CPU vLLM does not return experts; here, and nowhere else, they are put into its output."""

import functools
import tempfile
from typing import Any

import torch
from torch import Tensor

import swapq
from tests.helpers.recipes import tiny as tiny_recipe
from tests.trl import jobs

EXPERTS = 8


def returning_engine(choose: Any) -> Any:
    """vLLM's LLM, which attaches ``choose(token ids)``, uint8 ``[tokens, layers, top_k]``, to each completion if it was asked to."""
    import vllm

    class Engine(vllm.LLM):
        asked = False

        def __init__(self, *args: Any, enable_return_routed_experts: bool = False, **kwargs: Any) -> None:
            type(self).asked = enable_return_routed_experts
            super().__init__(*args, **kwargs)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().generate(*args, **kwargs)
            for output in outputs if self.asked else ():
                for completion in output.outputs:
                    ids = [*output.prompt_token_ids, *completion.token_ids][:-1]
                    completion.routed_experts = choose(ids).to(torch.uint8).numpy()
            return outputs

    vllm.LLM = Engine
    return Engine


def marked(ids: Tensor, position: Tensor, layer: int) -> Tensor:
    """Two experts that tell token, position and layer: ``[..., 2]``."""
    first = (ids * 3 + position * 5 + layer) % EXPERTS
    return torch.stack([first, (first + 1 + (ids + position) % (EXPERTS - 1)) % EXPERTS], dim=-1)


def marked_tokens(**settings: Any) -> dict[str, Any]:
    """Training in which every token's experts can be told from the token; what reaches the experts is looked at in each forward."""
    model = jobs.tiny()
    folder = f"{tempfile.gettempdir()}/replay"
    model.save_pretrained(folder)
    model = type(model).from_pretrained(folder)

    def choose(ids: list[int]) -> Tensor:
        tokens, position = torch.tensor(ids), torch.arange(len(ids))
        return torch.stack([marked(tokens, position, layer) for layer in range(2)], dim=1)

    engine = returning_engine(choose)
    swapq.convert(model, tiny_recipe("nvfp4-rl"), last_layers_bf16=0)
    built = jobs.trainer(
        model,
        replay_routing=True,
        beta=0.1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        gradient_checkpointing=True,
        output_dir=folder,
        **settings,
    )
    counts = ("forwards", "recomputed", "own", "reference_forwards", "reference_replayed")
    facts: dict[str, Any] = {"wrong": [], **dict.fromkeys(counts, 0)}
    now: dict[str, Tensor] = {}  # of the last forward, to which a recomputed layer belongs too

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        now.update(ids=kwargs["input_ids"], mask=kwargs["attention_mask"])

    def watch(layer: int, reference: bool) -> Any:
        def see(module: Any, args: Any) -> None:
            ids, mask = now["ids"], now["mask"]
            position = mask.cumsum(-1) - 1
            # the last token of a sequence was sampled and never routed
            known = (mask == 1) & (position < mask.sum(-1, keepdim=True) - 1)
            right = (args[1].view(*ids.shape, 2) == marked(ids, position, layer)).all(-1)
            if reference:
                facts["reference_forwards"] += 1
                facts["reference_replayed"] += int(right[known].all())
                return
            facts["recomputed" if torch._C._current_graph_task_id() != -1 else "forwards"] += 1
            facts["own"] += int((~known).sum())
            if not right[known].all():
                facts["wrong"].append([layer, int((~right[known]).sum()), int(known.sum())])

        return see

    for owner, reference in ((model, False), (built.ref_model, True)):
        owner = built.accelerator.unwrap_model(owner)
        owner.register_forward_pre_hook(enter, with_kwargs=True)
        for layer in range(2):
            owner.model.layers[layer].mlp.experts.register_forward_pre_hook(watch(layer, reference))
    built.train()
    return {**facts, "asked": engine.asked, "history": jobs.logged(built)}


def own_choices(recipe: str, replay_routing: bool = True) -> dict[str, Any]:
    """The engine is said to have chosen what the trainer's model, before the step, chooses for the sequence alone."""
    model = jobs.tiny()
    if recipe:
        swapq.convert(model, tiny_recipe(recipe), last_layers_bf16=0)

    def choose(ids: list[int]) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), swapq.record_routing(model) as routing:
            model(torch.tensor([ids]))
        return routing.experts.transpose(0, 1)

    engine = returning_engine(choose)
    built = jobs.trainer(model, replay_routing=replay_routing)
    honest, travels = built._compute_loss, []

    def watched(model: Any, inputs: dict[str, Any]) -> Tensor:
        travels.append("routed_experts" in inputs)
        return honest(model, inputs)

    built._compute_loss = watched
    built.train()
    return {"history": jobs.logged(built), "asked": engine.asked, "travels": any(travels)}


def refused() -> dict[str, Any]:
    """What each trainer that cannot replay says."""
    import peft

    adapter = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    asked: dict[str, dict[str, Any]] = {
        "cpu": {},
        "no engine": {"use_vllm": False},
        "server": {"vllm_mode": "server"},
        "rollouts": {"rollout_func": lambda prompts, trainer: {}},
        "adapter": {"peft_config": adapter, "beta": 0.1},
    }

    def build(options: dict[str, Any]) -> Any:
        return jobs.trainer(jobs.tiny(), replay_routing=True, **options)

    return {name: jobs.outcome(functools.partial(build, options)) for name, options in asked.items()}


def near_ties(model: Any) -> Any:
    """The model with routers that hardly prefer any expert: rounding decides often, and large experts make it felt."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(0.02)
    return model


def engines_choices(replay_routing: bool) -> dict[str, Any]:
    """One step on the engine's own choices, which its routers' hook hands over: one request at a time, so that rows need no sorting."""
    import vllm
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    class Engine(vllm.LLM):
        def __init__(self, *args: Any, enable_return_routed_experts: bool = False, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.rows: dict[int, list[Tensor]] = {}
            served = self.llm_engine.model_executor.driver_worker.model_runner.model
            for runner in (m for m in served.modules() if isinstance(m, MoERunner)):
                seen = self.rows.setdefault(runner.layer_id, [])
                runner.router.set_capture_fn(lambda ids, seen=seen: seen.append(ids.clone()))

        def generate(self, prompts: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
            outputs = []
            for prompt in prompts:
                self.reset_prefix_cache()  # a cached token does not pass the router
                for seen in self.rows.values():
                    seen.clear()
                (output,) = super().generate([prompt], sampling_params, **kwargs)
                count = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
                layers = [torch.cat(self.rows[layer])[:count] for layer in sorted(self.rows)]
                output.outputs[0].routed_experts = torch.stack(layers, dim=1).to(torch.uint8).numpy()
                outputs.append(output)
            return outputs

    vllm.LLM = Engine
    return on_near_ties("nvfp4-rl", replay_routing=replay_routing, steps=1)


def on_near_ties(recipe: str, **settings: Any) -> dict[str, Any]:
    """Training of a model whose routers are near ties, with vLLM as it is unless another one was put in its place."""
    model = near_ties(jobs.tiny(layers=3, scale=8.0))
    swapq.convert(model, tiny_recipe(recipe), **({"last_layers_bf16": 0} if recipe == "nvfp4-rl" else {}))
    built = jobs.trainer(model, max_completion_length=24, **settings)
    built.train()
    return {"history": jobs.logged(built)}
