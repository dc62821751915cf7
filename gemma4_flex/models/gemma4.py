"""Gemma-4 E-series over paged K/V, written out as functions of tensors.

The walk reads its weights from the modules of the caller's Hugging Face model and follows that model's arithmetic, rounding
for rounding. It keeps a *view* of the model: module objects of its own over the caller's tensors. Linears that read one
input (q, k, v; gate, up) run as one matmul where their weights lie side by side in memory (`lay_side_by_side`); a linear
that is no plain matrix (4-bit, with an adapter beside it) is called as the module it is.

A step is a few *regions* (compiled.py): `begin`, once; a layer, as often as there are layers; `head`.

T: tokens of a step (flat, no padding), H: heads, K: kv heads, D: head_dim, L: layers, P: PLE width, N: rows whose logits
are wanted, V: vocabulary.
"""
from __future__ import annotations

import copy
from collections.abc import Collection, Sequence as Seq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemma4_flex.attention import PagedBackend
from gemma4_flex.compiled import Regions
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.kv_cache import store
from gemma4_flex.masks import Rows
from gemma4_flex.models.matmul import Matmuls, keep, linear, matmuls_for
from gemma4_flex.rotary import cos_sin, inverse_frequencies, rotate
from gemma4_flex.shared_kv import Sidecar

# a weight, of one linear or of several side by side; or several that lie apart, a module to call where it is no plain matrix
Projection = Tensor | tuple[Tensor | nn.Module, ...]


class StepInputs(NamedTuple):
    """One step's tokens, flat: ids, positions and slots [T] (int64), their query rows, and the tokens whose logits are
    wanted: indices [N] into the T with rows of their own, or None for all tokens (decode)."""
    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Rows
    wanted: Tensor | None = None
    wanted_rows: Rows | None = None


# ---- weights --------------------------------------------------------------------------------------------------------

def view_of(module: nn.Module) -> nn.Module:
    """A tree of new module objects over the same parameters and buffers."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {name: child and view_of(child) for name, child in module._modules.items()}
    return twin


def projection_groups(text: nn.Module) -> list[list[nn.Module]]:
    """Linears of a Gemma4TextModel that read one input: q, k, v of each layer (q alone where it has no others), gate and up."""
    groups = []
    for layer in text.layers:
        attention = layer.self_attn
        groups.append([m for name in ("q_proj", "k_proj", "v_proj") if (m := getattr(attention, name, None)) is not None])
        groups.append([layer.mlp.gate_proj, layer.mlp.up_proj])
    return groups


@torch.no_grad()
def lay_side_by_side(text: nn.Module, movable: Collection[Tensor] | None = None) -> None:
    """Move the weights of each projection group into one storage, group by group: the parameters stay what they are, and
    one matmul can read them all. Needs memory for one group more. `movable`: the only weights that may be moved, where
    others belong to someone else; a group is moved whole or not at all."""
    for group in projection_groups(text):
        if movable is not None and not all(any(m.weight is w for w in movable) for m in group):
            continue
        if len(group) > 1 and all(_is_plain(m) for m in group) and side_by_side([m.weight for m in group]) is None:
            together = torch.cat([m.weight.detach() for m in group])
            for module, rows in zip(group, together.split([len(m.weight) for m in group])):
                module.weight.data = rows


def side_by_side(weights: Seq[Tensor]) -> Tensor | None:
    """Matrices [out_i, in] that follow each other in one storage, as one [sum of out_i, in]; None where they do not."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        if (not weight.is_contiguous() or weight.shape[1] != first.shape[1] or weight.storage_offset() != end
                or weight.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()):
            return None
        end += weight.numel()
    return first.detach().as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and module.weight.is_floating_point()


def projection(*modules: nn.Module) -> Projection:
    """The linears `modules`, which read one input, as one."""
    if all(_is_plain(m) for m in modules) and (weight := side_by_side([m.weight for m in modules])) is not None:
        return weight
    return tuple(m.weight.detach() if _is_plain(m) else m for m in modules)


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


def project(x: Tensor, weights: Projection, form: str = "library") -> Tensor:
    """[T, in] through one linear, or several that read it, their outputs joined: [T, sum of out]."""
    if isinstance(weights, Tensor):
        return linear(x, weights, form)
    outputs = [linear(x, weight, form) if isinstance(weight, Tensor) else weight(x) for weight in weights]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gated(x: Tensor, gate_up: Projection, form: str) -> Tensor:
    """gelu(gate x) * up x, [T, MLP width]."""
    parts = gate_up.chunk(2) if isinstance(gate_up, Tensor) else gate_up
    if form in ("sum", "native") and all(isinstance(part, Tensor) for part in parts):
        gate, up = parts
        return keep(gelu(linear(keep(x), gate, form)) * linear(x, up, form))
    gate, up = project(x, gate_up, form).chunk(2, dim=-1)
    return gelu(gate) * up


# ---- K/V of a step --------------------------------------------------------------------------------------------------

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
        return self.backends[kind].attend(q, pools.keys, pools.values, step.rows, step.plans[kind], layer.kv_owner, gathered)


# ---- the walk -------------------------------------------------------------------------------------------------------

class Begun(NamedTuple):
    """What all layers share: the embeddings [T, hidden], normed for the first layer too, PLE [L, T, P], as one tensor or as L
    apart, cos and sin [T, D] by attention type, and the step's K/V."""
    hidden: Tensor
    normed: Tensor
    ple: Tensor | tuple[Tensor, ...]
    rotary: dict[str, tuple[Tensor, Tensor]]
    kv: StepKV


class Gemma4Walk:
    """Callable: `StepInputs` to logits [N, V]. `regions` says what of it is compiled."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, kv: PagedKV, regions: Regions | None = None):
        self.model = view_of(model)
        self.text = self.model.model
        self.geometry = geometry
        self.kv = kv
        self.regions = regions or Regions()
        device, self.dtype = self.text.norm.weight.device, self.text.norm.weight.dtype
        self.device_type = device.type
        self.library = matmuls_for(device.type, self.dtype, 0, decode=False, compiled=self.regions.plan is not None).plain
        self.frequencies = {kind: inverse_frequencies(rope, device) for kind, rope in geometry.rope.items()}
        self.layers = [layer_weights(module) for module in self.text.layers]
        self.ple_projection = projection(self.text.per_layer_model_projection)
        self.head_weight = projection(self.model.lm_head)
        readers = [layer.kv_owner for layer in geometry.layers]
        self.read_again = {owner for owner in readers if readers.count(owner) > 1}

    def __call__(self, step: StepInputs, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits [N, V], after the softcap; and, where only some tokens' logits are wanted, which tokens [T] came through the
        layers that write K/V with a finite stream, else None. `record` collects the stream [N, hidden] of the wanted tokens:
        the first layer's input, then each layer's output; nothing is compiled then."""
        if record is not None:
            with self.regions.off():
                return self._walk(step, record)
        return self._walk(step, None)

    def _walk(self, step: StepInputs, record: list[Tensor] | None) -> tuple[Tensor, Tensor | None]:
        begun = self.regions(("begin",), self._begin, step)
        if self.regions.scope == "step" and record is None:
            return self.regions(("layers", self.geometry.first_shared), self._layers, step, begun)
        return self._layers(step, begun, record)

    def _begin(self, step: StepInputs) -> Begun:
        text, geometry = self.text, self.geometry
        count = step.ids.shape[0]
        hidden = F.embedding(step.ids, text.embed_tokens.weight) * text.embed_tokens.embed_scale.to(text.embed_tokens.weight.dtype)
        shape = (count, geometry.num_layers, geometry.ple_width)
        table = text.embed_tokens_per_layer
        by_token = (F.embedding(step.ids, table.weight) * table.embed_scale.to(table.weight.dtype)).view(shape)
        by_context = (project(hidden, self.ple_projection, self.library) * geometry.hidden_size ** -0.5).view(shape)
        by_context = rms_norm(by_context, text.per_layer_projection_norm.weight, geometry.norm_eps)
        ple = ((by_context + by_token) * 2.0 ** -0.5).transpose(0, 1).contiguous()
        if self.regions.scope == "step":      # apart, so that the compiled code of a layer does not depend on its place
            ple = tuple(rows.clone() for rows in ple.unbind())
        rotary = {kind: cos_sin(step.positions, f, hidden.dtype) for kind, f in self.frequencies.items()}
        normed = rms_norm(hidden, self.layers[0].input_norm, geometry.norm_eps)
        return Begun(hidden, normed, ple, rotary, self.kv.begin(step.positions, step.slots, step.rows))

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
            hidden, normed = self._layer(layer, next_norm, hidden, normed, ple[layer.index], rotary, kv, gathered)
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
                     ple[:, wanted] if isinstance(ple, Tensor) else tuple(rows[wanted] for rows in ple),
                     {kind: (cos[wanted], sin[wanted]) for kind, (cos, sin) in rotary.items()},
                     self.kv.begin(step.positions[wanted], step.slots[wanted], step.wanted_rows))
        return torch.isfinite(hidden.float().sum(-1)), rest

    def _layer(self, layer: LayerGeometry, next_norm: Tensor, hidden: Tensor, normed: Tensor, ple: Tensor, rotary: dict,
               kv: StepKV, gathered: dict) -> tuple[Tensor, Tensor]:
        """One layer, as a region that all layers of its kind share."""
        kind = layer.attention_type
        if self.regions.scope == "layer" or layer.kv_owner not in self.read_again:
            gathered = {}      # regions hand each other nothing but their results
        return self.regions(("layer", kind, layer.owns_kv), lambda *args: self._layer_body(layer, gathered, *args),
                            self.layers[layer.index], self.kv.of_layer(layer), next_norm, hidden, normed, ple, *rotary[kind],
                            kv.of(kind))

    def _layer_body(self, layer: LayerGeometry, gathered: dict, w: LayerWeights, pools: LayerKV, next_norm: Tensor,
                    hidden: Tensor, normed: Tensor, ple: Tensor, cos: Tensor, sin: Tensor, kv: StepKV) -> tuple[Tensor, Tensor]:
        """The stream [T, hidden] after a layer, and normed for the next one. `normed` is the stream after the input norm."""
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
        inner = gated(rms_norm(hidden, w.pre_feedforward_norm, eps), w.gate_up, matmuls.gated)
        hidden = hidden + rms_norm(project(inner, w.down, matmuls.plain), w.post_feedforward_norm, eps)
        per_layer = gelu(project(hidden, w.ple_gate, matmuls.gated)) * ple
        if matmuls.gated in ("sum", "native"):
            per_layer = keep(per_layer)
        per_layer = project(per_layer, w.ple_projection, matmuls.plain)
        hidden = (hidden + rms_norm(per_layer, w.post_ple_norm, eps)) * w.scalar
        return hidden, rms_norm(hidden, next_norm, eps)

    def _matmuls(self, rows: Rows) -> Matmuls:
        """How a layer's linears are written for these rows."""
        return matmuls_for(self.device_type, self.dtype, rows.slots.shape[0], decode=rows.width == 1,
                           compiled=self.regions.plan is not None)

    def _head(self, normed: Tensor) -> Tensor:
        """Logits [N, V] of the stream after the final norm."""
        logits = project(normed, self.head_weight, self.library)
        cap = self.geometry.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
