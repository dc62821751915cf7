"""The device check's figures: capture, decode against the floor, prefill with and without the shared-layer shortcut, LoRA."""
from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from gemma4_flex.bench.device_bench import Bench, CheckFailed, PartSkipped
from gemma4_flex.bench.lora import refresh_bytes
from gemma4_flex.bench.measure import MIN_ROUNDS, summarize, timed
from gemma4_flex.bench.report import ELEMENT_BYTES, describe_geometry
from gemma4_flex.bench.roofline import decode_floor, prefill_floor
from gemma4_flex.bench.workload import random_prompts
from gemma4_flex.checkpoints import LoadedModel
from gemma4_flex.engine import FlexEngine
from gemma4_flex.lora.adapters import ALL_LINEAR, random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.params import InvalidParameterError, SamplingParams

NO_ROOM = (InvalidParameterError, torch.OutOfMemoryError)
WARM_STEPS = 3


def bandwidth(bench: Bench) -> str:
    """What a copy moves and a matmul computes here: the measures of every floor below."""
    copied, computed = bench.bandwidth(), bench.matmul()
    bench.row(bytes_per_s=copied.bytes_per_s, buffer_bytes=copied.buffer_bytes, repeats=copied.repeats)
    bench.row(flop_per_s=computed.flop_per_s, dtype=computed.dtype, sizes=computed.sizes, repeats=computed.repeats)
    return (f"{copied.bytes_per_s / 1e9:,.0f} GB/s, read and written bytes both counted; "
            f"{computed.flop_per_s / 1e12:,.2f} TFLOP/s in {computed.dtype}")


def capture(bench: Bench) -> str:
    """Load the model, compile, and capture the decode step of every bucket up to the largest batch that fits."""
    engine = speed_engine(bench)
    stats, memory = engine.stats, engine.memory_report()
    bench.row(model=bench.scale.model, geometry=describe_geometry(engine.geometry), buckets=list(engine.runner.buckets),
              compile_s=stats.compile_s, capture_s=stats.capture_s, backends=engine.attention_backends,
              notices=list(engine.notices), memory=memory)
    return (f"{len(engine.runner.buckets)} buckets up to {engine.runner.buckets[-1]} in {stats.capture_s:.1f} s, compiling "
            f"{stats.compile_s:.1f} s, {sum(memory.values()) / 2**30:.1f} GiB")


def decode(bench: Bench) -> str:
    """Every batch at every context, over one engine, so that a small batch runs as it would in a server for large ones."""
    engine = speed_engine(bench)
    done = _decode_rows(bench, engine, bench.scale.model, bench.scale.batches, bench.scale.contexts)
    return _of_floor(done)


def prefill(bench: Bench) -> str:
    """Prompts to first tokens, and the same with every row walking the layers that only read K/V."""
    engine = speed_engine(bench)
    params, ratios = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True), []
    for batch, length in bench.scale.prefill_shapes:
        if batch > engine.config.max_batch_size:
            bench.row(batch=batch, length=length, skipped="it does not fit in memory")
            continue
        if ratios and bench.left() < 2:
            bench.row(batch=batch, length=length, skipped="no time left")
            continue
        prompts = _prompts(engine, batch, length, bench.settings.seed)
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        tokens: dict[str, list] = {}
        for n in range(1 + MIN_ROUNDS):
            for name in seconds:
                with without_shortcut(engine) if name == "without" else contextlib.nullcontext():
                    found, taken = timed(lambda: engine.generate(prompts, params), synchronize=bench.synchronize)
                tokens[name] = [completion.token_ids for completion in found]
                seconds[name] += [taken] * bool(n)
        rates = {name: batch * length / summarize(all_of).median for name, all_of in seconds.items()}
        ratios.append(rates["with"] / rates["without"])
        same = sum(a == b for a, b in zip(tokens["with"], tokens["without"])) / batch
        floor = prefill_floor(engine.geometry, [length] * batch, bytes_per_element=ELEMENT_BYTES[engine.config.dtype],
                              bytes_per_s=bench.bandwidth().bytes_per_s, flop_per_s=bench.matmul().flop_per_s)
        reached = floor.fraction(summarize(seconds["with"]).median)
        bench.row(batch=batch, length=length, with_tok_s=rates["with"], without_tok_s=rates["without"], ratio=ratios[-1],
                  same_first_tokens=same, seconds=seconds, flops=floor.flops, floor_s=floor.seconds, floor_bound=floor.bound,
                  floor_fraction=reached)
    if not ratios:
        raise CheckFailed("no shape fits")
    return (f"{rates['with']:,.0f} tok/s, {reached:.1%} of the floor, {', '.join(f'{ratio:.2f}' for ratio in ratios)} x without "
            "the shortcut")


def merged_lora(bench: Bench) -> str:
    """Decode with merged weights against none, round by round on two engines of one base, and what a refresh costs."""
    plain, loaded = speed_engine(bench), load_speed_model(bench)
    double = DoubleCopy(loaded.model)
    adapter = random_adapter(loaded.model, ALL_LINEAR, rank=16, alpha=32, strength=0.05, seed=bench.settings.seed)
    refreshes = [timed(lambda: double.refresh(adapter), synchronize=bench.synchronize)[1] for _ in range(1 + MIN_ROUNDS)][1:]
    refresh, floor_s = summarize(refreshes), refresh_bytes(double, adapter) / bench.bandwidth().bytes_per_s
    merged = FlexEngine(double.inference, None, plain.config)
    merged.prepare()
    bench.row(refresh_s=refresh.as_dict(), refresh_floor_s=floor_s, times_floor=refresh.median / floor_s,
              extra_bytes=double.extra_bytes, capture_s=merged.stats.capture_s, compile_s=merged.stats.compile_s)
    told = [f"{ratio:.3f} x at batch {batch}" for batch, ratio in _ratios(bench, {"none": plain, "merged": merged})]
    return f"merged over none {', '.join(told)}; refresh {refresh.median / floor_s:.1f} x its floor"


def steps_per_sync(bench: Bench) -> str:
    """Decode where the host looks at every step, and where it looks once in several: the same tokens, at what gain."""
    shared, loaded, engines = speed_engine(bench), load_speed_model(bench), {}
    for steps in bench.scale.steps_per_sync:
        config = replace(shared.config, decode_steps_per_sync=steps)
        engines[f"every {steps}"] = shared if config == shared.config else FlexEngine(loaded.model, None, config)
    context = bench.scale.contexts[0]
    params = SamplingParams(temperature=0.0, max_new_tokens=2 * max(bench.scale.steps_per_sync) + 1, ignore_eos=True)
    prompts = _prompts(shared, min(bench.scale.batches[1], shared.config.max_batch_size), context, bench.settings.seed)
    tokens = [[done.token_ids for done in engine.generate(prompts, params)] for engine in engines.values()]
    bench.row(batch=len(prompts), context=context, same_tokens=tokens[0] == tokens[1])
    if tokens[0] != tokens[1]:
        raise CheckFailed("tokens depend on how often the host looks")
    told = [f"{ratio:.3f} x at batch {batch}" for batch, ratio in _ratios(bench, engines)]
    return f"the same tokens; {' steps over '.join(reversed(engines))}: {', '.join(told)}"


def larger_model(bench: Bench) -> str:
    """Decode of the larger model, where time is left: everything of the first is let go before."""
    bench.forget("engine", "model")
    if bench.left() < 2:
        raise PartSkipped("no time left")
    loaded = bench.load(bench.scale.larger_model)
    engine = _prepared(bench, loaded, bench.scale.larger_batches, bench.scale.contexts[:1])
    bench.row(model=bench.scale.larger_model, capture_s=engine.stats.capture_s, compile_s=engine.stats.compile_s)
    return _of_floor(_decode_rows(bench, engine, bench.scale.larger_model, bench.scale.larger_batches, bench.scale.contexts[:1]))


# ---- engines --------------------------------------------------------------------------------------------------------


def load_speed_model(bench: Bench) -> LoadedModel:
    """The model of all speed parts, loaded once."""
    return bench.once("model", lambda: bench.load(bench.scale.model))


def speed_engine(bench: Bench) -> FlexEngine:
    """One captured engine for all parts. Where capture fails the first part to ask fails with it, and the others measure
    eager steps, which their rows say."""
    def make(**fields) -> FlexEngine:
        return _prepared(bench, load_speed_model(bench), bench.scale.batches, bench.scale.contexts, **fields)
    try:
        return bench.once("engine", make)
    except Exception:
        bench.once("engine", lambda: make(capture_cudagraph=False))
        raise


def _prepared(bench: Bench, loaded: LoadedModel, batches: Seq[int], contexts: Seq[int], **fields) -> FlexEngine:
    """An engine, compiled and captured, for the largest of `batches` whose K/V fits beside the weights."""
    for batch in sorted(batches, reverse=True):
        config = bench.config(max_batch_size=batch, max_seq_length=max(contexts) + bench.scale.spare_tokens,
                              max_prefill_tokens=bench.scale.max_prefill_tokens, **fields)
        try:
            engine = FlexEngine(loaded.model, None, config)
            engine.prepare()
            return engine
        except NO_ROOM as error:
            bench.row(max_batch_size=batch, skipped=f"it does not fit: {error}")
            engine = None
            bench.forget()
    raise CheckFailed(f"not even a batch of {min(batches)} fits in memory")


@contextlib.contextmanager
def without_shortcut(engine: FlexEngine) -> Iterator[None]:
    """Inside, prefill walks every row through every layer: the walk is told that no layer shares its K/V, and so picks the
    wanted rows behind the last one."""
    walk = engine.runner.walk
    geometry, changed = walk.geometry, copy.copy(walk.geometry)
    changed.__dict__["first_shared"] = geometry.num_layers
    walk.geometry = changed
    try:
        yield
    finally:
        walk.geometry = geometry


# ---- decode ---------------------------------------------------------------------------------------------------------


def _prompts(engine: FlexEngine, batch: int, length: int, seed: int) -> list[list[int]]:
    return random_prompts(batch, length, engine.geometry.vocab_size, seed, avoid=engine.geometry.placeholder_ids | engine.stop_ids)


class Decoding:
    """Requests of `context` prompt tokens that are all past their prefill: `window` times steps in which all take part.

    Those that are prefilled first decode while the others are still being prefilled, so contexts differ by some tokens;
    `tokens` counts each request's output, and the floor is made of what each really holds.
    """

    def __init__(self, engine: FlexEngine, context: int, requests: Seq[int], bench: Bench):
        self.engine, self.context, self.bench = engine, context, bench
        self.tokens = dict.fromkeys(requests, 0)
        _, self.prefill_s = timed(lambda: self._step_until(lambda: all(self.tokens.values())), synchronize=bench.synchronize)
        self.window(WARM_STEPS)

    def window(self, steps: int) -> tuple[int, float]:
        """Run at least `steps` decode steps: how many they were, and the seconds until the device had done them."""
        self.engine.reset_stats()
        _, seconds = timed(lambda: self._step_until(lambda: self._steps() >= steps), synchronize=self.bench.synchronize)
        return self._steps(), seconds

    def _steps(self) -> int:
        stats = self.engine.stats
        return stats.steps_replayed + stats.steps_eager

    def _step_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            for event in self.engine.step():
                self.tokens[event.request_id] += 1
                if event.finish_reason:
                    raise CheckFailed(f"a request ended ({event.finish_reason}) after {self.tokens[event.request_id]} tokens: "
                                      "the batch was to stay whole; give the scale more spare_tokens")


@contextlib.contextmanager
def decoding(bench: Bench, engine: FlexEngine, batch: int, context: int) -> Iterator[Decoding]:
    """`batch` requests in decode, ended and forgotten afterwards."""
    params = SamplingParams(temperature=0.0, max_new_tokens=engine.config.max_seq_length - context, ignore_eos=True)
    requests = [engine.submit(prompt, params) for prompt in _prompts(engine, batch, context, bench.settings.seed)]
    try:
        yield Decoding(engine, context, requests, bench)
    finally:
        for request in requests:
            engine.abort(request)
            engine.completion(request)


def decode_row(bench: Bench, engine: FlexEngine, what: str, batch: int, context: int) -> dict:
    """Three timed windows after a warm-up: ms a step, tokens/s, and the share of the floor that was reached."""
    rates, rounds = {"bytes_per_s": bench.bandwidth().bytes_per_s, "flop_per_s": bench.matmul().flop_per_s}, []
    with decoding(bench, engine, batch, context) as running:
        for _ in range(MIN_ROUNDS):
            drawn = list(running.tokens.values())
            steps, seconds = running.window(bench.scale.window)
            floor = decode_floor(engine.geometry, [(context + n - 1, steps + 1) for n in drawn], steps=steps,
                                 bytes_per_element=ELEMENT_BYTES[engine.config.dtype], **rates)
            rounds.append({"steps": steps, "seconds": seconds, "floor_s": floor.seconds, "floor_bound": floor.bound,
                           "replayed": engine.stats.steps_replayed, "eager": engine.stats.steps_eager,
                           "tokens_held": [context + min(drawn), context + max(drawn)]})
    per_step = summarize([1e3 * r["seconds"] / r["steps"] for r in rounds])
    return {"what": what, "batch": batch, "context": context, "ms_per_step": per_step.as_dict(),
            "tok_s": 1e3 * batch / per_step.median, "floor_ms": 1e3 * rounds[-1]["floor_s"] / rounds[-1]["steps"],
            "floor_fraction": summarize([r["floor_s"] / r["seconds"] for r in rounds]).median,
            "prefill_s": running.prefill_s, "rounds": rounds}


def _decode_rows(bench: Bench, engine: FlexEngine, model: str, batches: Seq[int], contexts: Seq[int]) -> list[dict]:
    """A row for each batch and context that fits in memory and in the time that is left."""
    done: list[dict] = []
    what, seconds_a_token = Path(model.removeprefix("synthetic:")).stem, 0.0
    for context in contexts:
        for batch in batches:
            place = {"what": what, "batch": batch, "context": context}
            if batch > engine.config.max_batch_size:
                bench.row(**place, skipped="it does not fit in memory")
            elif done and bench.left() < 1 + 1.5 * seconds_a_token * batch * context:
                bench.row(**place, skipped="no time left")
            else:
                done.append(decode_row(bench, engine, what, batch, context))
                bench.row(**done[-1])
                seconds_a_token = done[-1]["prefill_s"] / (batch * context)
    return done


def _ratios(bench: Bench, engines: dict[str, FlexEngine]) -> Iterator[tuple[int, float]]:
    """Two engines window by window, A B A B, at each batch up to 32: (batch, median of the second's tokens/s over the
    first's)."""
    (first, one), (second, other) = engines.items()
    context = bench.scale.contexts[0]
    for batch in (b for b in bench.scale.batches if b <= min(32, one.config.max_batch_size)):
        if bench.left() < 2:
            bench.row(batch=batch, context=context, skipped="no time left")
            continue
        rates: dict[str, list[float]] = {name: [] for name in engines}
        with decoding(bench, one, batch, context) as a, decoding(bench, other, batch, context) as b:
            for _ in range(MIN_ROUNDS):
                for name, running in ((first, a), (second, b)):
                    steps, seconds = running.window(bench.scale.window)
                    rates[name].append(batch * steps / seconds)
        ratio = summarize([y / x for x, y in zip(rates[first], rates[second])])
        bench.row(batch=batch, context=context, tok_s=rates, ratio=ratio.as_dict())
        yield batch, ratio.median


def _of_floor(rows: Seq[dict]) -> str:
    reached = [row["floor_fraction"] for row in rows]
    eager = sum(r["eager"] for row in rows for r in row["rounds"])
    return f"{len(rows)} rows, {min(reached):.1%} to {max(reached):.1%} of the floor" + (f", {eager} EAGER steps" if eager else "")

