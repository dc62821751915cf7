"""Pools exist for owners only, hold what the formula says, and change where they are told to and nowhere else."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kv_cache import KVCache, store
from gemma4_flex.masks import visible
from gemma4_flex.page_table import PageTable
from tests.pools import filled_group, seen_positions
from tests.tiny import FULL, SLIDING, tiny_config

TINY = ModelGeometry.from_config(tiny_config())


def tables_for(geometry: ModelGeometry, *, pages: int, page_size: int) -> dict[str, PageTable]:
    windows = {layer.attention_type: layer.window for layer in geometry.layers}
    return {kind: PageTable(kind, n_pages=pages, page_size=page_size, num_slots=3, max_seq_length=8 * page_size,
                            window=window) for kind, window in windows.items()}


def test_only_owner_layers_have_pools_each_at_its_own_head_dim():
    cache = KVCache(TINY, tables_for(TINY, pages=7, page_size=4), torch.float32, "cpu")
    shapes = {kind: {i: tuple(pool.shape) for i, pool in group.keys.items()} for kind, group in cache.groups.items()}
    assert shapes == {SLIDING: {0: (1, 1, 28, 16), 2: (1, 1, 28, 16)}, FULL: {1: (1, 1, 28, 32), 3: (1, 1, 28, 32)}}
    assert [g.values.keys() for g in cache.groups.values()] == [g.keys.keys() for g in cache.groups.values()]


@pytest.mark.parametrize(("geometry", "dtype", "expected"), [
    (TINY, torch.float32, {SLIDING: 2 * 2 * 16 * 4, FULL: 2 * 2 * 32 * 4}),
    (published_geometry("E2B"), torch.bfloat16, {SLIDING: 12_288, FULL: 6_144}),
    (published_geometry("E4B"), torch.bfloat16, {SLIDING: 40_960, FULL: 16_384}),
], ids=["tiny", "E2B", "E4B"])
def test_allocated_bytes_are_the_formulas(geometry, dtype, expected):
    cache = KVCache(geometry, tables_for(geometry, pages=33, page_size=128), dtype, "meta")
    assert geometry.kv_bytes_per_token(dtype.itemsize) == expected
    for kind, group in cache.groups.items():
        assert group.num_bytes() == expected[kind] * 33 * 128
        pools = [*group.keys.values(), *group.values.values()]
        assert group.num_bytes() == sum(pool.numel() * dtype.itemsize for pool in pools)


def test_fresh_pages_are_finite_and_zero():
    cache = KVCache(TINY, tables_for(TINY, pages=3, page_size=4), torch.float32, "cpu")
    assert all(not t.any() for t in cache.tensors().values())


def test_a_token_is_written_where_its_page_lies_and_nowhere_else():
    filled = filled_group({1: 6, 2: 9}, page_size=4)
    group, before = filled.group, filled.group.keys[0].clone()
    page = dict(filled.table.held(2))[2]
    rows = group.rows_of(torch.tensor([2]), torch.tensor([8]))
    assert rows.tolist() == [page * 4]
    store(group.keys[0], group.values[0], torch.full((1, 1, 16), 3.0), torch.full((1, 1, 16), 5.0), rows)
    assert (group.keys[0][0, 0, page * 4] == 3).all()
    assert (group.values[0][0, 0, page * 4] == 5).all()
    before[0, 0, page * 4] = 3
    assert torch.equal(group.keys[0], before)


def test_pool_rows_beyond_two_to_the_31_do_not_wrap():
    group = filled_group({1: 1}).group
    group.page_size = 2**31
    group.table = torch.tensor([[0], [3]], dtype=torch.int32)
    assert group.rows_of(torch.tensor([1]), torch.tensor([5])).tolist() == [3 * 2**31 + 5]


def test_tables_follow_the_hosts_in_place_through_pages_that_change_hands():
    filled = filled_group({1: 12}, window=4, page_size=4, n_pages=6)
    group, table = filled.group, filled.table
    addresses = group.table.data_ptr(), group.logical.data_ptr()
    for position in range(12, 60):
        table.recycle(1, position)
        table.extend(1, position + 1)
        if position % 7 == 0:       # a neighbour comes and goes, sometimes between two mirrorings
            table.extend(2, 4) if not table.held(2) else table.release(2)
        if position % 3:
            continue
        group.apply(table.drain_changes())
        for slot in range(table.num_slots):
            held = dict(table.held(slot))
            assert group.table[slot].tolist() == [held.get(logical, 0) for logical in range(table.columns)]
            assert all(group.logical[page] == logical for logical, page in held.items())
    assert (group.table.data_ptr(), group.logical.data_ptr()) == addresses


def test_scrubbing_zeroes_the_named_pages_of_every_pool_and_no_others():
    filled = filled_group({1: 8, 2: 8}, page_size=4)
    pages = [page for _, page in filled.table.held(1)]
    others = [p for p in range(filled.group.num_pages) if p not in pages]
    for pool in (filled.group.keys[0], filled.group.values[0]):
        pool[:, :, pages[0] * 4] = float("nan")
    before = filled.group.keys[0].view(-1, 4, 16)[others].clone()
    filled.group.scrub(pages)
    assert not filled.group.keys[0].view(-1, 4, 16)[pages].any()
    assert not filled.group.values[0].view(-1, 4, 16)[pages].any()
    assert torch.equal(filled.group.keys[0].view(-1, 4, 16)[others], before)


def shared_prefix(window: int | None = None):
    """Slot 1 has 10 positions on pages of 4; slot 2 has taken over the first 9 of them, the third page as a copy."""
    filled = filled_group({1: 10}, window=window, page_size=4)
    group, table = filled.group, filled.table
    keys = [b"0", b"1", b"2"]
    table.publish(1, keys)
    table.adopt(2, keys, 9)
    group.apply(table.drain_changes())
    return filled


@pytest.mark.parametrize("window", [None, 6])
def test_a_sequence_that_took_over_a_prefix_reads_it_from_the_same_rows_and_the_rest_from_a_copy(window):
    filled = shared_prefix(window)
    group, table = filled.group, filled.table
    [(source, destination)] = table.drain_copies()
    before = {name: pool.clone() for name, pool in (("keys", group.keys[0]), ("values", group.values[0]))}
    group.copy_pages([(source, destination)])
    first, second = (group.rows_of(torch.full((5,), slot), torch.arange(4, 9)) for slot in (1, 2))
    assert torch.equal(first[:4], second[:4]) and first[4] != second[4]
    for name, pool, written in (("keys", group.keys[0], filled.keys[1]), ("values", group.values[0], filled.values[1])):
        assert torch.equal(pool[0, :, second].transpose(0, 1), written[4:9])
        untouched = [page for page in range(group.num_pages) if page != destination]
        assert torch.equal(pool.view(-1, 4, 16)[untouched], before[name].view(-1, 4, 16)[untouched])
    mine = torch.tensor([[3.0] * 16])[None]
    store(group.keys[0], group.values[0], mine, mine, group.rows_of(torch.tensor([2]), torch.tensor([9])))
    assert torch.equal(group.keys[0][0, :, group.rows_of(torch.tensor([1]), torch.tensor([9]))][:, 0], filled.keys[1][9])


@pytest.mark.parametrize("window", [None, 6])
def test_two_owners_of_a_page_both_see_it_and_nobody_else_does(window):
    filled = shared_prefix(window)
    group = filled.group
    group.copy_pages(filled.table.drain_copies())
    slots, first = torch.tensor([1, 2, 3]), torch.tensor([9, 8, 8])
    sees = visible(group.table, group.logical, slots, first, 4, window)
    rows = torch.arange(group.num_pages * 4)
    for b, (slot, query) in enumerate(((1, 9), (2, 8))):
        mine = group.rows_of(torch.full((query + 1,), slot), torch.arange(query + 1))
        expected = {int(mine[k]) for k in seen_positions(query, window)}
        assert {int(r) for r in rows if sees(torch.tensor(b), 0, torch.tensor(0), r)} == expected
    assert not any(sees(torch.tensor(2), 0, torch.tensor(0), r) for r in rows[4:]), "but the reserved page"


def test_many_pages_are_copied_at_once_each_from_its_own_source():
    filled = filled_group({1: 8, 2: 8}, page_size=4, n_pages=12)
    [(_, a), (_, b)], [(_, c), _] = filled.table.held(1), filled.table.held(2)
    free = filled.table.free_pages[-3:]
    filled.group.copy_pages(list(zip((a, b, c), free)))
    pages = filled.group.values[0].view(-1, 4, 16)
    for source, destination in zip((a, b, c), free):
        assert torch.equal(pages[destination], pages[source]) and pages[source].abs().max() < 100
    filled.group.copy_pages([])
