"""What a caller gets: Hugging Face's greedy tokens, whoever else runs, and an engine that bad input leaves unharmed."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch

from gemma4_flex.draws import GREEDY
from gemma4_flex.engine import FlexEngine, model_stop_ids
from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams
from gemma4_flex.text import PromptError
from tests.engines import (
    SMALL,
    assert_all_free,
    assert_greedy_as_hf,
    greedy,
    hf_generate,
    make_engine,
    some_prompts,
    tokens_of,
)
from tests.tiny import FULL, SLIDING, fake_tokenizer, tiny_model

SEED = 1
PROMPTS = some_prompts(9, 1, 22, 4, 5, 13)
POISONED = 50       # an id whose per-layer row is made NaN in some tests


@pytest.fixture(scope="module")
def model():
    return tiny_model(SEED)


@pytest.fixture(scope="module")
def engine(model) -> FlexEngine:
    return make_engine(model)


@pytest.fixture(scope="module")
def captured(model) -> FlexEngine:
    return make_engine(model, capture_cudagraph=True)


@pytest.fixture(scope="module")
def solo(model):
    """A request's tokens in an engine that never runs another beside it."""
    engine = make_engine(model, max_batch_size=1, max_prefill_tokens=64)

    @functools.cache
    def run(prompt: tuple[int, ...], n: int) -> list[int]:
        return tokens_of(engine, [list(prompt)], n)[0]
    return lambda prompt, n: run(tuple(prompt), n)


def text_of(ids) -> str:
    return fake_tokenizer().decode(ids)


# ---- Hugging Face's tokens ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    {}, {"shared_kv": "sidecar"}, {"attention": "flex"}, {"attention": "flex", "shared_kv": "sidecar"}], ids=str)
def test_greedy_tokens_are_those_of_transformers_generate_batched_and_alone(model, settings):
    engine = make_engine(model, **settings)
    expected = [hf_generate(model, prompt, 12) for prompt in PROMPTS]
    assert tokens_of(engine, PROMPTS, 12) == expected
    assert [tokens_of(engine, [prompt], 12)[0] for prompt in PROMPTS[:2]] == expected[:2]


def test_captured_steps_give_the_same_tokens(model, captured):
    assert tokens_of(captured, PROMPTS, 12) == [hf_generate(model, prompt, 12) for prompt in PROMPTS]
    assert captured.stats.steps_eager == 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 64])
def test_tokens_do_not_depend_on_how_prompts_are_cut(model, engine, chunk):
    prompts = some_prompts(15, 30, 2, 8, seed=6)
    outputs = tokens_of(make_engine(model, max_prefill_tokens=chunk), prompts, 5)
    assert outputs == tokens_of(engine, prompts, 5)
    for prompt, output in zip(prompts, outputs):
        assert_greedy_as_hf(model, prompt, output)


def test_the_oracle_used_here_rejects_one_wrong_token(model):
    output = hf_generate(model, PROMPTS[0], 6)
    assert_greedy_as_hf(model, PROMPTS[0], output)
    with pytest.raises(AssertionError, match="step 3"):
        assert_greedy_as_hf(model, PROMPTS[0], [*output[:3], output[3] ^ 1, *output[4:]])


def test_a_bf16_model_runs_in_bf16_on_every_path():
    model = tiny_model(SEED, dtype=torch.bfloat16)
    for settings in ({}, {"shared_kv": "sidecar"}):
        engine = make_engine(model, **settings)
        assert engine.config.dtype == "bfloat16"
        assert {t.dtype for t in engine.runner.cache.tensors().values()} == {torch.bfloat16, torch.int32}
        assert len(tokens_of(engine, PROMPTS[:2], 4)[0]) == 4


# ---- neighbours ---------------------------------------------------------------------------------------------------

def test_eight_prompts_in_three_orders_give_identical_tokens(engine):
    prompts = some_prompts(3, 11, 1, 18, 7, 26, 5, 9, seed=7)
    by_order = []
    for seed in range(3):
        order = random.Random(seed).sample(range(8), 8)
        outputs = tokens_of(engine, [prompts[i] for i in order], 8)
        by_order.append({i: output for i, output in zip(order, outputs)})
    assert by_order[0] == by_order[1] == by_order[2]


@pytest.mark.parametrize("which", ["engine", "captured"])
def test_sequences_that_join_and_leave_at_different_steps_equal_their_solo_runs(request, solo, which):
    engine = request.getfixturevalue(which)
    prompts, joins, lengths = some_prompts(6, 11, 3, 17, seed=8), [0, 2, 5, 5], [40, 48, 20, 60]
    ids, step = {}, 0
    while step <= max(joins) or engine.has_work:
        for n, at in enumerate(joins):
            if at == step:
                ids[engine.submit(prompts[n], greedy(lengths[n]))] = n
        engine.step()
        step += 1
    for request_id, n in ids.items():
        assert engine.completion(request_id).token_ids == solo(prompts[n], lengths[n])
    assert_all_free(engine)


def test_a_pool_that_is_too_small_preempts_and_ends_with_the_same_tokens(model, solo):
    for settings in ({"capture_cudagraph": True}, {"shared_kv": "sidecar"}):
        tight = make_engine(model, n_pages=12, **settings)
        prompts = some_prompts(12, 9, 10, 7, seed=9)
        done = tight.generate(prompts, greedy(20))
        assert sum(c.num_preemptions for c in done) == tight.stats.num_preemptions > 0
        assert [c.token_ids for c in done] == [solo(prompt, 20) for prompt in prompts]
        assert_all_free(tight)


@pytest.mark.parametrize("seed", [0, 1])
def test_any_course_of_submits_cancels_and_ends_on_few_pages_equals_solo_runs(model, solo, seed):
    engine = make_engine(model, n_pages=13, max_seq_length=44, max_prefill_tokens=7)
    rng, wanted, cancelled = random.Random(seed), {}, set()
    prompts = some_prompts(*(rng.randrange(1, 25) for _ in range(14)), seed=seed)
    for _ in range(150):
        action = rng.random()
        unfinished = [i for i in wanted if not engine._requests[i].sequence.is_finished]
        if action < 0.25 and len(unfinished) < 8:
            prompt, n = rng.choice(prompts), rng.choice([1, 4, 9, 14])
            wanted[engine.submit(prompt, greedy(n))] = prompt, n
        elif action < 0.3 and unfinished:
            cancelled.add(rng.choice(unfinished))
            engine.abort(max(cancelled))
        elif engine.has_work:
            engine.step()
        for table in engine.runner.tables.values():
            table.check()
    while engine.has_work:
        engine.step()
    assert engine.stats.num_preemptions > 0, "the pool was large enough: this proves less than it says"
    completions = {i: engine.completion(i) for i in wanted}
    finished = [i for i, c in completions.items() if c.finish_reason == "length"]
    assert len(finished) > 20
    assert {i for i, c in completions.items() if c.finish_reason == "abort"} <= cancelled
    for i in finished:
        assert completions[i].token_ids == solo(*wanted[i])
    assert_all_free(engine)


# ---- several decode steps between two looks of the host -----------------------------------------------------------

def mixed_params(solo) -> list[SamplingParams]:
    """One a prompt of PROMPTS: ends by length, early and late, by a stop id, by a stop string, and not before a minimum."""
    late, soon = solo(PROMPTS[1], 20)[13], solo(PROMPTS[2], 20)[4]
    held_back = solo(PROMPTS[4], 20)[2]
    text = text_of(solo(PROMPTS[3], 20))
    return [greedy(3), greedy(20, stop_token_ids=(late,)), SamplingParams(max_new_tokens=20, stop_token_ids=(soon,)),
            greedy(20, stop=text[9:12]), greedy(20, stop_token_ids=(held_back,), min_new_tokens=11), greedy(18)]


def told(done) -> list[tuple]:
    return [(c.token_ids, c.text, c.finish_reason) for c in done]


@pytest.mark.parametrize("settings", [
    {"decode_steps_per_sync": 2}, {"decode_steps_per_sync": 3}, {"decode_steps_per_sync": 8}, {"decode_steps_per_sync": 50},
    {"decode_steps_per_sync": 8, "n_pages": 12}, {"decode_steps_per_sync": 3, "n_pages": 12, "max_prefill_tokens": 5},
    {"decode_steps_per_sync": 8, "shared_kv": "sidecar"}], ids=str)
def test_completions_do_not_depend_on_how_many_steps_run_between_two_looks(model, solo, settings):
    params = mixed_params(solo)
    one = make_engine(model, decode_steps_per_sync=1).generate(PROMPTS, params)
    assert {c.finish_reason for c in one} == {"stop", "length"}
    assert one[0].token_ids == solo(PROMPTS[0], 3) and one[5].token_ids == solo(PROMPTS[5], 18)
    engine = make_engine(model, **settings)
    done = engine.generate(PROMPTS, params)
    assert told(done) == told(one)
    assert (engine.stats.num_preemptions > 0) == ("n_pages" in settings)
    assert_all_free(engine)
    streamed = list(engine.stream(PROMPTS, params))
    assert [[token for i, token, _ in streamed if i == n] for n in range(6)] == [c.token_ids for c in one]
    assert ["".join(text for i, _, text in streamed if i == n) for n in range(6)] == [c.text for c in one]


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_captured_completions_do_not_either(model, captured, solo, steps, monkeypatch):
    monkeypatch.setattr(captured.scheduler, "decode_steps", steps)
    captured.reset_stats()
    done = captured.generate(PROMPTS, mixed_params(solo))
    assert told(done) == told(make_engine(model, decode_steps_per_sync=1).generate(PROMPTS, mixed_params(solo)))
    assert captured.stats.steps_eager == 0
    assert_all_free(captured)


def test_the_host_looks_once_for_the_steps_of_a_plan(engine, monkeypatch):
    looks, honest = [], engine.runner.decode

    def counted(sequences, *rest, steps):
        looks.append(steps)
        return honest(sequences, *rest, steps=steps)
    monkeypatch.setattr(engine.runner, "decode", counted)
    engine.reset_stats()
    tokens_of(engine, PROMPTS[:1], 21)
    assert looks == [8, 8, 4]
    assert (engine.stats.steps_eager, engine.stats.decode_tokens) == (20, 20)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_request_aborted_between_two_looks_has_a_part_of_its_tokens_and_harms_no_one(model, solo, steps):
    engine = make_engine(model, decode_steps_per_sync=steps)
    ids = [engine.submit(prompt, greedy(30)) for prompt in PROMPTS[:3]]
    for _ in range(4):
        engine.step()
    engine.abort(ids[1])
    while engine.has_work:
        engine.step()
    done = [engine.completion(i) for i in ids]
    assert [c.finish_reason for c in done] == ["length", "abort", "length"]
    assert 0 < done[1].num_output_tokens < 30
    assert done[1].token_ids == solo(PROMPTS[1], 30)[: done[1].num_output_tokens]
    assert [done[n].token_ids for n in (0, 2)] == [solo(PROMPTS[n], 30) for n in (0, 2)]
    assert_all_free(engine)


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize("overrides", [{}, {"shared_kv": "sidecar"}, {"n_pages": 11}], ids=str)
def test_numbers_that_break_within_a_run_of_steps_end_their_own_request_where_they_break(solo, overrides, steps):
    """The poison is drawn, not given: its row turns to NaN one step later, in the middle of a run."""
    model, prompts = tiny_model(SEED), some_prompts(9, 5, 12, seed=12)
    expected = [solo(prompt, 14) for prompt in prompts]
    healthy = {*prompts[0], *prompts[1], *prompts[2], *expected[0], *expected[2]}
    at = next(n for n, token in enumerate(expected[1]) if n > 1 and token not in healthy | {*expected[1][:n]})
    assert at < 10
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight[expected[1][at]] = float("nan")
    engine = make_engine(model, decode_steps_per_sync=steps, **overrides)
    done = engine.generate(prompts, greedy(14))
    assert [c.finish_reason for c in done] == ["length", "non_finite", "length"]
    assert done[1].token_ids == expected[1][: at + 1]
    assert [done[n].token_ids for n in (0, 2)] == [expected[n] for n in (0, 2)]
    assert finite_pools(engine)
    assert_all_free(engine)


# ---- prompts and running sequences in one pass --------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    {}, {"decode_steps_per_sync": 1}, {"max_prefill_tokens": 5}, {"n_pages": 12}, {"shared_kv": "sidecar"},
    {"capture_cudagraph": True}, {"attention": "flex"}], ids=str)
def test_mixed_prefill_gives_the_same_completions(model, solo, settings):
    engine = make_engine(model, mixed_prefill=True, **settings)
    params = mixed_params(solo)
    prompts = [*PROMPTS, *some_prompts(30, 2, seed=3)]
    params = [*params, greedy(9), greedy(12)]
    done = engine.generate(prompts, params)
    assert told(done) == told(make_engine(model, decode_steps_per_sync=1).generate(prompts, params))
    assert engine.stats.mixed_tokens > 0
    stats = engine.stats
    if not stats.num_preemptions:      # every token but the last is computed once
        computed = stats.prefill_tokens + stats.mixed_tokens + stats.decode_tokens
        assert computed == sum(c.num_prompt_tokens + c.num_output_tokens - 1 for c in done)
    assert (engine.stats.num_preemptions > 0) == ("n_pages" in settings)
    assert_all_free(engine)


def test_mixed_prefill_runs_no_decode_step_beside_a_prefill(model, monkeypatch):
    for mixed in (True, False):
        engine = make_engine(model, mixed_prefill=mixed, max_prefill_tokens=4)
        first = engine.submit(PROMPTS[3], greedy(30))
        engine.step()
        second = engine.submit(PROMPTS[2], greedy(2))
        decodes, honest = [], engine.runner.decode
        monkeypatch.setattr(engine.runner, "decode", lambda *args, **more: decodes.append(1) or honest(*args, **more))
        for n in range(2, 5):
            events = engine.step()
            assert [event.request_id for event in events] == [first], "the running request gets its token either way"
            assert len(engine._requests[first].sequence.output_ids) == n
        assert len(decodes) == (0 if mixed else 3)
        for request_id in (first, second):
            engine.abort(request_id)


def test_numbers_that_break_in_a_mixed_pass_end_their_own_request(solo):
    engine = poisoned_engine(mixed_prefill=True)
    prompts = without(some_prompts(9, 5, 40, seed=12))
    ids = [engine.submit(prompt, greedy(12)) for prompt in prompts]
    engine.step()
    sequence = engine._requests[ids[1]].sequence
    sequence.output_ids[-1] = POISONED
    while engine.has_work:
        engine.step()
    done = [engine.completion(i) for i in ids]
    assert engine.stats.mixed_tokens > 0
    assert [c.finish_reason for c in done] == ["length", "non_finite", "length"]
    assert [done[n].token_ids for n in (0, 2)] == [solo(prompts[n], 12) for n in (0, 2)]
    assert finite_pools(engine)


# ---- results ------------------------------------------------------------------------------------------------------

def test_results_come_in_input_order_with_one_params_for_all_or_one_a_prompt(engine):
    each = [greedy(n) for n in (7, 1, 3, 2, 9, 4)]
    done = engine.generate(PROMPTS, each)
    assert [c.prompt_ids for c in done] == PROMPTS
    assert [c.num_output_tokens for c in done] == [7, 1, 3, 2, 9, 4]
    assert [c.num_prompt_tokens for c in done] == [len(p) for p in PROMPTS]
    assert {c.finish_reason for c in done} == {"length"}
    assert [c.text for c in done] == [text_of(c.token_ids) for c in done]
    same = engine.generate(PROMPTS, greedy(3))
    assert [c.token_ids for c in same[:1]] == [done[0].token_ids[:3]]
    with pytest.raises(PromptError, match="6 prompts and 2 SamplingParams"):
        engine.generate(PROMPTS, each[:2])
    assert engine.generate([]) == []


def test_a_string_a_chat_and_ids_are_the_same_prompt_with_one_bos(engine):
    text, chat = "user: hi\nmodel: ", [{"role": "user", "content": "hi"}]
    ids = [2, *fake_tokenizer()(text, add_special_tokens=False)["input_ids"]]
    done = engine.generate([text, chat, ids, "<bos>" + text], greedy(4))
    assert all(c.prompt_ids == ids for c in done)
    assert len({tuple(c.token_ids) for c in done}) == 1


def test_a_sequence_ends_at_max_seq_length(engine):
    done = engine.generate(some_prompts(120), greedy(50))[0]
    assert (done.num_output_tokens, done.finish_reason) == (8, "length")


def test_stats_count_what_was_computed(engine):
    engine.reset_stats()
    done = engine.generate(PROMPTS, greedy(5))
    stats = engine.stats
    assert stats.prefill_tokens == sum(map(len, PROMPTS))
    assert stats.decode_tokens == sum(c.num_output_tokens - 1 for c in done)       # the first comes with the prefill
    assert len(stats.ttft_ms) == len(PROMPTS)
    assert stats.steps_eager > 0
    assert stats.steps_replayed == stats.num_preemptions == 0


# ---- stops --------------------------------------------------------------------------------------------------------

def stopping_model(stops: list[int]):
    """A model whose generation config names these stops; its config names 1."""
    model = tiny_model(SEED)
    model.generation_config.eos_token_id = stops
    return model


def force(model, prompt: list[int], token: int) -> None:
    """Edit the tied embedding so that `token`, which the prompt does not hold, is by far the best after the prompt."""
    assert token not in prompt
    kept = []
    hook = model.model.norm.register_forward_hook(lambda m, args, out: kept.append(out[0, -1].clone()))
    with torch.no_grad():
        model(torch.tensor([prompt]))
        model.model.embed_tokens.weight[token] = kept[0]
    hook.remove()


def test_stop_ids_are_the_union_of_tokenizer_config_and_generation_config():
    model = tiny_model(SEED)
    model.config.eos_token_id, model.generation_config.eos_token_id = [1, 9], 7
    tokenizer = fake_tokenizer()
    tokenizer.eos_token = "a"
    assert model_stop_ids(model, tokenizer) == {1, 9, 7, 4}
    assert make_engine(model, tokenizer=tokenizer).stop_ids == {1, 9, 7, 4}
    model.generation_config.eos_token_id = None
    assert model_stop_ids(model, None) == {1, 9}


def test_a_stop_token_the_models_vocabulary_lacks_is_no_stop_id():
    tokenizer = fake_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<end_of_turn>"})
    assert tokenizer.eos_token_id == 64
    assert make_engine(tiny_model(SEED), tokenizer=tokenizer).stop_ids == {1}


@pytest.mark.parametrize("token", [1, 7, 9])
def test_each_stop_id_ends_a_request_and_is_absent_from_its_text(token):
    model = stopping_model([1, 7, 9])
    prompt = [2, 20, 30, 40]
    force(model, prompt, token)
    engine = make_engine(model)
    done = engine.generate([prompt], SamplingParams(max_new_tokens=5))[0]
    assert (done.token_ids, done.text, done.finish_reason) == ([token], "", "stop")
    ignored = engine.generate([prompt], greedy(5))[0]
    assert ignored.token_ids[0] == token
    assert (ignored.num_output_tokens, ignored.finish_reason) == (5, "length")
    assert ignored.text == text_of(ignored.token_ids)


def test_a_tokenizers_eos_that_its_vocabulary_lacks_is_no_stop_id(model):
    tokenizer = fake_tokenizer()
    tokenizer.eos_token = "<end_of_turn>"
    assert tokenizer.eos_token_id == tokenizer.unk_token_id == 3
    assert 3 not in model_stop_ids(model, tokenizer)


def test_a_token_no_one_named_does_not_stop():
    model = stopping_model([1, 7])
    force(model, [2, 20], 9)
    done = make_engine(model).generate([[2, 20]], SamplingParams(max_new_tokens=3))[0]
    assert done.token_ids[0] == 9
    assert done.finish_reason == "length"


def test_a_callers_stop_id_extends_the_models_and_holds_under_ignore_eos(engine):
    tokens = tokens_of(engine, PROMPTS[:1], 12)[0]
    caller = tokens[6]
    first = tokens.index(caller)
    for ignore_eos in (True, False):
        params = SamplingParams(max_new_tokens=12, ignore_eos=ignore_eos, stop_token_ids=(caller,))
        done = engine.generate(PROMPTS[:1], params)[0]
        assert done.token_ids == tokens[: first + 1]
        assert (done.text, done.finish_reason) == (text_of(tokens[:first]), "stop")


@pytest.mark.parametrize("minimum", [0, 1, 2, 5, 9])
def test_min_new_tokens_is_transformers_min_new_tokens(minimum):
    model = tiny_model(SEED)
    prompts = some_prompts(4, 9, seed=11)
    free = [hf_generate(model, prompt, 9) for prompt in prompts]
    stops = sorted({free[0][0], free[0][3], free[1][2], free[1][4]})
    model.generation_config.eos_token_id = [1, *stops]
    engine = make_engine(model)
    params = SamplingParams(max_new_tokens=9, min_new_tokens=minimum)
    for prompt, done in zip(prompts, engine.generate(prompts, params)):
        assert done.token_ids == hf_generate(model, prompt, 9, eos_token_id=[1, *stops], min_new_tokens=minimum or None)
        assert done.num_output_tokens >= minimum


def test_min_new_tokens_holds_in_captured_steps_and_only_for_who_asked(captured, solo):
    tokens = solo(PROMPTS[0], 10)
    stop = tokens[4]
    at = tokens.index(stop)
    params = [greedy(10, stop_token_ids=(stop,), min_new_tokens=minimum) for minimum in (0, at + 2)]
    done = captured.generate([PROMPTS[0]] * 2, params)
    assert done[0].token_ids == tokens[: at + 1]
    assert done[1].token_ids[:at] == tokens[:at]
    assert stop not in done[1].token_ids[: at + 2]
    assert done[1].num_output_tokens >= at + 2


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(engine):
    tokens = tokens_of(engine, PROMPTS[:1], 16)[0]
    text = text_of(tokens)
    stop = text[5:8]
    cut = text.index(stop)
    done = engine.generate(PROMPTS[:1], greedy(16, stop=[stop, "never"]))[0]
    assert (done.text, done.finish_reason) == (text[:cut], "stop")
    assert done.token_ids == tokens[: cut + 3]
    assert_all_free(engine)


def test_a_stop_string_completed_by_the_last_token_allowed_is_a_stop(engine):
    text = text_of(tokens_of(engine, PROMPTS[:1], 16)[0])
    stop = text[6:9]
    end = text.index(stop) + 3
    done = engine.generate(PROMPTS[:1], greedy(end, stop=stop))[0]
    assert (done.text, done.finish_reason) == (text[: end - 3], "stop")


# ---- streaming ----------------------------------------------------------------------------------------------------

def test_streamed_deltas_join_to_the_texts_of_generate(engine):
    text = text_of(tokens_of(engine, PROMPTS[:1], 14)[0])
    params = [greedy(14, stop=text[6:9]), greedy(3), greedy(14), greedy(9, stop="zz"), greedy(1), greedy(14)]
    streamed = list(engine.stream(PROMPTS, params))
    done = engine.generate(PROMPTS, params)
    for n, completion in enumerate(done):
        assert [token for i, token, _ in streamed if i == n] == completion.token_ids
        assert "".join(delta for i, _, delta in streamed if i == n) == completion.text


def test_tokens_are_streamed_as_they_come(engine):
    stream = engine.stream(PROMPTS[:2], greedy(30))
    first = list(itertools.islice(stream, 6))
    assert {i for i, _, _ in first} == {0, 1}
    assert engine.has_work
    stream.close()
    assert_all_free(engine)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_stream_that_is_closed_frees_every_page_and_harms_no_one(engine, solo, after):
    neighbour = engine.submit(PROMPTS[3], greedy(12))
    for _ in range(3):
        stream = engine.stream(PROMPTS[:3], greedy(40))
        for _ in itertools.islice(stream, after):
            pass
        stream.close()
    while engine.has_work:
        engine.step()
    assert engine.completion(neighbour).token_ids == solo(PROMPTS[3], 12)
    assert engine._requests == {}
    assert_all_free(engine)


def test_streams_read_in_turns_and_a_job_between_two_tokens_lose_no_token(engine, solo):
    first, second = engine.stream([PROMPTS[0]], greedy(8)), engine.stream([PROMPTS[2]], greedy(8))
    got = ([], [])
    for one, other in zip(first, second):
        got[0].append(one[1])
        got[1].append(other[1])
        assert tokens_of(engine, [PROMPTS[4]], 3) == [solo(PROMPTS[4], 3)]
    got[0].extend(token for _, token, _ in first)
    assert got == (solo(PROMPTS[0], 8), solo(PROMPTS[2], 8))
    assert engine._undelivered == []
    assert_all_free(engine)


def test_tokens_drawn_by_another_job_wait_for_who_steps_and_go_with_the_completion(engine, solo):
    read, unread = engine.submit(PROMPTS[0], greedy(4)), engine.submit(PROMPTS[2], greedy(4))
    engine.generate([PROMPTS[4]], greedy(12))
    assert engine.completion(unread).token_ids == solo(PROMPTS[2], 4)
    assert [event.token_id for event in engine.step() if event.request_id == read] == solo(PROMPTS[0], 4)
    assert engine.completion(read).token_ids == solo(PROMPTS[0], 4)
    assert engine._undelivered == []


# ---- what goes wrong ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("prompt", "match"), [
    ("", "prompt 1: the prompt is empty"),
    ([], "prompt 1: the prompt is empty"),
    ([5, 64], "prompt 1: token id 64 is outside the vocabulary of 64"),
    ([5, -1], "prompt 1: token id -1 is outside"),
    ([5] * 128, "prompt 1: .*prompt of 128 tokens.*raise max_seq_length"),
    (7, "prompt 1: a prompt is a string"),
])
def test_a_bad_prompt_is_refused_by_number_before_anything_runs_and_leaves_no_trace(engine, solo, prompt, match):
    engine.reset_stats()
    with pytest.raises(PromptError, match=match):
        engine.generate([PROMPTS[0], prompt, PROMPTS[1]], greedy(4))
    assert engine.stats.prefill_tokens == 0
    assert engine._requests == {}
    assert_all_free(engine)
    assert tokens_of(engine, PROMPTS[:1], 4)[0] == solo(PROMPTS[0], 4)


def test_a_request_that_could_never_fit_the_pool_names_n_pages(model):
    engine = make_engine(model, n_pages=6)
    with pytest.raises(ValueError, match="raise n_pages to at least 8"):
        engine.generate([PROMPTS[2]], greedy(6))
    assert_all_free(engine)


@pytest.mark.parametrize(("fields", "match"), [
    ({"stop_token_ids": (64,)}, "stop_token_ids has 64, which is outside the vocabulary"),
    ({"stop_token_ids": tuple(range(20)), "min_new_tokens": 1}, "at most 16 stop ids"),
])
def test_stop_ids_the_step_cannot_hold_are_refused(engine, fields, match):
    with pytest.raises(PromptError, match=match):
        engine.generate(PROMPTS[:1], SamplingParams(**fields))
    assert_all_free(engine)


def test_a_lone_string_is_not_a_list_of_prompts(engine):
    with pytest.raises(PromptError, match="put the string in a list"):
        engine.generate("hello")


def test_without_a_tokenizer_ids_run_and_stop_strings_are_refused(model):
    engine = FlexEngine(model, None, EngineConfig(**SMALL))
    assert engine.generate(PROMPTS[:1], greedy(2))[0].text == ""
    with pytest.raises(PromptError, match="stop strings need a tokenizer"):
        engine.generate(PROMPTS[:1], greedy(2, stop="x"))


@pytest.mark.parametrize(("settings", "error", "match"), [
    ({"dtype": "bfloat16"}, ValueError, "the model is in float32"),
    ({"device": "cuda"}, ValueError, "the model is on cpu"),
    ({"fa4_prefill": True}, ValueError, "FlashAttention-4 cannot run here: it needs a Hopper or Blackwell GPU"),
])
def test_settings_that_do_not_fit_the_model_are_refused(model, settings, error, match):
    with pytest.raises(error, match=match):
        make_engine(model, **settings)


def test_a_float16_model_is_refused(model):
    half = tiny_model(SEED, dtype=torch.float16)
    with pytest.raises(InvalidParameterError, match="activations overflow"):
        make_engine(half)


def test_a_step_that_raises_ends_the_job_and_the_next_one_is_right(engine, solo, monkeypatch):
    steps = []
    honest = engine.runner.decode

    def fails_at_third(sequences, *rest, **more):
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("the device is lost")
        return honest(sequences, *rest, **more)
    monkeypatch.setattr(engine.runner, "decode", fails_at_third)
    for job in (lambda: engine.generate(PROMPTS[:2], greedy(30)), lambda: list(engine.stream(PROMPTS[:2], greedy(30)))):
        steps.clear()
        with pytest.raises(RuntimeError, match="the device is lost"):
            job()
        assert engine._requests == {}
        assert_all_free(engine)
    monkeypatch.undo()
    assert tokens_of(engine, PROMPTS[:2], 9) == [solo(p, 9) for p in PROMPTS[:2]]


# ---- logits that are no numbers -----------------------------------------------------------------------------------

def poisoned_engine(**overrides) -> FlexEngine:
    """An engine on a model that gives NaN wherever the token POISONED is in sight."""
    model = tiny_model(SEED)
    with torch.no_grad():
        model.model.embed_tokens_per_layer.weight[POISONED] = float("nan")
    return make_engine(model, **overrides)


def finite_pools(engine: FlexEngine) -> bool:
    stores = [engine.runner.cache, *([engine.runner.sidecar] if engine.runner.sidecar else [])]
    return all(t.isfinite().all() for store in stores for t in store.tensors().values())


def without(prompts: list[list[int]], token: int = POISONED) -> list[list[int]]:
    return [[t if t != token else token + 1 for t in prompt] for prompt in prompts]


@pytest.mark.parametrize("overrides", [{}, {"capture_cudagraph": True}, {"shared_kv": "sidecar"}], ids=str)
def test_a_request_that_turns_to_nan_ends_alone_and_its_pages_serve_the_next(solo, overrides):
    """The poisoned request decodes healthily at first: its NaN comes with a token it is made to draw."""
    engine = poisoned_engine(**overrides)
    prompts = without(some_prompts(9, 5, 12, seed=12))
    ids = [engine.submit(prompt, greedy(12)) for prompt in prompts]
    while len(engine._requests[ids[1]].sequence.output_ids) < 4:
        engine.step()
    engine._requests[ids[1]].sequence.output_ids[-1] = POISONED
    while engine.has_work:
        engine.step()
    done = [engine.completion(i) for i in ids]
    assert [c.finish_reason for c in done] == ["length", "non_finite", "length"]
    assert done[1].num_output_tokens < 12
    assert [done[n].token_ids for n in (0, 2)] == [solo(prompts[n], 12) for n in (0, 2)]
    assert finite_pools(engine)
    assert_all_free(engine)
    assert tokens_of(engine, prompts, 12) == [solo(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("at", [0, 3, 30])
def test_a_prompt_that_gives_nan_in_any_chunk_spoils_no_later_user_of_its_pages(solo, at):
    """Chunks are 16 tokens: the NaN of the first lies in sliding pages that are recycled before any logits are made, and the
    first prompt's next page is one of them."""
    engine = poisoned_engine(n_pages=64)
    sick = without(some_prompts(100, seed=13))[0]
    sick[at] = POISONED
    healthy = without(some_prompts(6, 21, 33, seed=14))
    done = engine.generate([healthy[0], sick, *healthy[1:]], greedy(16))
    assert [c.finish_reason for c in done] == ["length", "non_finite", "length", "length"]
    assert (done[1].token_ids, done[1].text) == ([], "")
    assert [c.token_ids for c in (done[0], *done[2:])] == [solo(prompt, 16) for prompt in healthy]
    assert finite_pools(engine)


def test_without_the_check_of_chunks_neighbours_would_break(solo, monkeypatch):
    engine = poisoned_engine(n_pages=64)
    honest = engine.runner._walk_prefill

    def blind(*args):
        logits, finite = honest(*args)
        return logits, torch.ones_like(finite)
    monkeypatch.setattr(engine.runner, "_walk_prefill", blind)
    sick = without(some_prompts(100, seed=13))[0]
    sick[0] = POISONED
    healthy = without(some_prompts(6, 21, 33, seed=14))
    done = engine.generate([healthy[0], sick, *healthy[1:]], greedy(16))
    assert [c.token_ids for c in (done[0], *done[2:])] != [solo(prompt, 16) for prompt in healthy]


@pytest.mark.parametrize("overrides", [{"shared_kv": "paged"}, {"shared_kv": "sidecar"}], ids=str)
def test_weights_that_were_nan_for_a_step_leave_nothing_in_the_reserved_page(overrides):
    """Three requests in a bucket of four: the padding row writes NaN to page 0, which captured steps gather."""
    model = tiny_model(SEED)
    engine = make_engine(model, capture_cudagraph=True, **overrides)
    expected = tokens_of(engine, PROMPTS[:1], 6)
    ids = [engine.submit(prompt, greedy(8)) for prompt in PROMPTS[:3]]
    while not all(engine._requests[i].sequence.output_ids for i in ids):
        engine.step()
    weight = model.model.layers[0].mlp.up_proj.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    engine.step()
    weight.copy_(kept)
    assert [engine.completion(i).finish_reason for i in ids] == ["non_finite"] * 3
    assert finite_pools(engine)
    assert tokens_of(engine, PROMPTS[:1], 6) == expected


# ---- forced tokens ------------------------------------------------------------------------------------------------

def test_a_trace_is_one_row_a_position_from_the_last_prompt_token_on(model, engine):
    trace = engine.trace(PROMPTS[2], [5, 6, 7])
    assert trace.hidden.shape == (7, 4, 48)
    assert trace.logits.shape == (4, 64)
    assert trace.logits.dtype == torch.float32
    assert_all_free(engine)
    assert engine._requests == {}
    assert engine.trace(PROMPTS[0], []).logits.argmax() == hf_generate(model, PROMPTS[0], 1)[0]


def test_a_trace_goes_on_through_stop_ids():
    model = stopping_model([1, 5, 6])
    assert make_engine(model).trace(PROMPTS[0], [5, 1, 6]).logits.shape[0] == 4


def test_a_trace_that_does_not_fit_or_finds_the_engine_busy_is_refused(engine):
    with pytest.raises(PromptError, match="do not fit max_seq_length=128"):
        engine.trace(some_prompts(100)[0], [5] * 28)
    assert engine.trace(some_prompts(100)[0], [5] * 27).logits.shape[0] == 28
    request_id = engine.submit(PROMPTS[0], greedy(3))
    with pytest.raises(RuntimeError, match="idle engine"):
        engine.trace(PROMPTS[0], [5])
    engine.abort(request_id)
    engine.completion(request_id)


@pytest.mark.parametrize("forced", [[5, 64], [-1]])
def test_a_trace_refuses_forced_ids_the_model_has_not_and_stays_usable(engine, solo, forced):
    with pytest.raises(PromptError, match="token id"):
        engine.trace(PROMPTS[0], forced)
    assert_all_free(engine)
    assert tokens_of(engine, PROMPTS[:1], 4) == [solo(PROMPTS[0], 4)]


def test_a_trace_that_breaks_leaves_nothing_behind(engine, solo, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.trace(PROMPTS[0], [5, 6])
    assert_all_free(engine)
    assert tokens_of(engine, PROMPTS[:1], 4) == [solo(PROMPTS[0], 4)]


# ---- misuse -------------------------------------------------------------------------------------------------------

def test_the_completion_of_a_request_that_runs_or_never_was_is_refused_and_harms_nothing(engine, solo):
    request_id = engine.submit(PROMPTS[0], greedy(4))
    engine.step()
    with pytest.raises(ValueError, match="not finished"):
        engine.completion(request_id)
    while engine.has_work:
        engine.step()
    assert engine.completion(request_id).token_ids == solo(PROMPTS[0], 4)
    with pytest.raises(ValueError, match="no request"):
        engine.completion(request_id)


@pytest.mark.parametrize("prompts", ["text", b"text", {"role": "user", "content": "hi"}, 5, None], ids=repr)
def test_what_is_no_list_of_prompts_is_refused(engine, prompts):
    with pytest.raises(PromptError, match="takes a list of prompts"):
        engine.generate(prompts, greedy(2))


def test_prompts_may_come_from_a_generator(engine, solo):
    done = engine.generate((prompt for prompt in PROMPTS[:2]), greedy(3))
    assert [c.token_ids for c in done] == [solo(prompt, 3) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("params", [{"max_new_tokens": 3}, {}, 5])
def test_what_is_no_sampling_params_is_refused(engine, params):
    with pytest.raises(PromptError, match="give a SamplingParams"):
        engine.generate(PROMPTS[:1], params)
    assert_all_free(engine)


def test_what_is_no_causal_lm_is_refused_with_what_to_give(model):
    for wrong in (model.model, torch.nn.Linear(3, 3), "tiny"):
        with pytest.raises(ValueError, match="is no causal LM"):
            FlexEngine(wrong, None, EngineConfig())


@pytest.mark.parametrize("which", ["engine", "captured"])
def test_a_callers_autocast_changes_nothing(request, solo, which):
    engine = request.getfixturevalue(which)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tokens_of(engine, PROMPTS[:3], 5) == [solo(prompt, 5) for prompt in PROMPTS[:3]]


def test_weights_rebound_between_requests_are_seen_when_one_is_submitted():
    model = tiny_model(SEED)
    engine = make_engine(model)
    up = model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach().clone())
    with pytest.raises(RuntimeError, match="layers.0.mlp.up_proj.weight .*rebound"):
        engine.submit(PROMPTS[0], greedy(2))


def test_cuda_is_refused_in_a_sentence_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidParameterError, match="sees no CUDA device"):
        FlexEngine.from_pretrained("tiny", EngineConfig(device="cuda"))


# ---- memory -------------------------------------------------------------------------------------------------------

def test_the_memory_report_is_what_was_allocated(model, engine):
    report = engine.memory_report()
    per_token = engine.geometry.kv_bytes_per_token(4)
    for kind, table in engine.runner.tables.items():
        assert report[f"kv.{kind}"] == per_token[kind] * table.n_pages * table.page_size
    assert report["weights"] == sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert report["sidecar"] == 0
    sidecar = make_engine(model, shared_kv="sidecar").memory_report()["sidecar"]
    assert sidecar == 2 * 5 * 128 * (16 + 32) * 4


def test_sliding_groups_get_the_pages_their_window_needs_and_no_more(engine):
    assert engine.runner.tables[FULL].n_pages == 41
    assert engine.runner.tables[SLIDING].n_pages == 1 + 4 * (3 + 2) + 16 // 4      # a window of 4 and 7 tokens to come
    assert make_engine(engine.model, decode_steps_per_sync=1).runner.tables[SLIDING].n_pages == 1 + 4 * (1 + 2) + 16 // 4


def test_kernels_and_captures_are_made_once_and_only_when_there_is_something_to_run(model):
    engine = make_engine(model, capture_cudagraph=True, max_batch_size=1)
    with pytest.raises(PromptError):
        engine.generate([""])
    assert engine.runner.graphs == {}
    engine.submit(PROMPTS[1], greedy(2))        # no job: steps taken one by one are captured as well
    while engine.has_work:
        engine.step()
    graphs = dict(engine.runner.graphs)
    assert {*graphs} == {(1, columns, GREEDY) for columns in engine.runner.column_buckets}
    assert (engine.stats.steps_replayed, engine.stats.steps_eager) == (1, 0)
    tokens_of(engine, PROMPTS[:1], 2)
    assert engine.runner.graphs == graphs


def test_a_request_that_ends_without_a_token_has_a_last_event_that_says_so():
    engine = poisoned_engine()
    request_id = engine.submit([2, POISONED], greedy(3))
    events = engine.step()
    assert [(e.request_id, e.token_id, e.finish_reason) for e in events] == [(request_id, None, "non_finite")]
    assert list(engine.stream([[2, POISONED]], greedy(3))) == [(0, None, "")]


def test_pools_that_fit_no_memory_and_a_config_of_another_kind_are_one_sentence(model):
    with pytest.raises(InvalidParameterError, match=r"GiB: lower .*max_seq_length=1000000000 or n_pages"):
        make_engine(model, max_seq_length=1_000_000_000, n_pages=None)
    with pytest.raises(ValueError, match="give an EngineConfig"):
        FlexEngine(model, None, {"device": "cpu"})
