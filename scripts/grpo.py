"""GRPO with TRL on a LoRA adapter, rolling out through the engine: the model learns to count further than it was taught.

    python scripts/grpo.py                            # rollouts by the engine
    python scripts/grpo.py --rollout transformers     # the same trainer with TRL's own generation
    python scripts/grpo.py --rollout both --stats_path results/runs/grpo.json

Prints a line a step and tables at the end; with --stats_path also JSON and, beside it, a PNG. `make grpo-demo` installs
requirements-train.txt and runs it.
"""
from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
import warnings
from pathlib import Path

from gemma4_flex.bench import stats_file

NEEDED = ("trl", "datasets", "accelerate", "peft")
COUNTS = ("steps", "num_prompts", "num_generations", "max_new_tokens", "rank", "verify_cycles", "max_batch_size",
          "job_prompts", "job_samples")


class UsageError(ValueError):
    """Flags that cannot be obeyed; the message says what to do instead."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One sentence and exit code 2, without the page of usage that argparse puts before it."""
        self.exit(2, f"error: {message}\n")


def parser() -> Parser:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny")
    add("--rollout", choices=("engine", "transformers", "both"), default="engine", help="who generates; both: one run each")
    add("--steps", type=int, default=25)
    add("--num_prompts", type=int, default=16, help="questions a step")
    add("--num_generations", type=int, default=8, help="samples a question")
    add("--max_new_tokens", type=int, default=48)
    add("--temperature", type=float, default=1.0)
    add("--lr", type=float, default=3e-3, help="rate of the first update; it falls to zero")
    add("--rank", type=int, default=16)
    add("--verify_every", type=int, default=12, help="rollouts between two drift verifications; 0: none")
    add("--verify_cycles", type=int, default=5, help="perturb-and-refresh cycles of each")
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the engine's steps")
    add("--capture_cudagraph", action="store_true")
    add("--max_batch_size", type=int, default=64, help="most samples the engine runs at once")
    add("--job_prompts", type=int, default=16, help="prompts of the whole-job comparison after training")
    add("--job_samples", type=int, default=8, help="samples of each")
    add("--job_rounds", type=int, default=3, help="rounds of it by either side in turn; 0: none")
    add("--stats_path", type=Path, help="where the figures go as JSON, and the picture as a PNG beside it")
    return flags


def check(args: argparse.Namespace) -> None:
    """Raise UsageError, or StatsPathError, for flags that cannot be obeyed, before anything is loaded."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{', '.join(missing)} not installed: pip install -r requirements-train.txt, or make grpo-demo")
    for name in COUNTS:
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: give 1 or more")
    for name in ("verify_every", "job_rounds", "seed"):
        if getattr(args, name) < 0:
            raise UsageError(f"--{name} {getattr(args, name)}: give 0 or more")
    for name in ("lr", "temperature"):
        if not getattr(args, name) > 0:
            raise UsageError(f"--{name} {getattr(args, name)}: give a number above 0")
    if args.num_generations < 2:
        raise UsageError("--num_generations 1: GRPO compares a question's samples with each other; give 2 or more")
    if args.stats_path:
        stats_file.check_writable(args.stats_path)
        stats_file.check_writable(args.stats_path.with_suffix(".png"))


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        check(args)
    except (UsageError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warnings.filterwarnings("ignore", category=FutureWarning)      # between TRL's and transformers' releases
    warnings.filterwarnings("ignore", message="Already found a `peft_config`")      # a verification wraps a view of the base
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from gemma4_flex.bench import grpo, grpo_report
    from gemma4_flex.checkpoints import CheckpointError
    from gemma4_flex.geometry import UnsupportedModelError
    from gemma4_flex.lora.adapters import AdapterError
    from gemma4_flex.params import InvalidParameterError
    from gemma4_flex.rollout import RolloutError
    names = {name for name in vars(args)} & set(grpo.Settings.__dataclass_fields__)
    settings = grpo.Settings(**{name: getattr(args, name) for name in names})
    sides = (grpo.ENGINE, grpo.TRANSFORMERS) if args.rollout == "both" else (args.rollout,)
    runs, jobs = [], {}
    try:
        for side in sides:
            print(f"\nrollouts by {side}: {settings.num_prompts} questions x {settings.num_generations} samples a step", flush=True)
            training = grpo.Training(settings, side, on_step=lambda step: print(grpo_report.line(step), flush=True))
            print(grpo_report.head(), flush=True)
            runs.append(training.train())
            if settings.job_rounds and side == sides[0]:
                jobs = training.jobs()
    except (CheckpointError, UnsupportedModelError, InvalidParameterError, AdapterError, RolloutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, RolloutError) else 2
    result = grpo.build_result(settings, runs, jobs)
    print(f"\n{grpo_report.tables(result)}")
    if args.stats_path:
        stats_file.write_json(result, args.stats_path)
        grpo_report.plot(result, args.stats_path.with_suffix(".png"))
        print(f"result: {args.stats_path}, picture: {args.stats_path.with_suffix('.png')}")
    return 0 if all(grpo_report.is_exact(run) for run in result["runs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
