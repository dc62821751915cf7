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

from gemma4_flex.bench.report import commit, describe_geometry, device_name, versions
from gemma4_flex.bench.stats_file import StatsPathError, check_writable
from gemma4_flex.bench.workload import bundled_prompts, encode_prompts
from gemma4_flex.checkpoints import CheckpointError, LoadedModel, load_text_model
from gemma4_flex.geometry import UnsupportedModelError
from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams
from gemma4_flex.verify.report import describe, verify_model, write

RESULTS = Path(__file__).resolve().parent.parent / "results" / "runs"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="verify_numerics.py", usage=argparse.SUPPRESS, description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model_name", default="tiny", help="tiny (default), synthetic:E2B, a directory or a hub id")
    flags.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    flags.add_argument("--device", default=EngineConfig.device, help="auto, cpu or cuda")
    flags.add_argument("--attention", default=EngineConfig.attention, help="auto, flex or sdpa")
    flags.add_argument("--compile", action=argparse.BooleanOptionalAction, default=EngineConfig.compile,
                       help="compile steps with Inductor (default)")
    flags.add_argument("--shared_kv", default=EngineConfig.shared_kv, help="paged or sidecar")
    flags.add_argument("--capture_cudagraph", action="store_true", help="replay captured decode graphs")
    flags.add_argument("--max_new_tokens", type=int, default=16, help="rows compared a prompt (default 16)")
    flags.add_argument("--seed", type=int, default=EngineConfig.seed, help="for random prompts and synthetic weights")
    flags.add_argument("--out", type=Path, default=RESULTS, help="directory of the JSON file and the plot (default: results/runs/)")
    return flags


def text_of(loaded: LoadedModel) -> list[int]:
    """The bundled prompts in one run of ids; none for a model without a tokenizer."""
    if loaded.tokenizer is None:
        return []
    return [i for prompt in encode_prompts(bundled_prompts(), loaded.tokenizer) for i in prompt.ids]


def make_folder(folder: Path) -> None:
    """Found out before the run, not after. Raises StatsPathError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StatsPathError(f"can't make the directory {folder}: {error.strerror}; give another with --out") from None
    check_writable(folder / "verify.json")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        config = EngineConfig(
            device=args.device, dtype=args.dtype, attention=args.attention, shared_kv=args.shared_kv,
            capture_cudagraph=args.capture_cudagraph, compile=args.compile, seed=args.seed)
        SamplingParams(max_new_tokens=args.max_new_tokens)  # refuses a number it cannot take, before anything is loaded
        device = config.resolved("cuda" if torch.cuda.is_available() else "cpu").device
        make_folder(args.out)
        loaded = load_text_model(args.model_name, dtype=getattr(torch, args.dtype), device=device, seed=args.seed)
        if not loaded.geometry.ple_width:
            raise UnsupportedModelError(f"{args.model_name} is a {loaded.geometry.architecture} model, and the float64 reference "
                                        "is Gemma-4's: scripts/verify_real.py sets a Llama beside transformers")
    except (CheckpointError, InvalidParameterError, StatsPathError, UnsupportedModelError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    done = verify_model(
        loaded.model, loaded.tokenizer, loaded.geometry, config, model_name=args.model_name,
        max_new_tokens=args.max_new_tokens, text_ids=text_of(loaded))
    print(describe(done))
    print(*write(done, args.out, {"versions": versions(), "commit": commit(), "device_name": device_name(done.config.device),
                                  "geometry": describe_geometry(loaded.geometry)}), sep="\n")
    for contract in done.broken:
        print(f"contract broken: {contract.name}: {contract.detail}", file=sys.stderr)
    return 1 if done.broken else 0


if __name__ == "__main__":
    sys.exit(main())
