"""Measure LoRA in two copies: refresh time against its floor, merged against unmerged decode, extra memory.

    python scripts/benchmarks/bench_lora.py --model_name tiny --capture_cudagraph
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.bench import stats_file, workload
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny")
    add("--lora_adapter", type=Path, help="a PEFT directory (default: a seeded random one over all linears)")
    add("--rank", type=int, default=16, help="rank of the random adapter")
    add("--dtype", default="bfloat16")
    add("--device", default="auto")
    add("--attention", default=EngineConfig.attention)
    add("--compile", action=argparse.BooleanOptionalAction, default=EngineConfig.compile)
    add("--capture_cudagraph", action="store_true")
    add("--batch", type=int, default=8)
    add("--prompt_tokens", type=int, default=64)
    add("--new_tokens", type=int, default=64)
    add("--rounds", type=int, default=5)
    add("--seed", type=int, default=0)
    add("--stats_path", type=Path, help="where the figures go as JSON")
    args = flags.parse_args(argv)
    try:
        config = EngineConfig(device=args.device, dtype=args.dtype, attention=args.attention, compile=args.compile, seed=args.seed,
                              capture_cudagraph=args.capture_cudagraph, max_batch_size=args.batch,
                              max_seq_length=args.prompt_tokens + args.new_tokens, max_prefill_tokens=1024)
        path = args.stats_path and stats_file.check_writable(args.stats_path)
    except (InvalidParameterError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch
    from tqdm import tqdm

    from gemma4_flex.bench.lora import lora_table, measure_lora
    from gemma4_flex.bench.report import commit, versions
    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.lora.adapters import ALL_LINEAR, AdapterError, load_adapter, random_adapter
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        loaded = load_text_model(args.model_name, dtype=getattr(torch, args.dtype), device=device, seed=args.seed)
        adapter = load_adapter(args.lora_adapter, loaded.geometry) if args.lora_adapter else random_adapter(
            loaded.model, ALL_LINEAR, rank=args.rank, alpha=2 * args.rank, strength=0.05, seed=args.seed)
        prompts = workload.random_prompts(args.batch, args.prompt_tokens, loaded.geometry.vocab_size, args.seed,
                                          avoid=loaded.geometry.placeholder_ids | loaded.stop_ids)
        with tqdm(total=args.rounds + 1, desc="rounds", disable=not sys.stderr.isatty()) as bar:
            figures = measure_lora(loaded, adapter, config, prompts, new_tokens=args.new_tokens, rounds=args.rounds,
                                   on_round=bar.update)
    except (AdapterError, CheckpointError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(lora_table(figures))
    if path:
        stats_file.write_json({"benchmark": "bench_lora", "model_name": args.model_name, "device": device, "dtype": args.dtype,
                               "attention": args.attention, "captured": args.capture_cudagraph, "compiled": args.compile,
                               "rank": args.rank,
                               "versions": versions(), "commit": commit(), **figures}, path)
        print(f"result: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
