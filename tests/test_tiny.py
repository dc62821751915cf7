"""The bundled model: really trained, whole, and answered by the engine exactly as by Hugging Face."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gemma4_flex import EngineConfig, FlexEngine, SamplingParams
from gemma4_flex.bench.workload import bundled_prompts, encode_prompts
from gemma4_flex.geometry import ModelGeometry

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "gemma4_flex" / "assets" / "tiny-gemma4"
NEW_TOKENS = 48


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [list(p.ids) for p in encode_prompts(bundled_prompts(), tokenizer)]


@pytest.fixture(scope="module")
def hf_tokens(model, prompts):
    """What `generate` says to each prompt alone, its stop token included."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        found.append(out[0, len(prompt):].tolist())
    return found


def test_the_checkpoint_fits_ten_megabytes_and_has_every_mechanism(model):
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 10_000_000
    geometry = ModelGeometry.from_config(json.loads((TINY / "config.json").read_text()))
    assert geometry.num_layers - geometry.first_shared > geometry.num_layers / 2
    assert [la.attention_type[0] for la in geometry.layers[:5]] == ["s", "s", "s", "s", "f"]
    assert {la.head_dim for la in geometry.layers} == {64, 128} and {la.window for la in geometry.layers} == {32, None}
    assert geometry.layers[-1].mlp_width == 2 * geometry.layers[0].mlp_width
    assert geometry.final_softcap == 30 and geometry.tied_head and geometry.ple_width == 64
    widths = {n for m in model.modules() if isinstance(m, torch.nn.Linear) for n in (m.in_features, m.out_features)}
    assert all(n % 64 == 0 for n in widths)
    scalars = [layer.layer_scalar.item() for layer in model.model.layers]
    assert 1 not in scalars and sum(abs(s - 1) > 0.05 for s in scalars) >= 10


def test_markers_are_single_ids_and_the_stop_set_has_three(tokenizer, model):
    for marker in ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|think|>", '<|"|>'):
        assert len(tokenizer(marker, add_special_tokens=False).input_ids) == 1
    stops = {tokenizer.convert_tokens_to_ids(t) for t in ("<eos>", "<turn|>", "<|tool_response>")}
    assert set(model.generation_config.eos_token_id) == stops == FlexEngine(model, tokenizer).stop_ids


@pytest.mark.parametrize("text", ["a\n\n\nb", " leading space", "é and e\u0301", "12 + 345", "日本 🙂", "tab\tend", "▁"])
def test_the_tokenizer_gives_back_what_it_was_given(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids).replace("▁", " ") == text.replace("▁", " ")


def test_a_chat_is_rendered_in_gemmas_turns_with_one_bos(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "<|channel>thought\nhm<channel|>Hello"}, {"role": "user", "content": "Bye"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\nHello<turn|>\n"
        "<|turn>user\nBye<turn|>\n<|turn>model\n")
    assert "<|think|>" in tokenizer.apply_chat_template(chat, tokenize=False, enable_thinking=True)


def test_as_it_is_used_by_default_the_compiled_captured_engine_says_what_hf_says(prompts, hf_tokens):
    """Compiled, eight steps between two looks of the host, weights laid side by side."""
    config = EngineConfig(device="cpu", capture_cudagraph=True, max_batch_size=8, max_seq_length=256, max_prefill_tokens=512)
    assert config.compile and config.decode_steps_per_sync == 8
    engine = FlexEngine.from_pretrained("tiny", config)
    done = engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS))
    assert engine.notices == [] and engine.runner.regions.plan is not None
    assert [c.token_ids for c in done] == hf_tokens
    assert engine.stats.steps_eager == 0 and engine.stats.steps_replayed > 0 and engine.stats.compile_s > 0


@pytest.mark.parametrize("changes", [
    {"capture_cudagraph": True, "attention": "flex"}, {"attention": "flex"}, {"capture_cudagraph": True, "shared_kv": "sidecar"},
    {"max_batch_size": 1, "decode_steps_per_sync": 3}, {"max_prefill_tokens": 31, "n_pages": 16},
    {"capture_cudagraph": True, "max_prefill_tokens": 31, "mixed_prefill": True}],
    ids=["captured flex", "eager flex", "captured sidecar", "alone", "chunks and a small pool", "mixed prefill"])
def test_greedy_tokens_equal_hf_generate_on_all_bundled_prompts(model, tokenizer, prompts, hf_tokens, changes):
    config = EngineConfig(**({"device": "cpu", "compile": False, "max_batch_size": 8, "max_seq_length": 256,
                              "max_prefill_tokens": 512} | changes))
    engine = FlexEngine(model, tokenizer, config)
    done = engine.generate(prompts, SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS))
    assert [c.token_ids for c in done] == hf_tokens
    captured = changes.get("capture_cudagraph", False)
    assert (engine.stats.steps_eager == 0) == captured and (engine.stats.steps_replayed > 0) == captured


def test_the_bundled_questions_are_answered_rightly(tokenizer, hf_tokens):
    texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in hf_tokens]
    right = sum(text == prompt.answer for text, prompt in zip(texts, bundled_prompts()))
    assert right >= 0.95 * len(texts)


def test_the_committed_score_on_held_out_questions_is_at_least_95_percent():
    score = json.loads((ROOT / "results" / "tiny_checkpoint.json").read_text())["held_out"]
    assert score["accuracy"] >= 0.95
    asked = sum(kind["asked"] for kind in score["by_kind"].values())
    assert score["accuracy"] == pytest.approx(sum(kind["right"] for kind in score["by_kind"].values()) / asked)


def test_thinking_and_a_tool_call_come_out_with_their_markers(model, tokenizer):
    engine = FlexEngine(model, tokenizer, EngineConfig(device="cpu", compile=False, max_seq_length=512))
    ask = [{"role": "user", "content": "What is 17 + 25?"}]
    text = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    thought = engine.generate([text])[0]
    assert thought.text.startswith("<|channel>thought\n") and "<channel|>17 + 25 = " in thought.text
    tool = {"type": "function", "function": {
        "name": "get_weather", "description": "Current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "City name"}},
                       "required": ["city"]}}}
    ask = [{"role": "user", "content": "What is the weather in Paris?"}]
    text = tokenizer.apply_chat_template(ask, tools=[tool], tokenize=False, add_generation_prompt=True)
    call = engine.generate([text])[0]
    assert call.text == '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>' and call.finish_reason == "stop"
