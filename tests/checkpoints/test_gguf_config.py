"""What a GGUF file's metadata say of a model, against Hugging Face's own config of it; and metadata that are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemma4_flex.checkpoints.gguf_config import check_architecture, check_rope_freqs, shapes_of, shortest, text_config
from gemma4_flex.checkpoints.gguf_header import Header, TensorInfo, scan
from gemma4_flex.checkpoints.skeleton import CheckpointError, meta_text_model, weights_of
from gemma4_flex.geometry import FULL, SLIDING, ModelGeometry, UnsupportedModelError
from tests.ggufs import ABSENT, divisors, metadata_of, write_gguf
from tests.tiny import tiny_config, tiny_model

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "ggml-vocab-gemma-4.gguf"
# No two numbers are alike, so that no key can stand for another.
DISTINCT = {
    "vocab_size": 72, "vocab_size_per_layer_input": 72, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 7,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 16, "global_head_dim": 48, "sliding_window": 5, "hidden_size_per_layer_input": 12,
    "final_logit_softcapping": 17.5, "max_position_embeddings": 640, "rms_norm_eps": 3e-6,
    "rope_parameters": {SLIDING: {"rope_type": "default", "rope_theta": 777.0},
                        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 54321.0}}}
PLAIN = ("hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "num_kv_shared_layers", "num_attention_heads",
         "num_key_value_heads", "sliding_window", "hidden_size_per_layer_input", "final_logit_softcapping", "vocab_size",
         "max_position_embeddings", "rms_norm_eps", "rope_parameters", "use_double_wide_mlp", "tie_word_embeddings", "head_dim",
         "vocab_size_per_layer_input", "attention_bias", "hidden_activation", "per_layer_config", "attention_k_eq_v")


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> Header:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, tiny_model())
    return scan(path)


def changed(header: Header, **changes) -> Header:
    """With `gemma4.` keys at other values; `__` in a name is a dot."""
    found = header.metadata | {f"gemma4.{key.replace('__', '.')}": value for key, value in changes.items()}
    return Header(header.path, {key: value for key, value in found.items() if value is not ABSENT}, header.tensors, 0)


def refusal(header: Header, error=CheckpointError) -> str:
    with pytest.raises(error) as caught:
        check_architecture(header)
        ModelGeometry.from_config(text_config(header))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400 and type(caught.value) is error
    return message


# ---- what is said ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("overrides", [
    {}, DISTINCT, {"use_double_wide_mlp": False}, {"num_kv_shared_layers": 0}, {"tie_word_embeddings": False},
    {"num_key_value_heads": 2, "use_double_wide_mlp": False, "rms_norm_eps": 1e-5}, {"final_logit_softcapping": None},
], ids=["tiny", "distinct", "one width", "nothing shared", "own head", "like E4B", "no softcap"])
def test_the_config_is_hugging_faces_own(tmp_path, overrides):
    model = tiny_model(**overrides)
    cap = {"gemma4.final_logit_softcapping": ABSENT} if model.config.final_logit_softcapping is None else {}
    write_gguf(tmp_path / "m.gguf", model, changes=cap)
    header = scan(tmp_path / "m.gguf")
    check_architecture(header)
    config = text_config(header, tied="output.weight" not in header.tensors)
    found, wanted = meta_text_model(config, dtype=torch.float32), model.config.to_dict()
    ours = found.config.to_dict()
    if not wanted["num_kv_shared_layers"]:      # says nothing where no layer is shared
        wanted["use_double_wide_mlp"] = False
    assert {field: ours.get(field) for field in PLAIN} == {field: wanted.get(field) for field in PLAIN}
    assert {name: tensor.shape for name, tensor in weights_of(found).items()} == {
        name: tensor.shape for name, tensor in weights_of(model).items()}
    assert not ModelGeometry.from_config(config).differences(ModelGeometry.from_config(model.config))


def test_the_shapes_are_the_ones_that_hugging_faces_model_has():
    for overrides in ({}, DISTINCT, {"tie_word_embeddings": False}, {"use_double_wide_mlp": False}):
        model = meta_text_model(tiny_config(**overrides), dtype=torch.float32)
        shapes = shapes_of(ModelGeometry.from_config(model.config))
        assert shapes == {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()}


def test_one_number_may_stand_for_all_layers_and_an_array_for_one_number(header):
    plain = ModelGeometry.from_config(text_config(header))
    arrays = changed(header, attention__head_count_kv=[1] * 6)
    assert not plain.differences(ModelGeometry.from_config(text_config(arrays)))
    narrow = ModelGeometry.from_config(text_config(changed(header, feed_forward_length=[32] * 6)))
    assert {layer.mlp_width for layer in narrow.layers} == {32}
    assert not narrow.differences(ModelGeometry.from_config(text_config(changed(header, feed_forward_length=32))))


@pytest.mark.parametrize("value, wanted", [(1e-6, 1e-6), (3e-6, 3e-6), (1e6, 1e6), (30.0, 30.0), (0.1, 0.1),
                                           (16777217.0, 16777216.0)])
def test_a_32_bit_number_is_the_decimal_that_was_meant(value, wanted):
    assert shortest(torch.tensor(value).item()) == wanted


def test_placeholders_of_the_vocabulary_are_kept(header):
    tokens = {"tokenizer.ggml.tokens": ["a", "<|image|>", "b", "<|audio|>", "<|video|>"]}
    found = text_config(Header(header.path, header.metadata | tokens, header.tensors, 0))
    assert (found["image_token_id"], found["audio_token_id"], found["video_token_id"]) == (1, 3, 4)
    assert ModelGeometry.from_config(found).placeholder_ids == {1, 3, 4}


# ---- other models ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "gemma3n", "llama", "qwen3", "gemma4_assistant", "GEMMA4",
                                  "x" * 5000])
def test_other_architectures_are_refused_by_name(header, name):
    other = Header(header.path, header.metadata | {"general.architecture": name}, header.tensors, 0)
    assert f"architecture '{name[:60]}'" in refusal(other, UnsupportedModelError)


@pytest.mark.skipif(not REAL.is_file(), reason=f"needs llama.cpp's test vocabulary at {REAL}")
def test_the_real_mixture_of_experts_is_refused_by_name():
    assert "mixture-of-experts" in refusal(scan(REAL), UnsupportedModelError)


@pytest.mark.parametrize("heads", [1, [2, 1] * 3])
def test_dense_models_without_per_layer_embeddings_are_refused_by_name(tmp_path, heads):
    """Gemma-4's larger ones: no table, no gates, other numbers of K/V heads in full layers."""
    changes = {f"per_layer_{name}.weight": ABSENT for name in ("token_embd", "model_proj", "proj_norm")}
    changes |= {f"blk.{i}.{name}.weight": ABSENT for i in range(6) for name in ("inp_gate", "proj", "post_norm")}
    changes |= {"gemma4.embedding_length_per_layer_input": 0, "gemma4.attention.shared_kv_layers": 0,
                "gemma4.feed_forward_length": 32, "gemma4.attention.head_count_kv": heads}
    write_gguf(tmp_path / "m.gguf", tiny_model(), changes=changes)
    assert "without per-layer embeddings" in refusal(scan(tmp_path / "m.gguf"), UnsupportedModelError)


def test_a_vocabulary_an_adapter_and_a_part_are_no_models(header):
    assert "holds no tensors" in refusal(Header(header.path, header.metadata, {}, 0))
    for changes, named in ((
            {"general.type": "adapter"}, "'adapter', not a model"), ({"general.type": 3}, "not a model"),
            ({"split.count": 4}, "one of 4 files"), ({"general.architecture": ["gemma4"]}, "general.architecture")):
        assert named in refusal(Header(header.path, header.metadata | changes, header.tensors, 0))


@pytest.mark.parametrize("key, value", [
    ("rope__scaling__type", "yarn"), ("rope__scaling__factor", 8.0), ("attn_logit_softcapping", 50.0), ("attention__scale", 0.5),
    ("attention__causal", False), ("rope__scaling__type", ["none"])])
def test_what_changes_the_computation_is_refused_by_its_key(header, key, value):
    assert f"gemma4.{key.replace('__', '.')}" in refusal(changed(header, **{key: value}), UnsupportedModelError)


# ---- what is wrong ---------------------------------------------------------------------------------------------------

NUMBERS = ("block_count", "context_length", "embedding_length", "embedding_length_per_layer_input", "attention.head_count",
           "attention.key_length", "attention.value_length", "attention.key_length_swa", "attention.value_length_swa",
           "attention.sliding_window", "attention.shared_kv_layers", "attention.layer_norm_rms_epsilon", "rope.freq_base",
           "rope.freq_base_swa")
LAYERED = ("feed_forward_length", "attention.head_count_kv", "attention.sliding_window_pattern")


@pytest.mark.parametrize("key", [*NUMBERS, *LAYERED])
def test_each_key_must_be_there_and_of_its_kind(header, key):
    name = key.replace(".", "__")
    assert f"gemma4.{key}" in refusal(changed(header, **{name: ABSENT}))
    bad = ["8", -1, True, (1 << 40), float("nan"), None] if key not in LAYERED[2:] else ["8", 1, True, 6]
    bad += [[8, 8]] if key in NUMBERS else [[1] * 5, [1] * 7, ["a"] * 6, [-1] * 6, [], [None] * 6]
    if key.startswith("rope.freq") or key.endswith("epsilon"):
        bad.remove(1 << 40)
    for value in bad:
        assert f"gemma4.{key}" in refusal(changed(header, **{name: value})), value


@pytest.mark.parametrize("changes, named", [
    ({"block_count": 5}, "block_count .* is 5 and the file's tensors make up 6"),
    ({"block_count": 1 << 30}, "block_count"),
    ({"attention__shared_kv_layers": 6}, "leaves no layer"),
    ({"attention__value_length": 16}, "value_length .* is 16 and attention.key_length is 32"),
    ({"attention__value_length_swa": 32}, "value_length_swa"),
    ({"rope__dimension_count": 8}, "rope.dimension_count "),
    ({"rope__dimension_count_swa": 8}, "rope.dimension_count_swa"),
    ({"feed_forward_length": [32, 32, 32, 32, 64, 32]}, "feed_forward_length"),
    ({"feed_forward_length": [32, 64, 32, 64, 64, 64]}, "gives layer 1 64"),
    ({"feed_forward_length": [64, 64, 64, 64, 32, 32]}, "gives layer 4 32"),
    ({"feed_forward_length": [32, 32, 32, 32, 96, 96]}, "gives layer 4 96"),
    ({"attention__head_count_kv": [1, 1, 1, 1, 2, 2]}, "differs between layers"),
    ({"attention__sliding_window_pattern": [False] * 5 + [True]}, "last layer"),
    ({"expert_count": -1}, "expert_count"),
], ids=lambda value: str(value)[:50])
def test_keys_that_contradict_are_named(header, changes, named):
    assert re.search(named, refusal(changed(header, **changes)))


@pytest.mark.parametrize("table", ["token_embd.weight", "per_layer_token_embd.weight"])
def test_a_table_that_lacks_is_named(header, table):
    less = {name: info for name, info in header.tensors.items() if name != table}
    assert f"lacks {table}" in refusal(Header(header.path, header.metadata, less, 0))


def test_a_layer_without_tensors_is_no_layer(header):
    more = header.tensors | {"blk.999999.attn_q.weight": TensorInfo("blk.999999.attn_q.weight", "F32", (1, 1), 0, 4)}
    assert "make up 7 layers" in refusal(Header(header.path, header.metadata, more, 0))


# ---- rope_freqs ------------------------------------------------------------------------------------------------------

def test_rope_freqs_rotate_as_hugging_face_does_and_nothing_else_is_taken():
    for overrides in ({}, DISTINCT, {"global_head_dim": 512}):
        model = tiny_model(**overrides)
        size = metadata_of(model)["gemma4.attention.key_length"]
        values = divisors(model)
        check_rope_freqs(FILE, size, values.tolist())
        theta = model.config.to_dict()["rope_parameters"][FULL]["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2).float() / size) / values
        torch.testing.assert_close(frequencies, model.model.rotary_emb.full_attention_inv_freq, rtol=1e-6, atol=1e-12)


FILE = SimpleNamespace(path="m.gguf")


@pytest.mark.parametrize("values, named", [
    (None, "lacks rope_freqs.weight"), ([], "has 0 values"), ([1.0, 1.0, 1.0, 1.0], "has 4 values and full layers.* need 16"),
    ([1.0] * 16, "is not 1 for the first 4 pairs"), ([1.0] * 3 + [1e30] * 13, "is not 1"), ([1.0] * 5 + [1e30] * 11, "is not 1"),
    ([1.0] * 4 + [float("nan")] * 12, "is not 1"), ([2.0] * 4 + [1e30] * 12, "is not 1")], ids=lambda value: str(value)[:30])
def test_rope_freqs_that_lack_or_are_others_are_named(values, named):
    with pytest.raises(CheckpointError, match=named) as error:
        check_rope_freqs(FILE, 32, values)
    assert "\n" not in str(error.value)
