"""Adapters of Qwen3 and Llama: what PEFT trains is what the engine runs, refreshed in place, without drift."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from gemma4_flex import EngineConfig, FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import AdapterError, adapter_of, linears_of, load_adapter, random_adapter, save_adapter
from gemma4_flex.lora.double_copy import DoubleCopy, all_linear_bytes
from gemma4_flex.lora.drift import verify_no_drift
from gemma4_flex.lora.unmerged import unmerged_view
from tests.dense import ARCHITECTURES, dense_model
from tests.engines import SMALL, hf_generate, some_prompts, tokens_of
from tests.tiny import fake_tokenizer

PROMPTS = some_prompts(5, 21, 12)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def build(model, **overrides) -> FlexEngine:
    return FlexEngine(model, fake_tokenizer(), EngineConfig(**(SMALL | {"capture_cudagraph": True} | overrides)))


def adapter(model, seed=0, strength=0.3):
    return random_adapter(model, "all-linear", rank=3, alpha=6, strength=strength, seed=seed)


@each_architecture
def test_all_linear_is_seven_linears_a_layer_as_peft_has_them(architecture):
    model = dense_model(architecture)
    assert [path.rpartition(".")[2] for path in linears_of(model)] == list(NAMES) * 3
    trained = adapter_of(get_peft_model(model, LoraConfig(target_modules="all-linear", r=2)))
    assert set(trained.pairs) == set(linears_of(dense_model(architecture)))
    geometry = ModelGeometry.from_config(model.config)
    assert DoubleCopy(dense_model(architecture)).extra_bytes == all_linear_bytes(geometry, 4)


@each_architecture
def test_captured_steps_follow_every_refresh_and_give_pefts_tokens(architecture, tmp_path):
    model = dense_model(architecture, 2)
    double = DoubleCopy(model)
    engine = build(double.inference)
    double.attach(engine)
    base, seen = [hf_generate(model, prompt, 8) for prompt in PROMPTS], []
    assert tokens_of(engine, PROMPTS, 8) == base
    for seed in (1, 2):
        save_adapter(adapter(model, seed), tmp_path / str(seed), base="tiny")
        double.use(str(tmp_path / str(seed)))
        wrapped = PeftModel.from_pretrained(dense_model(architecture, 2), tmp_path / str(seed))
        seen.append([hf_generate(wrapped, prompt, 8) for prompt in PROMPTS])
        assert tokens_of(engine, PROMPTS, 8) == seen[-1]
        loaded = load_adapter(tmp_path / str(seed), engine.geometry)
        assert tokens_of(build(unmerged_view(model, loaded), capture_cudagraph=False), PROMPTS, 8) == seen[-1]
    assert base != seen[0] != seen[1]
    double.use(None)
    assert tokens_of(engine, PROMPTS, 8) == base
    assert engine.stats.steps_eager == 0


@each_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_drifts(architecture, dtype):
    model = dense_model(architecture, 2, dtype)
    double = DoubleCopy(model)
    engine = build(double.inference, max_batch_size=1)
    double.attach(engine)
    report = verify_no_drift(engine, double, adapter(model, strength=0.05), lambda m: build(m, max_batch_size=1), PROMPTS[:2],
                             iterations=3)
    assert report.passed, [t for t in (*report.tiers, *report.controls) if not t.passed]


@pytest.mark.parametrize(("tied", "why"), [(True, "one tied table"), (False, "only linears of the layers")])
def test_an_adapted_head_is_refused(tied, why, tmp_path):
    model = dense_model("llama", tie_word_embeddings=tied)
    save_adapter(adapter(model), tmp_path, base="tiny")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    wrapped = get_peft_model(model, LoraConfig(target_modules=["lm_head"], r=config["r"]))
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=why):
        load_adapter(tmp_path, ModelGeometry.from_config(model.config))
