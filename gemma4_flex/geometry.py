"""What a checkpoint's config means: layers, heads, windows, and which layer owns the K/V that each layer reads.

`ModelGeometry.from_config` is the only place that reads config fields; everything else in the package asks the geometry.
This module never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
ARCHITECTURES = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")

# transformers' Gemma4TextConfig defaults: a saved config.json may leave out any field that equals its default.
DEFAULTS: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "global_head_dim": 512, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "tie_word_embeddings": True, "attention_bias": False,
    "sliding_window": 512, "final_logit_softcapping": None, "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "attention_k_eq_v": False,
    "num_kv_shared_layers": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
}
DEFAULT_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
DEFAULT_PLACEHOLDERS = {"image_token_id": 258880, "audio_token_id": 258881, "video_token_id": 258884}


class UnsupportedModelError(ValueError):
    """The config describes something that this engine cannot compute; the message names the field."""


def plain_config(config: Any) -> dict[str, Any]:
    """`config` (a Hugging Face config object of any supported version, or config.json as a dict) as a plain dict.

    `to_dict` is the one reading that every version answers: from transformers 5.15 on, `config.head_dim` itself raises.
    """
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def text_fields(config: Any) -> dict[str, Any]:
    """The text model's config fields, every default filled in, in the one form that all of transformers 5.5.2 to 5.24
    read alike: `head_dim` for sliding layers and `global_head_dim` for full ones, never `per_layer_config`. The
    placeholder ids of a multimodal config are kept among them.

    Takes what `ModelGeometry.from_config` takes; raises UnsupportedModelError likewise.
    """
    whole = plain_config(config)
    model_type, architectures = whole.get("model_type"), whole.get("architectures") or []
    if model_type not in ("gemma4", "gemma4_text") or any(name not in ARCHITECTURES for name in architectures):
        named = ", ".join(architectures) or f"model_type {model_type!r}"
        raise UnsupportedModelError(f"architecture {named} is not supported: this engine runs Gemma-4 E-series text models "
                                    f"({', '.join(ARCHITECTURES)})")
    text = whole
    if model_type == "gemma4":
        text = dict(whole.get("text_config") or {})
        if "tie_word_embeddings" in whole:      # the multimodal class ties by its own flag, not by the text config's
            text["tie_word_embeddings"] = whole["tie_word_embeddings"]
        # kept with the text model, which is all that is left of the checkpoint once it is loaded
        text |= {name: whole.get(name) or default for name, default in DEFAULT_PLACEHOLDERS.items()}
    found = DEFAULTS | {"layer_types": None, "rope_parameters": None} | text
    _refuse_other_computations(found)
    if found["layer_types"] is None:
        found["layer_types"] = [SLIDING if (i + 1) % 6 else FULL for i in range(found["num_hidden_layers"])]
    found["layer_types"] = [*found["layer_types"][:-1], FULL]      # as Gemma4TextConfig forces it
    found["rope_parameters"] = found["rope_parameters"] or DEFAULT_ROPE
    if "per_layer_config" in found:
        found["global_head_dim"] = _full_head_dim(found, given=text.get("global_head_dim"))
        del found["per_layer_config"]
    found["num_global_key_value_heads"] = None      # read by transformers with attention_k_eq_v alone, which is refused
    _check_consistency(found)
    return found


def _refuse_other_computations(found: dict[str, Any]) -> None:
    """Raises UnsupportedModelError naming every field that asks for something the engine does not compute."""
    reasons = [
        (found["enable_moe_block"], "mixture-of-experts layers (enable_moe_block)"),
        (found["use_bidirectional_attention"] == "all", "bidirectional attention (use_bidirectional_attention='all')"),
        (found.get("attn_logit_softcapping") is not None, "an attention softcap (attn_logit_softcapping)"),
        (found["attention_k_eq_v"], "keys that serve as values (attention_k_eq_v)"),
        (found["attention_bias"], "biased attention projections (attention_bias)"),
        (not found["hidden_size_per_layer_input"], "a model without per-layer embeddings (hidden_size_per_layer_input=0)"),
        (found["hidden_activation"] != "gelu_pytorch_tanh", f"hidden_activation={found['hidden_activation']!r}"),
    ]
    named = [text for present, text in reasons if present]
    if named:
        raise UnsupportedModelError(f"this checkpoint has {' and '.join(named)}, which this engine does not compute; "
                                    "Gemma-4 E2B, E4B and checkpoints of their geometry do not have it")


def _full_head_dim(found: dict[str, Any], given: int | None) -> int:
    """The head_dim of the full layers out of `per_layer_config` (transformers 5.15 and later), which may say no more."""
    overrides = {int(layer): dict(changed) for layer, changed in (found["per_layer_config"] or {}).items()}
    sizes: dict[str, set[int]] = {SLIDING: set(), FULL: set()}
    for layer, layer_type in enumerate(found["layer_types"]):
        changed = overrides.get(layer, {})
        other = {k: v for k, v in changed.items() if k not in ("head_dim", "skip") and found.get(k) != v}
        if other or changed.get("skip"):
            raise UnsupportedModelError(f"per_layer_config changes {sorted(other) or ['skip']} in layer {layer}; "
                                        "only head_dim may differ between layers, and only by attention type")
        sizes.setdefault(layer_type, set()).add(changed.get("head_dim", found["head_dim"]))
    if len(sizes[FULL]) != 1 or not sizes[SLIDING] <= {found["head_dim"]} or (given and {given} != sizes[FULL]):
        raise UnsupportedModelError(f"per_layer_config gives head_dim {sorted(sizes[SLIDING])} to sliding and "
                                    f"{sorted(sizes[FULL])} to full layers beside head_dim={found['head_dim']} and "
                                    f"global_head_dim={given}; each attention type needs one size")
    return sizes[FULL].pop()


def _check_consistency(found: dict[str, Any]) -> None:
    """Raises UnsupportedModelError where fields contradict each other."""
    layers, shared, types = found["num_hidden_layers"], found["num_kv_shared_layers"], found["layer_types"]
    rope = found["rope_parameters"]
    problems = [
        (len(types) != layers, f"layer_types lists {len(types)} layers and num_hidden_layers is {layers}"),
        (set(types) - {SLIDING, FULL}, f"layer_types holds {sorted(set(types) - {SLIDING, FULL})}"),
        (set(types[: layers - shared]) != set(types),
         f"num_kv_shared_layers={shared} leaves an attention type without a layer that makes its keys and values"),
        (shared < 0, f"num_kv_shared_layers is {shared}"),
        (found["num_key_value_heads"] < 1 or found["num_attention_heads"] % found["num_key_value_heads"],
         "num_attention_heads is not a multiple of num_key_value_heads"),
        (found["head_dim"] % 2 or found["global_head_dim"] % 2, "rotary embeddings need an even head_dim and global_head_dim"),
        (found["vocab_size_per_layer_input"] < found["vocab_size"],
         f"vocab_size_per_layer_input={found['vocab_size_per_layer_input']} leaves token ids of vocab_size={found['vocab_size']} "
         "without a per-layer embedding"),
        (SLIDING in types and (found["sliding_window"] or 0) < 1, "sliding layers need a sliding_window"),
    ]
    for layer_type, kind in ((SLIDING, "default"), (FULL, "proportional")):
        regime = rope.get(layer_type) or {}
        if layer_type in types and (regime.get("rope_type") != kind or regime.get("factor", 1.0) != 1.0):
            problems.append((True, f"rope_parameters[{layer_type!r}] is {regime}, not rope_type {kind!r} without a factor"))
    named = [text for present, text in problems if present]
    if named:
        raise UnsupportedModelError(f"this config cannot be run: {'; '.join(named)}")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer. `window` counts the keys a query sees, itself included; None where it sees all earlier ones.
    `kv_owner` is the layer whose K/V this layer reads: its own index, or the owner's where the layer is shared."""

    index: int
    attention_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    mlp_width: int
    kv_owner: int

    @property
    def owns_kv(self) -> bool:
        return self.kv_owner == self.index


@dataclass(frozen=True)
class RopeGeometry:
    """Rotary regime of an attention type: frequency i is theta^(-2i / head_dim) for the first
    `rotated_fraction * head_dim / 2` pairs (i, i + head_dim / 2) and 0 for the others."""

    theta: float
    head_dim: int
    rotated_fraction: float


@dataclass(frozen=True)
class ModelGeometry:
    """A text model's shape. Sizes are counts of elements; `ple` stands for the per-layer embeddings;
    `placeholder_ids` are the image, audio and video ids of a multimodal config, which no text prompt may hold."""

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

    @classmethod
    def from_config(cls, config: Any) -> ModelGeometry:
        """Reads a Hugging Face config object (transformers 5.5.2 to 5.24) or config.json as a dict, text or multimodal.

        Raises UnsupportedModelError, naming the field, for other architectures, MoE, bidirectional attention, an attention
        softcap, attention_k_eq_v, attention biases, no per-layer embeddings, and fields that contradict each other.
        """
        found = text_fields(config)
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
            ))
        regimes = {t: found["rope_parameters"][t] for t in sorted(set(types))}
        return cls(
            architecture=DEFAULTS["model_type"],
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
        for layer in self.layers:
            q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
            rest += 2 * q * h + layer.head_dim                      # q, o, q_norm
            rest += 2 * kv * h + layer.head_dim if layer.owns_kv else 0
            rest += 3 * layer.mlp_width * h + 2 * p * h + 5 * h     # MLP, PLE gate and projection, norms
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
        """Raises UnsupportedModelError, listing what differs, unless the modules of `text_model` (a Gemma4TextModel) are
        the ones this geometry describes. Widths are read from `out_features`, which quantised linears keep."""
        lines = [] if len(text_model.layers) == self.num_layers else [f"layers: {self.num_layers} and {len(text_model.layers)}"]
        for layer, module in zip(self.layers, text_model.layers):
            attn = module.self_attn
            has_k = hasattr(attn, "k_proj")
            pairs = {
                "head_dim": (layer.head_dim, attn.head_dim),
                "is_sliding": (layer.attention_type == SLIDING, attn.is_sliding),
                "sliding_window": (layer.window, attn.sliding_window),
                "is_kv_shared_layer": (not layer.owns_kv, attn.is_kv_shared_layer),
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
