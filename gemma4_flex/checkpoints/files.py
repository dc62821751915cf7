"""The files of a Hugging Face checkpoint: JSON, safetensors, and which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemma4_flex.checkpoints.skeleton import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; CheckpointError where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} holds no {path.name}: name a Hugging Face checkpoint directory") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return found


def open_tensors(path: Path):
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def locate(path: Path) -> dict[str, Path]:
    """Each tensor's file, from the index of a sharded checkpoint or from its only file."""
    if (path / INDEX).is_file():
        listed = read_json(path / INDEX).get("weight_map") or {}
        if absent := sorted({shard for shard in listed.values() if not (path / shard).is_file()}):
            raise CheckpointError(f"{path} lacks {absent[0]}, which {INDEX} lists: download the checkpoint again")
        return {name: path / shard for name, shard in listed.items()}
    if not (path / SINGLE).is_file():
        raise CheckpointError(f"{path} holds neither {SINGLE} nor {INDEX}; weights are read from safetensors only")
    with open_tensors(path / SINGLE) as tensors:
        return dict.fromkeys(tensors.keys(), path / SINGLE)
