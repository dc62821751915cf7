"""Measure decode speed and memory of bf16, GGUF Q8_0 and Q4_0, and MLX 4-bit weights, and of the PLE table in host memory.

    python scripts/benchmarks/bench_formats.py --model_name synthetic:gemma4_flex/assets/configs/e2b-wide.json --capture_cudagraph
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from gemma4_flex.bench import formats_page, stats_file
from gemma4_flex.bench.table import Table
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny", help="a bf16 model")
    add("--device", default="auto")
    add("--compile", action=argparse.BooleanOptionalAction, default=EngineConfig.compile)
    add("--capture_cudagraph", action="store_true")
    add("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8])
    add("--prompt_tokens", type=int, default=16)
    add("--new_tokens", type=int, default=64)
    add("--n_rounds", type=int, default=5)
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--stats_path", type=Path, help="where the figures go as JSON")
    args = flags.parse_args(argv)
    try:
        if min(*args.batches, args.prompt_tokens, args.n_rounds, args.threads, args.new_tokens - 1) < 1:
            raise InvalidParameterError("--batches, --prompt_tokens, --n_rounds and --threads start at 1, and --new_tokens at 2.")
        config = EngineConfig(device=args.device, dtype="bfloat16", compile=args.compile, capture_cudagraph=args.capture_cudagraph,
                              max_batch_size=max(args.batches), max_seq_length=args.prompt_tokens + args.new_tokens, seed=args.seed)
        path = args.stats_path and stats_file.check_writable(args.stats_path)
    except (InvalidParameterError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch
    from tqdm import tqdm

    from gemma4_flex.bench.formats import engines_of, measure_formats
    from gemma4_flex.bench.report import commit, device_name, versions
    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    torch.set_num_threads(args.threads)
    try:
        config = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
        base = load_text_model(args.model_name, dtype=torch.bfloat16, device=config.device, seed=args.seed)
        print("preparing: each format is written, read and compiled, minutes the first time", flush=True)
        with tempfile.TemporaryDirectory() as folder, \
                tqdm(total=len(args.batches) * (args.n_rounds + 1), desc="rounds", disable=not sys.stderr.isatty()) as bar:
            engines = engines_of(args.model_name, base, config, Path(folder), args.seed)
            figures = measure_formats(engines, batches=args.batches, prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens,
                                      rounds=args.n_rounds, seed=args.seed, on_round=bar.update)
    except (CheckpointError, InvalidParameterError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {"schema_version": 1, "benchmark": "bench_formats", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "model_name": args.model_name, "device": config.device, "device_name": device_name(config.device),
              "dtype": config.dtype, "captured": args.capture_cudagraph, "compiled": args.compile, "versions": versions(),
              "commit": commit(), **figures}
    print(formats_page.told(result, Table.text))
    if path:
        stats_file.write_json(result, path)
        print(f"result: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
