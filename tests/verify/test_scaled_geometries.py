"""The published geometries, scaled down, pass the same proof as the bundled model."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.params import EngineConfig
from gemma4_flex.verify.report import describe, verify_model

CONFIGS = Path(__file__).resolve().parents[2] / "gemma4_flex" / "assets" / "configs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size, shared_kv", [("e2b-small", "paged"), ("e4b-small", "sidecar")])
def test_a_scaled_down_geometry_keeps_every_contract(size, shared_kv, dtype):
    loaded = load_text_model(f"synthetic:{CONFIGS / size}.json", dtype=getattr(torch, dtype), device="cpu")
    config = EngineConfig(device="cpu", dtype=dtype, attention="sdpa", compile=False, shared_kv=shared_kv)
    done = verify_model(loaded.model, loaded.tokenizer, loaded.geometry, config, model_name=size, max_new_tokens=6)
    assert not done.broken, describe(done)
