"""A Gemma-4 E-series text model as a dense `gemma4` GGUF file, for this engine and for llama.cpp.

Norms are written as they are and queries and keys in their own order, as such files have them; layers that share K/V have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from torch import Tensor

from gemma4_flex.checkpoints.gguf_config import ARCHITECTURE, ROTATED, STILL, text_config
from gemma4_flex.checkpoints.gguf_file import WRITABLE, Outgoing, write_file
from gemma4_flex.checkpoints.gguf_header import Header, TensorInfo
from gemma4_flex.checkpoints.gguf_names import ROPE_FREQS, gguf_name
from gemma4_flex.checkpoints.gguf_vocabulary import vocabulary_of
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, weights_of
from gemma4_flex.geometry import FULL, SLIDING, ModelGeometry, UnsupportedModelError
from gemma4_flex.ggml_blocks import TYPES
from gemma4_flex.models.packed_modules import is_packed
from gemma4_flex.models.projections import PLE_TABLE

NEXT = {"Q6_K": "Q8_0"}         # what rows are written as that a type's blocks do not fill; F16 after that
FEW_BITS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")
FILE_TYPE = {"F32": "ALL_F32"} | {name: f"MOSTLY_{name}" for name in WRITABLE if name != "F32"}


class Written(NamedTuple):
    """What a file holds: how many tensors of each type, their bytes, and those that had to be of another type than asked for."""

    counts: dict[str, int]
    num_bytes: int
    fallbacks: dict[str, str]


def write_gguf(path: Path, loaded: LoadedModel, *, type_name: str, ple_type: str | None = None, overwrite: bool = False,
               changed: Callable[[str, Tensor], Tensor] = lambda name, weight: weight) -> Written:
    """Writes `loaded`, matrices in the ggml type `type_name` (one of WRITABLE), norms and scalars in F32.

    The table of per-layer embeddings is of `ple_type`, or where None of `type_name` but of no fewer than 8 bits. A matrix whose
    rows the type's blocks do not fill gets a larger type. `changed(name, weight)` may give other values for a weight, by its
    Hugging Face name, as they are wanted; none are rounded before the one rounding to the file's type.

    Raises UnsupportedModelError for a model that such a file does not hold or llama.cpp computes wrongly, CheckpointError for
    the rest: a type that is not written, a tokenizer of another kind, values that do not fit, a file that is in the way.
    """
    geometry = loaded.geometry
    for name in filter(None, (type_name, ple_type)):
        if name not in WRITABLE:
            raise CheckpointError(f"ggml type {name!r} cannot be written: name one of {', '.join(WRITABLE)}")
    check_geometry(geometry)
    ple_type = ple_type or ("Q8_0" if type_name in FEW_BITS else type_name)
    tensors, fallbacks = [], {}
    for hf_name, weight in _weights(loaded).items():
        wanted = "F32" if len(weight.shape) == 1 else ple_type if hf_name == f"{PLE_TABLE}.weight" else type_name
        found = _fitting(wanted, weight.shape[-1])
        if found != wanted:
            fallbacks[hf_name] = found
        tensors.append(Outgoing(gguf_name(hf_name), found, tuple(weight.shape), _fetch(changed, hf_name, weight)))
    tensors.append(Outgoing(ROPE_FREQS, "F32", (geometry.rope[FULL].head_dim // 2,), lambda: _rope_freqs(geometry)))
    metadata = metadata_of(loaded, type_name)
    _check_read_back(path, geometry, metadata, tensors)
    write_file(path, metadata, tensors, overwrite=overwrite)
    return Written(dict(Counter(tensor.type for tensor in tensors)), sum(tensor.num_bytes for tensor in tensors), fallbacks)


def metadata_of(loaded: LoadedModel, type_name: str) -> dict[str, Any]:
    """The metadata of a file whose matrices are mostly of `type_name`."""
    geometry = loaded.geometry
    first, widths = geometry.layers[0], [layer.mlp_width for layer in geometry.layers]
    sliding, full = geometry.rope[SLIDING], geometry.rope[FULL]
    return {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": loaded.source,
        "general.file_type": int(gguf.LlamaFileType[FILE_TYPE[type_name]]),
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    } | {f"{ARCHITECTURE}.{key}": value for key, value in {
        "block_count": geometry.num_layers,
        "context_length": geometry.max_positions,
        "vocab_size": geometry.vocab_size,
        "embedding_length": geometry.hidden_size,
        "embedding_length_per_layer_input": geometry.ple_width,
        "feed_forward_length": widths[0] if len(set(widths)) == 1 else widths,
        "attention.head_count": first.num_heads,
        "attention.head_count_kv": first.num_kv_heads,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.sliding_window": next(layer.window for layer in geometry.layers if layer.window),
        "attention.sliding_window_pattern": [layer.attention_type == SLIDING for layer in geometry.layers],
        "attention.shared_kv_layers": geometry.num_layers - geometry.first_shared,
        "attention.layer_norm_rms_epsilon": float(geometry.norm_eps),
        "rope.freq_base": full.theta,
        "rope.freq_base_swa": sliding.theta,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "final_logit_softcapping": float(geometry.final_softcap or 0.0),       # without the key llama.cpp takes 30
    }.items()} | vocabulary_of(loaded.tokenizer, geometry.vocab_size)


def check_geometry(geometry: ModelGeometry) -> None:
    """Raises UnsupportedModelError for a model that a dense `gemma4` file does not hold, or that llama.cpp takes for another."""
    if geometry.architecture != "gemma4_text":
        raise UnsupportedModelError(f"a {geometry.architecture} model cannot be written as a GGUF file: name a Gemma-4 of the "
                                    "E series")
    if set(geometry.rope) != {SLIDING, FULL}:
        raise UnsupportedModelError(f"a model with {' and '.join(geometry.rope)} layers alone cannot be written as a GGUF file: "
                                    "Gemma-4 has sliding and full ones")
    if (rotated := geometry.rope[FULL].rotated_fraction) != ROTATED:
        raise UnsupportedModelError(f"a model that rotates {rotated} of a full layer's head cannot be written as a GGUF file: in "
                                    f"Gemma-4 it is {ROTATED}")
    if geometry.ple_vocab_size != geometry.vocab_size:
        raise UnsupportedModelError(f"a model with {geometry.ple_vocab_size} rows of per-layer embeddings for "
                                    f"{geometry.vocab_size} tokens cannot be written as a GGUF file: llama.cpp wants as many")
    first = geometry.first_shared
    for layer in geometry.layers[first:]:
        taken = first - (2 if layer.attention_type == SLIDING else 1)
        if layer.kv_owner != taken:
            raise UnsupportedModelError(f"layer {layer.index} reads the K/V of layer {layer.kv_owner}, and llama.cpp would read "
                                        f"layer {taken}'s: only a model whose layers that make K/V end with a sliding and a full "
                                        "one can be written as a GGUF file")


def _weights(loaded: LoadedModel) -> dict[str, Any]:
    """Weights by Hugging Face name: tensors, or what is packed (which has a shape and is unpacked when it is wanted)."""
    model, tied = loaded.model, loaded.geometry.tied_head
    packed = {f"{path}.weight": module.packed for path, module in model.named_modules()
              if is_packed(module) and not (tied and path == "lm_head")}
    return packed | weights_of(model)


def _fetch(changed: Callable[[str, Tensor], Tensor], name: str, weight: Any) -> Callable[[], Tensor]:
    return lambda: changed(name, weight if isinstance(weight, Tensor) else weight.dense())


def _fitting(wanted: str, width: int) -> str:
    while wanted in TYPES and width % TYPES[wanted].values:
        wanted = NEXT.get(wanted, "F16")
    return wanted


def _rope_freqs(geometry: ModelGeometry) -> Tensor:
    """What the frequencies of a full layer are divided by: 1 where it rotates, and what makes them vanish where it does not."""
    pairs = geometry.rope[FULL].head_dim // 2
    divisors = torch.full((pairs,), STILL)
    divisors[:int(geometry.rope[FULL].rotated_fraction * pairs)] = 1.0
    return divisors


def _check_read_back(path: Path, geometry: ModelGeometry, metadata: dict[str, Any], tensors: list[Outgoing]) -> None:
    """Raises UnsupportedModelError unless who reads the file finds the model that was written."""
    described = {tensor.name: TensorInfo(tensor.name, tensor.type, tensor.shape, 0, tensor.num_bytes) for tensor in tensors}
    read = ModelGeometry.from_config(text_config(Header(path, metadata, described, 0), tied=geometry.tied_head))
    if lines := geometry.differences(read):
        raise UnsupportedModelError(f"a GGUF file cannot say all of this model (model and file): {'; '.join(lines[:5])}")
