from __future__ import annotations

import pytest

from gemma4_flex.params import SamplingParams
from gemma4_flex.sequence import Sequence

MODEL_STOPS = frozenset({1, 106, 50})


def make(prompt=(2, 7, 8), *, max_seq_length=100, **params):
    return Sequence(0, list(prompt), SamplingParams(**params), stop_ids=MODEL_STOPS, max_seq_length=max_seq_length)


def append_until_finished(sequence, tokens):
    for token in tokens:
        sequence.append(token)
        if sequence.is_finished:
            break
    return sequence.output_ids, sequence.finish_reason


@pytest.mark.parametrize("stop", sorted(MODEL_STOPS))
def test_each_of_the_models_stop_ids_ends_the_request_and_is_kept(stop):
    assert append_until_finished(make(), [9, stop, 9]) == ([9, stop], "stop")


def test_the_callers_stop_ids_extend_the_models():
    assert append_until_finished(make(stop_token_ids=(30,)), [9, 30, 9]) == ([9, 30], "stop")
    assert append_until_finished(make(stop_token_ids=(30,)), [9, 106, 9]) == ([9, 106], "stop")


def test_ignore_eos_ignores_the_models_stop_ids_but_not_the_callers():
    ignoring = make(ignore_eos=True, stop_token_ids=(30,))
    assert append_until_finished(ignoring, [1, 106, 50, 30, 9]) == ([1, 106, 50, 30], "stop")
    overlapping = make(ignore_eos=True, stop_token_ids=(106,))
    assert append_until_finished(overlapping, [1, 106, 9]) == ([1, 106], "stop")


def test_max_new_tokens_ends_with_length():
    assert append_until_finished(make(max_new_tokens=2), [9, 9, 9]) == ([9, 9], "length")


def test_max_seq_length_counts_prompt_and_output():
    assert append_until_finished(make(max_seq_length=5), [9, 9, 9]) == ([9, 9], "length")


def test_a_stop_id_as_the_last_token_allowed_is_a_stop():
    assert append_until_finished(make(max_new_tokens=2), [9, 106]) == ([9, 106], "stop")


def test_stops_are_banned_until_min_new_tokens_are_generated():
    sequence = make(min_new_tokens=2)
    assert sequence.bans_stops
    sequence.append(9)
    assert sequence.bans_stops
    sequence.append(106)  # banned, so not a stop
    assert not sequence.is_finished and not sequence.bans_stops
    sequence.append(106)
    assert sequence.finish_reason == "stop"


def test_nothing_is_appended_to_a_finished_request():
    sequence = make(max_new_tokens=1)
    sequence.append(9)
    with pytest.raises(AssertionError, match="already finished"):
        sequence.append(9)


def test_tokens_are_prompt_then_output_and_the_prompt_is_a_copy():
    prompt = [2, 7, 8]
    sequence = make(prompt)
    prompt.append(99)
    assert (sequence.token_ids, sequence.num_tokens, sequence.last_token) == ([2, 7, 8], 3, 8)
    sequence.append(9)
    assert (sequence.token_ids, sequence.num_tokens, sequence.last_token) == ([2, 7, 8, 9], 4, 9)


def test_a_sequence_decodes_when_it_runs_and_one_token_is_left_to_compute():
    sequence = make()
    sequence.num_computed = 2
    assert not sequence.is_decoding
    sequence.slot = 1
    assert sequence.is_decoding
    sequence.append(9)
    assert not sequence.is_decoding
    sequence.num_computed = 3
    assert sequence.is_decoding
