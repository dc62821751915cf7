"""The walk of Qwen3 and Llama over paged K/V is the Hugging Face model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemma4_flex.attention import PagedBackend
from gemma4_flex.models import dense
from gemma4_flex.params import SamplingParams
from tests.dense import ARCHITECTURES, ROPES, dense_model
from tests.engines import (
    assert_all_free,
    assert_greedy_as_hf,
    hf_generate,
    hf_logits,
    make_engine,
    some_prompts,
    tokens_of,
)

TOLERANCE = 1e-4        # DESIGN.md, Numbers
PROMPT = some_prompts(21)[0]
FORCED = some_prompts(9, seed=5)[0]     # fed whatever the model would draw: every step's logits count
PROMPTS = some_prompts(3, 17, 40, 1, 9, 26, seed=2)

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {architecture: dense_model(architecture, 1) for architecture in ARCHITECTURES}


def worst(engine, model, prompt=PROMPT, forced=FORCED) -> float:
    """Largest difference of a logit between cached steps and Hugging Face's re-prefill of all tokens."""
    traced = engine.trace(prompt, forced).logits
    return (traced - hf_logits(model, prompt + forced)[len(prompt) - 1:]).abs().max().item()


# ---- equal to Hugging Face ----------------------------------------------------------------------------------------

@each_architecture
def test_every_layer_of_prefill_and_of_each_cached_step_is_hugging_faces(models, architecture):
    model, kept, hooks = models[architecture], [], []
    for module in (model.model.embed_tokens, *model.model.layers):
        hooks.append(module.register_forward_hook(
            lambda m, args, out: kept.append((out[0] if isinstance(out, tuple) else out).reshape(-1, 48).clone())))
    hf_logits(model, PROMPT + FORCED)
    for hook in hooks:
        hook.remove()
    ours, theirs = make_engine(model).trace(PROMPT, FORCED).hidden, torch.stack(kept)[:, len(PROMPT) - 1:]
    assert ours.shape == theirs.shape == (4, len(FORCED) + 1, 48)
    assert torch.equal(ours[0], theirs[0])
    for layer, (a, b) in enumerate(zip(ours, theirs)):
        assert torch.allclose(a, b, atol=TOLERANCE), f"after layer {layer - 1}: {(a - b).abs().max()}"


@each_architecture
@pytest.mark.parametrize("length", [1, 2, 4, 5, 40])
def test_cached_steps_give_the_logits_of_a_re_prefill(models, architecture, length):
    assert worst(make_engine(models[architecture]), models[architecture], some_prompts(length, seed=length)[0]) < TOLERANCE


@each_architecture
@pytest.mark.parametrize("fields", [
    {"tie_word_embeddings": False}, {"tie_word_embeddings": True}, {"num_key_value_heads": 6}, {"num_key_value_heads": 1},
    {"head_dim": 8}, {"head_dim": 32}, {"rms_norm_eps": 1e-2}], ids=str)
def test_other_shapes_are_hugging_faces_too(architecture, fields):
    model = dense_model(architecture, 3, **fields)
    assert worst(make_engine(model), model) < TOLERANCE


@each_architecture
@pytest.mark.parametrize("regime", ROPES)
def test_every_rotary_regime_is_hugging_faces_and_none_is_the_default(architecture, regime):
    model = dense_model(architecture, 1, rope_parameters=ROPES[regime])
    engine, prompt = make_engine(model), some_prompts(90)[0]
    assert worst(engine, model, prompt) < TOLERANCE
    if regime != "default":
        plain = dense_model(architecture, 1)
        assert (hf_logits(plain, prompt) - hf_logits(model, prompt)).abs().max() > 100 * TOLERANCE


@each_architecture
def test_a_rotary_table_that_was_cast_with_the_weights_is_not_believed(models, architecture):
    cast = dense_model(architecture, 1)
    cast.model.rotary_emb.inv_freq = cast.model.rotary_emb.inv_freq.bfloat16()
    assert worst(make_engine(cast), models[architecture], some_prompts(90)[0]) < TOLERANCE


@each_architecture
@pytest.mark.parametrize("overrides", [{}, {"capture_cudagraph": True}, {"max_prefill_tokens": 5}, {"mixed_prefill": True},
                                       {"shared_kv": "sidecar"}, {"n_pages": 18}], ids=str)
def test_greedy_tokens_are_those_of_generate_however_the_engine_runs(models, architecture, overrides):
    """18 pages hold two of the longest sequences: some are preempted."""
    model = models[architecture]
    engine = make_engine(model, **overrides)
    outputs = tokens_of(engine, PROMPTS, 12)
    assert outputs == [hf_generate(model, prompt, 12) for prompt in PROMPTS]
    assert_all_free(engine)
    assert engine.stats.num_preemptions > 0 or "n_pages" not in overrides


@each_architecture
def test_flex_attention_over_pages_gives_them_too(models, architecture):
    for prompt, output in zip(PROMPTS, tokens_of(make_engine(models[architecture], attention="flex"), PROMPTS, 12)):
        assert_greedy_as_hf(models[architecture], prompt, output)


@each_architecture
def test_bf16_errs_no_more_than_hugging_face_does(architecture):
    """Against the same weights in wide arithmetic; the mean over many tokens, since a single one is luck."""
    narrow = dense_model(architecture, 1, torch.bfloat16)
    wide = dense_model(architecture, 1, torch.bfloat16).double()
    engine, ours, theirs = make_engine(narrow), 0.0, 0.0
    for seed in range(6):
        prompt, forced = some_prompts(30, 10, seed=seed)
        exact = hf_logits(wide, prompt + forced)[len(prompt) - 1:]
        ours += (engine.trace(prompt, forced).logits.double() - exact).abs().mean().item()
        theirs += (hf_logits(narrow, prompt + forced)[len(prompt) - 1:].double() - exact).abs().mean().item()
    assert theirs > 0 and ours / theirs <= 1.1, (ours, theirs)


@each_architecture
def test_samples_of_a_prompt_share_its_pages_and_their_log_probabilities_are_hugging_faces(models, architecture):
    model, [prompt] = models[architecture], some_prompts(22)
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_new_tokens=6, ignore_eos=True, logprobs=0)
    found = [make_engine(model, max_prefill_tokens=32, **overrides).generate([prompt], params)
             for overrides in ({}, {"prefix_cache": True}, {"deterministic": True})]
    tokens = [[done.token_ids for done in samples] for samples in found]
    assert tokens[0] == tokens[1] == tokens[2] and len(set(map(tuple, tokens[0]))) > 1
    for samples in found:
        for done in samples:
            theirs = hf_logits(model, prompt + done.token_ids[:-1])[len(prompt) - 1:].log_softmax(-1)
            theirs = theirs.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(done.logprobs.raw), theirs, atol=TOLERANCE)


@each_architecture
def test_a_prompt_whose_numbers_break_ends_with_its_first_chunk_and_its_neighbour_goes_on(architecture):
    model = dense_model(architecture, 1, tie_word_embeddings=False)
    whole = hf_generate(model, PROMPTS[0], 5)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.inf
    engine = make_engine(model, max_prefill_tokens=8)
    broken = engine.submit([2, 60, *([7] * 18)], SamplingParams(max_new_tokens=5))
    assert [(e.request_id, e.finish_reason) for e in engine.step()] == [(broken, "non_finite")]
    assert engine.completion(broken).token_ids == []
    assert 60 not in PROMPTS[0] + whole and tokens_of(engine, [PROMPTS[0]], 5) == [whole]
    assert_all_free(engine)


# ---- the tests above can fail -------------------------------------------------------------------------------------

@each_architecture
@pytest.mark.parametrize("fault", ["scale", "positions counted within a step", "rotary scaling", "norms of queries and keys",
                                   "halves exchanged"])
def test_a_planted_fault_is_seen_in_the_logits(models, architecture, fault, monkeypatch):
    model = models[architecture]
    if fault == "scale":
        honest = PagedBackend.attend
        monkeypatch.setattr(PagedBackend, "attend", lambda *args: honest(*args[:-1], 1.0))
    if fault == "positions counted within a step":
        tables = dense.cos_sin
        monkeypatch.setattr(dense, "cos_sin", lambda positions, *rest: tables(positions % 7, *rest))
    if fault == "halves exchanged":
        gate = dense.gated
        monkeypatch.setattr(dense, "gated", lambda x, w, form, act: gate(x, w[::-1], form, act))
    engine = make_engine(dense_model(architecture, 1, rope_parameters=ROPES["yarn"]) if fault == "rotary scaling" else model)
    if fault == "rotary scaling":
        model = engine.model
        engine.runner.walk.rotary_scaling = 1.0
    if fault == "norms of queries and keys":
        if architecture == "llama":
            pytest.skip("Llama has none")
        engine.runner.walk.layers = [w._replace(q_norm=torch.ones_like(w.q_norm)) for w in engine.runner.walk.layers]
    assert worst(engine, model) > 100 * TOLERANCE


def test_rounding_follows_hugging_face_and_a_norm_that_rounds_once_is_another_number():
    x, weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.linspace(0.3, 2, 48).bfloat16()
    module = dense_model("llama", 0, torch.bfloat16).model.norm
    module.weight.data = weight
    assert torch.equal(dense.rms_norm(x, weight, 1e-6), module(x))
    once = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()).bfloat16()
    assert not torch.equal(once, module(x))


# ---- compiled -----------------------------------------------------------------------------------------------------

@each_architecture
def test_compiled_and_captured_steps_give_generates_tokens_and_logits(architecture):
    model = dense_model(architecture, 1, num_hidden_layers=2)
    engine = make_engine(model, compile=True, capture_cudagraph=True, max_batch_size=2, max_seq_length=64, n_pages=33)
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 50]
    assert tokens_of(engine, prompts, 12) == [hf_generate(model, prompt, 12) for prompt in prompts]
    assert engine.runner.regions.plan is not None and not engine.notices
    assert (engine.stats.steps_eager, engine.stats.steps_replayed > 0, engine.stats.compile_s > 0) == (0, True, True)
    with torch.no_grad():
        model_logits = hf_logits(model, prompts[1] + FORCED)[len(prompts[1]) - 1:]
        assert (engine.trace(prompts[1], FORCED).logits - model_logits).abs().max() < TOLERANCE
