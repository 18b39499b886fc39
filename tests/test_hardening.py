"""What a user may do to tensors and converted models that is not the usual way: it works, or it is refused by name."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import swapq
from tests.helpers.models import prompts, qwen3_moe
from tests.helpers.remote import listed_experts
from tests.public_faults.common import MODES, RECIPES, converted, edit, edit_config, exported, load, logits, same_bytes

IDS = [f"{r}-{b}" for r, b in MODES]


# Autograd


@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_a_second_derivative_raises_instead_of_being_half_of_one(recipe: str, backward: str) -> None:
    experts = converted(recipe, backward=backward).model.layers[0].mlp.experts
    x = torch.randn(4, 64, requires_grad=True)
    y = experts(x, torch.tensor([[0, 1]] * 4), torch.rand(4, 2))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.square().sum().backward()


def test_a_second_derivative_through_the_gate_raises() -> None:
    from swapq.nn.gate import Gate

    rows = torch.randn(4, 64).to(torch.bfloat16).requires_grad_()
    (d,) = torch.autograd.grad(Gate("silu")(rows).float().square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        d.float().square().sum().backward()


@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_partial_and_repeated_gradients_are_the_full_ones(recipe: str, backward: str) -> None:
    experts = converted(recipe, backward=backward).model.layers[0].mlp.experts
    x, w = torch.randn(5, 64, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    index = torch.randint(0, 8, (5, 2))
    inputs = (x, w, experts.gate_up_proj, experts.down_proj)
    loss = experts(x, index, w).square().sum()
    full = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(full, torch.autograd.grad(loss, inputs), strict=True))
    for i, one in enumerate(inputs):
        assert torch.equal(torch.autograd.grad(experts(x, index, w).square().sum(), one)[0], full[i])


@pytest.mark.parametrize(("recipe", "backward"), MODES, ids=IDS)
def test_frozen_experts_pass_the_routers_gradient_on(recipe: str, backward: str) -> None:
    model, whole = converted(recipe, backward=backward), converted(recipe, backward=backward)
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.gate.weight.requires_grad_()
    for m in (model, whole):
        m(prompts(), labels=prompts()).loss.backward()
    for a, b in zip(model.model.layers, whole.model.layers, strict=True):
        assert torch.equal(a.mlp.gate.weight.grad, b.mlp.gate.weight.grad)
    assert all(p.grad is None for n, p in model.named_parameters() if "gate.weight" not in n)


def test_a_swapped_linear_takes_every_shape_and_gives_every_dtype_of_a_linear() -> None:
    linear, plain = converted("mxfp8-rl").model.layers[0].self_attn.q_proj, nn.Linear(64, 64)
    for shape in ((64,), (0, 64), (2, 0, 64), (1, 1, 1, 64)):
        x = torch.randn(shape, requires_grad=True)
        y = linear(x)
        assert y.shape == plain(x).shape
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert linear(torch.randn(3, 64)).dtype == plain(torch.randn(3, 64)).dtype == dtype


# Whole models


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_converted_model_is_pickled_and_copied_inside_frozen_weights_too(recipe: str, trainable: bool) -> None:
    model = converted(recipe, trainable=trainable)
    with swapq.frozen_weights(model):
        expected = logits(model)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for twin in twins:
            assert torch.equal(logits(twin), expected)
            with torch.no_grad():
                for layer in twin.model.layers:
                    for p in layer.mlp.experts.parameters():
                        if p.requires_grad:
                            p.mul_(1.5)
            assert torch.equal(logits(twin), expected) != trainable  # a copy does not carry the frozen codes
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gate_and_up_of_linear_experts_become_codes_together(recipe: str) -> None:
    model, held = (swapq.convert(listed_experts(), recipe, last_layers_bf16=0, trainable=t) for t in (True, False))
    assert swapq.digest(model) == swapq.digest(held)
    assert torch.equal(logits(model), logits(held))
    assert not any(p.requires_grad for p in held.model.layers[0].mlp.experts.parameters())


@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
@pytest.mark.parametrize("trainable", [True, False])
def test_accelerates_offload_hooks_after_conversion_change_no_bit(
    tmp_path: Path, trainable: bool, offload: object
) -> None:
    expected = logits(converted("mxfp8-rl", trainable=trainable))
    where = (tmp_path,) if offload is disk_offload else ()
    model = offload(converted("mxfp8-rl", trainable=trainable), *where, execution_device=torch.device("cpu"))  # type: ignore[operator]
    assert torch.equal(logits(model), expected)


def test_offload_hooks_before_conversion_are_refused() -> None:
    with pytest.raises(swapq.SwapqError, match="forward is wrapped"):
        converted(model=cpu_offload(qwen3_moe(), execution_device=torch.device("cpu")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_on_attention_trains_alone_and_starts_at_the_base(recipe: str) -> None:
    for trainable in (True, False):
        model = converted(recipe, trainable=trainable)
        expected = logits(model)
        adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        assert torch.equal(logits(adapted), expected)
        adapted(prompts(), labels=prompts()).loss.backward()
        trained = [n for n, p in adapted.named_parameters() if p.grad is not None]
        assert len(trained) == 2 * 2 * 2
        assert all("lora_" in n for n in trained)
        for given in (adapted, model):  # the wrapper, and the model that PEFT changed inside
            with pytest.raises(swapq.SwapqError, match=r"PEFT|adapter"):
                swapq.digest(given)


def test_lora_on_expert_parameters_is_quantized_with_them() -> None:
    model = converted()
    base = logits(model)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=[], target_parameters=targets, r=4, lora_dropout=0.0))
    assert torch.equal(logits(adapted), base)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    changed = logits(adapted)
    assert not torch.equal(changed, base)
    assert torch.equal(logits(adapted.merge_and_unload()), changed)


def shared_parameter() -> nn.Module:
    model = qwen3_moe()
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    return model


def shared_module() -> nn.Module:
    model = qwen3_moe()
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    return model


def parametrized() -> nn.Module:
    model = qwen3_moe()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    return model


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def own_forward() -> nn.Module:
    model = qwen3_moe()
    model.model.layers[0].self_attn.q_proj = Doubled(64, 64, bias=False)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shared_parameter, "are one parameter"),
        (shared_module, "are one parameter"),
        (parametrized, "parametrization"),
        (own_forward, "Doubled is a linear with a forward of its own"),
    ],
)
def test_a_weight_that_the_swap_would_compute_otherwise_is_refused_before_anything_changes(
    make: object, message: str
) -> None:
    model = make()  # type: ignore[operator]
    with pytest.raises(swapq.SwapqError, match=rf"q_proj.*{message}"):
        swapq.convert(model, "mxfp8-rl")
    assert not swapq.is_converted(model)
    swapq.convert(model, "nvfp4-rl")  # which leaves attention alone


def test_tied_embeddings_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    for trainable in (True, False):
        model = converted(model=qwen3_moe(tie_word_embeddings=True), trainable=trainable)
        swapq.export(model, tmp_path / str(trainable))
        loaded = load(tmp_path / str(trainable))
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(logits(loaded), logits(model))
        assert "lm_head.weight" not in swapq.digest(tmp_path / str(trainable))


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (300, 7)])
def test_one_expert_and_hundreds_are_saved_and_loaded(tmp_path: Path, experts: int, top_k: int) -> None:
    model = converted(model=qwen3_moe(num_experts=experts, num_experts_per_tok=top_k))
    swapq.export(model, tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_expert_tp_scales_each_slice_on_its_own_and_trains(tp: int, backward: str) -> None:
    model = converted(model=qwen3_moe(moe_intermediate_size=64), expert_tp=tp, backward=backward)
    down = model.model.layers[0].mlp.experts._linear("down_proj", tp)
    q = down.weight
    from swapq.kernels.routing import Routing

    h = torch.randn(6, 64).to(torch.bfloat16)
    h[:, : 64 // tp] *= 100  # an outlier in the first slice must not cost the others their precision
    y = down(h, Routing.of(torch.zeros(6, 1), 8), gather=False).float()
    rows = swapq.quantize(h.view(6 * tp, -1), "nvfp4", scope="row").dequantize(torch.float32).view(6, 64)
    expected = rows.double() @ q.dequantize(torch.float32)[0].double().T
    assert (y - expected).norm() / expected.norm() < 5e-3
    model(prompts(), labels=prompts()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# Loading


DAMAGED = [
    ("mxfp8-rl", lambda t: t.fill_(255), "weight_scale"),
    ("nvfp4-rl", lambda t: t.view(torch.uint8)[0].fill_(0x80), "weight_scale"),
    ("nvfp4-rl", lambda t: t.view(torch.uint8)[0].fill_(0xB8), "weight_scale"),
    ("nvfp4-rl", lambda t: t.view(torch.uint8)[0].fill_(0x7F), "weight_scale"),
    ("nvfp4-rl", lambda t: t.fill_(-1.0), "weight_scale_2"),
    ("mxfp8-rl", lambda t: t.view(torch.uint8)[3].fill_(0xFF), "weight"),
]


@pytest.mark.parametrize(("recipe", "damage", "part"), DAMAGED)
def test_codes_and_scales_that_no_quantizer_writes_are_refused(
    tmp_path: Path, recipe: str, damage: object, part: str
) -> None:
    name = f"model.layers.0.mlp.experts.3.down_proj.{part}"
    edit(exported(tmp_path, recipe), lambda tensors: damage(tensors[name]))  # type: ignore[operator]
    with pytest.raises(swapq.SwapqError, match=name.replace(".", r"\.")):
        load(tmp_path)


@pytest.mark.parametrize("value", [["a"], {"nvfp4": 5}, {"nvfp4": "model"}, {"nvfp4": [1]}, "nvfp4"])
def test_a_list_of_quantized_weights_of_the_wrong_type_is_refused(tmp_path: Path, value: object) -> None:
    edit_config(exported(tmp_path), lambda c: c["quantization_config"].update(quantized=value))
    with pytest.raises(swapq.SwapqError, match="quantized"):
        load(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_device_map_auto_gives_the_same_bits(tmp_path: Path, recipe: str) -> None:
    expected = logits(converted(recipe))
    assert torch.equal(logits(load(exported(tmp_path / "export", recipe), device_map="auto")), expected)
    qwen3_moe().save_pretrained(tmp_path / "plain")
    for trainable in (True, False):
        config = swapq.SwapqConfig(swapq.Recipe.named(recipe, last_layers_bf16=0), trainable=trainable)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map="auto", quantization_config=config)
        assert torch.equal(logits(model), expected)


def test_codes_that_a_device_map_puts_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    exported(tmp_path / "export")
    parts = ("embed_tokens", "layers.0", "norm", "rotary_emb")
    device_map = {f"model.{part}": "cpu" for part in parts} | {"lm_head": "cpu", "model.layers.1": "disk"}
    with pytest.raises(swapq.SwapqError, match=r"layers\.1\.mlp\.experts.*disk"):
        load(tmp_path / "export", device_map=device_map, offload_folder=str(tmp_path / "offload"))


def test_a_move_that_fails_half_way_leaves_the_scales_as_they_were() -> None:
    model = converted(trainable=False)
    expected, experts = logits(model), model.model.layers[0].mlp.experts

    def out_of_memory(x: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        experts._apply(out_of_memory)
    assert experts.gate_up_proj_fp32_scale.dtype == torch.float32
    assert torch.equal(logits(model), expected)


# Recipes from files


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "nvfp4-rl", "name": "mxfp8-rl"}', "'name' appears twice"),
        ('{"name": "nvfp4-rl", "keep_bf16": {"lm_head": true}}', "keep_bf16"),
        ('{"name": "nvfp4-rl", "keep_bf16": "lm_head"}', "keep_bf16"),
        ('{"name": "nvfp4-rl", "last_layers_bf16": NaN}', "last_layers_bf16"),
        ('{"name": "nvfp4-rl", "last_layers_bf16": "4"}', "last_layers_bf16"),
        ('{"name": "nvfp4-rl", "expert_tp": 2.0}', "expert_tp"),
        ('{"name": "nvfp4-rl", "expert_tp": true}', "expert_tp"),
        ('{"name": "nvfp4-rl", "activations": ["nvfp4"]}', "activations"),
        ('{"name": "nvfp4-rl", "backward": null}', "backward"),
        ('{"name": "nvfp4-rl", "weights": {"routed_experts": {}}}', "routed_experts"),
        ('{"name": "nvfp4-rl", "weights": 5}', "weights"),
        ('{"name": 5}', "name"),
        ("[" * 100_000, "not readable"),
        ("", "not readable"),
        ("[]", "list"),
    ],
)
def test_a_recipe_file_of_wrong_types_is_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(swapq.SwapqError, match=message):
        swapq.plan(qwen3_moe(), tmp_path / "mine.json")


def test_a_recipe_survives_json_and_keeps_its_id(tmp_path: Path) -> None:
    recipe = swapq.Recipe.named("nvfp4-rl", expert_tp=2, keep_bf16=["layers.0.mlp"])
    (tmp_path / "mine.json").write_text(json.dumps(recipe.to_dict()))
    again = swapq.Recipe.resolve(tmp_path / "mine.json")
    assert (again, again.id) == (recipe, recipe.id)


def test_the_helper_for_bytes_can_tell() -> None:
    assert same_bytes(torch.tensor([0.0]), torch.tensor([0.0]))
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
