"""A recipe is frozen, comparable, serializable, and refuses what cannot be exact."""

import copy
import json
import pickle

import pytest

from swapq.anatomy import NEVER_QUANTIZED, Role
from swapq.errors import RecipeError, SwapqError
from swapq.recipe import BACKWARD_MODES, FORMATS, Recipe, names
from swapq.support import matrix


def test_the_named_recipes_are_those_of_the_design_table():
    assert names() == [
        "bf16",
        "mxfp8-rl",
        "nvfp4-rl",
        "fp8-block-rl",
        "fp8-rollout",
        "int4-qat",
        "nvfp4-pretrain",
    ]
    mxfp8, nvfp4, bf16 = Recipe.named("mxfp8-rl"), Recipe.named("nvfp4-rl"), Recipe.named("bf16")
    assert dict(mxfp8.weights) == dict.fromkeys(("attention", "dense_mlp", "routed_experts", "shared_experts"), "mxfp8")
    assert (mxfp8.activations, mxfp8.backward, mxfp8.last_layers_bf16) == ("mxfp8", "low_precision", 0)
    assert dict(nvfp4.weights) == {"routed_experts": "nvfp4"}
    assert (nvfp4.activations, nvfp4.backward, nvfp4.last_layers_bf16) == ("nvfp4", "dequantized", 0.15)
    assert (dict(bf16.weights), bf16.activations, bf16.backward) == ({}, "bf16", "bf16")


def test_fp8_block_rl_and_fp8_rollout_differ_in_the_training_alone():
    matched, rollout = Recipe.named("fp8-block-rl"), Recipe.named("fp8-rollout")
    assert matched.weights == rollout.weights
    assert matched.activations == rollout.activations == "fp8_block"
    assert (matched.backward, rollout.backward) == ("low_precision", "bf16")
    assert (matched.matched, rollout.matched) == (True, False)
    assert rollout.policies == "training bf16, rollout fp8_block: two different policies"
    assert matched.replace(backward="bf16").matched is False
    for backward in ("low_precision", "high_precision", "dequantized"):
        assert matched.replace(backward=backward).matched


def test_int4_qat_has_bf16_rows_and_either_group():
    recipe = Recipe.named("int4-qat")
    assert (dict(recipe.weights), recipe.activations) == ({"routed_experts": "int4"}, "bf16")
    assert Recipe.named("int4-qat", weights={"routed_experts": "int4_g32"}).formats == ("int4_g32",)
    with pytest.raises(RecipeError, match="weight-only format"):
        Recipe.named("int4-qat", activations="mxfp8")
    with pytest.raises(RecipeError, match="nothing is gained by quantizing gradients"):
        Recipe.named("int4-qat", backward="low_precision")
    with pytest.raises(RecipeError, match="BF16 training with INT4 rollout"):
        Recipe.named("int4-qat", backward="bf16")


def test_nvfp4_pretrain_is_not_for_rollouts_unless_forced():
    recipe = Recipe.named("nvfp4-pretrain")
    with pytest.raises(RecipeError, match=r"not for rollouts: .*depends on its neighbours.*force_rollout=True"):
        recipe.require_rollout("export")
    assert "force_rollout" not in recipe.to_dict()
    forced = recipe.replace(force_rollout=True)
    forced.require_rollout("export")
    assert Recipe.from_dict(forced.to_dict()) == forced
    assert forced.id != recipe.id
    with pytest.raises(RecipeError, match="expected true or false"):
        recipe.replace(force_rollout=1)
    with pytest.raises(RecipeError, match="set expert_tp to 1"):
        recipe.replace(expert_tp=2)


def test_the_support_matrix_is_what_recipes_obey():
    for p in matrix():
        fields = {"name": "x", "weights": {} if p.rollout == "bf16" else {"routed_experts": p.rollout}}
        fields["activations"] = FORMATS[p.rollout].activations[0]
        if p.training == p.rollout:
            recipe = Recipe.from_dict(fields | {"backward": FORMATS[p.rollout].backward[-1]})
            assert p.status == ("forced" if recipe.no_rollout else "matched")
            assert recipe.matched
        elif p.training == "bf16" and p.status == "differs":
            assert not Recipe.from_dict(fields | {"backward": "bf16"}).matched
        elif p.training == "bf16":
            with pytest.raises(RecipeError, match="another policy than the one that was sampled"):
                Recipe.from_dict(fields | {"backward": "bf16"})
        else:
            assert p.status == "refused", "a recipe has no words for it"
    assert {p.rollout for p in matrix() if p.status == "differs"} == {"fp8_block"}


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(RecipeError, match="did you mean 'nvfp4-rl'"):
        Recipe.named("nvfp4_rl")


def test_an_unknown_key_names_itself_and_the_nearest_key():
    with pytest.raises(RecipeError, match=r"unknown recipe key 'last_layer_bf16' \(did you mean 'last_layers_bf16'"):
        Recipe.named("nvfp4-rl", last_layer_bf16=4)
    with pytest.raises(RecipeError, match="'backwards'"):
        Recipe.named("nvfp4-rl").replace(backwards="dequantized")


def test_overrides_replace_only_their_field():
    recipe = Recipe.named("nvfp4-rl", backward="high_precision", last_layers_bf16=4)
    assert recipe == Recipe.named("nvfp4-rl").replace(backward="high_precision", last_layers_bf16=4)
    assert recipe.weights == Recipe.named("nvfp4-rl").weights


@pytest.mark.parametrize("role", [r.value for r in NEVER_QUANTIZED])
def test_a_recipe_that_names_a_role_that_is_never_quantized_is_refused_with_the_reason(role):
    with pytest.raises(RecipeError, match=role) as caught:
        Recipe.named("nvfp4-rl", weights={"routed_experts": "nvfp4", role: "nvfp4"})
    assert NEVER_QUANTIZED[Role(role)] in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weights": {"routed_expert": "nvfp4"}}, "did you mean 'routed_experts'"),
        ({"weights": {"routed_experts": "nvfp8"}}, "no format"),
        ({"weights": {"routed_experts": "int4"}}, "set activations to 'bf16'"),
        ({"weights": {"routed_experts": 4}}, "no format"),
        ({"weights": "nvfp4"}, "expected a mapping"),
        ({"weights": {"routed_experts": "nvfp4", "attention": "mxfp8"}}, "set activations to {'attention': 'mxfp8'"),
        ({"activations": {"routed_experts": "mxfp8"}}, "both operands have one format"),
        ({"activations": {}}, "weight-only"),
        ({"activations": {"router": "nvfp4"}}, "always stays BF16"),
        ({"activations": {"routed_experts": "fp4"}}, "did you mean 'nvfp4'"),
        ({"activations": {"routed_experts": "nvfp4", "attention": "mxfp8"}}, "attention weights are bf16"),
        ({"activations": "bf16"}, "weight-only"),
        ({"activations": "mxfp8"}, "both operands have one format"),
        ({"activations": "fp4"}, "did you mean 'nvfp4'"),
        ({"activations": ["nvfp4"]}, "choose one of"),
        ({"backward": "low_precision"}, "stochastic rounding"),
        ({"backward": "dequantised"}, "did you mean 'dequantized'"),
        ({"backward": "bf16"}, "BF16 training with NVFP4 rollout"),
        ({"backward": "bf16", "activations": "bf16"}, "BF16 training with NVFP4 rollout"),
        ({"keep_bf16": "kv_b_proj"}, "expected a list"),
        ({"keep_bf16": [3]}, "expected a string"),
        ({"keep_bf16": ["re:.*gate.*"]}, "regular expressions are not"),
        ({"keep_bf16": ["a..b"]}, "not made of dotted name parts"),
        ({"keep_bf16": [""]}, "not made of dotted name parts"),
        ({"keep_bf16": ["layers 3"]}, "not made of dotted name parts"),
        ({"last_layers_bf16": True}, "True"),
        ({"first_layers_bf16": -1}, "-1"),
        ({"last_layers_bf16": -0.1}, "-0.1"),
        ({"last_layers_bf16": 1.0}, "whole number such as 1"),
        ({"last_layers_bf16": 4.0}, "whole number such as 4"),
        ({"last_layers_bf16": float("nan")}, "nan"),
        ({"last_layers_bf16": "4"}, "expected a count"),
        ({"expert_tp": 0}, "at least 1"),
        ({"expert_tp": True}, "at least 1"),
        ({"expert_tp": 2.0}, "at least 1"),
        ({"name": ""}, "non-empty"),
    ],
)
def test_a_value_that_cannot_be_is_refused_at_construction(changes, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.named("nvfp4-rl").replace(**changes)


def test_bf16_weights_refuse_quantized_activations_and_gradients():
    with pytest.raises(RecipeError, match="every weight is bf16"):
        Recipe.named("bf16", activations="nvfp4")
    with pytest.raises(RecipeError, match="every weight is bf16"):
        Recipe.named("bf16", backward="dequantized")
    with pytest.raises(RecipeError, match="every weight is bf16"):
        Recipe.named("nvfp4-rl", weights={})


def test_mxfp8_has_three_backward_modes_and_nvfp4_two():
    for backward in ("low_precision", "high_precision", "dequantized"):
        assert Recipe.named("mxfp8-rl", backward=backward).backward == backward
    for backward in ("high_precision", "dequantized"):
        assert Recipe.named("nvfp4-rl", backward=backward).backward == backward


MIXED = {"routed_experts": "nvfp4", "attention": "mxfp8", "dense_mlp": "mxfp8"}


def mixed(**changes):
    fields = {"name": "mixed", "weights": MIXED, "activations": MIXED, "backward": "dequantized"}
    return Recipe.from_dict(fields | changes)


def test_a_recipe_may_give_roles_different_formats_each_with_its_own_rows():
    recipe = mixed()
    assert recipe.formats == ("mxfp8", "nvfp4")
    assert {role: recipe.activations_of(role) for role in recipe.weights} == MIXED
    assert recipe.activations_of("shared_experts") == recipe.activations_of("router") == "bf16"
    assert mixed(activations=dict(reversed(list(MIXED.items())))) == recipe
    with pytest.raises(TypeError):
        recipe.activations["attention"] = "nvfp4"


def test_a_mapping_that_says_one_format_equals_that_format():
    recipe = Recipe.named("nvfp4-rl", activations={"routed_experts": "nvfp4", "attention": "bf16"})
    assert recipe == Recipe.named("nvfp4-rl")
    assert recipe.activations == "nvfp4"
    assert recipe.id == Recipe.named("nvfp4-rl").id


def test_a_mixed_recipe_has_the_backward_modes_that_all_its_formats_have():
    for backward in ("high_precision", "dequantized"):
        assert mixed(backward=backward).backward == backward
    with pytest.raises(
        RecipeError, match=r"routed_experts weights are nvfp4: .*stochastic rounding.*'high_precision' or"
    ):
        mixed(backward="low_precision")
    with pytest.raises(RecipeError, match="choose 'high_precision' or 'dequantized'"):
        mixed(backward="bf16")


def test_every_format_of_the_table_says_what_it_has_not():
    for fmt, rule in FORMATS.items():
        assert set(rule.activations) <= FORMATS.keys(), fmt
        assert set(rule.backward) <= set(BACKWARD_MODES), fmt
        assert not set(rule.backward) & set(rule.refused), fmt


def test_a_role_given_bf16_equals_a_role_left_out():
    full = {"routed_experts": "nvfp4", "shared_experts": "bf16"}
    assert Recipe.named("nvfp4-rl", weights=full) == Recipe.named("nvfp4-rl")
    assert Recipe.named("nvfp4-rl").format_of("shared_experts") == "bf16"


def test_the_order_of_weights_changes_nothing():
    mxfp8 = Recipe.named("mxfp8-rl")
    turned = mxfp8.replace(weights=dict(reversed(list(mxfp8.weights.items()))))
    assert turned == mxfp8
    assert (turned.id, hash(turned)) == (mxfp8.id, hash(mxfp8))


def test_dots_at_the_ends_of_a_pattern_mean_nothing_and_repeats_are_dropped():
    assert Recipe.named("bf16", keep_bf16=[".mlp.gate.", "mlp.gate", "kv_b_proj"]).keep_bf16 == (
        "mlp.gate",
        "kv_b_proj",
    )


@pytest.mark.parametrize("name", ["bf16", "mxfp8-rl", "nvfp4-rl", "mixed"])
def test_a_recipe_survives_json_pickle_and_copies(name):
    changes = {"keep_bf16": ["layers.*.mlp"], "first_layers_bf16": 1}
    recipe = mixed(**changes) if name == "mixed" else Recipe.named(name, **changes)
    for other in (
        Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))),
        pickle.loads(pickle.dumps(recipe)),
        copy.deepcopy(recipe),
        Recipe.resolve(recipe),
        Recipe.resolve(recipe.to_dict()),
    ):
        assert other == recipe
        assert hash(other) == hash(recipe)
        assert other.id == recipe.id


def test_the_id_is_the_same_on_every_machine_and_differs_with_every_field():
    assert Recipe.named("nvfp4-rl").id == "ea653e5f72fa"
    base = Recipe.named("mxfp8-rl")
    changes = [
        {"name": "x"},
        {"weights": {"routed_experts": "mxfp8"}},
        {"backward": "dequantized"},
        {"keep_bf16": ["a"]},
        {"first_layers_bf16": 1},
        {"last_layers_bf16": 1},
        {"last_layers_bf16": 0.5},
        {"expert_tp": 2},
    ]
    ids = {base.id, *(base.replace(**change).id for change in changes)}
    assert len(ids) == len(changes) + 1


def test_a_recipe_cannot_be_changed():
    recipe = Recipe.named("nvfp4-rl")
    with pytest.raises(AttributeError):
        recipe.backward = "bf16"
    with pytest.raises(TypeError):
        recipe.weights["attention"] = "nvfp4"


def test_fields_left_out_of_a_named_dict_are_that_recipes_and_not_bf16():
    assert Recipe.resolve({"name": "nvfp4-rl", "last_layers_bf16": 4}) == Recipe.named("nvfp4-rl", last_layers_bf16=4)


def test_resolve_reads_a_json_file_and_refuses_other_things(tmp_path):
    path = tmp_path / "mine.json"
    recipe = Recipe.named("mxfp8-rl", keep_bf16=["o_proj"]).replace(name="mine")
    path.write_text(json.dumps(recipe.to_dict()))
    assert Recipe.resolve(path) == Recipe.resolve(str(path)) == recipe
    assert Recipe.resolve(path, expert_tp=2).expert_tp == 2
    path.write_text("[1]")
    with pytest.raises(RecipeError, match="expected an object"):
        Recipe.resolve(path)
    path.write_text("{")
    with pytest.raises(RecipeError, match="not readable as JSON"):
        Recipe.resolve(path)
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.resolve(tmp_path / "absent.json")
    with pytest.raises(RecipeError, match="got int"):
        Recipe.resolve(3)
    with pytest.raises(RecipeError, match="needs a name"):
        Recipe.from_dict({})


def test_a_refused_recipe_is_a_swapq_error_and_a_value_error():
    with pytest.raises(SwapqError):
        Recipe.named("no")
    with pytest.raises(ValueError, match="unknown recipe"):
        Recipe.named("no")


@pytest.mark.parametrize(
    ("value", "layers", "count"), [(0.15, 48, 7), (0.15, 10, 2), (0.15, 2, 0), (0.5, 5, 3), (4, 48, 4), (0, 48, 0)]
)
def test_a_fraction_of_layers_is_rounded_to_nearest(value, layers, count):
    assert Recipe.layer_count(value, layers) == count


def test_a_misspelt_name_is_not_a_recipe_that_quantizes_nothing():
    with pytest.raises(RecipeError, match=r"name is 'nvfp4-lr'.*did you mean 'nvfp4-rl'.*no weights"):
        Recipe.resolve({"name": "nvfp4-lr", "last_layers_bf16": 2})
    assert Recipe.resolve({"name": "mine", "weights": {}}).formats == ()


def test_a_refusal_of_a_recipe_file_names_the_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"name": "nvfp4-rl", "last_layers_bf16": "2"}))
    with pytest.raises(RecipeError, match=r"recipe file .*mine\.json: last_layers_bf16 is '2'"):
        Recipe.resolve(path)
