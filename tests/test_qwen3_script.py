"""scripts/benchmarks/qwen3_flex_inference.py has the flags, figures and proofs of the Gemma-4 script, on Qwen3 and Llama."""
from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from gemma4_flex.bench import inference_flags, roofline
from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.lora.adapters import random_adapter, save_adapter
from tests.dense import ARCHITECTURES, dense_model
from tests.tiny import fake_tokenizer

BENCHMARKS = Path(__file__).resolve().parents[1] / "scripts" / "benchmarks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script, gemma = load("qwen3_flex_inference"), load("gemma4_flex_inference")
FLAGS = ["--device", "cpu", "--attention", "sdpa", "--no-compile", "--max_new_tokens", "6", "--max_batch_size", "2",
         "--max_seq_length", "256", "--n_prompts", "5", "--n_rounds", "1"]


@pytest.fixture(autouse=True)
def _rates(monkeypatch):
    """Measuring the machine takes seconds a run, and tests/bench/test_roofline.py does it."""
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: roofline.Bandwidth(1e12, 1 << 20, 3))
    monkeypatch.setattr(roofline, "matmul_rate", lambda device, dtype: roofline.MatmulRate(1e13, dtype, (64,), 3))


def run(tmp_path, *argv: str) -> dict:
    path = tmp_path / "result.json"
    assert script.main([*FLAGS, "--stats_path", str(path), *argv]) == 0
    return json.loads(path.read_text())


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request, tmp_path) -> str:
    folder = tmp_path / request.param
    dense_model(request.param, 3, max_position_embeddings=512).save_pretrained(folder)
    fake_tokenizer().save_pretrained(folder)
    return str(folder)


def test_both_scripts_have_the_same_flags():
    ours, theirs = (inference_flags.parser(module.COMMAND) for module in (script, gemma))
    assert {a.dest: a.default for a in ours._actions} == {a.dest: a.default for a in theirs._actions}
    assert "Hopper" in ours.format_help() and "refused" in theirs.format_help()


def test_the_default_model_without_cuda_is_small_random_and_named_with_the_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(tmp_path)
    said = capsys.readouterr().out
    assert result["model_name"] == "synthetic:Qwen3-nano" and result["benchmark"] == "qwen3_flex_inference"
    assert "model: synthetic:Qwen3-nano (a small Qwen3 of random weights" in said and "Qwen/Qwen3-0.6B is the real thing" in said


def test_a_captured_run_tells_steps_floor_and_geometry_and_gives_the_eager_runs_tokens(checkpoint, tmp_path):
    eager, captured = run(tmp_path, "--model_name", checkpoint), run(tmp_path, "--model_name", checkpoint, "--capture_cudagraph")
    assert captured["steps_eager"] == 0 < captured["steps_replayed"]
    assert [c["token_ids"] for c in eager["completions"]] == [c["token_ids"] for c in captured["completions"]]
    model = load_text_model(checkpoint, dtype=torch.float32, device="cpu").model
    parameters, embedding = sum(p.numel() for p in model.parameters()), model.model.embed_tokens.weight.numel()
    untied = model.lm_head.weight is not model.model.embed_tokens.weight
    assert captured["floor"]["step_weight_bytes"] == 4 * (parameters - (embedding if untied else 0))
    assert captured["kv_bytes_per_token"] == {"full_attention": 3 * 2 * 2 * 16 * 4}
    assert captured["geometry"]["groups"]["full_attention"]["owners"] == [0, 1, 2]
    assert captured["floor_fraction"] > 0 and captured["prefill_floor_fraction"] > 0


def test_an_adapter_is_merged_into_a_second_copy_and_nothing_drifts(checkpoint, tmp_path, capsys):
    model = load_text_model(checkpoint, dtype=torch.float32, device="cpu").model
    save_adapter(random_adapter(model, "all-linear", rank=2, alpha=4, strength=0.3, seed=0), tmp_path / "adapter", base=checkpoint)
    flags = ["--model_name", checkpoint, "--lora_adapter", str(tmp_path / "adapter")]
    merged = run(tmp_path, *flags, "--capture_cudagraph", "--verify_no_drift", "--verify_iterations", "2")
    assert merged["lora"]["modules"] == 21 and merged["lora"]["extra_bytes"] > 0 and merged["drift"]["passed"]
    assert "no drift after 2" in capsys.readouterr().out
    unmerged, plain = run(tmp_path, *flags, "--no_merge_lora"), run(tmp_path, "--model_name", checkpoint)
    tokens = [[c["token_ids"] for c in result["completions"]] for result in (merged, unmerged, plain)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(("argv", "says"), [
    (["--fa4_prefill"], "FlashAttention-4 cannot run here: it needs a Hopper or Blackwell GPU"),
    (["--model_name", "synthetic:Qwen9"], "synthetic:Qwen9"), (["--max_seq_length", "16"], "max_seq_length")])
def test_what_cannot_be_is_one_sentence(argv, says, tmp_path, capsys):
    path = tmp_path / "r.json"
    assert script.main([*FLAGS, "--stats_path", str(path), *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and says in said and not path.exists()
