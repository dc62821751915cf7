"""Gemma-4 E-series generation in plain PyTorch: paged K/V, flex_attention, captured decode steps."""
from importlib import import_module

_ROOMS = {"FlexEngine": "engine", "Completion": "request", "EngineConfig": "params", "SamplingParams": "params"}
__all__ = [*_ROOMS]


def __getattr__(name: str) -> object:      # on first use: importing a host-only room must not cost an import of torch
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
