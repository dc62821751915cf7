"""Greedy drawing: the largest logit, the lowest id where they tie, never a banned id, a mark where logits broke."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex.sampling import NON_FINITE, draw

INF, NAN = float("inf"), float("nan")


def drawn(rows, ban=None, banned=None, dtype=torch.float32) -> list[int]:
    logits = torch.tensor(rows, dtype=dtype)
    ban = torch.tensor(ban or [False] * len(rows))
    return draw(logits, ban, torch.tensor(banned or [[0, 0]] * len(rows))).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype):
    assert drawn([[1, 3, 3, 2], [5, 5, 5, 5], [0, 1, 2, 30]], dtype=dtype) == [1, 0, 3]


def test_a_bf16_tie_is_a_tie_though_fp32_values_would_differ():
    assert drawn([[29.99, 30.0]], dtype=torch.bfloat16) == [0]
    assert drawn([[29.99, 30.0]]) == [1]


def test_only_rows_with_a_ban_lose_their_banned_ids():
    rows = [[1, 9, 8, 7]] * 4
    assert drawn(rows, [True, True, False, True], [[1, 1], [1, 2], [1, 2], [3, 3]]) == [2, 3, 1, 1]


def test_a_banned_id_is_not_drawn_even_where_all_others_are_lower():
    assert drawn([[-30, 30]], [True], [[1, 1]]) == [0]


@pytest.mark.parametrize("broken", [[NAN, 1.0], [1.0, NAN], [INF, 0.0], [-INF, -INF]])
def test_a_row_that_broke_is_marked_and_its_neighbours_are_drawn(broken):
    assert drawn([[0, 1], broken, [1, 0]]) == [1, NON_FINITE, 0]


def test_a_nan_under_a_ban_elsewhere_still_marks_the_row():
    assert drawn([[NAN, 1, 2]], [True], [[2, 2]]) == [NON_FINITE]


def test_logits_are_left_as_they_were():
    logits = torch.tensor([[1.0, 9.0]])
    draw(logits, torch.tensor([True]), torch.tensor([[1, 1]]))
    assert logits.tolist() == [[1.0, 9.0]]
