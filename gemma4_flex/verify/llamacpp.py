"""Files that this package writes, as llama.cpp reads them: it must give the engine's tokens for the same weights.

llama.cpp runs in an environment and a process of its own. Its logits are not the engine's to the last bit (its GELU is a table
of fp16 numbers, and with weights in few bits it rounds activations to 8), so that tokens may part where its two best logits
are nearly a tie; how near depends on the type. Where nothing is rounded, those two must also be as far apart as here, at each
token: a wrong softcap changes no greedy token, but that.
"""
from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from gemma4_flex.checkpoints import LoadedModel, load_text_model
from gemma4_flex.checkpoints.gguf_file import WRITABLE
from gemma4_flex.checkpoints.gguf_write import write_gguf
from gemma4_flex.engine import FlexEngine
from gemma4_flex.lora.adapters import LINEARS, random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.gguf_adapter import UNSUPPORTED, merging, write_gguf_adapter
from gemma4_flex.params import EngineConfig, SamplingParams

NEAR_TIE = {"F32": 0.02, "F16": 0.05}
NEAR_TIE_OTHERS = 1.0
MOST_APART = 0.03       # of two margins in F32; the GELU alone moves logits by 7e-3
TEXTS = (
    "a\n\n\nb", " leading", "two  and   three", "\n", "", "1234567890 3.14", "\t\tx = 1;\n\n\n\n", "<0x0A><eos",
    "caf\u00e9 cafe\u0301", "<|turn>user\nhi<turn|>\n", "<|channel>thought\n<channel|>",
    "\u65e5\u672c\u8a9e\u3002 \ud55c\uad6d\uc5b4", "\U0001f600\U0001f469\u200d\U0001f4bb!", "\u2581 \u2581\u2581",
)


class LlamaCppError(ValueError):
    """llama.cpp cannot be asked; the message says what to do."""


class Answers(NamedTuple):
    """What llama.cpp says: greedy tokens and their margins for each prompt, and each text's ids."""
    tokens: list[list[int]]
    margins: list[list[float]]
    ids: list[list[int]]


class Check(NamedTuple):
    name: str
    holds: bool
    found: str


class LlamaCpp:
    """llama.cpp, as `worker` asks it, run by `python`."""

    def __init__(self, python: Path, worker: Path):
        self.command = [str(python), str(worker)]
        if not python.is_file():
            raise LlamaCppError(f"{python} is not there: build it with `make test-llamacpp`, or name a Python that has "
                                "llama-cpp-python (--python)")

    def ask(self, model: Path, prompts: Sequence[Sequence[int]], new_tokens: int, *, lora: Path | None = None,
            texts: Sequence[str] = ()) -> Answers:
        asked = {"model": str(model), "lora": lora and str(lora), "prompts": [list(prompt) for prompt in prompts],
                 "new_tokens": new_tokens, "texts": list(texts)}
        with tempfile.TemporaryDirectory() as folder:
            answers = Path(folder, "answers.json")
            done = subprocess.run([*self.command, str(answers)], input=json.dumps(asked), capture_output=True, text=True,
                                  check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
                raise LlamaCppError(f"llama.cpp failed on {model.name} (exit code {done.returncode}): {last}")
            found = json.loads(answers.read_text())
        return Answers(found["tokens"], found["margins"], found["ids"])


def verify(model_name: str, prompts: Sequence[Sequence[int]], llama_cpp: LlamaCpp, *, new_tokens: int, folder: Path,
           types: Sequence[str] = WRITABLE) -> list[Check]:
    """Writes the model in each type, F32 among them, and with an adapter, and compares tokens and tokenizers."""
    loaded = load_text_model(model_name, dtype=torch.float32, device="cpu")
    checks, files = [], {name: folder / f"{name}.gguf" for name in types}
    for name, file in files.items():
        write_gguf(file, loaded, type_name=name, overwrite=True)
        # F32 against the model itself: what the file says wrongly of it, a reader of ours would believe too
        read = loaded if name == "F32" else load_text_model(str(file), dtype=torch.float32, device="cpu",
                                                            gguf_weights="dequantize")
        answers = llama_cpp.ask(file, prompts, new_tokens, texts=TEXTS)
        ours = tokens_of(read.model, read, prompts, new_tokens)
        checks.append(_same_tokens(name, ours, answers, NEAR_TIE.get(name, NEAR_TIE_OTHERS)))
        if name == "F32":
            checks.append(_same_margins(read.model, prompts, ours, answers))
    checks += [_same_ids(loaded, answers)] if loaded.tokenizer else []
    return checks + _adapter_checks(loaded, files["F32"], prompts, llama_cpp, new_tokens, folder)


def tokens_of(model: nn.Module, loaded: LoadedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The engine's greedy tokens in fp32."""
    config = EngineConfig(device="cpu", dtype="float32", attention="sdpa", compile=False, max_batch_size=8,
                          max_seq_length=max(map(len, prompts)) + new_tokens)
    engine = FlexEngine(model, loaded.tokenizer, config)
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    return [done.token_ids for done in engine.generate([list(prompt) for prompt in prompts], params)]


def _adapter_checks(loaded: LoadedModel, file: Path, prompts: Sequence[Sequence[int]], llama_cpp: LlamaCpp, new_tokens: int,
                    folder: Path) -> list[Check]:
    targets = [name for name in LINEARS if not UNSUPPORTED.endswith(name)]
    adapter = random_adapter(loaded.model, targets, rank=4, alpha=6.0, strength=0.6, seed=0)
    copy = DoubleCopy(loaded.model, targets)
    copy.refresh(adapter)
    ours = tokens_of(copy.inference, loaded, prompts, new_tokens)
    base = tokens_of(loaded.model, loaded, prompts, new_tokens)
    merged, alone = folder / "merged.gguf", folder / "adapter.gguf"
    write_gguf(merged, loaded, type_name="F32", changed=merging(adapter, loaded.model), overwrite=True)
    write_gguf_adapter(alone, adapter, loaded.model, overwrite=True)
    changed = sum(mine != theirs for mine, theirs in zip(ours, base))
    return [
        Check("adapter", changed > 0, f"changes the engine's tokens of {changed} of {len(ours)} prompts"),
        _same_tokens("adapter merged, F32", ours, llama_cpp.ask(merged, prompts, new_tokens), NEAR_TIE["F32"]),
        _same_tokens("adapter beside F32", ours, llama_cpp.ask(file, prompts, new_tokens, lora=alone), NEAR_TIE["F32"]),
    ]


def _same_tokens(name: str, ours: list[list[int]], answers: Answers, near_tie: float) -> Check:
    """Whether tokens are the same, or part where llama.cpp's two best logits are nearer than `near_tie`."""
    margins = []
    for mine, theirs, margin in zip(ours, answers.tokens, answers.margins, strict=True):
        margins += [margin[step] for step in range(len(mine)) if mine[step] != theirs[step]][:1]
    found = f"{len(ours) - len(margins)} of {len(ours)} prompts give the engine's tokens"
    if margins:
        found += f", the others part where llama.cpp's margin is {', '.join(f'{m:.2g}' for m in sorted(margins))}"
    return Check(name, max(margins, default=0.0) < near_tie, found)


@torch.no_grad()
def _same_margins(model: nn.Module, prompts: Sequence[Sequence[int]], ours: list[list[int]], answers: Answers) -> Check:
    """Whether the largest logit is as far above the next as in Hugging Face's forward, at each token up to where they part."""
    apart = []
    for prompt, mine, theirs, margins in zip(prompts, ours, answers.tokens, answers.margins, strict=True):
        two = model(torch.tensor([[*prompt, *mine[:-1]]]), use_cache=False).logits[0, len(prompt) - 1:].topk(2).values
        here = (two[:, 0] - two[:, 1]).tolist()
        same = next((step for step in range(len(mine)) if mine[step] != theirs[step]), len(mine))
        apart += [abs(a - b) for a, b in zip(here[:same], margins[:same])]
    return Check("margins, F32", bool(apart) and max(apart) < MOST_APART,
                 f"at {len(apart)} tokens they are at most {max(apart, default=float('nan')):.2g} from Hugging Face's")


def _same_ids(loaded: LoadedModel, answers: Answers) -> Check:
    ours = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    other = [text for text, mine, theirs in zip(TEXTS, ours, answers.ids, strict=True) if mine != theirs]
    return Check("tokenizer", not other, f"other ids for {other[0]!r}" if other else f"the same ids for {len(TEXTS)} texts")
