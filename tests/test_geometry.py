"""Facts about the published geometries, both config forms, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from transformers import Gemma4Config, Gemma4TextConfig

from gemma4_flex.checkpoints.published import PUBLISHED, check_claim, published_geometry
from gemma4_flex.geometry import (
    FULL,
    SLIDING,
    ModelGeometry,
    RopeGeometry,
    UnsupportedModelError,
    plain_config,
    text_fields,
)
from tests.dense import dense_config, dense_model
from tests.tiny import tiny_config, tiny_model

E2B, E4B = published_geometry("E2B"), published_geometry("E4B")


def tiny_fields(**changed) -> dict:
    """The tiny config as a plain config.json in the `global_head_dim` form."""
    return text_fields(tiny_config()) | {"architectures": ["Gemma4ForCausalLM"]} | changed


def test_the_owners_of_e2b_are_layers_0_to_14_and_shared_layers_read_13_and_14():
    assert E2B.first_shared == 15
    assert E2B.owners(SLIDING) == (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13)
    assert E2B.owners(FULL) == (4, 9, 14)
    assert [la.index for la in E2B.layers if la.attention_type == FULL] == [4, 9, 14, 19, 24, 29, 34]
    for layer in E2B.layers:
        shared_owner = 13 if layer.attention_type == SLIDING else 14
        assert layer.kv_owner == (layer.index if layer.index < 15 else shared_owner)
        assert layer.owns_kv == (layer.index < 15)


def test_the_owners_of_e4b_are_layers_0_to_23_and_shared_layers_read_22_and_23():
    assert E4B.first_shared == 24
    assert E4B.owners(SLIDING) == (*range(5), *range(6, 11), *range(12, 17), *range(18, 23))
    assert E4B.owners(FULL) == (5, 11, 17, 23)
    assert {la.kv_owner for la in E4B.layers[24:] if la.attention_type == SLIDING} == {22}
    assert {la.kv_owner for la in E4B.layers[24:] if la.attention_type == FULL} == {23}


def test_the_mlp_is_twice_as_wide_in_the_shared_layers_of_e2b_only():
    assert [la.mlp_width for la in E2B.layers] == [6144] * 15 + [12288] * 20
    assert {la.mlp_width for la in E4B.layers} == {10240}


def test_heads_windows_and_rotary_regimes_are_the_published_ones():
    for geometry, kv_heads in ((E2B, 1), (E4B, 2)):
        for layer in geometry.layers:
            sliding = layer.attention_type == SLIDING
            assert (layer.num_heads, layer.num_kv_heads) == (8, kv_heads)
            assert (layer.head_dim, layer.window) == ((256, 512) if sliding else (512, None))
        assert geometry.rope == {SLIDING: RopeGeometry(10_000.0, 256, 1.0), FULL: RopeGeometry(1_000_000.0, 512, 0.25)}
        assert (geometry.final_softcap, geometry.tied_head, geometry.norm_eps) == (30.0, True, 1e-6)
        assert geometry.attention_types == (FULL, SLIDING)
    assert (E2B.num_layers, E2B.hidden_size, E4B.num_layers, E4B.hidden_size) == (35, 1536, 42, 2560)


def test_kv_bytes_a_token_are_the_published_ones():
    assert E2B.kv_bytes_per_token(2) == {SLIDING: 12_288, FULL: 6_144}
    assert E4B.kv_bytes_per_token(2) == {SLIDING: 40_960, FULL: 16_384}


def test_a_cache_stops_growing_in_sliding_layers_at_the_window():
    assert E2B.kv_cache_bytes(100, 2) == 100 * (12_288 + 6_144)
    assert E2B.kv_cache_bytes(512, 2) == 512 * (12_288 + 6_144)
    assert E2B.kv_cache_bytes(10_000, 2) == 512 * 12_288 + 10_000 * 6_144
    assert E2B.kv_cache_bytes(0, 2) == 0


@pytest.mark.parametrize(("geometry", "table", "embed", "rest", "total", "step"), [
    (E2B, 2.349e9, 0.403e9, 1.877e9, 4.629e9, 4.56e9), (E4B, 2.819e9, 0.671e9, 3.973e9, 7.463e9, 9.29e9)])
def test_parameter_counts_and_step_bytes_are_the_published_ones(geometry, table, embed, rest, total, step):
    count = geometry.parameter_count()
    assert [count[k] / 1e9 for k in ("ple_table", "embed", "rest", "total")] == pytest.approx(
        [table / 1e9, embed / 1e9, rest / 1e9, total / 1e9], abs=5e-4)
    assert geometry.step_weight_bytes(2) / 1e9 == pytest.approx(step / 1e9, abs=5e-3)


def test_the_parameter_count_is_the_number_of_elements_of_the_model():
    for overrides in ({}, {"num_kv_shared_layers": 0}, {"use_double_wide_mlp": False}, {"num_key_value_heads": 2},
                      {"tie_word_embeddings": False}):
        model = tiny_model(**overrides)
        count = ModelGeometry.from_config(model.config).parameter_count()
        assert count["total"] == sum(p.numel() for p in model.parameters())
        assert count["ple_table"] == model.model.embed_tokens_per_layer.weight.numel()
        assert count["embed"] == model.model.embed_tokens.weight.numel()


def test_an_untied_head_is_read_in_a_step_and_the_embedding_then_is_not():
    tied, untied = (ModelGeometry.from_config(tiny_config(tie_word_embeddings=tie)) for tie in (True, False))
    assert untied.step_weight_bytes(2) == tied.step_weight_bytes(2)
    assert untied.parameter_count()["total"] == tied.parameter_count()["total"] + 64 * 48


def test_bolt_is_e4b_field_by_field_and_e2b_is_not():
    assert published_geometry("Bolt").differences(E4B) == []
    assert published_geometry("Bolt") == E4B
    check_claim("nvidia/NVIDIA-Nemotron-3.5-Bolt-E4B-BF16", E4B)
    with pytest.raises(UnsupportedModelError, match="hidden_size: 2560 and 1536"):
        check_claim("nvidia/NVIDIA-Nemotron-3.5-Bolt-E4B-BF16", E2B)


def test_a_single_changed_field_of_one_layer_shows_in_the_differences():
    changed = json.loads(PUBLISHED["E4B"].read_text())
    changed["num_kv_shared_layers"] = 17
    lines = ModelGeometry.from_config(changed).differences(E4B)
    assert lines[0] == "layer 24 kv_owner: 24 and 22"


def test_the_tiny_pattern_shares_within_its_attention_type():
    geometry = ModelGeometry.from_config(tiny_config())
    assert [la.kv_owner for la in geometry.layers] == [0, 1, 2, 3, 2, 3]
    assert [la.head_dim for la in geometry.layers] == [16, 32] * 3
    assert [la.mlp_width for la in geometry.layers] == [32] * 4 + [64] * 2


def test_without_sharing_every_layer_owns_its_kv():
    geometry = ModelGeometry.from_config(tiny_config(num_kv_shared_layers=0))
    assert geometry.first_shared == geometry.num_layers == 6
    assert all(layer.owns_kv for layer in geometry.layers)


def test_both_config_forms_and_the_config_object_mean_the_same():
    old_form = tiny_fields()
    new_form = {k: v for k, v in old_form.items() if k not in ("global_head_dim", "num_global_key_value_heads")}
    new_form["per_layer_config"] = {str(i): {"head_dim": 32} for i in (1, 3, 5)}
    expected = ModelGeometry.from_config(tiny_config())
    assert ModelGeometry.from_config(old_form) == expected
    assert ModelGeometry.from_config(new_form) == expected
    assert ModelGeometry.from_config(json.loads(tiny_config().to_json_string())) == expected
    assert "per_layer_config" not in text_fields(new_form)
    assert text_fields(new_form)["global_head_dim"] == 32


def test_equal_head_sizes_survive_the_form_that_then_lists_no_layer():
    config = tiny_config(global_head_dim=16)
    assert {la.head_dim for la in ModelGeometry.from_config(config).layers} == {16}
    assert ModelGeometry.from_config(json.loads(config.to_json_string())) == ModelGeometry.from_config(config)


def test_fields_left_out_of_a_config_mean_what_transformers_makes_of_them():
    bare = {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    assert ModelGeometry.from_config(bare) == ModelGeometry.from_config(Gemma4TextConfig())


def test_reading_a_config_does_not_change_it():
    config = tiny_fields(layer_types=[SLIDING, FULL] * 2 + [SLIDING, SLIDING], num_kv_shared_layers=1)
    before = copy.deepcopy(config)
    assert ModelGeometry.from_config(config).layers[-1].attention_type == FULL      # as transformers forces it
    assert config == before


def test_a_multimodal_config_gives_its_text_model_and_the_ids_to_refuse():
    config = Gemma4Config(text_config=tiny_config().to_dict(), image_token_id=60, audio_token_id=61, video_token_id=62)
    text_only = ModelGeometry.from_config(tiny_config())
    for given in (config, json.loads(config.to_json_string())):
        geometry = ModelGeometry.from_config(given)
        assert geometry.placeholder_ids == {60, 61, 62}
        assert geometry.differences(text_only) == []
    assert text_only.placeholder_ids == frozenset()


def test_the_placeholder_ids_of_a_multimodal_config_are_the_published_ones_by_default():
    config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "text_config": {}}
    assert ModelGeometry.from_config(config).placeholder_ids == {258880, 258881, 258884}


def test_an_object_config_is_read_through_to_dict_alone():
    class Jealous:
        def to_dict(self):
            return tiny_fields()

        def __getattr__(self, name):
            raise RuntimeError(f"ambiguous {name}")

    assert plain_config(Jealous())["hidden_size"] == 48
    assert ModelGeometry.from_config(Jealous()) == ModelGeometry.from_config(tiny_config())


@pytest.mark.parametrize(("changed", "named"), [
    ({"enable_moe_block": True}, "enable_moe_block"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"attention_k_eq_v": True}, "attention_k_eq_v"),
    ({"attention_bias": True}, "attention_bias"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input"),
    ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
    ({"architectures": ["Gemma3ForCausalLM"]}, "Gemma3ForCausalLM"),
    ({"architectures": None, "model_type": "mistral"}, "mistral"),
    ({"architectures": ["Gemma4AssistantForCausalLM"]}, "Gemma4AssistantForCausalLM"),
    ({"model_type": None, "architectures": None}, "model_type None"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5"),
    ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
    ({"layer_types": [SLIDING, FULL]}, "lists 2 layers"),
    ({"num_key_value_heads": 0}, "num_key_value_heads"),
    ({"head_dim": 15}, "even head_dim"),
    ({"vocab_size_per_layer_input": 63}, "without a per-layer embedding"),
    ({"sliding_window": -4}, "sliding_window"),
    ({"layer_types": ["chunked_attention", FULL] * 3}, "chunked_attention"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"sliding_window": None}, "sliding_window"),
    ({"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                          FULL: {"rope_type": "proportional", "rope_theta": 1e6, "factor": 8.0}}}, "factor"),
    ({"rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                          FULL: {"rope_type": "yarn", "rope_theta": 1e6}}}, "yarn"),
    ({"per_layer_config": {"1": {"head_dim": 32}}, "global_head_dim": None}, "head_dim"),
    ({"per_layer_config": {str(i): {"head_dim": 64} for i in (1, 3, 5)}}, "global_head_dim=32"),
    ({"per_layer_config": {"0": {"intermediate_size": 7}}, "global_head_dim": None}, "intermediate_size"),
])
def test_what_the_engine_does_not_compute_is_refused_by_name(changed, named):
    with pytest.raises(UnsupportedModelError, match=named):
        ModelGeometry.from_config(tiny_fields(**changed))


def test_all_refused_fields_are_named_at_once():
    with pytest.raises(UnsupportedModelError, match=r"enable_moe_block.*attention_bias"):
        ModelGeometry.from_config(tiny_fields(enable_moe_block=True, attention_bias=True))


def test_vision_only_bidirectional_attention_is_no_hindrance_to_text():
    ModelGeometry.from_config(tiny_fields(use_bidirectional_attention="vision"))


def test_the_modules_of_a_model_match_its_own_config_and_no_other():
    for overrides in ({}, {"num_kv_shared_layers": 0}, {"use_double_wide_mlp": False}):
        model = tiny_model(**overrides)
        ModelGeometry.from_config(model.config).assert_matches(model.model)
    model = tiny_model()
    for overrides, named in (({"sliding_window": 5}, "layer 0 sliding_window: 5 and 4"),
                             ({"use_double_wide_mlp": False}, "layer 4 mlp width: 32 and 64"),
                             ({"num_kv_shared_layers": 0}, "layer 4 is_kv_shared_layer: False and True"),
                             ({"global_head_dim": 64}, "layer 1 head_dim: 64 and 32"),
                             ({"hidden_size": 24}, "hidden size: 24 and 48"),
                             ({"num_key_value_heads": 2}, "layer 0 k_proj rows: 32 and 16"),
                             ({"num_hidden_layers": 8, "layer_types": [SLIDING, FULL] * 4}, "layers: 8 and 6")):
        with pytest.raises(UnsupportedModelError, match=named):
            ModelGeometry.from_config(tiny_config(**overrides)).assert_matches(model.model)


def test_geometry_imports_neither_torch_nor_transformers():
    code = ("import importlib.util, sys, pathlib\n"
            "spec = importlib.util.spec_from_file_location('geometry', sys.argv[1])\n"
            "module = importlib.util.module_from_spec(spec); sys.modules['geometry'] = module\n"
            "spec.loader.exec_module(module)\n"
            "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code, sys.modules[ModelGeometry.__module__].__file__], check=True)


# ---- Qwen3 and Llama ----------------------------------------------------------------------------------------------

QWEN3, LLAMA = (json.loads(PUBLISHED[name].read_text()) for name in ("Qwen3-0.6B", "Llama-3.2-1B"))


@pytest.mark.parametrize(("config", "total", "head_dim", "qk_norms"), [
    (QWEN3, 596_049_920, 128, True), (LLAMA, 1_235_814_400, 64, False)])
def test_a_dense_models_geometry_is_one_kind_of_layer_that_owns_its_keys(config, total, head_dim, qk_norms):
    geometry = ModelGeometry.from_config(config)
    assert geometry.attention_types == (FULL,) and geometry.first_shared == geometry.num_layers == config["num_hidden_layers"]
    assert geometry.owners(FULL) == tuple(range(geometry.num_layers))
    assert {(la.head_dim, la.scale, la.window, la.num_kv_heads) for la in geometry.layers} == {(head_dim, head_dim**-0.5, None, 8)}
    assert geometry.qk_norms == qk_norms and geometry.final_softcap is None and not geometry.ple_width
    assert geometry.parameter_count()["total"] == total
    # tied: the head is the embedding, read once
    assert geometry.step_weight_bytes(2) == 2 * total
    assert geometry.kv_bytes_per_token(2) == {FULL: geometry.num_layers * 2 * 8 * head_dim * 2}


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_models_parameters_are_counted_as_its_modules_hold_them(architecture, tied):
    model = dense_model(architecture, tie_word_embeddings=tied)
    geometry = ModelGeometry.from_config(model.config)
    geometry.assert_matches(model.model)
    held = {id(p): p.numel() for p in model.parameters()}
    assert geometry.parameter_count()["total"] == sum(held.values())
    assert geometry.step_weight_bytes(4) == 4 * (sum(held.values()) - (0 if tied else model.model.embed_tokens.weight.numel()))


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_dense_config_reads_alike_in_every_form_it_is_written_in(architecture):
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 32}
    new = dense_config(architecture, rope_parameters=scaled | {"rope_theta": 5e5}).to_dict()
    old = {k: v for k, v in new.items() if k != "rope_parameters"} | {"rope_theta": 5e5, "rope_scaling": scaled}
    older = old | {"rope_scaling": {k: v for k, v in scaled.items() if k != "rope_type"} | {"type": "llama3"}}
    found = [ModelGeometry.from_config(config) for config in (new, old, older)]
    assert found[0] == found[1] == found[2] and found[0].rope[FULL].scaling
    assert found[0] != ModelGeometry.from_config(dense_config(architecture))


@pytest.mark.parametrize(("changed", "named"), [
    ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"), ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"use_sliding_window": True}, "use_sliding_window"), ({"layer_types": [FULL, SLIDING, FULL]}, "use_sliding_window"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
    ({"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"), ({"head_dim": 15}, "odd head_dim"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
])
@pytest.mark.parametrize("config", [QWEN3, LLAMA], ids=["qwen3", "llama"])
def test_what_the_engine_does_not_compute_of_a_dense_model_is_refused_by_name(config, changed, named):
    with pytest.raises(UnsupportedModelError, match=named):
        ModelGeometry.from_config(config | changed)


def test_dense_modules_that_are_not_what_the_config_says_are_named():
    geometry = ModelGeometry.from_config(dense_config("llama"))
    for other, named in (({"intermediate_size": 32}, "mlp width"), ({"head_dim": 8}, "scaling"),
                         ({"num_key_value_heads": 1}, "k_proj rows")):
        with pytest.raises(UnsupportedModelError, match=named):
            geometry.assert_matches(dense_model("llama", **other).model)
    with pytest.raises(UnsupportedModelError, match="q_norm"):
        geometry.assert_matches(dense_model("qwen3").model)
