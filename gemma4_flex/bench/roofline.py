"""What a decode step can cost at best: the bytes it must read over the bandwidth this machine gives, in this run."""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch

from gemma4_flex.bench.measure import synchronizer, timed

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}   # past any cache, so that memory itself is measured


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second that a copy moves (read and written ones both count), the best of `repeats` passes."""

    bytes_per_s: float
    buffer_bytes: int
    repeats: int


def copy_bandwidth(device_type: str, *, buffer_bytes: int | None = None, repeats: int = 7,
                   synchronize: Callable[[], None] | None = None,
                   clock: Callable[[], float] = time.perf_counter) -> Bandwidth:
    """Bandwidth of copying one buffer to another on `device_type`, with the threads PyTorch has now.

    The best pass counts: a floor built on a disturbed pass would flatter what is compared with it.
    """
    size = buffer_bytes or BUFFER_BYTES[device_type]
    wait = synchronize or synchronizer(device_type)
    source = torch.ones(size, dtype=torch.uint8, device=device_type)
    target = torch.zeros_like(source).fill_(2)     # written once, so that no pass pays for mapping its pages
    target.copy_(source)
    best = min(timed(lambda: target.copy_(source), synchronize=wait, clock=clock)[1] for _ in range(repeats))
    return Bandwidth(2 * size / best, size, repeats)


@dataclass(frozen=True)
class DecodeFloor:
    """The least that `steps` decode steps can take. `kv_bytes` is over all of them; `weight_bytes` is one step's."""

    weight_bytes: int
    kv_bytes: int
    steps: int
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return (self.steps * self.weight_bytes + self.kv_bytes) / self.bytes_per_s

    @property
    def ms_per_step(self) -> float | None:
        return 1e3 * self.seconds / self.steps if self.steps else None

    def fraction(self, decode_s: float) -> float | None:
        """Share of the floor reached: 1.0 is as fast as memory allows."""
        return self.seconds / decode_s if decode_s else None


def decode_floor(geometry, lengths: Iterable[tuple[int, int]], *, steps: int, bytes_per_element: int,
                 bytes_per_s: float, weight_bytes: int | None = None) -> DecodeFloor:
    """The floor of the decode steps that made `lengths`, pairs of (prompt tokens, output tokens) a request.

    A step reads every weight but the PLE table once, whatever the batch, and each owner layer's K/V in view once (a
    shared layer's second read of it may come from a cache, so the floor leaves it out). The first output token comes
    from the prefill; output token j+1 is drawn from a step that sees prompt + j tokens. `weight_bytes` is what a step reads
    where not every weight has `bytes_per_element`.
    """
    lengths = list(lengths)
    longest = max((prompt + output for prompt, output in lengths), default=0)
    view = [geometry.kv_cache_bytes(tokens, bytes_per_element) for tokens in range(longest + 1)]
    upto = list(accumulate(view, initial=0))       # upto[t] = bytes of views of fewer than t tokens, added up
    kv_bytes = sum(upto[prompt + output] - upto[prompt + 1] for prompt, output in lengths if output > 1)
    weights = geometry.step_weight_bytes(bytes_per_element) if weight_bytes is None else weight_bytes
    return DecodeFloor(weights, kv_bytes, steps, bytes_per_s)
