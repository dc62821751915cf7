"""Names and paths to a text model on its device."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from gemma4_flex.checkpoints.bundled import load_tiny
from gemma4_flex.checkpoints.four_bit import require_bitsandbytes
from gemma4_flex.checkpoints.hf import NAMES, load_directory, load_hub
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, require_transformers
from gemma4_flex.checkpoints.synthetic import load_synthetic
from gemma4_flex.models.projections import lay_side_by_side

__all__ = ["CheckpointError", "LoadedModel", "load_text_model"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load_text_model(name: str, *, dtype: torch.dtype, device: str, seed: int = 0,
                    four_bit: bool = False) -> LoadedModel:
    """The text model called `name`, in `dtype`, on `device`, linears that read one input side by side in memory.

    `name`: `tiny` (bundled), `synthetic:E2B` or another name in `published.PUBLISHED`, `synthetic:<path of a config.json>`
    (random weights from `seed`), a local Hugging Face directory, or a hub id; text-only or multimodal. `four_bit` asks for
    a checkpoint that bitsandbytes quantised before it was saved, and for nothing else.

    Raises CheckpointError for a name that leads nowhere and for files that do not make up a model, and
    UnsupportedModelError, before any weight is read, for a model that this engine does not compute.
    """
    loaded = _load(name, dtype, device, seed, four_bit)
    lay_side_by_side(loaded.model.model)
    return loaded


def _load(name: str, dtype: torch.dtype, device: str, seed: int, four_bit: bool) -> LoadedModel:
    require_transformers()
    if four_bit:
        require_bitsandbytes()
        if name == "tiny" or name.startswith("synthetic:"):
            raise CheckpointError(f"{name} is not quantised: name a checkpoint that bitsandbytes quantised to 4 bits, or "
                                  "quantise this one as it loads (--load_in_4bit)")
    if name == "tiny":
        return load_tiny(dtype=dtype, device=device)
    if name.startswith("synthetic:"):
        return load_synthetic(name.removeprefix("synthetic:"), dtype=dtype, device=device, seed=seed)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return load_directory(path, dtype=dtype, device=device, four_bit=four_bit)
    if path.is_file() or not HUB_ID.fullmatch(name):
        found = "is a file" if path.is_file() else "is no model name and no directory"
        raise CheckpointError(f"{name!r} {found}: name {NAMES}, or a hub id such as unsloth/gemma-4-E2B-it")
    return load_hub(name, dtype=dtype, device=device, four_bit=four_bit)
