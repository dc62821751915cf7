"""Logits to token ids, on the device: what transformers' processors do, in their order, and draws that a seed alone decides.

    bias, bans  ->  repetition penalty  ->  presence and frequency penalty  ->  held-back stop ids
    ->  temperature  ->  top_k  ->  top_p  ->  min_p  ->  draw

Each filter sees the distribution that the one before it left, renormalised: top_p is a share of what top_k kept. A draw adds
Gumbel noise and takes the largest, so that a row's token depends on its own logits and on (seed, sample, position) alone;
the noise is Philox4x32-10, a counter hashed by a key, and has no state. Temperature 0 takes the largest, the lowest id of
equals, without noise.

B: rows, V: vocabulary, S: held-back ids a row, A: alternatives a row.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gemma4_flex.draws import GREEDY, WORD, Draws, Features

NON_FINITE = -1     # drawn instead of an id where a row's logits hold NaN or +inf: the request ends, its neighbours do not
COLDEST = 1e-6      # temperatures below it are taken for it, so that no score overflows
PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_STEPS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10


def draw(logits: Tensor, ban: Tensor, banned_ids: Tensor, positions: Tensor, draws: Draws | None = None,
         features: Features = GREEDY) -> tuple[Tensor, Tensor | None]:
    """Token ids [B] (int64) from logits [B, V]; and, with `features.logprobs`, their log-probabilities [B, 2], raw and
    processed (logprobs.py), else None.

    Rows with `ban` [B] set cannot draw their `banned_ids` [B, S], none of which a row of -1 has. `positions` [B] are those of
    the drawn tokens. `draws` is what each row asks, as far as `features` say that some row asks it. NON_FINITE marks a broken
    row.
    """
    raw = logits.float()
    scores = allowed(raw, ban, banned_ids, draws, features)
    ids = scores.argmax(dim=-1)
    if features.random:
        greedy = draws.temperature == 0
        scores = tempered(scores, draws, features)
        noise = gumbel(draws.seed_low, draws.seed_high, draws.sample, positions, scores.shape[-1])
        ids = torch.where(greedy, ids, (scores + noise).argmax(dim=-1))
    logprobs = None
    if features.logprobs:
        chosen = ids[:, None]
        processed = torch.zeros_like(raw[:, :1])
        if features.random:
            processed = torch.where(greedy[:, None], 0.0, token_logprobs(scores, chosen))
        logprobs = torch.cat([token_logprobs(raw, chosen), processed], dim=1)
    return torch.where(torch.isfinite(raw.amax(dim=-1)), ids, NON_FINITE), logprobs      # the model's own numbers


def allowed(scores: Tensor, ban: Tensor, banned_ids: Tensor, draws: Draws | None, features: Features) -> Tensor:
    """Logits [B, V] (fp32) with bias and penalties, and -inf where an id may not be drawn."""
    if features.edits:
        scores = penalised(scores + draws.bias, draws)
    return _hold_back(scores, ban, banned_ids)


def tempered(scores: Tensor, draws: Draws, features: Features) -> Tensor:
    """The scores [B, V] to draw from, whose softmax is the distribution: over the temperature, and -inf for what top_k, top_p
    and min_p leave out. Of greedy rows nothing but the largest means anything."""
    scores = scores / torch.where(draws.temperature == 0, 1.0, draws.temperature.clamp(min=COLDEST))[:, None]
    if features.width:
        scores = keep_top(scores, draws.top_k, draws.top_p, min(features.width, scores.shape[-1]))
    return keep_likely(scores, draws.min_p)


def alternatives(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest ids of each row and their raw log-probabilities, best first: [B, A] each."""
    values, ids = logits.float().log_softmax(-1).topk(count, dim=-1)
    return ids, values


def token_logprobs(scores: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [B, A] of `ids` [B, A] under scores [B, V] (fp32). The largest score is taken off first: near 30 a
    logit's own grain is 2e-6."""
    return scores.log_softmax(-1).gather(1, ids)


def _hold_back(scores: Tensor, ban: Tensor, ids: Tensor) -> Tensor:
    index = ids.clamp(min=0)
    held = scores.gather(1, index)
    return scores.scatter(1, index, torch.where(ban[:, None] & (ids >= 0), -torch.inf, held))


def penalised(scores: Tensor, draws: Draws) -> Tensor:
    """Scores of tokens in prompt or output divided by the repetition penalty where positive and multiplied where negative
    (RepetitionPenaltyLogitsProcessor); then, for each generated token, less the presence penalty once and the frequency
    penalty as often as it occurs. `draws.history` is as `DrawTable` keeps it."""
    occurrences = draws.history >> 1
    factor = torch.where(draws.history > 0, draws.repetition[:, None], 1.0)
    scores = torch.where(scores < 0, scores * factor, scores / factor)
    return scores - (occurrences > 0) * draws.presence[:, None] - occurrences * draws.frequency[:, None]


def keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> Tensor:
    """`scores` [B, V] with all but the top_k [B] largest (0: all; equals of the last stay) and then all but the fewest of
    those whose probabilities reach top_p [B] set to -inf; of equals at that edge the highest ids stay (TopKLogitsWarper,
    TopPLogitsWarper). At least one stays.

    `width`: how many of the largest are sorted. It must reach every top_k, and be V where a row has a top_p without a top_k;
    where more than `width` are equals of the last of top_k, all of them stay.
    """
    top = scores.topk(width, dim=-1).values
    last = top.gather(1, (top_k.clamp(min=1, max=width) - 1)[:, None])
    last = torch.where((top_k > 0)[:, None], last, -torch.inf)
    kept = torch.where(scores < last, -torch.inf, scores)
    mass = torch.where(top < last, 0.0, (top - kept.logsumexp(-1, keepdim=True)).exp())
    count = ((mass.cumsum(-1) - mass < top_p[:, None]) & (mass > 0)).sum(-1, keepdim=True).clamp(min=1)
    edge = top.gather(1, count - 1)
    at_edge = kept == edge
    spare = count - (top > edge).sum(-1, keepdim=True)                              # equals at the edge that stay
    from_right = at_edge.sum(-1, keepdim=True) - at_edge.cumsum(-1) + 1
    inside = (kept > edge) | (at_edge & ((from_right <= spare) | ((count == width) & (width < scores.shape[-1]))))
    return torch.where((top_p < 1)[:, None] & ~inside, -torch.inf, kept)


def keep_likely(scores: Tensor, min_p: Tensor) -> Tensor:
    """`scores` with what is less likely than min_p [B] times the likeliest set to -inf (MinPLogitsWarper)."""
    floor = scores.amax(-1, keepdim=True) + min_p.log()[:, None]
    return torch.where(scores < floor, -torch.inf, scores)


# ---- noise ----------------------------------------------------------------------------------------------------------

def gumbel(seed_low: Tensor, seed_high: Tensor, sample: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [B, V] (fp32) that (seed, sample, position, id) decide; all given [B] (int64).

    -log of an exponential variate: small ones, which win, keep their precision in fp32.
    """
    blocks = torch.arange(-(-vocab_size // 4), device=positions.device)[None]
    words = philox((blocks, positions[:, None], sample[:, None], torch.zeros_like(blocks)), (seed_low[:, None], seed_high[:, None]))
    bits = torch.cat(words, dim=1)[:, :vocab_size]
    uniform = ((bits.float() + 0.5) * 2.0 ** -32).clamp(max=1 - 2.0 ** -24)      # never 1: every score stays finite
    return -torch.log(-torch.log1p(-uniform))


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011): four 32-bit words for each counter
    of four under a key of two, all as int64 tensors that broadcast."""
    a, b, c, d = counter
    low, high = key
    for _ in range(PHILOX_ROUNDS):
        one, other = PHILOX_FACTORS[0] * a, PHILOX_FACTORS[1] * c      # 64 bits, whatever their sign is taken for
        a, b, c, d = ((other >> 32) & WORD) ^ b ^ low, other & WORD, ((one >> 32) & WORD) ^ d ^ high, one & WORD
        low, high = (low + PHILOX_STEPS[0]) & WORD, (high + PHILOX_STEPS[1]) & WORD
    return list(torch.broadcast_tensors(a, b, c, d))
