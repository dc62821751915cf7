"""Rounds after a warm-up, timed with the device waited for; medians with their spread; peak memory."""
from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_ROUNDS = 3          # fewer say nothing of the spread, so their medians are never ranked
MIN_COVERAGE = 0.5      # share of the waited-for wall time that the engine's own timers must account for
COUNTERS = ("prefill_tokens", "decode_tokens", "prefill_s", "decode_s", "steps_replayed", "steps_eager",
            "num_preemptions", "compile_s", "capture_s")


class MeasurementError(RuntimeError):
    """Times that contradict each other: no figure may be quoted from them."""


def synchronizer(device_type: str) -> Callable[[], None]:
    """What waits until the device has done all it was given: a kernel launch returns before its kernel ran (B130)."""
    return torch.cuda.synchronize if device_type == "cuda" else lambda: None


def timed(work: Callable[[], object], *, synchronize: Callable[[], None],
          clock: Callable[[], float] = time.perf_counter) -> tuple[object, float]:
    """What `work` returns, and the seconds until the device had finished it; earlier work is not counted."""
    synchronize()
    start = clock()
    value = work()
    synchronize()
    return value, clock() - start


def peak_memory_bytes(device_type: str) -> int:
    """Most memory this process has held so far, loading included: allocated on the GPU, or resident on a CPU.

    `resource.getrusage` tells kilobytes on Linux and bytes on macOS.
    """
    if device_type == "cuda":
        return torch.cuda.max_memory_allocated()
    import resource  # Windows has none, and this branch only matters elsewhere

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Summary:
    """Median of some figures and how far they lie apart; `n` figures."""

    median: float
    low: float
    high: float
    n: int

    @property
    def relative(self) -> float:
        """(high - low) / median."""
        return (self.high - self.low) / self.median if self.median else 0.0

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "min": self.low, "max": self.high, "relative": self.relative, "n": self.n}


def summarize(values: Sequence[float | None]) -> Summary | None:
    """Summary of the figures that exist; None when there are none (no decode step was run, say)."""
    known = [value for value in values if value is not None]
    return Summary(statistics.median(known), min(known), max(known), len(known)) if known else None


@dataclass(frozen=True)
class Round:
    """One pass over all prompts. Tokens are those the device computed: a preempted request's prefill counts again."""

    prefill_tokens: int
    decode_tokens: int
    prefill_s: float
    decode_s: float
    wall_s: float
    steps_replayed: int
    steps_eager: int
    num_preemptions: int
    compile_s: float
    capture_s: float
    ttft_ms: tuple[float, ...]

    @property
    def steps(self) -> int:
        return self.steps_replayed + self.steps_eager

    @property
    def prefill_tps(self) -> float | None:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_tps(self) -> float | None:
        return self.decode_tokens / self.decode_s if self.decode_s else None

    @property
    def ms_per_step(self) -> float | None:
        return 1e3 * self.decode_s / self.steps if self.steps else None

    def check(self) -> None:
        """Raise MeasurementError when the engine's timers disagree with the wall clock that waited for the device."""
        inside = self.prefill_s + self.decode_s + self.compile_s + self.capture_s
        if inside > 1.05 * self.wall_s:
            raise MeasurementError(
                f"the engine's timers add up to {inside:.3f} s in a round that took {self.wall_s:.3f} s")
        if inside < MIN_COVERAGE * self.wall_s:
            raise MeasurementError(
                f"the engine's timers account for {inside:.3f} s of a round of {self.wall_s:.3f} s: "
                "they don't wait for the device")


@dataclass(frozen=True)
class Measurement:
    """Everything the rounds gave. `completions` are the last round's, in the order of the prompts."""

    warmup: tuple[Round, ...]
    rounds: tuple[Round, ...]
    completions: tuple
    token_agreement: float     # share of prompts whose tokens were the same in every measured round


def measure_rounds(engine, prompts: Sequence[Sequence[int]], params, *, n_rounds: int, n_warmup: int = 1,
                   synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter,
                   before_round: Callable[[], None] = lambda: None,
                   on_round: Callable[[Round], None] = lambda round: None) -> Measurement:
    """Generate for all `prompts` `n_warmup` + `n_rounds` times; the warm-up compiles and captures and is kept apart.

    `before_round` is called before each round, off the clock, and `on_round` after it. Raises MeasurementError when a
    measured round's times contradict each other.
    """
    warmup, rounds, tokens, completions = [], [], [], []
    for number in range(n_warmup + n_rounds):
        before_round()
        before, served = _counters(engine.stats), len(engine.stats.ttft_ms)
        completions, wall_s = timed(lambda: engine.generate(prompts, params), synchronize=synchronize, clock=clock)
        counted = {name: after - before[name] for name, after in _counters(engine.stats).items()}
        done = Round(**counted, wall_s=wall_s, ttft_ms=tuple(engine.stats.ttft_ms[served:]))
        if number < n_warmup:
            warmup.append(done)
        else:
            done.check()
            rounds.append(done)
            tokens.append([list(c.token_ids) for c in completions])
        on_round(done)
    same = [all(ids == first for ids in others) for first, *others in zip(*tokens, strict=True)]
    return Measurement(tuple(warmup), tuple(rounds), tuple(completions), sum(same) / len(same))


def _counters(stats) -> dict[str, float]:
    return {name: getattr(stats, name) for name in COUNTERS}
