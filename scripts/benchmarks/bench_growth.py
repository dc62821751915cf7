"""Measure how a captured decode step grows with context, batch and page pool, and what the scheduler costs.

    python scripts/benchmarks/bench_growth.py --model_name tiny
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.bench import growth_page, stats_file
from gemma4_flex.bench.results_page import draw
from gemma4_flex.bench.table import Table
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError

RUNS = Path(__file__).resolve().parent.parent.parent / "results" / "runs"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument

    def sizes(name: str, default: list[int], says: str) -> None:
        add(name, type=_size, nargs="+", default=default, metavar="N", help=f"{says} (default {' '.join(map(str, default))})")
    add("--model_name", default="tiny")
    add("--device", default=EngineConfig.device, help="auto, cpu or cuda")
    add("--dtype", default=EngineConfig.dtype, help="auto, float32 or bfloat16")
    add("--attention", default=EngineConfig.attention, help="auto, flex or sdpa")
    add("--shared_kv", default=EngineConfig.shared_kv, help="paged or sidecar")
    add("--compile", action=argparse.BooleanOptionalAction, default=EngineConfig.compile, help="compile steps with Inductor")
    add("--decode_steps_per_sync", type=_size, default=EngineConfig.decode_steps_per_sync,
        help="most decode steps between two looks of the host")
    sizes("--contexts", [64, 192, 960, 4032], "tokens of the one sequence")
    sizes("--batches", [1, 4, 16, 64], "sequences, each of --context tokens")
    sizes("--pools", [1, 4, 16], "pages, in multiples of what --pool_batch sequences need")
    sizes("--running", [8, 64, 256], "running sequences at which the scheduler is timed")
    add("--context", type=_size, default=192, help="tokens of a sequence while batch or pool vary")
    add("--pool_batch", type=_size, default=4, help="sequences while the pool varies")
    add("--rounds", type=_size, default=5, help="measured rounds, after one that warms up")
    add("--steps", type=_size, default=16, help="decode steps timed a round")
    add("--seed", type=int, default=EngineConfig.seed)
    add("--stats_path", type=Path, help="where the figures go as JSON, the plot beside it "
                                        "(default: results/runs/growth_<model>_<device>.json)")
    return flags


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def stats_path(given: Path | None, model_name: str, device: str) -> Path:
    """The path to write to, tried. Raises StatsPathError."""
    if given is None:
        name = "".join(c if c.isalnum() or c in "-." else "-" for c in Path(model_name).name.removesuffix(".json"))
        given = RUNS / f"growth_{name}_{device}.json"
        given.parent.mkdir(parents=True, exist_ok=True)
    return stats_file.check_writable(given)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)

    import torch
    from tqdm import tqdm

    from gemma4_flex.bench.growth import Sizes, measure_growth, num_cases
    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    try:
        config = EngineConfig(device=args.device, dtype=args.dtype, attention=args.attention, shared_kv=args.shared_kv,
                              compile=args.compile, decode_steps_per_sync=args.decode_steps_per_sync, seed=args.seed)
        resolved = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
        path = stats_path(args.stats_path, args.model_name, resolved.device)
        sizes = Sizes(*(tuple(sorted(set(given))) for given in (args.contexts, args.batches, args.pools, args.running)),
                      context=args.context, pool_batch=args.pool_batch, rounds=args.rounds, steps=args.steps)
        loaded = load_text_model(args.model_name, dtype=getattr(torch, resolved.dtype), device=resolved.device, seed=args.seed)
        with tqdm(total=num_cases(sizes), desc="cases", disable=not sys.stderr.isatty()) as bar:
            result = measure_growth(loaded, config, sizes, model_name=args.model_name, on_case=bar.update)
    except (CheckpointError, InvalidParameterError, UnsupportedModelError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(growth_page.told(result, Table.text))
    stats_file.write_json(result, path)
    print(f"result: {path}\nplot: {draw(growth_page.plot, path)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
