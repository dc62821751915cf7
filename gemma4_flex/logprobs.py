"""Log-probabilities of tokens as callers get them. Host only.

*Raw* ones are of the model: the log-softmax, in fp32, of its logits after the softcap, as a trainer's forward gives them.
*Processed* ones are of the distribution a token was drawn from: after penalties, bias, bans, temperature and filters,
renormalised; a greedy draw has 0.0, since nothing else could have come.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class TokenLogprob(NamedTuple):
    """Of one token. top: (id, raw log-probability) of the likeliest ids, best first. raw and processed are None for a prompt's
    first token, which nothing comes before; processed for all of a prompt's, which nobody drew."""
    raw: float | None
    processed: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Logprobs:
    """Of a text, one entry a token; `top` holds as many alternatives as were asked for."""
    raw: list[float | None] = field(default_factory=list)
    processed: list[float | None] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def append(self, token: TokenLogprob, num_top: int) -> None:
        self.raw.append(token.raw)
        self.processed.append(token.processed)
        self.top.append(token.top[:num_top])
