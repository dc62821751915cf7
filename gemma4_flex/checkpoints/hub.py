"""A checkpoint on the Hugging Face hub to a directory, its config fetched and judged before its weights."""

from __future__ import annotations

from pathlib import Path

from gemma4_flex.checkpoints.files import read_json
from gemma4_flex.checkpoints.hf import NAMES
from gemma4_flex.checkpoints.mlx import is_mlx
from gemma4_flex.checkpoints.prequantized import check_quantization
from gemma4_flex.checkpoints.published import check_claim
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import ModelGeometry


def fetch(name: str, *, four_bit: bool = False) -> Path:
    """The directory of the hub id `name`, downloaded or from the local hub cache. Raises CheckpointError and
    UnsupportedModelError for a config that cannot be run as asked, before any weight is downloaded."""
    path = download(name, ["config.json"])
    config = read_json(path / "config.json")
    check_claim(name, ModelGeometry.from_config(config))
    if four_bit or not is_mlx(path, config):
        check_quantization(name, config, four_bit=four_bit)
    return download(name, ["*.json", "*.jinja", "*.model", "model*.safetensors"])


def download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:      # the hub client raises a dozen kinds; to a user they all mean this
        raise CheckpointError(f"{name!r} is no local directory and could not be had from the hub "
                              f"({type(error).__name__}); names that need no download: {NAMES}") from error
