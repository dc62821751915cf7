"""The attention side of a walk: where a step's keys and values go, and how each layer reads them.

T: tokens of a step, H: heads, K: kv heads, D: head_dim.
"""
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gemma4_flex.attention import PagedBackend
from gemma4_flex.geometry import LayerGeometry
from gemma4_flex.kv_cache import store
from gemma4_flex.masks import Rows
from gemma4_flex.shared_kv import Sidecar


class StepKV(NamedTuple):
    """Where the tokens of a step write their K/V and what they see, by attention type."""
    rows: Rows
    slots: Tensor
    positions: Tensor
    write_rows: dict[str, Tensor]
    plans: dict[str, tuple]
    sidecar_plans: dict[str, tuple]

    def of(self, kind: str) -> StepKV:
        """What layers of one attention type need of it."""
        return self._replace(write_rows={kind: self.write_rows[kind]}, plans={kind: self.plans[kind]},
                             sidecar_plans={k: plan for k, plan in self.sidecar_plans.items() if k == kind})


class LayerKV(NamedTuple):
    """The pools of a layer's owner, [1, K, pool rows, D], and the owner's sidecar buffers where there are any."""
    keys: Tensor
    values: Tensor
    sidecar: tuple[Tensor, Tensor] | None


class PagedKV:
    """The attention side of a step: where keys go, and how each layer reads them."""

    def __init__(self, backends: dict[str, PagedBackend], sidecar: Sidecar | None):
        self.backends = backends
        self.sidecar = sidecar

    def begin(self, positions: Tensor, slots: Tensor, rows: Rows) -> StepKV:
        """Plans shared by all layers of a type for these tokens."""
        return StepKV(
            rows, slots, positions,
            write_rows={kind: b.group.rows_of(slots, positions) for kind, b in self.backends.items()},
            plans={kind: b.plan(rows) for kind, b in self.backends.items()},
            sidecar_plans={kind: self.sidecar.plan(kind, rows) for kind in self.sidecar.windows} if self.sidecar else {})

    def of_layer(self, layer: LayerGeometry) -> LayerKV:
        """The pools that `layer` writes and reads."""
        group = self.backends[layer.attention_type].group
        sidecar = self.sidecar.buffers(layer.kv_owner) if self.sidecar else None
        return LayerKV(group.keys[layer.kv_owner], group.values[layer.kv_owner], sidecar)

    def write(self, layer: LayerGeometry, pools: LayerKV, step: StepKV, keys: Tensor, values: Tensor) -> None:
        """Store an owner's [T, K, D] keys and values."""
        store(pools.keys, pools.values, keys, values, step.write_rows[layer.attention_type])
        if pools.sidecar:
            self.sidecar.write(pools.sidecar, keys, values, step.slots, step.positions)

    def attend(self, layer: LayerGeometry, pools: LayerKV, step: StepKV, q: Tensor, gathered: dict[int, tuple]) -> Tensor:
        """[T, H, D] queries of `layer` over its owner's K/V. `gathered` keeps what one layer gathered for the next that
        reads the same owner in the same step."""
        kind = layer.attention_type
        if pools.sidecar and not layer.owns_kv:
            return self.sidecar.attend(q, pools.sidecar, step.rows, step.sidecar_plans[kind])
        return self.backends[kind].attend(q, pools.keys, pools.values, step.rows, step.plans[kind], layer.kv_owner, gathered,
                                         layer.scale)
