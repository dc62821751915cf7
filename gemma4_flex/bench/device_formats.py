"""The device check's part on few-bit weights and on a PLE table in host memory: the same tokens as from the device's, and speed."""
from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from gemma4_flex.bench.device_bench import Bench, CheckFailed
from gemma4_flex.bench.formats import engines_of, measure_formats
from gemma4_flex.bench.measure import MIN_ROUNDS
from gemma4_flex.checkpoints import load_text_model


def formats(bench: Bench) -> str:
    """Decode of every format at the smallest and the first larger batch, captured; a table in host memory must give the same
    tokens, from replays alone."""
    scale, settings = bench.scale, bench.settings
    batches, tokens = scale.batches[:2], scale.window
    base = load_text_model(scale.formats_model, dtype=torch.bfloat16, device=settings.device, seed=settings.seed)
    config = bench.config(max_batch_size=max(batches), max_seq_length=scale.contexts[0] + tokens)
    with tempfile.TemporaryDirectory() as folder:
        engines = engines_of(scale.formats_model, base, config.resolved(settings.device), Path(folder), settings.seed)
        found = measure_formats(engines, batches=batches, prompt_tokens=min(16, scale.contexts[0]), new_tokens=tokens,
                                rounds=MIN_ROUNDS, seed=settings.seed)
    bench.row(model=scale.formats_model, **found)
    for job in found["jobs"]:
        host = job["sides"]["bf16, PLE table in host memory"]
        if not host["same_tokens_as_bf16"] or host["eager"]:
            raise CheckFailed(f"a PLE table in host memory gives other tokens, or eager steps, at batch {job['batch']}")
    told = [f"{name} {side['over_bf16']['median']:.2f} x" for name, side in found["jobs"][0]["sides"].items() if name != "bf16"]
    return f"PLE in host memory: the same tokens; decode over bf16 at batch {batches[0]}: {', '.join(told)}"
