"""Tiny random Qwen3 and Llama models, made in memory, whose weights leave no mistake hidden: six query heads to two K/V heads,
norms around 1 and linear weights large enough that a dropped norm or a wrong scale moves the logits visibly."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.tiny import VOCAB

CLASSES = {"qwen3": (Qwen3ForCausalLM, Qwen3Config), "llama": (LlamaForCausalLM, LlamaConfig)}
ARCHITECTURES = list(CLASSES)
# rotary regimes by name, as configs have them, for 256 positions
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}


def dense_config(architecture: str, **overrides):
    """Three layers, hidden size 48, six heads of 16 to two K/V heads; `overrides` are config fields."""
    fields = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "pad_token_id": 0,
        "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": architecture == "qwen3", "rope_parameters": ROPES["default"],
        "attn_implementation": "eager",
    }
    return CLASSES[architecture][1](**(fields | overrides))


@torch.no_grad()
def dense_model(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    """A `dense_config` model with hard weights, in eval mode on the CPU, its weights rounded once to `dtype`; the rotary table
    stays fp32, as `from_pretrained(dtype=)` leaves it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLASSES[architecture][0](dense_config(architecture, **overrides)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                center = 1.4 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                parameter.copy_(center * (1 + 0.3 * torch.randn_like(parameter)))
            else:
                parameter.normal_(std=0.4 if "embed_tokens" in name else 0.2)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model
