"""Prefill attention on a CPU: row by row, each over exactly the keys it sees.

A batched call would give every row the keys of the longest and mask the rest away. On a CPU the host knows where everything
is, so the rows are walked one by one: no key is multiplied that no query of the row sees, but for the corners.

T: tokens, R: rows, H: heads, K: kv heads, D: head_dim, P: page size.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("gemma4_flex::row_attention", mutates_args=())
def row_attention(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, slots: Tensor, first: Tensor, count: Tensor,
                  start: Tensor, page_size: int, window: int, scale: float) -> Tensor:
    """[T, H, D] -> [T, H, D]: tokens start[r] ... start[r] + count[r] - 1 of `q` are positions first[r], ... of the sequence in
    slots[r], whose keys lie in pools `keys` and `values` [1, K, pool rows, D] where `table` says. window 0: no window. Rows of
    slot 0 are padding: nothing is computed for them, and tokens without a row are zero."""
    out = torch.zeros_like(q)
    rows = list(zip(slots.tolist(), first.tolist(), count.tolist(), start.tolist()))
    for slot, at, n, token in rows if window else _joined(rows):
        if slot:
            low, high = max(0, at - window + 1) if window else 0, at + n
            pages = table[slot, low // page_size: -(-high // page_size)].long()
            inside = slice(low % page_size, low % page_size + high - low)
            out[token: token + n] = _attend(q[token: token + n], *(_dense(pool, pages, page_size)[:, inside]
                                                                   for pool in (keys, values)), at - low, window, scale)
    return out


@row_attention.register_fake
def _(q, *args):
    return torch.empty_like(q)


def _joined(rows: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Rows that go on where the one before them ended, as one: without a window nothing is gained by keeping them apart."""
    joined = [rows[0]]
    for slot, at, n, token in rows[1:]:
        before, from_, have, source = joined[-1]
        if (slot, at, token) == (before, from_ + have, source + have):
            joined[-1] = (slot, from_, have + n, source)
        else:
            joined.append((slot, at, n, token))
    return joined


def _dense(pool: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """The pages of a pool one after the other: [K, pages * P, D]."""
    return pool[0].unflatten(1, (-1, page_size))[:, pages].flatten(1, 2)


def _attend(q: Tensor, keys: Tensor, values: Tensor, offset: int, window: int, scale: float) -> Tensor:
    """[n, H, D] queries, the first at key `offset`, over keys and values [K, m, D]."""
    heads, kv_heads = q.shape[1], keys.shape[0]
    if kv_heads == 1:
        keys, values = (x.expand(heads, -1, -1) for x in (keys, values))
    else:
        keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
    seen = None
    if offset or (window and len(q) > window):
        distance = torch.arange(offset, offset + len(q))[:, None] - torch.arange(keys.shape[1])
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
    return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys[None], values[None], attn_mask=seen,
                                          is_causal=seen is None, scale=scale)[0].transpose(0, 1)
