"""Prove a model's numbers: float64 reference, Hugging Face and engine, layer by layer, along Hugging Face's greedy tokens.

    python scripts/verify_numerics.py --model_name tiny
    python scripts/verify_numerics.py --model_name tiny --dtype bfloat16 --capture_cudagraph

Prints a table, writes a JSON file and a plot, and exits 1 naming each contract that is broken.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gemma4_flex.bench.report import check_writable, commit, versions
from gemma4_flex.bench.workload import bundled_prompts, encode_prompts
from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.verify.report import describe, verify_model, write


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", default="tiny", help="tiny, synthetic:E2B, a hub id or a directory")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--attention", default=EngineConfig.attention, choices=["flex", "sdpa"])
    parser.add_argument("--shared_kv", default=EngineConfig.shared_kv, choices=["paged", "sidecar"])
    parser.add_argument("--capture_cudagraph", action="store_true")
    parser.add_argument("--max_new_tokens", type=int, default=16, help="rows compared a prompt")
    parser.add_argument("--seed", type=int, default=EngineConfig.seed)
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of the JSON file and the plot")
    args = parser.parse_args(arguments)
    try:
        config = EngineConfig(
            device=args.device, dtype=args.dtype, attention=args.attention, shared_kv=args.shared_kv,
            capture_cudagraph=args.capture_cudagraph, seed=args.seed)
        SamplingParams(max_new_tokens=args.max_new_tokens)  # refuses a number it cannot take, before anything is loaded
        device = config.resolved("cuda" if torch.cuda.is_available() else "cpu").device
        args.out.mkdir(parents=True, exist_ok=True)
        check_writable(args.out / "verify.json")
        loaded = load_text_model(args.model_name, dtype=getattr(torch, args.dtype), device=device, seed=args.seed)
        text_ids = [i for prompt in encode_prompts(bundled_prompts(), loaded.tokenizer) for i in prompt.ids] \
            if loaded.tokenizer is not None else []
        done = verify_model(
            loaded.model, loaded.tokenizer, loaded.geometry, config, model_name=args.model_name,
            max_new_tokens=args.max_new_tokens, text_ids=text_ids)
    except (ValueError, OSError) as error:  # what a user can put right; the message says how
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(describe(done))
    print(*write(done, args.out, {"versions": versions(), "commit": commit()}), sep="\n")
    for contract in done.broken:
        print(f"contract broken: {contract.name}: {contract.detail}", file=sys.stderr)
    return 1 if done.broken else 0


if __name__ == "__main__":
    sys.exit(main())
