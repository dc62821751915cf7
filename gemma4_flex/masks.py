"""Which keys a query sees, built on the device straight from the page tables.

Queries come in *rows*: a row is a span of at most Q consecutive tokens of one sequence (decode: Q = 1). Row r holds
positions first[r] ... first[r] + count[r] - 1 of the sequence in slots[r]. Its keys lie in the pages

    logical page   f ......... w0 ......... w1 ......... last
                   [ partial ) [ whole      ) [ partial      ]

from f, the page of the oldest key its first query sees, to the page of its last query. *Whole* pages are visible to
every query of the row and skip the mask; the others check each key. Pages are listed in logical order, so where they
lie in the pool changes nothing, and the work is O(rows x pages a sequence holds).

R: rows, Q: row width, C: pages a row can see, W: window, P: page size.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gemma4_flex.kv_cache import KVGroup


class Rows(NamedTuple):
    """Query rows of a step. `token_of` [R, Q] picks each row's queries from the step's flat tokens and `place_of` [T]
    finds a token's query among the R * Q; both are None in decode, where row r is token r. `columns` [C] are 0 ... C - 1:
    no row sees a page of its sequence beyond the first C; None where the host does not know."""
    slots: Tensor            # [R] int64
    first: Tensor            # [R] int64
    count: Tensor            # [R] int64, at least 1
    width: int
    token_of: Tensor | None = None
    place_of: Tensor | None = None
    columns: Tensor | None = None

    def split(self, x: Tensor) -> Tensor:
        """[T, H, D] -> [R, H, Q, D]; places past a row's count repeat some token and are never read back."""
        if self.token_of is None:
            return x.unsqueeze(2)
        return x[self.token_of].transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """[R, H, Q, D] -> [T, H, D]."""
        if self.place_of is None:
            return x.squeeze(2)
        return x.transpose(1, 2).flatten(0, 1)[self.place_of]


@dataclass(frozen=True)
class PageSpan:
    """Pages in view of each row: logical pages first ... last, of which start_whole ... end_whole - 1 are whole. All [R]."""
    first: Tensor
    last: Tensor
    start_whole: Tensor
    end_whole: Tensor


def page_span(rows: Rows, page_size: int, window: int | None) -> PageSpan:
    """The pages a row's queries can see (see the drawing above)."""
    last_query = rows.first + rows.count - 1
    last = last_query // page_size
    end_whole = (rows.first + 1) // page_size            # pages that end at or before the first query
    if window is None:
        first = torch.zeros_like(last)
        start_whole = first
    else:
        first = (rows.first - window + 1).clamp(min=0) // page_size
        start_whole = (last_query - window).div(page_size, rounding_mode="floor") + 1   # begin inside every query's window
        start_whole = torch.maximum(start_whole, first)
    return PageSpan(first, last, start_whole, torch.maximum(start_whole, end_whole))


def columns_in_view(width: int, page_size: int, window: int | None, columns: int) -> int:
    """How many pages a row of `width` queries can touch at most; `columns` is what a sequence can hold."""
    return columns if window is None else min(columns, (window + width - 3) // page_size + 2)


class PageMask(NamedTuple):
    """flex_attention's block lists over pages: partial [R,1,1] and [R,1,1,C], whole likewise (int32, physical pages), or no
    lists of whole pages, where all stand among the partial ones."""
    num_partial: Tensor
    partial: Tensor
    num_whole: Tensor | None
    whole: Tensor | None


def page_mask(group: KVGroup, rows: Rows, *, pad_to: int = 0, list_whole: bool = True) -> PageMask:
    """Block lists of `rows` over `group`'s pool; lists are `pad_to` wide at least (torch's CPU kernel wants the pool's).
    Without `list_whole` every page in view is listed as partial."""
    span = page_span(rows, group.page_size, group.window)
    columns = columns_in_view(rows.width, group.page_size, group.window, group.columns)
    offset = torch.arange(columns, device=rows.slots.device)
    num_whole = span.end_whole - span.start_whole if list_whole else torch.zeros_like(span.first)
    num_partial = span.last - span.first + 1 - num_whole
    whole = span.start_whole[:, None] + offset
    partial = span.first[:, None] + offset
    partial = partial + torch.where(partial >= span.start_whole[:, None], num_whole[:, None], 0)

    def pages(logical: Tensor) -> Tensor:
        found = group.table[rows.slots[:, None], logical.clamp(max=group.columns - 1)]
        if pad_to > columns:
            found = torch.nn.functional.pad(found, (0, pad_to - columns))
        return found[:, None, None, :]
    counted = num_whole.int()[:, None, None]
    return PageMask(num_partial.int()[:, None, None], pages(partial), *((counted, pages(whole)) if list_whole else (None, None)))


def visible(table: Tensor, logical: Tensor, slots: Tensor, first: Tensor, page_size: int, window: int | None, *,
            one_position: bool = False, flat: int | None = None) -> Callable:
    """A flex_attention mask_mod over the whole pool: key `kv` is seen by query `q` of row `b` when its page belongs to the
    row's sequence (the table lists it at its own logical place), it is not in the future, and it is inside the window.
    `one_position`: all queries of a row stand at its first position. `flat`: the queries of all rows, each so many wide, come one
    after the other."""
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if flat is not None:
            b, q = q // flat, q % flat
        page = kv // page_size
        logical_page = logical[page]
        key_position = logical_page * page_size + kv % page_size
        query_position = first[b] if one_position else first[b] + q
        seen = (table[slots[b], logical_page] == page) & (key_position <= query_position)
        return seen if window is None else seen & (query_position - key_position < window)
    return mask_mod
