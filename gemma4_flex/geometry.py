"""What a checkpoint's config means: layers, heads, windows, and which layer owns the K/V that each layer reads.

`ModelGeometry.from_config` is the only place that reads config fields; everything else in the package asks the geometry.
This module never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from gemma4_flex.config_fields import (
    DEFAULT_PLACEHOLDERS,
    DENSE,
    FULL,
    SLIDING,
    UnsupportedModelError,
    fields_of,
    plain_config,
    text_fields,
)

__all__ = ["FULL", "SLIDING", "LayerGeometry", "ModelGeometry", "RopeGeometry", "UnsupportedModelError", "plain_config",
           "text_fields"]

SCALE = 1.0      # of attention scores: Gemma-4 normalises queries and keys instead


@dataclass(frozen=True)
class LayerGeometry:
    """One layer. `window` counts the keys a query sees, itself included; None where it sees all earlier ones.
    `kv_owner` is the layer whose K/V this layer reads: its own index, or the owner's where the layer is shared. `scale` is what
    its attention scores are multiplied by."""

    index: int
    attention_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    mlp_width: int
    kv_owner: int
    scale: float = 1.0

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.index


@dataclass(frozen=True)
class RopeGeometry:
    """Rotary regime of an attention type: frequency i is theta^(-2i / head_dim) for the first
    `rotated_fraction * head_dim / 2` pairs (i, i + head_dim / 2) and 0 for the others. `scaling` is the config's own fields of
    a regime that changes these frequencies, which transformers computes."""

    theta: float
    head_dim: int
    rotated_fraction: float
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class ModelGeometry:
    """A text model's shape. Sizes are counts of elements; `ple` stands for the per-layer embeddings, 0 for a model without;
    `qk_norms` says whether queries and keys are normed; `placeholder_ids` are the image, audio and video ids of a multimodal
    config, which no text prompt may hold."""

    architecture: str
    vocab_size: int
    ple_vocab_size: int
    hidden_size: int
    ple_width: int
    max_positions: int
    norm_eps: float
    final_softcap: float | None
    tied_head: bool
    layers: tuple[LayerGeometry, ...]
    rope: dict[str, RopeGeometry]
    placeholder_ids: frozenset[int]
    qk_norms: bool = True

    @classmethod
    def from_config(cls, config: Any) -> ModelGeometry:
        """Reads a Hugging Face config object (transformers 5.5.2 to 5.24) or config.json as a dict: of Gemma-4, text or
        multimodal, of Qwen3 or of Llama.

        Raises UnsupportedModelError, naming the field, for other architectures, MoE, bidirectional attention, an attention
        softcap, attention_k_eq_v, biases, no per-layer embeddings in a Gemma-4, sliding windows or rotary regimes that change
        with the length in the others, and fields that contradict each other.
        """
        found = fields_of(config)
        return cls._dense(found) if found["model_type"] in DENSE else cls._gemma4(found)

    @classmethod
    def _dense(cls, found: dict[str, Any]) -> ModelGeometry:
        rope, head_dim = found["rope_parameters"], found["head_dim"]
        scaling = () if rope["rope_type"] == "default" else tuple(sorted((k, v) for k, v in rope.items() if k != "rope_theta"))
        layers = tuple(
            LayerGeometry(index=index, attention_type=FULL, num_heads=found["num_attention_heads"],
                          num_kv_heads=found["num_key_value_heads"], head_dim=head_dim, window=None,
                          mlp_width=found["intermediate_size"], kv_owner=index, scale=head_dim ** -0.5)
            for index in range(found["num_hidden_layers"]))
        return cls(
            architecture=found["model_type"], vocab_size=found["vocab_size"], ple_vocab_size=0, hidden_size=found["hidden_size"],
            ple_width=0, max_positions=found["max_position_embeddings"], norm_eps=found["rms_norm_eps"], final_softcap=None,
            tied_head=found["tie_word_embeddings"], layers=layers,
            rope={FULL: RopeGeometry(float(rope["rope_theta"]), head_dim, 1.0, scaling)}, placeholder_ids=frozenset(),
            qk_norms=found["model_type"] == "qwen3")

    @classmethod
    def _gemma4(cls, found: dict[str, Any]) -> ModelGeometry:
        types, first_shared = found["layer_types"], found["num_hidden_layers"] - found["num_kv_shared_layers"]
        head_dims = {SLIDING: found["head_dim"], FULL: found["global_head_dim"]}
        layers = []
        for index, layer_type in enumerate(types):
            shared = index >= first_shared
            layers.append(LayerGeometry(
                index=index,
                attention_type=layer_type,
                num_heads=found["num_attention_heads"],
                num_kv_heads=found["num_key_value_heads"],
                head_dim=head_dims[layer_type],
                window=found["sliding_window"] if layer_type == SLIDING else None,
                mlp_width=found["intermediate_size"] * (2 if shared and found["use_double_wide_mlp"] else 1),
                kv_owner=max(i for i in range(first_shared) if types[i] == layer_type) if shared else index,
                scale=SCALE,
            ))
        regimes = {t: found["rope_parameters"][t] for t in sorted(set(types))}
        return cls(
            architecture="gemma4_text",
            vocab_size=found["vocab_size"],
            ple_vocab_size=found["vocab_size_per_layer_input"],
            hidden_size=found["hidden_size"],
            ple_width=found["hidden_size_per_layer_input"],
            max_positions=found["max_position_embeddings"],
            norm_eps=found["rms_norm_eps"],
            final_softcap=found["final_logit_softcapping"],
            tied_head=found["tie_word_embeddings"],
            layers=tuple(layers),
            rope={t: RopeGeometry(theta=float(regime["rope_theta"]), head_dim=head_dims[t],
                                  rotated_fraction=1.0 if t == SLIDING else regime.get("partial_rotary_factor", 1.0))
                  for t, regime in regimes.items()},
            placeholder_ids=frozenset(found[name] for name in DEFAULT_PLACEHOLDERS if found.get(name) is not None),
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def first_shared(self) -> int:
        """Index of the first layer that makes no K/V of its own; `num_layers` where every layer does."""
        return next((layer.index for layer in self.layers if not layer.owns_kv), self.num_layers)

    @cached_property
    def attention_types(self) -> tuple[str, ...]:
        return tuple(sorted({layer.attention_type for layer in self.layers}))

    def owners(self, attention_type: str) -> tuple[int, ...]:
        """Layers of this type that make K/V, in order; only the last of them is read by shared layers."""
        return tuple(la.index for la in self.layers if la.attention_type == attention_type and la.owns_kv)

    def kv_bytes_per_token(self, bytes_per_element: int) -> dict[str, int]:
        """Bytes of K and V that one token adds, by attention type."""
        return {t: sum(2 * self.layers[i].num_kv_heads * self.layers[i].head_dim for i in self.owners(t)) * bytes_per_element
                for t in self.attention_types}

    def kv_cache_bytes(self, tokens: int, bytes_per_element: int) -> int:
        """Bytes of K and V that a sequence of `tokens` must keep: a sliding layer keeps at most its window."""
        return sum(2 * layer.num_kv_heads * layer.head_dim * min(tokens, layer.window or tokens)
                   for layer in self.layers if layer.owns_kv) * bytes_per_element

    def parameter_count(self) -> dict[str, int]:
        """Parameters in the table of per-layer embeddings, in the token embedding (also the head where tied), in all the
        rest (with the head where it is not tied), and in total. Layer scalars are buffers and not counted."""
        h, p = self.hidden_size, self.ple_width
        rest = self.num_layers * p * h + p + h                      # prelude projection, its norm, the final norm
        norms = 5 * h if p else 2 * h                               # of a layer
        for layer in self.layers:
            q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            head_norm = layer.head_dim if self.qk_norms else 0
            rest += 2 * q * h + head_norm                           # q, o, q_norm
            rest += 2 * kv * h + head_norm if layer.owns_kv else 0
            rest += 3 * layer.mlp_width * h + 2 * p * h + norms     # MLP, PLE gate and projection, norms
        embed, table = self.vocab_size * h, self.ple_vocab_size * self.num_layers * p
        rest += 0 if self.tied_head else embed
        return {"ple_table": table, "embed": embed, "rest": rest, "total": table + embed + rest}

    def step_weight_bytes(self, bytes_per_element: int) -> int:
        """Bytes of weights that one decode step must read: all but the two lookup tables, of which it reads single rows;
        a tied head is the whole embedding, read once."""
        count = self.parameter_count()
        return (count["rest"] + (count["embed"] if self.tied_head else 0)) * bytes_per_element

    def differences(self, other: ModelGeometry) -> list[str]:
        """What differs between two geometries, one line a field; empty where they agree. Placeholder ids do not count:
        they belong to the multimodal wrapper."""
        lines = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "layers" and len(ours) == len(theirs):
                lines += [f"layer {a.index} {f.name}: {getattr(a, f.name)} and {getattr(b, f.name)}"
                          for a, b in zip(ours, theirs) for f in fields(a) if getattr(a, f.name) != getattr(b, f.name)]
            elif field.name == "layers":
                lines.append(f"layers: {len(ours)} and {len(theirs)}")
            elif field.name != "placeholder_ids" and ours != theirs:
                lines.append(f"{field.name}: {ours} and {theirs}")
        return lines

    def assert_matches(self, text_model: Any) -> None:
        """Raises UnsupportedModelError, listing what differs, unless the modules of `text_model` (a Gemma4TextModel,
        Qwen3Model or LlamaModel) are the ones this geometry describes. Widths are read from `out_features`, which quantised
        linears keep."""
        lines = [] if len(text_model.layers) == self.num_layers else [f"layers: {self.num_layers} and {len(text_model.layers)}"]
        for layer, module in zip(self.layers, text_model.layers):
            attn = module.self_attn
            has_k = hasattr(attn, "k_proj")
            pairs = {
                "head_dim": (layer.head_dim, attn.head_dim),
                "is_sliding": (layer.attention_type == SLIDING, getattr(attn, "is_sliding", False)),
                "sliding_window": (layer.window, getattr(attn, "sliding_window", None)),
                "is_kv_shared_layer": (not layer.owns_kv, getattr(attn, "is_kv_shared_layer", False)),
                "q_norm": (self.qk_norms, hasattr(attn, "q_norm")),
                "scaling": (layer.scale, getattr(attn, "scaling", layer.scale)),
                "owns k_proj": (layer.owns_kv, has_k),
                "q_proj rows": (layer.num_heads * layer.head_dim, attn.q_proj.out_features),
                "k_proj rows": (layer.num_kv_heads * layer.head_dim, attn.k_proj.out_features) if has_k else (0, 0),
                "mlp width": (layer.mlp_width, module.mlp.gate_proj.out_features),
                "hidden size": (self.hidden_size, attn.q_proj.in_features),
            }
            lines += [f"layer {layer.index} {what}: {ours} and {theirs}" for what, (ours, theirs) in pairs.items()
                      if ours != theirs]
        if lines:
            raise UnsupportedModelError(f"the model's modules are not what its config says (config and module): "
                                        f"{'; '.join(lines[:5])}{f' and {len(lines) - 5} more' if len(lines) > 5 else ''}")
