"""Rows move on by themselves as their sequences do on the host, and end where those end."""

from __future__ import annotations

import random

import pytest
import torch

from gemma4_flex.decode_state import MAX_STOP_IDS, DecodeState, padded_stop_ids
from gemma4_flex.params import SamplingParams
from gemma4_flex.sampling import NON_FINITE
from gemma4_flex.sequence import Sequence

VOCAB, STOP = 24, 1


def running(prompt_length: int, *, slot: int = 1, max_seq_length: int = 99, stops=(STOP,), drawn=(), **params) -> Sequence:
    """A sequence in `slot` that has drawn some tokens."""
    sequence = Sequence(slot, list(range(2, 2 + prompt_length)), SamplingParams(**params), stop_ids=frozenset(stops),
                        max_seq_length=max_seq_length)
    sequence.slot = slot
    sequence.output_ids = list(drawn)
    return sequence


def logits_for(*tokens: int) -> torch.Tensor:
    """[B, V], whose largest in each row is the token's; then come the ids above it, and then those below."""
    order = torch.arange(VOCAB)
    return torch.stack([-((order - token) % VOCAB).float() for token in tokens])


def rows_of(state: DecodeState, row: int) -> tuple[int, ...]:
    """(id, position, slot) of a row."""
    return tuple(int(buffer[row]) for buffer in state.rows[:3])


def state_of(*sequences: Sequence, rows: int = 4, steps: int = 8) -> DecodeState:
    state = DecodeState(rows, steps, "cpu")
    state.fill(sequences, rows)
    return state


def step(state: DecodeState, *tokens: int) -> list[int]:
    """One step whose best logits are those of `tokens`; what the first rows drew."""
    count = len(state.rows.ids)
    return state.finish(logits_for(*tokens, *[5] * (count - len(tokens))), state.rows)[: len(tokens)].tolist()


# ---- what the host writes -----------------------------------------------------------------------------------------

def test_a_filled_row_is_the_last_token_of_its_sequence_and_the_others_are_padding():
    state = state_of(running(3, slot=2, drawn=[7, 9], max_new_tokens=6, min_new_tokens=4), rows=3)
    assert rows_of(state, 0) == (9, 4, 2)
    assert (state.rows.free_from[0].item(), state.rows.limit[0].item()) == (3 + 4, 3 + 6)
    assert rows_of(state, 1) == rows_of(state, 2) == (0, 0, 0)
    assert (state.rows.stop_ids[0] == STOP).all() and (state.rows.stop_ids[1:] == -1).all()


def test_a_smaller_batch_leaves_rows_beyond_it_alone_and_padding_of_an_earlier_batch_is_overwritten():
    state = state_of(*[running(3, slot=slot) for slot in (1, 2, 3, 4)])
    state.fill([running(5, slot=3)], 2)
    assert [rows_of(state, i)[2] for i in range(4)] == [3, 0, 3, 4]


def test_stop_ids_are_repeated_to_one_width_and_absent_where_none_are_active():
    assert padded_stop_ids(running(1, stops=(7, 3))) == [3, 7] * (MAX_STOP_IDS // 2)
    assert padded_stop_ids(running(1, stops=())) == padded_stop_ids(running(1, ignore_eos=True)) == [-1] * MAX_STOP_IDS
    assert set(padded_stop_ids(running(1, ignore_eos=True, stop_token_ids=(4,)))) == {4}
    assert padded_stop_ids(running(1, stops=range(20))) == list(range(MAX_STOP_IDS))


def test_buffers_stay_where_they_are():
    state = state_of(running(3))
    before = {name: buffer.data_ptr() for name, buffer in state.tensors().items()}
    for _ in range(3):
        step(state, 9)
        state.fill([running(4, slot=2)], 2)
    assert {name: buffer.data_ptr() for name, buffer in state.tensors().items()} == before
    assert all(part.data_ptr() == whole.data_ptr() and len(part) == 2 for part, whole in zip(state.upto(2), state.rows))


# ---- what a step does ---------------------------------------------------------------------------------------------

def test_a_row_moves_on_to_the_token_it_drew():
    state = state_of(running(3, slot=2))
    assert step(state, 9) == [9]
    assert rows_of(state, 0) == (9, 3, 2)
    assert step(state, 8) == [8]
    assert rows_of(state, 0) == (8, 4, 2)


@pytest.mark.parametrize("end", ["stop id", "length", "max_seq_length", "NaN"])
def test_a_row_that_ends_is_padding_and_its_neighbour_goes_on(end):
    limits = {"length": {"max_new_tokens": 1}, "max_seq_length": {"max_seq_length": 4}}.get(end, {})
    state = state_of(running(3, slot=1, **limits), running(6, slot=2))
    logits = logits_for(STOP if end == "stop id" else 9, 9, 5, 5)
    if end == "NaN":
        logits[0, 3] = float("nan")
    drawn = state.finish(logits, state.rows).tolist()
    assert drawn[:2] == [{"stop id": STOP, "NaN": NON_FINITE}.get(end, 9), 9]
    assert rows_of(state, 0) == (0, 0, 0), "slot 0 has the reserved page alone"
    assert rows_of(state, 1) == (9, 6, 2)
    for _ in range(5):
        step(state, 9, 9)
        assert rows_of(state, 0)[2] == 0
        assert 0 <= rows_of(state, 0)[0] < VOCAB


def test_a_padding_row_stays_at_position_0_of_slot_0():
    state = state_of(running(3), rows=2)
    for _ in range(6):
        step(state, 9, 7)
        assert rows_of(state, 1) == (0, 0, 0)


def test_a_stop_id_cannot_be_drawn_before_free_from_and_can_at_it():
    state = state_of(running(3, min_new_tokens=2))
    assert [step(state, STOP) for _ in range(3)] == [[STOP + 1], [STOP + 1], [STOP]]
    assert rows_of(state, 0) == (0, 0, 0)


def test_an_id_that_is_no_stop_of_its_own_request_ends_nothing():
    state = state_of(running(3, ignore_eos=True), running(3, slot=2, stops=(6,)))
    assert step(state, STOP, STOP) == [STOP, STOP]
    assert [rows_of(state, i)[2] for i in (0, 1)] == [1, 2]


# ---- what the host reads ------------------------------------------------------------------------------------------

def test_drawn_tokens_are_read_in_order_from_the_first_step_after_a_fill():
    state = state_of(running(3), running(4, slot=2), steps=4)
    for token in (9, 8, 7):
        step(state, token, token + 1)
    assert state.cursor.item() == 3
    assert state.read(2, 3) == [[9, 8, 7], [10, 9, 8]]
    state.fill([running(3)], 4)
    step(state, 11)
    assert state.read(1, 1) == [[11]]


def test_the_cursor_goes_round_after_the_last_step_so_that_captured_steps_may_run_for_ever():
    state = state_of(running(3), steps=3)
    for token in (9, 8, 7, 6):
        step(state, token)
    assert state.cursor.item() == 1
    assert state.read(1, 3) == [[6, 8, 7]]


@pytest.mark.parametrize("seed", range(40))
def test_rows_end_where_their_sequences_end_on_the_host(seed):
    """Random logits, limits, stops and minimums; the host appends what was drawn, and ends by its own rules."""
    rng = random.Random(seed)
    stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 3, 8])))
    sequences = []
    for slot in range(1, 5):
        most = rng.randrange(1, 9)
        sequences.append(running(rng.randrange(1, 6), slot=slot, stops=stops, max_seq_length=rng.choice([7, 10, 99]),
                                 max_new_tokens=most, min_new_tokens=rng.randrange(most + 1), ignore_eos=rng.random() < 0.2,
                                 stop_token_ids=tuple(rng.sample(range(VOCAB), rng.randrange(3)))))
    state = state_of(*sequences)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(8):
        logits = torch.randn(4, VOCAB, generator=generator)
        drawn = state.finish(logits, state.rows).tolist()
        for row, sequence in enumerate(sequences):
            if sequence.is_finished:
                assert rows_of(state, row)[2] == 0
                continue
            allowed = [i for i in range(VOCAB) if not sequence.bans_stops or i not in sequence.active_stop_ids]
            assert drawn[row] == max(allowed, key=lambda i: logits[row, i])
            sequence.append(drawn[row])
            wanted = (0, 0, 0) if sequence.is_finished else (drawn[row], sequence.num_tokens - 1, sequence.slot)
            assert rows_of(state, row) == wanted
