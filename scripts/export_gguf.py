"""Write a Gemma-4 E-series model as a GGUF file, with an adapter merged where one is named, or the adapter alone.

    python scripts/export_gguf.py --model_name tiny --out tiny.gguf --type Q8_0
    python scripts/export_gguf.py --model_name tiny --lora_adapter adapter --lora_only --out adapter.gguf
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.geometry import UnsupportedModelError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    flags.add_argument("--model_name", default="tiny", help="local directory, hub id, tiny, or synthetic:E2B")
    flags.add_argument("--out", type=Path, required=True, help="file to write")
    flags.add_argument("--type", help="ggml type of the matrices: F32, F16, BF16, Q8_0, Q6_K, Q5_1, Q5_0, Q4_1 or Q4_0; default "
                                      "BF16, and F32 for an adapter alone, whose matrices are in F32, F16 or BF16")
    flags.add_argument("--ple_type", help="type of the table of per-layer embeddings; default --type, but no fewer than 8 bits")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), help="what the weights are read in before they are converted; "
                       "default float32 for --type F32, else bfloat16, in which E-series models are published")
    flags.add_argument("--lora_adapter", type=Path, help="PEFT directory to merge, in fp32 and rounded once, to the file's type")
    flags.add_argument("--lora_only", action="store_true", help="write the adapter alone, in llama.cpp's format")
    flags.add_argument("--overwrite", action="store_true")
    flags.add_argument("--seed", type=int, default=0, help="of synthetic weights")
    args = flags.parse_args(argv)

    import torch

    from gemma4_flex.checkpoints import CheckpointError, load_text_model
    from gemma4_flex.checkpoints.gguf_write import write_gguf
    from gemma4_flex.lora.adapters import AdapterError, load_adapter
    from gemma4_flex.lora.gguf_adapter import merging, write_gguf_adapter
    try:
        if args.lora_only and (args.lora_adapter is None or args.ple_type):
            raise CheckpointError("--lora_only writes an adapter and no table: name it by --lora_adapter and leave out "
                                  "--ple_type")
        wanted = args.type or ("F32" if args.lora_only else "BF16")
        dtype = args.dtype or ("float32" if wanted == "F32" and not args.lora_only else "bfloat16")
        loaded = load_text_model(args.model_name, dtype=getattr(torch, dtype), device="cpu", seed=args.seed,
                                 gguf_weights="dequantize")
        adapter = load_adapter(args.lora_adapter, loaded.geometry) if args.lora_adapter else None
        if args.lora_only:
            num_bytes = write_gguf_adapter(args.out, adapter, loaded.model, type_name=wanted, overwrite=args.overwrite)
            print(f"{args.out}: an adapter of {len(adapter.pairs)} modules in {wanted}, {num_bytes / 1e6:.1f} MB")
            return 0
        changed = {"changed": merging(adapter, loaded.model)} if adapter else {}
        written = write_gguf(args.out, loaded, type_name=wanted, ple_type=args.ple_type, overwrite=args.overwrite, **changed)
    except (AdapterError, CheckpointError, UnsupportedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = ", ".join(f"{count} {name}" for name, count in written.counts.items())
    print(f"{args.out}: {counts} tensors, {written.num_bytes / 1e6:.1f} MB{f', {args.lora_adapter} merged' if adapter else ''}")
    for name, found in written.fallbacks.items():
        print(f"  {name} is {found}: blocks of {wanted} do not fill its rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
