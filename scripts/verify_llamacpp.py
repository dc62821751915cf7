"""Set llama.cpp beside the engine on GGUF files that the engine's model is written to: the same greedy tokens, the same ids.

    python scripts/verify_llamacpp.py --model_name tiny

llama.cpp runs in an environment of its own, which `make test-llamacpp` builds (about ten minutes). Exit code 1 where tokens part
and llama.cpp's own two best logits are no near tie.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from gemma4_flex.bench import workload
from gemma4_flex.geometry import UnsupportedModelError

WORKER = Path(__file__).with_name("llamacpp_worker.py")


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--model_name", default="tiny")
    add("--python", type=Path, default=Path(".venvs/llamacpp/bin/python"), help="a Python that has llama-cpp-python")
    add("--n_prompts", type=int, default=16, help="of the bundled prompts")
    add("--max_new_tokens", type=int, default=24)
    args = flags.parse_args(argv)

    import torch
    from tabulate import tabulate

    from gemma4_flex.checkpoints import CheckpointError
    from gemma4_flex.checkpoints.bundled import TINY
    from gemma4_flex.checkpoints.hf import load_tokenizer
    from gemma4_flex.text import PromptError
    from gemma4_flex.verify.llamacpp import LlamaCpp, LlamaCppError, verify
    torch.set_num_threads(1)
    try:
        llama_cpp = LlamaCpp(args.python, WORKER)
        chosen = workload.first_prompts(workload.bundled_prompts(), args.n_prompts)
        prompts = [prompt.ids for prompt in workload.encode_prompts(chosen, load_tokenizer(TINY))]
        with tempfile.TemporaryDirectory() as folder:
            checks = verify(args.model_name, prompts, llama_cpp, new_tokens=args.max_new_tokens, folder=Path(folder))
    except (CheckpointError, LlamaCppError, PromptError, UnsupportedModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(tabulate([("ok" if check.holds else "FAILED", check.name, check.found) for check in checks], tablefmt="plain"))
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
