"""Set the engine beside transformers on a real model, SmolLM2-135M-Instruct: greedy tokens in fp32, prompt by prompt.

    python scripts/verify_real.py

Downloads about 90 MB the first time, into ~/.cache/gemma4-flex. Exit code 1 where tokens part and Hugging Face's own two best
logits are no tie.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemma4_flex.bench import stats_file, workload
from gemma4_flex.params import EngineConfig, InvalidParameterError


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = flags.add_argument
    add("--n_prompts", type=int, default=40, help="of the bundled prompts (default 40)")
    add("--max_new_tokens", type=int, default=32)
    add("--attention", default=EngineConfig.attention)
    add("--compile", action="store_true", help="compile steps with Inductor: minutes of C++ for 30 layers")
    add("--cache", type=Path, help="where the model is kept (default ~/.cache/gemma4-flex)")
    add("--stats_path", type=Path, help="where the comparison goes as JSON")
    args = flags.parse_args(argv)

    from tabulate import tabulate
    from tqdm import tqdm

    from gemma4_flex.bench.report import commit, versions
    from gemma4_flex.engine import FlexEngine
    from gemma4_flex.text import PromptError
    from gemma4_flex.verify import real_model
    try:
        config = EngineConfig(device="cpu", dtype="float32", attention=args.attention, compile=args.compile, capture_cudagraph=True,
                              max_batch_size=8, max_seq_length=512)
        prompts = workload.first_prompts(workload.bundled_prompts(), args.n_prompts)
        path = args.stats_path and stats_file.check_writable(args.stats_path)
        file = real_model.fetch_gguf(args.cache or real_model.cache_folder())
    except (InvalidParameterError, PromptError, real_model.RealModelError, stats_file.StatsPathError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model, tokenizer = real_model.load_gguf(file)
    engine = FlexEngine(model, tokenizer, config)
    encoded = [list(p.ids) for p in workload.encode_prompts(prompts, tokenizer)]
    with tqdm(total=len(encoded), desc="prompts", disable=not sys.stderr.isatty()) as bar:
        found = real_model.compare(model, engine, encoded, new_tokens=args.max_new_tokens, on_prompt=bar.update)
    parted = [(prompts[n].question, c.parted_at, "none" if c.margin is None else f"{c.margin:.2g}", "tie" if c.holds else "NO TIE")
              for n, c in enumerate(found) if c.parted_at is not None]
    if parted:
        print(tabulate(parted, headers=["prompt", "parted at step", "Hugging Face's margin", ""]))
    broken = sum(not c.holds for c in found)
    print(f"{file.name}, float32, {next(iter(engine.attention_backends.values()))}{', compiled' if args.compile else ''}: "
          f"{len(found) - len(parted)} of {len(found)} prompts give transformers' tokens, "
          f"{sum(len(c.ours) for c in found)} tokens in all; {len(parted)} part, {broken} of them where there is no tie")
    if path:
        stats_file.write_json({"benchmark": "verify_real", "model": file.name, "dtype": "float32", "versions": versions(),
                               "commit": commit(), "attention_backends": dict(engine.attention_backends), "compiled": args.compile,
                               "max_new_tokens": args.max_new_tokens, "prompts": len(found), "same": len(found) - len(parted),
                               "tokens": sum(len(c.ours) for c in found), "no_tie": broken}, path)
        print(f"result: {path}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
