"""What the walks of all architectures share: one step through all layers, as regions.

A walk reads its weights from the modules of the caller's Hugging Face model and follows that model's arithmetic, rounding for
rounding; an architecture adds how its step begins, what a layer computes, and its head. A step is a few *regions*
(compiled.py): `begin`, once; a layer, as often as there are layers; `head`.

T: tokens of a step (flat, no padding), D: head_dim, L: layers, P: PLE width, N: rows whose logits are wanted, V: vocabulary.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gemma4_flex.compiled import Regions
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.masks import Rows
from gemma4_flex.models.matmul import Matmuls, matmuls_for
from gemma4_flex.models.paged import LayerKV, PagedKV, StepKV
from gemma4_flex.models.projections import projection, view_of


class StepInputs(NamedTuple):
    """One step's tokens, flat: ids, positions and slots [T] (int64), their query rows, and the tokens whose logits are
    wanted: indices [N] into the T with rows of their own, or None for all tokens (decode)."""
    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Rows
    wanted: Tensor | None = None
    wanted_rows: Rows | None = None


class Begun(NamedTuple):
    """What all layers share: the embeddings [T, hidden], normed for the first layer too, PLE [L, T, P], as one tensor or as L
    apart, None for a model without, cos and sin [T, D] by attention type, and the step's K/V."""
    hidden: Tensor
    normed: Tensor
    ple: Tensor | tuple[Tensor, ...] | None
    rotary: dict[str, tuple[Tensor, Tensor]]
    kv: StepKV


class Walk:
    """Callable: `StepInputs` to logits [N, V]. `regions` says what of it is compiled; `ple` where the table of per-layer
    embeddings is, "device" or "host"."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, kv: PagedKV, regions: Regions | None = None, *,
                 ple: str = "device"):
        self.model = view_of(model)
        self.text = self.model.model
        self.geometry = geometry
        self.kv = kv
        self.regions = regions or Regions()
        self.ple_in_host_memory = ple == "host"
        self.device, self.dtype = self.text.norm.weight.device, self.text.norm.weight.dtype
        self.device_type = self.device.type
        self.library = matmuls_for(self.device_type, self.dtype, 0, decode=False, compiled=self.regions.plan is not None).plain
        self.layers = [self._weights_of(module) for module in self.text.layers]
        self.head_weight = projection(self.model.lm_head)
        readers = [layer.kv_owner for layer in geometry.layers]
        self.read_again = {owner for owner in readers if readers.count(owner) > 1}

    # ---- what an architecture adds

    def _weights_of(self, module: nn.Module) -> NamedTuple:
        """What a layer's modules hold, as tensors over the same storage; its first norm as `input_norm`."""
        raise NotImplementedError

    def _begin(self, step: StepInputs) -> Begun:
        """What all layers share."""
        raise NotImplementedError

    def _layer_body(self, layer: LayerGeometry, gathered: dict, w: NamedTuple, pools: LayerKV, next_norm: Tensor,
                    hidden: Tensor, normed: Tensor, ple: Tensor | None, cos: Tensor, sin: Tensor,
                    kv: StepKV) -> tuple[Tensor, Tensor]:
        """The stream [T, hidden] after a layer, and normed for the next one. `normed` is the stream after the input norm."""
        raise NotImplementedError

    def _head(self, normed: Tensor) -> Tensor:
        """Logits [N, V] of the stream after the final norm."""
        raise NotImplementedError

    # ---- the step

    def __call__(self, step: StepInputs, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V], after a softcap where there is one; and, where only some tokens' logits are wanted, which tokens [T]
        came through the layers that write K/V with a finite stream, else None. `record` collects the stream [N, hidden] of the
        wanted tokens: the first layer's input, then each layer's output; nothing is compiled then."""
        if record is not None:
            with self.regions.off():
                return self._walk(step, record)
        return self._walk(step, None)

    def _walk(self, step: StepInputs, record: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        begun = self.regions(("begin",), self._begin, step)
        if self.regions.scope == "step" and record is None:
            return self.regions(("layers", self.geometry.first_shared), self._layers, step, begun)
        return self._layers(step, begun, record)

    def _layers(self, step: StepInputs, begun: Begun, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """All layers and the head."""
        geometry, wanted, finite = self.geometry, step.wanted, None
        hidden, normed, ple, rotary, kv = begun
        gathered: dict[int, tuple] = {}

        def note() -> None:
            if record is not None:
                record.append((hidden if wanted is None else hidden[wanted]).clone())
        note()
        next_norms = [weights.input_norm for weights in self.layers[1:]] + [self.text.norm.weight.detach()]
        for layer, next_norm in zip(geometry.layers, next_norms):
            if layer.index == geometry.first_shared and wanted is not None:
                # layers from here on write no K/V: only tokens whose logits are wanted need them
                finite, (hidden, normed, ple, rotary, kv) = self.regions(
                    ("cut",), self._cut, step, Begun(hidden, normed, ple, rotary, kv))
                gathered, wanted = {}, None
                if hidden.shape[0] == 0:
                    return hidden.new_empty(0, geometry.vocab_size), finite
            hidden, normed = self._layer(layer, next_norm, hidden, normed, None if ple is None else ple[layer.index], rotary, kv,
                                         gathered)
            note()
        if wanted is not None:                     # a model without shared layers: pick the wanted rows at the end
            finite = torch.isfinite(hidden.float().sum(-1))
            normed = normed[wanted]
        return self.regions(("head",), self._head, normed), finite

    def _cut(self, step: StepInputs, begun: Begun) -> tuple[Tensor, Begun]:
        """Which tokens [T] have a finite stream, and what is left for the layers that only wanted tokens pass."""
        hidden, normed, ple, rotary, _ = begun
        wanted = step.wanted
        rest = Begun(hidden[wanted], normed[wanted],
                     ple[:, wanted] if isinstance(ple, Tensor) else ple and tuple(rows[wanted] for rows in ple),
                     {kind: (cos[wanted], sin[wanted]) for kind, (cos, sin) in rotary.items()},
                     self.kv.begin(step.positions[wanted], step.slots[wanted], step.wanted_rows))
        return torch.isfinite(hidden.float().sum(-1)), rest

    def _layer(self, layer: LayerGeometry, next_norm: Tensor, hidden: Tensor, normed: Tensor, ple: Tensor | None, rotary: dict,
               kv: StepKV, gathered: dict) -> tuple[Tensor, Tensor]:
        """One layer, as a region that all layers of its kind share."""
        kind = layer.attention_type
        if self.regions.scope == "layer" or layer.kv_owner not in self.read_again:
            gathered = {}      # regions hand each other nothing but their results
        return self.regions(("layer", kind, layer.owns_kv), lambda *args: self._layer_body(layer, gathered, *args),
                            self.layers[layer.index], self.kv.of_layer(layer), next_norm, hidden, normed, ple, *rotary[kind],
                            kv.of(kind))

    def _matmuls(self, rows: Rows) -> Matmuls:
        """How a layer's linears are written for these rows."""
        return matmuls_for(self.device_type, self.dtype, rows.slots.shape[0], decode=rows.width == 1,
                           compiled=self.regions.plan is not None)
