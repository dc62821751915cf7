"""What planning a step costs the host: scheduler and page tables alone, with no tensor in sight."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from gemma4_flex.page_table import PageTable, sliding_pool_pages
from gemma4_flex.params import SamplingParams
from gemma4_flex.scheduler import Scheduler
from gemma4_flex.sequence import Sequence

WINDOW, PAGE_SIZE, PREFILL = 512, 128, 2048      # E2B's and E4B's window, and a GPU's pages


@dataclass(frozen=True)
class HostCost:
    """Microseconds a decode step costs the host: the mean, page crossings and all, and what 99 of 100 steps stay below."""
    mean_us: float
    p99_us: float


def decoding_scheduler(running: int, *, context: int, room: int) -> tuple[Scheduler, list[PageTable]]:
    """A scheduler with `running` sequences in decode, of about `context` tokens and at least `room` to go, and its tables.

    Lengths differ, so that page borders are crossed at different steps, as they are in a served batch.
    """
    max_seq_length = context + PAGE_SIZE + room + 1
    limits = {"page_size": PAGE_SIZE, "max_seq_length": max_seq_length}
    full = 1 + running * -(-max_seq_length // PAGE_SIZE)
    sliding = sliding_pool_pages(window=WINDOW, max_batch_size=running, max_prefill_tokens=PREFILL, **limits)
    tables = [PageTable("full_attention", n_pages=full, window=None, num_slots=running + 1, **limits),
              PageTable("sliding_attention", n_pages=sliding, window=WINDOW, num_slots=running + 1, **limits)]
    scheduler = Scheduler({table.attention_type: table for table in tables}, max_batch_size=running,
                          max_seq_length=max_seq_length, max_prefill_tokens=PREFILL)
    params = SamplingParams(max_new_tokens=max_seq_length, ignore_eos=True)
    for n in range(running):
        # the first requests decode while the last ones prefill, so none may be close to its end
        scheduler.add(Sequence(n, [3] * (context - n % PAGE_SIZE), params, stop_ids=frozenset({1}),
                               max_seq_length=max_seq_length))
    tokens = dict.fromkeys(range(running), 3)
    while len((plan := scheduler.plan()).decode) < running:
        scheduler.complete(plan, tokens)
    scheduler.complete(plan, tokens)
    for table in tables:
        table.drain_changes()
    return scheduler, tables


def host_cost(running: int, *, steps: int, context: int = 1024, clock: Callable[[], float] = time.thread_time) -> HostCost:
    """Plan `steps` decode steps of `running` sequences, drain what changed in their page tables, and take their tokens in.

    The clock is this thread's own, so that what others run on the machine is not counted.
    """
    scheduler, tables = decoding_scheduler(running, context=context, room=steps + running * context // PREFILL + 2)
    tokens = dict.fromkeys(range(running), 3)
    spent = []
    for _ in range(steps):
        start = clock()
        plan = scheduler.plan()
        for table in tables:
            table.drain_changes()
        scheduler.complete(plan, tokens)
        spent.append(1e6 * (clock() - start))
        assert len(plan.decode) == running, "a sequence left the batch while it was timed"
    return HostCost(statistics.fmean(spent), sorted(spent)[-1 - steps // 100])
