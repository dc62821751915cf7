"""How a decode step grows: with the context, the batch and the page pool; attention alone; the scheduler's own cost."""
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemma4_flex.attention import paged_flex, paged_sdpa
from gemma4_flex.bench.measure import MeasurementError, summarize, synchronizer, timed
from gemma4_flex.bench.report import ELEMENT_BYTES, commit, describe_geometry, device_name, versions
from gemma4_flex.bench.roofline import copy_bandwidth, decode_floor, matmul_rate
from gemma4_flex.bench.scheduler_cost import host_cost
from gemma4_flex.bench.workload import random_prompts
from gemma4_flex.engine import FlexEngine
from gemma4_flex.masks import Rows
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.step_graph import StepGraph

WARM_STEPS = 2              # before the timed ones, so that no prefill is left on the device
ATTENTION_CALLS = 32        # of each owner layer's attention alone, a round


@dataclass(frozen=True)
class Sizes:
    """What is varied. Batch and pool are varied at `context` tokens, context at batch 1, the pool at `pool_batch`.

    contexts: a little below powers of two, up to which sdpa gathers pages.
    pools: sizes of the full-attention pool, in multiples of what `pool_batch` sequences need.
    running: running sequences at which the scheduler is timed.
    """
    contexts: tuple[int, ...] = (64, 192, 960, 4032)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    pools: tuple[int, ...] = (1, 4, 16)
    running: tuple[int, ...] = (8, 64, 256)
    context: int = 192
    pool_batch: int = 4
    rounds: int = 5
    steps: int = 16


@dataclass
class Case:
    """A steady state to time, `batch` sequences of about `context` tokens, and what its rounds gave."""
    engine: FlexEngine
    batch: int
    context: int
    ms: list[float] = field(default_factory=list)
    attention_us: dict[str, list[float]] = field(default_factory=dict)
    tokens_in_view: float = 0.0       # by a sequence as the timed steps begin: the mean over the batch, in the last round
    steps_replayed: int = 0
    steps_eager: int = 0


# ---- one case -------------------------------------------------------------------------------------------------------

def time_case(case: Case, *, steps: int, seed: int, alone: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
    """Bring the case's batch to its context and time at least `steps` decode steps; with `alone`, then its attention.

    Raises MeasurementError where the batch did not stay as it was meanwhile.
    """
    engine, synchronize = case.engine, synchronizer(case.engine.config.device)
    avoid = engine.geometry.placeholder_ids | engine.stop_ids
    params = SamplingParams(temperature=0.0, max_new_tokens=engine.config.max_seq_length - case.context, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in random_prompts(
        case.batch, case.context, engine.geometry.vocab_size, seed, avoid=avoid)]
    try:
        started: set[int] = set()
        while len(started) < case.batch:
            started |= {event.request_id for event in engine.step()}
        _run_steps(engine, WARM_STEPS)
        before = dataclasses.replace(engine.stats)
        case.tokens_in_view = sum(s.num_tokens for s in engine.scheduler.running) / case.batch
        _, seconds = timed(lambda: _run_steps(engine, steps), synchronize=synchronize, clock=clock)
        replayed = engine.stats.steps_replayed - before.steps_replayed
        eager = engine.stats.steps_eager - before.steps_eager
        if len(engine.scheduler.running) != case.batch or engine.stats.prefill_tokens != before.prefill_tokens:
            raise MeasurementError(f"the batch of {case.batch} at {case.context} tokens did not stay whole while it was timed")
        case.ms.append(1e3 * seconds / (replayed + eager))
        case.steps_replayed, case.steps_eager = case.steps_replayed + replayed, case.steps_eager + eager
        if alone:
            for kind, us in attention_alone_us(engine, calls=ATTENTION_CALLS, clock=clock).items():
                case.attention_us.setdefault(kind, []).append(us)
    finally:
        for request_id in requests:
            engine.abort(request_id)
            engine.completion(request_id)


def _run_steps(engine: FlexEngine, steps: int) -> None:
    """Step until `steps` more decode steps ran, or nothing is left to run; one call of `step` may run several."""
    def count() -> int:
        return engine.stats.steps_replayed + engine.stats.steps_eager
    wanted = count() + steps
    while count() < wanted and engine.has_work:
        engine.step()


@torch.no_grad()
def attention_alone_us(engine: FlexEngine, *, calls: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Microseconds that one layer's decode attention takes over what the running sequences hold, by attention type.

    Captured, with the step's back end and kernel options, without projections, norms or the plan that all layers share.
    Each owner's pages are read in turn; small ones are still in a cache, which in a whole step they may not be.
    """
    running = engine.scheduler.running
    slots, last = (torch.tensor(values, device=engine.config.device) for values in (
        [s.slot for s in running], [s.num_computed - 1 for s in running]))
    pages = int(last.max()) // engine.config.page_size + 1
    columns = next(bucket for bucket in engine.runner.column_buckets if bucket >= pages)
    rows = Rows(slots, last, torch.ones_like(slots), width=1, columns=engine.runner.columns[:columns])
    found = {}
    for kind, backend in engine.runner.backends.items():
        group, plan = backend.group, backend.plan(rows)
        owners = engine.geometry.owners(kind)
        layer = engine.geometry.layers[owners[0]]
        q = torch.randn(len(running), layer.num_heads, 1, layer.head_dim, dtype=getattr(torch, engine.config.dtype),
                        device=engine.config.device)

        def attend(owner: int) -> Tensor:
            keys, values = group.keys[owner], group.values[owner]
            if backend.name == "sdpa":
                return paged_sdpa(q, keys, values, plan)
            return paged_flex(q, keys, values, group, rows, plan, backend.options["decode"])
        graph = StepGraph.capture(lambda: [attend(owner) for owner in owners], {"q": q})
        graph.replay()
        _, seconds = timed(lambda: [graph.replay() for _ in range(calls)], synchronize=synchronizer(engine.config.device),
                           clock=clock)
        found[kind] = 1e6 * seconds / (calls * len(owners))
    return found


# ---- a series of them -----------------------------------------------------------------------------------------------

def time_series(cases: Seq[Case], sizes: Sizes, *, seed: int, alone: bool = False,
                on_case: Callable[[], None] = lambda: None) -> None:
    """Rounds over all cases in turn, A B C A B C, so that a machine that slows down slows all of them. The first round
    compiles, captures and warms up, and does not count."""
    for n in range(1 + sizes.rounds):
        for case in cases:
            time_case(case, steps=sizes.steps, seed=seed, alone=alone)
            if n == 0:
                case.ms, case.attention_us, case.steps_replayed, case.steps_eager = [], {}, 0, 0
            on_case()


def describe_case(case: Case, rates: dict[str, float], steps: int) -> dict:
    """The case as plain JSON values, beside the least its step could take."""
    engine, config = case.engine, case.engine.config
    in_view = round(case.tokens_in_view)
    floor = decode_floor(engine.geometry, [(in_view, steps + 1)] * case.batch, steps=steps,
                         bytes_per_element=ELEMENT_BYTES[config.dtype], **rates)
    return {"batch": case.batch, "context": in_view, "n_pages": config.n_pages,
            "ms_per_step": summarize(case.ms).as_dict() | {"all": case.ms},
            "floor_ms": floor.ms_per_step, "floor_bound": floor.bound,
            "floor_fraction": floor.ms_per_step / summarize(case.ms).median,
            "attention_us": {kind: summarize(us).as_dict() | {"all": us} for kind, us in case.attention_us.items()},
            "steps_replayed": case.steps_replayed, "steps_eager": case.steps_eager}


def scheduler_series(sizes: Sizes, *, steps: int = 256) -> list[dict]:
    """The scheduler's cost by running sequences, microseconds a step, in interleaved rounds after one that warms up."""
    costs = {running: [] for running in sizes.running}
    for n in range(1 + sizes.rounds):
        for running, found in costs.items():
            cost = host_cost(running, steps=steps)
            if n:
                found.append(cost)
    return [{"running": running, "us_per_step": summarize([c.mean_us for c in found]).as_dict(),
             "p99_us": summarize([c.p99_us for c in found]).as_dict()} for running, found in costs.items()]


def measure_growth(loaded, config: EngineConfig, sizes: Sizes, *, model_name: str,
                   on_case: Callable[[], None] = lambda: None) -> dict:
    """Everything, as plain JSON values. `loaded` is a `LoadedModel`, whose tensors all engines share; `config` gives
    device, dtype, attention and seed, and captures; its limits are set to what the sizes need. `on_case` is called
    `num_cases(sizes)` times."""
    device = next(loaded.model.parameters()).device.type
    rates = {"bytes_per_s": copy_bandwidth(device).bytes_per_s,
             "flop_per_s": matmul_rate(device, config.resolved(device).dtype).flop_per_s}

    def engine(batch: int, context: int, pool: int = 1) -> FlexEngine:
        # the first sequences decode while the others are prefilled, steps that warm up or are timed come several at once, and
        # a sequence is admitted only where a page is free beside its prompt's
        room = (batch * context // config.max_prefill_tokens + sizes.steps + 4 * config.decode_steps_per_sync + WARM_STEPS
                + config.resolved(device).page_size)
        limits = {"max_batch_size": batch, "max_seq_length": context + room, "n_pages": None, "capture_cudagraph": True}
        need = dataclasses.replace(config, **limits).resolved(device).n_pages - 1
        return FlexEngine(loaded.model, loaded.tokenizer, dataclasses.replace(config, **limits | {"n_pages": 1 + pool * need}))

    def series(cases: list[Case], alone: bool = False) -> list[dict]:
        time_series(cases, sizes, seed=config.seed, alone=alone, on_case=on_case)
        return [describe_case(case, rates, sizes.steps) for case in cases]

    longest = engine(1, max(sizes.contexts))
    found = {"context": series([Case(longest, 1, context) for context in sizes.contexts], alone=True)}
    about = {"geometry": describe_geometry(longest.geometry), "config": dataclasses.asdict(longest.config),
             "dtype": longest.config.dtype, "attention_backends": dict(longest.attention_backends),
             "shared_kv": longest.config.shared_kv, "notices": list(longest.notices),
             "compile_s": longest.stats.compile_s, "capture_s": longest.stats.capture_s}
    del longest
    widest = engine(max(sizes.batches), sizes.context)
    found["batch"] = series([Case(widest, batch, sizes.context) for batch in sizes.batches])
    del widest
    found["pool"] = series([Case(engine(sizes.pool_batch, sizes.context, pool), sizes.pool_batch, sizes.context)
                            for pool in sizes.pools])
    return {"schema_version": 1, "benchmark": "bench_growth", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "model_name": model_name, "device": device, "device_name": device_name(device), "threads": torch.get_num_threads(),
            "versions": versions(), "commit": commit(), "sizes": dataclasses.asdict(sizes),
            "bandwidth_bytes_per_s": rates["bytes_per_s"], "matmul_flop_per_s": rates["flop_per_s"],
            **about, **found, "scheduler": scheduler_series(sizes)}


def num_cases(sizes: Sizes) -> int:
    """How many cases `measure_growth` times, the warm-up round's too."""
    return (1 + sizes.rounds) * (len(sizes.contexts) + len(sizes.batches) + len(sizes.pools))
