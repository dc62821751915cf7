"""What every engine is given alike: prompts as token ids, and how many tokens each is to be continued by."""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gemma4_flex.bench.roofline import Floor, decode_floor, prefill_floor

MIXED_PROMPT_TOKENS = (8, 256)       # lengths of the mixed job are drawn evenly from these, both ends included
MIXED_NEW_TOKENS = (8, 128)

Draw = Callable[[int, int], list[list[int]]]      # (how many, tokens each) to prompts, as `workload.random_prompts` makes them


@dataclass(frozen=True)
class Job:
    """Prompts that are continued by exactly `new_tokens` each, stop ids ignored, at most `max_batch` at once.

    `kind`: decode and mixed are rated by the tokens they make, prefill by the tokens it reads.
    """

    kind: str
    max_batch: int
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def name(self) -> str:
        n, batch = len(self.prompts), f"batch {self.max_batch}"
        longest = max(map(len, self.prompts))
        return {"decode": f"decode, {batch}", "prefill": f"prefill, {n} prompts of {longest:,} tokens",
                "mixed": f"mixed lengths, {n} requests, {batch}"}[self.kind]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, new tokens) of each request."""
        return [(len(prompt), new) for prompt, new in zip(self.prompts, self.new_tokens, strict=True)]

    @property
    def max_seq_length(self) -> int:
        return max(prompt + new for prompt, new in self.lengths)

    @property
    def rated_tokens(self) -> int:
        """The tokens whose number over the seconds is this job's throughput."""
        return sum(map(len, self.prompts)) if self.kind == "prefill" else sum(self.new_tokens)

    @property
    def passes(self) -> int:
        """The fewest passes over the weights: each gives a request at most one token, and at most `max_batch` requests one."""
        return max(max(self.new_tokens), -(-sum(self.new_tokens) // self.max_batch))

    def floor(self, geometry, *, bytes_per_element: int, bytes_per_s: float, flop_per_s: float = math.inf,
              weight_bytes: int | None = None) -> Floor:
        """The least that the job can take: the weights once a pass, prefill's included, and the K/V written by prefill and
        seen by decode; or all its arithmetic, where that takes longer. `weight_bytes`: a pass's, where the geometry alone does
        not tell."""
        rates = {"bytes_per_element": bytes_per_element, "bytes_per_s": bytes_per_s, "flop_per_s": flop_per_s,
                 "weight_bytes": weight_bytes}
        prefill = prefill_floor(geometry, map(len, self.prompts), **rates)
        decode = decode_floor(geometry, self.lengths, steps=self.passes, **rates)
        return replace(decode, kv_bytes=prefill.kv_bytes + decode.kv_bytes, flops=prefill.flops + decode.flops)


def decode_job(draw: Draw, *, batch: int, prompt_tokens: int, new_tokens: int) -> Job:
    """Short prompts of one length, so that nobody has to pad, and many new tokens."""
    return Job("decode", batch, _frozen(draw(batch, prompt_tokens)), (new_tokens,) * batch)


def prefill_job(draw: Draw, *, prompts: int, prompt_tokens: int) -> Job:
    """Long prompts of one length, all at once, and the one token that a prefill gives."""
    return Job("prefill", prompts, _frozen(draw(prompts, prompt_tokens)), (1,) * prompts)


def mixed_job(draw: Draw, *, requests: int, max_batch: int, seed: int) -> Job:
    """Requests whose prompts and outputs all have lengths of their own, to be served as one job."""
    rng = random.Random(seed)
    drawn = draw(requests, MIXED_PROMPT_TOKENS[1])
    prompts = [prompt[: rng.randint(*MIXED_PROMPT_TOKENS)] for prompt in drawn]
    return Job("mixed", max_batch, _frozen(prompts), tuple(rng.randint(*MIXED_NEW_TOKENS) for _ in prompts))


def _frozen(prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(prompt) for prompt in prompts)
