"""Rows of a table that stays in host memory, fetched inside a step by whatever runs the step.

On a GPU a kernel reads the rows of the step's tokens straight out of pinned memory, through the device address that such
memory has: nothing of the host takes part, so that a captured step fetches the rows of the ids it finds at each replay, and
several steps can follow each other without a look at the host. No more than those rows ever crosses the bus.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

WORDS_A_BLOCK = 1024


@torch.library.custom_op("gemma4_flex::host_rows", mutates_args=())
def host_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows `ids` [T] of `table` [rows, ...], which is in host memory (pinned where the ids are on a GPU), on the device of the
    ids: [T, ...]."""
    if ids.device.type == "cpu":
        return table[ids]
    assert table.is_pinned(), "a GPU reads host memory only where it is pinned"
    found = torch.empty((len(ids), *table.shape[1:]), dtype=table.dtype, device=ids.device)
    row_bytes = table[0].nbytes
    word = next(dtype for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0)
    words = row_bytes // word.itemsize
    with torch.cuda.device(ids.device):
        _copy_rows()[len(ids), -(-words // WORDS_A_BLOCK)](
            table.view(len(table), -1).view(word), ids, found.view(len(ids), -1).view(word), words, WORDS_A_BLOCK)
    return found


@host_rows.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty((ids.shape[0], *table.shape[1:]), device=ids.device)      # len would fix the size of a compiled region


@functools.cache
def _copy_rows():
    """The kernel: program (row, block) copies a block of words of one row."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy_rows(table, ids, found, words, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        source = table + tl.load(ids + row) * words
        tl.store(found + row.to(tl.int64) * words + at, tl.load(source + at, mask=at < words), mask=at < words)
    return copy_rows
