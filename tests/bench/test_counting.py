"""The task of the reinforcement learning demo: questions, what is held out, and rewards by arithmetic."""
from __future__ import annotations

import pytest

from gemma4_flex.bench.counting import HELD_OUT, LENGTHS, answer, exact, in_order, questions

RIGHT = list(range(97, 100))


def test_held_out_questions_are_nobodys_training_and_the_same_for_every_seed():
    (train, held_out), (other, same) = questions(0), questions(1)
    assert held_out == same and len(held_out) == HELD_OUT
    assert train != other and sorted(map(str, train)) == sorted(map(str, other))
    assert not {str(q) for q in held_out} & {str(q) for q in train}
    assert len(train) + len(held_out) == sum(101 - length for length in LENGTHS)


def test_a_question_asks_for_what_its_answer_counts():
    train, held_out = questions(0)
    for question in train + held_out:
        numbers = question["numbers"]
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) in LENGTHS and numbers[-1] <= 99
        assert question["prompt"][0]["content"] == f"Count from {numbers[0]} to {numbers[-1]}."


def test_the_bundled_model_was_taught_no_question_of_this_length():
    from pathlib import Path
    text = Path(__file__).parents[2] / "scripts" / "tiny_text.py"
    assert "b = a + rng.randrange(2, 8)" in text.read_text()      # 3 to 8 numbers
    assert min(LENGTHS) > 8


@pytest.mark.parametrize("text, share, right", [
    ("97, 98, 99.", 1.0, 1.0), ("97, 98, 99", 1.0, 0.0), ("97, 98.", 2 / 3, 0.0), ("97, 98, 99, 100.", 3 / 4, 0.0),
    ("97, 99, 98.", 1 / 3, 0.0), ("98, 99.", 0.0, 0.0), ("", 0.0, 0.0), ("no numbers", 0.0, 0.0), ("097, 98, 99.", 0.0, 0.0),
    ("97, 98, " + "9" * 5000, 2 / 3, 0.0)])      # an int of 5,000 digits would be refused by Python
def test_rewards(text, share, right):
    chat = [{"role": "assistant", "content": text}]
    assert in_order([text, chat], numbers=[RIGHT, RIGHT]) == [pytest.approx(share)] * 2
    assert exact([text, chat], numbers=[RIGHT, RIGHT], prompts=None, trainer_state=None) == [right] * 2


def test_the_answer_is_what_the_bundled_model_was_taught_to_write():
    assert answer([3, 4, 5]) == "3, 4, 5."
