"""Spans become one flat batch whose rows find each token once, and padding that touches the reserved page alone."""

from __future__ import annotations

import random

import pytest
import torch

from gemma4_flex.params import SamplingParams
from gemma4_flex.prefill import Sizes, prefill_inputs, sizes_of
from gemma4_flex.scheduler import Span
from gemma4_flex.sequence import Sequence


def span(slot: int, length: int, start: int, count: int) -> Span:
    """A span of a sequence of `length` tokens, whose ids tell slot and position: 1000 * slot + position."""
    sequence = Sequence(slot, [1000 * slot + position for position in range(length)], SamplingParams(), stop_ids=frozenset(),
                        max_seq_length=999)
    sequence.slot = slot
    return Span(sequence, start, count)


def inputs(spans: list[Span], width: int, sizes: Sizes | None = None):
    return prefill_inputs(spans, sizes or sizes_of(spans, width), width, torch.arange(9), torch.device("cpu"))


def test_tokens_lie_one_span_after_another_and_rows_are_pieces_of_a_width():
    step = inputs([span(3, 9, 2, 5), span(1, 4, 0, 4)], width=4)
    assert step.ids.tolist() == [3002, 3003, 3004, 3005, 3006, 1000, 1001, 1002, 1003]
    assert step.positions.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert step.slots.tolist() == [3] * 5 + [1] * 4
    assert [step.rows.slots.tolist(), step.rows.first.tolist(), step.rows.count.tolist()] == [[3, 3, 1], [2, 6, 0], [4, 1, 4]]
    assert step.wanted.tolist() == [8], "the first span does not reach its sequence's end"
    assert [step.wanted_rows.slots.tolist(), step.wanted_rows.first.tolist(), step.wanted_rows.width] == [[1], [3], 1]


@pytest.mark.parametrize("seed", range(20))
def test_rows_split_and_join_every_token_to_its_own_place(seed):
    rng = random.Random(seed)
    spans = []
    for slot in rng.sample(range(1, 9), rng.randrange(1, 6)):
        start, count = rng.randrange(20), rng.randrange(1, 20)
        spans.append(span(slot, start + count + rng.choice([0, 3]), start, count))
    width = rng.choice([1, 4, 8])
    least = sizes_of(spans, width)
    sizes = Sizes(least.tokens + rng.randrange(5), least.rows + rng.randrange(4), least.wanted + rng.randrange(3))
    step = inputs(spans, width, sizes)
    assert (len(step.ids), len(step.rows.slots), len(step.wanted), len(step.wanted_rows.slots)) == (
        sizes.tokens, sizes.rows, sizes.wanted, sizes.wanted)
    x = torch.arange(1.0, 1 + sizes.tokens)[:, None, None]
    assert torch.equal(step.rows.join(step.rows.split(x))[: least.tokens], x[: least.tokens])
    for r, (slot, first, count) in enumerate(zip(*(part.tolist() for part in step.rows[:3]))):
        if slot:
            assert step.ids[step.rows.token_of[r, :count]].tolist() == [1000 * slot + first + j for j in range(count)]
    ends = [1000 * s.sequence.slot + s.sequence.num_tokens - 1 for s in spans if s.wants_logits]
    assert step.ids[step.wanted[: least.wanted]].tolist() == ends
    assert (1000 * step.wanted_rows.slots + step.wanted_rows.first)[: least.wanted].tolist() == ends
    for padding in (step.positions[least.tokens:], step.slots[least.tokens:], step.rows.slots[least.rows:],
                    step.wanted_rows.slots[least.wanted:], step.wanted_rows.first[least.wanted:]):
        assert not padding.any()
    assert step.rows.count.min() >= 1, "a row of padding has one query"


def test_no_spans_at_all_are_padding():
    step = inputs([], width=4, sizes=Sizes(5, 2, 1))
    assert not any(part.any() for part in (step.ids, step.positions, step.slots, step.rows.slots, step.wanted_rows.slots))
