"""A task for reinforcement learning on the bundled model: counting further than it was taught, judged by arithmetic.

`tiny` was taught to count over 3 to 8 numbers and mostly stops or stumbles at 9 and 10. No answers are shown to it here: it
samples, and arithmetic says how far each sample was right.
"""
from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq

LENGTHS = (9, 10)
LAST = 99
HELD_OUT = 32      # questions nobody trains on

REWARDS = {"in_order": 0.5, "exact": 0.5}      # by name of the function below, its weight


def questions(seed: int) -> tuple[list[dict], list[dict]]:
    """All questions in an order of this seed's, those to train on and those held out; the latter are the same for all seeds.
    Each is {"prompt": chat, "numbers": the right answer}."""
    every = [(first, length) for length in LENGTHS for first in range(LAST - length + 2)]
    random.Random(0).shuffle(every)
    held_out, train = every[:HELD_OUT], every[HELD_OUT:]
    random.Random(seed).shuffle(train)
    return [_question(*one) for one in train], [_question(*one) for one in held_out]


def _question(first: int, length: int) -> dict:
    numbers = list(range(first, first + length))
    return {"prompt": [{"role": "user", "content": f"Count from {numbers[0]} to {numbers[-1]}."}], "numbers": numbers}


def in_order(completions: Seq, numbers: Seq[Seq[int]], **_) -> list[float]:
    """Reward by sample: numbers right before the first wrong one, over the numbers wanted or given, whichever are more."""
    return [_share(text_of(completion), wanted) for completion, wanted in zip(completions, numbers)]


def exact(completions: Seq, numbers: Seq[Seq[int]], **_) -> list[float]:
    """Reward by sample: 1.0 where the text is the right answer word for word."""
    return [float(text_of(completion).strip() == answer(wanted)) for completion, wanted in zip(completions, numbers)]


def answer(numbers: Seq[int]) -> str:
    return ", ".join(map(str, numbers)) + "."


def text_of(completion: str | Seq[dict]) -> str:
    """What a trainer hands to a reward: a text, or a chat with the model's turn."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _share(text: str, wanted: Seq[int]) -> float:
    given = re.findall(r"\d+", text)
    right = next((i for i, (a, b) in enumerate(zip(given, wanted)) if a != str(b)), min(len(given), len(wanted)))
    return right / max(len(given), len(wanted))
