"""The spans of several sequences as one flat batch of tokens, cut into query rows and padded to a size.

A padded token has slot 0 and position 0: it writes to the reserved page, and nothing reads it.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gemma4_flex.masks import Rows
from gemma4_flex.models.walk import StepInputs
from gemma4_flex.scheduler import Span


class Sizes(NamedTuple):
    """How many tokens, query rows and wanted tokens a prefill has, or is padded to."""
    tokens: int
    rows: int
    wanted: int


def sizes_of(spans: Seq[Span], width: int) -> Sizes:
    """What `spans` need at least, in rows of `width` queries."""
    return Sizes(sum(span.count for span in spans), sum(-(-span.count // width) for span in spans),
                 sum(span.wants_logits for span in spans))


def prefill_inputs(spans: Seq[Span], sizes: Sizes, width: int, columns: Tensor, device: torch.device) -> StepInputs:
    """The flat step of `spans`, in their order, padded to `sizes`. columns: as in `Rows`."""
    flat = np.zeros((4, sizes.tokens), dtype=np.int64)        # ids, positions, slots, and the token's query among the rows'
    rows = np.zeros((4, sizes.rows), dtype=np.int64)          # slot, first position, count, and the first query's token
    rows[2] = 1
    wanted = np.zeros(sizes.wanted, dtype=np.int64)
    token = row = last = 0
    for span in spans:
        sequence, end = span.sequence, token + span.count
        flat[0, token: end] = sequence.token_ids[span.start: span.start + span.count]
        flat[1, token: end] = np.arange(span.start, span.start + span.count)
        flat[2, token: end] = sequence.slot
        flat[3, token: end] = np.arange(row * width, row * width + span.count)      # rows but the last are full
        for at in range(0, span.count, width):
            rows[:, row] = sequence.slot, span.start + at, min(width, span.count - at), token + at
            row += 1
        token = end
        if span.wants_logits:
            wanted[last] = token - 1
            last += 1
    token_of = rows[3][:, None] + np.minimum(np.arange(width), rows[2][:, None] - 1)
    tail = flat[1:3, wanted]
    tail[:, last:] = 0

    def put(array: np.ndarray) -> Tensor:
        # a copy, whose strides are plain also where a size is 1: the CPU's flex kernel does not compile with others
        return torch.empty(array.shape, dtype=torch.long).copy_(torch.from_numpy(array)).to(device)
    ids, positions, slots, place_of = map(put, flat)
    row_slots, first, count, _ = map(put, rows)
    tail_positions, tail_slots = map(put, tail)
    return StepInputs(
        ids, positions, slots, Rows(row_slots, first, count, width, put(token_of), place_of, columns), put(wanted),
        Rows(tail_slots, tail_positions, torch.ones_like(tail_slots), 1, columns=columns))
