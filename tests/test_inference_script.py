"""scripts/benchmarks/gemma4_flex_inference.py, on a stub of the engine except where a real one must refuse."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemma4_flex.bench import inference, roofline
from gemma4_flex.params import SamplingParams
from tests.bench import stub

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "benchmarks" / "gemma4_flex_inference.py"
spec = importlib.util.spec_from_file_location("gemma4_flex_inference", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


class RealTime:
    """A device that takes real time, for code that reads the real clock."""

    clock = staticmethod(time.perf_counter)

    def launch(self, seconds: float) -> None:
        time.sleep(seconds / 100)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def engines(monkeypatch) -> list:
    """(name, config) of each engine that was made; the engines are stubs."""
    made = []

    def from_pretrained(name, config, change, *, four_bit, gguf_weights):
        assert not four_bit and gguf_weights == "packed"
        engine = stub.StubEngine(RealTime())
        engine.config = config.resolved("cpu")
        made.append((name, config))
        return engine

    fake = SimpleNamespace(FlexEngine=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "gemma4_flex.engine", fake)
    monkeypatch.setattr(roofline, "copy_bandwidth", lambda device: roofline.Bandwidth(1e9, 1 << 20, 3))
    return made


def refused(capsys, *argv: str) -> str:
    """The one line that main() says on stderr before it gives up with exit code 2, having said nothing else."""
    try:
        code = script.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith("error: ") and said.err.count("\n") == 1, said.err
    return said.err


# ---- what is refused before any model is loaded


@pytest.mark.parametrize(("argv", "says"), [
    (["--decode_kernel_options", "{BLOCK_M: 32}"], "are not JSON"),
    (["--prefill_kernel_options", '{"num_stage": 1}'], "'num_stage' is unknown"),
    (["--prefill_kernel_options", "[1]"], "are not a JSON object"),
    (["--page_size", "48"], "power of two"),
    (["--max_batch_size", "0"], "max_batch_size=0"),
    (["--max_batch_size", "many"], "--max_batch_size"),
    (["--max_seq_length", "0"], "max_seq_length=0"),
    (["--max_new_tokens", "0"], "max_new_tokens=0"),
    (["--n_pages", "0"], "n_pages=0"),
    (["--n_rounds", "0"], "--n_rounds"),
    (["--n_prompts", "0"], "--n_prompts"),
    (["--n_prompts", "1000000"], "--prompts"),
    (["--dtype", "float16"], "bfloat16"),
    (["--device", "tpu"], "'cuda'"),
    (["--attention", "eager"], "'sdpa'"),
    (["--shared_kv", "none"], "'sidecar'"),
    (["--chat_template", "chatml"], "grpo"),
    (["--fa4_prefill"], "FlashAttention-4 stops at head_dim 128"),
    (["--no_merge_lora"], "need an adapter"),
    (["--verify_no_drift"], "need an adapter"),
    (["--lora_adapter", "x", "--no_merge_lora", "--verify_no_drift"], "leave out --no_merge_lora"),
    (["--verify_iterations", "0"], "at least 1"),
    (["--model_name_4bit", "x"], "leave out --load_in_4bit and --model_name"),
    (["--double_quant_4bit"], "give both"),
    (["--load_in_4bit", "--dtype", "float32"], "compute in bfloat16"),
    (["--lora_4bit", "requantize", "--lora_adapter", "x"], "--lora_4bit is for an adapter over 4-bit weights"),
    (["--lora_4bit", "unmerged", "--load_in_4bit"], "give --lora_adapter"),
    (["--load_in_4bit", "--lora_adapter", "x", "--lora_4bit", "requantize", "--no_merge_lora"], "leave out one of them"),
    (["--load_in_4bit", "--lora_adapter", "x", "--verify_no_drift"], "give --lora_4bit requantize"),
    (["--temperature", "-1"], "temperature=-1.0"),
    (["--top_p", "0"], "top_p=0.0"),
    (["--n", "0"], "n=0"),
    (["--sampling_seed", "-3"], "seed=-3"),
    (["--logprobs", "-1"], "logprobs=-1"),
    (["--prompts", "absent.jsonl"], "absent.jsonl"),
    (["--max_batch", "4"], "unrecognized arguments"),          # no guessing at cut-off names
])
def test_bad_flags_get_one_sentence_and_load_nothing(capsys, engines, argv, says):
    assert says in refused(capsys, *argv, "--model_name", "any")
    assert not engines


def test_a_broken_prompt_line_is_named_by_file_and_number(capsys, engines, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "fine"}\n{"text": ""}\n')
    assert f"{path} line 2: the prompt is empty" in refused(capsys, "--prompts", str(path))
    assert not engines


@pytest.mark.parametrize("place", ["absent/r.json", ".", "/proc/r.json"])
def test_an_unwritable_stats_path_is_found_out_before_the_run(capsys, engines, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    assert "can't write" in refused(capsys, "--stats_path", place)
    assert not engines and not list(tmp_path.iterdir())


def test_a_bug_is_not_dressed_up_as_the_users_mistake(monkeypatch, engines, tmp_path):
    def broken(*_, **__):
        raise ValueError("internal")

    monkeypatch.setattr(sys.modules["gemma4_flex.engine"].FlexEngine, "from_pretrained", broken)
    with pytest.raises(ValueError, match="internal"):
        script.main(["--model_name", "any", "--stats_path", str(tmp_path / "r.json")])
    assert not list(tmp_path.iterdir())


# ---- what a run says and writes


def run(tmp_path, *argv: str) -> dict:
    path = tmp_path / "r.json"
    assert script.main(["--n_prompts", "9", "--stats_path", str(path), *argv]) == 0
    return json.loads(path.read_text())


def test_a_run_writes_its_result_and_shows_completions_table_and_notices(engines, tmp_path, capsys):
    result = run(tmp_path, "--model_name", "any")
    said = capsys.readouterr().out
    assert len(result["completions"]) == 9 and len(result["rounds"]) == 3
    assert said.count("\n> ") == inference.SHOWN
    assert "decode tok/s" in said and "note: sdpa instead of flex" in said
    assert str(tmp_path / "r.json") in said
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_flags_reach_the_engines_config_and_the_result(engines, tmp_path):
    wanted = {"capture_cudagraph": True, "max_batch_size": 3, "max_seq_length": 256, "n_pages": 40, "page_size": 16,
              "decode_kernel_options": {"num_stages": 2}, "prefill_kernel_options": {"BLOCK_M": 32},
              "fa4_prefill": False, "dtype": "bfloat16", "attention": "sdpa", "shared_kv": "sidecar", "seed": 5, "compile": False,
              "decode_steps_per_sync": 3, "mixed_prefill": True}
    result = run(
        tmp_path, "--model_name", "any", "--capture_cudagraph", "--max_batch_size", "3", "--max_seq_length", "256",
        "--n_pages", "40", "--page_size", "16", "--decode_kernel_options", '{"num_stages": 2}',
        "--prefill_kernel_options", '{"BLOCK_M": 32}', "--no-fa4_prefill", "--dtype", "bfloat16", "--attention", "sdpa",
        "--shared_kv", "sidecar", "--seed", "5", "--no-compile", "--decode_steps_per_sync", "3", "--mixed_prefill",
        "--n_rounds", "4", "--max_new_tokens", "9")
    [(_, config)] = engines
    assert {name: getattr(config, name) for name in wanted} == wanted
    wanted |= {"n_rounds": 4, "max_new_tokens": 9, "n_prompts": 9, "chat_template": "auto"}
    assert {name: result["config"][name] for name in wanted} == wanted


def test_flags_reach_the_sampling_params_and_greedy_is_the_default_whatever_the_checkpoint_says(engines, tmp_path):
    wanted = {"n": 3, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
              "presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": 2, "max_new_tokens": 9}
    flags = [part for name, value in wanted.items() for part in (f"--{name}", str(value))]
    result = run(tmp_path, "--model_name", "any", *flags, "--sampling_seed", "7", "--prefix_cache", "--deterministic")
    engine, config = stub.StubEngine.last, engines[-1][1]
    assert engine.params == SamplingParams(**wanted, seed=7)
    assert config.prefix_cache and config.deterministic
    assert result["config"]["prefix_cache"] and result["config"]["temperature"] == 0.7
    assert len(result["completions"]) == 27 and result["workload"]["samples"] == 3
    run(tmp_path, "--model_name", "any")
    assert stub.StubEngine.last.params == SamplingParams(temperature=0.0)


def test_the_default_model_is_told_with_the_reason(engines, tmp_path, capsys, monkeypatch):
    import torch
    hub = "unsloth/gemma-4-E2B-it"
    for cuda, device, name in ((False, "auto", "tiny"), (True, "auto", hub), (True, "cpu", "tiny")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        result = run(tmp_path, "--device", device)
        assert engines[-1][0] == result["model_name"] == name
        assert f"model: {name} (" in capsys.readouterr().out


def test_no_progress_bar_where_stderr_is_no_terminal(engines, tmp_path, capsys):
    run(tmp_path, "--model_name", "any")
    assert capsys.readouterr().err == ""


def test_prompts_of_a_file_are_used_in_order(engines, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(f'{{"text": "prompt {i}"}}' for i in range(9)))
    result = run(tmp_path, "--model_name", "any", "--prompts", str(path))
    assert [c["prompt"] for c in result["completions"]] == [f"<bos>prompt {i}" for i in range(9)]
    assert result["workload"]["source"] == str(path)


def test_a_result_that_may_not_be_ranked_says_so(engines, tmp_path, capsys):
    run(tmp_path, "--model_name", "any", "--n_rounds", "1")
    assert "Not to be ranked: it has 1 measured round(s)" in capsys.readouterr().out


# ---- the real engine, on random weights


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory) -> list[str]:
    """Flags that name a tiny model of random weights, which has no tokenizer."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(stub.CONFIG))
    return ["--model_name", f"synthetic:{path}", "--device", "cpu", "--attention", "sdpa", "--no-compile"]


def test_a_captured_run_replays_every_decode_step_and_gives_the_eager_runs_tokens(synthetic, tmp_path, capsys):
    flags = [*synthetic, "--max_new_tokens", "6", "--max_batch_size", "2", "--max_seq_length", "128", "--n_rounds", "1"]
    captured, eager = run(tmp_path, *flags, "--capture_cudagraph"), run(tmp_path, *flags)
    assert captured["steps_eager"] == eager["steps_replayed"] == 0
    assert captured["steps_replayed"] == eager["steps_eager"] > 0
    tokens = [[c["token_ids"] for c in result["completions"]] for result in (captured, eager)]
    assert tokens[0] == tokens[1]
    assert captured["workload"]["source"] == "random tokens" and "no tokenizer" in capsys.readouterr().out
    decoded = sum(len(ids) - 1 for ids in tokens[0])      # the first of each comes from the prefill
    [only] = captured["rounds"]
    assert (only["prefill_tokens"], only["decode_tokens"], only["prefix_hit_tokens"]) == (9 * 64, decoded, 0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> list[str]:
    """The same at widths that 4 bits can hold."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(stub.CONFIG | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "global_head_dim": 64}))
    return ["--model_name", f"synthetic:{path}", "--device", "cpu", "--attention", "sdpa", "--no-compile", "--max_new_tokens", "6",
            "--max_batch_size", "2", "--max_seq_length", "128", "--n_rounds", "1"]


def test_a_4_bit_run_prints_its_plan_counts_its_real_bytes_and_says_that_its_steps_run_eagerly(wide, tmp_path, capsys):
    packed = run(tmp_path, *wide, "--load_in_4bit", "--double_quant_4bit", "--capture_cudagraph")
    said = capsys.readouterr().out
    assert "quantised: q_proj 6, k_proj 4" in said and "nf4 and bfloat16" in said
    assert "note: decode steps over quantised weights run eagerly" in said
    assert packed["steps_replayed"] == 0 and packed["steps_eager"] > 0 and "run eagerly" in packed["notices"][0]
    assert packed["dtype"] == packed["four_bit"]["compute_dtype"] == "bfloat16" and packed["four_bit"]["double_quant"]
    assert len(packed["four_bit"]["quantized"]) == 38 and "lm_head" in packed["four_bit"]["kept"]
    plain = run(tmp_path, *wide, "--dtype", "bfloat16")
    assert plain["four_bit"] is None
    assert packed["floor"]["step_weight_bytes"] == packed["four_bit"]["step_weight_bytes"] < plain["floor"]["step_weight_bytes"] / 2
    assert packed["floor"]["kv_bytes_per_step"] == plain["floor"]["kv_bytes_per_step"]


def test_an_adapter_over_4_bit_weights_runs_unmerged_or_requantised_and_drift_is_verified(wide, tmp_path, capsys):
    import torch

    from gemma4_flex.checkpoints import load_text_model
    from gemma4_flex.lora.adapters import random_adapter, save_adapter
    model = load_text_model(wide[1], dtype=torch.bfloat16, device="cpu").model
    save_adapter(random_adapter(model, "all-linear", rank=2, alpha=4, strength=0.3, seed=0), tmp_path / "adapter", base="synthetic")
    flags = [*wide, "--load_in_4bit", "--lora_adapter", str(tmp_path / "adapter")]
    unmerged = run(tmp_path, *flags)
    assert not unmerged["lora"]["merged"] and unmerged["lora"]["deviation"] is None
    merged = run(tmp_path, *flags, "--lora_4bit", "requantize", "--verify_no_drift", "--verify_iterations", "2")
    said = capsys.readouterr().out
    assert merged["lora"]["merged"] and merged["lora"]["deviation"]["base"] == "dequantised 4-bit base"
    assert merged["lora"]["deviation"]["mean_abs"] > 0 and "requantised: 38 modules against the dequantised 4-bit base" in said
    assert merged["drift"]["passed"] and "no drift after 2" in said
    accuracy = next(t for t in merged["drift"]["tiers"] if t["name"] == "accuracy")
    assert "does not apply to 38 4-bit targets" in accuracy["detail"]


def test_4_bit_without_bitsandbytes_and_a_model_that_is_not_quantised_are_one_sentence(wide, tmp_path, capsys, monkeypatch):
    assert "is not quantised" in refused(capsys, "--model_name_4bit", "tiny", "--stats_path", str(tmp_path / "r.json"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "pip install bitsandbytes" in refused(capsys, *wide, "--load_in_4bit", "--stats_path", str(tmp_path / "r.json"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "says"), [
    (["--max_seq_length", "32"], "max_seq_length"),
    (["--n_pages", "2"], "n_pages"),
    (["--prompts", "FILE"], "no tokenizer"),
    (["--model_name", "synthetic:E9B"], "synthetic:E9B"),
    (["--model_name", "tinny"], "'tinny'"),
])
def test_what_only_the_engine_can_know_is_one_sentence_too(synthetic, tmp_path, capsys, flags, says):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"text": "hello"}')
    flags = [str(prompts) if flag == "FILE" else flag for flag in flags]
    assert script.main([*synthetic, *flags, "--n_prompts", "1", "--stats_path", str(tmp_path / "r.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and says in said
    assert list(tmp_path.iterdir()) == [prompts]


def test_another_architecture_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}))
    assert script.main(["--model_name", str(tmp_path), "--stats_path", str(tmp_path / "r.json")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "mistral" in said.lower()


# ---- the command itself


def test_an_unknown_model_is_one_sentence_of_the_command_and_leaves_no_file(tmp_path):
    command = [sys.executable, str(SCRIPT), "--model_name", "no such model", "--stats_path", str(tmp_path / "r.json")]
    here = os.environ | {"PYTHONPATH": str(ROOT)}      # this checkout, whatever is installed
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=here, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: 'no such model'") and done.stderr.count("\n") == 1, done.stderr
    assert not list(tmp_path.iterdir())
