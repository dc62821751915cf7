"""Sequences that begin alike compute their common tokens once, give the tokens they would give alone, and no page that somebody
reads is ever written, given out or freed."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gemma4_flex.page_table import PageTable
from gemma4_flex.params import SamplingParams
from gemma4_flex.prefix import Chain, Group, page_key, root_key
from gemma4_flex.scheduler import RequestRefusedError, Scheduler
from gemma4_flex.sequence import Sequence
from tests.scheduler_rig import FULL, PAGE, SLIDING, WINDOW, Rig, next_token, prompt_of, solo_run

# ---- keys -----------------------------------------------------------------------------------------------------------


def test_a_key_says_the_root_every_token_up_to_the_pages_end_and_where_pages_end():
    def last(tokens: list[int], root: bytes = root_key("epoch", 0), size: int = 4) -> bytes:
        return Chain(root, size).keys(tokens, len(tokens))[-1]
    tokens = list(range(2, 14))
    keys = [last(tokens), last(tokens, root_key("epoch", 1)), last(tokens, root_key("group", 0)), last(tokens, size=2)]
    keys += [last(tokens[:-1]), last([2 + 2**32, *tokens[1:]]), last([tokens[1], tokens[0], *tokens[2:]])]
    keys += [last([*tokens[:4], *tokens[4:8][::-1], *tokens[8:]])]
    keys += [last([*tokens[:n], 99, *tokens[n + 1 :]]) for n in range(12)]
    assert len(set(keys)) == len(keys)
    assert last(list(tokens)) == last(tokens)


def test_a_chain_goes_on_from_what_it_knows_and_a_page_that_is_not_full_is_not_part_of_it():
    tokens = prompt_of(30)
    grown = Chain(root_key("epoch", 0), 4)
    for cut in (3, 9, 4, 30, 12, 17):
        keys = grown.keys(tokens, cut)
        assert keys == Chain(root_key("epoch", 0), 4).keys(tokens[:cut], cut) and len(keys) == -(-cut // 4)
    assert page_key(keys[3], tokens[16:17]) == keys[4]


# ---- the prefix cache -----------------------------------------------------------------------------------------------


def run(rig: Rig, prompt: list[int], **params) -> Sequence:
    """One more request on the rig, alone to its end."""
    params = {"max_new_tokens": 6, "ignore_eos": True} | params
    sequence = rig.add(prompt, **params)
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    return sequence


def wide(**options) -> Rig:
    """A rig whose sliding pool keeps a good deal."""
    return Rig(**{"prefix_cache": True, "sliding_pages": 60, "full_pages": 60} | options)


@pytest.mark.parametrize("budget", [1, 3, PAGE, WINDOW + 1, 64])
def test_the_same_prompt_again_computes_what_is_left_of_its_last_page(budget):
    rig = wide(budget=budget)
    for length in (1, 2, PAGE, PAGE + 1, 2 * PAGE, 23, 24, 25):
        prompt, rows = prompt_of(length), rig.device.num_rows
        cold = run(rig, prompt)
        between = rig.device.num_rows
        warm = run(rig, prompt)
        assert (cold.num_cached, warm.num_cached) == (0, (length - 1) // PAGE * PAGE)
        assert between - rows - (rig.device.num_rows - between) == warm.num_cached, "hits are tokens that were not computed"
        assert warm.output_ids == cold.output_ids


def test_a_turn_of_a_conversation_takes_over_the_answer_before_it_too():
    rig = wide()
    first = run(rig, prompt_of(9), max_new_tokens=12)
    second = run(rig, [*first.token_ids, 7, 8, 9])
    assert second.num_cached == 20, "of the 21 tokens the last was returned, never computed"


@pytest.mark.parametrize("common", range(0, 25))
def test_what_begins_alike_and_then_parts_is_taken_over_up_to_the_page_where_it_parts(common):
    rig = wide()
    prompt = prompt_of(24)
    run(rig, prompt)
    other = [*prompt[:common], *(token % 40 + 3 for token in prompt[common:])]
    assert [a == b for a, b in zip(prompt, other)].index(False) == common if common < 24 else other == prompt
    assert run(rig, other).num_cached == min(common, 23) // PAGE * PAGE


def test_without_the_flag_nothing_is_published_or_hashed(monkeypatch):
    monkeypatch.setattr("gemma4_flex.prefix.page_key", lambda *_: pytest.fail("hashed"))
    rig = Rig()
    assert [run(rig, prompt_of(24)).num_cached for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("cut", [8, 12, 16])
def test_sliding_keys_that_are_gone_are_computed_anew_although_full_attention_has_them(cut):
    """B33. A window of 6 on pages of 4 needs the two pages before the cut. One of them is lost, so a shorter cut is used."""
    rig = wide()
    prompt = prompt_of(20)
    cold = run(rig, prompt)
    sliding = rig.tables[SLIDING]
    keys = cold.chain.keys(prompt, 20)
    sliding.unpublish(keys[cut // PAGE - 1 :])
    rig.check_between_steps()
    warm = run(rig, prompt)
    assert warm.num_cached == cut - PAGE
    assert warm.output_ids == cold.output_ids
    assert run(rig, prompt).num_cached == 16, "the second time has published them again"
    sliding.unpublish(keys[:2])
    assert run(rig, prompt).num_cached == 16, "pages that no window at the cut reaches into are not asked for"


def test_a_full_page_that_is_gone_ends_the_prefix():
    rig = wide()
    prompt = prompt_of(20)
    rig.tables[FULL].unpublish([run(rig, prompt).chain.keys(prompt, 20)[2]])
    assert run(rig, prompt).num_cached == 8


def test_a_key_never_outlives_what_its_page_holds():
    """B35: six pages, twenty other prompts, and the first again; every key's page holds what the key was made of."""
    for seed in range(6):
        rng = random.Random(seed)
        rig = Rig(prefix_cache=True, full_pages=1 + 6, sliding_pages=1 + 6, batch=2, budget=16)
        first = run(rig, prompt_of(15, seed), max_new_tokens=4)
        made_of = {}
        for _ in range(20):
            other = run(rig, prompt_of(rng.randrange(1, 20), rng.randrange(100)), max_new_tokens=4)
            for sequence in (first, other):
                tokens = sequence.token_ids
                keys = sequence.chain.keys(tokens, len(tokens) // PAGE * PAGE)
                made_of |= {key: tokens[n * PAGE : (n + 1) * PAGE] for n, key in enumerate(keys)}
            for kind, table in rig.tables.items():
                for key, page in table._published.items():
                    held = [rig.device.pool[kind][page, i][1] for i in range(PAGE)]
                    assert held == made_of[key], "a key leads to a page that was given to another"
        again = run(rig, first.prompt_ids, max_new_tokens=4)
        assert again.output_ids == first.output_ids


def test_what_was_used_least_recently_is_given_up_first_and_a_prefix_from_its_end():
    rig = Rig(prefix_cache=True, full_pages=1 + 12, sliding_pages=40, batch=1)
    prompts = [prompt_of(12, seed) for seed in range(3)]
    for prompt in prompts:
        run(rig, prompt, max_new_tokens=5)      # 16 computed, on 4 pages
    run(rig, prompts[0], max_new_tokens=1)      # so the second is the oldest now
    run(rig, prompt_of(11, 9), max_new_tokens=1)
    assert [rig.tables[FULL].leading(Chain(root_key("epoch", 0), PAGE).keys(p, 12)) for p in prompts] == [3, 2, 3]


def test_pages_in_use_are_shared_and_not_allocated_again():
    rig = wide(batch=3, budget=64)
    prompt = prompt_of(21)
    first = rig.add(prompt, max_new_tokens=20, ignore_eos=True)
    rig.step()
    free = rig.tables[FULL].num_free
    others = [rig.add([*prompt, n], max_new_tokens=20, ignore_eos=True) for n in (3, 4)]
    rig.step()
    assert [s.num_cached for s in others] == [20, 20] and first.num_cached == 0
    assert free - rig.tables[FULL].num_free == 2, "one page each, for their own last token"
    assert rig.scheduler.pages_shared == {FULL: 2 * 5, SLIDING: 2 * 2}
    held = [[page for _, page in rig.tables[FULL].held(s.slot)] for s in (first, *others)]
    assert held[0][:5] == held[1][:5] == held[2][:5] and len({pages[5] for pages in held}) == 3
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()


def test_shared_pages_let_more_in_than_the_pool_would_hold_of_their_own():
    rig = Rig(prefix_cache=True, full_pages=1 + 14, sliding_pages=80, batch=4, budget=64)
    prompt = prompt_of(32)
    run(rig, prompt, max_new_tokens=1)
    sequences = [rig.add([*prompt, n], max_new_tokens=3, ignore_eos=True) for n in range(2, 6)]
    rig.step()
    assert all(s.slot is not None for s in sequences), "8 pages together and one each, with a page to spare"
    rig.run()
    rig.check_end()
    assert rig.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("kind", "least"), [(FULL, 2), (SLIDING, 3)])
@pytest.mark.parametrize("spare", range(5))
def test_admission_asks_for_the_pages_that_nobody_holds_and_the_one_of_headroom(kind, least, spare):
    """22 tokens, of which 20 are there: a page for the rest, and one that it will need. Of the two pages in view of a window at
    20, the first one has let go of the earlier, so that it comes out of what is free; it is the last to be given to others."""
    rig = wide(batch=3, full_pages=20, sliding_pages=18, budget=64)
    prompt = prompt_of(21)
    rig.add(prompt, max_new_tokens=20, ignore_eos=True)
    rig.step()
    rig.add([*prompt, 3], max_new_tokens=20, ignore_eos=True)
    table = rig.tables[kind]
    table.extend(3, (table.num_free - spare) * PAGE)
    assert (rig.scheduler._next_admission(4) is not None) == (spare >= least)


def test_a_sequence_that_was_preempted_takes_its_own_pages_back():
    rig = Rig(prefix_cache=True, full_pages=1 + 8, sliding_pages=60, batch=2, budget=64)
    older, younger = (rig.add(prompt_of(10, seed), max_new_tokens=12, ignore_eos=True) for seed in (0, 1))
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert younger.num_preemptions and younger.num_cached > 0 and not older.num_preemptions


def test_new_weights_take_over_nothing_of_the_old_and_going_back_nothing_of_either():
    """B38: each epoch's first run is cold, and the device says so of every key that is read."""
    rig = wide()
    prompt = prompt_of(24)
    roots = set()
    for epoch in range(3):
        cold, warm = run(rig, prompt), run(rig, prompt)
        assert (cold.num_cached, warm.num_cached) == (0, 20)
        roots.add(cold.chain.root)
        assert len(roots) == epoch + 1, "keys of two epochs could not meet, were one left behind"
        rig.refresh()
        assert not any(table._published for table in rig.tables.values())
        assert all(len(table.free_pages) == table.n_pages - 1 for table in rig.tables.values())


def test_what_runs_through_forgetting_publishes_nothing_under_the_new_epoch():
    """The weights' owner preempts what runs; should it not, the old pages stay with their owner and are not found."""
    rig = wide(batch=1)
    sequence = rig.add(prompt_of(10), max_new_tokens=20, ignore_eos=True)
    rig.step()
    rig.scheduler.forget_prefixes(1)
    while not sequence.is_finished:
        rig.step()
    assert not any(table._published for table in rig.tables.values())
    rig.check_end()


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_and_serves_others():
    rig = wide()
    prompt = prompt_of(20)
    run(rig, prompt)
    assert run(rig, prompt, prompt_logprobs=0).num_cached == 0
    rig.refresh()
    run(rig, prompt, prompt_logprobs=0)
    assert run(rig, prompt).num_cached == 16


def test_keys_of_a_sequence_whose_numbers_broke_are_taken_back_and_only_its_own_pages_may_be_scrubbed():
    rig = wide(batch=2, budget=64)
    prompt = prompt_of(9)
    first = rig.add(prompt, max_new_tokens=20, ignore_eos=True)
    rig.step()
    broken = rig.add([*prompt, 5, 6, 7, 8], max_new_tokens=20, ignore_eos=True)
    rig.step()
    for table in rig.tables.values():
        shared = {page for _, page in table.held(first.slot)}
        mine = [page for _, page in table.held(broken.slot)]
        assert table.window or shared & set(mine)
        assert table.exclusive(broken.slot) == [page for page in mine if page not in shared]
        assert not table._keys.keys() & set(mine)
        table.check()
    rig.scheduler.finish(broken.request_id, "non_finite")
    rig.sequences.remove(broken)
    rig.run()
    rig.check_end()


# ---- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, 2 * PAGE, 11, 24, 25])
@pytest.mark.parametrize("budget", [3, 64])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_a_group_computes_its_prompt_once(length, budget, decode_steps, prefix_cache):
    rig = wide(batch=4, budget=budget, decode_steps=decode_steps, prefix_cache=prefix_cache)
    group = rig.add_group(prompt_of(length), 4, max_new_tokens=9, ignore_eos=True)
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert [s.num_cached for s in group] == [0] + 3 * [length - 1]
    assert (rig.scheduler.group_hit_tokens, rig.scheduler.prefix_hit_tokens) == (3 * (length - 1), 0)
    assert rig.device.num_rows == length - 1 + 4 * 9, "a step a token, and the prompt but its last token once"
    assert length < 3 or len({tuple(s.output_ids) for s in group}) == 4, "or else this proves little"


def test_members_decode_as_soon_as_the_prompt_but_its_last_token_is_there_and_copy_a_page_that_is_not_full():
    rig = Rig(batch=4, budget=7, full_pages=60)
    first, *others = rig.add_group(prompt_of(15), 4, max_new_tokens=9, ignore_eos=True)
    behind = rig.add(prompt_of(3), max_new_tokens=9, ignore_eos=True)
    assert [s.sequence for s in rig.step().prefill] == [first], "nobody overtakes those who wait for it"
    assert [s.sequence for s in rig.step().prefill] == [first] and list(rig.scheduler.waiting) == [*others, behind]
    plan = rig.step()
    assert (plan.prefill, plan.decode) == ((), (first, *others)) and rig.device.num_copies == 2 * 3
    held = [[page for _, page in rig.tables[FULL].held(s.slot)] for s in (first, *others)]
    assert len({tuple(pages[:3]) for pages in held}) == 1 and len({pages[3] for pages in held}) == 4
    assert rig.scheduler.pages_shared == {FULL: 3 * 3, SLIDING: 3 * 1}
    assert not any(table._published for table in rig.tables.values()), "the last has what it needs"
    rig.run()
    rig.check_end()


def test_a_prompt_that_ends_with_the_first_token_of_a_page_needs_no_copy():
    rig = Rig(batch=4, full_pages=60)
    group = rig.add_group(prompt_of(3 * PAGE + 1), 4, max_new_tokens=3, ignore_eos=True)
    rig.run()
    rig.check_end()
    assert rig.device.num_copies == 0 and [s.num_cached for s in group] == [0, 12, 12, 12]


def test_a_last_page_that_nobody_holds_any_more_is_taken_and_not_copied():
    rig = Rig(batch=1)
    group = rig.add_group(prompt_of(11), 3, max_new_tokens=6, ignore_eos=True)
    rig.run()
    rig.check_end()
    assert rig.device.num_copies == 0 and [s.num_cached for s in group] == [0, 10, 10]


def test_a_group_larger_than_the_batch_is_served_and_its_pages_are_kept_for_who_still_waits():
    rig = Rig(batch=2, full_pages=60, sliding_pages=60)
    group = rig.add_group(prompt_of(18), 7, max_new_tokens=5, ignore_eos=True)
    rig.run()
    rig.check_end()
    assert [s.num_cached for s in group] == [0] + 6 * [17]


def test_the_smallest_pools_serve_a_group_one_after_the_other():
    """Three positions on one page: the second sample has nowhere to copy it to."""
    rig = Rig(full_pages=2, sliding_pages=2, batch=4)
    rig.add_group(prompt_of(3), 3, max_new_tokens=2, ignore_eos=True)
    rig.run()
    rig.check_end()


def test_groups_of_the_same_prompt_share_nothing_with_each_other_or_with_anyone_without_the_cache():
    rig = Rig(batch=6, full_pages=90, sliding_pages=90, budget=64)
    groups = [rig.add_group(prompt_of(15), 2, max_new_tokens=9, ignore_eos=True) for _ in range(2)]
    alone = rig.add(prompt_of(15), max_new_tokens=9, ignore_eos=True)
    rig.run()
    rig.check_end()
    assert [s.num_cached for group in groups for s in group] == [0, 14, 0, 14] and alone.num_cached == 0


def test_when_the_pages_were_given_to_others_the_next_member_computes_them_anew_for_the_rest():
    rig = Rig(batch=4, full_pages=60, sliding_pages=60, budget=64)
    first, second, third = rig.add_group(prompt_of(15), 3, max_new_tokens=5, ignore_eos=True)
    rig.step()
    rig.tables[SLIDING].unpublish(first.chain.keys(first.prompt_ids, 14)[2:3])
    assert [s.sequence for s in rig.step().prefill] == [second]
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert [s.num_cached for s in (first, second, third)] == [0, 8, 14]


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_who_waited_for_a_member_that_ended_while_it_computed_computes_for_itself(prefix_cache):
    rig = wide(batch=4, budget=4, prefix_cache=prefix_cache)
    first, *others = rig.add_group(prompt_of(15), 3, max_new_tokens=5, ignore_eos=True)
    rig.step()
    rig.scheduler.abort(first.request_id)
    rig.run()
    rig.check_end()
    assert [s.num_cached for s in others] == [4 if prefix_cache else 0, 14]
    lone, gone = rig.add_group(prompt_of(15, 1), 2, max_new_tokens=5, ignore_eos=True)
    rig.scheduler.abort(gone.request_id)
    rig.run()
    rig.check_end()
    assert lone.num_cached == 0
    assert prefix_cache or not any(table._published for table in rig.tables.values())


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_new_weights_in_the_middle_of_a_group_compute_its_prompt_once_more(prefix_cache):
    rig = wide(batch=4, budget=8, prefix_cache=prefix_cache)
    group = rig.add_group(prompt_of(15), 3, max_new_tokens=12, ignore_eos=True)
    for steps in (1, 4):
        for _ in range(steps):
            rig.step()
        rig.refresh()
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert sorted(s.num_cached for s in group)[0] == 0
    assert all(s.num_cached >= 14 for s in group[1:]), "prompt taken over, own tokens computed"


def test_the_first_sample_gives_prompt_log_probabilities_and_the_others_share_its_pages():
    rig = wide(batch=4)
    prompt = prompt_of(15)
    run(rig, prompt)
    group = rig.add_group(prompt, 3, max_new_tokens=5, ignore_eos=True, prompt_logprobs=1)
    rig.run()
    rig.check_end()
    assert [s.num_cached for s in group] == [0, 14, 14]


@pytest.mark.parametrize("meanwhile", ["nothing", "the source's owner ends", "the copy's owner ends", "both end"])
@pytest.mark.parametrize("full_pages", [1 + 5, 1 + 6, 60])
def test_a_copy_that_was_planned_and_dropped_reads_its_source_or_is_not_made(meanwhile, full_pages):
    """Between a plan and its copies the source is nobody else's to write, whoever ends; and all fits as it would alone."""
    rig = Rig(batch=4, full_pages=full_pages, sliding_pages=60, budget=64)
    first, second = rig.add_group(prompt_of(7), 2, max_new_tokens=10, ignore_eos=True)
    other = rig.add(prompt_of(9), max_new_tokens=9, ignore_eos=True)
    rig.step()
    rig.scheduler.plan()      # as if the step had raised
    if second.slot is not None:
        assert rig.tables[FULL].num_copies == 1
        rig.tables[FULL].check()
    for owner, sequence in (("source's", first), ("copy's", second)):
        if owner in meanwhile or meanwhile == "both end":
            rig.scheduler.abort(sequence.request_id)
            rig.tables[FULL].check()
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert other.is_finished


def test_a_step_that_ran_before_its_copies_is_an_error():
    rig = Rig(batch=2)
    rig.add_group(prompt_of(7), 2, max_new_tokens=9, ignore_eos=True)
    rig.step()
    plan = rig.scheduler.plan()
    with pytest.raises(AssertionError, match="before its page copies"):
        rig.scheduler.complete(plan, {s.request_id: 5 for s in plan.decode})


# ---- under load -----------------------------------------------------------------------------------------------------


class SharingMachine(RuleBasedStateMachine):
    """Requests and groups that begin alike come, run, are aborted and see new weights, in pools too small for them all."""

    rig_options: ClassVar[dict] = {}

    def __init__(self):
        super().__init__()
        self.rig = Rig(**self.rig_options)

    def prompt(self, length: int, seed: int) -> list[int]:
        return (prompt_of(8, seed % 2) + prompt_of(9, seed // 2) + prompt_of(30, seed))[:length]

    @rule(length=st.integers(1, 30), new=st.integers(1, 14), seed=st.integers(0, 5), n=st.integers(1, 5), scored=st.booleans())
    def submit(self, length, new, seed, n, scored):
        params = {"max_new_tokens": new, "ignore_eos": seed % 2 == 0, "prompt_logprobs": 0 if scored else None}
        try:
            if n == 1:
                self.rig.add(self.prompt(length, seed), **params)
            else:
                self.rig.add_group(self.prompt(length, seed), n, **params)
        except RequestRefusedError:
            assert self.rig.tables[FULL].least_pages(length + new - 1) > self.rig.tables[FULL].n_pages - 1

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            if self.rig.scheduler.has_work:
                self.rig.step()

    @rule(index=st.integers(0, 50))
    def cancel(self, index):
        if self.rig.scheduler.has_work:
            self.rig.scheduler.abort(self.rig.sequences[index % len(self.rig.sequences)].request_id)

    @rule(index=st.integers(0, 50), ends=st.integers(0, 2))
    def drop_a_plan(self, index, ends):
        """As if the step had raised, and some requests were given up for it."""
        if self.rig.scheduler.has_work:
            computed = {s: s.num_computed for s in self.rig.scheduler.running}
            self.rig.num_lost += sum(computed[s] for s in self.rig.scheduler.plan().preempted)
            for n in range(ends):
                self.cancel(index + n)
            self.steps(1)

    @rule()
    def refresh(self):
        self.rig.refresh()

    @rule(seed=st.integers(0, 9))
    def shuffle_free_pages(self, seed):
        for table in self.rig.tables.values():
            random.Random(seed).shuffle(table.free_pages)

    @invariant()
    def accounts_balance(self):
        self.rig.check_between_steps()
        self.rig.check_tokens_add_up()

    def teardown(self):
        self.rig.run()
        self.rig.check_end()
        self.rig.check_tokens_add_up()
        self.rig.refresh()
        assert all(not any(table._owners) for table in self.rig.tables.values())


def machine(**rig_options):
    case = type("Machine", (SharingMachine,), {"rig_options": rig_options}).TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None, derandomize=True,
                             suppress_health_check=[HealthCheck.too_slow])
    return case


TestGroupsOnShortPools = machine(full_pages=1 + 11, sliding_pages=1 + 7, batch=4, budget=16)
TestCacheOnShortPools = machine(full_pages=1 + 11, sliding_pages=1 + 7, batch=4, budget=16, prefix_cache=True)
TestCacheAndManySteps = machine(full_pages=1 + 16, sliding_pages=1 + 12, batch=4, budget=7, prefix_cache=True, decode_steps=5)
TestGroupsAndManySteps = machine(full_pages=1 + 13, batch=3, budget=5, decode_steps=3)
TestCacheWithRoom = machine(full_pages=60, sliding_pages=60, batch=5, budget=16, prefix_cache=True)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_three_hundred_operations_on_twelve_pages(seed, prefix_cache):
    """B43: submit, cancel, refresh and finish; every output is its solo run's, no page that is written has two owners (the fake
    device sees to both), and every owner is accounted for in the end."""
    rng = random.Random(seed)
    rig = Rig(full_pages=12, sliding_pages=12, batch=4, budget=rng.choice([3, 16]), decode_steps=rng.choice([1, 4]),
              prefix_cache=prefix_cache)
    for _ in range(300):
        action = rng.random()
        if action < 0.15:
            prompt = (prompt_of(9, rng.randrange(2)) + prompt_of(20, rng.randrange(3)))[: rng.randrange(1, 24)]
            params = {"max_new_tokens": rng.randrange(1, 18)}
            rig.add_group(prompt, rng.randrange(2, 6), **params) if rng.random() < 0.5 else rig.add(prompt, **params)
        elif action < 0.22 and rig.sequences:
            rig.scheduler.abort(rng.choice(rig.sequences[-8:]).request_id)
        elif action < 0.24:
            rig.refresh()
        elif rig.scheduler.has_work:
            rig.step()
    rig.run()
    rig.check_end()
    rig.check_tokens_add_up()
    assert rig.scheduler.num_preemptions and rig.scheduler.group_hit_tokens and rig.device.num_copies
    assert bool(rig.scheduler.prefix_hit_tokens) == prefix_cache
    rig.refresh()
    assert all(not any(table._owners) for table in rig.tables.values())


def test_samples_differ_in_the_fake_model_or_shared_pages_would_prove_nothing():
    assert next_token([3, 4], [4], 0) != next_token([3, 4], [4], 1)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    assert len({tuple(solo_run(prompt_of(9), params, 64, sample)[0]) for sample in range(6)}) == 6


def test_one_attention_type_is_enough():
    """Models without a window, or without full attention, have one group."""
    for window in (None, WINDOW):
        table = PageTable(FULL, n_pages=30, page_size=PAGE, window=window, num_slots=4, max_seq_length=64)
        scheduler = Scheduler({FULL: table}, max_batch_size=3, max_seq_length=64, max_prefill_tokens=64, prefix_cache=True)
        for request_id in range(2):
            params = SamplingParams(max_new_tokens=3)
            sequence = Sequence(request_id, prompt_of(20), params, stop_ids=frozenset(), max_seq_length=64)
            scheduler.add(sequence)
            while scheduler.has_work:
                scheduler.complete(scheduler.plan(), {request_id: 5})
            assert sequence.num_cached == 16 * request_id


def test_a_group_of_one_shares_with_nobody_and_publishes_nothing():
    rig = Rig()
    rig.add(prompt_of(15), Group(0), 0, max_new_tokens=5)
    rig.step()
    assert not any(table._published for table in rig.tables.values())
    rig.run()
    rig.check_end()
