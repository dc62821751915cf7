"""Write the tables of the READMEs and the plots from results/, or check that they agree.

    python scripts/benchmarks/report.py            # writes what disagrees
    python scripts/benchmarks/report.py --check    # exits 1 naming it
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.bench.results_page import PageError, disagreements, rewrite

ROOT = Path(__file__).resolve().parent.parent.parent


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--check", action="store_true", help="write nothing, exit 1 where something disagrees")
    flags.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    args = flags.parse_args(argv)
    try:
        stale = disagreements(args.root) if args.check else rewrite(args.root)
    except PageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in stale:
        print(f"{line}{': run scripts/benchmarks/report.py' if args.check else ': written'}")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
