"""Qwen3 and Llama over paged K/V, written out as functions of tensors: one attention type, a norm before each half of a layer.

They differ in the norms of queries and keys, which Qwen3 has and Llama has not.

T: tokens of a step (flat, no padding), N: rows whose logits are wanted, V: vocabulary.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemma4_flex.compiled import Regions
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.models.paged import LayerKV, PagedKV, StepKV
from gemma4_flex.models.projections import Projection, gated, look_up, project, projection, table
from gemma4_flex.models.walk import Begun, StepInputs, Walk
from gemma4_flex.rotary import cos_sin, rotate


class LayerWeights(NamedTuple):
    """A layer's weights; Llama has no norms of queries and keys."""
    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Projection
    post_attention_norm: Tensor
    gate_up: Projection
    down: Projection


def layer_weights(module: nn.Module) -> LayerWeights:
    """What a layer's modules hold, as tensors over the same storage."""
    attention, mlp = module.self_attn, module.mlp
    normed = getattr(attention, "q_norm", None) is not None
    return LayerWeights(
        module.input_layernorm.weight.detach(), projection(attention.q_proj, attention.k_proj, attention.v_proj),
        attention.q_norm.weight.detach() if normed else None, attention.k_norm.weight.detach() if normed else None,
        projection(attention.o_proj), module.post_attention_layernorm.weight.detach(),
        projection(mlp.gate_proj, mlp.up_proj), projection(mlp.down_proj))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32, rounded before the weight is multiplied in and after it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class DenseWalk(Walk):
    """The walk of Qwen3ForCausalLM and LlamaForCausalLM."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, kv: PagedKV, regions: Regions | None = None, *,
                 ple: str = "device"):
        super().__init__(model, geometry, kv, regions, ple=ple)
        self.tokens = table(self.text.embed_tokens)
        # made anew by transformers itself, which knows every regime: the model's own table may have been cast with its weights
        rotary = type(self.text.rotary_emb)(self.text.config)
        self.frequencies = rotary.inv_freq.float().to(self.device)
        self.rotary_scaling = float(rotary.attention_scaling)

    def _weights_of(self, module: nn.Module) -> LayerWeights:
        return layer_weights(module)

    def _begin(self, step: StepInputs) -> Begun:
        hidden = look_up(self.tokens, step.ids)
        rotary = cos_sin(step.positions, self.frequencies, hidden.dtype, self.rotary_scaling)
        normed = rms_norm(hidden, self.layers[0].input_norm, self.geometry.norm_eps)
        return Begun(hidden, normed, None, dict.fromkeys(self.geometry.attention_types, rotary),
                     self.kv.begin(step.positions, step.slots, step.rows))

    def _layer_body(self, layer: LayerGeometry, gathered: dict, w: LayerWeights, pools: LayerKV, next_norm: Tensor,
                    hidden: Tensor, normed: Tensor, ple: None, cos: Tensor, sin: Tensor, kv: StepKV) -> tuple[Tensor, Tensor]:
        eps, count = self.geometry.norm_eps, hidden.shape[0]
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        matmuls = self._matmuls(kv.rows)
        qkv = project(normed, w.qkv, matmuls.plain).view(count, -1, width)
        q, keys, values = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if w.q_norm is not None:
            q, keys = rms_norm(q, w.q_norm, eps), rms_norm(keys, w.k_norm, eps)
        self.kv.write(layer, pools, kv, rotate(keys, cos, sin), values)
        attended = self.kv.attend(layer, pools, kv, rotate(q, cos, sin), gathered).reshape(count, heads * width)
        hidden = hidden + project(attended, w.o, matmuls.plain)
        inner = gated(rms_norm(hidden, w.post_attention_norm, eps), w.gate_up, matmuls.gated, F.silu)
        hidden = hidden + project(inner, w.down, matmuls.plain)
        return hidden, rms_norm(hidden, next_norm, eps)

    def _head(self, normed: Tensor) -> Tensor:
        return project(normed, self.head_weight, self.library)
