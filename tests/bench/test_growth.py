from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemma4_flex import checkpoints
from gemma4_flex.bench import growth, growth_page, scheduler_cost
from gemma4_flex.bench.measure import MeasurementError
from gemma4_flex.bench.results_page import fingerprint, fingerprint_of
from gemma4_flex.bench.roofline import Bandwidth, MatmulRate
from gemma4_flex.bench.table import Table
from tests.bench.growth_record import record, summary
from tests.engines import SMALL, assert_all_free, make_engine
from tests.tiny import tiny_model

PLAIN = {"compile": False, "decode_steps_per_sync": 1}      # what a step holds does not change with how it is run
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "bench_growth.py"
spec = importlib.util.spec_from_file_location("bench_growth", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


def ticking():
    """A clock that is a second later at each look."""
    return map(float, itertools.count()).__next__


# ---- one case -------------------------------------------------------------------------------------------------------

def test_a_case_is_timed_in_decode_with_its_whole_batch_and_leaves_nothing_behind():
    engine = make_engine(tiny_model(), **PLAIN)
    case = growth.Case(engine, batch=3, context=20)
    growth.time_case(case, steps=5, seed=0, clock=ticking())
    assert case.ms == [1000 / 5] and (case.steps_replayed, case.steps_eager) == (0, 5)
    assert 20 < case.tokens_in_view < 30
    assert_all_free(engine)
    growth.time_case(case, steps=5, seed=0, clock=ticking())
    assert len(case.ms) == 2


def test_a_batch_that_ends_while_it_is_timed_is_no_measurement():
    engine = make_engine(tiny_model(), max_seq_length=24, **PLAIN)
    with pytest.raises(MeasurementError, match="batch of 2 at 20 tokens"):
        growth.time_case(growth.Case(engine, batch=2, context=20), steps=3, seed=0)


def test_attention_alone_is_of_each_owner_over_the_keys_that_are_there(monkeypatch):
    engine = make_engine(tiny_model(), **PLAIN)
    for prompt in ([5] * 9, [6] * 14):
        engine.submit(prompt)
    for _ in range(4):
        engine.step()
    seen = []
    owner_of = {id(pool): owner for group in engine.runner.cache.groups.values() for owner, pool in group.keys.items()}

    def attend(q, keys, values, plan, real=growth.paged_sdpa):
        seen.append((owner_of[id(keys)], tuple(q.shape), plan.seen.sum(-1).flatten().tolist()))
        return real(q, keys, values, plan)
    monkeypatch.setattr(growth, "paged_sdpa", attend)
    monkeypatch.setattr(growth.StepGraph, "capture", lambda fn, static: SimpleNamespace(replay=fn))
    found = growth.attention_alone_us(engine, calls=2, clock=ticking())
    held = [s.num_computed for s in engine.scheduler.running]
    owners = {0: (16, [4, 4]), 2: (16, [4, 4]), 1: (32, held), 3: (32, held)}      # of tests.tiny: head size, keys in view
    assert len(seen) == 3 * len(owners)        # once before the clock, then the two calls
    assert all(entry in seen for entry in [(owner, (2, 4, 1, head_dim), keys) for owner, (head_dim, keys) in owners.items()])
    assert found == {"sliding_attention": 1e6 / (2 * 2), "full_attention": 1e6 / (2 * 2)}


# ---- series ---------------------------------------------------------------------------------------------------------

def test_rounds_take_the_cases_in_turn_and_the_first_does_not_count(monkeypatch):
    order = []

    def fake(case, **kwargs):
        order.append(case.batch)
        case.ms.append(float(len(order)))
        case.steps_replayed += 2
    monkeypatch.setattr(growth, "time_case", fake)
    cases = [growth.Case(None, batch, 10) for batch in (1, 2)]
    growth.time_series(cases, growth.Sizes(rounds=3), seed=0)
    assert order == [1, 2] * 4
    assert [case.ms for case in cases] == [[3.0, 5.0, 7.0], [4.0, 6.0, 8.0]]
    assert cases[0].steps_replayed == 6


def test_a_whole_measurement_has_every_case_captured_and_the_pools_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "copy_bandwidth", lambda device: Bandwidth(1e9, 1, 1))
    monkeypatch.setattr(growth, "matmul_rate", lambda device, dtype: MatmulRate(1e12, dtype, (1,), 1))
    model, calls = tiny_model(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0), []
    sizes = growth.Sizes(contexts=(6, 12), batches=(2,), pools=(1, 3), running=(2, 3), context=6, pool_batch=1, rounds=1, steps=2)
    config = script.EngineConfig(**SMALL | PLAIN | {"page_size": 32})
    result = growth.measure_growth(SimpleNamespace(model=model, tokenizer=None), config, sizes, model_name="tiny random",
                                   on_case=lambda: calls.append(1))
    json.dumps(result, allow_nan=False)
    assert len(calls) == growth.num_cases(sizes) == 10
    rows = [*result["context"], *result["batch"], *result["pool"]]
    assert all(r["steps_eager"] == 0 and r["steps_replayed"] >= 2 and r["ms_per_step"]["n"] == 1 for r in rows)
    assert all(r["floor_fraction"] == r["floor_ms"] / r["ms_per_step"]["median"] for r in rows)
    assert [set(r["attention_us"]) for r in result["context"]] == [{"sliding_attention", "full_attention"}] * 2
    assert [r["batch"] for r in result["batch"]] == [2]
    small, large = (r["n_pages"] - 1 for r in result["pool"])
    assert large == 3 * small
    assert [r["running"] for r in result["scheduler"]] == [2, 3]
    growth_page.plot(result, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# ---- the scheduler --------------------------------------------------------------------------------------------------

def test_the_schedulers_cost_is_the_clocks_over_the_steps():
    cost = scheduler_cost.host_cost(5, steps=8, context=300, clock=ticking())
    assert cost == scheduler_cost.HostCost(mean_us=1e6, p99_us=1e6)


def test_its_slowest_step_of_a_hundred_is_left_out_of_p99_and_counts_in_the_mean():
    pauses = iter([1.0] * 99 + [101.0])
    now = [0.0]

    def clock():
        now.append(now[-1] + (next(pauses) if len(now) % 2 == 0 else 0.0))
        return now[-1]
    cost = scheduler_cost.host_cost(2, steps=100, context=300, clock=clock)
    assert (cost.mean_us, cost.p99_us) == (2e6, 1e6)


def test_the_sequences_it_times_cross_page_borders_at_different_steps():
    scheduler, tables = scheduler_cost.decoding_scheduler(40, context=700, room=60)
    assert len(scheduler.running) == 40 and not scheduler.waiting
    assert len({s.num_computed % scheduler_cost.PAGE_SIZE for s in scheduler.running}) > 30
    assert all(table.drain_changes() == [] for table in tables)
    assert any(table.window == 512 and len(table.held(1)) < len(tables[0].held(1)) for table in tables)


# ---- how it is told -------------------------------------------------------------------------------------------------

def test_a_line_through_points_on_one_has_no_deviation():
    fit = growth_page.line([1, 2, 5], [5, 7, 13])
    assert (fit.base, fit.slope, fit.deviation) == pytest.approx((3, 2, 0))
    assert growth_page.line([0, 1, 2], [0, 0, 3]).deviation == pytest.approx(1 / 3)


def test_the_verdicts_tell_flat_from_linear():
    said = growth_page.verdicts(record())
    assert "sliding attention alone takes 1.00 x as long at 4,000 tokens as at 1,000" in said
    assert "full attention alone takes 7.50 x as long at 4,000 tokens as at 100, along a line of 10 µs and 20.0 µs per " \
           "1,000 tokens to 0%" in said
    assert "a step takes 1.00 x as long with 3.9 x the pool" in said
    assert said[-1].endswith("150 µs a step at 256 running sequences, under the 200 µs wanted")
    slow = record()
    slow["scheduler"][-1]["us_per_step"] = summary(300)
    assert growth_page.verdicts(slow)[-1].endswith("over the 200 µs wanted")


def test_steps_that_ran_eagerly_are_told():
    done = record()
    assert growth_page.steps_note(done).startswith("384 steps replayed from captured graphs, 0 run eagerly")
    done["pool"][0] |= {"steps_replayed": 0, "steps_eager": 48}
    assert growth_page.steps_note(done).startswith("336 steps replayed from captured graphs, 48 run eagerly")


def test_a_table_has_the_same_cells_in_a_terminal_and_on_a_page():
    table = Table(("a", "b|c"), [("1", "2 | 3")], "Says:")
    assert table.markdown() == "Says:\n\n| a | b\\|c |\n|---|---|\n| 1 | 2 \\| 3 |"
    assert table.text().split() == ["Says:", "a", "b|c", "---", "-----", "1", "2", "|", "3"]


# ---- the script -----------------------------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs main() with a recorded measurement in the place of a real one: (exit code, stdout, stderr, sizes asked for)."""
    asked = []
    monkeypatch.setattr(checkpoints, "load_text_model", lambda name, **kwargs: SimpleNamespace(model=None))
    monkeypatch.setattr(growth, "measure_growth", lambda loaded, config, sizes, **kwargs: asked.append(sizes) or record())

    def run(*argv: str):
        code = script.main(["--device", "cpu", "--stats_path", str(tmp_path / "growth_x.json"), *argv])
        said = capsys.readouterr()
        return code, said.out, said.err, asked
    return run


def test_the_script_shows_the_tables_and_leaves_a_result_with_its_plot(run, tmp_path):
    code, out, err, asked = run("--contexts", "300", "70", "70", "--rounds", "2")
    assert (code, err) == (0, "") and asked == [growth.Sizes(contexts=(70, 300), rounds=2)]
    for table in (growth_page.context_table, growth_page.batch_table, growth_page.pool_table, growth_page.scheduler_table):
        assert table(record()).text() in out
    path = tmp_path / "growth_x.json"
    assert json.loads(path.read_text()) == record()
    assert fingerprint_of(path.with_suffix(".png")) == fingerprint(path)


def test_the_scripts_defaults_are_those_of_the_sizes(run):
    assert run()[3] == [growth.Sizes()]
    assert {f.name for f in dataclasses.fields(growth.Sizes)} <= {a.dest for a in script.parser()._actions}


@pytest.mark.parametrize("argv, says", [
    (["--attention", "eager"], "attention"),
    (["--stats_path", "/proc/nowhere/x.json"], "/proc/nowhere"),
])
def test_what_cannot_be_run_gets_one_sentence(run, argv, says):
    code, out, err, asked = run(*argv)
    assert (code, out, asked) == (2, "", [])
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err
