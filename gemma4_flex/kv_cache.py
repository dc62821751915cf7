"""Page pools of the layers that own K/V, and the device mirror of each group's page table.

A *group* is one attention type: its layers share one page table, since they hold the same positions; each owner layer
has pools of its own. A token at position p of the sequence in `slot` lives at row
`table[slot, p // page_size] * page_size + p % page_size` of every pool of the group.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.page_table import PageTable


class KVGroup:
    """Pools and device tables of one attention type."""

    def __init__(self, layers: Iterable[LayerGeometry], pages: PageTable, dtype: torch.dtype, device: torch.device | str):
        owners = [layer for layer in layers if layer.owns_kv]
        self.window = pages.window
        self.page_size = pages.page_size
        self.num_pages = pages.n_pages
        self.columns = pages.columns
        self.table = torch.zeros(pages.num_slots, pages.columns, dtype=torch.int32, device=device)    # page 0: nothing held
        self.logical = torch.zeros(pages.n_pages, dtype=torch.int32, device=device)                    # page -> its logical page

        def pool(layer: LayerGeometry) -> Tensor:      # zeros: a page never written is finite, so masked out means out
            return torch.zeros(1, layer.num_kv_heads, pages.n_pages * pages.page_size, layer.head_dim, dtype=dtype, device=device)
        self.keys = {layer.index: pool(layer) for layer in owners}
        self.values = {layer.index: pool(layer) for layer in owners}

    def apply(self, changes: list[tuple[int, int, int]]) -> None:
        """Bring the device tables up to date, in place, with (slot, logical, page) changes; page 0 clears an entry."""
        if not changes:
            return
        slot, logical, page = torch.tensor(changes, dtype=torch.int32).T.contiguous().to(self.table.device).unbind()
        self.table[slot.long(), logical.long()] = page
        self.logical[page.long()] = torch.where(page == 0, 0, logical)

    def rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Pool rows [T] (int64) of the tokens at `positions` [T] of the sequences in `slots` [T]."""
        page = self.table[slots, positions // self.page_size].long()
        return page * self.page_size + positions % self.page_size

    def scrub(self, pages: Iterable[int]) -> None:
        """Zero `pages` in every pool: for a sequence that left non-finite values behind."""
        index = torch.tensor(list(pages), device=self.table.device, dtype=torch.long)
        for pool in (*self.keys.values(), *self.values.values()):
            pool.view(pool.shape[1], self.num_pages, self.page_size, pool.shape[3])[:, index] = 0

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole (source, destination) pages in every pool, as `PageTable.drain_copies` gives them: no page is both."""
        if not pairs:
            return
        source, destination = torch.tensor(pairs).T.contiguous().to(self.table.device).unbind()
        for pool in (*self.keys.values(), *self.values.values()):
            pages = pool.view(pool.shape[1], self.num_pages, self.page_size, pool.shape[3])
            pages[:, destination] = pages[:, source]

    def num_bytes(self) -> int:
        """Bytes of all pools, reserved page included."""
        return sum(pool.numel() * pool.element_size() for pool in (*self.keys.values(), *self.values.values()))


def store(key_pool: Tensor, value_pool: Tensor, keys: Tensor, values: Tensor, rows: Tensor) -> None:
    """Write [T, kv_heads, D] keys and values to `rows` [T] of a layer's pools [1, kv_heads, pool rows, D].

    The index goes on the pool itself: through a view of it, Inductor would copy the whole pool.
    """
    key_pool[:, :, rows] = keys.transpose(0, 1)[None]
    value_pool[:, :, rows] = values.transpose(0, 1)[None]


def memory_bytes(device: torch.device) -> int:
    """Memory that pools may take at most: what a GPU has free, or all a CPU has (what its caches hold can be freed)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class KVCache:
    """The groups of a model, by attention type."""

    def __init__(self, geometry: ModelGeometry, tables: Mapping[str, PageTable], dtype: torch.dtype, device: torch.device | str):
        self.groups = {
            kind: KVGroup([layer for layer in geometry.layers if layer.attention_type == kind], pages, dtype, device)
            for kind, pages in tables.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a captured step reads or writes here, by name."""
        named = {}
        for kind, group in self.groups.items():
            named |= {f"{kind}.table": group.table, f"{kind}.logical": group.logical}
            named |= {f"{kind}.keys.{i}": pool for i, pool in group.keys.items()}
            named |= {f"{kind}.values.{i}": pool for i, pool in group.values.items()}
        return named
