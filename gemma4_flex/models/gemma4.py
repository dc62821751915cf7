"""Gemma-4 E-series over paged K/V, written out as functions of tensors.

T: tokens of a step (flat, no padding), L: layers, P: PLE width, N: rows whose logits are wanted, V: vocabulary.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemma4_flex.compiled import Regions
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.models.matmul import keep
from gemma4_flex.models.paged import LayerKV, PagedKV, StepKV
from gemma4_flex.models.projections import Projection, gated, look_up, project, projection, table
from gemma4_flex.models.walk import Begun, StepInputs, Walk
from gemma4_flex.rotary import cos_sin, inverse_frequencies, rotate

# ---- weights --------------------------------------------------------------------------------------------------------

class LayerWeights(NamedTuple):
    """A layer's weights; a layer that shares its K/V has no k_norm and a `qkv` of q alone."""
    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor
    k_norm: Tensor | None
    o: Projection
    post_attention_norm: Tensor
    pre_feedforward_norm: Tensor
    gate_up: Projection
    down: Projection
    post_feedforward_norm: Tensor
    ple_gate: Projection
    ple_projection: Projection
    post_ple_norm: Tensor
    scalar: Tensor


def layer_weights(module: nn.Module) -> LayerWeights:
    """What a layer's modules hold, as tensors over the same storage."""
    attention, mlp = module.self_attn, module.mlp
    owner = getattr(attention, "k_proj", None) is not None
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj) if owner else (attention.q_proj,)
    return LayerWeights(
        module.input_layernorm.weight.detach(), projection(*qkv), attention.q_norm.weight.detach(),
        attention.k_norm.weight.detach() if owner else None, projection(attention.o_proj),
        module.post_attention_layernorm.weight.detach(), module.pre_feedforward_layernorm.weight.detach(),
        projection(mlp.gate_proj, mlp.up_proj), projection(mlp.down_proj), module.post_feedforward_layernorm.weight.detach(),
        projection(module.per_layer_input_gate), projection(module.per_layer_projection),
        module.post_per_layer_input_norm.weight.detach(), module.layer_scalar.detach())


# ---- arithmetic -----------------------------------------------------------------------------------------------------

def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32, rounded once."""
    wide = x.float()
    wide = wide * (wide.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5)
    return (wide if weight is None else wide * weight.float()).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# ---- the walk -------------------------------------------------------------------------------------------------------

class Gemma4Walk(Walk):
    """The walk of Gemma4ForCausalLM."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, kv: PagedKV, regions: Regions | None = None, *,
                 ple: str = "device"):
        super().__init__(model, geometry, kv, regions, ple=ple)
        self.frequencies = {kind: inverse_frequencies(rope, self.device) for kind, rope in geometry.rope.items()}
        self.ple_projection = projection(self.text.per_layer_model_projection)
        self.tokens, self.ple_tokens = table(self.text.embed_tokens), table(self.text.embed_tokens_per_layer)

    def _weights_of(self, module: nn.Module) -> LayerWeights:
        return layer_weights(module)

    def _begin(self, step: StepInputs) -> Begun:
        text, geometry = self.text, self.geometry
        count = step.ids.shape[0]
        hidden = look_up(self.tokens, step.ids) * text.embed_tokens.embed_scale.to(self.dtype)
        shape = (count, geometry.num_layers, geometry.ple_width)
        by_token = look_up(self.ple_tokens, step.ids, in_host_memory=self.ple_in_host_memory)
        by_token = (by_token * text.embed_tokens_per_layer.embed_scale.to(self.dtype)).view(shape)
        by_context = (project(hidden, self.ple_projection, self.library) * geometry.hidden_size ** -0.5).view(shape)
        by_context = rms_norm(by_context, text.per_layer_projection_norm.weight, geometry.norm_eps)
        ple = ((by_context + by_token) * 2.0 ** -0.5).transpose(0, 1).contiguous()
        if self.regions.scope == "step":      # apart, so that the compiled code of a layer does not depend on its place
            ple = tuple(rows.clone() for rows in ple.unbind())
        rotary = {kind: cos_sin(step.positions, f, hidden.dtype) for kind, f in self.frequencies.items()}
        normed = rms_norm(hidden, self.layers[0].input_norm, geometry.norm_eps)
        return Begun(hidden, normed, ple, rotary, self.kv.begin(step.positions, step.slots, step.rows))

    def _layer_body(self, layer: LayerGeometry, gathered: dict, w: LayerWeights, pools: LayerKV, next_norm: Tensor,
                    hidden: Tensor, normed: Tensor, ple: Tensor, cos: Tensor, sin: Tensor, kv: StepKV) -> tuple[Tensor, Tensor]:
        eps, count = self.geometry.norm_eps, hidden.shape[0]
        heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
        matmuls = self._matmuls(kv.rows)
        qkv = project(normed, w.qkv, matmuls.plain).view(count, -1, width)
        q = rotate(rms_norm(qkv[:, :heads], w.q_norm, eps), cos, sin)
        if layer.owns_kv:
            keys = rotate(rms_norm(qkv[:, heads: heads + kv_heads], w.k_norm, eps), cos, sin)
            self.kv.write(layer, pools, kv, keys, rms_norm(qkv[:, heads + kv_heads:], None, eps))
        attended = self.kv.attend(layer, pools, kv, q, gathered).reshape(count, heads * width)
        hidden = hidden + rms_norm(project(attended, w.o, matmuls.plain), w.post_attention_norm, eps)
        inner = gated(rms_norm(hidden, w.pre_feedforward_norm, eps), w.gate_up, matmuls.gated, gelu)
        hidden = hidden + rms_norm(project(inner, w.down, matmuls.plain), w.post_feedforward_norm, eps)
        per_layer = gelu(project(hidden, w.ple_gate, matmuls.gated)) * ple
        if matmuls.gated in ("sum", "native"):
            per_layer = keep(per_layer)
        per_layer = project(per_layer, w.ple_projection, matmuls.plain)
        hidden = (hidden + rms_norm(per_layer, w.post_ple_norm, eps)) * w.scalar
        return hidden, rms_norm(hidden, next_norm, eps)

    def _head(self, normed: Tensor) -> Tensor:
        logits = project(normed, self.head_weight, self.library)
        cap = self.geometry.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
