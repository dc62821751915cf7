"""A recipe says of every matrix of a model what becomes of it, by whole components, or in one sentence what is wrong with it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from gemma4_flex.checkpoints import CheckpointError
from gemma4_flex.checkpoints.mlx_recipe import Format, load_recipe, matches, parse_recipe, recipe_names
from gemma4_flex.models.projections import PLE_TABLE
from tests.checkpoints.mlx_rig import wide_model
from tests.tiny import tiny_model

FOUR, EIGHT = Format("affine", 4, 64), Format("affine", 8, 64)


@pytest.fixture(scope="module")
def model():
    return wide_model()


def test_the_recipes_of_the_package_are_the_two_that_are_promised():
    assert recipe_names() == ["4bit", "4bit-attention8-ple"]


def test_4bit_makes_everything_4_bits_in_groups_of_64(model):
    plan = load_recipe("4bit").plan(model)
    assert len(plan) == 4 * 9 + 2 * 7 + 1 + 2 and set(plan.values()) == {FOUR}


def test_the_mixed_recipe_keeps_per_layer_gates_and_projections_and_has_attention_and_the_table_at_8_bits(model):
    expected = {"model.embed_tokens": FOUR, PLE_TABLE: EIGHT, "model.per_layer_model_projection": None}
    for layer in range(6):
        kv = ("k_proj", "v_proj") if layer < 4 else ()
        expected |= {f"model.layers.{layer}.self_attn.{name}": EIGHT for name in ("q_proj", "o_proj", *kv)}
        expected |= {f"model.layers.{layer}.mlp.{name}": FOUR for name in ("gate_proj", "up_proj", "down_proj")}
        expected |= {f"model.layers.{layer}.per_layer_input_gate": None, f"model.layers.{layer}.per_layer_projection": None}
    assert load_recipe("4bit-attention8-ple").plan(model) == expected


def test_a_pattern_is_whole_components_that_follow_each_other():
    gate = "model.layers.10.mlp.gate_proj"
    for pattern in ("gate_proj", "mlp", "mlp.gate_proj", "layers.10", "layers.*.mlp", "*.gate_proj", gate, "10", "*"):
        assert matches(pattern, gate), pattern
    for pattern in ("proj", "gate", "layers.1", "1", "layers.mlp", "mlp.*.gate_proj", f"x.{gate}", f"{gate}.weight"):
        assert not matches(pattern, gate), pattern
    assert not matches("per_layer_input_gate", gate) and not matches("gate_proj", "model.layers.0.per_layer_input_gate")
    assert not matches("embed_tokens", PLE_TABLE)


def test_the_last_pattern_counts_and_what_an_override_leaves_out_is_the_defaults(model):
    recipe = parse_recipe("r", {"bits": 6, "group_size": 32, "overrides": {
        "mlp": {"bits": 8}, "layers.1.mlp": False, "layers.1.mlp.up_proj": {"group_size": 64}, "q_proj": {"mode": "mxfp8"},
        "o_proj": {"group_size": None}, "v_proj": {"mode": "affine"}}})
    plan = recipe.plan(model)
    assert plan["model.layers.0.mlp.up_proj"] == ("affine", 8, 32)
    assert plan["model.layers.1.mlp.gate_proj"] is None and plan["model.layers.1.mlp.up_proj"] == ("affine", 6, 64)
    assert plan["model.layers.0.self_attn.q_proj"] == ("mxfp8", 8, 32)
    assert plan["model.layers.0.self_attn.o_proj"] == ("affine", 6, 64)
    assert plan["model.layers.0.self_attn.v_proj"] == plan["model.embed_tokens"] == ("affine", 6, 32)
    assert parse_recipe("r", {}).default == FOUR
    assert parse_recipe("r", {"mode": "nvfp4"}).default == ("nvfp4", 4, 16)


def test_a_matrix_whose_rows_the_default_does_not_fill_is_kept_and_one_named_so_is_refused():
    narrow = tiny_model()       # rows of 48, 32, 64, 128 and 8 values
    plan = parse_recipe("r", {"bits": 4, "group_size": 64}).plan(narrow)
    assert plan["model.layers.0.self_attn.q_proj"] is None and plan["model.layers.0.self_attn.o_proj"] == FOUR
    with pytest.raises(CheckpointError, match=r"recipe r gives q_proj groups of 64, which do not fill the 48 values"):
        parse_recipe("r", {"overrides": {"q_proj": {"bits": 8}}}).plan(narrow)


@pytest.mark.parametrize("name", ["mlp.gate", "layers.6", "lm_head", "norm", "layers.5.self_attn.k_proj", "layer_scalar"])
def test_a_recipe_naming_what_is_not_there_is_refused(model, name):
    with pytest.raises(CheckpointError, match=f"recipe r names {name}, and the model has no linear or table of that path"):
        parse_recipe("r", {"overrides": {"mlp": False, name: False}}).plan(model)


@pytest.mark.parametrize("data, message", [
    ([], "is no JSON object"),
    ({"bits": 7}, "cannot have the default as it says: affine has 2, 3, 4, 5, 6 or 8 bits, not 7"),
    ({"bits": 4.0}, "the default bits 4.0: give a whole number"),
    ({"bits": True}, "bits True: give a whole number"),
    ({"group_size": 48}, "affine has groups of 32, 64 or 128, not 48"),
    ({"mode": "mxfp4", "bits": 8}, "mxfp4 has 4 bits and groups of 32, not 8 bits"),
    ({"mode": "q4"}, "the default mode 'q4', which is none of affine"),
    ({"mode": ["affine"]}, "which is none of affine"),
    ({"bit": 4}, "has bit: it takes mode, bits, group_size and overrides"),
    ({"overrides": []}, "overrides that are no JSON object"),
    ({"overrides": {"mlp": 8}}, "has 8 for mlp: give an object, or false"),
    ({"overrides": {"mlp": True}}, "has True for mlp"),
    ({"overrides": {"mlp": {"bits": 9}}}, "cannot have mlp as it says: affine has"),
    ({"overrides": {"mlp": {"width": 9}}}, "has width for mlp"),
    ({"overrides": {"mlp..x": False}}, "the pattern 'mlp..x': write whole components"),
    ({"overrides": {"": False}}, "the pattern ''"),
])
def test_what_is_no_recipe_or_no_format_is_refused_in_one_sentence(data, message):
    with pytest.raises(CheckpointError, match=message) as error:
        parse_recipe("r", data)
    assert "\n" not in str(error.value)


def test_a_recipe_is_found_by_name_or_read_from_a_file(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"bits": 8, "overrides": {"mlp": False}}))
    assert load_recipe(str(file)) == parse_recipe("mine", {"bits": 8, "overrides": {"mlp": False}})
    with pytest.raises(CheckpointError, match="recipe 3bit is no file, and none of 4bit, 4bit-attention8-ple"):
        load_recipe("3bit")
    for text in ("{", "[" * 100_000, b"\xff"):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(CheckpointError, match="cannot be read as JSON"):
            load_recipe(str(file))
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_recipe(str(tmp_path))


KEYS = st.sampled_from(["bits", "group_size", "mode", "overrides", "mlp", "*"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["affine", "mxfp4", "mlp", ""])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=4)), max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_any_json_is_a_recipe_or_refused_in_one_sentence(model, data):
    try:
        plan = parse_recipe("r", data).plan(model)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert len(plan) == 53
