"""Names and paths to a text model on its device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from gemma4_flex.checkpoints.bundled import load_tiny
from gemma4_flex.checkpoints.files import read_json
from gemma4_flex.checkpoints.four_bit import require_bitsandbytes
from gemma4_flex.checkpoints.gguf import load_gguf
from gemma4_flex.checkpoints.hf import NAMES, load_directory
from gemma4_flex.checkpoints.hub import fetch
from gemma4_flex.checkpoints.mlx import is_mlx, load_mlx
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, require_transformers
from gemma4_flex.checkpoints.synthetic import load_synthetic
from gemma4_flex.models.projections import lay_side_by_side

__all__ = ["CheckpointError", "LoadedModel", "format_of", "load_text_model"]


class Target(NamedTuple):
    """What a model is loaded to: its dtype, and the device, or host memory for the table of per-layer embeddings."""
    dtype: torch.dtype
    device: str
    ple: str


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_text_model(name: str, *, dtype: torch.dtype, device: str, seed: int = 0, four_bit: bool = False,
                    gguf_weights: str = "packed", ple: str = "device") -> LoadedModel:
    """The text model called `name`, in `dtype`, on `device`, linears that read one input side by side in memory.

    `name`: `tiny` (bundled), `synthetic:E2B` or another name in `published.PUBLISHED`, `synthetic:<path of a config.json>`
    (random weights from `seed`), a local directory in Hugging Face's or MLX's format, a GGUF file, or a hub id; text-only or
    multimodal. `four_bit` asks for a checkpoint that bitsandbytes quantised before it was saved, and for nothing else.
    `gguf_weights`: "packed" keeps a GGUF file's quantised weights as they are, "dequantize" decodes them as they are read.
    `ple`: where the table of per-layer embeddings goes, to the "device" or to "host" memory, never by way of the device.

    Raises CheckpointError for a name that leads nowhere and for files that do not make up a model, and
    UnsupportedModelError, before any weight is read, for a model that this engine does not compute.
    """
    require_transformers()
    if four_bit:
        require_bitsandbytes()
        if name == "tiny" or name.startswith("synthetic:") or name.endswith(".gguf"):
            raise CheckpointError(f"{name} is not quantised by bitsandbytes: name a checkpoint that it quantised to 4 bits, or "
                                  "quantise an unquantised one as it loads (--load_in_4bit)")
    loaded = _load(name, Target(dtype, device, ple), seed, four_bit, gguf_weights)
    lay_side_by_side(loaded.model.model)
    return loaded


def format_of(name: str) -> str:
    """What `capabilities.FORMATS` calls the format of a model's weights, by its name and its config; a hub id that was not
    downloaded counts as unquantised, and loading it says more."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return "gguf"
    if not name or not (path / "config.json").is_file():
        return "safetensors"
    config = read_json(path / "config.json")
    return "mlx" if is_mlx(path, config) else "bitsandbytes" if config.get("quantization_config") else "safetensors"


def _load(name: str, target: Target, seed: int, four_bit: bool, gguf_weights: str) -> LoadedModel:
    if name == "tiny":
        return load_tiny(**target._asdict())
    if name.startswith("synthetic:"):
        return load_synthetic(name.removeprefix("synthetic:"), **target._asdict(), seed=seed)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _load_directory(path, target, four_bit, str(path))
    if path.suffix == ".gguf":
        return load_gguf(path, **target._asdict(), weights=gguf_weights)
    if path.is_file() or not HUB_ID.fullmatch(name):
        found = "is a file" if path.is_file() else "is no model name and no directory"
        raise CheckpointError(f"{name!r} {found}: name {NAMES}, or a hub id such as unsloth/gemma-4-E2B-it")
    return _load_directory(fetch(name, four_bit=four_bit), target, four_bit, name)


def _load_directory(path: Path, target: Target, four_bit: bool, source: str) -> LoadedModel:
    if not four_bit and is_mlx(path, read_json(path / "config.json")):
        return load_mlx(path, **target._asdict(), source=source)
    return load_directory(path, **target._asdict(), source=source, four_bit=four_bit)
