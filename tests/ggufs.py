"""GGUF files of small models, written by the gguf package from Hugging Face's modules: by nothing of the project's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from gemma4_flex.checkpoints.published import ASSETS
from tests.tiny import FULL, SLIDING, tiny_model


class _Absent:
    def __repr__(self) -> str:
        return "ABSENT"         # the name of a test must not hold an address: processes that share the tests compare names


ABSENT = _Absent()      # as a change: the key or the tensor is left out
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
MODULES = {
    "embed_tokens": "token_embd", "embed_tokens_per_layer": "per_layer_token_embd", "norm": "output_norm", "lm_head": "output",
    "per_layer_model_projection": "per_layer_model_proj", "per_layer_projection_norm": "per_layer_proj_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "layer_scalar": "layer_output_scale"}


def wide_model(seed: int = 0, **overrides) -> Any:
    """A `tests.tiny` model of four layers, the last two shared, whose matrices' rows are multiples of 256 values long."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "hidden_size_per_layer_input": 256, "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL] * 2, "head_dim": 64, "global_head_dim": 128}
    return tiny_model(seed, **(wide | overrides))


def gguf_name(name: str) -> str:
    """What a Hugging Face tensor is called in such a file."""
    module = name.removeprefix("model.").removesuffix(".weight")
    if not module.startswith("layers."):
        return f"{MODULES[module]}.weight"
    _, layer, module = module.split(".", 2)
    return f"blk.{layer}.{MODULES[module]}.weight"


def metadata_of(model) -> dict[str, Any]:
    """What llama.cpp's converter writes of a model, by key."""
    layers, config = model.model.layers, model.config.to_dict()
    types, rope = config["layer_types"], config["rope_parameters"]
    head_dim = {kind: layers[types.index(kind)].self_attn.head_dim for kind in (SLIDING, FULL)}
    widths = [layer.mlp.gate_proj.out_features for layer in layers]
    return {
        "general.architecture": "gemma4", "general.type": "model", "general.file_type": 0, "general.quantization_version": 2,
    } | {f"gemma4.{key}": value for key, value in {
        "block_count": len(layers), "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim[FULL], "attention.value_length": head_dim[FULL],
        "attention.key_length_swa": head_dim[SLIDING], "attention.value_length_swa": head_dim[SLIDING],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == SLIDING for kind in types],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(rope[FULL]["rope_theta"]), "rope.freq_base_swa": float(rope[SLIDING]["rope_theta"]),
        "rope.dimension_count": head_dim[FULL], "rope.dimension_count_swa": head_dim[SLIDING],
        "final_logit_softcapping": config["final_logit_softcapping"]}.items()}


def bundled_vocabulary() -> dict[str, Any]:
    """The keys of the bundled tokenizer, made here from its tokenizer.json."""
    tiny = ASSETS / "tiny-gemma4"
    spec = json.loads((tiny / "tokenizer.json").read_text())
    vocab, marked = spec["model"]["vocab"], {token["content"] for token in spec["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    types = [3 if t in marked else 6 if len(t) == 6 and t.startswith("<0x") else 1 for t in tokens]
    return {f"tokenizer.ggml.{key}": value for key, value in {
        "model": "gemma4", "tokens": tokens, "token_type": types, "scores": [0.0] * len(tokens),
        "merges": [" ".join(merge) for merge in spec["model"]["merges"]], "bos_token_id": tokens.index("<bos>"),
        "eos_token_id": tokens.index("<eos>"), "unknown_token_id": tokens.index("<unk>"),
        "padding_token_id": tokens.index("<pad>"), "mask_token_id": tokens.index("<mask>"), "add_bos_token": True,
        "add_space_prefix": False}.items()} | {"tokenizer.chat_template": (tiny / "chat_template.jinja").read_text()}


def write_gguf(path: Path, model, type_name: str = "F32", *, tokenizer: dict[str, Any] | None = None,
               changes: dict[str, Any] | None = None, types: dict[str, str] | None = None,
               alignment: int | None = None) -> dict[str, Tensor]:
    """Writes `model`, matrices in `type_name` or what `types` says of a tensor by its GGUF name, vectors in F32.

    `changes` are other values of metadata keys and tensors, by name, and further ones; ABSENT leaves one out. Of a matrix of a
    K type, which the gguf package does not quantise, the values are drawn; of one that is not in TYPES all are 0. Gives what
    the file's tensors stand for by the package's own reading, by their GGUF names: fp32, rows first.
    """
    pairs = divisors(model)
    tensors = {gguf_name(name): value for name, value in model.state_dict().items()
               if not (name == "lm_head.weight" and model.config.tie_word_embeddings)} | {"rope_freqs.weight": pairs}
    metadata = metadata_of(model) | (tokenizer or {})
    for name, value in (changes or {}).items():
        of = tensors if name in tensors or isinstance(value, Tensor) else metadata
        of[name] = value
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.kv_data[0].clear()
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add_key(writer, key, value)
    found = {}
    for index, (name, value) in enumerate(tensors.items()):
        if value is not ABSENT:
            found[name] = add_tensor(writer, name, value, (types or {}).get(name, type_name if value.ndim > 1 else "F32"), index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def divisors(model) -> Tensor:
    """`rope_freqs` of a model: by what a full layer's frequencies are divided."""
    head_dim = model.model.layers[model.config.layer_types.index(FULL)].self_attn.head_dim
    return torch.tensor([1.0] * (head_dim // 8) + [1e30] * (head_dim // 2 - head_dim // 8))


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key with the type that its value has in Python, or a value that is a pair of gguf's type and value."""
    if value is ABSENT:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, tuple):
        writer.add_key_value(key, value[1], gguf.GGUFValueType[value[0]])
    else:
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds[type(value)](key, value)


def add_tensor(writer: gguf.GGUFWriter, name: str, value: Tensor, type_name: str, seed: int) -> Tensor:
    kind, matrix = gguf.GGMLQuantizationType[type_name], value.detach().float().numpy()
    if type_name not in TYPES:
        values, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(name, np.zeros((*value.shape[:-1], value.shape[-1] // values * size), np.uint8), raw_dtype=kind)
        return torch.zeros(value.shape)
    if type_name.endswith("_K"):
        data = drawn_blocks(matrix.shape, type_name, seed)
    elif type_name in ("F32", "F16"):
        data = matrix.astype({"F32": np.float32, "F16": np.float16}[type_name])
    else:
        data = gguf.quants.quantize(matrix, kind)
    writer.add_tensor(name, data, raw_dtype=kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(data, kind), np.float32)).reshape(value.shape)


def drawn_blocks(shape: tuple[int, int], type_name: str, seed: int) -> np.ndarray:
    """Random bytes of a K type with scales such that values are about as large as a model's. uint8 [rows, bytes of a row]"""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    scales = {"Q4_K": {0: 3e-4, 2: 1.5e-3}, "Q5_K": {0: 1.5e-4, 2: 1.5e-3}, "Q6_K": {208: 8e-5}}[type_name]
    for at, scale in scales.items():
        drawn = (scale * rng.uniform(0.3, 1.0, blocks.shape[:2])).astype(np.float16)
        blocks[..., at:at + 2] = drawn[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)
