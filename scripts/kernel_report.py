"""Print what the attention kernels take on GPUs that are not here (shared memory, registers, spills), and save it.

Runs in an environment of its own, on a CPU: pip install -r requirements-kernels.txt
"""
from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for kernel_report.json and .md (default: results/)")
    args = parser.parse_args()
    if importlib.util.find_spec("triton") is None:
        sys.exit("triton is missing, which compiles the kernels: pip install -r requirements-kernels.txt, "
                 "best in an environment of its own")
    args.out.mkdir(parents=True, exist_ok=True)

    from gemma4_flex.bench.kernel_page import markdown, record  # here, so that without triton the line above is all one sees
    from gemma4_flex.bench.kernels import Sweep
    report = Sweep(progress=lambda line: print(line, flush=True)).run()
    (args.out / "kernel_report.json").write_text(record(report))
    (args.out / "kernel_report.md").write_text(markdown(report))
    print(f"written: {args.out / 'kernel_report.json'} and .md")


if __name__ == "__main__":
    main()
