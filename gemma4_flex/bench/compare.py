"""Engines taken in turn on one job, and their rounds set side by side pair by pair."""
from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch

from gemma4_flex.bench.job import Job
from gemma4_flex.bench.measure import Summary, summarize, timed
from gemma4_flex.bench.rival import AbsentError, FalseClaimError, Rival, Setting, compile_counts
from gemma4_flex.bench.rivals import TRANSFORMERS_MODES

OURS = "flex"
RAN, ABSENT, DOES_NOT_RUN, ERROR = "ran", "absent", "does not run", "error"


class WrongTokensError(RuntimeError):
    """An engine gave another number of tokens than it was asked for: its seconds are no measure of the job."""


@dataclass(frozen=True)
class Turn:
    """One run of a job by one engine; `load` is the machine's load average of the last minute, right after it."""

    seconds: float
    load: float


@dataclass
class Row:
    """One engine on one job. `warmup` holds the turns that don't count, compile and capture in them or in `setup_s`."""

    name: str
    status: str = RAN
    reason: str = ""
    setup_s: float = 0.0
    warmup: list[Turn] = field(default_factory=list)
    rounds: list[Turn] = field(default_factory=list)
    tokens: list[list[int]] | None = None      # of the first turn
    same_every_turn: bool = True
    account: dict = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return self.status == RAN


@dataclass(frozen=True)
class Clock:
    """How a turn is timed."""

    synchronize: Callable[[], None]
    now: Callable[[], float] = time.perf_counter
    load: Callable[[], float] = lambda: os.getloadavg()[0]


def compare(job: Job, engines: Sequence[type[Rival]], setting: Setting, *, rounds: int, warmup: int, clock: Clock,
            on_turn: Callable[[], None] = lambda: None) -> list[Row]:
    """A row an engine, in their order. Each is made ready and warmed up; then `rounds` rounds go A B C, A B C.

    An engine that is absent, fails, or does not do what it was asked gets a row that says so, without figures.
    """
    torch._dynamo.reset()      # nobody inherits the shapes, or the spent recompiles, of an earlier job
    gc.collect()               # nor its memory
    rows = [Row(engine.name) for engine in engines]
    ready: dict[str, Rival] = {}
    for row, engine in zip(rows, engines):
        with _failures_of(row, DOES_NOT_RUN):
            ready[row.name], row.setup_s = timed(lambda: engine(setting, job), synchronize=clock.synchronize, clock=clock.now)
            for _ in range(warmup):
                row.warmup.append(_turn(row, ready[row.name], job, clock))
                on_turn()
            ready[row.name].warmed_up()
        _drop_failed(row, ready)
    for _ in range(rounds):
        for row in rows:
            if row.ran:
                with _failures_of(row, ERROR):
                    row.rounds.append(_measured_turn(row, ready[row.name], job, clock))
                _drop_failed(row, ready)
                on_turn()
    for row in rows:
        if row.ran:
            with _failures_of(row, ERROR):
                row.account = ready[row.name].account()
            _free(ready.pop(row.name))
    return rows


def _measured_turn(row: Row, rival: Rival, job: Job, clock: Clock) -> Turn:
    """A turn that counts: FalseClaimError where torch.compile was at work in it."""
    before = compile_counts()["graphs"]
    turn = _turn(row, rival, job, clock)
    if made := compile_counts()["graphs"] - before:
        raise FalseClaimError(f"{made} graphs were compiled inside a measured round: give it more --warmup")
    return turn


def _turn(row: Row, rival: Rival, job: Job, clock: Clock) -> Turn:
    """One run, timed, its tokens counted."""
    tokens, seconds = timed(rival.run, synchronize=clock.synchronize, clock=clock.now)
    check_tokens(tokens, job)
    row.same_every_turn &= row.tokens in (None, tokens)
    row.tokens = row.tokens or tokens
    return Turn(seconds, clock.load())


def check_tokens(tokens: Sequence[Sequence[int]], job: Job) -> None:
    """Raises WrongTokensError unless every request got exactly the tokens it asked for."""
    if len(tokens) != len(job.prompts):
        raise WrongTokensError(f"gave answers to {len(tokens)} of {len(job.prompts)} requests")
    for request, (got, wanted) in enumerate(zip(tokens, job.new_tokens)):
        if len(got) != wanted:
            raise WrongTokensError(f"gave {len(got)} tokens where request {request} asked for {wanted}")


@contextmanager
def _failures_of(row: Row, status: str) -> Iterator[None]:
    """Turn what goes wrong inside into the row's status and reason: one engine's failure is not the comparison's."""
    try:
        yield
    except AbsentError as error:
        row.status, row.reason = ABSENT, str(error)
    except (FalseClaimError, WrongTokensError) as error:
        row.status, row.reason = ERROR, str(error)
    except Exception as error:
        row.status, row.reason = status, f"{type(error).__name__}: {_first_sentence(error)}"


def _first_sentence(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return text.partition(". ")[0].rstrip(".")


def _drop_failed(row: Row, ready: dict[str, Rival]) -> None:
    """Free what a failed engine holds before the next is made."""
    if not row.ran and row.name in ready:
        _free(ready.pop(row.name))


def _free(rival: Rival) -> None:
    with suppress(Exception):      # its figures stand, or its failure is told already
        rival.close()


# --- what the rounds say ----------------------------------------------------------------------------------------------

def throughput(row: Row, job: Job) -> Summary | None:
    """Tokens a second over the measured rounds; None for an engine that did not run."""
    return summarize([job.rated_tokens / turn.seconds for turn in row.rounds]) if row.ran else None


def ratios(ours: Row, theirs: Row) -> list[float]:
    """How many times as fast as theirs ours was, round i against round i."""
    return [b.seconds / a.seconds for a, b in zip(ours.rounds, theirs.rounds, strict=True)]


def best_of_transformers(rows: Sequence[Row], job: Job) -> Row | None:
    """transformers' fastest mode by its median, None where none of them ran."""
    modes = [row for row in rows if row.name in TRANSFORMERS_MODES and row.ran and row.rounds]
    return max(modes, key=lambda row: throughput(row, job).median, default=None)


def agreement(row: Row, reference: Row) -> dict:
    """How many requests got the reference's greedy tokens, and where the first that did not parts from it."""
    pairs = list(zip(row.tokens, reference.tokens, strict=True))
    parted = [(request, next(i for i, (a, b) in enumerate(zip(*pair)) if a != b))
              for request, pair in enumerate(pairs) if pair[0] != pair[1]]
    first = {"request": parted[0][0], "token": parted[0][1]} if parted else None
    return {"against": reference.name, "requests": len(pairs), "same": len(pairs) - len(parted), "first_parting": first}
