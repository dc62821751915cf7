"""Write a text model as an MLX-LM checkpoint, quantised by a recipe, with an adapter merged where one is named.

    python scripts/convert_mlx.py --model_name tiny --recipe 4bit --output tiny-4bit
    python scripts/convert_mlx.py --model_name path/to/gemma-4-E2B-it --recipe my_recipe.json --output e2b-mlx

A recipe is JSON: a default, and overrides by whole components of a module's path; false keeps a matrix as it is.

    {"mode": "affine", "bits": 4, "group_size": 64, "overrides": {"self_attn": {"bits": 8}, "per_layer_projection": false}}
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.geometry import UnsupportedModelError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--model_name", default="tiny", help="local directory, hub id, tiny, or synthetic:E2B")
    flags.add_argument("--recipe", default="4bit", help="name of one that comes with the package, or a JSON file; default 4bit")
    flags.add_argument("--output", type=Path, required=True, help="directory to write")
    flags.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16",
                       help="of what is kept, and of affine scales and biases; default bfloat16")
    flags.add_argument("--lora_adapter", type=Path, help="PEFT directory to merge, rounded to --dtype before it is quantised")
    flags.add_argument("--overwrite", action="store_true")
    flags.add_argument("--seed", type=int, default=0, help="of synthetic weights")
    args = flags.parse_args(argv)

    import torch

    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.checkpoints.mlx_recipe import load_recipe
    from gemma4_flex.checkpoints.mlx_write import write_mlx
    from gemma4_flex.lora.adapters import AdapterError, load_adapter
    from gemma4_flex.lora.gguf_adapter import merging
    try:
        recipe = load_recipe(args.recipe)
        loaded = load_text_model(args.model_name, dtype=getattr(torch, args.dtype), device="cpu", seed=args.seed)
        adapter = load_adapter(args.lora_adapter, loaded.geometry) if args.lora_adapter else None
        changed = {"changed": merging(adapter, loaded.model)} if adapter else {}
        written = write_mlx(args.output, loaded, recipe, overwrite=args.overwrite, **changed)
    except (AdapterError, CheckpointError, UnsupportedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = ", ".join(f"{count} {name}" for name, count in written.counts.items())
    print(f"{args.output}: {counts}; {written.num_bytes / 1e6:.1f} MB{f', {args.lora_adapter} merged' if adapter else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
