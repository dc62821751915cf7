"""Gemma-4 E-series generation in plain PyTorch: paged K/V, flex_attention, captured decode steps."""
from gemma4_flex.engine import Completion, FlexEngine
from gemma4_flex.params import EngineConfig, SamplingParams

__all__ = ["Completion", "EngineConfig", "FlexEngine", "SamplingParams"]
