"""The trained tiny model that comes with the package."""

from __future__ import annotations

from typing import Any

import torch

from gemma4_flex.checkpoints.hf import load_directory, load_tokenizer
from gemma4_flex.checkpoints.published import ASSETS
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel

TINY = ASSETS / "tiny-gemma4"


def load_tiny(*, dtype: torch.dtype, device: str, ple: str = "device") -> LoadedModel:
    """The bundled model. Raises CheckpointError where the package was installed without it."""
    if not TINY.is_dir():
        raise CheckpointError("this copy of gemma4-flex comes without its bundled model: "
                              "run scripts/make_tiny_checkpoint.py or name another model")
    return load_directory(TINY, dtype=dtype, device=device, ple=ple, source="tiny (bundled)")


def bundled_tokenizer(vocab_size: int) -> Any:
    """The bundled tokenizer, or None where some of its ids lie outside `vocab_size`."""
    tokenizer = load_tokenizer(TINY)
    return tokenizer if tokenizer is not None and len(tokenizer) <= vocab_size else None
