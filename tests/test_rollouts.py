"""Sampled groups, log-probabilities and the prefix cache through the whole engine, with Hugging Face's logits as the oracle."""

from __future__ import annotations

import random

import pytest
import torch

from gemma4_flex.params import InvalidParameterError, SamplingParams
from gemma4_flex.prompt_state import PromptStateError
from gemma4_flex.sampling import gumbel
from gemma4_flex.text import PromptError
from tests.engines import assert_all_free, assert_greedy_as_hf, hf_logits, make_engine, some_prompts, tokens_of
from tests.test_sampling import hf_distribution
from tests.tiny import VOCAB, tiny_model

PROMPTS = some_prompts(9, 21, 5, 13)
ASKED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.1,
         "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "banned_token_ids": (6, 7)}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def sampled(tokens: int = 12, **fields) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True, **({"temperature": 1.0, "seed": 5} | fields))


def assert_sampled_as_hf(model, done, asked: dict, seed: int) -> None:
    """Every token is the one that Hugging Face's logits, transformers' processors and the seed's noise give, and its
    log-probabilities are of those."""
    logits = hf_logits(model, done.prompt_ids + done.token_ids)[len(done.prompt_ids) - 1:]
    raw = logits.log_softmax(-1)
    for step, token in enumerate(done.token_ids):
        position = len(done.prompt_ids) + step
        scores = hf_distribution(logits[step], tuple(done.prompt_ids), tuple(done.token_ids[:step]), **asked)
        noise = gumbel(*(torch.tensor([v]) for v in (seed & 0xFFFFFFFF, seed >> 32, done.sample, position)), VOCAB)[0]
        best = (scores + noise).topk(2)
        assert best.indices[0] == token or best.values[0] - best.values[1] < 1e-4, f"step {step}"
        if done.logprobs:
            assert done.logprobs.raw[step] == pytest.approx(raw[step, token].item(), abs=1e-4)
            assert done.logprobs.processed[step] == pytest.approx(scores[token].item(), abs=1e-4)


# ---- a seed decides -------------------------------------------------------------------------------------------------

def test_sampled_tokens_are_those_of_hugging_faces_logits_and_the_seeds_noise(model):
    engine = make_engine(model)
    for done in engine.generate(PROMPTS, sampled(**ASKED, n=3, logprobs=2)):
        assert_sampled_as_hf(model, done, ASKED, seed=5)
    assert_all_free(engine)


@pytest.mark.parametrize("asked", [{}, ASKED], ids=["plain", "everything"])
def test_the_same_tokens_alone_beside_others_captured_preempted_and_on_any_k(model, asked):
    params = sampled(**asked, seed=123456789012)
    engine = make_engine(model, decode_steps_per_sync=1)
    wanted = [engine.generate([p], params)[0].token_ids for p in PROMPTS]
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    for how in ({"decode_steps_per_sync": 3}, {"capture_cudagraph": True}, {"mixed_prefill": True}, {"n_pages": 13},
                {"max_prefill_tokens": 3, "decode_steps_per_sync": 5}, {"prefix_cache": True}, {"deterministic": True}):
        engine = make_engine(model, **how)
        others = some_prompts(7, 11, seed=9)
        mixed = [sampled(temperature=0.0), sampled(seed=77, top_k=3)]
        found = engine.generate([*others, *PROMPTS], [*mixed, *[params] * len(PROMPTS)])
        assert [done.token_ids for done in found[2:]] == wanted, how
        if "n_pages" in how:
            assert engine.stats.num_preemptions
        if "capture_cudagraph" in how:
            assert engine.stats.steps_replayed and not engine.stats.steps_eager
        assert_all_free(engine)


def test_samples_differ_and_repeat_as_a_set_and_the_first_is_the_one_alone(model):
    engine = make_engine(model)
    first = [done.token_ids for done in engine.generate(PROMPTS[:1], sampled(n=6))]
    again = [done.token_ids for done in engine.generate(PROMPTS[:1], sampled(n=6))]
    alone = engine.generate(PROMPTS[:1], sampled())[0].token_ids
    assert first == again and len({tuple(ids) for ids in first}) == 6 and first[0] == alone
    assert [d.sample for d in engine.generate(PROMPTS[:2], sampled(2, n=3))] == [0, 1, 2, 0, 1, 2]


def test_without_a_seed_requests_differ_and_engines_of_one_seed_agree(model):
    params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    one, other, third = (make_engine(model, seed=seed).generate(PROMPTS[:1] * 3, params) for seed in (4, 4, 5))
    assert [d.token_ids for d in one] == [d.token_ids for d in other] != [d.token_ids for d in third]
    assert len({tuple(d.token_ids) for d in one}) == 3


def test_what_params_leave_open_the_checkpoints_generation_config_says(model):
    engine = make_engine(model)
    before = engine.generation
    assert tokens_of(engine, PROMPTS[:1], 6) == [engine.generate(PROMPTS[:1], sampled(6, temperature=0.0))[0].token_ids]
    engine.generation = {"do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": None}
    open_params = SamplingParams(max_new_tokens=12, ignore_eos=True, seed=5, logprobs=0)
    done = engine.generate(PROMPTS[:1], open_params)[0]
    assert_sampled_as_hf(model, done, {"temperature": 0.9, "top_k": 20, "top_p": 0.95}, seed=5)
    assert_greedy_as_hf(model, PROMPTS[0], engine.generate(PROMPTS[:1], sampled(12, temperature=0.0))[0].token_ids)
    engine.generation = before


# ---- groups ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", [{}, {"shared_kv": "sidecar"}, {"prefix_cache": True}, {"mixed_prefill": True},
                                 {"n_pages": 14}, {"deterministic": True}, {"capture_cudagraph": True}], ids=str)
def test_samples_of_one_prompt_share_its_pages_and_are_as_if_alone(model, how):
    engine = make_engine(model, decode_steps_per_sync=3, **how)
    for done in engine.generate(PROMPTS, sampled(10, n=6, logprobs=0)):
        assert_sampled_as_hf(model, done, {}, seed=5)
    stats = engine.stats
    computed = stats.prefill_tokens + stats.decode_tokens + stats.mixed_tokens
    if "n_pages" not in how:      # preempted ones compute again
        assert stats.group_hit_tokens == sum(5 * (len(p) - 1) for p in PROMPTS)
        assert stats.prefill_tokens == sum(map(len, PROMPTS))
        assert computed == sum(len(p) + 5 + 6 * 9 for p in PROMPTS)
    assert stats.shared_bytes > 0
    assert_all_free(engine)


def test_pages_shared_by_samples_are_not_written_by_any_of_them(model):      # a planted write to a shared page is seen
    engine = make_engine(model, decode_steps_per_sync=1)
    ids = engine.submit_group(PROMPTS[1], sampled(30, n=4))
    seen = {}
    while engine.has_work:
        engine.step()
        table, group = engine.runner.tables["full_attention"], engine.runner.cache.groups["full_attention"]
        held = [page for slot in range(1, 5) for _, page in table.held(slot)]
        for page in {page for page in held if held.count(page) > 1}:
            rows = slice(page * group.page_size, (page + 1) * group.page_size)
            now = [pool[:, :, rows].clone() for pool in (*group.keys.values(), *group.values.values())]
            assert all(torch.equal(a, b) for a, b in zip(seen.setdefault(page, now), now))
    assert len(seen) == 20 // 4
    assert all(engine.completion(i).finish_reason == "length" for i in ids)


# ---- prefix cache ---------------------------------------------------------------------------------------------------

def test_a_warm_prompt_is_as_a_cold_one_and_its_hits_are_tokens_not_computed(model):      # B129
    engine, cold = make_engine(model, prefix_cache=True), make_engine(model)
    base = some_prompts(40)[0]
    prompts = [base, base + [9, 8, 7], base[:22] + [9] * 10, base[:3]]
    for prompt in (*prompts, *prompts):
        engine.reset_stats()
        found = engine.generate([prompt], sampled(8, logprobs=0))[0]
        wanted = cold.generate([prompt], sampled(8, logprobs=0))[0]
        assert found.token_ids == wanted.token_ids
        assert found.logprobs.raw == pytest.approx(wanted.logprobs.raw, abs=1e-4)
        stats = engine.stats
        # one that has only its last token left to compute is a decode step more
        assert stats.prefix_hit_tokens + stats.prefill_tokens + stats.decode_tokens == len(prompt) + 7
    assert stats.prefix_hit_tokens == 0      # too short for a page
    engine.generate([base], sampled(1))
    assert engine.stats.prefix_hit_tokens >= 36
    assert_all_free(engine)


def test_churn_leaves_nothing_stale(model):      # B33, B35
    engine = make_engine(model, prefix_cache=True, n_pages=25)
    rng = random.Random(0)
    first = some_prompts(20, seed=1)[0]
    for n in range(20):
        prompt = first[: rng.randrange(4, 20)] + some_prompts(rng.randrange(2, 20), seed=50 + n)[0][1:]
        assert_greedy_as_hf(model, prompt, tokens_of(engine, [prompt], 6)[0])
        assert_greedy_as_hf(model, first, tokens_of(engine, [first], 6)[0])
    assert engine.stats.prefix_hit_tokens
    assert_all_free(engine)


def test_keys_and_values_of_other_weights_are_never_taken_over(model):      # B38
    changing = tiny_model(seed=0)
    engine = make_engine(changing, prefix_cache=True)
    prompt = some_prompts(30)[0]
    weight = changing.model.layers[1].mlp.down_proj.weight
    before = weight.clone()
    for factor in (1.0, 1.7, 1.0):
        with engine.update_weights(), torch.no_grad():
            weight.copy_(before * factor)
        for hits in (0, 28):
            engine.reset_stats()
            assert_greedy_as_hf(changing, prompt, tokens_of(engine, [prompt], 8)[0])
            assert engine.stats.prefix_hit_tokens == hits


def test_weights_written_outside_an_update_are_seen_too_and_a_saved_prompt_is_of_those_that_made_it(tmp_path):
    changing, prompt = tiny_model(seed=0), some_prompts(30)[0]
    engine = make_engine(changing, prefix_cache=True)
    tokens_of(engine, [prompt], 2)
    engine.save_prompt(PROMPTS[1], tmp_path / "before")
    with torch.no_grad():
        changing.model.layers[0].mlp.down_proj.weight.neg_()
    assert_greedy_as_hf(changing, prompt, tokens_of(engine, [prompt], 8)[0])
    engine.save_prompt(prompt, tmp_path / "after")
    make_engine(changing, prefix_cache=True).load_prompt(tmp_path / "after")
    for file, model in (("after", tiny_model(seed=0)), ("before", changing)):
        with pytest.raises(PromptStateError, match="other weights"):
            make_engine(model, prefix_cache=True).load_prompt(tmp_path / file)


def test_a_request_whose_numbers_break_leaves_its_neighbours_pages_alone(model):
    engine = make_engine(model, prefix_cache=True)
    tokens_of(engine, [PROMPTS[1]], 4)
    ids = engine.submit_group(PROMPTS[1], sampled(20, n=3, temperature=0.0))
    engine.step()
    engine.runner.scrub(engine._requests[ids[0]].sequence)
    engine.abort(ids[0])
    while engine.has_work:
        engine.step()
    for i in ids[1:]:
        assert_greedy_as_hf(model, PROMPTS[1], engine.completion(i).token_ids)


# ---- log-probabilities ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", [{}, {"deterministic": True}, {"capture_cudagraph": True, "decode_steps_per_sync": 3},
                                 {"mixed_prefill": True, "n_pages": 15}], ids=str)
def test_there_are_as_many_logprobs_as_tokens_whatever_ended_the_request(model, how):
    engine = make_engine(model, **how)
    greedy = engine.generate(PROMPTS[:1], sampled(20, temperature=0.0))[0]
    cut = greedy.text[7:9]
    endings = [{"stop": (cut,), "temperature": 0.0}, {"stop_token_ids": (greedy.token_ids[5],), "temperature": 0.0}, {}, {}]
    params = [sampled(20, logprobs=3, **fields) for fields in endings]
    ids = [engine.submit(PROMPTS[0], p) for p in params]
    for _ in range(2):
        engine.step()
    engine.abort(ids[3])
    while engine.has_work:
        engine.step()
    found = [engine.completion(i) for i in ids]
    assert [d.finish_reason for d in found] == ["stop", "stop", "length", "abort"]
    for done, fields in zip(found, endings):
        known = done.logprobs
        assert len(known.raw) == len(known.processed) == len(known.top) == len(done.token_ids)
        raw = hf_logits(model, done.prompt_ids + done.token_ids)[len(done.prompt_ids) - 1:].log_softmax(-1)
        for step, token in enumerate(done.token_ids):
            assert known.raw[step] == pytest.approx(raw[step, token].item(), abs=1e-4)
            assert known.processed[step] == (0 if fields.get("temperature") == 0 else pytest.approx(known.raw[step], abs=1e-5))
            best = raw[step].topk(3)
            assert [i for i, _ in known.top[step]] == best.indices.tolist()
            assert [v for _, v in known.top[step]] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert engine.generate(PROMPTS[:1], sampled(2))[0].logprobs is None
    assert_all_free(engine)


@pytest.mark.parametrize("how", [{}, {"max_prefill_tokens": 7}, {"prefix_cache": True}, {"deterministic": True},
                                 {"n_pages": 18, "max_prefill_tokens": 5}], ids=str)
def test_prompt_logprobs_are_the_models_cold_and_warm(model, how):      # B37
    engine = make_engine(model, **how)
    prompts = [*PROMPTS, *some_prompts(60, seed=3)]
    for _ in range(2):
        done = engine.generate(prompts, sampled(4, temperature=0.0, prompt_logprobs=2, n=2))
        for one in done:
            assert_greedy_as_hf(model, one.prompt_ids, one.token_ids)
            known, raw = one.prompt_logprobs, hf_logits(model, one.prompt_ids).log_softmax(-1)
            assert known.raw[0] is None and known.top[0] == () and len(known.raw) == len(known.top) == len(one.prompt_ids)
            wanted = [raw[i, token].item() for i, token in enumerate(one.prompt_ids[1:])]
            assert known.raw[1:] == pytest.approx(wanted, abs=1e-4)
            for top, row in zip(known.top[1:], raw):
                assert [v for _, v in top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)
    assert_all_free(engine)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_prompt_logprobs_are_whole_though_the_sample_that_computed_them_is_aborted(model, warm, steps):
    engine = make_engine(model, prefix_cache=True, max_prefill_tokens=8)
    if warm:
        tokens_of(engine, [PROMPTS[1]], 2)
    ids = engine.submit_group(PROMPTS[1], sampled(4, n=3, prompt_logprobs=2))
    for _ in range(steps):
        engine.step()
    engine.abort(ids[0])
    while engine.has_work:
        engine.step()
    raw = hf_logits(model, PROMPTS[1]).log_softmax(-1)
    wanted = [raw[i, token].item() for i, token in enumerate(PROMPTS[1][1:])]
    for i in ids[1:]:
        assert engine.completion(i).prompt_logprobs.raw[1:] == pytest.approx(wanted, abs=1e-4)


# ---- deterministic --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])      # on a CPU only fp32 differs where the mode is off
def test_tokens_and_logprobs_are_bitwise_the_same_alone_and_in_any_batch(dtype):
    engine = make_engine(tiny_model(dtype=dtype), deterministic=True, prefix_cache=True)
    params = sampled(10, logprobs=4, prompt_logprobs=2)
    alone = [engine.generate([p], params)[0] for p in PROMPTS]
    for order in ([3, 1, 0, 2], [1, 1, 2, 0, 3, 3]):
        together = engine.generate([PROMPTS[i] for i in order], params)
        for i, done in zip(order, together):
            assert done.token_ids == alone[i].token_ids
            assert done.logprobs == alone[i].logprobs and done.prompt_logprobs == alone[i].prompt_logprobs


def test_a_trace_takes_the_same_steps(model):
    prompt, forced = PROMPTS[1], PROMPTS[2]
    found = make_engine(model, deterministic=True).trace(prompt, forced)
    usual = make_engine(model).trace(prompt, forced)
    wanted = hf_logits(model, prompt + forced)[len(prompt) - 1:]
    torch.testing.assert_close(found.logits, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.hidden, usual.hidden, atol=1e-4, rtol=0)


def test_what_a_slot_held_before_breaks_no_request_that_is_still_being_prefilled(model):
    engine = make_engine(model, deterministic=True, max_batch_size=2)
    for _ in range(2):
        engine.generate([[2, 5], [2, 6]], SamplingParams(temperature=0.0, max_new_tokens=1, allowed_token_ids=(1,)))
    params = [
        sampled(4, temperature=0.0, presence_penalty=0.1), SamplingParams(temperature=0.0, max_new_tokens=6, min_new_tokens=3)]
    found = engine.generate([[2, 5, 6, 7, 8], some_prompts(40, seed=4)[0]], params)
    assert "non_finite" not in [done.finish_reason for done in found]


# ---- bad input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, says", [
    ({"logprobs": VOCAB + 1}, "more than the vocabulary of 64 ids"), ({"prompt_logprobs": 65}, "prompt_logprobs=65"),
    ({"allowed_token_ids": (64,)}, "allowed_token_ids has 64"), ({"banned_token_ids": (3, 99)}, "banned_token_ids has 99"),
    ({"logit_bias": {64: 1.0}}, "logit_bias has 64"), ({"banned_token_ids": tuple(range(64))}, "ban fewer"),
    ({"allowed_token_ids": (4,), "stop_token_ids": (4,), "min_new_tokens": 2}, "min_new_tokens holds back"),
])
def test_what_the_vocabulary_cannot_give_is_refused_in_one_sentence(model, fields, says):
    engine = make_engine(model)
    with pytest.raises(PromptError) as error:
        engine.submit_group([2, 5], sampled(**fields))
    assert says in str(error.value) and not engine.has_work


def test_the_largest_values_that_are_taken_run(model):
    engine = make_engine(model)
    params = [sampled(3, **fields) for fields in (
        {"top_k": 1 << 70}, {"presence_penalty": 1e30, "frequency_penalty": -1e30}, {"logit_bias": {5: 1e30, 6: -1e30}},
        {"repetition_penalty": 1e-6}, {"temperature": 1e30}, {"seed": (1 << 63) - 1})]
    params.append(SamplingParams(max_new_tokens=1 << 70, min_new_tokens=1 << 69, temperature=0.0))
    for done in engine.generate([PROMPTS[2]] * len(params), params):
        assert done.finish_reason == "length"


def test_submit_takes_one_sample(model):
    with pytest.raises(PromptError, match="use submit_group"):
        make_engine(model).submit([2, 5], sampled(n=2))


@pytest.mark.parametrize("generation", [{"do_sample": True, "temperature": -1.0}, {"top_p": 7}])
def test_a_generation_config_that_cannot_be_used_is_named(model, generation):
    engine = make_engine(model)
    engine.generation = generation
    with pytest.raises(InvalidParameterError, match="the checkpoint's generation config: "):
        engine.submit([2, 5])


# ---- prompts in files -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", [{}, {"shared_kv": "sidecar"}, {"deterministic": True}], ids=str)
def test_a_saved_prompt_is_taken_up_by_another_engine_and_skips_what_it_holds(model, tmp_path, how):
    prompt = some_prompts(45)[0]
    ids = make_engine(model, prefix_cache=True, **how).save_prompt(prompt, tmp_path / "p.safetensors")
    assert ids == prompt
    engine = make_engine(tiny_model(), prefix_cache=True, **how)
    assert engine.load_prompt(tmp_path / "p.safetensors") == prompt
    assert engine.load_prompt(tmp_path / "p.safetensors") == prompt      # what is there already stays
    for continued, hits in ((prompt + [9, 8, 7], 44), (prompt, 44), (prompt[:44], 40), (prompt[:20], None)):
        engine.reset_stats()
        done = engine.generate([continued], sampled(10, temperature=0.0))[0]
        assert_greedy_as_hf(model, continued, done.token_ids)
        if hits is not None:
            assert engine.stats.prefix_hit_tokens == hits
    assert_all_free(engine)
    layers = {name for name in torch_names(tmp_path / "p.safetensors")}
    assert layers == {f"{what}.{i}" for what in ("keys", "values") for i in range(4)}, "owner layers only"


def torch_names(path) -> list[str]:
    from safetensors import safe_open
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def test_a_loaded_prompt_gives_way_and_is_computed_anew(model, tmp_path):
    prompt = some_prompts(30)[0]
    make_engine(model, prefix_cache=True).save_prompt(prompt, tmp_path / "p")
    engine = make_engine(model, prefix_cache=True, n_pages=20)
    engine.load_prompt(tmp_path / "p")
    for other in some_prompts(60, 55, 58, seed=4):
        assert_greedy_as_hf(model, other, tokens_of(engine, [other], 5)[0])
    assert_greedy_as_hf(model, prompt, tokens_of(engine, [prompt], 5)[0])
    assert_all_free(engine)


def test_a_state_that_does_not_fit_is_refused_in_one_sentence_and_changes_nothing(model, tmp_path):
    prompt, path = some_prompts(45)[0], tmp_path / "p"
    make_engine(model, prefix_cache=True).save_prompt(prompt, path)

    def refused(says: str, engine, at=path):
        free = {kind: list(table.free_pages) for kind, table in engine.runner.tables.items()}
        with pytest.raises(PromptStateError, match=says):
            engine.load_prompt(at)
        assert free == {kind: table.free_pages for kind, table in engine.runner.tables.items()}
    refused("other weights", make_engine(tiny_model(seed=1), prefix_cache=True))
    changed = make_engine(tiny_model(), prefix_cache=True)
    with changed.update_weights(), torch.no_grad():
        changed.model.model.layers[0].mlp.up_proj.weight[3, 3] += 1e-3
    refused("other weights", changed)
    refused("give page_size=4", make_engine(model, prefix_cache=True, page_size=8))
    refused("raise n_pages", make_engine(model, prefix_cache=True, n_pages=9))
    refused("prefix_cache=True", make_engine(model))
    refused("cannot read", make_engine(model, prefix_cache=True), tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    refused("cannot read", make_engine(model, prefix_cache=True), tmp_path / "text")
    with pytest.raises(PromptStateError, match="no whole page"):
        make_engine(model, prefix_cache=True).save_prompt([2, 5], path)
    for nowhere, says in ((tmp_path / "no" / "where", "cannot write"), (tmp_path, "cannot write"), ("", "names no file"),
                          (".", "names no file"), (None, "names no file")):
        with pytest.raises(PromptStateError, match=says):
            make_engine(model, prefix_cache=True).save_prompt(prompt, nowhere)
    assert not list(tmp_path.parent.glob("*.part"))


# ---- everything at once ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed, how", [(0, {}), (1, {"prefix_cache": True}), (2, {"prefix_cache": True, "shared_kv": "sidecar"})],
                         ids=str)
def test_any_course_of_groups_cancels_and_refreshes_on_few_pages_draws_as_hugging_face(model, seed, how):      # B43
    engine = make_engine(model, n_pages=17, max_seq_length=44, max_prefill_tokens=7, decode_steps_per_sync=3, **how)
    rng, asked, aborted = random.Random(seed), {}, set()
    prompts = some_prompts(*(rng.randrange(1, 22) for _ in range(8)), seed=seed)
    prompts += [prompt + [9, 8] for prompt in prompts[:4]]
    for _ in range(150):
        action = rng.random()
        unfinished = [i for i in asked if not engine._requests[i].sequence.is_finished]
        if action < 0.2 and len(unfinished) < 9:
            number = rng.randrange(1 << 40)
            fields = rng.choice([{"temperature": 0.0}, {"temperature": 1.3}, {"repetition_penalty": 1.3, "top_k": 9}])
            params = sampled(rng.choice([1, 4, 9, 14]), seed=number, n=rng.choice([1, 1, 2, 4]), logprobs=0, **fields)
            asked |= {i: (fields, number) for i in engine.submit_group(rng.choice(prompts), params)}
        elif action < 0.25 and unfinished:
            aborted.add(rng.choice(unfinished))
            engine.abort(max(aborted))
        elif action < 0.28:
            with engine.update_weights(rng.choice(["recompute", "drain"])):
                pass
        elif engine.has_work:
            engine.step()
        for table in engine.runner.tables.values():
            table.check()
    while engine.has_work:
        engine.step()
    assert engine.stats.num_preemptions and engine.stats.group_hit_tokens
    assert bool(engine.stats.prefix_hit_tokens) == ("prefix_cache" in how)
    done = {i: engine.completion(i) for i in asked}
    assert sum(d.finish_reason == "length" for d in done.values()) > 20
    for i, one in done.items():
        fields, number = asked[i]
        assert len(one.logprobs.raw) == len(one.token_ids)
        if fields.get("temperature") == 0:
            if one.token_ids:
                assert_greedy_as_hf(model, one.prompt_ids, one.token_ids)
        else:
            assert_sampled_as_hf(model, one, fields, number)
    assert_all_free(engine)


def test_prompts_packed_into_one_pass_do_not_see_each_other(model):      # B40
    engine = make_engine(model, max_prefill_tokens=64)
    first, other, last = some_prompts(13, 13, 17, seed=8)
    params = sampled(1, temperature=0.0, logprobs=VOCAB)
    beside = [engine.generate([prompt, last], params)[1].logprobs for prompt in (first, other)]
    assert engine.stats.prefill_tokens == 60 and engine.stats.steps_eager == 0, "one pass a pair, and nothing decoded"
    assert beside[0] == beside[1]
    raw = hf_logits(model, last)[-1].log_softmax(-1)
    assert dict(beside[0].top[0]) == pytest.approx({i: raw[i].item() for i in range(VOCAB)}, abs=1e-4)
