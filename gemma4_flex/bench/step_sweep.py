"""All steps of the kernel report: both published geometries, four batch sizes, three GPUs. Needs Triton."""
from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import torch
import triton

from gemma4_flex.bench.cross_compile import compile_first_fitting
from gemma4_flex.bench.pretended_gpu import GPUS
from gemma4_flex.bench.step_kernels import Work, step_row
from gemma4_flex.checkpoints.published import PUBLISHED

BATCHES = (1, 8, 64, 256)
CONTEXT = 2048              # tokens a decoding sequence has behind it
PREFILL_TOKENS = 2048       # of all prompts of a prefill step together


def sweep_steps(progress: Callable[[dict], None]) -> dict:
    """The record that results/kernel_steps.json holds."""
    works = [Work("decode", batch, CONTEXT) for batch in BATCHES]
    works += [Work("prefill", batch, PREFILL_TOKENS // batch) for batch in BATCHES]
    steps = []
    for model, work, arch in itertools.product(("E2B", "E4B"), works, GPUS):
        row = step_row(PUBLISHED[model], work, GPUS[arch], model=model, arch=arch,
                       compiler=functools.partial(_compiled, arch=arch))
        progress(row)
        steps.append(row)
    return {"torch": torch.__version__, "triton": triton.__version__, "steps": steps}


@functools.cache
def _compiled(source: str, *, arch: str) -> dict:
    return dataclasses.asdict(compile_first_fitting(source, GPUS[arch].target, GPUS[arch].shared_limit))
