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
from gemma4_flex.masks import Rows


class Sidecar:
    """Dense K/V by slot of the owners that shared layers read."""

    def __init__(self, geometry: ModelGeometry, num_slots: int, max_seq_length: int, dtype: torch.dtype,
                 device: torch.device | str):
        read = sorted({layer.kv_owner for layer in geometry.layers if not layer.owns_kv})
        self.windows = {geometry.layers[i].attention_type: geometry.layers[i].window for i in read}
        self.max_seq_length = max_seq_length

        def buffer(owner: int) -> Tensor:
            layer = geometry.layers[owner]
            return torch.zeros(num_slots, layer.num_kv_heads, max_seq_length, layer.head_dim, dtype=dtype, device=device)
        self.keys = {i: buffer(i) for i in read}
        self.values = {i: buffer(i) for i in read}

    def write(self, owner: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Store the owner's [T, kv_heads, D] keys and values; an owner nobody reads has nothing to store."""
        if owner in self.keys:
            self.keys[owner][slots, :, positions] = keys
            self.values[owner][slots, :, positions] = values

    def plan(self, attention_type: str, rows: Rows) -> GatherPlan:
        """Positions in view of each row: the window's for sliding layers, all for full ones; `pool_rows` are positions."""
        window = self.windows[attention_type]
        if window is None:
            reach = self.max_seq_length if rows.reach is None else rows.reach
            positions = torch.arange(reach, device=rows.first.device).expand(len(rows.first), -1)
        else:
            reach = min(self.max_seq_length, window + rows.width - 1)
            start = (rows.first - window + 1).clamp(min=0, max=self.max_seq_length - reach)
            positions = start[:, None] + torch.arange(reach, device=rows.first.device)
        return GatherPlan(positions, see(rows, positions, window))

    def attend(self, q: Tensor, owner: int, rows: Rows, plan: GatherPlan) -> Tensor:
        """[T, H, D] -> [T, H, D] over the owner's buffer."""
        keys = self.keys[owner][rows.slots[:, None], :, plan.pool_rows].transpose(1, 2)
        values = self.values[owner][rows.slots[:, None], :, plan.pool_rows].transpose(1, 2)
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
