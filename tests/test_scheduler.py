from __future__ import annotations

import random
import time
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gemma4_flex.page_table import PageTable
from gemma4_flex.params import SamplingParams
from gemma4_flex.scheduler import RequestRefusedError, Scheduler, Span
from gemma4_flex.sequence import Sequence
from tests.scheduler_rig import FULL, PAGE, SLIDING, WINDOW, Rig, prompt_of, solo_run


def test_the_fake_model_stops_for_every_reason():
    """The comparison with solo runs is worth something only if outputs vary and end in different ways."""
    params = SamplingParams(max_new_tokens=30)
    runs = [solo_run(prompt_of(n, seed), params, 64) for n in range(1, 60) for seed in (0, 1)]
    assert {reason for _, reason in runs} == {"stop", "length"}
    assert len({tuple(output) for output, _ in runs}) > 100


@pytest.mark.parametrize("budget", [1, WINDOW - 1, WINDOW, WINDOW + 1, 3, 4, 9, 15, 64])
def test_tokens_do_not_depend_on_how_prefill_was_chunked(budget):
    rig = Rig(budget=budget, batch=2)
    for length in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 15, 40):
        rig.add(prompt_of(length), max_new_tokens=10)
    rig.run()
    rig.check_end()
    assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize("window_position", range(12))
def test_a_sliding_pool_of_the_least_size_holds_every_windows_keys(window_position):
    rig = Rig(batch=1, budget=1, sliding_pages=1 + -(-(WINDOW - 1) // PAGE) + 1)
    rig.add(prompt_of(1 + window_position), max_new_tokens=30, ignore_eos=True)
    rig.run()
    rig.check_end()


def test_prefill_spans_cover_each_position_once_and_only_the_last_wants_logits():
    rig = Rig(budget=6)
    sequence = rig.add(prompt_of(16), max_new_tokens=1)
    spans = [rig.step().prefill for _ in range(3)]
    assert [(s.start, s.count, s.wants_logits) for (s,) in spans] == [(0, 6, False), (6, 6, False), (12, 4, True)]
    assert sequence.finish_reason == "length"
    assert spans[2][0].wants_logits, "still true after the token it yielded was appended"


def test_the_last_prompt_token_left_over_by_a_chunk_is_a_decode():
    rig = Rig(budget=6)
    sequence = rig.add(prompt_of(7), max_new_tokens=2)
    assert rig.step().prefill == (Span(sequence, 0, 6),)
    plan = rig.step()
    assert (plan.prefill, plan.decode) == ((), (sequence,))
    rig.run()
    rig.check_end()


def test_a_prompt_of_one_token_is_a_prefill():
    rig = Rig()
    rig.add(prompt_of(1), max_new_tokens=2)
    assert [(span.start, span.count, span.wants_logits) for span in rig.step().prefill] == [(0, 1, True)]


def test_one_step_prefills_several_prompts_and_decodes_beside_them():
    rig = Rig(budget=16, batch=4)
    first = rig.add(prompt_of(5), max_new_tokens=9, ignore_eos=True)
    rig.step()
    rest = [rig.add(prompt_of(n), max_new_tokens=9) for n in (6, 7, 8)]
    plan = rig.step()
    assert plan.decode == (first,)
    assert [(span.sequence, span.count) for span in plan.prefill] == [(rest[0], 6), (rest[1], 7), (rest[2], 3)]
    rig.run()
    rig.check_end()


def test_admission_waits_for_slots_and_is_first_come_first_served():
    rig = Rig(batch=2, budget=64)
    sequences = [rig.add(prompt_of(8, seed), max_new_tokens=4, ignore_eos=True) for seed in range(4)]
    plan = rig.step()
    assert [span.sequence for span in plan.prefill] == sequences[:2]
    assert list(rig.scheduler.waiting) == sequences[2:]
    rig.run()
    rig.check_end()


def test_a_short_prompt_does_not_overtake_a_long_one_that_waits_for_pages():
    rig = Rig(full_pages=1 + 10, batch=4, budget=64)
    rig.add(prompt_of(24), max_new_tokens=2, ignore_eos=True)
    long = rig.add(prompt_of(30), max_new_tokens=2)
    short = rig.add(prompt_of(2), max_new_tokens=2)
    rig.step()
    assert list(rig.scheduler.waiting) == [long, short]
    rig.run()
    rig.check_end()


def test_admission_keeps_one_page_of_headroom_for_who_will_need_it():
    for full_pages, new_tokens, admitted in ((1 + 2 + 2, 2, 1), (1 + 2 + 2 + 1, 2, 2), (1 + 2 + 2, 1, 2), (1 + 2 + 1, 1, 1)):
        rig = Rig(full_pages=full_pages, batch=2, budget=64)
        for seed in (0, 1):
            rig.add(prompt_of(8, seed), max_new_tokens=new_tokens)
        assert len(rig.step().prefill) == admitted


def test_a_long_prompt_is_admitted_beside_others_by_the_window_not_its_length():
    rig = Rig(full_pages=100, batch=2, budget=8, max_seq_length=200)
    rig.add(prompt_of(4), max_new_tokens=60, ignore_eos=True)
    rig.step()
    long = rig.add(prompt_of(150), max_new_tokens=3)
    assert rig.tables[SLIDING].n_pages * PAGE < 150
    assert rig.step().prefill == (Span(long, 0, 8),)
    rig.run()
    rig.check_end()


def test_what_was_preempted_is_not_admitted_in_the_same_step():
    """A wide window frees more pages than the next page crossing takes, and a small chunk would fit right away."""
    tables = {
        SLIDING: PageTable(SLIDING, n_pages=1 + 9, page_size=4, window=16, num_slots=3, max_seq_length=64),
        FULL: PageTable(FULL, n_pages=99, page_size=4, window=None, num_slots=3, max_seq_length=64),
    }
    scheduler = Scheduler(tables, max_batch_size=2, max_seq_length=64, max_prefill_tokens=4)
    params = SamplingParams(max_new_tokens=40)
    for request_id in (0, 1):
        scheduler.add(Sequence(request_id, prompt_of(16), params, stop_ids=frozenset(), max_seq_length=64))
    plan = scheduler.plan()
    while not plan.preempted:
        scheduler.complete(plan, {0: 5, 1: 5})
        plan = scheduler.plan()
    assert scheduler._next_admission(4) is not None, "or else this proves nothing"
    assert plan.prefill == () and plan.preempted == (scheduler.waiting[0],)


def test_a_request_alone_may_fill_the_whole_pool():
    rig = Rig(full_pages=1 + 5, budget=64)
    # 21 tokens, of which the last is never computed: 20 positions on 5 pages.
    rig.add(prompt_of(13), max_new_tokens=8, ignore_eos=True)
    rig.run()
    rig.check_end()


def test_a_short_pool_preempts_the_youngest_and_every_request_still_ends_with_its_tokens():
    rig = Rig(full_pages=1 + 7, batch=3, budget=64)
    sequences = [rig.add(prompt_of(6, seed), max_new_tokens=16, ignore_eos=True) for seed in range(3)]
    plan = rig.step()
    while not plan.preempted:
        plan = rig.step()
    assert plan.preempted == (sequences[2],)
    assert rig.scheduler.waiting[0] is sequences[2]
    kept = list(sequences[2].output_ids)
    assert kept, "what it had generated is kept"
    rig.run()
    rig.check_end()
    assert sequences[2].output_ids[: len(kept)] == kept
    assert rig.scheduler.num_preemptions == sum(s.num_preemptions for s in sequences) > 0
    assert sequences[0].num_preemptions == 0, "the oldest is never preempted"


def test_a_preempted_request_prefills_prompt_and_output_together():
    rig = Rig(full_pages=1 + 7, batch=2, budget=64)
    older, younger = (rig.add(prompt_of(10, seed), max_new_tokens=14, ignore_eos=True) for seed in (0, 1))
    while not younger.num_preemptions:
        rig.step()
    kept = len(younger.output_ids)
    assert kept > 0
    while younger.slot is None:
        plan = rig.step()
    assert [(s.sequence, s.start, s.count) for s in plan.prefill] == [(younger, 0, 10 + kept)]
    assert older.is_finished
    rig.run()
    rig.check_end()


def test_a_short_sliding_pool_cuts_chunks_and_still_ends_with_the_same_tokens():
    least = 1 + -(-(WINDOW - 1) // PAGE) + 1
    for sliding_pages in range(least, least + 8):
        rig = Rig(sliding_pages=sliding_pages, batch=3, budget=64)
        for seed, length in enumerate((30, 3, 17, 41)):
            rig.add(prompt_of(length, seed), max_new_tokens=12)
        rig.run()
        rig.check_end()


def test_a_pool_sized_by_sliding_pool_pages_never_cuts_a_chunk():
    rng = random.Random(5)
    for budget in (1, 3, 5, 16, 33):
        rig = Rig(full_pages=400, batch=5, budget=budget)
        for seed in range(12):
            rig.add(prompt_of(rng.randrange(1, 50), seed), max_new_tokens=rng.randrange(1, 14))
        while rig.scheduler.has_work:
            plan = rig.step()
            unfinished = any(not span.wants_logits for span in plan.prefill)
            assert not unfinished or sum(span.count for span in plan.prefill) == budget
        rig.check_end()
        assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    "prompt_length, max_new_tokens, message",
    [
        (0, 5, "empty prompt"),
        (64, 1, "max_seq_length=64: shorten the prompt or raise"),
        (90, 1, "max_seq_length=64: shorten the prompt or raise"),
        (20, 22, "raise n_pages to at least 12, or lower max_new_tokens"),
        (50, 1, "raise n_pages to at least 14"),
    ],
)
def test_a_request_that_could_never_run_is_refused_with_the_fix_and_leaves_no_trace(
    prompt_length, max_new_tokens, message
):
    rig = Rig(full_pages=1 + 10)
    with pytest.raises(RequestRefusedError, match=message) as caught:
        rig.add(prompt_of(prompt_length), max_new_tokens=max_new_tokens)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert not rig.scheduler.has_work and isinstance(caught.value, ValueError)
    rig.add(prompt_of(20), max_new_tokens=21)
    rig.run()
    rig.check_end()


def test_a_long_prompt_is_not_refused_for_pages_that_a_sliding_group_recycles():
    rig = Rig(sliding_pages=1 + 3, batch=1, budget=5)
    rig.add(prompt_of(50), max_new_tokens=5)
    with pytest.raises(RequestRefusedError, match=r"2 pages of 4 tokens in the sliding_attention group, which has 1:"):
        Rig(sliding_pages=1 + 1).add(prompt_of(5), max_new_tokens=1)
    rig.run()
    rig.check_end()


def test_a_request_longer_than_max_seq_length_ends_with_length_there():
    rig = Rig(max_seq_length=20)
    sequence = rig.add(prompt_of(15), max_new_tokens=100, ignore_eos=True)
    rig.run()
    rig.check_end()
    assert (sequence.num_tokens, sequence.finish_reason) == (20, "length")


@pytest.mark.parametrize("when", ["waiting", "prefilling", "decoding", "in a step", "preempted"])
def test_abort_frees_everything_at_once_and_hurts_nobody(when):
    rig = Rig(full_pages=1 + 8, batch=2, budget=4)
    neighbour = rig.add(prompt_of(9), max_new_tokens=12, ignore_eos=True)
    victim = rig.add(prompt_of(11), max_new_tokens=12, ignore_eos=True)
    reached = {
        "waiting": lambda: victim.slot is None,
        "prefilling": lambda: 0 < victim.num_computed < 10,
        "decoding": lambda: len(victim.output_ids) > 1,
        "in a step": lambda: len(victim.output_ids) > 1,
        "preempted": lambda: victim.num_preemptions > 0 and victim.slot is None,
    }[when]
    while not reached():
        rig.step()
    aborted = []
    if when == "in a step":
        rig.step(meanwhile=lambda: aborted.append(rig.scheduler.abort(victim.request_id)))
    else:
        aborted.append(rig.scheduler.abort(victim.request_id))
    assert aborted == [True] and victim.finish_reason == "abort" and victim.slot is None
    assert victim not in rig.scheduler.running and victim not in rig.scheduler.waiting
    rig.check_between_steps()
    assert not rig.scheduler.abort(victim.request_id), "it has ended already"
    assert not rig.scheduler.abort(12345), "nobody knows it"
    rig.run()
    rig.check_end()
    assert neighbour.finish_reason == "length"


def test_a_finish_from_outside_keeps_its_reason():
    rig = Rig()
    sequence = rig.add(prompt_of(4), max_new_tokens=30, ignore_eos=True)
    rig.step()
    assert rig.scheduler.finish(sequence.request_id, "stop")
    assert sequence.finish_reason == "stop" and not rig.scheduler.has_work


def test_a_plan_that_was_dropped_can_be_made_again():
    rig = Rig(batch=3, budget=20)
    for seed, length in enumerate((9, 9, 9, 3)):
        rig.add(prompt_of(length, seed), max_new_tokens=8, ignore_eos=True)
    for step in range(100):
        if not rig.scheduler.has_work:
            break
        if step % 2:
            rig.scheduler.plan()  # as if the step had raised
        rig.step()
    rig.check_end()


# ---- several decode steps in a row --------------------------------------------------------------------------------

def decoding(rig: Rig, *lengths: int, **params) -> list[Sequence]:
    """Sequences that have been prefilled and have no one waiting."""
    params = {"max_new_tokens": 20, "ignore_eos": True} | params
    sequences = [rig.add(prompt_of(n, seed), **params) for seed, n in enumerate(lengths)]
    while not all(s.is_decoding for s in sequences):
        rig.step()
    return sequences


@pytest.mark.parametrize("decode_steps", [1, 2, 3, 8, 50])
def test_tokens_do_not_depend_on_how_many_steps_run_at_once(decode_steps):
    for full_pages in (100, 17):
        rig = Rig(full_pages=full_pages, batch=3, budget=20, decode_steps=decode_steps)
        for seed, length in enumerate((9, 1, 20, 5, 13)):
            rig.add(prompt_of(length, seed), max_new_tokens=3 + 7 * seed, ignore_eos=seed % 2 == 0)
        rig.run()
        rig.check_end()


def test_as_many_steps_are_planned_as_some_sequence_still_needs():
    rig = Rig(decode_steps=8)
    first, second = decoding(rig, 5, 6)
    assert rig.step().steps == 8
    second.max_output = len(second.output_ids) + 2
    first.max_output = len(first.output_ids) + 3
    plan = rig.step()
    assert (plan.steps, plan.decode) == (3, (first, second))
    assert first.is_finished and second.is_finished


def test_pages_of_all_steps_are_held_before_the_first_and_none_for_the_token_that_is_only_returned():
    rig = Rig(decode_steps=8, batch=1)
    [sequence] = decoding(rig, 8, max_new_tokens=9)      # position 16 is the last drawn, and never computed
    plan = rig.scheduler.plan()
    assert plan.steps == 8
    assert [len(rig.tables[FULL].held(sequence.slot)), rig.tables[FULL].pages_needed(sequence.slot, 16)] == [4, 0]
    rig.run()
    rig.check_end()


def test_one_that_ends_before_the_others_holds_no_page_beyond_its_end():
    """The first can have two tokens more, up to max_seq_length; the second wants all eight steps."""
    rig = Rig(decode_steps=8, max_seq_length=16)
    first, second = decoding(rig, 13, 1)
    plan = rig.scheduler.plan()
    assert (plan.steps, plan.decode) == (8, (first, second))
    assert [len(rig.tables[FULL].held(s.slot)) for s in (first, second)] == [4, 3]
    rig.run()
    rig.check_end()
    assert (first.num_tokens, second.num_tokens) == (16, 16)


def test_no_steps_are_planned_ahead_where_a_prompt_is_prefilled_beside():
    rig = Rig(decode_steps=8, budget=4)
    decoding(rig, 3)
    rig.add(prompt_of(9), max_new_tokens=4)
    assert [rig.step().steps for _ in range(2)] == [1, 1]      # 4 and 4 of it; then its last token is a decode
    assert rig.step().steps > 1


@pytest.mark.parametrize("short", [FULL, SLIDING])
def test_where_pages_are_short_one_step_is_planned_and_nobody_is_preempted_for_a_later_one(short):
    """Two sequences of 6 tokens hold 2 pages each; 8 steps want 2 more each, and one is free."""
    pages = {"full_pages": 1 + 5} if short == FULL else {"sliding_pages": 1 + 5}
    rig = Rig(batch=2, decode_steps=8, **pages)
    sequences = decoding(rig, 5, 5, max_new_tokens=15)
    free = rig.tables[short].num_free
    plan = rig.scheduler.plan()
    assert (plan.steps, plan.decode, plan.preempted) == (1, tuple(sequences), ())
    assert [rig.tables[short].num_free, free] == [1, 1], "pages were taken that no step needs yet"
    rig.run()
    rig.check_end()


def test_a_plan_ahead_that_was_dropped_can_be_made_again():
    rig = Rig(decode_steps=8)
    decoding(rig, 5, 9)
    first, again = rig.scheduler.plan(), rig.scheduler.plan()
    assert (first.steps, first.decode) == (again.steps, again.decode) == (8, first.decode)
    rig.run()
    rig.check_end()


def test_one_that_stops_or_is_aborted_within_a_run_of_steps_frees_what_was_held_for_the_rest():
    rig = Rig(decode_steps=8, batch=2)
    first, second = decoding(rig, 5, 6)
    rig.step(meanwhile=lambda: rig.scheduler.abort(second.request_id))
    assert len(first.output_ids) == 9 and len(second.output_ids) == 1
    rig.run()
    rig.check_end()


def test_a_sliding_pool_for_many_steps_lets_every_run_be_a_full_one():
    rig = Rig(full_pages=400, batch=5, decode_steps=7, budget=16)
    for seed in range(5):
        rig.add(prompt_of(9 + seed, seed), max_new_tokens=30, ignore_eos=True)
    while rig.scheduler.has_work:
        plan = rig.step()
        if not plan.prefill:
            assert plan.steps == min(7, max(s.max_output - len(s.output_ids) + plan.steps for s in plan.decode))
    rig.check_end()
    assert rig.scheduler.num_preemptions == 0


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted, in pools too small for them all."""

    rig_options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.rig = Rig(**self.rig_options)

    @rule(length=st.integers(1, 30), new=st.integers(1, 14), seed=st.integers(0, 5), ignore_eos=st.booleans())
    def submit(self, length, new, seed, ignore_eos):
        try:
            self.rig.add(prompt_of(length, seed), max_new_tokens=new, ignore_eos=ignore_eos)
        except RequestRefusedError:
            full = self.rig.tables[FULL]
            assert full.least_pages(length + new - 1) > full.n_pages - 1

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            if self.rig.scheduler.has_work:
                self.rig.step()

    @rule(index=st.integers(0, 50), in_a_step=st.booleans())
    def cancel(self, index, in_a_step):
        if not self.rig.scheduler.has_work:
            return
        sequence = self.rig.sequences[index % len(self.rig.sequences)]
        if in_a_step:
            self.rig.step(meanwhile=lambda: self.rig.scheduler.abort(sequence.request_id))
        else:
            self.rig.scheduler.abort(sequence.request_id)
        assert sequence.is_finished

    @rule(seed=st.integers(0, 9))
    def shuffle_free_pages_and_slots(self, seed):
        for table in self.rig.tables.values():
            random.Random(seed).shuffle(table.free_pages)
        random.Random(seed).shuffle(self.rig.scheduler._free_slots)

    @invariant()
    def accounts_balance(self):
        self.rig.check_between_steps()

    def teardown(self):
        self.rig.run()
        self.rig.check_end()


def machine(**rig_options):
    case = type("Machine", (SchedulerMachine,), {"rig_options": rig_options}).TestCase
    case.settings = settings(
        max_examples=25,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return case


TestShortFullPool = machine(full_pages=1 + 11, batch=4, budget=16)
TestShortSlidingPool = machine(sliding_pages=1 + 6, batch=4, budget=16)
TestShortPoolsAndChunksOfOne = machine(full_pages=1 + 11, sliding_pages=1 + 4, batch=3, budget=1)
TestThreeStepsAtOnce = machine(full_pages=1 + 13, batch=3, budget=16, decode_steps=3)
TestEightStepsAtOnceOnShortPools = machine(full_pages=1 + 16, sliding_pages=1 + 9, batch=4, budget=16, decode_steps=8)


@pytest.mark.parametrize("decode_steps", [1, 5])
@pytest.mark.parametrize("budget", [1, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_a_thousand_operations_on_twelve_pages_leave_no_page_behind(budget, decode_steps):
    rng = random.Random(budget)
    rig = Rig(full_pages=12, sliding_pages=9, batch=4, budget=budget, decode_steps=decode_steps)
    for _ in range(1000):
        action = rng.random()
        if action < 0.12:
            rig.add(prompt_of(rng.randrange(1, 24), rng.randrange(9)), max_new_tokens=rng.randrange(1, 20))
        elif action < 0.16 and rig.sequences:
            rig.scheduler.abort(rng.choice(rig.sequences[-8:]).request_id)
        elif rig.scheduler.has_work:
            rig.step()
    rig.run()
    rig.check_end()
    assert rig.scheduler.num_preemptions > 0
    assert len(rig.sequences) > 80


def test_the_host_cost_of_a_step_is_not_quadratic_in_the_sequences_running():
    num_sequences = 1024
    tables = {
        FULL: PageTable(FULL, n_pages=60_000, page_size=32, window=None, num_slots=1025, max_seq_length=1024),
        SLIDING: PageTable(SLIDING, n_pages=60_000, page_size=32, window=64, num_slots=1025, max_seq_length=1024),
    }
    scheduler = Scheduler(tables, max_batch_size=num_sequences, max_seq_length=1024, max_prefill_tokens=10**6)
    for i in range(num_sequences):
        params = SamplingParams(max_new_tokens=800, ignore_eos=True)
        scheduler.add(Sequence(i, prompt_of(20 + i % 50), params, stop_ids=frozenset(), max_seq_length=1024))
    tokens = dict.fromkeys(range(num_sequences), 5)
    durations = []
    for _ in range(60):
        start = time.perf_counter()
        scheduler.complete(scheduler.plan(), tokens)
        durations.append(time.perf_counter() - start)
    # About 1 ms; a quadratic step would take more than 50. The least of many, for a machine that is busy otherwise.
    assert min(durations[1:]) < 0.010
