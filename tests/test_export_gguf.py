"""scripts/export_gguf.py, as someone calls it."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import gguf
import pytest

from gemma4_flex.checkpoints.gguf_header import scan

ROOT = Path(__file__).resolve().parents[1]
TYPES = ["sliding_attention", "full_attention"] * 2
CONFIG = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 768, "vocab_size_per_layer_input": 768,
    "hidden_size": 64, "hidden_size_per_layer_input": 16, "intermediate_size": 64, "use_double_wide_mlp": True,
    "num_hidden_layers": 4, "layer_types": TYPES, "num_kv_shared_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "max_position_embeddings": 512, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}},
    "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


export, make_adapter = script("export_gguf"), script("make_lora_adapter")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    config = tmp_path_factory.mktemp("model") / "config.json"
    config.write_text(json.dumps(CONFIG))
    return f"synthetic:{config}"


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("adapter") / "peft"
    assert make_adapter(["--model_name", model, "--out", str(path), "--targets", "q_proj", "down_proj", "--rank", "4"]) == 0
    return path


def test_a_model_is_written_and_what_was_written_is_said(model, tmp_path, capsys):
    out = tmp_path / "m.gguf"
    assert export(["--model_name", model, "--out", str(out), "--type", "Q4_0"]) == 0
    assert {tensor.type for tensor in scan(out).tensors.values()} == {"F32", "F16", "Q4_0", "Q8_0"}
    said = capsys.readouterr().out
    counts = Counter(tensor.type for tensor in scan(out).tensors.values())
    assert said.startswith(f"{out}: ") and all(f"{count} {name}" in said.splitlines()[0] for name, count in counts.items())
    assert "model.layers.0.per_layer_projection.weight is F16: blocks of Q4_0 do not fill its rows" in said


def test_bf16_and_f32_hold_what_the_model_is_in(model, tmp_path):
    assert export(["--model_name", model, "--out", str(tmp_path / "d.gguf")]) == 0
    assert scan(tmp_path / "d.gguf").tensors["token_embd.weight"].type == "BF16"
    found = {}
    for dtype in ("float32", "bfloat16"):
        assert export(["--model_name", model, "--out", str(tmp_path / f"{dtype}.gguf"), "--type", "F32", "--dtype", dtype]) == 0
        found[dtype] = next(t.data for t in gguf.GGUFReader(tmp_path / f"{dtype}.gguf").tensors if t.name == "token_embd.weight")
    assert export(["--model_name", model, "--out", str(tmp_path / "f.gguf"), "--type", "F32"]) == 0
    assert (tmp_path / "f.gguf").read_bytes() == (tmp_path / "float32.gguf").read_bytes()
    assert (found["float32"] != found["bfloat16"]).any()


def test_an_adapter_is_merged_or_written_alone(model, adapter, tmp_path, capsys):
    merged, alone, base = tmp_path / "merged.gguf", tmp_path / "alone.gguf", tmp_path / "base.gguf"
    common = ["--model_name", model, "--type", "F32"]
    assert export([*common, "--out", str(base)]) == 0
    assert export([*common, "--out", str(merged), "--lora_adapter", str(adapter)]) == 0
    assert export([*common, "--out", str(alone), "--lora_adapter", str(adapter), "--lora_only"]) == 0
    assert "an adapter of 8 modules in F32" in capsys.readouterr().out
    one, other = ({t.name: t.data for t in gguf.GGUFReader(path).tensors} for path in (base, merged))
    changed = {name for name in one if (one[name] != other[name]).any()}
    assert changed == {f"blk.{n}.{name}.weight" for n in range(4) for name in ("attn_q", "ffn_down")}
    assert set(scan(alone).tensors) == {f"{name}.lora_{side}" for name in changed for side in "ab"}


def test_mistakes_are_one_sentence_and_exit_code_2(model, adapter, tmp_path, capsys):
    (tmp_path / "there.gguf").write_text("mine")

    def refused(why: str, *arguments: str, out: str = "m.gguf") -> None:
        assert export(["--model_name", model, "--out", str(tmp_path / out), *arguments]) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and why in printed.err and printed.err.count("\n") == 1, printed.err

    refused("exists: name another file", out="there.gguf")
    refused("'Q9_9' cannot be written: name one of F32", "--type", "Q9_9")
    refused("--lora_only writes an adapter and no table", "--lora_only")
    refused("cannot be written as Q8_0: name one of F32, F16, BF16", "--type", "Q8_0", "--lora_only", "--lora_adapter",
            str(adapter))
    refused("is no PEFT adapter", "--lora_adapter", str(tmp_path))
    refused("No such file or directory", out="no/such/folder/m.gguf")
    assert export(["--model_name", "nowhere", "--out", str(tmp_path / "m.gguf")]) == 2
    assert export(["--model_name", "synthetic:Qwen3-nano", "--out", str(tmp_path / "m.gguf")]) == 2
    assert "a qwen3 model cannot be written as a GGUF file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"] and (tmp_path / "there.gguf").read_text() == "mine"
