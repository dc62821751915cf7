"""Gemma-4 E-series in float64, written from the equations: the measure by which bf16 errors are judged.

Shares nothing with the engine but `ModelGeometry`, and of that it takes sizes only: which layer owns the K/V a shared
layer reads is worked out here again. Nothing is cached, paged or skipped; masks are dense. Weights are widened to
float64 one at a time, as they are used, so a model needs little more than its own memory.

A number that the model itself rounds to its dtype before use (the two embedding scales) is rounded here too: that is
part of what the model computes. Every other constant and every intermediate is float64.

Shapes: T tokens, H hidden, L layers, P per-layer input width, N query heads, K key/value heads, D head_dim, F MLP
width, V vocabulary, R rows wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gemma4_flex.geometry import LayerGeometry, ModelGeometry, RopeGeometry

HEAD_CHUNK = 8192  # vocabulary rows widened at once: 262,144 of E2B's would take 3.2 GB


@dataclass(frozen=True)
class ReferenceTrace:
    """Float64 on the CPU. `hidden[0]` is the scaled embedding, `hidden[i + 1]` the stream after layer i."""

    hidden: Tensor  # [L+1, R, H]
    logits: Tensor  # [R, V], after the softcap


class Weights:
    """A state dict by text-model names (`layers.0.mlp.up_proj.weight`), whatever prefix its keys have."""

    def __init__(self, state_dict: Mapping[str, Tensor]):
        mark = "embed_tokens.weight"
        prefixes = [key.removesuffix(mark) for key in state_dict if key == mark or key.endswith("." + mark)]
        if len(prefixes) != 1:
            raise ValueError(f"the state dict holds {len(prefixes)} tensors named {mark}; pass one text model's weights")
        self.state_dict, self.prefix = state_dict, prefixes[0]

    def stored(self, name: str) -> Tensor:
        """The tensor as stored, in the model's dtype and on its device. Raises ValueError where there is none."""
        key = name if name == "lm_head.weight" else self.prefix + name
        if key not in self.state_dict:
            raise ValueError(f"the state dict has no {key}; pass the whole text model's weights")
        return self.state_dict[key]

    def __call__(self, name: str) -> Tensor:
        return widen(self.stored(name))


def widen(x: Tensor) -> Tensor:
    """`x` in float64 on the CPU, detached."""
    return x.detach().to("cpu").to(torch.float64)


@torch.no_grad()
def reference_forward(
    state_dict: Mapping[str, Tensor], geometry: ModelGeometry, token_ids: Sequence[int],
    *, rows: Sequence[int] | None = None,
) -> ReferenceTrace:
    """Run the whole sequence at once, every layer over every position, and return the positions in `rows`.

    state_dict: any dtype, any device; keys of the HF text model, bare or with a prefix (`model.`).
    token_ids: T ids, positions 0 to T-1. rows: R positions to return, all of them by default.
    Raises ValueError for a weight that is missing. Source: gemma4-e-series.md section 2.
    """
    weights, eps = Weights(state_dict), geometry.norm_eps
    ids_T = torch.tensor(list(token_ids), dtype=torch.int64)
    rows_R = torch.arange(len(ids_T)) if rows is None else torch.tensor(list(rows), dtype=torch.int64)
    h_TH = scaled_lookup(weights.stored("embed_tokens.weight"), ids_T, geometry.hidden_size)
    p_TLP = per_layer_inputs(weights, geometry, ids_T, h_TH)
    tables = {kind: rotary_table(len(ids_T), rope) for kind, rope in geometry.rope.items()}
    owners = kv_owners([layer.attention_type for layer in geometry.layers], geometry.first_shared)
    kv_by_owner: dict[int, tuple[Tensor, Tensor]] = {}
    kept = [h_TH[rows_R]]
    for i, layer in enumerate(geometry.layers):
        h_TH = decoder_layer(
            weights, layer, h_TH, p_TLP[:, i], table=tables[layer.attention_type], owner=owners[i],
            kv_by_owner=kv_by_owner, eps=eps)
        kept.append(h_TH[rows_R])
    logits_RV = head(weights, geometry, rms_norm(h_TH[rows_R], weights("norm.weight"), eps))
    return ReferenceTrace(hidden=torch.stack(kept), logits=logits_RV)


def kv_owners(attention_types: Sequence[str], first_shared: int) -> list[int]:
    """For each layer the one whose K/V it reads: its own below `first_shared`, else the last own one of its type."""
    return [
        i if i < first_shared else max(j for j in range(first_shared) if attention_types[j] == kind)
        for i, kind in enumerate(attention_types)
    ]


def scaled_lookup(table: Tensor, ids_T: Tensor, width: int) -> Tensor:
    """Rows of an embedding times the square root of `width`, a root rounded to the table's dtype as the model does."""
    scale = torch.tensor(math.sqrt(width), dtype=torch.float32).to(table.dtype)
    return widen(table[ids_T.to(table.device)]) * widen(scale)


def per_layer_inputs(weights: Weights, geometry: ModelGeometry, ids_T: Tensor, e_TH: Tensor) -> Tensor:
    """What each layer is told of each token: a projection of its scaled embedding, and a looked-up row. [T, L, P]"""
    shape = (len(ids_T), geometry.num_layers, geometry.ple_width)
    # a table row holds every layer's slice side by side; its scale is the root of one slice's width
    looked_up = scaled_lookup(weights.stored("embed_tokens_per_layer.weight"), ids_T, geometry.ple_width).reshape(shape)
    projected = (e_TH @ weights("per_layer_model_projection.weight").T / math.sqrt(geometry.hidden_size)).reshape(shape)
    projected = rms_norm(projected, weights("per_layer_projection_norm.weight"), geometry.norm_eps)
    return (projected + looked_up) / math.sqrt(2)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square over the last dimension; multiply by the weight itself, not by 1 + it."""
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def rotary_table(num_tokens: int, rope: RopeGeometry) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's D/2 angles, each [T, D/2].

    Pair i turns by theta^(-2i/D) a position; of the D/2 pairs only the first `rotated_fraction` turn at all.
    """
    pairs = rope.head_dim // 2
    turning = int(rope.rotated_fraction * rope.head_dim) // 2
    frequencies = torch.zeros(pairs, dtype=torch.float64)
    exponents = -2.0 * torch.arange(turning, dtype=torch.float64) / rope.head_dim
    frequencies[:turning] = torch.pow(torch.tensor(rope.theta, dtype=torch.float64), exponents)
    angles = torch.arange(num_tokens, dtype=torch.float64)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_TND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + D/2) of every head by its position's angle."""
    cos, sin = (t[:, None, :] for t in table)  # [T, 1, D/2]
    first, second = x_TND.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visible(num_tokens: int, window: int | None) -> Tensor:
    """Bool [T, T]: query q (row) sees key k where k <= q and, in a window, q - k < window: itself and window - 1 more."""
    q, k = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
    return (k <= q) if window is None else (k <= q) & (q - k < window)


def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, window: int | None) -> Tensor:
    """softmax(q k^T) v with no scale; query heads in K runs of equal length share a key/value head. [T, N, D]"""
    hidden_pairs = ~visible(len(q_TND), window)
    run = q_TND.shape[1] // k_TKD.shape[1]
    heads = []
    for n in range(q_TND.shape[1]):  # a head at a time: all at once would hold N * T * T float64 scores
        scores = q_TND[:, n] @ k_TKD[:, n // run].T
        heads.append(scores.masked_fill(hidden_pairs, -math.inf).softmax(-1) @ v_TKD[:, n // run])
    return torch.stack(heads, dim=1)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def decoder_layer(
    weights: Weights, layer: LayerGeometry, h_TH: Tensor, p_TP: Tensor, *, table: tuple[Tensor, Tensor], owner: int,
    kv_by_owner: dict[int, tuple[Tensor, Tensor]], eps: float,
) -> Tensor:
    """One layer of the stream. An owner leaves its K/V, normed and rotated, in `kv_by_owner`; a shared layer reads it."""

    def w(name: str) -> Tensor:
        return weights(f"layers.{layer.index}.{name}.weight")

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, w(name), eps)

    num_tokens = len(h_TH)
    a_TH = normed(h_TH, "input_layernorm")
    q_TND = (a_TH @ w("self_attn.q_proj").T).reshape(num_tokens, layer.num_heads, layer.head_dim)
    q_TND = rotate(normed(q_TND, "self_attn.q_norm"), table)
    if owner == layer.index:
        k_TKD = (a_TH @ w("self_attn.k_proj").T).reshape(num_tokens, layer.num_kv_heads, layer.head_dim)
        v_TKD = (a_TH @ w("self_attn.v_proj").T).reshape(num_tokens, layer.num_kv_heads, layer.head_dim)
        kv_by_owner[owner] = rotate(normed(k_TKD, "self_attn.k_norm"), table), rms_norm(v_TKD, None, eps)
    o_TND = attend(q_TND, *kv_by_owner[owner], layer.window)
    h_TH = h_TH + normed(o_TND.flatten(1) @ w("self_attn.o_proj").T, "post_attention_layernorm")

    m_TH = normed(h_TH, "pre_feedforward_layernorm")
    up_TF = gelu_tanh(m_TH @ w("mlp.gate_proj").T) * (m_TH @ w("mlp.up_proj").T)
    h_TH = h_TH + normed(up_TF @ w("mlp.down_proj").T, "post_feedforward_layernorm")

    gated_TP = gelu_tanh(h_TH @ w("per_layer_input_gate").T) * p_TP
    h_TH = h_TH + normed(gated_TP @ w("per_layer_projection").T, "post_per_layer_input_norm")
    return h_TH * weights(f"layers.{layer.index}.layer_scalar")


def head(weights: Weights, geometry: ModelGeometry, x_RH: Tensor) -> Tensor:
    """Logits by the embedding table (or `lm_head` where it is untied), then cap * tanh(logits / cap). [R, V]"""
    table_VH = weights.stored("embed_tokens.weight" if geometry.tied_head else "lm_head.weight")
    logits_RV = torch.cat([x_RH @ widen(part).T for part in table_VH.split(HEAD_CHUNK)], dim=1)
    cap = geometry.final_softcap
    return logits_RV if cap is None else cap * torch.tanh(logits_RV / cap)
