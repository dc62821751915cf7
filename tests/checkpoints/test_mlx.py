"""What mlx_lm writes is loaded with its bits kept and computes what Hugging Face does on MLX's own values, or is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from gemma4_flex.checkpoints import CheckpointError, load_text_model, mlx
from gemma4_flex.checkpoints.mlx import canonical, is_mlx
from gemma4_flex.checkpoints.skeleton import place
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.models.packed_modules import is_packed
from gemma4_flex.models.projections import PLE_TABLE
from tests.checkpoints.mlx_rig import (
    PROMPT,
    convert,
    dequantized_model,
    mlx_logits,
    renamed,
    save_hf,
    wide_config,
    wide_model,
)
from tests.engines import hf_generate, hf_logits, make_engine, tokens_of
from tests.mlx_arrays import FORMATS

LINEARS = 4 * 9 + 2 * 7 + 1      # four layers with k and v, two without, and the projection of the prelude
HOW = {"model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 8}, "model.layers.1.mlp.gate_proj": False,
       "model.embed_tokens_per_layer": {"group_size": 64, "bits": 6}}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mlx")
    save_hf(wide_model(), path / "float32")
    save_hf(wide_model(dtype=torch.bfloat16), path / "bfloat16")
    convert(path / "float32", path / "plain", 64, 4)
    convert(path / "float32", path / "mixed", 64, 4, how=lambda name: HOW.get(name, True))
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, ple: str = "device"):
    loaded = load_text_model(str(path), dtype=dtype, device="cpu", ple=ple)
    loaded.model.config._attn_implementation = "eager"      # the arithmetic of the models it is compared with
    return loaded


def edited(room: Path, tmp_path: Path, change=lambda tensors: None, config=lambda fields: None, source: str = "mixed") -> Path:
    """A copy of a checkpoint whose tensors and config are changed in place."""
    path = tmp_path / "edited"
    shutil.copytree(room / source, path, ignore=shutil.ignore_patterns("*.index.json"))
    tensors, fields = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    change(tensors)
    config(fields)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("mode, bits, group", [kind for kind in FORMATS if kind[2] <= 64])
def test_logits_of_every_format_are_hugging_faces_on_what_mlx_dequantises_and_mlx_lms_own(room, tmp_path, mode, bits, group):
    path = convert(room / "float32", tmp_path / "made", group, bits, mode)
    loaded, dense = load(path), dequantized_model(path)
    assert torch.equal(hf_logits(loaded.model, PROMPT), hf_logits(dense, PROMPT))
    tolerance = 1e-3 if mode == "affine" else 0.3       # out of tables in the other modes mlx_lm gives bf16
    assert (hf_logits(loaded.model, PROMPT) - mlx_logits(path)).abs().max() < tolerance
    assert sum(is_packed(module) for module in loaded.model.modules()) == LINEARS + 2 + 1      # two tables and the tied head
    assert loaded.skipped == {} and not any(t.is_meta for t in (*loaded.model.parameters(), *loaded.model.buffers()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bf16_checkpoint_has_mlxs_values_to_the_bit_in_either_dtype(room, tmp_path, dtype):
    path = convert(room / "bfloat16", tmp_path / "made", 32, 4)
    assert torch.equal(hf_logits(load(path, dtype).model, PROMPT), hf_logits(dequantized_model(path, dtype), PROMPT))


def test_the_engine_generates_what_hugging_face_does_on_the_dequantised_weights(room):
    loaded, dense = load(room / "mixed"), dequantized_model(room / "mixed")
    engine = make_engine(loaded.model, capture_cudagraph=True, max_batch_size=2)
    logits = engine.trace(PROMPT[:6], PROMPT[6:]).logits
    assert (logits - hf_logits(dense, PROMPT)[5:]).abs().max() < 1e-4
    assert tokens_of(engine, [PROMPT[:5], PROMPT], 10) == [hf_generate(dense, p, 10) for p in (PROMPT[:5], PROMPT)]


def test_overrides_are_read_under_every_prefix_and_decide_what_is_packed(room, tmp_path):
    wanted = hf_logits(dequantized_model(room / "mixed"), PROMPT)
    prefixes = {"a": "language_model.model.", "b": "model.language_model.", "c": "model."}
    for name, prefix in prefixes.items():
        for keys, other in prefixes.items():
            path = renamed(room / "mixed", tmp_path / (name + keys), lambda key: prefix + key.removeprefix("model."),
                           keys=lambda key: other + key.removeprefix("model."))
            model = load(path).model
            assert torch.equal(hf_logits(model, PROMPT), wanted)
            first = model.model.layers[0]
            assert first.self_attn.q_proj.packing.bits == 8 and first.self_attn.q_proj.packing.group_size == 32
            assert first.self_attn.k_proj.packing.bits == 4 and model.model.embed_tokens_per_layer.packing.bits == 6
            assert not is_packed(model.model.layers[1].mlp.gate_proj) and is_packed(model.lm_head)


def test_a_module_without_an_entry_is_as_its_tensors_say_and_false_or_null_in_the_block_are_taken(room, tmp_path):
    def sparse(fields):
        for block in (fields["quantization"], fields["quantization_config"]):
            del block["model.embed_tokens_per_layer"]
            block["model.layers.1.mlp.gate_proj"] = False
            block["model.layers.2.mlp.gate_proj"] = {"group_size": None, "bits": 4}
            block["model.layers.2.mlp.up_proj"] = True
    path = edited(room, tmp_path, config=sparse)
    assert torch.equal(hf_logits(load(path).model, PROMPT), hf_logits(load(room / "mixed").model, PROMPT))


def test_old_files_shared_k_and_v_and_a_multimodal_files_towers_are_counted_and_not_read(room, tmp_path):
    wrong = {f"language_model.model.layers.{layer}.self_attn.{name}": value for layer in (4, 5) for name, value in (
        ("k_proj.weight", torch.full((3, 3), 2, dtype=torch.uint32)), ("k_proj.scales", torch.full((3, 3), float("nan"))),
        ("k_proj.biases", torch.full((3, 3), float("nan"))), ("k_norm.weight", torch.full((5,), float("nan"))))}
    towers = {f"{tower}.block.{part}": torch.ones(2, 2) for part in ("weight", "scales")
              for tower in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")}
    path = renamed(room / "mixed", tmp_path / "old", lambda key: "language_model." + key, **wrong, **towers)
    config = json.loads((path / "config.json").read_text())
    block = config.pop("quantization")
    block |= {"language_model.model.layers.4.self_attn.k_proj": {"bits": 8}, "vision_tower.block": False}
    (path / "config.json").write_text(json.dumps({
        "model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 7],
        "quantization": block,
        "text_config": {k: v for k, v in config.items() if k not in ("quantization_config", "architectures")}}))
    loaded = load(path)
    assert torch.equal(hf_logits(loaded.model, PROMPT), hf_logits(dequantized_model(room / "mixed"), PROMPT))
    assert loaded.skipped == {"shared_kv": 8, "towers": 8}
    assert loaded.stop_ids == {1, 7}


def test_every_part_goes_where_its_module_belongs_the_table_of_per_layer_embeddings_to_the_host(room, monkeypatch):
    placed = []

    def watched(path, part, device, ple):
        placed.append((path, device, ple))
        return place(path, part, device, ple)
    monkeypatch.setattr(mlx, "place", watched)
    loaded = load(room / "mixed", ple="host")
    assert set(placed) == {(path, "cpu", "host") for path, module in loaded.model.named_modules()
                           if is_packed(module) and path != "lm_head"}
    assert (PLE_TABLE, "cpu", "host") in placed
    assert torch.equal(hf_logits(loaded.model, PROMPT), hf_logits(load(room / "mixed").model, PROMPT))


def test_what_is_mlxs_and_what_is_hugging_faces_are_told_apart(room, tmp_path):
    of = lambda path, **config: is_mlx(path, wide_config() | config)
    assert of(room / "plain", quantization={"bits": 4, "group_size": 64})
    assert not of(room / "float32") and not of(tmp_path)
    assert not of(room / "plain", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert not of(room / "plain", quantization={"quant_method": "awq", "bits": 4})
    model = wide_model()
    path = tmp_path / "unquantised"
    path.mkdir()
    save_file({"language_model." + k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"},
              path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(wide_config()))
    assert of(path) and torch.equal(hf_logits(load(path).model, PROMPT), hf_logits(model, PROMPT))


def test_a_path_is_the_same_under_every_prefix_and_only_whole_components_are_a_prefix():
    for name in ("layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj", "language_model.model.layers.0.mlp.gate_proj",
                 "model.language_model.layers.0.mlp.gate_proj", "model.language_model.model.layers.0.mlp.gate_proj",
                 "language_model.layers.0.mlp.gate_proj"):
        assert canonical(name) == "model.layers.0.mlp.gate_proj"
    assert canonical("language_model.lm_head.weight") == canonical("lm_head.weight") == "lm_head.weight"
    assert canonical("language_model_head.x") == "model.language_model_head.x" and canonical("lm_head2") == "model.lm_head2"


# ---- what is broken ------------------------------------------------------------------------------------------------------

GATE = "model.layers.0.mlp.gate_proj"


def tensor(part, make):
    return lambda tensors: tensors.update({f"{GATE}.{part}": make(tensors[f"{GATE}.{part}"]).contiguous()})


def set_block(key, value):
    return lambda fields: fields["quantization"].update({key: value})


@pytest.mark.parametrize("change, config, message", [
    (lambda t: t.pop(f"{GATE}.scales"), None, rf"lacks {GATE}.scales, without which"),
    (lambda t: t.pop(f"{GATE}.weight"), None, rf"lacks {GATE}.weight, which {GATE}.scales are for"),
    (lambda t: t.pop(f"{GATE}.biases"), None, r"and no biases: affine has biases"),
    (tensor("biases", lambda t: t.half()), None, r"and F16 \[64, 1\] biases"),
    (tensor("scales", lambda t: t.to(torch.uint8)), None, "mxfp4 has 4 bits and groups of 32, not 4"),
    (tensor("scales", lambda t: t.double()), None, r"scales F64 .*: words are U32"),
    (tensor("weight", lambda t: t.view(torch.int32)), None, r"as I32 .*: words are U32"),
    (tensor("weight", lambda t: t[:, :7]), None, "no whole number of bits"),
    (tensor("weight", lambda t: t.repeat(1, 2)[:, :14]), None, "2, 3, 4, 5, 6 or 8 bits, not 7"),
    (tensor("weight", lambda t: t[:60]), None, r"the config makes it \[64, 64\]"),
    (tensor("scales", lambda t: t.repeat(1, 3)), None, "no whole number"),
    (tensor("scales", lambda t: t.repeat(1, 4)), None, "affine has groups of 32, 64 or 128, not 16"),
    (tensor("scales", lambda t: t[:, :0]), None, "the config makes it"),
    (lambda t: t.update({f"{GATE}.global_scale": torch.ones(1)}), None, rf"{GATE}.global_scale, which its config has no place"),
    (lambda t: t.update({f"language_model.{GATE}.scales": torch.ones(1)}), None, "one tensor under two prefixes"),
    (lambda t: t.pop("model.norm.weight"), None, "lacks model.norm.weight"),
    (None, set_block(GATE, {"bits": 8, "group_size": 64}), f"holds {GATE} with bits 4 although its config.json says 8"),
    (None, set_block(GATE, {"bits": 4, "group_size": 32}), "with group_size 64 although its config.json says 32"),
    (None, set_block(GATE, {"bits": 4, "mode": "mxfp4", "group_size": None}), "mode affine although its config.json says mxfp4"),
    (None, set_block(GATE, {"group_size": None, "bits": 5}), "says 5"),
    (None, set_block(f"language_model.{GATE}", {"bits": 8}), "with bits 4 although"),
    (None, set_block(GATE, False), "config.json has the module unquantised"),
    (None, set_block("model.layers.1.mlp.gate_proj", {"bits": 4}), "lacks model.layers.1.mlp.gate_proj.scales"),
    (None, set_block(GATE, "no"), "give an object, true or false"),
    (None, set_block("model.language_model.embed_tokens_per_layer", {"bits": 8}), "two things of model.embed_tokens_per_layer"),
    (None, set_block("mode", "q4"), "mode 'q4' for the default"),
    (None, set_block("bits", [4]), r"bits \[4\] for the default .*: give a whole number"),
    (None, lambda fields: fields.update(quantization=[4]), "quantization block that is no JSON object"),
    (None, lambda fields: fields.update(hidden_size=128), "layers.0.self_attn.q_proj with"),
])
def test_a_broken_checkpoint_says_in_one_sentence_what_is_wrong(room, tmp_path, change, config, message):
    path = edited(room, tmp_path, change or (lambda t: None), config or (lambda fields: None))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


FUZZ = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-2, 2**40), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
                    st.lists(st.integers(), max_size=2))


def loads_or_says_why(path: Path) -> None:
    try:
        loaded = load(path)
    except (CheckpointError, UnsupportedModelError) as error:
        assert "\n" not in str(error)
    else:
        assert hf_logits(loaded.model, PROMPT).shape == (len(PROMPT), 64)


@FUZZ
@given(st.sampled_from(["", "bits", "group_size", "mode", GATE, f"language_model.{GATE}", "model.layers.1.mlp.gate_proj", "x.y"]),
       st.one_of(SCALARS, st.dictionaries(st.sampled_from(["bits", "group_size", "mode", "z"]), SCALARS, max_size=3)))
def test_any_quantization_block_is_taken_or_refused_in_one_sentence(room, key, value):
    path = room / "fuzz_block"
    shutil.copytree(room / "mixed", path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json"))
    fields = json.loads((room / "mixed" / "config.json").read_text())
    if key:
        fields["quantization"][key] = value
    else:
        fields["quantization"] = value if value is not None else 0
    (path / "config.json").write_text(json.dumps(fields))
    loads_or_says_why(path)


@FUZZ
@given(st.integers(0, 10**6), st.binary(max_size=3), st.booleans())
def test_a_truncated_or_overwritten_file_is_taken_or_refused_in_one_sentence(room, at, bytes_, cut):
    path = room / "fuzz_file"
    shutil.copytree(room / "mixed", path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json"))
    whole = (room / "mixed" / "model.safetensors").read_bytes()
    at %= len(whole) if cut else 20_000      # most of the header and some of the tensors
    (path / "model.safetensors").write_bytes(whole[:at] if cut else whole[:at] + bytes_ + whole[at + len(bytes_):])
    loads_or_says_why(path)


@FUZZ
@given(st.sampled_from([f"{GATE}.weight", f"{GATE}.scales", f"{GATE}.biases", "model.embed_tokens.weight", "model.norm.weight"]),
       st.lists(st.integers(0, 65), max_size=3),
       st.sampled_from([torch.uint32, torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool]))
def test_a_tensor_of_any_shape_and_dtype_is_taken_or_refused_in_one_sentence(room, name, shape, dtype):
    path = room / "fuzz_tensor"
    shutil.copytree(room / "mixed", path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.index.json"))
    tensors = load_file(room / "mixed" / "model.safetensors")
    save_file(tensors | {name: torch.zeros(shape, dtype=dtype)}, path / "model.safetensors")
    loads_or_says_why(path)
