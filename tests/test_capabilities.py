"""Every cell of the table of capabilities: it runs and gives Hugging Face's tokens, or it is refused in the table's own words."""
from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from gemma4_flex import capabilities
from gemma4_flex.bench import inference
from gemma4_flex.bench.inference_flags import engine_config, parser
from gemma4_flex.capabilities import DEVICES, FORMATS, LORAS, WEIGHTS, CapabilityError, Setup, setups
from gemma4_flex.checkpoints import format_of, load_text_model
from gemma4_flex.checkpoints.gguf_write import write_gguf
from gemma4_flex.checkpoints.mlx_recipe import parse_recipe
from gemma4_flex.checkpoints.mlx_write import write_mlx
from gemma4_flex.lora.adapters import random_adapter, save_adapter
from gemma4_flex.models.packed_modules import describe_packed
from scripts.benchmarks import gemma4_flex_inference as script
from tests.engines import greedy, hf_generate
from tests.tiny import FULL, SLIDING, tiny_model

# widths that every format's blocks and groups fill
SHAPE = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2, "hidden_size": 64,
         "intermediate_size": 64, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 64}
PROMPT = [2, 5, 9, 13, 40]
HERE = [device for device in DEVICES if device == "cpu" or torch.cuda.is_available()]
CELLS = list(setups())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """The same weights in each format, and an adapter for them."""
    folder = tmp_path_factory.mktemp("formats")
    paths = {"safetensors": folder / "hf", "bitsandbytes": folder / "nf4", "gguf": folder / "model.gguf", "mlx": folder / "mlx",
             "adapter": folder / "adapter"}
    tiny_model(5, torch.bfloat16, **SHAPE).save_pretrained(paths["safetensors"])
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
                                llm_int8_skip_modules=["lm_head"])
    AutoModelForCausalLM.from_pretrained(paths["safetensors"], quantization_config=config, dtype=torch.bfloat16,
                                         device_map="cpu").save_pretrained(paths["bitsandbytes"])
    loaded = load_text_model(str(paths["safetensors"]), dtype=torch.bfloat16, device="cpu")
    write_gguf(paths["gguf"], loaded, type_name="Q4_0")
    write_mlx(paths["mlx"], loaded, parse_recipe("four", {"bits": 4, "group_size": 32}))
    save_adapter(random_adapter(loaded.model, "all-linear", rank=2, alpha=4, strength=0.2, seed=0), paths["adapter"], base="tiny")
    return {name: str(path) for name, path in paths.items()}


def argv(cell: Setup, files: dict[str, str]) -> list[str]:
    """What a user types for a cell."""
    flags = ["--model_name_4bit" if cell.format == "bitsandbytes" else "--model_name", files[cell.format], "--device", cell.device,
             "--no-compile", "--attention", "sdpa", "--max_batch_size", "1", "--max_seq_length", "64", "--page_size", "16"]
    if not cell.is_nf4:
        flags += ["--dtype", "float32"]
    flags += {"stored": [], "decoded": ["--gguf_weights", "dequantize"], "nf4": ["--load_in_4bit"]}[cell.weights]
    flags += ["--capture_cudagraph"] * cell.captured
    flags += {"none": [], "merged": [], "unmerged": ["--no_merge_lora"], "requantized": ["--lora_4bit", "requantize"]}[cell.lora]
    return flags + ["--lora_adapter", files["adapter"]] * (cell.lora != "none")


def name_of(cell: Setup) -> str:
    return f"{cell.format}, {cell.weights}, {cell.device}, {'captured' if cell.captured else 'eager'}, {cell.lora}"


@pytest.mark.parametrize("cell", [c for c in CELLS if c.device in HERE and c.refusal() is None], ids=name_of)
def test_what_the_table_allows_runs(cell, files):
    args = parser(script.COMMAND).parse_args(argv(cell, files))
    config = engine_config(args)
    assert inference.setup_of(args, config, files[cell.format]) == cell
    engine, lora, four_bit = inference.load(args, config, files[cell.format])
    [done] = engine.generate([PROMPT], greedy(6))
    assert (four_bit is not None) == cell.is_nf4
    packed = describe_packed(engine.model, engine.geometry)
    assert (packed is not None) == (cell.format in ("gguf", "mlx") and cell.weights == "stored")
    assert lora is None if cell.lora == "none" else lora.merge == (cell.lora != "unmerged")
    if not cell.is_nf4:     # in bf16 near-ties may turn
        assert done.token_ids == hf_generate(engine.model, PROMPT, 6)
    assert len(done.token_ids) == 6 and (engine.stats.steps_eager == 0) == (cell.captured and not engine.notices)


@pytest.mark.parametrize("cell", [c for c in CELLS if c.device in HERE and c.refusal() is not None], ids=name_of)
def test_what_the_table_refuses_is_refused_before_anything_is_loaded(cell, files, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("gemma4_flex.checkpoints.load_text_model", lambda *args, **kwargs: pytest.fail("it was loaded"))
    with pytest.raises(CapabilityError, match=re.escape(cell.refusal())):
        capabilities.check(cell)
    flags = argv(cell, files)
    # a merge over NF4 is what nobody can ask of the script: there an adapter runs unmerged unless it is requantised
    if cell.is_nf4 and cell.lora == "merged":
        return
    assert script.main([*flags, "--stats_path", str(tmp_path / "r.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_here_is_refused_by_name_whatever_the_cell(files, capsys, tmp_path):
    cell = Setup("gguf", "stored", "cuda", True, "merged")
    assert script.main([*argv(cell, files), "--stats_path", str(tmp_path / "r.json")]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_the_table_has_every_cell_and_the_readme_shows_it():
    assert len(CELLS) == len(set(CELLS)) == len(FORMATS) * len(WEIGHTS) * len(DEVICES) * 2 * len(LORAS)
    assert capabilities.table() in Path("README.md").read_text(encoding="utf-8")


def test_formats_are_known_by_their_files(files):
    assert {name: format_of(path) for name, path in files.items() if name in FORMATS} == {name: name for name in FORMATS}
    assert format_of("tiny") == format_of("synthetic:E2B") == format_of("unsloth/gemma-4-E2B-it") == "safetensors"
