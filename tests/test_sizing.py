"""Pools take the bytes that the geometry says, a budget buys as many pages as it can, and what fits is what fits."""

from __future__ import annotations

import pytest

from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.memory import sized_tables
from gemma4_flex.params import EngineConfig
from gemma4_flex.sizing import fits, full_pages_in, pool_bytes, pool_pages

FULL, SLIDING = "full_attention", "sliding_attention"


def config(**fields) -> EngineConfig:
    return EngineConfig(device="cuda", page_size=128, **fields).resolved("cuda")


# Bytes a token in bf16, from the published tables: sliding layers' up to the window, full ones' beyond it too.
@pytest.mark.parametrize(("which", "sliding", "full"), [("E2B", 12_288, 6_144), ("E4B", 40_960, 16_384)])
def test_pool_bytes_are_pages_times_the_published_bytes_a_token(which, sliding, full):
    geometry, made = published_geometry(which), config(max_batch_size=2, max_seq_length=4096)
    pages = pool_pages(geometry, made, 65)
    assert pages[FULL] == 65
    assert pool_bytes(geometry, made, 65, 2) == 128 * (sliding * pages[SLIDING] + full * 65)
    at_window, beyond = (geometry.kv_cache_bytes(512 + n, 2) for n in (0, 1))
    assert (at_window, beyond - at_window) == (512 * (sliding + full), full)


@pytest.mark.parametrize(("max_seq_length", "more"), [(4096, 2 * 5), (256, 2 * 2)])
def test_a_prefix_cache_has_room_for_a_window_more_a_sequence_and_for_no_more_than_there_can_be(max_seq_length, more):
    geometry = published_geometry("E2B")
    without, cached = (pool_pages(geometry, config(max_batch_size=2, max_seq_length=max_seq_length, prefix_cache=on), 65)
                       for on in (False, True))
    assert (cached[FULL], cached[SLIDING] - without[SLIDING]) == (65, more)


@pytest.mark.parametrize("steps", [1, 8])
def test_what_is_allocated_is_the_formula(steps):
    geometry = published_geometry("E2B")
    made = config(max_batch_size=2, max_seq_length=1024, max_prefill_tokens=256, decode_steps_per_sync=steps)
    cache = KVCache(geometry, sized_tables(geometry, made), torch_dtype(), "meta")
    assert sum(group.num_bytes() for group in cache.groups.values()) == pool_bytes(geometry, made, made.n_pages, 2)


def torch_dtype():
    import torch
    return torch.bfloat16


@pytest.mark.parametrize("budget", [600 * 2**20, 1000 * 2**20, 10_000 * 2**20])
def test_a_budget_buys_the_most_pages_it_can(budget):
    geometry, made = published_geometry("E2B"), config(max_batch_size=16, max_seq_length=32_768)
    pages = full_pages_in(geometry, made, budget, 2)
    assert pool_bytes(geometry, made, pages, 2) <= budget
    assert pages == 1 + 16 * 256 or pool_bytes(geometry, made, pages + 1, 2) > budget


def test_a_budget_below_the_sliding_pools_buys_nothing():
    geometry, made = published_geometry("E2B"), config(max_batch_size=16, max_seq_length=32_768)
    assert full_pages_in(geometry, made, 10 * 2**20, 2) < 2


def test_fits_counts_whole_pages_and_never_more_than_a_batch():
    geometry, made = published_geometry("E2B"), config(max_batch_size=8, max_seq_length=4096, n_pages=1 + 33)
    # 33 pages: of 1 page 8 (the batch), of 5 pages 6, of 32 pages 1
    assert fits(geometry, made, [128, 513, 4096, 5000]) == {128: 8, 513: 6, 4096: 1, 5000: 0}
