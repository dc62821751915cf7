"""What the tensors of a dense `gemma4` GGUF file are called, and what Hugging Face's text model calls them.

Both are names of tensors, `.weight` included; a layer scalar has that ending in a GGUF file alone.
"""

from __future__ import annotations

import re

ROPE_FREQS = "rope_freqs.weight"      # divisors of the full layers' frequencies: no tensor of the model
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "layer_scalar": "layer_output_scale",
}
_WHOLE_BACK = {ggml: hf for hf, ggml in _WHOLE.items()}
_LAYER_BACK = {ggml: hf for hf, ggml in _LAYER.items()}
_HF_LAYER = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)")
_GGUF_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")


def gguf_name(hf_name: str) -> str | None:
    """The GGUF name of a Hugging Face text model's tensor (`model.layers.3.mlp.up_proj.weight`, `model.layers.3.layer_scalar`);
    None for a tensor that such a model does not have."""
    layer = _HF_LAYER.fullmatch(hf_name)
    module = (layer[2] if layer else hf_name).removesuffix(".weight")
    if hf_name.endswith(".weight") == (module == "layer_scalar"):
        return None
    found = (_LAYER if layer else _WHOLE).get(module)
    return found and (f"blk.{layer[1]}.{found}.weight" if layer else f"{found}.weight")


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF file's tensor; None for one that is no tensor of the text model, such as `rope_freqs`."""
    layer = _GGUF_LAYER.fullmatch(gguf_name)
    module = layer[2] if layer else gguf_name
    if not module.endswith(".weight"):
        return None
    found = (_LAYER_BACK if layer else _WHOLE_BACK).get(module.removesuffix(".weight"))
    ending = "" if found == "layer_scalar" else ".weight"
    return found and (f"model.layers.{layer[1]}.{found}{ending}" if layer else f"{found}{ending}")
