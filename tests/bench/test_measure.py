from __future__ import annotations

import pytest
import torch

from gemma4_flex.bench import measure
from tests.bench.stub import AsyncDevice, StubEngine

PROMPTS = [[1] * 8, [2] * 12]


def rounds_of(engine, device, **options):
    return measure.measure_rounds(engine, PROMPTS, None, synchronize=device.synchronize, clock=device.clock, **options)


def test_a_timer_that_waits_sees_the_devices_time_and_one_that_does_not_sees_none():
    device = AsyncDevice()
    assert measure.timed(lambda: device.launch(3.0), synchronize=device.synchronize, clock=device.clock)[1] == 3.0
    assert measure.timed(lambda: device.launch(3.0), synchronize=lambda: None, clock=device.clock)[1] == 0.0


def test_work_launched_before_the_timer_is_not_counted():
    device = AsyncDevice()
    device.launch(5.0)
    value, seconds = measure.timed(
        lambda: device.launch(1.0) or "done", synchronize=device.synchronize, clock=device.clock)
    assert (value, seconds) == ("done", 1.0)


def test_an_engine_whose_timers_do_not_wait_for_the_device_is_found_out():
    device = AsyncDevice()
    with pytest.raises(measure.MeasurementError, match="don't wait for the device"):
        rounds_of(StubEngine(device, waits=False), device, n_rounds=3)


def test_timers_that_add_up_to_more_than_the_wall_clock_are_refused():
    done = measure.Round(10, 10, 3.0, 3.0, 5.0, 1, 0, 0, 0.0, 0.0, ())
    with pytest.raises(measure.MeasurementError, match=r"add up to 6\.000 s in a round that took 5\.000 s"):
        done.check()


def test_the_warm_up_is_kept_apart_and_its_cost_is_in_no_figure():
    device = AsyncDevice()
    engine = StubEngine(device, first_extra_s=100.0)
    measured = rounds_of(engine, device, n_rounds=3)
    assert engine.calls == 4 and len(measured.warmup) == 1 and len(measured.rounds) == 3
    assert measured.warmup[0].decode_s > 100
    assert [round(r.decode_tps) for r in measured.rounds] == [200, 200, 200]      # 8 tokens in 4 steps of 10 ms


def test_a_round_counts_only_what_happened_in_it():
    device = AsyncDevice()
    measured = rounds_of(StubEngine(device), device, n_rounds=3)
    for r in measured.rounds:
        assert (r.prefill_tokens, r.decode_tokens, r.steps_replayed, r.steps_eager) == (20, 8, 4, 0)
        assert r.prefill_s == pytest.approx(0.020) and r.decode_s == pytest.approx(0.040)
        assert r.wall_s == pytest.approx(0.060) and r.ms_per_step == pytest.approx(10)
        assert len(r.ttft_ms) == 2 and r.compile_s == r.capture_s == 0


def test_tokens_that_differ_between_rounds_are_told():
    device = AsyncDevice()
    assert rounds_of(StubEngine(device), device, n_rounds=3).token_agreement == 1.0
    assert rounds_of(StubEngine(device, changes=True), device, n_rounds=3).token_agreement == 0.0


def test_progress_is_told_after_every_round_warm_up_included():
    device, seen = AsyncDevice(), []
    rounds_of(StubEngine(device), device, n_rounds=3, on_round=seen.append)
    assert len(seen) == 4


def test_a_run_of_one_token_a_request_has_no_decode_figure_and_no_division_by_zero():
    device = AsyncDevice()
    [done] = rounds_of(StubEngine(device, reply=1), device, n_rounds=1).rounds
    assert done.decode_tps is None and done.ms_per_step is None
    assert done.prefill_tps == pytest.approx(1000)


def test_a_summary_is_the_median_and_how_far_apart_the_figures_lie():
    summary = measure.summarize([4.0, 1.0, None, 2.0])
    assert (summary.median, summary.low, summary.high, summary.n, summary.relative) == (2.0, 1.0, 4.0, 3, 1.5)
    assert measure.summarize([None]) is None


def test_peak_memory_on_a_cpu_grows_with_what_is_held():
    before = measure.peak_memory_bytes("cpu")
    held = torch.ones(before + (64 << 20), dtype=torch.uint8)      # alone more than there ever was
    assert measure.peak_memory_bytes("cpu") >= held.numel()
