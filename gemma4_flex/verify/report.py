"""One verification from start to end, and how it is told: a table by layer, a plot, a JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

from gemma4_flex.bench.stats_file import write_json
from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.params import EngineConfig
from gemma4_flex.verify.numerics import Contract, Level, Verdict, consult, judge, make_prompts, run_engine


@dataclass(frozen=True)
class Verification:
    model_name: str
    config: EngineConfig  # resolved
    attention_backends: dict[str, str]
    prompt_lengths: list[int]
    rows_per_prompt: int
    steps_replayed: int
    steps_eager: int
    notices: list[str]  # what ran otherwise than asked, and why
    layer_notes: list[str]  # "sliding", "full", "sliding reads 2", ... by layer
    verdict: Verdict

    @property
    def broken(self) -> list[Contract]:
        return self.verdict.broken

    @property
    def file_stem(self) -> str:
        last = Path(self.model_name).name.removesuffix(".json")
        name = "".join(c if c.isalnum() or c in "-." else "-" for c in last)
        parts = ["verify", name, self.config.dtype, self.config.attention, self.config.shared_kv]
        return "_".join([*parts, "captured"] if self.config.capture_cudagraph else parts)


def verify_model(
    model: nn.Module, tokenizer, geometry: ModelGeometry, config: EngineConfig, *, model_name: str,
    max_new_tokens: int = 16, text_ids: Sequence[int] = (),
) -> Verification:
    """Compare Hugging Face, float64 and the engine on prompts from one token to several windows long.

    `config`, not resolved yet, gives dtype, attention, shared K/V and capture; its limits are set to what the prompts need.
    """
    prompts = make_prompts(geometry, max_new_tokens=max_new_tokens, seed=config.seed, text_ids=text_ids)
    oracles = consult(model, geometry, prompts, max_new_tokens)
    config = dataclasses.replace(
        config, max_batch_size=len(prompts), max_seq_length=max(map(len, prompts)) + max_new_tokens)
    engine = FlexEngine(model, tokenizer, config)
    runs = run_engine(engine, oracles)
    verdict = judge(oracles, runs, getattr(torch, engine.config.dtype))
    if config.capture_cudagraph:
        verdict.contracts.append(Contract(
            "decode steps are replayed", engine.stats.steps_replayed > 0 and engine.stats.steps_eager == 0,
            f"{engine.stats.steps_replayed} replayed, {engine.stats.steps_eager} eager"))
    return Verification(
        model_name=model_name, config=engine.config, attention_backends=dict(engine.attention_backends),
        prompt_lengths=[len(prompt) for prompt in prompts], rows_per_prompt=max_new_tokens,
        steps_replayed=engine.stats.steps_replayed, steps_eager=engine.stats.steps_eager, notices=list(engine.notices),
        layer_notes=[layer.attention_type.removesuffix("_attention")
                     + ("" if layer.owns_kv else f" reads {layer.kv_owner}") for layer in geometry.layers],
        verdict=verdict)


def describe(done: Verification) -> str:
    """Everything a reader of the terminal needs, the contracts last."""
    verdict, config = done.verdict, done.config
    notes = ["", *done.layer_notes, ""]
    headers = ["", "attention", "size", "HF mean", "HF max", "engine mean", "engine max", "ratio", "max |engine-HF|"]
    rows = [[at.name, note, *_numbers(at)] for at, note in zip(verdict.levels, notes)]
    rows += [[at.name, "logits", *_numbers(at)] for at in verdict.by_prompt]
    backends = ", ".join(f"{kind} {name}" for kind, name in sorted(done.attention_backends.items()))
    lines = [
        f"{done.model_name}: {config.dtype} on {config.device}, {backends}, shared K/V {config.shared_kv}",
        f"prompts of {', '.join(map(str, done.prompt_lengths))} tokens; {done.rows_per_prompt} rows each, along HF's greedy tokens",
        f"decode steps: {done.steps_replayed} replayed, {done.steps_eager} eager",
        *(f"note: {notice}" for notice in done.notices),
        "Errors are absolute differences from the float64 reference; size is its mean magnitude.",
        "",
        tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", "left", *["right"] * 7)),
        "",
        f"stream error ratio (levels weighed by size) {verdict.stream_ratio:.3f}, logits {verdict.levels[-1].ratio:.3f}",
        "mean KL in nats: " + ", ".join(f"{pair} {value:.2e}" for pair, value in verdict.kl.items()),
        "top-1 agreement: " + ", ".join(f"{pair} {value:.1%}" for pair, value in verdict.top1.items()),
        *(f"parted: {parting}" for parting in verdict.partings),
        *(f"{'kept' if contract.passed else 'BROKEN'}: {contract.name} ({contract.detail})"
          for contract in verdict.contracts),
    ]
    return "\n".join(lines)


def _numbers(at: Level) -> list[str]:
    errors = (at.hf_mean, at.hf_max, at.engine_mean, at.engine_max)
    return [f"{at.size:.3f}", *(f"{error:.2e}" for error in errors), f"{at.ratio:.3f}", f"{at.between_max:.2e}"]


def write(done: Verification, folder: Path, provenance: dict) -> tuple[Path, Path]:
    """Write `<stem>.json` and `<stem>.png` into `folder`. `provenance` joins the JSON (versions, commit). Returns both
    paths."""
    json_path, plot_path = folder / f"{done.file_stem}.json", folder / f"{done.file_stem}.png"
    write_json(as_json(done) | provenance, json_path)
    plot(done, plot_path)
    return json_path, plot_path


def as_json(done: Verification) -> dict:
    """Plain JSON values; errors are against the float64 reference, pooled over prompts and rows. A value that is not
    finite, which JSON cannot hold, becomes its name."""
    fields = dataclasses.asdict(done)
    verdict = fields.pop("verdict")
    for group in ("levels", "by_prompt"):
        for entry, at in zip(verdict[group], getattr(done.verdict, group)):
            entry["ratio"] = at.ratio
    value = {"kind": "verify_numerics", "passed": not done.broken, "device": done.config.device,
             "dtype": done.config.dtype, "shared_kv": done.config.shared_kv, **fields, **verdict}
    return json.loads(json.dumps(value), parse_constant=str)


def plot(done: Verification, path: Path) -> None:
    """A PNG: mean and largest error against float64 by depth, of Hugging Face and of the engine, as shares of the level's size."""
    import matplotlib
    matplotlib.use("Agg")  # no display where this runs
    import matplotlib.pyplot as plt

    levels = done.verdict.levels
    places = range(len(levels))
    figure, (errors, ratios) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(3, 1), layout="constrained")
    for who, name, color in (("hf", "Hugging Face", "tab:blue"), ("engine", "gemma4-flex", "tab:orange")):
        for what, style in (("mean", "-o"), ("max", ":")):
            shares = [getattr(at, f"{who}_{what}") / at.size for at in levels]
            errors.plot(places, shares, style, color=color, markersize=3, label=f"{name}, {what}")
    errors.set(yscale="log", ylabel="|x - float64| / mean |float64|",
               title=f"{done.model_name}, {done.config.dtype}: error against the float64 reference by depth")
    errors.legend(ncols=2)
    errors.grid(alpha=0.3)
    ratios.axhline(1.0, color="gray", linewidth=0.8)
    ratios.plot(places, [at.ratio for at in levels], "-o", color="black", markersize=3)
    ratios.set(ylabel="engine / HF, mean")
    ratios.grid(alpha=0.3)
    step = max(1, len(levels) // 12)
    shown = sorted({*range(0, len(levels) - 1, step), len(levels) - 1})
    ratios.set_xticks(shown, [levels[i].name for i in shown], rotation=45, ha="right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
