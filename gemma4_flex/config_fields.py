"""The fields of a checkpoint's config, every default filled in; what the engine does not compute is refused by name.

Read by `ModelGeometry.from_config` and by whoever makes a model of them. This module never imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM")
DENSE = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}      # by model_type

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


# the same of Qwen3Config and LlamaConfig
DENSE_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "layer_types": None,
}
DENSE_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "qwen3": DENSE_DEFAULTS | {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "head_dim": 128,
                               "max_position_embeddings": 32768, "eos_token_id": None},
    "llama": DENSE_DEFAULTS | {"vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None, "head_dim": None,
                               "max_position_embeddings": 2048, "eos_token_id": 2},
}
DENSE_ROPE_TYPES = ("default", "linear", "llama3", "yarn")      # whose frequencies are the same at every length


class UnsupportedModelError(ValueError):
    """The config describes something that this engine cannot compute; the message names the field."""


def plain_config(config: Any) -> dict[str, Any]:
    """`config` (a Hugging Face config object of any supported version, or config.json as a dict) as a plain dict.

    `to_dict` is the one reading that every version answers: from transformers 5.15 on, `config.head_dim` itself raises.
    """
    return dict(config) if isinstance(config, Mapping) else config.to_dict()


def fields_of(config: Any) -> dict[str, Any]:
    """The text model's config fields in the form its walk's Hugging Face config class takes, every default filled in.

    Takes what `ModelGeometry.from_config` takes; raises UnsupportedModelError likewise.
    """
    whole = plain_config(config)
    return dense_fields(whole) if whole.get("model_type") in DENSE else text_fields(whole)


def dense_fields(config: Any) -> dict[str, Any]:
    """A Qwen3 or Llama config's fields, with `head_dim` and `num_key_value_heads` as numbers and the rotary regime in
    `rope_parameters` alone, whichever form it was written in."""
    whole = plain_config(config)
    architecture = DENSE[whole["model_type"]]
    if other := [name for name in whole.get("architectures") or [] if name != architecture]:
        raise UnsupportedModelError(f"architecture {', '.join(other)} is not supported: of {whole['model_type']} models this "
                                    f"engine runs {architecture}")
    found = DENSE_DEFAULTS_OF[whole["model_type"]] | whole
    for name, default in (("num_key_value_heads", found["num_attention_heads"]),
                          ("head_dim", found["hidden_size"] // found["num_attention_heads"])):
        found[name] = default if found[name] is None else found[name]
    old = {"rope_theta": found.pop("rope_theta", None) or 10_000.0} | dict(found.pop("rope_scaling", None) or {})
    rope = dict(found.get("rope_parameters") or old)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    found["rope_parameters"] = rope
    _refuse_other_dense(found)
    return found


def _refuse_other_dense(found: dict[str, Any]) -> None:
    """Raises UnsupportedModelError naming every field that asks for something the engine does not compute."""
    rope = found["rope_parameters"]
    sliding = found["use_sliding_window"] or set(found["layer_types"] or [FULL]) != {FULL}
    reasons = [
        (found["attention_bias"], "biased attention projections (attention_bias)"),
        (found["mlp_bias"], "biased MLP projections (mlp_bias)"),
        (sliding, "sliding windows (use_sliding_window)"),
        (found["hidden_act"] != "silu", f"hidden_act={found['hidden_act']!r}"),
        (rope["rope_type"] not in DENSE_ROPE_TYPES, f"rope_type {rope['rope_type']!r}, not one of {', '.join(DENSE_ROPE_TYPES)},"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "rotary embeddings of a part of each head (partial_rotary_factor)"),
        (found["num_key_value_heads"] < 1 or found["num_attention_heads"] % found["num_key_value_heads"],
         "num_attention_heads that are no multiple of num_key_value_heads"),
        (found["head_dim"] % 2, f"an odd head_dim ({found['head_dim']})"),
    ]
    named = [text for present, text in reasons if present]
    if named:
        raise UnsupportedModelError(f"this {DENSE[found['model_type']]} has {' and '.join(named)}, which this engine does not "
                                    "compute: name a checkpoint without")


def text_fields(config: Any) -> dict[str, Any]:
    """A Gemma-4 text model's config fields, every default filled in, in the one form that all of transformers 5.5.2 to 5.24
    read alike: `head_dim` for sliding layers and `global_head_dim` for full ones, never `per_layer_config`. The
    placeholder ids of a multimodal config are kept among them.

    Takes what `ModelGeometry.from_config` takes; raises UnsupportedModelError likewise.
    """
    whole = plain_config(config)
    model_type, architectures = whole.get("model_type"), whole.get("architectures") or []
    if model_type not in ("gemma4", "gemma4_text") or any(name not in GEMMA4 for name in architectures):
        named = ", ".join(architectures) or f"model_type {model_type!r}"
        raise UnsupportedModelError(f"architecture {named} is not supported: this engine runs Gemma-4 E-series text models "
                                    f"({', '.join(GEMMA4)}) and {' and '.join(DENSE.values())}")
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
