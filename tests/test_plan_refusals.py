"""Everything a plan refuses says what, where, which value, and what to do; nothing is skipped in silence."""

import pytest
from torch import nn

from swapq.errors import PlanError
from swapq.plan import plan
from swapq.recipe import Recipe
from tests.helpers.families import RemoteModel, qwen_config, qwen_headers, tiny, write_folder


@pytest.fixture(scope="module")
def qwen():
    return tiny("qwen3_moe", num_hidden_layers=4)


@pytest.fixture
def sized(tmp_path):
    """A folder of headers whose experts have chosen sizes."""

    def make(hidden=64, inner=32, **changes):
        config = qwen_config(hidden_size=hidden, moe_intermediate_size=inner, **changes)
        return write_folder(tmp_path / f"{hidden}-{inner}", config, qwen_headers(hidden=hidden, inner=inner))

    return make


def mxfp8(**changes):
    return Recipe.named("mxfp8-rl", **changes)


def nvfp4(**changes):
    return Recipe.named("nvfp4-rl", **{"last_layers_bf16": 0, **changes})


# patterns


def test_a_pattern_that_matches_nothing_names_the_nearest(qwen):
    with pytest.raises(PlanError, match=r"'kv_b_proj' matches no tensor.*nearest are .*'k_proj'"):
        plan(qwen, mxfp8(keep_bf16=["kv_b_proj"]))


@pytest.mark.parametrize(
    "pattern", ["proj", "q_pro", "ayers.1", "layers.1.self", "model.1", "layers.*.q_proj", "layers.11"]
)
def test_patterns_match_whole_parts_and_never_pieces_of_them(qwen, pattern):
    with pytest.raises(PlanError, match="matches no tensor"):
        plan(qwen, mxfp8(keep_bf16=[pattern]))


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("self_attn", 16),
        ("self_attn.o_proj", 4),
        (".o_proj.", 4),
        ("layers.3.self_attn", 4),
        ("layers.*.self_attn.o_proj", 4),
        ("layers.1", 6),
        ("model.layers.1.mlp", 2),
        ("mlp", 8),
        ("experts", 8),
        ("*_proj", 24),
        ("experts.*.*_proj.weight", 8),
    ],
)
def test_patterns_match_anywhere_with_a_wildcard_inside_a_part(qwen, pattern, kept):
    made = plan(qwen, mxfp8(keep_bf16=[pattern])) if kept < 24 else None
    if made is None:
        with pytest.raises(PlanError, match=r"every such tensor is kept in BF16: 24 by keep_bf16 pattern '\*_proj'"):
            plan(qwen, mxfp8(keep_bf16=[pattern]))
        return
    reasons = [e.reason for e in made if e.format == "bf16" and e.reason.startswith("keep_bf16")]
    assert reasons == [f"keep_bf16 pattern {pattern.strip('.')!r}"] * kept


def test_layer_3_is_not_layer_30():
    made = plan(tiny("qwen3_moe", num_hidden_layers=31), mxfp8(keep_bf16=["layers.3.mlp"]))
    assert made.format_of("model.layers.3.mlp.experts.down_proj") == "bf16"
    assert made.format_of("model.layers.30.mlp.experts.down_proj") == "mxfp8"


def test_a_pattern_on_tensors_that_are_kept_anyway_is_allowed(qwen):
    assert plan(qwen, nvfp4(keep_bf16=["mlp.gate"])).quantized == plan(qwen, nvfp4()).quantized


def test_the_plan_says_which_roles_a_pattern_met(qwen):
    made = plan(qwen, mxfp8(keep_bf16=["layers.2.mlp"]))
    assert made.summary()["patterns"] == {"layers.2.mlp": {"routed_experts": 2, "router": 1}}
    assert "pattern 'layers.2.mlp': 2 routed_experts, 1 router" in str(made)


@pytest.mark.parametrize("kept", [["q_proj"], ["k_proj", "v_proj"], ["layers.2.self_attn.v_proj"]])
def test_one_format_inside_q_k_v_or_an_error_that_names_the_siblings(qwen, kept):
    with pytest.raises(
        PlanError, match=r"q_proj\.weight .*k_proj\.weight .*v_proj\.weight .*all of them in BF16 or none"
    ):
        plan(qwen, mxfp8(keep_bf16=kept))
    assert (
        plan(qwen, mxfp8(keep_bf16=["q_proj", "k_proj", "v_proj"])).format_of("model.layers.0.self_attn.o_proj.weight")
        == "mxfp8"
    )


def test_one_format_inside_to_q_to_k_to_v():
    model = RemoteModel()
    for layer in model.model.layers:
        layer.attn = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("to_q", "to_k", "to_v")})
    with pytest.raises(PlanError, match=r"to_q\.weight .*to_k\.weight .*to_v\.weight"):
        plan(model, mxfp8(keep_bf16=["to_k"]))


@pytest.mark.parametrize("place", ["shared_expert", "mlp"])
def test_one_format_inside_gate_and_up_of_a_plain_mlp(place):
    model = tiny("qwen2_moe", mlp_only_layers=[0])
    kept = f"layers.{'1.mlp.shared_expert' if place == 'shared_expert' else '0.mlp'}.up_proj"
    with pytest.raises(PlanError, match=r"gate_proj\.weight mxfp8 .*up_proj\.weight bf16"):
        plan(model, mxfp8(keep_bf16=[kept]))


def test_one_format_inside_mla_down_projections():
    with pytest.raises(PlanError, match=r"q_a_proj\.weight bf16 .*kv_a_proj_with_mqa\.weight mxfp8"):
        plan(tiny("deepseek_v3"), mxfp8(backward="dequantized", keep_bf16=["q_a_proj"]))


@pytest.mark.parametrize(
    "pattern",
    ["experts.2", "experts.*.gate_proj", "layers.1.mlp.experts.0.up_proj", "experts.down_proj", "experts.gate_up_proj"],
)
@pytest.mark.parametrize("source", ["live", "files", "module list"])
def test_a_part_of_one_layers_experts_cannot_be_kept_alone(qwen, tmp_path, pattern, source):
    model = {"live": qwen, "files": None, "module list": RemoteModel()}[source]
    if model is None:
        model = write_folder(tmp_path, qwen_config(), qwen_headers())
    if source == "module list" and pattern in ("experts.down_proj", "experts.gate_up_proj"):
        pattern = "experts.*.down_proj"
    with pytest.raises(
        PlanError, match=r"keep_bf16 pattern .* keeps .*keep 'model\.layers\.[01]\.mlp\.experts' as a whole"
    ):
        plan(model, nvfp4(keep_bf16=[pattern]))


@pytest.mark.parametrize(
    "pattern", ["layers.0.mlp", "layers.0.mlp.experts", "layers.0.block_sparse_moe", "layers.0.*.experts"]
)
def test_hub_and_live_spelling_of_a_pattern_mean_the_same(tmp_path, pattern):
    from tests.helpers.families import save

    model = tiny("mixtral")
    live, disk = plan(model, nvfp4(keep_bf16=[pattern])), plan(save(model, tmp_path), nvfp4(keep_bf16=[pattern]))
    assert live.quantized == disk.quantized
    assert {n.split(".")[2] for n in live.quantized} == {"1"}


# layers


@pytest.mark.parametrize(
    ("first", "last", "kept"), [(0, 1, {3}), (1, 0, {0}), (1, 2, {0, 2, 3}), (0, 0.5, {2, 3}), (0.25, 0, {0})]
)
def test_counts_and_fractions_keep_layers_at_the_ends(qwen, first, last, kept):
    made = plan(qwen, mxfp8(first_layers_bf16=first, last_layers_bf16=last))
    by_layer = {int(e.name.split(".")[2]): e.format for e in made if e.role == "attention"}
    assert {layer for layer, fmt in by_layer.items() if fmt == "bf16"} == kept


def test_fifteen_percent_of_48_layers_are_7(tmp_path):
    folder = write_folder(tmp_path, qwen_config(num_hidden_layers=48), qwen_headers(layers=48))
    made = plan(folder, "nvfp4-rl")
    assert {int(n.split(".")[2]) for n in made.quantized} == set(range(41))
    assert made.summary()["last_layers_bf16"] == 7


def test_more_kept_layers_than_the_model_has_are_refused(qwen):
    with pytest.raises(PlanError, match=r"keep 0 \+ 100 layers in BF16; the model has 4"):
        plan(qwen, nvfp4(last_layers_bf16=100))
    with pytest.raises(PlanError, match=r"keep 3 \+ 2 layers"):
        plan(qwen, nvfp4(first_layers_bf16=3, last_layers_bf16=2))


def test_a_recipe_that_ends_up_quantizing_nothing_is_refused_with_the_reasons(qwen):
    with pytest.raises(PlanError, match=r"every such tensor is kept in BF16: 8 by last 4 of 4 layers"):
        plan(qwen, nvfp4(last_layers_bf16=4))
    with pytest.raises(PlanError, match=r"8 by keep_bf16 pattern 'experts'"):
        plan(qwen, nvfp4(keep_bf16=["experts"]))


def test_a_fraction_that_rounds_to_no_layer_is_said():
    made = plan(tiny("qwen3_moe"), Recipe.named("nvfp4-rl"))
    assert made.warnings == ("last_layers_bf16 = 0.15 of 2 layers rounds to no layer",)


# lengths


@pytest.mark.parametrize(("recipe", "inner", "block"), [(nvfp4(), 40, 16), (mxfp8(backward="dequantized"), 48, 32)])
def test_a_length_that_the_block_does_not_divide_is_refused_with_numbers_and_advice(sized, recipe, inner, block):
    match = rf"model\.layers\.0\.mlp\.experts down: length {inner} is not a multiple of the {recipe.activations} block of {block}; add "
    with pytest.raises(PlanError, match=match):
        plan(sized(inner=inner), recipe)


def test_layers_that_are_refused_alike_are_one_line_with_their_number(sized):
    with pytest.raises(PlanError) as refused:
        plan(sized(inner=40), nvfp4())
    message = str(refused.value)
    assert message.count("length 40 is not a multiple of the nvfp4 block of 16") == 1
    assert message.count("(and 1 more like it)") == 1


def test_the_advice_of_a_refusal_works(sized):
    made = plan(
        sized(inner=48), mxfp8(backward="dequantized", keep_bf16=["model.layers.0.mlp.experts", "layers.1.mlp.experts"])
    )
    assert made.format_of("model.layers.1.self_attn.q_proj.weight") == "mxfp8"


def test_a_hidden_size_that_the_block_does_not_divide_is_refused(sized):
    with pytest.raises(PlanError, match=r"gate and up: length 72 is not a multiple of the nvfp4 block of 16"):
        plan(sized(hidden=72), nvfp4())


def test_a_plain_linear_is_refused_with_its_whole_group_as_advice(sized):
    with pytest.raises(
        PlanError, match=r"q_proj\.weight: length 48 .*add 'k_proj' and 'q_proj' and 'v_proj' to keep_bf16"
    ):
        plan(sized(hidden=48, inner=64), mxfp8(backward="dequantized", weights={"attention": "mxfp8"}))


def test_a_tensor_parallel_cut_through_a_block_is_refused_before_conversion(sized):
    """1856 inner rows over 8 ranks are 232, no multiple of 16: the engine would abort at load."""
    folder = sized(inner=1856)
    with pytest.raises(
        PlanError, match=r"experts down: length 1856 over tp = 8 is 232 a rank, not a multiple of the nvfp4 block of 16"
    ):
        plan(folder, nvfp4(), tp=8)
    assert plan(folder, nvfp4(), tp=4).quantized
    assert plan(folder, nvfp4(), tp=8, ep=4).quantized, "expert parallelism keeps experts whole"


def test_a_cut_that_is_not_even_whole_is_refused(sized):
    with pytest.raises(PlanError, match=r"length 64 over tp = 3 is 21\.3333 a rank"):
        plan(sized(inner=64), nvfp4(), tp=3)


def test_tensor_parallelism_cuts_the_input_of_row_parallel_linears_only(qwen):
    recipe = mxfp8(weights={"attention": "mxfp8"})
    assert plan(qwen, recipe, tp=2).quantized
    with pytest.raises(PlanError, match=r"o_proj\.weight: length 64 over tp = 4 is 16 a rank") as caught:
        plan(qwen, recipe, tp=4)
    assert "q_proj.weight:" not in str(caught.value)


def test_expert_tp_must_divide_into_whole_blocks(sized):
    folder = sized(inner=64)
    assert plan(folder, nvfp4(expert_tp=4), tp=4).warnings == ()
    for wrong in (3, 8):
        with pytest.raises(PlanError, match=rf"length 64 over expert_tp = {wrong}"):
            plan(folder, nvfp4(expert_tp=wrong))


def test_an_engine_that_cuts_experts_otherwise_than_the_recipe_is_warned_about(sized):
    folder = sized(inner=64)
    (warning,) = plan(folder, nvfp4(), tp=2).warnings
    assert "expert_tp is 1" in warning
    assert "set expert_tp=2" in warning
    assert plan(folder, mxfp8(), tp=2).warnings == (), "MXFP8 scales do not span the cut"


def test_low_precision_backward_also_needs_whole_blocks_of_output_rows():
    model = tiny("qwen3_moe", num_key_value_heads=1, head_dim=48)
    with pytest.raises(
        PlanError, match=r"k_proj\.weight: 48 output rows .*backward 'low_precision' quantizes; choose another backward"
    ):
        plan(model, mxfp8())
    assert plan(model, mxfp8(backward="dequantized")).quantized
    assert plan(model, mxfp8(backward="high_precision")).quantized


def test_a_linear_with_8_outputs_is_skipped_with_the_reason():
    model = RemoteModel()
    for layer in model.model.layers:
        layer.self_attn = nn.ModuleDict({"g_proj": nn.Linear(64, 8), "o_proj": nn.Linear(64, 64)})
    made = plan(model, mxfp8())
    entry = made.entry_of("model.layers.0.self_attn.g_proj.weight")
    assert (entry.format, entry.reason) == ("bf16", "only 8 output rows, fewer than 16: nothing to gain")
    assert made.format_of("model.layers.0.self_attn.o_proj.weight") == "mxfp8"
    assert "only 8 output rows" in str(made)


def test_small_members_of_a_fused_group_follow_the_group():
    """k and v of one small head beside a wide q: skipping them alone would mix formats in one engine layer."""
    model = tiny("qwen3_moe", num_key_value_heads=1, head_dim=8, num_attention_heads=8)
    made = plan(model, mxfp8(backward="dequantized"))
    assert made.format_of("model.layers.0.self_attn.k_proj.weight") == "mxfp8"


def test_many_refusals_are_told_at_once_and_counted(sized):
    with pytest.raises(PlanError, match=r"gate and up: length 72 .*1 more like it.* down: length 40 .*1 more like it"):
        plan(sized(hidden=72, inner=40), nvfp4())


@pytest.mark.parametrize(("tp", "ep"), [(0, 1), (1, 0), (True, 1), (2.0, 1)])
def test_ranks_are_whole_numbers_of_at_least_one(qwen, tp, ep):
    with pytest.raises(PlanError, match="expected a whole number of at least 1"):
        plan(qwen, "bf16", tp=tp, ep=ep)


def test_more_ranks_than_experts_are_refused_and_uneven_ones_said(qwen):
    with pytest.raises(PlanError, match=r"has 4 experts, fewer than ep = 8"):
        plan(qwen, nvfp4(), ep=8)
    assert "4 experts over ep = 3 ranks are uneven" in plan(qwen, nvfp4(), ep=3).warnings


@pytest.mark.parametrize("dtype", ["F64"])
def test_a_weight_dtype_that_no_format_reads_is_refused(tmp_path, dtype):
    with pytest.raises(PlanError, match=r"float64; weights are read as"):
        plan(write_folder(tmp_path, qwen_config(), qwen_headers(dtype=dtype)), nvfp4())
