"""The job's figures, worked out by hand from those of two ranks."""
from __future__ import annotations

import pytest

from gemma4_flex.bench import measure, ranks_result, report, roofline, workload
from gemma4_flex.params import SamplingParams
from tests.bench import stub

FLOPS = roofline.MatmulRate(1e12, "float32", (64,), 3)


def rank_result(n_prompts: int, *, step_s: float, n_rounds: int = 3, **stubs) -> tuple[dict, list]:
    """A rank's result, and its prompts of 64 tokens: a millisecond each in prefill, four decode steps."""
    device = stub.AsyncDevice()
    engine = stub.StubEngine(device, step_s=step_s, **stubs)
    prompts = workload.encode_random(n_prompts, 64, seed=n_prompts)
    done = measure.measure_rounds(engine, [p.ids for p in prompts], SamplingParams(), n_rounds=n_rounds,
                                  synchronize=device.synchronize, clock=device.clock)
    result = report.build_result(
        benchmark="b", model_name="m", engine=engine, measurement=done, prompts=prompts, chat_template="none",
        prompt_source="random", bandwidth=roofline.Bandwidth(1e9, 1 << 20, 3), matmul=FLOPS, peak_memory=1000 * n_prompts,
        options={}, notices=engine.notices)
    return result, prompts


@pytest.fixture
def merged() -> tuple[dict, list[dict]]:
    (slow, some), (fast, others) = rank_result(3, step_s=0.02), rank_result(1, step_s=0.01)
    return ranks_result.merge_results([slow, fast], some + others), [slow, fast]


def test_tokens_add_up_and_rates_are_over_the_slowest_ranks_seconds(merged):
    result, _ = merged
    for row in result["rounds"]:
        assert (row["prefill_tokens"], row["decode_tokens"], row["steps_replayed"]) == (4 * 64, 4 * 4, 8)
        assert row["prefill_s"] == pytest.approx(3 * 0.064) and row["decode_s"] == pytest.approx(0.08)
        assert row["wall_s"] == pytest.approx(0.192 + 0.08)
    assert result["decode_tps_median"] == pytest.approx(16 / 0.08)
    assert result["prefill_tps_median"] == pytest.approx(256 / 0.192)
    assert result["job_tps_median"] == pytest.approx((256 + 16) / 0.272)
    assert result["ms_per_step_median"] == pytest.approx(1e3 * (0.08 + 0.04) / 8)


def test_the_job_is_never_told_faster_than_its_ranks_together(merged):
    result, ranks = merged
    for name in ("decode_tps_median", "prefill_tps_median"):
        assert result[name] <= sum(rank[name] for rank in ranks)
    least, most = sorted(rank["floor_fraction"] for rank in ranks)
    assert least <= result["floor_fraction"] <= most


def test_the_result_is_whole_and_keeps_every_ranks_rounds(merged):
    result, ranks = merged
    report.check_result(result)
    assert "2 ranks, " in report.table(result) and "whole job, tok/s" in report.table(result)
    assert [rank["rounds"] for rank in result["ranks"]] == [rank["rounds"] for rank in ranks]
    assert [rank["prompts"] for rank in result["ranks"]] == [3, 1]
    assert result["workload"]["n_prompts"] == len(result["completions"]) == 4
    assert result["workload"]["prompt_tokens"]["total"] == 256 and result["workload"]["output_tokens"]["total"] == 20
    assert result["bandwidth_bytes_per_s"] == 2e9 and result["peak_memory_bytes"] == 3000
    assert result["spread"]["ttft_ms"]["n"] == 4 * 3


def test_agreement_is_weighed_by_completions():
    (steady, some), (changing, others) = rank_result(3, step_s=0.01), rank_result(1, step_s=0.01, changes=True)
    assert ranks_result.merge_results([steady, changing], some + others)["token_agreement"] == 0.75


def test_ranks_that_ran_no_decode_step_have_no_decode_figures():
    (one, some), (other, others) = rank_result(1, step_s=0.01, reply=1), rank_result(2, step_s=0.01, reply=1)
    result = ranks_result.merge_results([one, other], some + others)
    assert result["decode_tps_median"] is result["floor_fraction"] is result["floor"]["ms_per_step"] is None
    assert "no decode step was run" in report.table(result)


def test_one_rank_has_the_figures_of_one_process():
    one, prompts = rank_result(2, step_s=0.01)
    result = ranks_result.merge_results([one], prompts)
    for name in ("decode_tps", "prefill_tps", "ms_per_step", "ttft_ms"):
        assert result["spread"][name] == pytest.approx(one["spread"][name])
    for name in ("floor_fraction", "prefill_floor_fraction"):
        assert result[name] == pytest.approx(one[name])
    changed = {name for name in one if result[name] != one[name]}
    assert changed <= {"rounds", "warmup_rounds", "spread", "ms_per_step_median", "floor_fraction", "prefill_floor_fraction"}
