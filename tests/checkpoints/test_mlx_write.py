"""A written checkpoint holds mx.quantize's bytes, is loaded by mlx_lm, and comes back here as it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gemma4_flex.checkpoints import CheckpointError, LoadedModel, load_text_model
from gemma4_flex.checkpoints.mlx_recipe import load_recipe, parse_recipe, recipe_names
from gemma4_flex.checkpoints.mlx_write import write_mlx
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import load_adapter, random_adapter, save_adapter
from gemma4_flex.lora.gguf_adapter import merging
from scripts.convert_mlx import main
from tests.checkpoints.mlx_rig import PROMPT, dequantized_model, mlx_logits, wide_model
from tests.dense import dense_model
from tests.engines import hf_logits
from tests.mlx_arrays import quantized, same_bits
from tests.tiny import fake_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MANY = {"bits": 4, "group_size": 64, "overrides": {
    "layers.0": {"bits": 2}, "layers.1": {"bits": 3, "group_size": 32}, "layers.2": {"bits": 5}, "layers.3": {"bits": 6},
    "layers.4.mlp": {"mode": "mxfp4"}, "layers.4.self_attn": {"mode": "mxfp8"}, "layers.5.mlp": {"mode": "nvfp4"},
    "embed_tokens_per_layer": {"bits": 8, "group_size": 32}, "per_layer_model_projection": False}}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def loaded_model(dtype: torch.dtype = torch.float32, tokenizer=None) -> LoadedModel:
    model = wide_model(dtype=dtype)
    return LoadedModel(model, tokenizer, ModelGeometry.from_config(model.config), "tests", frozenset([1, 7]))


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    loaded = load_text_model(str(path), dtype=dtype, device="cpu")
    loaded.model.config._attn_implementation = "eager"
    return loaded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_tensor_is_what_mlx_quantises_the_weight_to_or_the_weight(tmp_path, dtype):
    loaded, recipe = loaded_model(dtype), parse_recipe("many", MANY)
    written = write_mlx(tmp_path / "out", loaded, recipe)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert written.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    expected = set()
    for name, weight in loaded.model.state_dict().items():
        module = name.removesuffix(".weight")
        if name == "lm_head.weight":
            continue
        if (format := recipe.plan(loaded.model).get(module)) is None:
            assert same_bits(tensors[name], weight)
            expected.add(name)
            continue
        for part, theirs in zip(("weight", "scales", "biases"), quantized(weight, *format)):
            assert same_bits(tensors[f"{module}.{part}"], theirs), (module, part)
            expected.add(f"{module}.{part}")
    assert tensors.keys() == expected


@pytest.mark.parametrize("name", recipe_names())
def test_mlx_lm_loads_what_is_written_and_its_logits_are_ours(tmp_path, name):
    write_mlx(tmp_path / "out", loaded_model(), load_recipe(name))
    ours = hf_logits(load(tmp_path / "out").model, PROMPT)
    assert (ours - mlx_logits(tmp_path / "out")).abs().max() < 1e-3
    assert torch.equal(ours, hf_logits(dequantized_model(tmp_path / "out"), PROMPT))


def test_mlx_lm_loads_a_mix_of_every_mode(tmp_path):
    write_mlx(tmp_path / "out", loaded_model(), parse_recipe("many", MANY))
    ours = hf_logits(load(tmp_path / "out").model, PROMPT)
    assert (ours - mlx_logits(tmp_path / "out")).abs().max() < 1e-3
    assert torch.equal(ours, hf_logits(dequantized_model(tmp_path / "out"), PROMPT))


def test_a_written_checkpoint_comes_back_with_the_bits_tokenizer_stop_ids_and_geometry_it_had(tmp_path):
    before = loaded_model(torch.bfloat16, fake_tokenizer())
    write_mlx(tmp_path / "out", before, parse_recipe("many", MANY))
    after = load(tmp_path / "out", torch.bfloat16)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for path, module in after.model.named_modules():
        if path != "lm_head" and hasattr(module, "packing"):
            parts = module.packing.join(module.packed.parts)
            for part, tensor in zip(("weight", "scales", "biases"), parts):
                assert tensor is None or same_bits(tensor, tensors[f"{path}.{part}"])
    assert torch.equal(after.model.model.per_layer_model_projection.weight, before.model.model.per_layer_model_projection.weight)
    assert after.stop_ids == {1, 7} and after.geometry == before.geometry and after.skipped == {}
    assert after.tokenizer("hello").input_ids == before.tokenizer("hello").input_ids
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    with pytest.raises(CheckpointError, match="quantised already: name the checkpoint it was made from"):
        write_mlx(tmp_path / "again", after, load_recipe("4bit"))


def test_large_checkpoints_are_several_files_with_an_index(tmp_path):
    write_mlx(tmp_path / "one", loaded_model(), load_recipe("4bit"))
    written = write_mlx(tmp_path / "many", loaded_model(), load_recipe("4bit"), shard=60_000)
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files and index["metadata"]["total_size"] == written.num_bytes
    assert torch.equal(hf_logits(load(tmp_path / "many").model, PROMPT), hf_logits(load(tmp_path / "one").model, PROMPT))
    assert (mlx_logits(tmp_path / "many") - mlx_logits(tmp_path / "one")).abs().max() == 0


def test_the_config_lists_what_is_not_as_the_default_has_it_and_nothing_else(tmp_path):
    write_mlx(tmp_path / "out", loaded_model(), load_recipe("4bit-attention8-ple"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    block = config["quantization"]
    assert block == config["quantization_config"]
    assert {key: block.pop(key) for key in ("mode", "bits", "group_size")} == {"mode": "affine", "bits": 4, "group_size": 64}
    assert block.pop("model.layers.5.self_attn.q_proj") == {"mode": "affine", "bits": 8, "group_size": 64}
    assert block.pop("model.layers.5.per_layer_input_gate") is False
    assert len(block) == 4 * 4 + 2 * 2 - 1 + 6 + 6 - 1 + 2 and config["global_head_dim"] == 32


def test_a_dense_model_is_written_for_mlx_lm_too(tmp_path):
    model = dense_model("qwen3")
    loaded = LoadedModel(model, None, ModelGeometry.from_config(model.config), "tests", frozenset())
    write_mlx(tmp_path / "out", loaded, parse_recipe("r", {"bits": 8, "group_size": 32}))
    ours = hf_logits(load(tmp_path / "out").model, PROMPT)
    assert (ours - mlx_logits(tmp_path / "out")).abs().max() < 1e-3


def test_a_merged_adapter_is_rounded_once_and_then_quantised(tmp_path):
    loaded = loaded_model(torch.bfloat16)
    adapter = random_adapter(loaded.model, ["q_proj"], rank=4, alpha=8.0, strength=0.3, seed=1)
    write_mlx(tmp_path / "out", loaded, load_recipe("4bit"), changed=merging(adapter, loaded.model))
    tensors, path = load_file(tmp_path / "out" / "model.safetensors"), "model.layers.2.self_attn.q_proj"
    pair, weight = adapter.pairs[path], loaded.model.get_submodule(path).weight
    merged = (weight.float() + pair.scaling * pair.up.float() @ pair.down.float()).bfloat16()
    assert same_bits(tensors[f"{path}.weight"], quantized(merged, "affine", 4, 64)[0])
    assert not same_bits(tensors[f"{path}.weight"], quantized(weight, "affine", 4, 64)[0])
    save_adapter(adapter, tmp_path / "adapter", base="tests")
    assert load_adapter(tmp_path / "adapter", loaded.geometry).pairs.keys() == adapter.pairs.keys()


# ---- what is refused -----------------------------------------------------------------------------------------------------

def test_a_recipe_that_does_not_fit_writes_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="names mlp.gate, and the model has no linear"):
        write_mlx(tmp_path / "out", loaded_model(), parse_recipe("r", {"overrides": {"mlp.gate": False}}))
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_not_finite_leaves_nothing_and_what_was_there_stays(tmp_path):
    loaded = loaded_model()
    write_mlx(tmp_path / "out", loaded, load_recipe("4bit"))
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    loaded.model.model.layers[3].mlp.up_proj.weight[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.up_proj\.weight with values that are not finite"):
        write_mlx(tmp_path / "out", loaded, load_recipe("4bit"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_only_a_checkpoint_is_overwritten_and_only_when_asked(tmp_path):
    path = tmp_path / "out"
    write_mlx(path, loaded_model(), load_recipe("4bit"))
    (path / "stale").touch()
    with pytest.raises(CheckpointError, match="out exists: name another directory, or --overwrite"):
        write_mlx(path, loaded_model(), load_recipe("4bit"))
    write_mlx(path, loaded_model(), load_recipe("4bit"), overwrite=True)
    assert not (path / "stale").exists() and (path / "config.json").is_file()
    (tmp_path / "papers").mkdir()
    with pytest.raises(CheckpointError, match="papers exists and is no checkpoint"):
        write_mlx(tmp_path / "papers", loaded_model(), load_recipe("4bit"), overwrite=True)


def test_the_script_converts_the_bundled_model_and_says_what_it_kept(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "out"), "--recipe", "4bit-attention8-ple"]) == 0
    said = capsys.readouterr().out
    assert "affine 4-bit, groups of 64" in said and "affine 8-bit, groups of 64" in said and "kept" in said
    assert load(tmp_path / "out").tokenizer is not None
    assert main(["--output", str(tmp_path / "out")]) == 2
    assert main(["--output", str(tmp_path / "new"), "--recipe", "none"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors) and not (tmp_path / "new").exists()


def test_the_script_runs_as_a_file_with_help():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "convert_mlx.py", "--help"], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    assert "--recipe" in done.stdout
