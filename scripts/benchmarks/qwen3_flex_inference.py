"""Generate with a Qwen3 or Llama model and measure it: prefill, decode, memory, and how near the hardware's floor.

    python scripts/benchmarks/qwen3_flex_inference.py --capture_cudagraph

Every flag, table row and JSON key is explained in scripts/benchmarks/README.md.
"""
from __future__ import annotations

import sys

from gemma4_flex.bench import inference
from gemma4_flex.bench.inference_flags import Command

COMMAND = Command(
    name="qwen3_flex_inference", about=__doc__,
    hub_model="Qwen/Qwen3-0.6B", small_model="synthetic:Qwen3-nano", small_is="a small Qwen3 of random weights",
    model_names="local directory, hub id, or synthetic:Qwen3-0.6B")


def main(argv: list[str] | None = None) -> int:
    return inference.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
