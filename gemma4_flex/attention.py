"""Attention over paged K/V: compiled flex_attention, and SDPA over gathered pages.

Scores are `scale` q k^T; Gemma-4, which normalises q and k, has a scale of exactly 1. Both back ends keep scores and
softmax in fp32. `paged_flex` and `paged_sdpa` take the same arguments and give the same values; flex reads the pages in
place, SDPA copies the pages in view first.

R: rows, Q: row width, H: heads, K: kv heads, D: head_dim, C: pages in view, P: page size, N: pool rows.
"""
from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gemma4_flex.compiled import RECOMPILE_LIMIT, missing_compiler
from gemma4_flex.kernel_options import decode_layout
from gemma4_flex.kv_cache import KVGroup
from gemma4_flex.masks import PageMask, Rows, columns_in_view, page_mask, page_span, visible
from gemma4_flex.row_attention import row_attention


def row_width(device_type: str, name: str, *, at_least: int = 0) -> int:
    """Queries a prefill row holds with the back end `name`. GPU tiles want 64 to 128, and sdpa's calls are few then; for flex
    on a CPU short rows waste less on short prompts. `at_least`: what FlashAttention-4 takes at once (`fa4.query_tile`)."""
    return max(at_least, 32 if device_type == "cpu" and name == "flex" else 128)


def flex_obstacle(device_type: str) -> str | None:
    """Why compiled flex_attention cannot run on this machine, or None. Uncompiled it would score the whole pool."""
    missing = missing_compiler(device_type)
    return missing and f"{missing}: attention runs on uncompiled sdpa; install g++ (Debian: apt-get install g++) for more speed"


def _flex(q: Tensor, keys: Tensor, values: Tensor, num_partial: Tensor, partial: Tensor, num_whole: Tensor | None,
          whole: Tensor | None, table: Tensor, logical: Tensor, slots: Tensor, first: Tensor, page_size: int,
          window: int | None, q_block: int, scale: float, options: dict | None) -> Tensor:
    R, H, Q, D = q.shape
    if options and options.get("BACKEND") == "FLASH":
        return _flash(q, keys, values, num_partial, partial, num_whole, whole, visible(table, logical, slots, first, page_size,
                                                                                       window, flat=Q), page_size, scale)
    folded = Q == 1 and bool(options) and bool(options.get("FORCE_USE_FLEX_ATTENTION"))
    if folded:      # the heads of a kv head as queries of one position: one tile, and one kernel without a combine step
        q = q.view(R, keys.shape[1], H // keys.shape[1], D)
    block_mask = BlockMask.from_kv_blocks(
        num_partial, partial, num_whole, whole, BLOCK_SIZE=(q_block, page_size),
        mask_mod=visible(table, logical, slots, first, page_size, window, one_position=folded),
        seq_lengths=(q.shape[2], keys.shape[2]), compute_q_blocks=False)
    out = flex_attention(q, keys, values, block_mask=block_mask, enable_gqa=True, scale=scale, kernel_options=options)
    return out.reshape(R, H, Q, D)


def _flash(q: Tensor, keys: Tensor, values: Tensor, num_partial: Tensor, partial: Tensor, num_whole: Tensor, whole: Tensor,
           seen: Callable, page_size: int, scale: float) -> Tensor:
    """The same by FlashAttention-4, which has no batch of queries over one pool: the rows come one after the other, each a block
    of queries with a list of pages of its own."""
    R, H, Q, D = q.shape
    lists = (x.transpose(0, 2) for x in (num_partial, partial, num_whole, whole))      # [1, 1, R], [1, 1, R, C]
    block_mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(Q, page_size), mask_mod=seen,
                                          seq_lengths=(R * Q, keys.shape[2]), compute_q_blocks=False)
    out = flex_attention(q.transpose(0, 1).reshape(1, H, R * Q, D), keys, values, block_mask=block_mask, enable_gqa=True,
                         scale=scale, kernel_options={"BACKEND": "FLASH"})
    return out.view(H, R, Q, D).transpose(0, 1)


@functools.cache
def _compiled_flex():
    return torch.compile(_flex, dynamic=False, fullgraph=True)


@torch.library.custom_op("gemma4_flex::paged_flex", mutates_args=())
def _flex_op(q: Tensor, keys: Tensor, values: Tensor, num_partial: Tensor, partial: Tensor, num_whole: Tensor | None,
             whole: Tensor | None, table: Tensor, logical: Tensor, slots: Tensor, first: Tensor, page_size: int, window: int,
             q_block: int, scale: float, options: str) -> Tensor:
    # an operator of its own, so that a traced step calls the compiled kernel and not its thousand-fold slower plain form
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT):
        return _compiled_flex()(q, keys, values, num_partial, partial, num_whole, whole, table, logical, slots, first,
                                page_size, window or None, q_block, scale, json.loads(options)).contiguous()


@_flex_op.register_fake
def _(q, *args):
    return q.new_empty(q.shape)


def paged_flex(q: Tensor, keys: Tensor, values: Tensor, group: KVGroup, rows: Rows, mask: PageMask,
               options: dict | None = None, *, scale: float = 1.0, inline: bool = False) -> Tensor:
    """Attention [R, H, Q, D] of queries `q` over pools `keys` and `values` of `group`, by flex_attention reading the pages in
    place: compiled by itself, or `inline`, for the region around it to compile."""
    block = rows.width if rows.width > 1 else 128
    lists = (mask.num_partial, mask.partial, mask.num_whole, mask.whole, group.table, group.logical, rows.slots, rows.first,
             group.page_size)
    if inline:
        return _flex(q, keys, values, *lists, group.window, block, scale, options)
    return _flex_op(q, keys, values, *lists, group.window or 0, block, scale, json.dumps(options))


class GatherPlan(NamedTuple):
    """What SDPA needs of a group for some rows: pool rows of the keys in view [R, N'] and which queries see them
    [R, 1, Q, N'] (bool)."""
    pool_rows: Tensor
    seen: Tensor


def gather_plan(group: KVGroup, rows: Rows) -> GatherPlan:
    """Every position a row can see, in logical order; the sequence's own pages only."""
    span = page_span(rows, group.page_size, group.window)
    device = rows.slots.device
    if group.window is None and rows.columns is not None:
        logical = span.first[:, None] + rows.columns
    else:
        columns = columns_in_view(rows.width, group.page_size, group.window, group.columns)
        logical = span.first[:, None] + torch.arange(columns, device=device)
    page = group.table[rows.slots[:, None], logical.clamp(max=group.columns - 1)].long()
    inside = torch.arange(group.page_size, device=device)
    pool_rows = (page[:, :, None] * group.page_size + inside).flatten(1)
    key_position = (logical[:, :, None] * group.page_size + inside).flatten(1)
    return GatherPlan(pool_rows, see(rows, key_position, group.window))


def see(rows: Rows, key_position: Tensor, window: int | None) -> Tensor:
    """Bool [R, 1, Q, N']: which queries of each row see keys at `key_position` [R, N'] of their own sequence."""
    query = rows.first[:, None] + torch.arange(rows.width, device=rows.first.device)
    distance = query[:, :, None] - key_position[:, None, :]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen[:, None]


def grouped_sdpa(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float = 1.0) -> Tensor:
    """SDPA [R, H, Q, D] with heads of one kv head folded into the query axis: K/V [R, K, N', D] are never repeated."""
    R, H, Q, D = q.shape
    kv_heads = keys.shape[1]
    folded = q.reshape(R, kv_heads, (H // kv_heads) * Q, D)
    seen = seen.repeat(1, 1, H // kv_heads, 1) if Q > 1 else seen
    return F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=scale).reshape(R, H, Q, D)


def gather(pool: Tensor, pool_rows: Tensor) -> Tensor:
    """Pool rows [R, N'] as [R, K, N', D]."""
    return pool[0][:, pool_rows].transpose(0, 1)


def paged_sdpa(q: Tensor, keys: Tensor, values: Tensor, plan: GatherPlan, scale: float = 1.0) -> Tensor:
    """Attention [R, H, Q, D] of queries `q` over the pools `keys` and `values`, gathered to a dense [R, K, N', D] first."""
    return grouped_sdpa(q, gather(keys, plan.pool_rows), gather(values, plan.pool_rows), plan.seen, scale)


class PagedBackend:
    """How one attention type's layers attend over their group: `flex` or `sdpa`, with kernel options by phase. `inline`: the
    flex call is part of the compiled region around it."""

    def __init__(self, name: str, group: KVGroup, options: dict[str, dict | None], *, inline: bool = False):
        self.name = name
        self.group = group
        self.options = options
        self.inline = inline
        self.on_cpu = group.table.device.type == "cpu"

    def _by_row(self, rows: Rows) -> bool:
        return self.name == "sdpa" and self.on_cpu and rows.width > 1

    def plan(self, rows: Rows) -> PageMask | GatherPlan | tuple[()]:
        """What all layers of the type share in a step."""
        if self._by_row(rows):
            return ()
        if self.name == "sdpa":
            return gather_plan(self.group, rows)
        # torch's CUDA decode template splits its work by what is listed as partial where nothing is listed as whole, and by
        # the length of the whole pool otherwise; the CPU template fails to compile without a list of whole pages
        return page_mask(self.group, rows, pad_to=self.group.num_pages if self.on_cpu else 0,
                         list_whole=self.on_cpu or rows.width > 1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: Rows, plan: PageMask | GatherPlan | tuple[()], owner: int,
               gathered: dict[int, tuple[Tensor, Tensor]], scale: float = 1.0) -> Tensor:
        """[T, H, D] -> [T, H, D] for the step's rows over the pools of `owner`; `gathered` holds what sdpa has gathered of
        owners before, and takes this one."""
        if self._by_row(rows):
            return row_attention(q, keys, values, self.group.table, rows.slots, rows.first, rows.count,
                                 rows.token_of[:, 0].contiguous(), self.group.page_size, self.group.window or 0, scale)
        split = rows.split(q)
        if self.name == "flex":
            options = self.options["decode" if rows.width == 1 else "prefill"]
            if rows.width == 1 and not self.on_cpu:
                options = decode_layout(q.shape[0], windowed=self.group.window is not None,
                                        queries_a_key=q.shape[1] // keys.shape[1]) | (options or {})
            return rows.join(paged_flex(split, keys, values, self.group, rows, plan, options, scale=scale,
                                        inline=self.inline))
        if owner not in gathered:
            gathered[owner] = gather(keys, plan.pool_rows), gather(values, plan.pool_rows)
        return rows.join(grouped_sdpa(split, *gathered[owner], plan.seen, scale))
