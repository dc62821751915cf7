"""Set the engine beside others on the same prompts and token counts: rounds in turn, ratios round by round, and the floor.

    python scripts/benchmarks/compare_engines.py --model_name tiny

Prints a table a job and what is wanted beside what was reached; writes JSON and, where decode was run, a PNG beside it.
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from pathlib import Path

from gemma4_flex.bench import stats_file, workload
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError
from gemma4_flex.text import PromptError

BENCHMARK = "compare_engines"
RUNS = Path(__file__).resolve().parent.parent.parent / "results" / "runs"
KINDS = ("decode", "mixed", "prefill")
SET_BY_THE_RUN = ("device", "dtype", "capture_cudagraph", "max_batch_size", "max_seq_length")
COUNTS = ("prompt_tokens", "new_tokens", "prefill_prompts", "prefill_tokens", "mixed_requests", "mixed_batch", "rounds",
          "warmup", "threads")


class UsageError(ValueError):
    """Flags that can't be obeyed; the message says what to do instead."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One sentence and exit code 2, without the page of usage that argparse puts before it."""
        self.exit(2, f"error: {message}\n")


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    try:
        return [int(name) for name in names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 1,8,32") from None


def fields(text: str) -> dict:
    """Fields of EngineConfig as a JSON object."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error.msg})") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object such as {{"attention": "sdpa"}}')
    return found


def parser() -> Parser:
    flags = Parser(prog=f"{BENCHMARK}.py", description=__doc__, allow_abbrev=False,
                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--model_name", default="tiny", help="tiny, synthetic:E2B, a directory or a hub id (default tiny)")
    add("--engines", type=names, help="which, separated by commas (default: all)")
    add("--jobs", type=names, default=list(KINDS), help="of decode, mixed and prefill, separated by commas (default: all)")
    add("--batches", type=numbers, default=[1, 8, 32], help="batches of the decode jobs (default 1,8,32)")
    add("--prompt_tokens", type=int, default=16, help="prompt tokens of a decode request (default 16)")
    add("--new_tokens", type=int, default=128, help="tokens a decode request makes (default 128)")
    add("--prefill_prompts", type=int, default=4, help="prompts of the prefill job (default 4)")
    add("--prefill_tokens", type=int, default=1000, help="tokens of each (default 1000)")
    add("--mixed_requests", type=int, default=64, help="requests of the mixed job (default 64)")
    add("--mixed_batch", type=int, default=8, help="most of them at once (default 8)")
    add("--rounds", type=int, default=5, help="measured rounds (default 5); fewer than 3 get no verdict")
    add("--warmup", type=int, default=1, help="runs of each engine before them (default 1)")
    add("--threads", type=int, default=1, help="threads every engine computes with (default 1)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto (bfloat16 on cuda, else float32), float32 or bfloat16")
    add("--gguf", type=Path, metavar="FILE", help="the same weights for llama.cpp (default: --model_name where that is one)")
    add("--flex_config", type=fields, default={}, metavar="JSON",
        help='fields of EngineConfig for flex and flex_eager, such as {"attention": "sdpa"}')
    add("--seed", type=int, default=0, help="for prompts, lengths, and the weights of synthetic models")
    add("--stats_path", type=Path, help="where the JSON goes (default: a new file in results/runs/)")
    return flags


def check_flags(args: argparse.Namespace) -> None:
    """Refuse what no model could change. Raises UsageError."""
    if unknown := [kind for kind in args.jobs if kind not in KINDS]:
        raise UsageError(f"--jobs: there is no job {unknown[0]!r}: choose from {', '.join(KINDS)}")
    if not args.jobs or (args.engines is not None and not args.engines):
        raise UsageError("--jobs and --engines need at least one name")
    if not args.batches or min(args.batches) < 1:
        raise UsageError("--batches needs whole numbers of at least 1, such as 1,8,32")
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.gguf is None and args.model_name.endswith(".gguf"):
        args.gguf = Path(args.model_name)
    if args.gguf is not None and not args.gguf.is_file():
        raise UsageError(f"--gguf {args.gguf} is no file")
    known = {field.name for field in dataclasses.fields(EngineConfig)} - set(SET_BY_THE_RUN)
    if unknown := [name for name in args.flex_config if name not in known]:
        raise UsageError(f"--flex_config: {unknown[0]!r} cannot be set there: choose from {', '.join(sorted(known))}")


def stats_paths(args: argparse.Namespace) -> tuple[Path, Path]:
    """Where the JSON and the picture will go, tried out. Raises StatsPathError."""
    path = args.stats_path
    if path is None:
        RUNS.mkdir(parents=True, exist_ok=True)
        path = RUNS / f"{BENCHMARK}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    return stats_file.check_writable(path), stats_file.check_writable(path.with_suffix(".png"))


def prepare(args: argparse.Namespace):
    """The model that all engines share, loaded once, as a Setting."""
    import torch

    from gemma4_flex.bench.rival import Setting
    from gemma4_flex.checkpoints import load_text_model
    config = EngineConfig(device=args.device, dtype=args.dtype, seed=args.seed, **args.flex_config)
    config = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(args.threads)
    loaded = load_text_model(args.model_name, dtype=getattr(torch, config.dtype), device=config.device, seed=args.seed,
                             ple=config.ple)
    return Setting(model=loaded.model, tokenizer=loaded.tokenizer, geometry=loaded.geometry, model_name=args.model_name,
                   dtype=config.dtype, device=config.device, threads=args.threads, gguf=args.gguf,
                   flex_config=args.flex_config), loaded.stop_ids


def make_jobs(args: argparse.Namespace, geometry, stop_ids: frozenset[int]) -> list:
    """The jobs asked for, shortest first. Raises PromptError where the vocabulary has too few ids for their prompts."""
    from gemma4_flex.bench import job
    draw = functools.partial(workload.random_prompts, vocab_size=geometry.vocab_size, seed=args.seed,
                             avoid=geometry.placeholder_ids | stop_ids)
    jobs = []
    if "decode" in args.jobs:
        jobs += [job.decode_job(draw, batch=batch, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens)
                 for batch in dict.fromkeys(args.batches)]
    if "mixed" in args.jobs:
        jobs.append(job.mixed_job(draw, requests=args.mixed_requests, max_batch=args.mixed_batch, seed=args.seed))
    if "prefill" in args.jobs:
        jobs.append(job.prefill_job(draw, prompts=args.prefill_prompts, prompt_tokens=args.prefill_tokens))
    return jobs


def run(args: argparse.Namespace, engines: list) -> dict:
    """Load, compare job by job, and give the result."""
    from tqdm import tqdm

    from gemma4_flex.bench.compare import Clock, compare
    from gemma4_flex.bench.compare_report import build_result
    from gemma4_flex.bench.measure import synchronizer
    from gemma4_flex.bench.roofline import copy_bandwidth, matmul_rate

    load_before = os.getloadavg()[0]
    setting, stop_ids = prepare(args)
    jobs = make_jobs(args, setting.geometry, stop_ids)
    bandwidths, matmuls = [copy_bandwidth(setting.device)], [matmul_rate(setting.device, setting.dtype)]
    measured = []
    print("preparing: each engine compiles for each job, minutes the first time", flush=True)
    for job in jobs:
        turns = len(engines) * (args.warmup + args.rounds)
        with tqdm(total=turns, desc=job.name, unit="turn", disable=not sys.stderr.isatty()) as bar:
            measured.append((job, compare(job, engines, setting, rounds=args.rounds, warmup=args.warmup,
                                          clock=Clock(synchronizer(setting.device)), on_turn=bar.update)))
    bandwidths.append(copy_bandwidth(setting.device))      # a neighbour may have disturbed the first; the better one counts
    matmuls.append(matmul_rate(setting.device, setting.dtype))
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return build_result(measured, setting, bandwidth=max(bandwidths, key=lambda b: b.bytes_per_s),
                        matmul=max(matmuls, key=lambda m: m.flop_per_s), load_before=load_before,
                        options=options | {"engines": [engine.name for engine in engines]})


def is_for_the_user(error: ValueError) -> bool:
    """Whether the message is meant for whoever typed the command; any other error is a bug and shows its trace."""
    from gemma4_flex.bench.rivals import UnknownEngineError
    if isinstance(error, (UsageError, UnknownEngineError, UnsupportedModelError, InvalidParameterError, PromptError,
                          stats_file.StatsPathError)):
        return True
    from gemma4_flex.checkpoints import CheckpointError
    return isinstance(error, CheckpointError)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check_flags(args)
        from gemma4_flex.bench.rivals import ENGINES, choose
        engines = choose(args.engines or list(ENGINES))
        EngineConfig(device=args.device, dtype=args.dtype, seed=args.seed, **args.flex_config)
        path, picture_path = stats_paths(args)
        result = run(args, engines)
    except ValueError as error:
        if not is_for_the_user(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    from gemma4_flex.bench.compare_report import picture, tables
    print(f"\n{tables(result)}")
    stats_file.write_json(result, path)
    drawn = picture(result, picture_path)
    print(f"result: {path}" + (f", picture: {picture_path}" if drawn else ""))
    failed = [e for job in result["jobs"] for e in job["engines"] if e["engine"].startswith("flex") and e["status"] != "ran"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
