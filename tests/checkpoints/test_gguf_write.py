"""GGUF files written from a text model, read back by the gguf package and by this one."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from gemma4_flex.checkpoints import gguf_file, load_text_model
from gemma4_flex.checkpoints.bundled import bundled_tokenizer
from gemma4_flex.checkpoints.gguf_config import check_architecture, check_rope_freqs, text_config
from gemma4_flex.checkpoints.gguf_file import PLAIN, WRITABLE
from gemma4_flex.checkpoints.gguf_header import scan
from gemma4_flex.checkpoints.gguf_names import ROPE_FREQS, gguf_name, hf_name
from gemma4_flex.checkpoints.gguf_vocabulary import vocabulary_of
from gemma4_flex.checkpoints.gguf_write import write_gguf
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, weights_of
from gemma4_flex.geometry import FULL, SLIDING, ModelGeometry, UnsupportedModelError
from gemma4_flex.ggml_quantize import quantize
from gemma4_flex.lora.adapters import ALL_LINEAR, random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.gguf_adapter import merging
from tests.dense import dense_model
from tests.packings import packed_twins
from tests.tiny import fake_tokenizer, tiny_model

WIDE = {"hidden_size": 256, "intermediate_size": 256, "hidden_size_per_layer_input": 64}


def loaded(model=None, tokenizer=None, **overrides) -> LoadedModel:
    """A `tests.tiny` model as a loader gives it: rows of 256 and 64 values, but for o_proj and the shared layers' wide MLP."""
    model = model or tiny_model(3, **(WIDE | overrides))
    return LoadedModel(model=model, tokenizer=tokenizer, geometry=ModelGeometry.from_config(model.config), source="a test",
                       stop_ids=frozenset([1]))


def read(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """fp32, rows first."""
    return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())


def raw(tensor: gguf.ReaderTensor) -> torch.Tensor:
    return torch.from_numpy(tensor.data.copy()).view(torch.uint8)


# ---- tensors -------------------------------------------------------------------------------------------------------------

def test_an_f32_file_holds_every_weight_bit_for_bit_and_nothing_else(tmp_path):
    model = loaded()
    written = write_gguf(tmp_path / "m.gguf", model, type_name="F32")
    tensors, weights = read(tmp_path / "m.gguf"), weights_of(model.model)
    assert set(tensors) == {gguf_name(name) for name in weights} | {ROPE_FREQS}
    assert "output.weight" not in tensors and "blk.3.attn_k.weight" in tensors and "blk.4.attn_k.weight" not in tensors
    for name, weight in weights.items():
        assert torch.equal(values(tensors[gguf_name(name)]).view_as(weight), weight), name
    assert written.counts == {"F32": len(tensors)} and written.fallbacks == {}
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("type_name", [name for name in WRITABLE if name != "F32"])
def test_matrices_are_rounded_once_to_the_type_and_vectors_stay_f32(tmp_path, type_name):
    model = loaded()
    written = write_gguf(tmp_path / "m.gguf", model, type_name=type_name, ple_type=type_name)
    tensors = read(tmp_path / "m.gguf")
    for name, weight in weights_of(model.model).items():
        found = tensors[gguf_name(name)]
        wanted = "F32" if weight.ndim == 1 else written.fallbacks.get(name, type_name)
        assert found.tensor_type.name == wanted, name
        expected = weight.to(PLAIN[wanted]).view(torch.uint8) if wanted in PLAIN else quantize(weight, wanted)
        assert torch.equal(raw(found).flatten(), expected.flatten()), name
    assert sum(tensor.n_bytes for tensor in tensors.values()) == written.num_bytes


def test_rows_that_blocks_do_not_fill_get_a_larger_type_by_name(tmp_path):
    model = loaded(hidden_size_per_layer_input=40)
    q6 = write_gguf(tmp_path / "q6.gguf", model, type_name="Q6_K").fallbacks
    assert q6["model.layers.0.per_layer_projection.weight"] == "F16"            # rows of 40
    assert q6["model.layers.0.self_attn.o_proj.weight"] == "Q8_0"               # of 64
    assert "model.layers.0.self_attn.q_proj.weight" not in q6                   # of 256
    q4 = write_gguf(tmp_path / "q4.gguf", model, type_name="Q4_0").fallbacks
    assert set(q4) == {name for name in q6 if q6[name] == "F16"} and set(q4.values()) == {"F16"}


@pytest.mark.parametrize("type_name, ple_type, wanted", [
    ("Q4_0", None, "Q8_0"), ("Q6_K", None, "Q8_0"), ("Q8_0", None, "Q8_0"), ("F16", None, "F16"), ("Q4_0", "Q4_0", "Q4_0"),
    ("Q8_0", "Q5_1", "Q5_1")])
def test_the_per_layer_table_has_8_bits_or_more_unless_asked(tmp_path, type_name, ple_type, wanted):
    write_gguf(tmp_path / "m.gguf", loaded(), type_name=type_name, ple_type=ple_type)
    tensors = read(tmp_path / "m.gguf")
    assert tensors["per_layer_token_embd.weight"].tensor_type.name == wanted
    assert tensors["token_embd.weight"].tensor_type.name == type_name


def test_a_head_of_its_own_is_written(tmp_path):
    model = loaded(tie_word_embeddings=False)
    write_gguf(tmp_path / "m.gguf", model, type_name="F32")
    assert torch.equal(values(read(tmp_path / "m.gguf")["output.weight"]), model.model.lm_head.weight)


@pytest.mark.parametrize("type_name", ["F16", "Q8_0"])
def test_how_many_rows_are_turned_into_bytes_at_a_time_changes_none(tmp_path, type_name, monkeypatch):
    write_gguf(tmp_path / "whole.gguf", loaded(), type_name=type_name)
    monkeypatch.setattr(gguf_file, "SLICE", 600)
    write_gguf(tmp_path / "sliced.gguf", loaded(), type_name=type_name)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "sliced.gguf").read_bytes()


def test_packed_weights_are_written_as_what_they_stand_for(tmp_path):
    packed, dense = packed_twins(tiny_model(3))
    write_gguf(tmp_path / "packed.gguf", loaded(packed), type_name="BF16")
    write_gguf(tmp_path / "dense.gguf", loaded(dense), type_name="BF16")
    ours, theirs = read(tmp_path / "packed.gguf"), read(tmp_path / "dense.gguf")
    assert ours.keys() == theirs.keys() and all(torch.equal(raw(ours[name]), raw(theirs[name])) for name in theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_adapter_is_the_merged_model(tmp_path, dtype):
    model = loaded(tiny_model(3, dtype))
    adapter = random_adapter(model.model, ALL_LINEAR, rank=4, alpha=6, strength=0.3, seed=0)
    merged = DoubleCopy(model.model)
    merged.refresh(adapter)
    write_gguf(tmp_path / "m.gguf", model, type_name="F32" if dtype == torch.float32 else "BF16",
               changed=merging(adapter, model.model))
    tensors, changed = read(tmp_path / "m.gguf"), 0
    for name, weight in weights_of(merged.inference).items():
        assert torch.equal(values(tensors[gguf_name(name)]).view_as(weight), weight.float()), name
        changed += not torch.equal(weight, weights_of(model.model)[name])
    assert changed == len(adapter.pairs)


def test_a_merged_adapter_is_rounded_to_the_files_type_alone(tmp_path):
    """Not to the model's on the way there: the deltas are far below a bf16 step."""
    model = loaded(tiny_model(3, torch.bfloat16))
    adapter = random_adapter(model.model, ALL_LINEAR, rank=4, alpha=6, strength=1e-4, seed=0)
    write_gguf(tmp_path / "m.gguf", model, type_name="F32", changed=merging(adapter, model.model))
    path = "model.layers.0.mlp.up_proj"
    pair, base = adapter.pairs[path], model.model.get_submodule(path).weight
    found = values(read(tmp_path / "m.gguf")[gguf_name(f"{path}.weight")])
    assert torch.allclose(found, base.float() + pair.scaling * pair.up @ pair.down, rtol=0, atol=1e-7)
    assert not torch.equal(found, found.bfloat16().float())


# ---- metadata ------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "tiny": {},
    "all different": {"rms_norm_eps": 1e-5, "final_logit_softcapping": 25.0, "sliding_window": 7, "num_attention_heads": 6,
                      "num_key_value_heads": 2, "head_dim": 24, "global_head_dim": 40, "max_position_embeddings": 777},
    "nothing shared, no softcap": {"num_kv_shared_layers": 0, "final_logit_softcapping": None},
    "one width": {"use_double_wide_mlp": False},
    "frequencies": {"rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1234.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 54321.0}}},
    "five sliding to one full": {"num_hidden_layers": 12, "layer_types": ([SLIDING] * 5 + [FULL]) * 2, "num_kv_shared_layers": 6},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_who_reads_the_file_finds_the_model_that_was_written(tmp_path, config):
    model = loaded(tiny_model(0, **CONFIGS[config]))
    write_gguf(tmp_path / "m.gguf", model, type_name="BF16")
    header = scan(tmp_path / "m.gguf")
    check_architecture(header)
    assert model.geometry.differences(ModelGeometry.from_config(text_config(header))) == []
    check_rope_freqs(header, model.geometry.rope[FULL].head_dim, values(read(tmp_path / "m.gguf")[ROPE_FREQS]).tolist())
    assert header.metadata["general.file_type"] == gguf.LlamaFileType.MOSTLY_BF16


def test_one_mlp_width_is_a_number_and_two_are_an_array(tmp_path):
    for double, wanted in ((False, 32), (True, [32] * 4 + [64] * 2)):
        write_gguf(tmp_path / "m.gguf", loaded(tiny_model(0, use_double_wide_mlp=double)), type_name="F32", overwrite=True)
        assert scan(tmp_path / "m.gguf").metadata["gemma4.feed_forward_length"] == wanted


@pytest.mark.skipif(importlib.util.find_spec("gemma4_flex.checkpoints.gguf") is None, reason="the reader is not there yet")
@pytest.mark.parametrize("type_name", ["F32", "BF16", "Q8_0"])
def test_a_written_file_loads_as_the_model(tmp_path, type_name):
    path = tmp_path / "m.gguf"
    tiny = load_text_model("tiny", dtype=torch.float32, device="cpu")
    model = loaded(tiny_model(3, **(WIDE | {"vocab_size": 768, "vocab_size_per_layer_input": 768})), tiny.tokenizer)
    write_gguf(path, model, type_name=type_name)
    found = load_text_model(str(path), dtype=torch.float32, device="cpu", gguf_weights="dequantize")
    tensors = read(path)
    for name, weight in weights_of(found.model).items():
        assert torch.equal(weight, values(tensors[gguf_name(name)]).view_as(weight)), name
    assert found.stop_ids == tiny.stop_ids and found.tokenizer.chat_template == tiny.tokenizer.chat_template
    for text in ("a\n\n\nb", " leading", "<|turn>user\nhi<turn|>", "\u00e9 e\u0301 \U0001f600"):
        ids = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found.tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert found.tokenizer(text)["input_ids"] == [2, *ids]


# ---- refusals ------------------------------------------------------------------------------------------------------------

def test_models_that_such_a_file_cannot_hold_are_refused_by_name(tmp_path):
    def refused(model, why):
        with pytest.raises(UnsupportedModelError, match=why):
            write_gguf(tmp_path / "m.gguf", loaded(model), type_name="F32")

    refused(dense_model("qwen3"), "a qwen3 model cannot be written")
    refused(tiny_model(0, num_kv_shared_layers=3, layer_types=[SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]),
            "layer 3 reads the K/V of layer 2, and llama.cpp would read layer 1's")
    refused(tiny_model(0, vocab_size_per_layer_input=80), "80 rows of per-layer embeddings for 64 tokens")
    refused(tiny_model(0, num_kv_shared_layers=0, layer_types=[FULL] * 6), "full_attention layers alone")
    rope = {SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6}}
    refused(tiny_model(0, rope_parameters=rope), "rotates 0.5 of a full layer's head")
    assert not list(tmp_path.iterdir())


def test_types_that_are_not_written_are_refused_by_name(tmp_path):
    for types in ({"type_name": "Q4_K"}, {"type_name": "F32", "ple_type": "Q4_K"}):
        with pytest.raises(CheckpointError, match="'Q4_K' cannot be written: name one of F32, F16, BF16, Q8_0"):
            write_gguf(tmp_path / "m.gguf", loaded(), **types)


def test_a_file_in_the_way_is_refused_and_overwritten_only_when_asked(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="m.gguf exists: .*--overwrite"):
        write_gguf(path, loaded(), type_name="F32")
    assert path.read_text() == "mine"
    write_gguf(path, loaded(), type_name="F32", overwrite=True)
    assert read(path)
    with pytest.raises(CheckpointError, match="is a directory"):
        write_gguf(tmp_path, loaded(), type_name="F32", overwrite=True)


@pytest.mark.parametrize("type_name, bad, why", [
    ("F16", 7e4, "not finite, or too large for F16"), ("F32", float("nan"), "not finite"),
    ("Q8_0", float("inf"), "not finite, or too large for the 16-bit scales of Q8_0")])
def test_values_that_do_not_fit_are_named_and_leave_nothing_behind(tmp_path, type_name, bad, why):
    model = loaded()
    model.model.model.layers[5].mlp.down_proj.weight.data[1, 2] = bad
    (tmp_path / "m.gguf").write_text("mine")
    with pytest.raises(CheckpointError, match=rf"blk\.5\.ffn_down\.weight cannot be written as {type_name}: .*{why}"):
        write_gguf(tmp_path / "m.gguf", model, type_name=type_name, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"] and (tmp_path / "m.gguf").read_text() == "mine"


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(tensor):
        if tensor.name == "blk.2.attn_q.weight":
            raise KeyboardInterrupt
        yield from pieces(tensor)

    pieces = gguf_file._pieces
    monkeypatch.setattr(gguf_file, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_gguf(tmp_path / "m.gguf", loaded(), type_name="F32")
    assert not list(tmp_path.iterdir())


# ---- tokenizer -----------------------------------------------------------------------------------------------------------

def test_a_vocabulary_has_the_tokens_kinds_merges_ids_and_template_of_the_tokenizer(tmp_path):
    tokenizer = bundled_tokenizer(768)
    path = tmp_path / "m.gguf"
    write_gguf(path, loaded(tiny_model(0, vocab_size=800, vocab_size_per_layer_input=800), tokenizer), type_name="F32")
    found = {key.removeprefix("tokenizer.ggml."): value for key, value in scan(path).metadata.items() if "tokenizer" in key}
    tokens, kinds = found["tokens"], found["token_type"]
    assert found["model"] == "gemma4" and len(tokens) == len(kinds) == len(found["scores"]) == 800
    assert tokens[:len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert set(tokens[len(tokenizer):]) == {f"[PAD{n}]" for n in range(len(tokenizer), 800)}
    assert set(kinds[len(tokenizer):]) == {5}
    kind = dict(zip(tokens, kinds))
    assert [kind[t] for t in ("<bos>", "<|turn>", "<|channel>", '<|"|>', "<0x0A>", "The")] == [3, 3, 4, 4, 6, 1]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert [tuple(merge.split(" ")) for merge in found["merges"]] == [tuple(merge) for merge in merges]
    for key, token in (("bos", "<bos>"), ("eos", "<eos>"), ("unknown", "<unk>"), ("padding", "<pad>"), ("mask", "<mask>"),
                       ("eot", "<turn|>"), ("eom", "<|tool_response>")):
        assert found[f"{key}_token_id"] == tokens.index(token), key
    assert (found["add_bos_token"], found["add_space_prefix"]) == (True, False)
    assert found["tokenizer.chat_template"] == tokenizer.chat_template


def test_a_model_without_a_tokenizer_says_that_it_has_none(tmp_path):
    write_gguf(tmp_path / "m.gguf", loaded(), type_name="F32")
    found = scan(tmp_path / "m.gguf").metadata
    assert {key: value for key, value in found.items() if "tokenizer" in key} == {"tokenizer.ggml.model": "none"}
    assert found["gemma4.vocab_size"] == 64


def changed_tokenizer(change) -> PreTrainedTokenizerFast:
    spec = json.loads(bundled_tokenizer(768).backend_tokenizer.to_str())
    change(spec)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(spec)))


def test_tokenizers_that_such_a_file_cannot_say_are_refused_by_name():
    def refused(tokenizer, why, size=768):
        with pytest.raises(CheckpointError, match=why):
            vocabulary_of(tokenizer, size)

    refused(fake_tokenizer(), "the tokenizer has type 'WordLevel'")
    refused(changed_tokenizer(lambda spec: spec["model"].update(byte_fallback=False)), "the tokenizer has byte_fallback False")
    refused(changed_tokenizer(lambda spec: spec.update(normalizer=None)), "the tokenizer's normalizer is None")
    refused(changed_tokenizer(lambda spec: spec["normalizer"].update(content="_")), "the tokenizer's normalizer is Replace")
    refused(bundled_tokenizer(768), "ids up to .* and the model's table 100 rows", size=100)
    refused(object(), "an? object cannot be written .* needs a tokenizer.json")


def test_what_is_written_was_not_changed_by_it(tmp_path):
    model = loaded()
    before = copy.deepcopy(model.model.state_dict())
    write_gguf(tmp_path / "m.gguf", model, type_name="Q4_0")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.model.state_dict().items())
    assert {hf_name(name) for name in read(tmp_path / "m.gguf")} == {*weights_of(model.model), None}
