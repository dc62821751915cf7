"""A `gemma4` GGUF file's metadata as the config of a Hugging Face text model, and the tensors which that config asks for.

What stands in the file is checked against what else stands there, and nothing is filled in by a default that could be wrong: a
number where an array belongs, an array of another length, sliding and full values that contradict the tensors are all named.
"""

from __future__ import annotations

import math
import re
import struct
from typing import Any

from gemma4_flex.checkpoints.gguf_header import Header
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import FULL, SLIDING, ModelGeometry, UnsupportedModelError

ARCHITECTURE = "gemma4"
ROTATED = 0.25                  # of a full layer's head, which the file says in `rope_freqs` alone
STILL = struct.unpack("<f", struct.pack("<f", 1e30))[0]       # divides the frequencies of pairs that are not rotated
PLACEHOLDERS = {"image_token_id": "<|image|>", "audio_token_id": "<|audio|>", "video_token_id": "<|video|>"}
MOST = 1 << 31                  # of any number of the metadata: sizes are compared with the tensors besides


class _Metadata:
    """Typed reading of the keys `gemma4.*`; every way to be wrong is one sentence."""

    def __init__(self, header: Header):
        self.path, self.found = header.path, header.metadata

    def get(self, key: str) -> Any:
        name = f"{ARCHITECTURE}.{key}"
        if name not in self.found:
            raise CheckpointError(f"{self.path} lacks the metadata key {name}, without which the model is not known: "
                                  "convert it again")
        return self.found[name]

    def wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{ARCHITECTURE}.{key} in {self.path} {what}: convert the model again")

    def integer(self, key: str, least: int = 1, default: int | None = None) -> int:
        if default is not None and f"{ARCHITECTURE}.{key}" not in self.found:
            return default
        return self._integer(key, self.get(key), least)

    def _integer(self, key: str, value: Any, least: int) -> int:
        if isinstance(value, list):
            raise self.wrong(key, f"is an array of {len(value)} elements where one number belongs")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"is {value!r:.60}, not a whole number")
        if not least <= value < MOST:
            raise self.wrong(key, f"is {value}, not a number from {least} on" if value < least else f"is {value}, too large")
        return value

    def real(self, key: str, least: float = 0.0, default: float | None = None) -> float:
        if default is not None and f"{ARCHITECTURE}.{key}" not in self.found:
            return default
        value = self.get(key)
        if isinstance(value, list):
            raise self.wrong(key, f"is an array of {len(value)} elements where one number belongs")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(key, f"is {value!r:.60}, not a number")
        if not math.isfinite(value) or value < least:
            raise self.wrong(key, f"is {value}, not a finite number from {least} on")
        return shortest(value)

    def a_layer(self, key: str, layers: int) -> list[int]:
        """One number for each layer, from an array of them or from one number for all."""
        value = self.get(key)
        if isinstance(value, list):
            if len(value) != layers:
                raise self.wrong(key, f"has {len(value)} elements and the model has {layers} layers")
            return [self._integer(key, element, 1) for element in value]
        return [self._integer(key, value, 1)] * layers

    def pattern(self, layers: int) -> list[str]:
        key = "attention.sliding_window_pattern"
        value = self.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, f"is one value where an array of {layers} belongs, a truth value for each layer")
        if len(value) != layers or not all(isinstance(element, bool) for element in value):
            raise self.wrong(key, f"has {len(value)} elements and must have {layers} truth values, one for each layer")
        if value[-1]:
            raise self.wrong(key, "makes the last layer a sliding one, which in Gemma-4 is a full one")
        return [SLIDING if sliding else FULL for sliding in value]


def shortest(value: float) -> float:
    """The decimal number that was meant by a 32-bit float: the shortest that rounds to it."""
    try:
        packed = struct.pack("<f", value)
    except OverflowError:
        return float(value)
    return next((found for digits in range(1, 10) if struct.pack("<f", found := float(f"{value:.{digits}g}")) == packed),
                float(value))


def check_architecture(header: Header) -> None:
    """Raises UnsupportedModelError for a file of another architecture or a mixture of experts, CheckpointError for one that is
    no model."""
    found = header.metadata
    architecture, kind = found.get("general.architecture"), found.get("general.type", "model")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{header.path} does not say which architecture its model has (general.architecture)")
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(f"architecture {architecture[:60]!r} of {header.path} is not supported: of GGUF files this "
                                    f"engine runs dense {ARCHITECTURE} models (Gemma-4 E2B and E4B)")
    if kind != "model":
        raise CheckpointError(f"{header.path} holds a {str(kind)[:60]!r}, not a model: name the model's own file")
    if (parts := found.get("split.count", 1)) != 1:
        raise CheckpointError(f"{header.path} is one of {parts!r:.20} files that make up a model: merge them "
                              "(llama-gguf-split --merge) and name the one file")
    if _Metadata(header).integer("expert_count", least=0, default=0):
        raise UnsupportedModelError(f"{header.path} has mixture-of-experts layers ({ARCHITECTURE}.expert_count), which this engine "
                                    "does not compute: of Gemma-4, name E2B or E4B")
    if not _Metadata(header).integer("embedding_length_per_layer_input", least=0, default=1):
        raise UnsupportedModelError(f"{header.path} is a {ARCHITECTURE} model without per-layer embeddings "
                                    f"({ARCHITECTURE}.embedding_length_per_layer_input is 0), which this engine does not run: of "
                                    "Gemma-4, name E2B or E4B")
    if not header.tensors:
        raise CheckpointError(f"{header.path} holds no tensors: it is a vocabulary, not a model")


def text_config(header: Header, *, tied: bool = True) -> dict[str, Any]:
    """The text config that `ModelGeometry.from_config` takes, of a file that has passed `check_architecture`; `tied` says
    whether the head is the token table. Raises CheckpointError, and UnsupportedModelError for what the engine does not compute."""
    data = _Metadata(header)
    layers = data.integer("block_count")
    described = len({match[1] for name in header.tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))})
    if layers != described:     # and so no more layers are made than the file describes
        raise data.wrong("block_count", f"is {layers} and the file's tensors make up {described} layers")
    types, shared = data.pattern(layers), data.integer("attention.shared_kv_layers", least=0)
    if shared >= layers:
        raise data.wrong("attention.shared_kv_layers", f"is {shared}, which leaves no layer of {layers} with keys of its own")
    width, double = _mlp_width(data, layers, layers - shared)
    head_dim, full_head_dim = _head_dim(data, "_swa"), _head_dim(data, "")
    _refuse_other_computations(data)
    table, ple_table = (_rows(header, name) for name in ("token_embd.weight", "per_layer_token_embd.weight"))
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    marked = {token: index for index, token in enumerate(tokens)} if isinstance(tokens, list) else {}
    return {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "vocab_size": table,
        "vocab_size_per_layer_input": ple_table,
        "hidden_size": data.integer("embedding_length"),
        "hidden_size_per_layer_input": data.integer("embedding_length_per_layer_input", least=0),
        "intermediate_size": width,
        "use_double_wide_mlp": double,
        "num_attention_heads": data.integer("attention.head_count"),
        "num_key_value_heads": _kv_heads(data, layers),
        "head_dim": head_dim,
        "global_head_dim": full_head_dim,
        "sliding_window": data.integer("attention.sliding_window"),
        "max_position_embeddings": data.integer("context_length"),
        "rms_norm_eps": data.real("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": data.real("final_logit_softcapping", default=0.0) or None,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": data.real("rope.freq_base_swa", least=1.0)},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": ROTATED,
                   "rope_theta": data.real("rope.freq_base", least=1.0)},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,       # the tokenizer's, once it is read
    } | {field: marked[token] for field, token in PLACEHOLDERS.items() if token in marked}


def _rows(header: Header, name: str) -> int:
    if name not in header.tensors:
        raise CheckpointError(f"{header.path} lacks {name}, without which the model cannot be run")
    return header.tensors[name].shape[0]


def _mlp_width(data: _Metadata, layers: int, first_shared: int) -> tuple[int, bool]:
    """The width of the MLP, and whether it is twice that in the layers that share K/V."""
    key = "feed_forward_length"
    widths = data.a_layer(key, layers)
    own, shared = widths[0], widths[-1]
    double = first_shared < layers and shared == 2 * own
    for layer, width in enumerate(widths):
        wanted = 2 * own if double and layer >= first_shared else own
        if width != wanted:
            raise data.wrong(key, f"gives layer {layer} {width} and the layers before make it {wanted}; only the layers that "
                                  f"share K/V, from {first_shared} on, may have another width, all the same and twice that")
    return own, double


def _head_dim(data: _Metadata, ending: str) -> int:
    size = data.integer(f"attention.key_length{ending}")
    for key, found in ((f"attention.value_length{ending}", data.integer(f"attention.value_length{ending}")),
                       (f"rope.dimension_count{ending}", data.integer(f"rope.dimension_count{ending}", default=size))):
        if found != size:
            raise data.wrong(key, f"is {found} and attention.key_length{ending} is {size}: in Gemma-4 they are equal")
    return size


def _kv_heads(data: _Metadata, layers: int) -> int:
    found = data.a_layer("attention.head_count_kv", layers)
    if len(set(found)) != 1:
        raise data.wrong("attention.head_count_kv", f"differs between layers ({sorted(set(found))}), and in E-series models it "
                                                    "does not")
    return found[0]


def _refuse_other_computations(data: _Metadata) -> None:
    """Raises UnsupportedModelError for keys that change what is computed."""
    harmless = {"rope.scaling.type": ("none",), "rope.scaling.factor": (0.0, 1.0), "attn_logit_softcapping": (0.0,),
                "attention.scale": (1.0,), "attention.causal": (True,)}
    for key, values in harmless.items():
        found = data.found.get(f"{ARCHITECTURE}.{key}", values[0])
        if isinstance(found, list) or found not in values:
            raise UnsupportedModelError(f"{ARCHITECTURE}.{key} in {data.path} is {found!r:.60}, which this engine does not "
                                        "compute: convert the model without it")


def check_rope_freqs(header: Header, head_dim: int, values: list[float] | None) -> None:
    """Raises CheckpointError unless `values` of `rope_freqs` (None where it is absent) rotate the first quarter of a full
    layer's head and no more: it is the only place of the file that says so (pie-project/pie#432)."""
    pairs = head_dim // 2
    rotated = int(ROTATED * head_dim // 2)
    if values is None:
        raise CheckpointError(f"{header.path} lacks rope_freqs.weight, which says how much of a full layer's head is rotated: "
                              "convert the model again")
    if len(values) != pairs:
        raise CheckpointError(f"rope_freqs.weight in {header.path} has {len(values)} values and full layers, whose heads have "
                              f"{head_dim}, need {pairs}: convert the model again")
    if values != [1.0] * rotated + [STILL] * (pairs - rotated):
        raise CheckpointError(f"rope_freqs.weight in {header.path} is not 1 for the first {rotated} pairs and 1e30 for the other "
                              f"{pairs - rotated}, as Gemma-4 rotates its heads: convert the model again")


def shapes_of(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a Gemma-4 text model needs, by its Hugging Face name. In Python's own integers: whatever
    a file claims, this can be compared with its tensors before a model is made."""
    hidden, ple, layers = geometry.hidden_size, geometry.ple_width, geometry.num_layers
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (geometry.vocab_size, hidden),
        "model.embed_tokens_per_layer.weight": (geometry.ple_vocab_size, layers * ple),
        "model.per_layer_model_projection.weight": (layers * ple, hidden),
        "model.per_layer_projection_norm.weight": (ple,),
        "model.norm.weight": (hidden,),
    }
    if not geometry.tied_head:
        shapes["lm_head.weight"] = (geometry.vocab_size, hidden)
    for layer in geometry.layers:
        at, queries, keys = f"model.layers.{layer.index}", layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        shapes[f"{at}.layer_scalar"] = (1,)
        shapes |= {f"{at}.{norm}.weight": (hidden,) for norm in (
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
            "post_per_layer_input_norm")}
        shapes |= {f"{at}.self_attn.q_proj.weight": (queries, hidden), f"{at}.self_attn.q_norm.weight": (layer.head_dim,),
                   f"{at}.self_attn.o_proj.weight": (hidden, queries)}
        if layer.owns_kv:
            shapes |= {f"{at}.self_attn.k_proj.weight": (keys, hidden), f"{at}.self_attn.v_proj.weight": (keys, hidden),
                       f"{at}.self_attn.k_norm.weight": (layer.head_dim,)}
        shapes |= {f"{at}.mlp.gate_proj.weight": (layer.mlp_width, hidden), f"{at}.mlp.up_proj.weight": (layer.mlp_width, hidden),
                   f"{at}.mlp.down_proj.weight": (hidden, layer.mlp_width)}
        shapes |= {f"{at}.per_layer_input_gate.weight": (ple, hidden), f"{at}.per_layer_projection.weight": (hidden, ple)}
    return shapes
