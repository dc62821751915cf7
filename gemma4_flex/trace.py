"""Teacher-forced runs: what each layer made of given tokens, through the engine's own paged steps."""
from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from gemma4_flex.runner import Runner
from gemma4_flex.scheduler import Scheduler
from gemma4_flex.sequence import Sequence


@dataclass(frozen=True)
class Trace:
    """Teacher-forced states of n = len(forced_ids) + 1 positions, from the last prompt token on."""
    hidden: Tensor               # [L + 1, n, hidden]: the first layer's input, then each layer's output
    logits: Tensor               # [n, V], after the softcap, as float


def trace(scheduler: Scheduler, runner: Runner, sequence: Sequence, forced_ids: Seq[int]) -> Trace:
    """Run `sequence`, alone in the scheduler, and then `forced_ids` one decode step each, whatever the model would draw."""
    streams, logits = [], []
    for n in range(len(forced_ids) + 1):
        while len(sequence.output_ids) == n:
            plan, record = scheduler.plan(), []
            wants = bool(plan.decode) or any(span.wants_logits for span in plan.prefill)
            run, work = (runner.decode, plan.decode) if plan.decode else (runner.prefill, plan.prefill)
            rows = run(work, record).logits
            if wants:
                streams.append(torch.stack([stream[:1] for stream in record]))
                logits.append(rows[:1].float().clone())
            token = forced_ids[n] if n < len(forced_ids) else 0
            scheduler.complete(plan, {sequence.request_id: token} if wants else {})
    return Trace(torch.cat(streams, dim=1), torch.cat(logits))
