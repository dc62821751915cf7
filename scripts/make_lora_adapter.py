"""Write a seeded LoRA adapter whose B is not zero, for any model that loads: something to test and measure with.

    python scripts/make_lora_adapter.py --model_name tiny --out adapter
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.geometry import UnsupportedModelError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--model_name", default="tiny", help="local directory, hub id, tiny, or synthetic:E2B")
    flags.add_argument("--out", type=Path, required=True, help="directory to write, in PEFT's format")
    flags.add_argument("--rank", type=int, default=8)
    flags.add_argument("--alpha", type=float, default=16.0)
    flags.add_argument("--targets", nargs="+", default=["all-linear"],
                       help="all-linear, or names such as q_proj layers.3.mlp.up_proj")
    flags.add_argument("--strength", type=float, default=0.05, help="size of the delta against the weight it is added to (RMS)")
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args(argv)

    import torch

    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.lora.adapters import ALL_LINEAR, AdapterError, random_adapter, save_adapter
    try:
        if args.rank < 1:
            raise AdapterError(f"--rank {args.rank} cannot be used: give at least 1.")
        model = load_text_model(args.model_name, dtype=torch.bfloat16, device="cpu", seed=args.seed).model
        targets = ALL_LINEAR if args.targets == [ALL_LINEAR] else args.targets
        adapter = random_adapter(model, targets, rank=args.rank, alpha=args.alpha, strength=args.strength, seed=args.seed)
        save_adapter(adapter, args.out, base=args.model_name)
    except (AdapterError, CheckpointError, UnsupportedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: rank {args.rank}, alpha {args.alpha:g}, {len(adapter.pairs)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
