"""A dense `gemma4` GGUF file to a text model, its quantised weights left as they are or decoded one by one.

The header says which types and shapes there are, so that a file is judged whole before anything is allocated. Rows are read
through a map of the file. Norms and layer scalars are never packed, and tensors that a file holds unquantised are cast.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemma4_flex.checkpoints.gguf_config import check_architecture, check_rope_freqs, shapes_of, text_config
from gemma4_flex.checkpoints.gguf_header import Header, TensorInfo, scan
from gemma4_flex.checkpoints.gguf_names import ROPE_FREQS, gguf_name, hf_name
from gemma4_flex.checkpoints.gguf_tokenizer import tokenizer_of
from gemma4_flex.checkpoints.hf import attach_generation_config, tokenizer_stop_ids
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, materialize, meta_text_model, place, weights_of
from gemma4_flex.geometry import FULL, ModelGeometry, UnsupportedModelError
from gemma4_flex.ggml_blocks import TYPES, packing_of
from gemma4_flex.models.packed_modules import put_packed
from gemma4_flex.packed import PackedWeight

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
STOPS = ("<eos>", "<turn|>", "<|tool_response>")        # Gemma-4's three, of which a file's metadata may name one alone
STOP_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
SHARED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight")
SLICE = 1 << 20         # values decoded at a time, in up to 20 bytes each


def load_gguf(path: Path, *, dtype: torch.dtype, device: str, ple: str = "device", weights: str = "packed",
              source: str | None = None) -> LoadedModel:
    """The text model of the GGUF file at `path`, on `device`, the table of per-layer embeddings where `ple` says. `weights`:
    "packed" leaves quantised matrices in their blocks, to be decoded to `dtype` in each step; "dequantize" decodes them as they
    are read, where they go, which takes no more memory besides than a slice of SLICE values needs.

    Raises UnsupportedModelError for a model that this engine does not compute and CheckpointError for files that do not make up
    a model, both before anything is allocated.
    """
    assert weights in ("packed", "dequantize"), weights
    header = scan(path)
    check_architecture(header)
    config = text_config(header, tied="output.weight" not in header.tensors)
    geometry = ModelGeometry.from_config(config)
    plan, skipped = plan_tensors(header, geometry)
    check_types(header, plan)
    file = _File(header)
    check_rope_freqs(header, next(layer.head_dim for layer in geometry.layers if layer.attention_type == FULL),
                     file.rope_freqs())
    tokenizer = tokenizer_of(header)
    stops = metadata_stop_ids(header) | tokenizer_stop_ids(tokenizer)
    config["eos_token_id"] = sorted(stops) or None
    if tokenizer is not None:
        config |= {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}

    model = meta_text_model(config, dtype=dtype)
    geometry.assert_matches(model.model)
    assert {name: tuple(tensor.shape) for name, tensor in weights_of(model).items()} == shapes_of(geometry)
    packed = {name for name, info in plan.items() if weights == "packed" and len(info.shape) == 2 and info.type in TYPES}
    for name in packed:
        module, packing = name.removesuffix(".weight"), packing_of(plan[name].type, plan[name].shape[1])
        parts = tuple(place(module, part, device, ple) for part in packing.split(file.bytes_of(plan[name])))
        put_packed(model, module, PackedWeight(parts, packing, dtype))
    materialize(model, device, ple)
    targets = weights_of(model)
    for name, info in plan.items():
        if name not in packed:
            file.copy_to(targets[name], info)
    attach_generation_config(model, {}, stops)
    return LoadedModel(model=model, tokenizer=tokenizer, geometry=geometry, source=source or str(path), stop_ids=stops,
                       skipped=skipped)


def plan_tensors(header: Header, geometry: ModelGeometry) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """The file's tensor for each of the model's, by its Hugging Face name, and how many are skipped by kind."""
    shapes = shapes_of(geometry)
    plan: dict[str, TensorInfo] = {}
    skipped: Counter[str] = Counter()
    for info in header.tensors.values():
        name = hf_name(info.name)
        shared = SHARED_KV.fullmatch(name or "")
        if info.name == ROPE_FREQS:
            continue
        if shared and geometry.first_shared <= int(shared[1]) < geometry.num_layers:
            skipped["shared_kv"] += 1
        elif name not in shapes:
            raise CheckpointError(f"{header.path} holds {info.name}, which the text model of its metadata has no place for")
        else:
            plan[name] = info
    if missing := [gguf_name(name) for name in shapes if name not in plan]:
        more = f" and {len(missing) - 3} more tensors" if len(missing) > 3 else ""
        raise CheckpointError(f"{header.path} lacks {', '.join(missing[:3])}{more}, without which the model cannot be run")
    for name, info in plan.items():
        if info.shape != shapes[name]:
            raise CheckpointError(f"{info.name} in {header.path} has the shape {list(info.shape)} and the metadata make it "
                                  f"{list(shapes[name])}")
    return plan, dict(skipped)


def check_types(header: Header, plan: dict[str, TensorInfo]) -> None:
    """Raises UnsupportedModelError for a tensor of a type that is not decoded here."""
    for info in plan.values():
        if info.type not in PLAIN and info.type not in TYPES:
            raise UnsupportedModelError(f"{info.name} in {header.path} is of the type {info.type}, and the types that are read are "
                                        f"{', '.join((*PLAIN, *TYPES))}: convert the model to one of these")


def metadata_stop_ids(header: Header) -> frozenset[int]:
    """Ids of Gemma-4's own stops where the vocabulary has them, and of those that the metadata name."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return frozenset()
    named = (header.metadata.get(key) for key in STOP_KEYS)
    return frozenset(i for i, token in enumerate(tokens) if token in STOPS) | frozenset(
        i for i in named if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < len(tokens))


class _File:
    """The bytes of a scanned file's tensors."""

    def __init__(self, header: Header):
        self.header = header
        self.data = torch.from_numpy(np.memmap(header.path, np.uint8, "c"))     # copied on write, and never written

    def bytes_of(self, info: TensorInfo) -> Tensor:
        """uint8 [rows, bytes of a row]."""
        rows = info.shape[0] if len(info.shape) > 1 else 1
        return self.data[info.start:info.start + info.num_bytes].view(rows, -1)

    def values(self, info: TensorInfo, device: torch.device) -> Iterator[Tensor]:
        """The values on `device`, some rows at a time: [n, width], fp32 or what the file has."""
        for rows in self.bytes_of(info).split(max(1, SLICE // info.shape[-1])):
            rows = rows.to(device)
            if info.type in PLAIN:
                yield rows.view(PLAIN[info.type])
            else:
                packing = packing_of(info.type, info.shape[-1])
                yield packing.unpack(packing.split(rows))

    def copy_to(self, target: Tensor, info: TensorInfo) -> None:
        at, target = 0, target.view(-1, info.shape[-1])
        for rows in self.values(info, target.device):
            target[at:at + len(rows)].copy_(rows)
            at += len(rows)

    def rope_freqs(self) -> list[float] | None:
        info: Any = self.header.tensors.get(ROPE_FREQS)
        if info is None:
            return None
        if info.type != "F32" or len(info.shape) != 1:
            raise CheckpointError(f"{ROPE_FREQS} in {self.header.path} is {info.type} {list(info.shape)}, not one row of F32: "
                                  "convert the model again")
        return self.bytes_of(info).view(torch.float32).flatten().tolist()
