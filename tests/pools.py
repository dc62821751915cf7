"""Hand-made groups for the tests of masks, attention and shared K/V: pools full of garbage but for what was written."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gemma4_flex.geometry import LayerGeometry
from gemma4_flex.kv_cache import KVGroup, store
from gemma4_flex.masks import Rows
from gemma4_flex.page_table import PageTable
from tests.tiny import FULL, SLIDING

GARBAGE = 1e4       # finite, and large enough that one leaked key or value shows


@dataclass
class Filled:
    """A group whose slots hold sequences, and the K/V [positions, kv_heads, D] of each as they were written."""
    group: KVGroup
    table: PageTable
    keys: dict[int, Tensor]
    values: dict[int, Tensor]


def filled_group(lengths: dict[int, int], *, window: int | None = None, page_size: int = 4, head_dim: int = 16,
                 kv_heads: int = 1, heads: int = 4, n_pages: int | None = None, num_slots: int = 9,
                 max_seq_length: int = 128, seed: int = 0, page_seed: int = 0, next_query: dict[int, int] | None = None,
                 dtype: torch.dtype = torch.float32) -> Filled:
    """A group of one owner layer, 0, with `lengths` positions in each slot. The K/V depend on `seed` and on the order
    of `lengths` alone, the places of the pages on `page_seed`. Slots in `next_query` have their dead pages recycled."""
    layer = LayerGeometry(0, SLIDING if window else FULL, heads, kv_heads, head_dim, window, 8, 0)
    n_pages = n_pages or 1 + sum(-(-n // page_size) for n in lengths.values()) + 5
    table = PageTable(layer.attention_type, n_pages=n_pages, page_size=page_size, window=window, num_slots=num_slots,
                      max_seq_length=max_seq_length)
    random.Random(page_seed).shuffle(table.free_pages)
    group = KVGroup([layer], table, dtype, "cpu")
    for pool in (group.keys[0], group.values[0]):
        pool.fill_(GARBAGE)
        pool[:, :, :page_size] = 0
    generator = torch.Generator().manual_seed(seed)
    filled = Filled(group, table, {}, {})
    for slot, length in lengths.items():
        keys, values = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
        table.extend(slot, length)
        group.apply(table.drain_changes())
        positions = torch.arange(length)
        store(group.keys[0], group.values[0], keys, values, group.rows_of(torch.full_like(positions, slot), positions))
        filled.keys[slot], filled.values[slot] = keys, values
    for slot, position in (next_query or {}).items():
        held = {page for _, page in table.held(slot)}
        table.recycle(slot, position)
        for page in held - {page for _, page in table.held(slot)}:
            for pool in (group.keys[0], group.values[0]):
                pool[:, :, page * page_size: (page + 1) * page_size] = GARBAGE
    group.apply(table.drain_changes())
    return filled


def decode_rows(queries: dict[int, int]) -> Rows:
    """One query a slot, at its position."""
    slots, first = torch.tensor([*queries.keys()]), torch.tensor([*queries.values()])
    return Rows(slots, first, torch.ones_like(slots), 1)


def prefill_rows(spans: list[tuple[int, int, int]], width: int) -> Rows:
    """Rows of (slot, first, count <= width) spans, whose tokens lie one after another."""
    slots, first, count = torch.tensor(spans).T.contiguous()
    starts = np.cumsum([0, *(n for _, _, n in spans)])
    inside = np.minimum(np.arange(width), np.array([n for _, _, n in spans])[:, None] - 1)
    place = [r * width + j for r, (_, _, n) in enumerate(spans) for j in range(n)]
    return Rows(slots, first, count, width, torch.tensor(starts[:-1, None] + inside), torch.tensor(place))


def seen_positions(query: int, window: int | None) -> list[int]:
    """The rule itself: a query sees itself and what came before, in a window itself and window - 1 more."""
    return [k for k in range(query + 1) if window is None or query - k < window]


def queries_of(rows: Rows) -> list[tuple[int, int]]:
    """(slot, position) of each of the step's tokens, in order."""
    spans = zip(rows.slots.tolist(), rows.first.tolist(), rows.count.tolist())
    return [(slot, first + j) for slot, first, count in spans for j in range(count)]


def written_out(q: Tensor, filled: Filled, rows: Rows) -> Tensor:
    """softmax(q k^T) v in float64, token by token and head by head: [T, H, D]."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t, (slot, position) in enumerate(queries_of(rows)):
        seen = seen_positions(position, filled.group.window)
        for h in range(q.shape[1]):
            kv_head = h * filled.keys[slot].shape[1] // q.shape[1]
            keys, values = (x[slot][seen, kv_head].double() for x in (filled.keys, filled.values))
            out[t, h] = (keys @ q[t, h].double()).softmax(0) @ values
    return out


def random_queries(rows: Rows, *, heads: int = 4, head_dim: int = 16, seed: int = 9) -> Tensor:
    """[T, H, D] for the rows' tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(rows.count.sum()), heads, head_dim, generator=generator)
