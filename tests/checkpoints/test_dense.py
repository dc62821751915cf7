"""Checkpoints of Qwen3 and Llama, as transformers writes them: tied or not, sharded or not, in any dtype."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gemma4_flex.checkpoints import CheckpointError, load_text_model
from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig
from tests.dense import ARCHITECTURES, ROPES, dense_model
from tests.engines import SMALL, hf_generate, some_prompts, tokens_of
from tests.tiny import fake_tokenizer

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@each_architecture
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", ["50GB", "20KB"])
def test_a_saved_model_generates_what_transformers_loads_of_it(architecture, tied, shards, tmp_path):
    model = dense_model(architecture, 4, tie_word_embeddings=tied, rope_parameters=ROPES["llama3"])
    model.generation_config.eos_token_id = [1, 9]
    model.save_pretrained(tmp_path, max_shard_size=shards)
    fake_tokenizer().save_pretrained(tmp_path)
    engine = FlexEngine.from_pretrained(str(tmp_path), EngineConfig(**SMALL))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert engine.stop_ids == {1, 9}
    prompts = some_prompts(5, 30, 12)
    assert tokens_of(engine, prompts, 10) == [hf_generate(theirs, prompt, 10) for prompt in prompts]


@each_architecture
def test_weights_are_cast_and_rotary_tables_are_not(architecture, tmp_path):
    model = dense_model(architecture, 4)
    model.save_pretrained(tmp_path)
    loaded = load_text_model(str(tmp_path), dtype=torch.bfloat16, device="cpu")
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), weight.bfloat16()), name
    assert torch.equal(loaded.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert loaded.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_wrong_architecture_is_refused_before_a_weight_is_read(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    for config, named in (({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
                          ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
                          ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=named):
            load_text_model(str(tmp_path), dtype=torch.float32, device="cpu")


@each_architecture
def test_missing_surplus_and_misshapen_tensors_are_named_and_old_rotary_tables_are_passed_over(architecture, tmp_path):
    dense_model(architecture, 4).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.k_proj.weight"
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file, metadata={"format": "pt"})
    assert load_text_model(str(tmp_path), dtype=torch.float32, device="cpu").skipped["rotary"] == 1
    for changed in ({k: v for k, v in tensors.items() if k != name}, tensors | {name: tensors[name][1:].contiguous()}):
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=name):
            load_text_model(str(tmp_path), dtype=torch.float32, device="cpu")
    save_file(tensors | {"model.layers.1.self_attn.k_proj.bias": torch.ones(32)}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="k_proj.bias"):
        load_text_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_a_synthetic_dense_model_is_finite_seeded_and_gives_many_answers():
    first, again = (load_text_model("synthetic:Qwen3-nano", dtype=torch.float32, device="cpu", seed=3) for _ in range(2))
    ids = torch.randint(3, 768, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = first.model(ids).logits
        assert torch.equal(logits, again.model(ids).logits)
        changed = ids.clone()
        changed[:, 7] = 5
        assert (first.model(changed).logits[:, -1] - logits[:, -1]).abs().max() > 1e-3
    assert logits.isfinite().all() and 1 < logits.std() < 8
    assert logits.argmax(-1).unique().numel() > 40
    for layer in first.model.model.layers:      # no branch norm here: it stands before the MLP
        assert 0.9 < layer.post_attention_layernorm.weight.mean() < 1.1
    assert first.geometry == published_geometry("Qwen3-nano") and first.tokenizer is not None
