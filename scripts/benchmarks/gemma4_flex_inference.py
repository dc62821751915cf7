"""Generate with a Gemma-4 E-series model and measure it: prefill, decode, memory, and how near the hardware's floor.

    python scripts/benchmarks/gemma4_flex_inference.py --capture_cudagraph

Every flag, table row and JSON key is explained in scripts/benchmarks/README.md.
"""
from __future__ import annotations

import sys

from gemma4_flex.bench import inference
from gemma4_flex.bench.inference_flags import Command

COMMAND = Command(
    name="gemma4_flex_inference", about=__doc__,
    hub_model="unsloth/gemma-4-E2B-it", small_model="tiny", small_is="the bundled model",
    model_names="local directory, hub id, tiny, or synthetic:E2B",
    no_fa4="FlashAttention-4 stops at head_dim 128 and Gemma-4's heads are 256 and 512 wide")


def main(argv: list[str] | None = None) -> int:
    return inference.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())
