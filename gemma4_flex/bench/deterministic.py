"""What deterministic mode gives and costs: a request's bits alone against those in a batch, and the two modes' speed.

Proof: the same requests, drawn with one seed and with log-probabilities, run alone and in batches that differ in order and
neighbours. A request counts as the same where its ids, or every bit of its log-probabilities, are. Without the mode nothing is
promised: that engine is the control, which shows whether the batches were ones that a request could tell apart at all.
"""
from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace

import torch

from gemma4_flex.bench.measure import summarize, synchronizer, timed
from gemma4_flex.bench.workload import random_prompts
from gemma4_flex.engine import FlexEngine
from gemma4_flex.logprobs import Logprobs
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.request import Completion

MODES = {"deterministic": True, "off": False}
FIGURES = ("prefill_tps", "decode_tps", "wall_s")


def uneven_prompts(n: int, longest: int, vocab_size: int, seed: int, *, avoid: frozenset[int] = frozenset()) -> list[list[int]]:
    """`n` random prompts of a quarter of `longest` tokens up to `longest`, no two of which begin alike."""
    lengths = random.Random(seed)
    return [prompt[: lengths.randint(max(1, longest // 4), longest)]
            for prompt in random_prompts(n, longest, vocab_size, seed, avoid=avoid)]


def arrangements(n: int, seed: int) -> dict[str, list[list[int]]]:
    """Ways to run prompts 0 to n - 1, each as the jobs it takes; the prompts n to 2 n - 1 are strangers to stand beside them."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return {"alone again": [[i] for i in range(n)], "in order": [list(range(n))], "in another order": [order],
            "beside others": [[place for i in reversed(order) for place in (n + i, i)]]}


def bits(known: Logprobs) -> bytes:
    """Every bit of log-probabilities, raw, processed and of alternatives, whose ids are part of it."""
    top = [number for entry in known.top for pair in entry for number in pair]
    return array("d", [*known.raw, *known.processed, *top]).tobytes()


def alike(alone: Seq[Completion], together: Seq[Completion]) -> dict:
    """How many requests have the same ids, and the same bits of log-probabilities too; and the largest difference of a raw
    log-probability that follows the same ids (None where no request has any)."""
    ids = [a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True)]
    same = [equal and bits(a.logprobs) == bits(b.logprobs) for equal, a, b in zip(ids, alone, together)]
    apart = []
    for a, b in zip(alone, together):
        shared = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), len(a.token_ids))
        apart += [abs(x - y) for x, y in zip(a.logprobs.raw[:shared], b.logprobs.raw[:shared])]
    return {"requests": len(ids), "same_tokens": sum(ids), "same_logprobs": sum(same),
            "largest_difference": max(apart, default=None)}


def prove(engine: FlexEngine, prompts: Seq[Seq[int]], n: int, params: SamplingParams, seed: int) -> dict[str, dict]:
    """`alike` of the first `n` prompts alone and in every arrangement; the other prompts are the strangers. `params` ask for
    log-probabilities and give the seed of all draws."""
    def run(jobs: Seq[Seq[int]]) -> list[Completion]:
        found = {place: done for job in jobs for place, done in zip(job, engine.generate([list(prompts[i]) for i in job], params))}
        return [found[place] for place in range(n)]
    alone = run([[i] for i in range(n)])
    return {name: alike(alone, run(jobs)) for name, jobs in arrangements(n, seed).items()}


def compare_cost(engines: Mapping[str, FlexEngine], jobs: Mapping[str, Seq[Seq[int]]], params: SamplingParams, *, rounds: int,
                 on_round: Callable[[], None] = lambda: None) -> dict[str, dict]:
    """Of each job the figures of both modes, and deterministic over off, round by round, taken in turn: D O D O. A first round
    warms up and does not count."""
    synchronize = synchronizer(next(iter(engines.values())).config.device)
    found = {job: {name: {figure: [] for figure in FIGURES} for name in engines} for job in jobs}
    for n in range(rounds + 1):
        for job, prompts in jobs.items():
            for name, engine in engines.items():
                engine.reset_stats()
                _, wall_s = timed(lambda: engine.generate(list(prompts), params), synchronize=synchronize)
                stats = engine.stats
                if n:
                    figures = stats.prefill_tokens / stats.prefill_s, stats.decode_tokens / stats.decode_s, wall_s
                    for figure, value in zip(FIGURES, figures):
                        found[job][name][figure].append(value)
        on_round()
    return {job: {"prompts": len(jobs[job]), "prompt_tokens": sum(map(len, jobs[job])), "new_tokens": params.max_new_tokens,
                  **{name: {figure: {**summarize(values).as_dict(), "all": values} for figure, values in figures.items()}
                     for name, figures in modes.items()},
                  "deterministic_over_off": {figure: summarize([a / b for a, b in zip(
                      modes["deterministic"][figure], modes["off"][figure])]).as_dict() for figure in FIGURES}}
            for job, modes in found.items()}


def measure_deterministic(loaded, config: EngineConfig, *, n_prompts: int, prompt_tokens: int, new_tokens: int, rounds: int,
                          logprobs: int = 0, on_round: Callable[[], None] = lambda: None) -> dict:
    """Proof and cost of both modes on a `LoadedModel`, whose tensors the two engines share. Every request draws, with
    temperature 1 and log-probabilities, exactly `new_tokens` tokens."""
    avoid = loaded.geometry.placeholder_ids | loaded.stop_ids
    prompts = uneven_prompts(2 * n_prompts, prompt_tokens, loaded.geometry.vocab_size, config.seed, avoid=avoid)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=config.seed, max_new_tokens=new_tokens, ignore_eos=True,
                            logprobs=logprobs)
    engines = {name: FlexEngine(loaded.model, loaded.tokenizer, replace(config, deterministic=on)) for name, on in MODES.items()}
    proof = {name: prove(engine, prompts, n_prompts, params, config.seed) for name, engine in engines.items()}
    cost = compare_cost(engines, {"all prompts": prompts[:n_prompts], "one prompt": prompts[:1]}, params, rounds=rounds,
                        on_round=on_round)
    return {"max_batch_size": config.max_batch_size, "prompt_tokens": [len(p) for p in prompts[:n_prompts]],
            "new_tokens": new_tokens, "rounds": rounds, "warmup_rounds": 1, "attention_backends": engines["off"].attention_backends,
            "buckets": {name: engine.runner.buckets for name, engine in engines.items()}, "proof": proof, "cost": cost,
            "threads": torch.get_num_threads()}
