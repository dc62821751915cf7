"""Set few-bit formats beside bf16: mean KL along the same tokens, top-1 agreement, and size, for MLX recipes and GGUF types.

    python scripts/compare_recipes.py --model_name tiny

Prints a table; writes JSON and a plot of KL against size beside it.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from gemma4_flex.bench import recipes_page, stats_file, workload
from gemma4_flex.bench.table import Table
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError

TYPES = ("BF16", "Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
LOW_PLE = ("Q4_0",)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny", help="a bf16 model: tiny (default), synthetic:E2B, a directory or a hub id")
    add("--types", type=_names, default=TYPES, help=f"GGUF types, separated by commas (default {','.join(TYPES)})")
    add("--low_ple", type=_names, default=LOW_PLE, help="types once more with the PLE table in as few bits (default Q4_0)")
    add("--recipes", type=_names, help="MLX recipes, names or JSON files (default: those that come with the package)")
    add("--device", default="auto")
    add("--n_prompts", type=int, default=32, help="spread over the bundled prompts (default 32), or random without a tokenizer")
    add("--new_tokens", type=int, default=24, help="tokens along which distributions are compared (default 24)")
    add("--seed", type=int, default=0)
    add("--stats_path", type=Path, help="where the JSON goes, and the plot beside it")
    args = flags.parse_args(argv)
    try:
        if min(args.n_prompts, args.new_tokens) < 1:
            raise InvalidParameterError("--n_prompts and --new_tokens must be at least 1.")
        config = EngineConfig(device=args.device, dtype="bfloat16", compile=False, max_batch_size=8, seed=args.seed)
        path = args.stats_path and stats_file.check_writable(args.stats_path)
    except (InvalidParameterError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch
    from tqdm import tqdm

    from gemma4_flex.bench.recipes import candidates, compare_recipes
    from gemma4_flex.bench.report import commit, device_name, versions
    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.checkpoints.mlx_recipe import recipe_names
    from gemma4_flex.text import PromptError
    try:
        config = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
        which = candidates(args.types, recipe_names() if args.recipes is None else args.recipes, args.low_ple)
        loaded = load_text_model(args.model_name, dtype=torch.bfloat16, device=config.device, seed=args.seed)
        prompts = some_prompts(loaded, args.n_prompts, args.seed)
        with tqdm(total=1 + len(which), desc="formats", disable=not sys.stderr.isatty()) as bar:
            figures = compare_recipes(loaded, config, prompts, which, new_tokens=args.new_tokens, on_done=bar.update)
    except (CheckpointError, InvalidParameterError, PromptError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {"schema_version": 1, "benchmark": "compare_recipes", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "model_name": args.model_name, "device": config.device, "device_name": device_name(config.device),
              "dtype": config.dtype, "versions": versions(), "commit": commit(), **figures}
    print(recipes_page.told(result, Table.text))
    if path:
        stats_file.write_json(result, path)
        recipes_page.plot(result, path.with_suffix(".png"))
        print(f"result: {path}")
    return 0


def some_prompts(loaded, count: int, seed: int) -> list[list[int]]:
    """Bundled prompts from all over the set, as the model's own template has them; random ids for a model without a tokenizer."""
    if loaded.tokenizer is None:
        avoid = loaded.geometry.placeholder_ids | loaded.stop_ids
        return [list(p.ids) for p in workload.encode_random(count, loaded.geometry.vocab_size, seed, avoid=avoid)]
    everything = workload.bundled_prompts()
    chosen = everything[:: max(1, len(everything) // count)][:count]
    return [list(p.ids) for p in workload.encode_prompts(chosen, loaded.tokenizer)]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


if __name__ == "__main__":
    sys.exit(main())
