"""The published geometries, scaled down, pass the same proof as the bundled model."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.checkpoints.gguf_write import write_gguf
from gemma4_flex.checkpoints.mlx_recipe import parse_recipe
from gemma4_flex.checkpoints.mlx_write import write_mlx
from gemma4_flex.engine import FlexEngine
from gemma4_flex.models.packed_modules import describe_packed
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.verify.report import describe, verify_model
from tests.engines import hf_generate

CONFIGS = Path(__file__).resolve().parents[2] / "gemma4_flex" / "assets" / "configs"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size, shared_kv", [("e2b-small", "paged"), ("e4b-small", "sidecar")])
def test_a_scaled_down_geometry_keeps_every_contract(size, shared_kv, dtype):
    loaded = load_text_model(f"synthetic:{CONFIGS / size}.json", dtype=getattr(torch, dtype), device="cpu")
    config = EngineConfig(device="cpu", dtype=dtype, attention="sdpa", compile=False, shared_kv=shared_kv)
    done = verify_model(loaded.model, loaded.tokenizer, loaded.geometry, config, model_name=size, max_new_tokens=6)
    assert not done.broken, describe(done)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """E4B and Bolt, which are one geometry, scaled down: a GGUF file and an MLX directory, most of both in few bits."""
    folder = tmp_path_factory.mktemp("e4b")
    loaded = load_text_model(f"synthetic:{CONFIGS / 'e4b-small.json'}", dtype=torch.bfloat16, device="cpu")
    write_gguf(folder / "e4b.gguf", loaded, type_name="Q8_0")
    recipe = {"bits": 4, "group_size": 32, "overrides": {"per_layer_input_gate": {"bits": 8}, "self_attn": {"bits": 6}}}
    write_mlx(folder / "mlx", loaded, parse_recipe("mixed", recipe))
    return {"gguf": folder / "e4b.gguf", "mlx": folder / "mlx"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind, ple", [("gguf", "host"), ("mlx", "device")])
def test_e4bs_geometry_keeps_every_contract_out_of_files_of_few_bits(files, kind, ple, dtype):
    loaded = load_text_model(str(files[kind]), dtype=getattr(torch, dtype), device="cpu", ple=ple)
    config = EngineConfig(device="cpu", dtype=dtype, attention="sdpa", compile=False, ple=ple)
    assert describe_packed(loaded.model, loaded.geometry)["packings"].keys() >= {
        "gguf": {"Q8_0"}, "mlx": {"affine 4-bit, groups of 32", "affine 6-bit, groups of 32", "affine 8-bit, groups of 32"}}[kind]
    done = verify_model(loaded.model, loaded.tokenizer, loaded.geometry, config, model_name=kind, max_new_tokens=6)
    assert not done.broken, describe(done)


@pytest.mark.parametrize("kind", ["gguf", "mlx"])
def test_a_captured_run_of_a_file_gives_hugging_faces_tokens(files, kind):
    loaded = load_text_model(str(files[kind]), dtype=torch.float32, device="cpu")
    engine = FlexEngine(loaded.model, None, EngineConfig(device="cpu", dtype="float32", attention="sdpa", compile=False,
                                                         max_batch_size=1, capture_cudagraph=True, max_seq_length=64))
    prompts = [[2, *range(5, 5 + n)] for n in (9, 40)]
    done = engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True))
    assert [d.token_ids for d in done] == [hf_generate(loaded.model, p, 12) for p in prompts]
    assert engine.stats.steps_eager == 0
