from __future__ import annotations

import functools

import pytest

from gemma4_flex.bench import job
from gemma4_flex.bench.roofline import decode_flops, prefill_flops
from gemma4_flex.bench.workload import random_prompts
from tests.bench.stub import geometry

draw = functools.partial(random_prompts, vocab_size=64, seed=0)


def test_a_decode_jobs_prompts_have_one_length_and_differ_from_the_first_token():
    made = job.decode_job(draw, batch=8, prompt_tokens=5, new_tokens=9)
    assert made.lengths == [(5, 9)] * 8 and made.max_batch == 8 and made.max_seq_length == 14
    assert len({prompt[0] for prompt in made.prompts}) == 8
    assert made.rated_tokens == 72 and made.passes == 9


def test_a_prefill_job_is_rated_by_what_it_reads_and_takes_one_pass():
    made = job.prefill_job(draw, prompts=3, prompt_tokens=50)
    assert made.rated_tokens == 150 and made.new_tokens == (1, 1, 1) and made.passes == 1


def test_a_mixed_job_has_many_lengths_within_its_bounds_and_is_the_same_for_a_seed():
    made = job.mixed_job(draw, requests=40, max_batch=8, seed=1)
    prompts, outputs = zip(*made.lengths)
    for lengths, (low, high) in ((prompts, job.MIXED_PROMPT_TOKENS), (outputs, job.MIXED_NEW_TOKENS)):
        assert low <= min(lengths) < max(lengths) <= high and len(set(lengths)) > 20
    assert made == job.mixed_job(draw, requests=40, max_batch=8, seed=1)
    assert made != job.mixed_job(draw, requests=40, max_batch=8, seed=2)
    assert made.rated_tokens == sum(outputs)


@pytest.mark.parametrize(("max_batch", "new_tokens", "passes"), [
    (8, (5, 3, 2), 5),         # all at once: the longest decides
    (1, (5, 3, 2), 10),        # one after the other
    (2, (4, 4, 4, 1), 7),      # 13 tokens, two a pass at most
])
def test_passes_are_the_fewest_that_any_order_of_serving_could_take(max_batch, new_tokens, passes):
    assert job.Job("mixed", max_batch, ((1, 2),) * len(new_tokens), new_tokens).passes == passes


def test_the_floor_reads_the_weights_once_a_pass_and_each_decode_steps_keys_and_values():
    shape, made = geometry(), job.Job("decode", 2, ((1, 2, 3), (4, 5, 6)), (4, 4))
    floor = made.floor(shape, bytes_per_element=4, bytes_per_s=1e6)
    kv = 2 * sum(shape.kv_cache_bytes(3 + j, 4) for j in range(4))      # the prompt's are written, the others' are read
    assert floor.seconds == (4 * shape.step_weight_bytes(4) + kv) / 1e6 and floor.bound == "memory"


def test_the_floor_is_all_the_jobs_arithmetic_where_that_takes_longer():
    shape, made = geometry(), job.Job("mixed", 2, ((1, 2, 3), (4, 5)), (4, 1))
    floor = made.floor(shape, bytes_per_element=4, bytes_per_s=1e12, flop_per_s=1e6)
    assert floor.bound == "arithmetic"
    assert floor.seconds == (prefill_flops(shape, [3, 2]) + decode_flops(shape, [(3, 4)])) / 1e6
