"""What few-bit weights cost: how far each format's distributions lie from bf16's along the same tokens, and its size.

Each format is written to a file and read back as a user would have it. All are driven along the tokens that the engine draws
greedily with bf16 weights, through transformers' own forward: KL is of the next token's distribution, bf16's against the format's.
"""
from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemma4_flex.bench.measure import summarize
from gemma4_flex.checkpoints import LoadedModel, load_text_model
from gemma4_flex.checkpoints.gguf_write import write_gguf
from gemma4_flex.checkpoints.mlx_recipe import load_recipe
from gemma4_flex.checkpoints.mlx_write import write_mlx
from gemma4_flex.engine import FlexEngine
from gemma4_flex.params import EngineConfig, SamplingParams


@dataclass(frozen=True)
class Candidate:
    """A format: a GGUF type, with one of its own for the table of per-layer embeddings or None for what is usual; or an MLX
    recipe."""

    name: str
    gguf_type: str | None = None
    ple_type: str | None = None
    recipe: str | None = None

    def write(self, folder: Path, loaded: LoadedModel) -> Path:
        if self.recipe is not None:
            path = folder / "mlx"
            write_mlx(path, loaded, load_recipe(self.recipe))
        else:
            path = folder / "model.gguf"
            write_gguf(path, loaded, type_name=self.gguf_type, ple_type=self.ple_type)
        return path


def candidates(types: Seq[str], recipes: Seq[str], low_ple: Seq[str]) -> list[Candidate]:
    """GGUF types, those of `low_ple` once more with the table in the same few bits, and recipes."""
    found = [Candidate(f"GGUF {name}", gguf_type=name) for name in types]
    found += [Candidate(f"GGUF {name}, PLE table too", gguf_type=name, ple_type=name) for name in low_ple]
    return found + [Candidate(f"MLX {name}", recipe=name) for name in recipes]


def compare_recipes(loaded: LoadedModel, config: EngineConfig, prompts: Seq[Seq[int]], which: Seq[Candidate], *, new_tokens: int,
                    on_done: Callable[[], None] = lambda: None) -> dict:
    """Figures of `loaded`, which is bf16 and unquantised, and of each of `which` against it."""
    assert config.dtype == "bfloat16"
    base = FlexEngine(loaded.model, loaded.tokenizer, config)
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    forced = [done.token_ids[:-1] for done in base.generate([list(p) for p in prompts], params)]
    wanted = distributions(loaded.model, prompts, forced)
    on_done()
    rows = []
    for candidate in which:
        with tempfile.TemporaryDirectory() as folder:
            path = candidate.write(Path(folder), loaded)
            size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
            other = load_text_model(str(path), dtype=torch.bfloat16, device=config.device)
            rows.append({"name": candidate.name, "file_bytes": size, "weight_bytes": weight_bytes(other.model),
                         **distance(wanted, distributions(other.model, prompts, forced))})
        on_done()
    return {"prompts": len(prompts), "new_tokens": new_tokens, "positions": sum(map(len, wanted)),
            "bf16": {"weight_bytes": weight_bytes(loaded.model)}, "formats": rows}


@torch.no_grad()
def distributions(model: nn.Module, prompts: Seq[Seq[int]], forced: Seq[Seq[int]]) -> list[Tensor]:
    """Log-probabilities [tokens forced + 1, vocabulary] after each prompt and after each forced token, in fp32 on the CPU."""
    device = model.model.norm.weight.device
    rows = [model(torch.tensor([[*p, *t]], device=device), use_cache=False, logits_to_keep=len(t) + 1).logits[0]
            for p, t in zip(prompts, forced, strict=True)]
    return [F.log_softmax(logits.float(), -1).cpu() for logits in rows]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, each storage once."""
    tensors = (*model.parameters(), *model.buffers())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def distance(wanted: Seq[Tensor], found: Seq[Tensor]) -> dict:
    """KL(wanted || found) a position, its mean over all and by prompt, and how often both have the same likeliest token."""
    kls = [F.kl_div(q, p, log_target=True, reduction="none").sum(-1).clamp_min(0) for p, q in zip(wanted, found, strict=True)]
    agree = torch.cat([p.argmax(-1) == q.argmax(-1) for p, q in zip(wanted, found)])
    mean = torch.cat(kls).mean().item()
    assert math.isfinite(mean)
    return {"kl_mean": mean, "kl_by_prompt": summarize([kl.mean().item() for kl in kls]).as_dict(),
            "kl_max": torch.cat(kls).max().item(), "top1": agree.float().mean().item()}
