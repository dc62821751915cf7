"""Measure deterministic mode: whether a request's bits are the same alone and in any batch, and what that costs.

    python scripts/benchmarks/bench_deterministic.py --model_name tiny --capture_cudagraph
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gemma4_flex.bench import deterministic_page, stats_file
from gemma4_flex.bench.table import Table
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny")
    add("--dtype", default="bfloat16")
    add("--device", default="auto")
    add("--attention", default=EngineConfig.attention)
    add("--compile", action=argparse.BooleanOptionalAction, default=EngineConfig.compile)
    add("--capture_cudagraph", action="store_true")
    add("--max_batch_size", type=int, default=8)
    add("--max_prefill_tokens", type=int, default=EngineConfig.max_prefill_tokens)
    add("--n_prompts", type=_count, default=16)
    add("--prompt_tokens", type=_count, default=64, help="of the longest prompt; the shortest may have a quarter of it")
    add("--max_new_tokens", type=_two, default=64)
    add("--logprobs", type=int, default=0, help="alternatives a token that are compared too")
    add("--n_rounds", type=_count, default=7)
    add("--seed", type=int, default=0)
    add("--stats_path", type=Path, help="where the figures go as JSON")
    args = flags.parse_args(argv)
    try:
        config = EngineConfig(device=args.device, dtype=args.dtype, attention=args.attention, compile=args.compile, seed=args.seed,
                              capture_cudagraph=args.capture_cudagraph, max_batch_size=args.max_batch_size,
                              max_seq_length=args.prompt_tokens + args.max_new_tokens, max_prefill_tokens=args.max_prefill_tokens)
        path = args.stats_path and stats_file.check_writable(args.stats_path)
    except (InvalidParameterError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch
    from tqdm import tqdm

    from gemma4_flex.bench.deterministic import measure_deterministic
    from gemma4_flex.bench.report import commit, device_name, versions
    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.text import PromptError
    try:
        config = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_text_model(args.model_name, dtype=getattr(torch, config.dtype), device=config.device, seed=args.seed)
        with tqdm(total=args.n_rounds + 1, desc="rounds", disable=not sys.stderr.isatty()) as bar:
            figures = measure_deterministic(loaded, config, n_prompts=args.n_prompts, prompt_tokens=args.prompt_tokens,
                                            new_tokens=args.max_new_tokens, rounds=args.n_rounds, logprobs=args.logprobs,
                                            on_round=bar.update)
    except (CheckpointError, InvalidParameterError, PromptError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(deterministic_page.told(figures, Table.text))
    if path:
        stats_file.write_json({"schema_version": 1, "benchmark": "bench_deterministic",
                               "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "model_name": args.model_name,
                               "device": config.device, "device_name": device_name(config.device), "dtype": config.dtype,
                               "captured": args.capture_cudagraph, "compiled": args.compile, "versions": versions(),
                               "commit": commit(), **figures}, path)
        print(f"result: {path}")
    if not deterministic_page.proved(figures):
        print("error: in deterministic mode a request's bits depend on its batch", file=sys.stderr)
        return 1
    return 0


def _count(text: str, least: int = 1) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value


def _two(text: str) -> int:
    return _count(text, 2)      # the first token is prefill's: with one there is no decode to time


if __name__ == "__main__":
    sys.exit(main())
