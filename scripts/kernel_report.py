"""Print what the engine's kernels take on GPUs that are not here (launches, shared memory, registers, spills), and save it.

Two parts: `attention`, the flex_attention kernels with all the options tried (half an hour on one core), and `step`, all
kernels of whole decode and prefill steps. Runs in an environment of its own, on a CPU: pip install -r requirements-kernels.txt
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "attention", "step"), default="all", help="what to compile (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS,
                        help="folder for kernel_report.json, kernel_steps.json and their .md (default: results/)")
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is missing, which compiles the kernels: pip install -r requirements-kernels.txt, "
                 "best in an environment of its own")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part in ("all", "step"):
        write_steps(args.out)
    if args.part in ("all", "attention"):
        write_attention(args.out)


def write_attention(out: Path) -> None:
    from gemma4_flex.bench.kernel_page import markdown, record  # here, so that without triton main's line is all one sees
    from gemma4_flex.bench.kernels import Sweep
    report = Sweep(progress=lambda line: print(line, flush=True)).run()
    (out / "kernel_report.json").write_text(record(report))
    (out / "kernel_report.md").write_text(markdown(report))
    print(f"written: {out / 'kernel_report.json'} and .md")


def write_steps(out: Path) -> None:
    from gemma4_flex.bench.step_page import step_line, step_markdown, step_record
    from gemma4_flex.bench.step_sweep import sweep_steps
    report = sweep_steps(progress=lambda row: print(step_line(row), flush=True))
    (out / "kernel_steps.json").write_text(step_record(report))
    earlier = out / "kernel_steps_before.json"
    before = json.loads(earlier.read_text()) if earlier.is_file() else None
    (out / "kernel_steps.md").write_text(step_markdown(report, before))
    print(f"written: {out / 'kernel_steps.json'} and .md")


if __name__ == "__main__":
    main()
