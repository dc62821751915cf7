"""GGUF files to text models: the weights and logits that the gguf package and Hugging Face give, and what is refused."""

from __future__ import annotations

import copy
import gc
import re
import struct
from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex.checkpoints import gguf as loader, load_text_model, skeleton
from gemma4_flex.checkpoints.gguf import load_gguf
from gemma4_flex.checkpoints.gguf_header import scan
from gemma4_flex.checkpoints.skeleton import CheckpointError, weights_of
from gemma4_flex.geometry import ModelGeometry, UnsupportedModelError
from gemma4_flex.ggml_blocks import TYPES as PACKED
from gemma4_flex.models.packed_modules import is_packed
from gemma4_flex.models.projections import PLE_TABLE
from gemma4_flex.params import SamplingParams
from tests.checkpoints.test_gguf_config import DISTINCT
from tests.engines import hf_generate, hf_logits, make_engine, some_prompts
from tests.ggufs import ABSENT, TYPES, bundled_vocabulary, gguf_name, wide_model, write_gguf
from tests.tiny import tiny_model

PROMPT = some_prompts(19)[0]
CPU = {"dtype": torch.float32, "device": "cpu"}


@torch.no_grad()
def dequantised(model, values):
    """`model` with the file's values: what Hugging Face makes of them."""
    found = copy.deepcopy(model)
    for name, weight in weights_of(found).items():
        weight.copy_(values[gguf_name(name)].view_as(weight))
    return found


def held(model) -> dict[str, torch.Tensor]:
    """The model's weights by name, those that are packed unpacked."""
    packed = {f"{path}.weight": m.packed.dense() for path, m in model.named_modules() if is_packed(m) and path != "lm_head"}
    return packed | weights_of(model)


def refusal(path: Path, error=CheckpointError, **options) -> str:
    with pytest.raises(error) as caught:
        load_gguf(path, **(CPU | options))
    message = str(caught.value)
    assert type(caught.value) is error and "\n" not in message and len(message) < 400
    return message


# ---- right -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("weights", ["packed", "dequantize"])
@pytest.mark.parametrize("type_name", TYPES)
def test_every_type_has_the_packages_values_and_hugging_faces_logits(tmp_path, type_name, weights):
    model = wide_model(1)
    wanted = dequantised(model, write_gguf(tmp_path / "m.gguf", model, type_name))
    found = load_gguf(tmp_path / "m.gguf", **CPU, weights=weights)
    is_kept = weights == "packed" and type_name in PACKED
    for path, module in found.model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)) or is_packed(module):
            assert is_packed(module) is is_kept and (not is_kept or module.packed.packing.name == type_name), path
    ours, theirs = held(found.model), weights_of(wanted)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    logits = hf_logits(wanted, PROMPT)
    torch.testing.assert_close(hf_logits(found.model, PROMPT), logits, atol=1e-4, rtol=0)
    assert logits.std() > 0.3 and not found.model.training
    assert not any(parameter.requires_grad for parameter in found.model.parameters())


@pytest.mark.parametrize("type_name, weights", [("F16", "packed"), ("Q8_0", "packed"), ("Q6_K", "packed"),
                                                ("Q4_0", "dequantize")])
def test_the_engine_gives_hugging_faces_tokens_on_the_dequantised_weights(tmp_path, type_name, weights):
    model = wide_model(2)
    wanted = dequantised(model, write_gguf(tmp_path / "m.gguf", model, type_name))
    engine = make_engine(load_gguf(tmp_path / "m.gguf", **CPU, weights=weights).model)
    prompts = some_prompts(5, 19, 30)
    for prompt, done in zip(prompts, engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True))):
        assert done.token_ids == hf_generate(wanted, prompt, 12)


def test_values_are_rounded_once_to_bf16(tmp_path):
    model = wide_model(1)
    values = write_gguf(tmp_path / "m.gguf", model, "Q5_1")
    for weights in ("packed", "dequantize"):
        found = held(load_gguf(tmp_path / "m.gguf", dtype=torch.bfloat16, device="cpu", weights=weights).model)
        for name, weight in found.items():
            assert torch.equal(weight, values[gguf_name(name)].bfloat16().view_as(weight)), name


def test_files_of_many_types_are_read(tmp_path):
    model = wide_model(3)
    types = dict(zip((gguf_name(name) for name, weight in weights_of(model).items() if weight.ndim == 2), TYPES * 4))
    values = write_gguf(tmp_path / "m.gguf", model, types=types, alignment=64)
    found = load_gguf(tmp_path / "m.gguf", **CPU)
    wanted = dequantised(model, values)
    assert {m.packed.packing.name for m in found.model.modules() if is_packed(m)} == set(PACKED)
    torch.testing.assert_close(hf_logits(found.model, PROMPT), hf_logits(wanted, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("overrides", [
    DISTINCT, {}, {"use_double_wide_mlp": False}, {"num_kv_shared_layers": 0}, {"final_logit_softcapping": 5.0},
    {"num_key_value_heads": 2, "sliding_window": 7},
], ids=["distinct", "tiny", "one width", "nothing shared", "softcap", "kv heads"])
def test_models_of_other_sizes_have_hugging_faces_logits(tmp_path, overrides):
    model = tiny_model(**overrides)
    write_gguf(tmp_path / "m.gguf", model)
    found = load_gguf(tmp_path / "m.gguf", **CPU)
    torch.testing.assert_close(hf_logits(found.model, PROMPT), hf_logits(model, PROMPT), atol=1e-4, rtol=0)
    assert not found.geometry.differences(ModelGeometry.from_config(model.config))
    assert found.skipped == {} and found.source == str(tmp_path / "m.gguf") and found.tokenizer is None


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_the_token_table_or_its_own(tmp_path, type_name, tied):
    model = wide_model(4, tie_word_embeddings=tied)
    wanted = dequantised(model, write_gguf(tmp_path / "m.gguf", model, type_name))
    found = load_gguf(tmp_path / "m.gguf", **CPU)
    head, table = found.model.lm_head, found.model.model.embed_tokens
    same = (head.packed.parts[0] is table.packed.parts[0]) if type_name in PACKED else (head.weight is table.weight)
    assert same is tied and found.geometry.tied_head is tied
    torch.testing.assert_close(hf_logits(found.model, PROMPT), hf_logits(wanted, PROMPT), atol=1e-4, rtol=0)


def test_norms_are_taken_as_they_are(tmp_path):
    """B63: nothing is added to them."""
    model = tiny_model()
    with torch.no_grad():
        for weight in weights_of(model).values():
            if weight.ndim == 1:
                weight.copy_(torch.tensor([0.5, 1.0, 2.0]).repeat(100)[:len(weight)])
    write_gguf(tmp_path / "m.gguf", model)
    found = weights_of(load_gguf(tmp_path / "m.gguf", **CPU).model)
    for name, weight in weights_of(model).items():
        assert torch.equal(found[name], weight), name


def test_rotary_frequencies_and_embedding_scales_are_hugging_faces(tmp_path):
    model = wide_model()
    write_gguf(tmp_path / "m.gguf", model, "Q8_0")
    found = load_gguf(tmp_path / "m.gguf", **CPU).model
    ours, theirs = dict(found.named_buffers()), dict(model.named_buffers())
    assert any("full_attention_inv_freq" in name for name in theirs)
    for name, wanted in theirs.items():
        assert torch.equal(ours[name], wanted), name


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_keys_and_values_of_shared_layers_may_be_there_or_not(tmp_path, type_name):
    """B56. What they hold is random: nothing may depend on it."""
    model = wide_model(5)
    more = {f"blk.{layer}.{name}.weight": torch.randn(size) for layer, head_dim in ((2, 64), (3, 128)) for name, size in (
        ("attn_k", (head_dim, 256)), ("attn_v", (head_dim, 256)), ("attn_k_norm", (head_dim,)))}
    values = write_gguf(tmp_path / "m.gguf", model, type_name)
    write_gguf(tmp_path / "more.gguf", model, type_name, changes=more)
    plain, found = load_gguf(tmp_path / "m.gguf", **CPU), load_gguf(tmp_path / "more.gguf", **CPU)
    assert (plain.skipped, found.skipped) == ({}, {"shared_kv": 6})
    assert torch.equal(hf_logits(found.model, PROMPT), hf_logits(plain.model, PROMPT))
    torch.testing.assert_close(hf_logits(plain.model, PROMPT), hf_logits(dequantised(model, values), PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("weights", ["packed", "dequantize"])
@pytest.mark.parametrize("ple", ["device", "host"])
def test_the_table_of_per_layer_embeddings_alone_goes_to_host_memory(tmp_path, monkeypatch, type_name, weights, ple):
    write_gguf(tmp_path / "m.gguf", wide_model(), type_name)
    places, real = {}, skeleton.place_of

    def on_a_gpu(path, device, ple):
        places.setdefault(path, set()).add(real(path, "cuda", ple)["device"])
        return {"device": "cpu"}
    monkeypatch.setattr(skeleton, "place_of", on_a_gpu)
    found = load_gguf(tmp_path / "m.gguf", **CPU, weights=weights, ple=ple).model
    assert {name.removesuffix(".weight") for name in weights_of(wide_model()) if not name.endswith("layer_scalar")} == set(places)
    assert {path for path, where in places.items() if where != {"cuda"}} == ({PLE_TABLE} if ple == "host" else set())
    assert places[PLE_TABLE] == ({"cpu"} if ple == "host" else {"cuda"})
    assert is_packed(found.get_submodule(PLE_TABLE)) is (weights == "packed" and type_name == "Q8_0")


def test_the_tokenizer_and_all_three_stops_come_with_it(tmp_path):
    """B64: the file names one stop and says that no BOS is put before a text."""
    vocabulary = bundled_vocabulary() | {"tokenizer.ggml.add_bos_token": False}
    tokens = vocabulary["tokenizer.ggml.tokens"]
    size = {"vocab_size": len(tokens), "vocab_size_per_layer_input": len(tokens)}
    write_gguf(tmp_path / "m.gguf", tiny_model(**size), tokenizer=vocabulary)
    found = load_text_model(str(tmp_path / "m.gguf"), **CPU)
    stops = {tokens.index(stop) for stop in ("<eos>", "<turn|>", "<|tool_response>")}
    assert found.stop_ids == stops == set(found.model.generation_config.eos_token_id)
    bos = tokens.index("<bos>")
    assert found.tokenizer("a")["input_ids"][0] == found.tokenizer.bos_token_id == bos == found.model.config.bos_token_id
    assert found.tokenizer.chat_template == vocabulary["tokenizer.chat_template"]


# ---- wrong -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def nothing_is_made(monkeypatch):
    """A model, even an empty one, or a look at the tensors' bytes, is an error."""
    def made(*args, **kwargs):
        raise AssertionError("something was made")
    for name in ("meta_text_model", "materialize", "place", "put_packed"):
        monkeypatch.setattr(loader, name, made)


@pytest.mark.parametrize("kind", ["IQ4_NL", "TQ2_0", "Q3_K", "Q2_K", "Q8_K", "I8", "F64", "MXFP4", "Q8_1"])
def test_a_type_that_is_not_read_is_named_before_anything_is_made(tmp_path, nothing_is_made, kind):
    """B66."""
    write_gguf(tmp_path / "m.gguf", wide_model(), "Q8_0", types={"blk.1.ffn_up.weight": kind})
    for weights in ("packed", "dequantize"):
        message = refusal(tmp_path / "m.gguf", UnsupportedModelError, weights=weights)
        assert f"blk.1.ffn_up.weight in {tmp_path / 'm.gguf'} is of the type {kind}," in message and "Q6_K" in message


@pytest.mark.parametrize("changes, error, named", [
    ({"blk.0.layer_output_scale.weight": ABSENT}, CheckpointError, "lacks blk.0.layer_output_scale.weight"),
    ({"blk.3.post_norm.weight": ABSENT, "blk.1.proj.weight": ABSENT}, CheckpointError, "blk.1.proj.*blk.3.post_norm"),
    ({"blk.0.attn_k.weight": ABSENT}, CheckpointError, "lacks blk.0.attn_k.weight"),
    ({"per_layer_token_embd.weight": ABSENT}, CheckpointError, "lacks per_layer_token_embd.weight"),
    ({"token_embd.weight": ABSENT}, CheckpointError, "lacks token_embd.weight"),
    ({"rope_freqs.weight": ABSENT}, CheckpointError, "lacks rope_freqs.weight"),
    ({"rope_freqs.weight": torch.ones(4)}, CheckpointError, "rope_freqs.weight .* has 4 values"),
    ({"rope_freqs.weight": torch.ones(16)}, CheckpointError, "rope_freqs.weight .* is not 1"),
    ({"rope_freqs.weight": torch.ones(4, 4)}, CheckpointError, "rope_freqs.weight"),
    ({"blk.0.attn_q_bias.weight": torch.zeros(4)}, CheckpointError, "holds blk.0.attn_q_bias.weight"),
    ({"blk.0.attn_q.bias": torch.zeros(4)}, CheckpointError, "holds blk.0.attn_q.bias"),
    ({"v.patch_embd.weight": torch.zeros(4)}, CheckpointError, "holds v.patch_embd.weight"),
    ({"blk.1.attn_q.weight": torch.zeros(32, 48)}, CheckpointError, r"blk.1.attn_q.weight .* \[32, 48\] .* \[128, 48\]"),
    ({"blk.1.ffn_up.weight": torch.zeros(48, 32)}, CheckpointError, r"\[48, 32\] .* \[32, 48\]"),
    ({"output_norm.weight": torch.zeros(47)}, CheckpointError, r"output_norm.weight .* \[47\]"),
    ({"output_norm.weight": torch.zeros(1, 48)}, CheckpointError, r"output_norm.weight .* \[1, 48\]"),
    ({"blk.2.layer_output_scale.weight": torch.ones(2)}, CheckpointError, "blk.2.layer_output_scale.weight"),
    ({"output.weight": torch.zeros(63, 48)}, CheckpointError, "output.weight"),
    ({"gemma4.embedding_length": 1 << 30}, CheckpointError, "metadata make it"),
    ({"gemma4.embedding_length_per_layer_input": 1 << 30}, CheckpointError, "metadata make it"),
    ({"gemma4.feed_forward_length": 1 << 30}, CheckpointError, "metadata make it"),
    ({"gemma4.attention.head_count": 1 << 30}, CheckpointError, "metadata make it"),
    ({"gemma4.embedding_length_per_layer_input": 0}, UnsupportedModelError, "without per-layer embeddings"),
    ({"gemma4.attention.head_count": 3, "gemma4.attention.head_count_kv": 2}, UnsupportedModelError, "num_key_value_heads"),
    ({"general.architecture": "gemma3"}, UnsupportedModelError, "architecture 'gemma3'"),
    ({"gemma4.expert_count": 8}, UnsupportedModelError, "expert_count"),
    ({"tokenizer.ggml.model": "llama"}, CheckpointError, "kind 'llama'"),
    ({"gemma4.block_count": 1 << 30}, CheckpointError, "block_count"),
], ids=lambda value: str(value)[:60])
def test_files_that_do_not_make_up_a_model_are_named_before_anything_is_made(tmp_path, nothing_is_made, changes, error, named):
    write_gguf(tmp_path / "m.gguf", tiny_model(), changes=changes)
    for weights in ("packed", "dequantize"):
        message = refusal(tmp_path / "m.gguf", error, weights=weights)
        assert re.search(named, message), message


def test_a_file_is_cut_short_and_a_path_leads_nowhere(tmp_path, nothing_is_made):
    write_gguf(tmp_path / "m.gguf", tiny_model())
    whole = (tmp_path / "m.gguf").read_bytes()
    for length in (0, 10, 500, len(whole) // 2, len(whole) - 200):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        assert "m.gguf" in refusal(tmp_path / "m.gguf")
    assert "cannot be read" in refusal(tmp_path / "n.gguf")


# ---- memory ----------------------------------------------------------------------------------------------------------

def peak_bytes(call) -> tuple[int, int]:
    """What torch's own allocator held at most during `call`, and at its end, beyond what it held before."""
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = call()
    events = sorted((e for e in profile.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    assert kept is not None and events
    return peak, now


@pytest.mark.parametrize("type_name, weights", [("Q8_0", "dequantize"), ("Q5_K", "dequantize"), ("F32", "dequantize"),
                                                ("Q4_0", "packed")])
def test_loading_takes_no_more_than_twice_the_largest_tensor_besides(tmp_path, type_name, weights):
    """B67, with a table as large beside a slice as a real one is. Packed, the largest is counted packed."""
    model = wide_model(vocab_size=9000, vocab_size_per_layer_input=9000)
    types = dict.fromkeys(("per_layer_token_embd.weight", "blk.0.proj.weight"), type_name)
    write_gguf(tmp_path / "m.gguf", model, "BF16", types=types)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]] if weights == "packed" else (1, 2)
    largest, token_table = 9000 * 1024 // values * size, 9000 * 256 * 2
    peak, final = peak_bytes(lambda: load_gguf(tmp_path / "m.gguf", dtype=torch.bfloat16, device="cpu", weights=weights))
    assert final >= largest + token_table
    assert peak <= final + 2 * max(largest, token_table), (peak - final) / largest


@pytest.mark.parametrize("weights", ["packed", "dequantize"])
def test_how_many_values_are_decoded_at_a_time_changes_none(tmp_path, weights, monkeypatch):
    model = wide_model()
    types = dict(zip((gguf_name(name) for name, weight in weights_of(model).items() if weight.ndim == 2), TYPES * 4))
    write_gguf(tmp_path / "m.gguf", model, types=types)
    whole = held(load_gguf(tmp_path / "m.gguf", **CPU, weights=weights).model)
    for size in (3000, 50_000):
        monkeypatch.setattr(loader, "SLICE", size)
        found = held(load_gguf(tmp_path / "m.gguf", **CPU, weights=weights).model)
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_are_decoded_where_they_go(tmp_path, type_name):
    """On a device that holds nothing: what reaches it has been decoded from what the file holds."""
    values = write_gguf(tmp_path / "m.gguf", wide_model(), type_name)
    header, seen = scan(tmp_path / "m.gguf"), []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.overloadpacket.__name__, {a.device.type for a in args if isinstance(a, torch.Tensor)}))
            return func(*args, **(kwargs or {}))
    info = header.tensors["blk.0.ffn_up.weight"]
    with Recorded():
        found = list(loader._File(header).values(info, torch.device("meta")))
    assert {rows.device.type for rows in found} == {"meta"}
    assert sum(len(rows) for rows in found) == len(values[info.name])
    assert not {"mul", "sub", "add", "bitwise_and", "__rshift__"} & {name for name, where in seen if "cpu" in where}


# ---- any file at all -------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    vocabulary = bundled_vocabulary()
    tokens = len(vocabulary["tokenizer.ggml.tokens"])
    size = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
            "vocab_size": tokens, "vocab_size_per_layer_input": tokens}
    write_gguf(path, tiny_model(hidden_size=32, **size), "Q8_0", tokenizer=vocabulary, types=dict.fromkeys(
        ("blk.0.proj.weight", "blk.1.proj.weight", "per_layer_token_embd.weight"), "F16"))
    return path.read_bytes()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_one_sentence_or_a_model(tmp_path, whole, data):
    path = tmp_path / "m.gguf"
    content = bytearray(whole)
    marks = marks_of(scan_of(path, whole), whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.sampled_from(marks)) + data.draw(st.integers(0, 24))
        kind = data.draw(st.sampled_from(["flip", "number", "cut", "drop", "other"]))
        if kind == "flip" and at < len(content):
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "number":
            content[at:at + 4] = struct.pack("<I", data.draw(st.sampled_from([0, 1, 2, 3, 9, 30, 1 << 20, (1 << 32) - 1])))
        elif kind == "cut":
            del content[data.draw(st.integers(0, len(content))):]
        elif kind == "drop":
            del content[at:at + data.draw(st.integers(1, 16))]
        elif kind == "other":
            content[at:at + 24] = content[(other := data.draw(st.sampled_from(marks))):other + 24]
    path.write_bytes(content)
    try:
        found = load_gguf(path, **CPU, weights=data.draw(st.sampled_from(["packed", "dequantize"])))
    except (CheckpointError, UnsupportedModelError) as error:
        assert str(error).isprintable() and len(str(error)) < 600
    else:
        assert hf_logits(found.model, PROMPT).shape == (len(PROMPT), found.geometry.vocab_size)


def marks_of(header, content: bytes) -> list[int]:
    """Where a key's or a tensor's name begins and where it ends: what follows says its kind and size."""
    found = [0]
    for name in (*header.metadata, *header.tensors):
        at = content.index(struct.pack("<Q", len(name)) + name.encode())
        found += [at, at + 8 + len(name)]
    return found


def scan_of(path: Path, content: bytes):
    path.write_bytes(content)
    return scan(path)
