"""Decode speed and memory of one model in several formats, and with its PLE table in either place, rounds in turn.

Each format is a file written from the bf16 weights and read back. Every side has a floor of its own: the bytes of weights that one
of its steps reads, packed or not.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gemma4_flex.bench.measure import summarize
from gemma4_flex.bench.recipes import Candidate, candidates
from gemma4_flex.bench.report import ELEMENT_BYTES
from gemma4_flex.bench.roofline import copy_bandwidth, decode_floor, matmul_rate
from gemma4_flex.bench.workload import random_prompts
from gemma4_flex.checkpoints import LoadedModel, load_text_model
from gemma4_flex.engine import FlexEngine
from gemma4_flex.models.packed_modules import describe_packed
from gemma4_flex.params import EngineConfig, SamplingParams


@dataclass(frozen=True)
class Side:
    """What is measured: a format (None: bf16 as it was loaded), and where the PLE table is."""

    name: str
    candidate: Candidate | None = None
    ple: str = "device"


SIDES = (Side("bf16"), Side("bf16, PLE table in host memory", ple="host"),
         *(Side(c.name, c) for c in candidates(["Q8_0", "Q4_0"], ["4bit"], [])))


def engines_of(name: str, base: LoadedModel, config: EngineConfig, folder: Path, seed: int) -> dict[str, FlexEngine]:
    """An engine a side; `base` is the model of `name` in bf16, and files go to `folder`."""
    made = {}
    for number, side in enumerate(SIDES):
        model, source = base.model, name
        if side.candidate is not None:
            (place := folder / str(number)).mkdir()
            source = str(side.candidate.write(place, base))
        if side.candidate is not None or side.ple != "device":
            model = load_text_model(source, dtype=torch.bfloat16, device=config.device, seed=seed, ple=side.ple).model
        made[side.name] = FlexEngine(model, base.tokenizer, replace(config, ple=side.ple))
    return made


def measure_formats(engines: dict[str, FlexEngine], *, batches: Seq[int], prompt_tokens: int, new_tokens: int, rounds: int,
                    seed: int, on_round: Callable[[], None] = lambda: None) -> dict:
    """Decode tokens/s of each engine at each batch, a round of each in turn; the first round warms up and does not count."""
    first = next(iter(engines.values()))
    geometry, element = first.geometry, ELEMENT_BYTES[first.config.dtype]
    bandwidth, matmul = copy_bandwidth(first.config.device), matmul_rate(first.config.device, first.config.dtype)
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    jobs = []
    for batch in batches:
        prompts = random_prompts(batch, prompt_tokens, geometry.vocab_size, seed, avoid=geometry.placeholder_ids)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        tokens = {}
        for n in range(rounds + 1):
            for name, engine in engines.items():
                engine.reset_stats()
                tokens[name] = [done.token_ids for done in engine.generate(prompts, params)]
                if n:
                    seconds[name].append(engine.stats.decode_s)
            on_round()
        jobs.append({"batch": batch, "sides": {name: _side(
            engine, seconds[name], [a / b for a, b in zip(seconds[next(iter(engines))], seconds[name])],
            decode_floor(geometry, [(prompt_tokens, new_tokens)] * batch, steps=new_tokens - 1, bytes_per_element=element,
                         bytes_per_s=bandwidth.bytes_per_s, flop_per_s=matmul.flop_per_s, weight_bytes=_step_bytes(engine)),
            batch * (new_tokens - 1), tokens[name] == tokens[next(iter(engines))]) for name, engine in engines.items()}})
    memory = {name: dict(engine.memory_report()) for name, engine in engines.items()}
    return {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "rounds": rounds, "threads": torch.get_num_threads(),
            "bandwidth_bytes_per_s": bandwidth.bytes_per_s, "matmul_flop_per_s": matmul.flop_per_s, "memory": memory, "jobs": jobs,
            "compile_s": {name: engine.stats.compile_s for name, engine in engines.items()}}


def _step_bytes(engine: FlexEngine) -> int | None:
    packed = describe_packed(engine.model, engine.geometry)
    return packed and packed["step_weight_bytes"]


def _side(engine: FlexEngine, seconds: Seq[float], over: Seq[float], floor, made: int, same_tokens: bool) -> dict:
    return {"tokens_per_s": summarize([made / s for s in seconds]).as_dict(), "over_bf16": summarize(over).as_dict(),
            "step_weight_bytes": floor.weight_bytes, "floor_tokens_per_s": made / floor.seconds, "bound": floor.bound,
            "floor_fraction": summarize([floor.fraction(s) for s in seconds]).median, "same_tokens_as_bf16": same_tokens,
            "replayed": engine.stats.steps_replayed, "eager": engine.stats.steps_eager}
