"""Which Hugging Face classes an architecture has, and which walk computes it."""
from __future__ import annotations

from typing import NamedTuple

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.dense import DenseWalk
from gemma4_flex.models.gemma4 import Gemma4Walk
from gemma4_flex.models.walk import Walk


class Architecture(NamedTuple):
    """Names of the classes in transformers, and the walk."""
    model: str
    config: str
    walk: type[Walk]


# by the model_type of the text config
ARCHITECTURES = {
    "gemma4_text": Architecture("Gemma4ForCausalLM", "Gemma4TextConfig", Gemma4Walk),
    "qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", DenseWalk),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", DenseWalk),
}


def walk_class(geometry: ModelGeometry) -> type[Walk]:
    """The walk for a model of this geometry."""
    return ARCHITECTURES[geometry.architecture].walk
