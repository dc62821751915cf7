from __future__ import annotations

import dataclasses

import pytest

from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams


@pytest.mark.parametrize(
    "field, value, named",
    [
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", True, "whole number"),
        ("max_new_tokens", 2.0, "whole number"),
        ("min_new_tokens", -1, "at least 0"),
        ("min_new_tokens", 129, "max_new_tokens=128"),
        ("temperature", -0.1, "0.0 (greedy) or more"),
        ("temperature", "0", "0.0 (greedy) or more"),
        ("temperature", float("nan"), "0.0 (greedy) or more"),
        ("temperature", float("inf"), "0.0 (greedy) or more"),
        ("temperature", 10**400, "0.0 (greedy) or more"),
        ("presence_penalty", 1e308, "a finite number"),
        ("repetition_penalty", 1e-60, "above 0.0"),
        ("temperature", True, "0.0 (greedy) or more"),
        ("n", 0, "at least 1"),
        ("n", 1.0, "at least 1"),
        ("top_k", -1, "at least 0"),
        ("top_k", 2.5, "at least 0"),
        ("top_p", 0, "above 0.0 and up to 1.0"),
        ("top_p", 1.01, "above 0.0 and up to 1.0"),
        ("min_p", -0.1, "from 0.0 to 1.0"),
        ("min_p", 1.5, "from 0.0 to 1.0"),
        ("repetition_penalty", 0, "above 0.0"),
        ("presence_penalty", None, "a finite number"),
        ("frequency_penalty", float("inf"), "a finite number"),
        ("logit_bias", 3, "a mapping of token ids"),
        ("logit_bias", {-1: 1.0}, "at least 0"),
        ("logit_bias", {4: float("-inf")}, "or ban the id"),
        ("allowed_token_ids", (), "no id that could be drawn"),
        ("banned_token_ids", "abc", "a list of token ids"),
        ("seed", -1, "at least 0"),
        ("seed", 1 << 63, "below 2^63"),
        ("logprobs", -1, "at least 0"),
        ("prompt_logprobs", True, "at least 0"),
        ("ignore_eos", 1, "True or False"),
        ("stop", "", "non-empty text"),
        ("stop", ("a", ""), "non-empty text"),
        ("stop", (3,), "non-empty text"),
        ("stop", 3, "a list of texts"),
        ("stop_token_ids", 106, "a list of token ids"),
        ("stop_token_ids", "106", "a list of token ids"),
        ("stop_token_ids", (-1,), "at least 0"),
    ],
)
def test_a_bad_sampling_value_is_refused_in_one_sentence_that_names_field_and_fix(field, value, named):
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert field in message and named in message
    assert "\n" not in message and message.endswith(".")


def test_stop_takes_a_text_or_a_list_and_keeps_no_reference_to_it():
    texts, ids = ["\n\n", "User:"], [1, 106]
    params = SamplingParams(stop=texts, stop_token_ids=ids)
    texts.append("late")
    ids.append(7)
    assert params.stop == ("\n\n", "User:") and params.stop_token_ids == (1, 106)
    assert SamplingParams(stop="end").stop == ("end",)
    assert hash(params) == hash(SamplingParams(stop=("\n\n", "User:"), stop_token_ids=(1, 106)))


@pytest.mark.parametrize(
    "field, value, named",
    [
        ("device", "tpu", "'cuda'"),
        ("dtype", "float16", "overflow"),
        ("dtype", "int8", "'bfloat16'"),
        ("attention", "eager", "'sdpa'"),
        ("shared_kv", "ring", "'sidecar'"),
        ("capture_cudagraph", "yes", "True or False"),
        ("compile", None, "True or False"),
        ("mixed_prefill", 1, "True or False"),
        ("decode_steps_per_sync", 0, "at least 1"),
        ("decode_steps_per_sync", True, "whole number"),
        ("max_batch_size", 0, "at least 1"),
        ("max_seq_length", 1, "at least 2"),
        ("max_prefill_tokens", 0, "at least 1"),
        ("n_pages", 1, "at least 2"),
        ("n_pages", 0, "at least 2"),
        ("page_size", 0, "at least 1"),
        ("page_size", 48, "32 or 64"),
        ("page_size", 128.0, "whole number"),
        ("fa4_prefill", "auto", "True or False"),
        ("decode_kernel_options", "num_stages=2", "mapping"),
        ("prefill_kernel_options", {1: 2}, "mapping"),
        ("seed", -1, "at least 0"),
        ("seed", 1 << 63, "below 2"),
    ],
)
def test_a_bad_engine_value_is_refused_in_one_sentence_that_names_field_and_fix(field, value, named):
    with pytest.raises(InvalidParameterError) as caught:
        EngineConfig(**{field: value})
    message = str(caught.value)
    assert field in message and named in message
    assert "\n" not in message and message.endswith(".")


@pytest.mark.parametrize("device_type, dtype, page_size", [("cuda", "bfloat16", 128), ("cpu", "float32", 32)])
def test_resolving_leaves_nothing_open_and_changes_nothing_given(device_type, dtype, page_size):
    config = EngineConfig(max_batch_size=3, max_seq_length=2 * page_size + 1)
    before = dataclasses.asdict(config)
    resolved = config.resolved(device_type)
    assert dataclasses.asdict(config) == before
    still_open = [f.name for f in dataclasses.fields(resolved) if getattr(resolved, f.name) in (None, "auto")]
    # None: as many pages as max_batch_size and max_seq_length need; what the card can run
    assert still_open == ["gpu_memory_utilization", "fa4_prefill"]
    assert (resolved.device, resolved.dtype, resolved.page_size) == (device_type, dtype, page_size)
    assert resolved.attention == {"cuda": "flex", "cpu": "sdpa"}[device_type]
    assert resolved.n_pages == 1 + 3 * 3
    assert resolved.resolved(device_type) == resolved


def test_what_was_asked_for_survives_resolving():
    asked = EngineConfig(
        device="cpu",
        dtype="bfloat16",
        attention="flex",
        compile=False,
        decode_steps_per_sync=3,
        page_size=4,
        n_pages=9,
        fa4_prefill=True,
        decode_kernel_options={"num_stages": 2},
    )
    resolved = asked.resolved("cuda")
    assert resolved == dataclasses.replace(asked, prefill_kernel_options={})


def test_cuda_without_a_cuda_device_is_refused():
    with pytest.raises(InvalidParameterError, match="use device='cpu'"):
        EngineConfig(device="cuda").resolved("cpu")


def test_a_config_is_frozen_and_keeps_its_own_kernel_options():
    options = {"num_stages": 2}
    config = EngineConfig(decode_kernel_options=options)
    options["num_stages"] = 9
    assert config.decode_kernel_options == {"num_stages": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 64


def test_bans_that_leave_nothing_of_what_is_allowed_are_a_contradiction():
    with pytest.raises(InvalidParameterError, match="no id that could be drawn"):
        SamplingParams(allowed_token_ids=[3, 4], banned_token_ids=[4, 3, 9])
    assert SamplingParams(allowed_token_ids=[3, 4], banned_token_ids=[4]).allowed_token_ids == (3, 4)


def test_what_is_left_open_comes_from_the_generation_config_and_what_that_leaves_open_is_off():
    open_params = SamplingParams(top_p=0.5)
    assert open_params.with_defaults({"do_sample": True, "temperature": 0.6, "top_k": 64, "top_p": 0.95}) == SamplingParams(
        temperature=0.6, top_k=64, top_p=0.5, min_p=0.0, repetition_penalty=1.0)
    off = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert SamplingParams().with_defaults({}) == SamplingParams().with_defaults({"temperature": 0.7}) == off
    assert SamplingParams(temperature=0.9).with_defaults({"top_k": 50}).top_k == 50
    assert SamplingParams().with_defaults({"do_sample": True, "top_k": None}).temperature == 1.0


def test_a_logit_bias_is_kept_as_sorted_pairs_that_the_caller_cannot_change():
    biases = {9: 1.5, 3: -2}
    params = SamplingParams(logit_bias=biases)
    biases[4] = 1.0
    assert params.logit_bias == ((3, -2), (9, 1.5)) and hash(params) == hash(SamplingParams(logit_bias=params.logit_bias))
