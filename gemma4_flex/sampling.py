"""Logits to token ids, on the device. Greedy: a step draws the id of the largest logit, the lowest id where they tie."""
from __future__ import annotations

import torch
from torch import Tensor

NON_FINITE = -1     # drawn instead of an id where a row's logits hold NaN or +inf: the request ends, its neighbours do not


def draw(logits: Tensor, ban: Tensor, banned_ids: Tensor) -> Tensor:
    """Token ids [B] (int64) from logits [B, V]; rows with `ban` [B] set cannot draw their `banned_ids` [B, K], none of which
    a row of -1 has.

    Ties and comparison are in fp32, as `transformers` generate does after its own cast. NON_FINITE marks a broken row.
    """
    scores = logits.float()
    index = banned_ids.clamp(min=0)
    held = scores.gather(1, index)
    scores = scores.scatter(1, index, torch.where(ban[:, None] & (banned_ids >= 0), -torch.inf, held))
    best, ids = scores.max(dim=-1)
    return torch.where(torch.isfinite(best), ids, NON_FINITE)
