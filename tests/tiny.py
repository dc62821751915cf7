"""Tiny random Gemma-4 text models, made in memory, whose weights leave no mistake hidden.

A default-initialised tiny model hides most faults: its weights are small and its norms and layer scalars are 1. Here
linear weights are six times as large, logits reach the softcap's bend, norms lie around 1 and every layer has its own
scalar, so that a dropped scale, a wrong owner or a window off by one moves the logits visibly.
"""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedTokenizerFast

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB = 64


def tiny_config(**overrides) -> Gemma4TextConfig:
    """Six layers S F S F S F, the last two shared (4 reads 2, 5 reads 3), window 4; `overrides` are config fields."""
    fields = {
        "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 48, "intermediate_size": 32,
        "num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "global_head_dim": 32, "sliding_window": 4, "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 30.0, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": 2, "tie_word_embeddings": True, "attn_implementation": "eager",
    }
    return Gemma4TextConfig(**(fields | overrides))


@torch.no_grad()
def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **overrides) -> Gemma4ForCausalLM:
    """A `tiny_config` model with hard weights, in eval mode on the CPU. The weights depend on `seed` alone, and are
    rounded once to `dtype`; the rotary tables stay fp32, as `from_pretrained(dtype=)` leaves them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Gemma4ForCausalLM(tiny_config(**overrides)).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # gentler for queries and keys: at 1 the softmax is so sharp that bf16 noise drowns what bf16 tests look for
                center = 0.6 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
                parameter.copy_(center * (1 + 0.3 * torch.randn_like(parameter)))
            else:
                parameter.normal_(std=0.4 if "embed_tokens.weight" in name else 0.12)
    scalars = torch.linspace(0.5, 1.3, len(model.model.layers))
    for layer, scalar in zip(model.model.layers, scalars):
        layer.layer_scalar.fill_(scalar)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if "inv_freq" not in name:
            buffer.data = buffer.data.to(dtype)
    model.config.dtype = dtype
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model


def fake_tokenizer() -> PreTrainedTokenizerFast:
    """One id a character: <pad> 0, <eos> 1, <bos> 2, <unk> 3, then letters and a few signs, 64 ids in all.

    Its chat template writes `<bos>`, then each message as `role: content` and a newline.
    """
    marks = ["<pad>", "<eos>", "<bos>", "<unk>"]
    signs = (string.ascii_lowercase + string.digits + " .,:;?!'\"()+-*=/\n" + string.ascii_uppercase)[: VOCAB - len(marks)]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*marks, *signs])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False)
    fast.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}model: {% endif %}")
    return fast
