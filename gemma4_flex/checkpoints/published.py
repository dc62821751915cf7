"""The published geometries, and the hub ids that claim to have one."""

from __future__ import annotations

import json
from pathlib import Path

from gemma4_flex.geometry import ModelGeometry, UnsupportedModelError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
# Bolt is post-trained from Gemma-4-E4B: another set of weights at the same geometry.
PUBLISHED = {name: ASSETS / "configs" / file for name, file in
             (("E2B", "e2b.json"), ("E4B", "e4b.json"), ("Bolt", "e4b.json"), ("Qwen3-0.6B", "qwen3-0.6b.json"),
              ("Llama-3.2-1B", "llama-3.2-1b.json"), ("Qwen3-nano", "qwen3-nano.json"))}      # nano is ours: for a CPU in seconds
CLAIMED = {
    "google/gemma-4-E2B": "E2B", "google/gemma-4-E2B-it": "E2B", "unsloth/gemma-4-E2B-it": "E2B",
    "google/gemma-4-E4B": "E4B", "google/gemma-4-E4B-it": "E4B", "unsloth/gemma-4-E4B-it": "E4B",
    "nvidia/NVIDIA-Nemotron-3.5-Bolt-E4B-BF16": "Bolt", "nvidia/NVIDIA-Nemotron-3.5-Bolt-E4B-4GB-BF16": "Bolt",
    "Qwen/Qwen3-0.6B": "Qwen3-0.6B", "meta-llama/Llama-3.2-1B": "Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct": "Llama-3.2-1B",
}


def published_geometry(which: str) -> ModelGeometry:
    """The geometry of a name in PUBLISHED."""
    return ModelGeometry.from_config(json.loads(PUBLISHED[which].read_text(encoding="utf-8")))


def check_claim(name: str, geometry: ModelGeometry) -> None:
    """Raises UnsupportedModelError, field by field, where a hub id known for a published geometry has another: what is
    known of its weights, memory and speed would not hold."""
    if name in CLAIMED and (lines := published_geometry(CLAIMED[name]).differences(geometry)):
        raise UnsupportedModelError(f"{name} is not of the published {CLAIMED[name]} geometry (published and found): "
                                    f"{'; '.join(lines[:5])}")
