"""How a layer without K/V of its own reads its owner's: from the owner's pages, or from a fixed-address sidecar.

`paged` costs no memory: the pages are where they are. `sidecar` keeps a dense copy by slot of each owner that is read,
[slots, kv_heads, max_seq_length, head_dim], which the owner fills beside its pages; readers take it with SDPA. Either
way a reader only reads: nothing here writes for a shared layer.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gemma4_flex.attention import GatherPlan, grouped_sdpa, see
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kv_cache import KVGroup
from gemma4_flex.masks import Rows


class Sidecar:
    """Dense K/V by slot of the owners that shared layers read."""

    def __init__(self, geometry: ModelGeometry, num_slots: int, max_seq_length: int, page_size: int, dtype: torch.dtype,
                 device: torch.device | str):
        read = sorted({layer.kv_owner for layer in geometry.layers if not layer.owns_kv})
        self.owners = {kind: [i for i in read if geometry.layers[i].attention_type == kind] for kind in geometry.attention_types}
        self.windows = {geometry.layers[i].attention_type: geometry.layers[i].window for i in read}
        self.page_size = page_size
        self.max_seq_length = max_seq_length = -(-max_seq_length // page_size) * page_size      # whole pages, as the pools

        def buffer(owner: int) -> Tensor:
            layer = geometry.layers[owner]
            return torch.zeros(num_slots, layer.num_kv_heads, max_seq_length, layer.head_dim, dtype=dtype, device=device)
        self.keys = {i: buffer(i) for i in read}
        self.values = {i: buffer(i) for i in read}

    def buffers(self, owner: int) -> tuple[Tensor, Tensor] | None:
        """The owner's keys and values, [slots, kv_heads, max_seq_length, head_dim]; None for an owner nobody else reads."""
        return (self.keys[owner], self.values[owner]) if owner in self.keys else None

    def write(self, buffers: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Store an owner's [T, kv_heads, D] keys and values in its buffers."""
        for buffer, rows in zip(buffers, (keys, values)):
            buffer[slots, :, positions] = rows

    def load(self, attention_type: str, slot: int, held: list[tuple[int, int]], group: KVGroup) -> None:
        """Fill a slot from the (logical, physical) pages of `group` that it holds: for pages that it took over, and so never
        wrote."""
        if not held or not self.owners[attention_type]:
            return
        logical, page = torch.tensor(held).T.contiguous().to(group.table.device).unbind()
        for buffers, pools in ((self.keys, group.keys), (self.values, group.values)):
            for owner in self.owners[attention_type]:
                buffer, pool = buffers[owner], pools[owner]
                rows = buffer[slot].unflatten(1, (-1, self.page_size))
                rows[:, logical] = pool.view(pool.shape[1], -1, self.page_size, pool.shape[3])[:, page]

    def plan(self, attention_type: str, rows: Rows) -> GatherPlan:
        """Positions in view of each row: the window's for sliding layers, all for full ones; `pool_rows` are positions."""
        window = self.windows[attention_type]
        if window is None:
            pages = self.max_seq_length // self.page_size
            pages = torch.arange(pages, device=rows.first.device) if rows.columns is None else rows.columns
            inside = torch.arange(self.page_size, device=rows.first.device)
            positions = (pages[:, None] * self.page_size + inside).flatten().expand(rows.first.shape[0], -1)
        else:
            reach = min(self.max_seq_length, window + rows.width - 1)
            start = (rows.first - window + 1).clamp(min=0, max=self.max_seq_length - reach)
            positions = start[:, None] + torch.arange(reach, device=rows.first.device)
        return GatherPlan(positions, see(rows, positions, window))

    def attend(self, q: Tensor, buffers: tuple[Tensor, Tensor], rows: Rows, plan: GatherPlan) -> Tensor:
        """[T, H, D] -> [T, H, D] over an owner's buffers."""
        keys, values = (b[rows.slots[:, None], :, plan.pool_rows].transpose(1, 2) for b in buffers)
        return rows.join(grouped_sdpa(rows.split(q), keys, values, plan.seen))

    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.numel() * b.element_size() for b in (*self.keys.values(), *self.values.values()))

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name."""
        return {f"sidecar.keys.{i}": b for i, b in self.keys.items()} | {f"sidecar.values.{i}": b for i, b in self.values.items()}

    def scrub(self, slot: int) -> None:
        """Zero a slot: for a sequence that left non-finite values behind."""
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer[slot] = 0
