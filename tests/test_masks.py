"""A mask shows each query the keys the rule names, once each, wherever their pages lie."""

from __future__ import annotations

import random

import pytest
import torch

from gemma4_flex.attention import gather_plan
from gemma4_flex.masks import columns_in_view, page_mask, page_span, visible
from tests.pools import Filled, decode_rows, filled_group, prefill_rows, queries_of, seen_positions


def pool_rows_listed(filled: Filled, rows, pad_to: int = 0) -> list[list[list[int]]]:
    """For each row and each of its counted queries, the pool rows that flex_attention would let it see: all of a whole
    page's, and of a partial page's those the mask_mod lets through."""
    group, mask = filled.group, page_mask(filled.group, rows, pad_to=pad_to)
    mask_mod = visible(group.table, group.logical, rows.slots, rows.first, group.page_size, group.window)
    found = []
    for r, count in enumerate(rows.count.tolist()):
        whole = mask.whole[r, 0, 0, : mask.num_whole[r, 0, 0]].tolist()
        partial = mask.partial[r, 0, 0, : mask.num_partial[r, 0, 0]].tolist()
        assert len({*whole, *partial}) == len(whole) + len(partial), "a page is listed twice"
        for q in range(count):
            keys = [page * group.page_size + i for page in whole for i in range(group.page_size)]
            inside = [page * group.page_size + i for page in partial for i in range(group.page_size)]
            seen = mask_mod(torch.tensor(r), torch.tensor(0), torch.tensor(q), torch.tensor(inside, dtype=torch.long))
            found.append(keys + [key for key, is_seen in zip(inside, seen.tolist()) if is_seen])
    return found


def pool_rows_gathered(filled: Filled, rows) -> list[list[int]]:
    """The same for SDPA's gather."""
    plan = gather_plan(filled.group, rows)
    return [plan.pool_rows[r, plan.seen[r, 0, q]].tolist()
            for r, count in enumerate(rows.count.tolist()) for q in range(count)]


def pool_rows_by_rule(filled: Filled, rows) -> list[list[int]]:
    size, expected = filled.group.page_size, []
    for slot, position in queries_of(rows):
        page = dict(filled.table.held(slot))
        expected.append([page[k // size] * size + k % size for k in seen_positions(position, filled.group.window)])
    return expected


BACKENDS = {"flex": pool_rows_listed, "sdpa": pool_rows_gathered}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_four_shows_1_2_3_4_4_4_keys(backend):
    filled = filled_group({1: 6}, window=4, page_size=2)
    decoded = [len(BACKENDS[backend](filled, decode_rows({1: position}))[0]) for position in range(6)]
    assert decoded == [1, 2, 3, 4, 4, 4]
    prefilled = BACKENDS[backend](filled, prefill_rows([(1, 0, 6)], width=8))
    assert [len(keys) for keys in prefilled] == [1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_layer_shows_every_key_up_to_the_query(backend):
    filled = filled_group({3: 6}, page_size=4)
    assert [len(keys) for keys in BACKENDS[backend](filled, prefill_rows([(3, 0, 6)], width=8))] == [1, 2, 3, 4, 5, 6]


def random_case(rng: random.Random) -> tuple[Filled, object]:
    """Sequences of random lengths in random slots, and one span of each: the last query, or a chunk of any length."""
    window, page_size, width = rng.choice([None, 1, 3, 4, 6, 9]), rng.choice([1, 2, 4, 8]), rng.choice([1, 4, 32])
    lengths = {slot: rng.randrange(1, 50) for slot in rng.sample(range(1, 9), rng.randrange(1, 5))}
    spans = []
    for slot, length in lengths.items():
        count = rng.randrange(1, min(width, length) + 1)
        spans.append((slot, rng.randrange(length - count + 1) if rng.random() < 0.3 else length - count, count))
    filled = filled_group(lengths, window=window, page_size=page_size, page_seed=rng.random(),
                          next_query={slot: first for slot, first, _ in spans})
    rows = decode_rows({slot: first for slot, first, _ in spans}) if width == 1 else prefill_rows(spans, width)
    return filled, rows


def check_random_cases(backend: str, n: int = 60) -> None:
    rng = random.Random(backend)
    for _ in range(n):
        filled, rows = random_case(rng)
        found, expected = BACKENDS[backend](filled, rows), pool_rows_by_rule(filled, rows)
        assert [sorted(keys) for keys in found] == [sorted(keys) for keys in expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_spans_over_random_pages_see_what_the_rule_says(backend):
    check_random_cases(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_check_above_catches_a_window_off_by_one(backend, monkeypatch):
    honest = BACKENDS[backend]

    def off_by_one(filled, rows):
        filled.group.window = filled.group.window and filled.group.window + 1
        found = honest(filled, rows)
        filled.group.window = filled.group.window and filled.group.window - 1
        return found
    monkeypatch.setitem(BACKENDS, backend, off_by_one)
    with pytest.raises((AssertionError, KeyError)):
        check_random_cases(backend)


def test_sdpa_gathers_keys_in_logical_order_wherever_pages_lie():
    orders = []
    for page_seed in (1, 2):
        filled = filled_group({5: 30}, page_seed=page_seed)
        plan = gather_plan(filled.group, decode_rows({5: 29}))
        page = {physical: logical for logical, physical in filled.table.held(5)}
        orders.append([page[row // 4] * 4 + row % 4 for row in plan.pool_rows[0, plan.seen[0, 0, 0]].tolist()])
    assert orders[0] == orders[1] == list(range(30))


def test_flex_lists_pages_in_logical_order_wherever_they_lie():
    for page_seed in (1, 2):
        filled = filled_group({5: 30}, window=17, page_seed=page_seed)
        mask = page_mask(filled.group, decode_rows({5: 29}))
        page = dict(filled.table.held(5))
        # the window is 13 to 29: page 3 begins before it, 4 to 6 lie in it, page 7 holds the query
        assert mask.partial.flatten()[: mask.num_partial].tolist() == [page[3], page[7]]
        assert mask.whole.flatten()[: mask.num_whole].tolist() == [page[4], page[5], page[6]]


def test_whole_pages_skip_the_mask_and_are_most_of_a_long_sequence():
    filled = filled_group({1: 100}, page_size=4)
    span = page_span(decode_rows({1: 99}), 4, None)
    assert (span.start_whole.item(), span.end_whole.item(), span.last.item()) == (0, 25, 24)
    mask = page_mask(filled.group, decode_rows({1: 98}))
    assert (mask.num_whole.item(), mask.num_partial.item()) == (24, 1)


def test_the_columns_a_row_can_touch_are_enough_and_no_more():
    for window in (1, 2, 4, 5, 8):
        for width in (1, 2, 7):
            for page_size in (1, 2, 4):
                touched = {(first + width - 1) // page_size - max(0, first - window + 1) // page_size + 1
                           for first in range(40)}
                assert columns_in_view(width, page_size, window, columns=99) == max(touched)
    assert columns_in_view(32, 4, None, columns=7) == 7
    assert columns_in_view(32, 4, 512, columns=7) == 7


def test_a_masks_size_follows_what_a_sequence_can_hold_and_not_the_pool():
    sizes = []
    for n_pages in (20, 2000):
        filled = filled_group({1: 40}, window=8, n_pages=n_pages)
        mask = page_mask(filled.group, decode_rows({1: 39}))
        sizes.append(mask.whole.numel() + mask.partial.numel())
    assert sizes[0] == sizes[1] == 2 * columns_in_view(1, 4, 8, 32)


def test_padding_a_list_to_the_pools_width_lists_no_more_pages():
    filled = filled_group({1: 9, 2: 30}, window=6)
    rows = decode_rows({1: 8, 2: 29})
    assert pool_rows_listed(filled, rows, pad_to=50) == pool_rows_listed(filled, rows)
    assert page_mask(filled.group, rows, pad_to=50).whole.shape == (2, 1, 1, 50)


def test_another_sequences_key_is_not_seen_even_where_its_page_is_listed():
    """What a stale block list would name, the mask_mod still refuses."""
    filled = filled_group({1: 8, 2: 8})
    group = filled.group
    mask_mod = visible(group.table, group.logical, torch.tensor([1]), torch.tensor([7]), 4, None)
    mine, theirs = ([page * 4 + i for _, page in filled.table.held(slot) for i in range(4)] for slot in (1, 2))
    zero = torch.tensor(0)
    assert mask_mod(zero, zero, zero, torch.tensor(mine)).all()
    assert not mask_mod(zero, zero, zero, torch.tensor(theirs)).any()


def test_rows_split_and_join_lose_no_token():
    rows = prefill_rows([(1, 0, 3), (2, 5, 1), (3, 2, 4)], width=4)
    x = torch.arange(8 * 2 * 3, dtype=torch.float).reshape(8, 2, 3)
    assert rows.split(x).shape == (3, 2, 4, 3)
    assert torch.equal(rows.join(rows.split(x)), x)
    assert torch.equal(decode_rows({1: 0, 2: 0}).join(decode_rows({1: 0, 2: 0}).split(x[:2])), x[:2])


def test_without_a_list_of_whole_pages_all_pages_in_view_are_partial():
    filled = filled_group({1: 100}, page_size=4)
    rows = decode_rows({1: 98})
    split, together = page_mask(filled.group, rows), page_mask(filled.group, rows, list_whole=False)
    assert together.whole is None and together.num_whole is None
    both = int(split.num_partial) + int(split.num_whole)
    assert int(together.num_partial) == both > int(split.num_partial)
    listed = {*split.partial[0, 0, 0, : int(split.num_partial)].tolist(), *split.whole[0, 0, 0, : int(split.num_whole)].tolist()}
    assert set(together.partial[0, 0, 0, :both].tolist()) == listed
