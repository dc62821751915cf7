"""What work can cost at best: bytes over the copy bandwidth, or arithmetic over the matmul rate, both measured in this run."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from gemma4_flex.bench.measure import synchronizer, timed
from gemma4_flex.geometry import LayerGeometry, ModelGeometry

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}              # past any cache, so that memory itself is measured
MATMUL_SIZES = {"cpu": (512, 1024), "cuda": (4096, 8192)}       # large enough to keep every core busy, whichever suits the cache


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
class MatmulRate:
    """Operations a second of a matmul (a multiplication and an addition are two), the best of `repeats` at each of `sizes`."""

    flop_per_s: float
    dtype: str
    sizes: tuple[int, ...]
    repeats: int


@torch.no_grad()
def matmul_rate(device_type: str, dtype: str, *, sizes: tuple[int, ...] | None = None, repeats: int = 7,
                synchronize: Callable[[], None] | None = None,
                clock: Callable[[], float] = time.perf_counter) -> MatmulRate:
    """Rate of a square linear in `dtype` on `device_type`, with the threads PyTorch has now. The best pass counts."""
    sizes, wait, rates = sizes or MATMUL_SIZES[device_type], synchronize or synchronizer(device_type), []
    for size in sizes:
        # no zeros: a GPU draws less power for them, and then runs faster
        rows, weight = torch.randn(2, size, size, device=device_type).to(getattr(torch, dtype))
        F.linear(rows, weight)
        best = min(timed(lambda: F.linear(rows, weight), synchronize=wait, clock=clock)[1] for _ in range(repeats))
        rates.append(2 * size ** 3 / best)
    return MatmulRate(max(rates), dtype, sizes, repeats)


# ---- floors ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Floor:
    """The least that `steps` passes over the weights can take: `weight_bytes` is one pass's, all else is over all of them.

    A floor without a matmul rate is memory's alone.
    """

    weight_bytes: int
    kv_bytes: int
    steps: int
    bytes_per_s: float
    flops: int = 0
    flop_per_s: float = math.inf

    @property
    def memory_s(self) -> float:
        return (self.steps * self.weight_bytes + self.kv_bytes) / self.bytes_per_s

    @property
    def arithmetic_s(self) -> float:
        return self.flops / self.flop_per_s

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.arithmetic_s)

    @property
    def bound(self) -> str:
        """Which of the two it is."""
        return "arithmetic" if self.arithmetic_s > self.memory_s else "memory"

    @property
    def ms_per_step(self) -> float | None:
        return 1e3 * self.seconds / self.steps if self.steps else None

    def fraction(self, seconds: float) -> float | None:
        """Share of the floor reached by work that took so long: 1.0 is as fast as the machine allows."""
        return self.seconds / seconds if seconds else None


def decode_floor(geometry: ModelGeometry, lengths: Iterable[tuple[int, int]], *, steps: int, bytes_per_element: int,
                 bytes_per_s: float, flop_per_s: float = math.inf, weight_bytes: int | None = None) -> Floor:
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
    return Floor(weights, kv_bytes, steps, bytes_per_s, decode_flops(geometry, lengths), flop_per_s)


def prefill_floor(geometry: ModelGeometry, prompts: Iterable[int], *, bytes_per_element: int, bytes_per_s: float,
                  flop_per_s: float = math.inf, passes: int = 1, weight_bytes: int | None = None) -> Floor:
    """The floor of computing `prompts`, token counts, up to each one's first new token, with the shared-layer shortcut.

    Each pass reads the weights once; what has to be kept of the K/V is written once. `passes` is the fewest there can be.
    """
    prompts = list(prompts)
    kv_bytes = sum(geometry.kv_cache_bytes(tokens, bytes_per_element) for tokens in prompts)
    weights = geometry.step_weight_bytes(bytes_per_element) if weight_bytes is None else weight_bytes
    return Floor(weights, kv_bytes, passes, bytes_per_s, prefill_flops(geometry, prompts), flop_per_s)


# ---- arithmetic -----------------------------------------------------------------------------------------------------

def prefill_flops(geometry: ModelGeometry, prompts: Iterable[int]) -> int:
    """Operations of the matmuls and attention that prefill takes: owner layers for every token, the layers that only read
    K/V and the head for each prompt's last one. Norms, softmax and the like are not counted."""
    owners = sum(_linear_flops(geometry, layer) for layer in geometry.layers if layer.owns_kv)
    total = 0
    for tokens in prompts:
        total += (tokens - 1) * owners + _token_flops(geometry)
        total += sum(_attention_flops(layer, 0 if layer.owns_kv else tokens - 1, tokens) for layer in geometry.layers)
    return total


def decode_flops(geometry: ModelGeometry, lengths: Iterable[tuple[int, int]]) -> int:
    """Operations of the decode steps that made `lengths`, as `decode_floor` takes them."""
    total = 0
    for prompt, output in lengths:
        if output > 1:
            total += (output - 1) * _token_flops(geometry)
            total += sum(_attention_flops(layer, prompt, prompt + output - 1) for layer in geometry.layers)
    return total


def _linear_flops(geometry: ModelGeometry, layer: LayerGeometry) -> int:
    """Of one token through a layer's linears, its rows of the PLE projection in the prelude included."""
    hidden, ple = geometry.hidden_size, geometry.ple_width
    q, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    widths = 2 * q + 2 * kv * layer.owns_kv + 3 * layer.mlp_width + 3 * ple
    return 2 * hidden * widths


def _token_flops(geometry: ModelGeometry) -> int:
    """Of one token through the linears of every layer and the head."""
    return sum(_linear_flops(geometry, layer) for layer in geometry.layers) + 2 * geometry.hidden_size * geometry.vocab_size


def _attention_flops(layer: LayerGeometry, first: int, end: int) -> int:
    """Of the queries at positions `first` up to, not including, `end`: scores, and values weighed by them."""
    def keys(queries: int) -> int:      # seen by the first so many, each of which sees itself and up to window - 1 before it
        near = queries if layer.window is None else min(queries, layer.window)
        return near * (near + 1) // 2 + (queries - near) * near
    return 4 * layer.num_heads * layer.head_dim * (keys(end) - keys(first))
