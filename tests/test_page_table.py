from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gemma4_flex.page_table import PageTable, sliding_pool_pages


def make(*, window=None, n_pages=9, page_size=4, num_slots=4, max_seq_length=64):
    kind = "full_attention" if window is None else "sliding_attention"
    return PageTable(
        kind,
        n_pages=n_pages,
        page_size=page_size,
        window=window,
        num_slots=num_slots,
        max_seq_length=max_seq_length,
    )


def apply_in_place(mirror, table):
    """What a device does with the changes, one after the other; returns the entries it wrote."""
    changes = table.drain_changes()
    for slot, logical, page in changes:
        if page:
            mirror[slot, logical] = page
        else:
            mirror.pop((slot, logical), None)
        assert len(set(mirror.values())) == len(mirror), "a page has two owners on the device"
    return [(slot, logical) for slot, logical, _ in changes]


def held_by_all(table):
    return {(slot, logical): page for slot in range(table.num_slots) for logical, page in table.held(slot)}


def test_pages_are_allocated_by_position_and_never_page_0():
    table = make()
    assert table.columns == 16 and table.num_free == 8
    assert [table.pages_needed(1, upto) for upto in (0, 1, 4, 5, 32)] == [0, 1, 1, 2, 8]
    table.extend(1, 5)
    assert [logical for logical, _ in table.held(1)] == [0, 1]
    assert [table.pages_needed(1, upto) for upto in (5, 8, 9)] == [0, 0, 1]
    table.extend(2, 24)
    assert table.num_free == 0
    pages = [page for slot in (1, 2) for _, page in table.held(slot)]
    assert sorted(pages) == list(range(1, 9))
    table.check()


def test_extending_twice_changes_nothing():
    table = make()
    table.extend(1, 10)
    held = table.held(1)
    table.drain_changes()
    table.extend(1, 10)
    table.extend(1, 3)
    assert table.held(1) == held and table.drain_changes() == []


def test_the_reserved_slot_and_an_overdrawn_pool_are_refused():
    table = make()
    with pytest.raises(AssertionError, match="slot 0"):
        table.extend(0, 1)
    with pytest.raises(AssertionError, match="9 pages needed, 8 free"):
        table.extend(1, 33)
    with pytest.raises(AssertionError, match="beyond max_seq_length"):
        table.extend(1, 65)
    table.check()
    assert table.num_free == 8 and table.drain_changes() == []


@pytest.mark.parametrize("window, page_size", [(1, 4), (3, 4), (4, 4), (5, 4), (8, 4), (7, 1), (4, 16), (13, 8)])
def test_a_page_is_recycled_exactly_when_no_later_query_sees_it(window, page_size):
    table = make(window=window, page_size=page_size, n_pages=100, max_seq_length=96)
    most = -(-window // page_size) + 1
    for position in range(96):
        table.extend(1, position + 1)
        assert len(table.held(1)) <= most
        table.recycle(1, position + 1)
        # The next query, at position + 1, sees q - k < window; its own page is held if an earlier one needed it.
        first_seen = max(0, position + 2 - window)
        wanted = sorted({p // page_size for p in range(first_seen, position + 2)} - {position // page_size + 1})
        assert [logical for logical, _ in table.held(1)] == wanted
        table.check()


def test_a_full_group_recycles_nothing():
    table = make()
    table.extend(1, 32)
    table.recycle(1, 32)
    assert len(table.held(1)) == 8


def test_recycling_beyond_what_is_held_is_refused():
    table = make(window=4)
    table.extend(1, 4)
    with pytest.raises(AssertionError, match="does not hold"):
        table.recycle(1, 20)


def test_a_released_slot_starts_again_at_position_0():
    table = make(window=4)
    table.extend(1, 12)
    table.recycle(1, 12)
    assert [logical for logical, _ in table.held(1)] == [2]
    table.release(1)
    assert table.held(1) == [] and table.num_free == 8
    table.extend(1, 4)
    assert [logical for logical, _ in table.held(1)] == [0]
    table.check()


def test_changes_are_drained_once_cleared_entries_first_and_last_write_wins():
    table = make(n_pages=4)
    table.extend(1, 4)
    (_, page), *_ = table.held(1)
    table.release(1)
    table.extend(2, 4)  # takes the page slot 1 had
    assert table.held(2) == [(0, page)]
    assert table.drain_changes() == [(1, 0, 0), (2, 0, page)]
    assert table.drain_changes() == []


def test_reach_is_what_extend_can_just_serve():
    table = make(window=4)
    table.extend(1, 9)
    table.recycle(1, 9)
    table.extend(2, 8)
    reach = table.reach(1)
    assert table.pages_needed(1, reach) == table.num_free
    assert table.pages_needed(1, reach + 1) == table.num_free + 1
    table.extend(1, reach)
    assert table.num_free == 0 and table.reach(1) == reach
    assert make(n_pages=99).reach(1) == 64  # never beyond max_seq_length


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_least_pages_is_what_a_token_by_token_run_peaks_at(window, page_size):
    for length in (1, 3, 4, 5, 17, 40):
        table = make(window=window, page_size=page_size, n_pages=100)
        peak = 0
        for position in range(length):
            table.extend(1, position + 1)
            peak = max(peak, len(table.held(1)))
            table.recycle(1, position + 1)
        assert table.least_pages(length) >= peak
        if length >= 17:
            assert table.least_pages(length) == peak


def test_check_sees_a_page_with_two_owners_a_lost_page_and_page_0():
    def two_owners(table):
        table._pages[2].append(table.held(1)[0][1])

    for spoil in (two_owners, lambda table: table.free_pages.pop(), lambda table: table.free_pages.append(0)):
        table = make()
        table.extend(1, 8)
        table.check()
        spoil(table)
        with pytest.raises(AssertionError):
            table.check()


class PageTableMachine(RuleBasedStateMachine):
    """Random operations on one group; the device mirror is fed by drain_changes alone."""

    window: int | None = None

    def __init__(self):
        super().__init__()
        self.table = make(window=self.window, n_pages=12, page_size=4, num_slots=5)
        self.mirror = {}
        self.computed = [0] * 5

    @rule(slot=st.integers(1, 4), count=st.integers(1, 20))
    def compute_a_chunk(self, slot, count):
        upto = min(self.computed[slot] + count, self.table.max_seq_length)
        if self.table.pages_needed(slot, upto) > self.table.num_free:
            assert self.table.reach(slot) < upto
            return
        assert self.table.reach(slot) >= upto
        self.table.extend(slot, upto)
        held = {logical for logical, _ in self.table.held(slot)}
        window = self.window or upto
        for query in range(self.computed[slot], upto):
            for key in range(max(0, query - window + 1), query + 1):
                assert key // 4 in held, f"query {query} lost key {key}"
        self.computed[slot] = upto
        self.table.recycle(slot, upto)
        if self.window:
            assert len(self.table.held(slot)) <= -(-self.window // 4) + 1

    @rule(slot=st.integers(1, 4))
    def release(self, slot):
        self.table.release(slot)
        self.computed[slot] = 0

    @rule(seed=st.integers(0, 9))
    def shuffle_free_pages(self, seed):
        random.Random(seed).shuffle(self.table.free_pages)

    @rule()
    def drain(self):
        written = apply_in_place(self.mirror, self.table)
        assert len(set(written)) == len(written)
        assert self.mirror == held_by_all(self.table)

    @precondition(lambda self: self.table.num_free == 0)
    @rule()
    def an_empty_pool_gives_nothing(self):
        for slot in range(1, 5):
            assert self.table.reach(slot) <= (len(self.table.held(slot)) + self.table._first[slot]) * 4

    @invariant()
    def accounts_balance(self):
        self.table.check()
        assert all(0 < page < 12 for page in held_by_all(self.table).values())

    def teardown(self):
        self.drain()


def machine(window):
    chosen = type(f"Window{window}", (PageTableMachine,), {"window": window})
    case = chosen.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    return case


TestFullGroup = machine(None)
TestSlidingGroup = machine(6)
TestSlidingGroupOfOnePage = machine(4)


@pytest.mark.parametrize("decode_steps", [1, 3, 8])
@pytest.mark.parametrize("window, page_size, budget", [(4, 4, 3), (6, 4, 16), (1, 2, 7), (13, 8, 64), (8, 1, 5)])
def test_a_sliding_pool_of_the_given_size_serves_any_mix_of_chunks_and_of_tokens_ahead(window, page_size, budget, decode_steps):
    rng = random.Random(window)
    num_sequences, max_seq_length = 5, 200
    n_pages = sliding_pool_pages(
        window=window,
        page_size=page_size,
        max_batch_size=num_sequences,
        max_prefill_tokens=budget,
        max_seq_length=max_seq_length,
        decode_steps=decode_steps,
    )
    table = make(
        window=window, page_size=page_size, n_pages=n_pages, num_slots=num_sequences + 1, max_seq_length=max_seq_length
    )
    computed = [0] * (num_sequences + 1)
    for _ in range(400):
        left = budget
        for slot in rng.sample(range(1, num_sequences + 1), num_sequences):
            if computed[slot] > 150:
                table.release(slot)
                computed[slot] = 0
            chunk = rng.choice([1, min(3, left), left // 2, left])
            chunk = max(chunk, 1)
            left -= chunk if chunk > 1 else 0
            computed[slot] = min(computed[slot] + chunk, max_seq_length)
            table.extend(slot, computed[slot])  # asserts that the pool is large enough
        for slot in range(1, num_sequences + 1):
            table.recycle(slot, computed[slot])
        if rng.random() < 0.3:      # a run of decode steps: all places first, recycled as they are computed
            for slot in range(1, num_sequences + 1):
                table.extend(slot, min(computed[slot] + decode_steps, max_seq_length))
            for slot in range(1, num_sequences + 1):
                computed[slot] = min(computed[slot] + decode_steps, max_seq_length)
                table.recycle(slot, computed[slot])
    table.check()


def test_tokens_ahead_cost_a_sliding_pool_their_own_pages_and_no_more():
    def pages(decode_steps: int) -> int:
        return sliding_pool_pages(window=512, page_size=32, max_batch_size=8, max_prefill_tokens=64, max_seq_length=9999,
                                  decode_steps=decode_steps)
    assert pages(2) - pages(1) == 8 and pages(33) == pages(2), "up to 32 tokens begin one page more"
    assert pages(34) - pages(33) == 8


def test_a_sliding_pool_is_never_larger_than_whole_sequences_need():
    size = sliding_pool_pages(window=512, page_size=32, max_batch_size=2, max_prefill_tokens=2048, max_seq_length=64)
    assert size == 1 + 2 * 2


# ---- pages with more than one owner -------------------------------------------------------------------------------


KEYS = [b"0", b"1", b"2", b"3"]


def test_a_published_page_is_kept_until_pages_run_short_and_then_loses_its_key():
    table = make()
    table.extend(1, 16)
    table.publish(1, KEYS)
    pages = [page for _, page in table.held(1)]
    table.release(1)
    assert (table.num_free, len(table.free_pages), table.find(KEYS, 16)) == (8, 4, pages)
    table.extend(2, 20)      # one of those, and the prefix's end at that
    table.check()
    assert table.leading(KEYS) == 3 and table.find(KEYS, 16) is None and table.find(KEYS, 12) == pages[:3]
    assert table.held(2)[-1][1] == pages[3]


def test_pages_taken_over_are_counted_by_owner_and_freed_by_the_last():
    table = make()
    table.extend(1, 12)
    table.publish(1, KEYS[:3])
    assert [table.cost(KEYS, cut, 16) for cut in (0, 4, 12)] == [4, 3, 1]
    assert table.adopt(2, KEYS, 12) == 3
    assert table.held(2) == table.held(1) and table.num_free == 5 and table.drain_copies() == []
    table.release(1)
    table.check()
    assert table.num_free == 5 and table.cost(KEYS, 12, 16) == 1
    table.release(2)
    table.check()
    assert (table.num_free, table.cost(KEYS, 12, 16)) == (8, 4), "what nobody holds comes out of what is free"
    table.forget()
    table.check()
    assert len(table.free_pages) == 8


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6, 8, 9])
@pytest.mark.parametrize("cut", range(1, 17))
def test_a_sliding_group_takes_over_what_a_query_at_the_cut_sees_and_no_page_more(window, cut):
    table = make(window=window)
    table.extend(1, 16)
    keys = KEYS[: -(-cut // 4)]
    table.publish(1, keys)
    table.adopt(2, keys, cut)
    seen = sorted({position // 4 for position in range(max(0, cut - window + 1), cut)})
    assert [logical for logical, _ in table.held(2)] == seen
    table.extend(2, cut + 1)
    for logical in seen:      # every one of them is needed
        other = make(window=window)
        other.extend(1, 16)
        other.publish(1, keys)
        other.unpublish([keys[logical]])
        assert other.find(keys, cut) is None
    table.check()


def test_a_page_that_is_not_full_is_copied_while_it_is_held_and_taken_once_it_is_not():
    table = make()
    table.extend(1, 10)
    table.publish(1, KEYS[:3])
    (_, source) = table.held(1)[2]
    assert table.adopt(2, KEYS, 9) == 2 and table.adopt(3, KEYS, 9) == 2
    copies = [(source, table.held(slot)[2][1]) for slot in (2, 3)]
    table.check()
    assert table.drain_copies() == copies and table.drain_copies() == []
    for slot in (1, 2, 3):
        table.release(slot)
    assert table.adopt(2, KEYS, 9) == 3 and table.held(2)[2] == (2, source) and not table.num_copies
    table.check()


def test_the_source_of_a_copy_is_not_given_out_before_it_was_read():
    table = make(n_pages=6)
    table.extend(1, 10)
    table.publish(1, KEYS[:3])
    (_, source) = table.held(1)[2]
    table.adopt(2, KEYS, 9)
    table.release(1)
    table.unpublish(KEYS)
    assert table.num_free == 1
    table.extend(3, 4)
    assert source not in {page for slot in (2, 3) for _, page in table.held(slot)}
    table.check()
    assert [pair[0] for pair in table.drain_copies()] == [source]
    assert table.free_pages == [source]


def test_a_copy_for_a_slot_that_was_released_is_not_made():
    table = make(n_pages=6)
    table.extend(1, 10)
    table.publish(1, KEYS[:3])
    table.adopt(2, KEYS, 9)
    table.release(2)
    table.extend(3, 8)      # the copy's page among them
    assert (table.drain_copies(), table.drain_adopted()) == ([], [])
    table.release(1)
    table.release(3)
    table.check()
    assert table.num_free == 5


def test_a_page_taken_to_be_written_on_keeps_only_the_key_of_what_stays():
    """Another sequence had filled it up: what it then held is gone as soon as the new owner writes."""
    table = make()
    table.extend(1, 12)
    partial, whole = [*KEYS[:2], b"not full"], KEYS[:3]
    table.publish(1, partial)
    table.publish(1, whole)
    table.release(1)
    assert table.find(whole, 12) is not None
    table.adopt(2, partial, 9)
    assert table.find(whole, 12) is None and table.find(partial, 9) is not None
    table.check()


def test_a_second_page_of_the_same_tokens_is_not_published():
    table = make()
    for slot in (1, 2):
        table.extend(slot, 4)
        table.publish(slot, KEYS[:1])
    assert table.find(KEYS, 4) == [table.held(1)[0][1]]
    table.release(2)
    assert len(table.free_pages) == 7
    table.check()


def test_an_adopted_table_reaches_the_device_like_any_other():
    table, mirror = make(), {}
    table.extend(1, 10)
    table.publish(1, KEYS[:3])
    table.adopt(2, KEYS, 9)
    for slot, logical, page in table.drain_changes():
        mirror[slot, logical] = page
    assert mirror == held_by_all(table) and table.drain_adopted() == [2] and table.drain_adopted() == []


@pytest.mark.parametrize("spoil", [
    lambda table: table._owners.__setitem__(table.held(1)[0][1], 1),
    lambda table: table._pages[3].append(table.held(1)[1][1]),
    lambda table: table._published.pop(KEYS[0]),
    lambda table: table._published.__setitem__(KEYS[3], table.held(1)[0][1]),
    lambda table: table._keys[table.held(1)[0][1]].discard(KEYS[0]),
    lambda table: table._evictable.__setitem__(table.held(1)[0][1], None),
    lambda table: table._copies.clear(),
    lambda table: table._keys.__setitem__(table.free_pages[0], {b"?"}),
])
def test_check_sees_miscounted_owners_keys_that_lead_nowhere_and_pages_in_two_states(spoil):
    table = make()
    table.extend(1, 10)
    table.publish(1, KEYS[:3])
    table.adopt(2, KEYS, 9)
    table.check()
    spoil(table)
    with pytest.raises(AssertionError):
        table.check()


class SharedPagesMachine(RuleBasedStateMachine):
    """Random operations on twelve pages that slots share. What each page holds is recorded as the device would write it, so
    that a page given out, overwritten or copied too late while someone reads it shows. The sequences are prefixes of a few
    lists of tokens; a key is the tokens it stands for."""

    window: int | None = None

    def __init__(self):
        super().__init__()
        self.table = make(window=self.window, n_pages=12, page_size=4, num_slots=5)
        self.content: dict[tuple[int, int], tuple] = {}
        self.tokens: list[list[int]] = [[] for _ in range(5)]

    @staticmethod
    def keys_of(tokens, cut):
        return [repr(tokens[: min(n + 4, cut)]).encode() for n in range(0, cut, 4)]

    @rule(slot=st.integers(1, 4), count=st.integers(1, 9), branch=st.integers(0, 2))
    def compute(self, slot, count, branch):
        tokens, start = self.tokens[slot], len(self.tokens[slot])
        upto = min(start + count, 64)
        if self.table.reach(slot) < upto:
            return
        self.table.extend(slot, upto)
        self.device()
        tokens += [branch if position % 5 == 0 else 7 for position in range(start, upto)]
        for position in range(start, upto):
            page = dict(self.table.held(slot))[position // 4]
            assert self.table._owners[page] == 1
            self.content[page, position % 4] = tuple(tokens[: position + 1])
        self.read(slot)
        self.table.publish(slot, self.keys_of(tokens, upto // 4 * 4))
        self.table.recycle(slot, upto)

    @rule(slot=st.integers(1, 4))
    def publish_what_is_not_full_too(self, slot):
        self.table.publish(slot, self.keys_of(self.tokens[slot], len(self.tokens[slot])))

    @rule(slot=st.integers(1, 4), other=st.integers(1, 4), cut=st.integers(1, 64))
    def adopt(self, slot, other, cut):
        tokens = self.tokens[other][:cut]
        keys = self.keys_of(tokens, len(tokens))
        if slot == other or not tokens or self.table.find(keys, len(tokens)) is None:
            return
        self.release(slot)
        if self.table.find(keys, len(tokens)) is None or self.table.cost(keys, len(tokens), len(tokens)) > self.table.num_free:
            return
        free = self.table.num_free
        cost = self.table.cost(keys, len(tokens), len(tokens))
        self.table.adopt(slot, keys, len(tokens))
        assert free - self.table.num_free == cost
        self.tokens[slot] = list(tokens)

    @rule(slot=st.integers(1, 4))
    def release(self, slot):
        self.table.release(slot)
        self.tokens[slot] = []

    @rule(slot=st.integers(1, 4))
    def break_one(self, slot):
        self.device()
        for page in self.table.exclusive(slot):
            for i in range(4):
                self.content[page, i] = ("scrubbed",)
        self.release(slot)

    @rule()
    def forget(self):
        self.table.forget()
        assert not self.table._evictable

    @rule(slot=st.integers(1, 4))
    def take_back_a_key(self, slot):
        self.table.unpublish(self.keys_of(self.tokens[slot], len(self.tokens[slot]))[-1:])

    @rule()
    def device(self):
        for source, destination in self.table.drain_copies():
            for i in range(4):
                self.content[destination, i] = self.content.get((source, i))
        for slot in range(1, 5):
            self.read(slot)

    def read(self, slot):
        tokens = self.tokens[slot]
        held = dict(self.table.held(slot))
        for position in range(self.table._first_seen(len(tokens)) * 4, len(tokens)):
            assert self.content[held[position // 4], position % 4] == tuple(tokens[: position + 1])

    @invariant()
    def accounts_balance(self):
        self.table.check()

    def teardown(self):
        self.device()
        for slot in range(1, 5):
            self.table.release(slot)
        self.table.forget()
        self.table.check()
        assert len(self.table.free_pages) == 11 and not any(self.table._owners)


def shared_machine(window):
    case = type(f"Shared{window}", (SharedPagesMachine,), {"window": window}).TestCase
    case.settings = settings(max_examples=30, stateful_step_count=60, deadline=None, derandomize=True,
                             suppress_health_check=[HealthCheck.too_slow])
    return case


TestSharedFullPages = shared_machine(None)
TestSharedSlidingPages = shared_machine(6)
