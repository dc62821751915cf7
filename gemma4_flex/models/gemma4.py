"""Gemma-4 E-series: Hugging Face's own layers walked over paged K/V.

The walk calls HF's modules for embeddings, norms, MLP and PLE, and replaces the attention forward of each layer, so that
K/V go to pages and come from the owner's pages. It works on a *view* of the caller's model: module objects of its own
over the caller's tensors, so that patching leaves the caller's model (a trainer's, an oracle's) as it was.

T: tokens of a step (flat, no padding), H: heads, D: head_dim, N: rows whose logits are wanted, V: vocabulary.
"""
from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemma4_flex.attention import GatherPlan, PagedBackend
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.masks import PageMask, Rows
from gemma4_flex.rotary import cos_sin, inverse_frequencies, rotate
from gemma4_flex.shared_kv import Sidecar


@dataclass(frozen=True)
class StepInputs:
    """One step's tokens, flat: ids, positions and slots [T] (int64), their query rows, and the tokens whose logits are
    wanted: indices [N] into the T with rows of their own, or None for all tokens (decode)."""
    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Rows
    wanted: Tensor | None = None
    wanted_rows: Rows | None = None


def view_of(module: nn.Module) -> nn.Module:
    """A tree of new module objects over the same parameters and buffers."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {name: child and view_of(child) for name, child in module._modules.items()}
    return twin


class PagedKV:
    """The attention side of a step: where keys go, and how each layer reads them."""

    def __init__(self, backends: dict[str, PagedBackend], sidecar: Sidecar | None):
        self.backends = backends
        self.sidecar = sidecar

    def begin(self, positions: Tensor, slots: Tensor, rows: Rows) -> StepKV:
        """Plans shared by all layers of a type for these tokens."""
        return StepKV(
            self, rows, slots, positions,
            write_rows={kind: b.group.rows_of(slots, positions) for kind, b in self.backends.items()},
            plans={kind: b.plan(rows) for kind, b in self.backends.items()},
            sidecar_plans={kind: self.sidecar.plan(kind, rows) for kind in self.sidecar.windows} if self.sidecar else {})


@dataclass(frozen=True)
class StepKV:
    """`PagedKV` for the tokens of one step."""
    kv: PagedKV
    rows: Rows
    slots: Tensor
    positions: Tensor
    write_rows: dict[str, Tensor]
    plans: dict[str, PageMask | GatherPlan]
    sidecar_plans: dict[str, GatherPlan]

    def write(self, layer: LayerGeometry, keys: Tensor, values: Tensor) -> None:
        """Store an owner's [T, kv_heads, D] keys and values."""
        kind = layer.attention_type
        self.kv.backends[kind].group.write(layer.index, keys, values, self.write_rows[kind])
        if self.kv.sidecar:
            self.kv.sidecar.write(layer.index, keys, values, self.slots, self.positions)

    def attend(self, layer: LayerGeometry, q: Tensor) -> Tensor:
        """[T, H, D] queries of `layer` over its owner's K/V."""
        kind = layer.attention_type
        if self.kv.sidecar and not layer.owns_kv:
            return self.kv.sidecar.attend(q, layer.kv_owner, self.rows, self.sidecar_plans[kind])
        return self.kv.backends[kind].attend(q, layer.kv_owner, self.rows, self.plans[kind])


def _paged_attention(layer: LayerGeometry) -> Callable:
    """The attention forward of `layer`, in the place of Hugging Face's."""
    def forward(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, *, paged: StepKV, **kwargs):
        cos, sin = position_embeddings
        shape = (hidden_states.shape[1], -1, layer.head_dim)
        q = rotate(self.q_norm(self.q_proj(hidden_states).view(shape)), cos, sin)
        if layer.owns_kv:
            keys = rotate(self.k_norm(self.k_proj(hidden_states).view(shape)), cos, sin)
            values = self.v_norm(self.v_proj(hidden_states).view(shape))
            paged.write(layer, keys, values)
        out = paged.attend(layer, q)
        return self.o_proj(out.reshape(1, hidden_states.shape[1], -1)), None
    return forward


class Gemma4Walk:
    """Callable: `StepInputs` to logits [N, V]."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, kv: PagedKV):
        self.model = view_of(model)
        self.text = self.model.model
        self.geometry = geometry
        self.kv = kv
        device = next(model.parameters()).device
        self.frequencies = {kind: inverse_frequencies(rope, device) for kind, rope in geometry.rope.items()}
        for layer, module in zip(geometry.layers, self.text.layers):
            module.self_attn.forward = types.MethodType(_paged_attention(layer), module.self_attn)

    def __call__(self, step: StepInputs, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V] after the softcap and, where only some tokens' logits are wanted, which tokens [T] came through
        the layers that write K/V with a finite stream. `record` collects the stream [N, hidden] of the wanted tokens: the
        prelude's, then after each layer."""
        ids = step.ids[None]
        hidden = self.text.embed_tokens(ids)
        dtype = hidden.dtype
        ple = self.text.project_per_layer_inputs(hidden, self.text.get_per_layer_inputs(ids, None))
        rotary = {kind: cos_sin(step.positions, f, dtype) for kind, f in self.frequencies.items()}
        paged = self.kv.begin(step.positions, step.slots, step.rows)
        wanted, finite = step.wanted, None

        def note(stream: Tensor) -> None:
            if record is not None:
                record.append((stream[0] if wanted is None else stream[0, wanted]).clone())

        note(hidden)
        for layer in self.geometry.layers:
            if layer.index == self.geometry.first_shared and wanted is not None:
                # layers from here on write no K/V: only tokens whose logits are wanted need them
                finite = torch.isfinite(hidden[0].float().sum(-1))
                hidden, ple = hidden[:, wanted], ple[:, wanted]
                rotary = {kind: (cos[wanted], sin[wanted]) for kind, (cos, sin) in rotary.items()}
                paged = self.kv.begin(step.positions[wanted], step.slots[wanted], step.wanted_rows)
                wanted = None
                if hidden.shape[1] == 0:
                    return hidden.new_empty(0, self.geometry.vocab_size), finite
            hidden = self.text.layers[layer.index](
                hidden, ple[:, :, layer.index, :], position_embeddings=rotary[layer.attention_type], attention_mask=None,
                position_ids=step.positions[None], paged=paged)
            note(hidden)
        if wanted is not None:                     # a model without shared layers: pick the wanted rows at the end
            finite = torch.isfinite(hidden[0].float().sum(-1))
            hidden = hidden[:, wanted]
        logits = self.model.lm_head(self.text.norm(hidden))[0]
        cap = self.geometry.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap, finite
