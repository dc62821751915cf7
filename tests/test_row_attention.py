"""Row by row over pages is attention written out, whatever the rows, windows and places; padding rows are zero."""

from __future__ import annotations

import random

import pytest
import torch

from gemma4_flex import row_attention as module
from gemma4_flex.row_attention import row_attention
from tests.pools import Filled, filled_group, prefill_rows, random_queries, written_out

TOLERANCE = 1e-5


def attended(filled: Filled, rows, q: torch.Tensor) -> torch.Tensor:
    group = filled.group
    return row_attention(q, group.keys[0], group.values[0], group.table, rows.slots, rows.first, rows.count,
                         rows.token_of[:, 0].contiguous(), group.page_size, group.window or 0, 1.0)


def spans_of(rng: random.Random, lengths: dict[int, int], width: int) -> list[tuple[int, int, int]]:
    """A span of each sequence, any part of it, cut into rows of `width`."""
    found = []
    for slot, length in lengths.items():
        first = rng.randrange(length)
        end = rng.randrange(first, length) + 1
        found += [(slot, at, min(width, end - at)) for at in range(first, end, width)]
    return found


@pytest.mark.parametrize("seed", range(25))
def test_random_spans_over_random_pages_are_attention_written_out(seed):
    rng = random.Random(seed)
    lengths = {slot: rng.randrange(1, 60) for slot in rng.sample(range(1, 9), rng.randrange(1, 5))}
    kv_heads = rng.choice([1, 2])
    filled = filled_group(lengths, window=rng.choice([None, 1, 3, 4, 9, 33]), page_size=rng.choice([1, 4, 8]), kv_heads=kv_heads,
                          page_seed=seed)
    rows = prefill_rows(spans_of(rng, lengths, rng.choice([4, 16, 128])), width=128)
    q = random_queries(rows)
    assert (attended(filled, rows, q).double() - written_out(q, filled, rows)).abs().max() < TOLERANCE


@pytest.mark.parametrize("window", [None, 4])
def test_pages_that_left_the_window_are_not_read(window):
    filled = filled_group({1: 40}, window=window, next_query={1: 30} if window else {})
    rows = prefill_rows([(1, 30, 10)], width=16)
    q = random_queries(rows)
    assert (attended(filled, rows, q).double() - written_out(q, filled, rows)).abs().max() < TOLERANCE


def test_rows_of_padding_are_zero_whatever_the_reserved_page_holds():
    filled = filled_group({1: 9})
    filled.group.keys[0][:, :, :4] = float("nan")
    filled.group.values[0][:, :, :4] = float("nan")
    rows = prefill_rows([(1, 0, 9), (0, 0, 1), (0, 0, 1)], width=16)
    q = random_queries(rows)
    out = attended(filled, rows, q)
    assert not out[9:].any()
    assert out[:9].isfinite().all()


def test_rows_that_follow_each_other_are_one_call_without_a_window_and_apart_with_one(monkeypatch):
    calls, honest = [], module._attend
    monkeypatch.setattr(module, "_attend", lambda q, keys, *rest: calls.append((len(q), keys.shape[1])) or honest(q, keys, *rest))
    spans = [(2, 0, 8), (2, 8, 8), (2, 16, 3), (1, 4, 5), (3, 9, 2)]      # of one sequence; and of others that do not go on
    for window, expected in ((None, [(19, 19), (5, 9), (2, 11)]), (4, [(8, 8), (8, 11), (3, 6), (5, 8), (2, 5)])):
        calls.clear()
        filled = filled_group({2: 20, 1: 9, 3: 11}, window=window)
        rows = prefill_rows(spans, width=8)
        q = random_queries(rows)
        assert (attended(filled, rows, q).double() - written_out(q, filled, rows)).abs().max() < TOLERANCE
        assert calls == expected, "queries and keys of each call"


def test_bf16_is_bf16():
    filled = filled_group({1: 60}, dtype=torch.bfloat16)
    rows = prefill_rows([(1, 20, 40)], width=64)
    q = random_queries(rows).bfloat16()
    out, exact = attended(filled, rows, q), written_out(q, filled, rows)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).abs().max() < 2**-6 * exact.abs().max()
