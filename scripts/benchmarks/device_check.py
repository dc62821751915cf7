"""Everything that needs a GPU, in one command: proofs first, then decode, prefill, LoRA, kernels and transformers beside them.

    python scripts/benchmarks/device_check.py --out DIR                                # 9 minutes on an H200, no network
    python scripts/benchmarks/device_check.py --out DIR --scale tiny --device cpu      # the same parts, small: no GPU

A part that fails does not end the run: it is named in the table and in DIR/device_check.json, and the exit code is 1. The
file is written after every figure, so that a run that was killed leaves what it had measured.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gemma4_flex.bench.device_isolation import run_isolated
from gemma4_flex.bench.device_record import FILE_NAME, Record, table
from gemma4_flex.bench.stats_file import StatsPathError, check_writable


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="device_check.py", description=__doc__, allow_abbrev=False,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--out", type=Path, required=True, help=f"folder for {FILE_NAME}; made where it is missing")
    add("--scale", default="full", choices=("full", "tiny"))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--minutes", type=float, default=9.0, help="for all parts together (default 9)")
    add("--parts", nargs="+", default=[], metavar="NAME", help="only these, by the names the table shows")
    add("--seed", type=int, default=0, help="for synthetic weights and prompts")
    args = flags.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes

    import torch

    from gemma4_flex.bench.device_bench import Settings
    from gemma4_flex.bench.device_parts import chosen, run_named
    device = args.device if args.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("PyTorch sees no CUDA device here: use --device cpu --scale tiny.")
        names = [part.name for part in chosen(args.parts)]
        args.out.mkdir(parents=True, exist_ok=True)
        path = check_writable(args.out / FILE_NAME)
    except (OSError, StatsPathError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    settings = Settings(scale=args.scale, device=device, minutes=args.minutes, seed=args.seed)
    record = Record(path, {"scale": args.scale, "minutes": args.minutes, "seed": args.seed}, names)
    if device == "cuda":
        run_isolated(names, run_named, (settings,), record, deadline)
    else:
        run_named(names, settings, deadline, record.take)
    print(f"\n{table(record)}\nresult: {path}")
    return 0 if record.passed else 1


if __name__ == "__main__":
    sys.exit(main())
