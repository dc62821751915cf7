"""transformers' generate with a static cache and a compiled step, in the same run as our decode rows."""
from __future__ import annotations

import statistics
import time
from itertools import pairwise

import torch

from gemma4_flex.bench.device_bench import Bench, PartSkipped
from gemma4_flex.bench.device_speed import NO_ROOM, load_speed_model
from gemma4_flex.bench.measure import timed
from gemma4_flex.bench.workload import random_prompts

SETTLED = 8      # tokens after which no step compiles or records its graph any more


class Stopwatch:
    """A streamer of `generate` that notes when each step's tokens had reached the host; the prompt comes first."""

    def __init__(self):
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def steps(self) -> list[float]:
        """Seconds between tokens once all is settled."""
        settled = self.times[1 + min(SETTLED, len(self.times) // 2):]
        return [b - a for a, b in pairwise(settled)]


@torch.no_grad()
def transformers_static(bench: Bench) -> str:
    """Decode rows of `generate` on the same weights: on a GPU it compiles its step and replays it as a CUDA graph."""
    loaded, told = load_speed_model(bench), []
    model, context = loaded.model, bench.scale.contexts[0]
    longest = 0.0
    for batch in bench.scale.rival_batches:
        place = {"what": "transformers static", "batch": batch, "context": context}
        if bench.left() < 1.2 * longest:
            bench.row(**place, skipped="no time left: it would compile anew")
            continue
        torch._dynamo.reset()      # else the second batch would be compiled for any batch, and be slower for it
        prompts = random_prompts(batch, context, loaded.geometry.vocab_size, bench.settings.seed,
                                 avoid=loaded.geometry.placeholder_ids | loaded.stop_ids)
        ids = torch.tensor(prompts, device=bench.device)
        seconds, watches = [], []
        try:
            for _ in range(2):      # the first one compiles
                watches.append(Stopwatch())
                _, taken = timed(lambda: model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2 * SETTLED + bench.scale.window,
                    cache_implementation="static", eos_token_id=None, pad_token_id=0, streamer=watches[-1]),
                    synchronize=bench.synchronize)
                seconds.append(taken)
        except NO_ROOM as error:
            bench.row(**place, skipped=f"it does not fit: {error}")
            continue
        longest = sum(seconds)
        steps = [1e3 * step for step in watches[-1].steps()]
        median = statistics.median(steps)
        bench.row(**place, compiled=hasattr(model, "_compiled_call"), tok_s=1e3 * batch / median, first_generate_s=seconds[0],
                  second_generate_s=seconds[1],
                  ms_per_step={"median": median, "min": min(steps), "max": max(steps), "n": len(steps)})
        told.append(f"{1e3 * batch / median:,.0f} tok/s at batch {batch}")
    if not told:
        raise PartSkipped("no batch fits in memory")
    return ", ".join(told)
