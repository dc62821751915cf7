"""scripts/grpo.py: flags and reports anywhere; training only where TRL is installed (`make grpo-demo` installs it)."""
from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemma4_flex.bench import grpo_report

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "grpo.py"
spec = importlib.util.spec_from_file_location("grpo_script", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

AGREEMENT = {"tokens": 8, "delta_mean": 1e-7, "delta_max": 1e-6, "ratio_off_mean": 1e-7, "ratio_off_max": 1e-6}


def run_record(ratio_off_mean=1e-7) -> dict:
    """A run's record as bench.grpo writes it, short."""
    step = {"step": 1, "reward": 0.4, "exact": 0.0, "agreement": AGREEMENT}
    summary = {"median": 50.0, "min": 40.0, "max": 60.0, "n": 3}
    return {"steps": [step, step | {"step": 2, "reward": 0.8, "exact": 0.5}], "seconds": 12.0, "averaged_steps": 1,
            "reward": {"first": 0.4, "last": 0.8}, "exact": {"first": 0.0, "last": 0.5},
            "held_out": {"before": 0.0, "after": 0.25}, "rollout_tps": summary, "refresh_ms": summary,
            "agreement": {"tolerance": 1e-5, "delta_mean": 1e-7, "delta_max": 1e-6, "ratio_off_mean": ratio_off_mean,
                          "ratio_off_max": 2e-5}, "drift": {"verified": 2, "passed": 2}}


def job_record(ratio: float) -> dict:
    summary = {"median": 2.0, "min": 1.0, "max": 3.0}
    return {"prompts": 16, "samples": 8, "prompt_tokens": {"min": 16, "max": 97}, "max_new_tokens": 48,
            "seconds": {"engine": summary, "transformers": summary}, "tokens_per_s": {"engine": summary, "transformers": summary},
            "ratio": {"median": ratio, "min": ratio, "max": ratio, "n": 3}}


def without_trl(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else found(name, *rest))


def with_all(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())


# ---- flags ------------------------------------------------------------------------------------------------------------


def test_without_trl_one_sentence_says_what_to_install(monkeypatch, capsys):
    without_trl(monkeypatch)
    assert script.main([]) == 2
    error = capsys.readouterr().err
    assert "trl" in error and "requirements-train.txt" in error and error.count("\n") == 1


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--num_generations", "1"], ["--lr", "0"], ["--temperature", "-1"],
                                   ["--verify_every", "-1"], ["--stats_path", "/nowhere/at/all.json"], ["--lr", "nan"]])
def test_a_bad_flag_is_one_sentence_before_anything_is_loaded(monkeypatch, capsys, flags):
    with_all(monkeypatch)
    assert script.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_an_unknown_side_is_refused(capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(["--rollout", "vllm"])
    assert stop.value.code == 2 and capsys.readouterr().err.startswith("error: ")


# ---- what people see --------------------------------------------------------------------------------------------------


def test_tables_tell_both_sides_and_the_verdicts():
    text = grpo_report.tables({"runs": {"engine": run_record(), "transformers": run_record() | {
        "agreement": None, "refresh_ms": None}}, "jobs": {"bundled prompts": job_record(3.5), "counting": job_record(1.2)}})
    assert "0.400 to 0.800" in text and "0% to 25%" in text
    assert "(within 1e-05)" in text and "2.0e-05 in any token" in text
    assert "3.50 x (3.50 to 3.50); wanted 3 x: reached" in text and "1.20 x (1.20 to 1.20); wanted 3 x: missed" in text


def test_an_importance_ratio_beyond_its_tolerance_is_told():
    assert grpo_report.is_exact(run_record(9e-6)) and not grpo_report.is_exact(run_record(1.1e-5))
    assert "(NOT within 1e-05)" in grpo_report.exactness("engine", run_record(1.1e-5))


def test_a_line_has_a_cell_for_every_head():
    step = SimpleNamespace(step=3, reward=0.5, exact=0.25, mean_tokens=30.5, rollout_tps=1234.0, refresh_ms=45.2, seconds=3.21,
                           verify_s=2.0, drift={"passed": True}, agreement=SimpleNamespace(**AGREEMENT))
    line = grpo_report.line(step)
    assert line.split()[:7] == ["3", "0.500", "25%", "30.5", "1,234", "45.2", "1.0e-07"] and line.endswith("verified in 2.0 s")
    for end in ("refresh ms", "step s"):      # right-aligned: the columns end where their heads do
        at = grpo_report.head().index(end) + len(end)
        assert line[at - 1].isdigit() and line[at:at + 1] in ("", " ")
    bare = SimpleNamespace(**vars(step) | {"refresh_ms": None, "agreement": None, "drift": None})
    assert grpo_report.line(bare).split()[5:10] == ["-"] * 5


def test_the_picture_is_drawn(tmp_path):
    grpo_report.plot({"runs": {"engine": run_record(), "transformers": run_record() | {"agreement": None}}}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---- with TRL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["engine", "transformers", "both"])
def test_two_steps_of_grpo(side, tmp_path, capsys):
    pytest.importorskip("trl", reason="needs requirements-train.txt")
    path = tmp_path / "grpo.json"
    status = script.main(["--rollout", side, "--steps", "2", "--num_prompts", "2", "--num_generations", "4", "--max_new_tokens",
                          "32", "--no-compile", "--verify_every", "2", "--verify_cycles", "1", "--max_batch_size", "8",
                          "--job_prompts", "2", "--job_samples", "2", "--job_rounds", "1", "--stats_path", str(path)])
    assert status == 0, capsys.readouterr()
    result = json.loads(path.read_text())
    sides = ["engine", "transformers"] if side == "both" else [side]
    assert list(result["runs"]) == sides and path.with_suffix(".png").exists()
    assert all(len(run["steps"]) == 2 for run in result["runs"].values())
    assert set(result["jobs"]) == {"bundled prompts", "counting, held out"}
    if "engine" in sides:
        run = result["runs"]["engine"]
        assert run["agreement"]["ratio_off_mean"] <= 1e-5 and run["agreement"]["ratio_off_max"] <= 1e-4
        assert run["drift"] == {"verified": 1, "passed": 1} and run["refresh_ms"]["median"] > 0


def test_the_trainers_own_log_probabilities_are_those_of_its_plain_forward():
    """TRL scores completions left-padded, through a fused head: what `Rollout.compare` finds must be what TRL sees."""
    pytest.importorskip("trl", reason="needs requirements-train.txt")
    from gemma4_flex.bench.grpo import Settings, Training
    training = Training(Settings(steps=1, num_prompts=2, num_generations=4, max_new_tokens=32, compile=False, verify_every=0,
                                 job_prompts=2, max_batch_size=8, temperature=1.5), "engine")
    training.rollout.compares = True
    training.train()
    ours, theirs = training.rollout.history[0].agreement, training.run.steps[0].agreement
    assert ours.tokens == theirs.tokens
    assert max(ours.ratio_off_max, theirs.ratio_off_max) <= 1e-4 and max(ours.ratio_off_mean, theirs.ratio_off_mean) <= 1e-5
