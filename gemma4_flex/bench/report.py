"""One result schema, checked before anything is printed or written; one run as a table, several as a ranking."""
from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tabulate import tabulate

from gemma4_flex import sizing
from gemma4_flex.bench import stats_file
from gemma4_flex.bench.measure import MIN_ROUNDS, Measurement, Round, summarize
from gemma4_flex.bench.roofline import Bandwidth, Floor, MatmulRate, decode_floor, prefill_floor
from gemma4_flex.bench.workload import EncodedPrompt, longest_shared_prefix
from gemma4_flex.models.packed_modules import describe_packed

SCHEMA_VERSION = 1
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
FIT_LENGTHS = (512, 4096, 32768)      # tokens of sequences whose number at once is told
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "triton")
ROOT = Path(__file__).resolve().parent.parent.parent

# Every field a result must have, by dotted name. A field may be null only where the run could not give it.
REQUIRED = (
    "schema_version", "benchmark", "date", "model_name", "geometry.architecture", "geometry.groups",
    "geometry.parameters", "device", "device_name", "threads", "dtype", "attention_backends", "shared_kv",
    "versions.python", "versions.torch", "versions.transformers", "commit", "config", "batch", "workload.n_prompts",
    "workload.source", "workload.chat_template", "workload.longest_shared_prefix", "workload.prompt_tokens",
    "workload.output_tokens", "rounds", "warmup_rounds", "compile_s", "capture_s", "decode_tps_median",
    "prefill_tps_median", "ttft_ms_median", "ms_per_step_median", "spread", "token_agreement", "bandwidth_bytes_per_s",
    "matmul_flop_per_s", "floor.step_weight_bytes", "floor.kv_bytes_per_step", "floor.ms_per_step", "floor.bound",
    "floor_fraction", "prefill_floor.ms_per_round", "prefill_floor.bound", "prefill_floor_fraction", "steps_replayed",
    "steps_eager", "peak_memory_bytes", "kv_bytes_per_token", "fits", "completions", "answers.asked", "answers.exact",
)
REQUIRED_OF_A_ROUND = ("decode_tokens", "prefill_tokens", "decode_s", "prefill_s", "wall_s", "steps_replayed",
                       "steps_eager", "prefix_hit_tokens")
REQUIRED_OF_A_COMPLETION = ("prompt", "text", "token_ids", "finish_reason")
# A row that is set beside another must have all of these for real.
NEEDED_TO_RANK = ("commit", "dtype", "attention_backends", "batch", "workload.prompt_tokens", "workload.output_tokens",
                  "spread", "decode_tps_median", "prefill_tps_median", "ttft_ms_median", "floor_fraction")


class IncompleteResult(ValueError):
    """A result that lacks what it takes to be told, or to be ranked (B132)."""


# --- what a result is made of -----------------------------------------------------------------------------------------

def versions() -> dict[str, str | None]:
    """Versions of Python, of what computes, and of CUDA; null for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit(root: Path = ROOT) -> str | None:
    """Commit of the checkout this package lies in, "-dirty" where tracked files differ; None outside a checkout."""
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device_type: str) -> str:
    """What the device calls itself: the GPU's name, or the CPU's as /proc/cpuinfo gives it."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def describe_geometry(geometry) -> dict:
    """The model's shape: by attention type (group) how many layers there are, which own K/V, and their heads."""
    groups = {}
    for attention_type in geometry.attention_types:
        layers = [layer for layer in geometry.layers if layer.attention_type == attention_type]
        groups[attention_type] = {
            "layers": len(layers), "owners": list(geometry.owners(attention_type)), "num_heads": layers[0].num_heads,
            "num_kv_heads": layers[0].num_kv_heads, "head_dim": layers[0].head_dim, "window": layers[0].window}
    return {"architecture": geometry.architecture, "num_layers": geometry.num_layers,
            "first_shared": geometry.first_shared, "hidden_size": geometry.hidden_size,
            "vocab_size": geometry.vocab_size, "groups": groups, "parameters": dict(geometry.parameter_count())}


def length_summary(counts: Sequence[int]) -> dict[str, float]:
    """How many tokens in all, and a prompt or output at least, in the middle and at most."""
    return {"total": sum(counts), "min": min(counts), "median": statistics.median(counts), "max": max(counts)}


def _round(done: Round, prompt_tokens: int, decode: Floor, prefill: Floor) -> dict:
    row = dataclasses.asdict(done) | {"ttft_ms": list(done.ttft_ms)}
    # What the prompts hold and the device did not compute came from a prefix cache (B129), and the floor is of all they hold.
    hits = max(0, prompt_tokens - done.prefill_tokens)
    return row | {"prefill_tps": done.prefill_tps, "decode_tps": done.decode_tps, "ms_per_step": done.ms_per_step,
                  "prefix_hit_tokens": hits, "floor_fraction": decode.fraction(done.decode_s),
                  "prefill_floor_fraction": None if hits else prefill.fraction(done.prefill_s)}


def _logprobs(completion) -> dict | None:
    """A completion's log-probabilities, where they were asked for: of the model and of what was drawn from, and alternatives."""
    found = getattr(completion, "logprobs", None)
    return found and {"raw": list(found.raw), "processed": list(found.processed), "top": [list(row) for row in found.top]}


def fits(engine) -> list[dict[str, int]]:
    """How many sequences of some lengths, and of the longest one allowed, the K/V pools hold at once."""
    longest = engine.config.max_seq_length
    lengths = [*(tokens for tokens in FIT_LENGTHS if tokens < longest), longest]
    return [{"tokens": tokens, "sequences": n} for tokens, n in sizing.fits(engine.geometry, engine.config, lengths).items()]


def _step_sizes(engine) -> dict:
    """The sizes that steps are compiled and captured for, and what is compiled of them."""
    runner = engine.runner
    return {"batch_buckets": list(runner.buckets), "column_buckets": list(runner.column_buckets),
            "prefill_token_buckets": list(runner.token_buckets), "attention_backends": dict(engine.attention_backends)}


def build_result(*, benchmark: str, model_name: str, engine, measurement: Measurement, prompts: Sequence[EncodedPrompt],
                 chat_template: str, prompt_source: str, bandwidth: Bandwidth, matmul: MatmulRate, peak_memory: int,
                 options: dict, notices: Sequence[str] = (), four_bit: dict | None = None, samples: int = 1) -> dict:
    """The result of one run as plain JSON values, complete by `check_result`.

    `measurement.completions` are `samples` of each prompt, one prompt's after the other's.

    `options` are the caller's own settings (rounds, prompts, lengths); the engine's resolved config joins them, and the
    sizes its steps come in. `four_bit` is `checkpoints.four_bit.describe_4bit` of a model with 4-bit weights.
    """
    packed = describe_packed(engine.model, engine.geometry)
    config, geometry, rounds = engine.config, engine.geometry, measurement.rounds
    element = ELEMENT_BYTES[config.dtype]
    prompt_lengths = [len(p.ids) for p in prompts]
    output_lengths = [len(c.token_ids) for c in measurement.completions]
    # a prompt is prefilled once: its other samples draw their first token from a step that computes the prompt's last again
    sampled = [(p, n) for p in prompts for n in range(samples)]
    lengths = [(len(p.ids) - bool(n), made + bool(n)) for (p, n), made in zip(sampled, output_lengths, strict=True)]

    rates = {"bytes_per_element": element, "bytes_per_s": bandwidth.bytes_per_s, "flop_per_s": matmul.flop_per_s,
             "weight_bytes": (four_bit or packed or {}).get("step_weight_bytes")}
    prefill = prefill_floor(geometry, prompt_lengths, passes=-(-len(prompts) // config.max_batch_size), **rates)

    def rows(some: Sequence[Round]) -> list[dict]:
        return [_round(r, sum(prompt_lengths), floor_of(r), prefill) for r in some]

    def floor_of(done: Round) -> Floor:
        return decode_floor(geometry, lengths, steps=done.steps, **rates)

    summaries = {
        "decode_tps": summarize([r.decode_tps for r in rounds]),
        "prefill_tps": summarize([r.prefill_tps for r in rounds]),
        "ms_per_step": summarize([r.ms_per_step for r in rounds]),
        "ttft_ms": summarize([t for r in rounds for t in r.ttft_ms])}
    told = rows(rounds)
    fractions = {name: summarize([row[name] for row in told]) for name in ("floor_fraction", "prefill_floor_fraction")}
    floor = floor_of(rounds[-1])
    completions = [
        {"prompt": p.text, "question": p.prompt.question, "text": c.text, "token_ids": list(c.token_ids),
         "finish_reason": c.finish_reason, "num_prompt_tokens": len(p.ids), "expected": p.prompt.answer, "sample": n,
         "logprobs": _logprobs(c)}
        for (p, n), c in zip(sampled, measurement.completions, strict=True)]
    asked = [c for c in completions if c["expected"] is not None]
    result = {
        "schema_version": SCHEMA_VERSION, "benchmark": benchmark,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model_name": model_name, "geometry": describe_geometry(geometry),
        "device": config.device, "device_name": device_name(config.device), "threads": torch.get_num_threads(),
        "dtype": config.dtype, "attention_backends": dict(engine.attention_backends), "shared_kv": config.shared_kv,
        "versions": versions(), "commit": commit(), "config": {**options, **dataclasses.asdict(config), **_step_sizes(engine)},
        "batch": config.max_batch_size,
        "workload": {"n_prompts": len(prompts), "samples": samples, "source": prompt_source, "chat_template": chat_template,
                     "longest_shared_prefix": longest_shared_prefix([p.ids for p in prompts]),
                     "prompt_tokens": length_summary(prompt_lengths), "output_tokens": length_summary(output_lengths)},
        "rounds": told, "warmup_rounds": rows(measurement.warmup),
        "compile_s": engine.stats.compile_s, "capture_s": engine.stats.capture_s,
        **{f"{name}_median": summary and summary.median for name, summary in summaries.items()},
        "spread": {name: summary and summary.as_dict() for name, summary in summaries.items()},
        "token_agreement": measurement.token_agreement,
        "bandwidth_bytes_per_s": bandwidth.bytes_per_s, "matmul_flop_per_s": matmul.flop_per_s,
        "floor": {"step_weight_bytes": floor.weight_bytes, "kv_bytes_per_step": floor.kv_bytes / max(1, floor.steps),
                  "ms_per_step": floor.ms_per_step, "bound": floor.bound, "copy_buffer_bytes": bandwidth.buffer_bytes},
        "prefill_floor": {"flops": prefill.flops, "memory_bytes": prefill.steps * prefill.weight_bytes + prefill.kv_bytes,
                          "ms_per_round": 1e3 * prefill.seconds, "bound": prefill.bound},
        **{name: found and found.median for name, found in fractions.items()},
        "steps_replayed": sum(r.steps_replayed for r in rounds), "steps_eager": sum(r.steps_eager for r in rounds),
        "peak_memory_bytes": peak_memory, "memory": dict(engine.memory_report()), "fits": fits(engine),
        "kv_bytes_per_token": dict(geometry.kv_bytes_per_token(element)),
        "completions": completions,
        "answers": {"asked": len(asked), "exact": sum(c["text"].strip() == c["expected"] for c in asked)},
        "notices": list(notices), "four_bit": four_bit, "packed": packed,
    }
    check_result(result)
    return result


# --- whether it may be told -------------------------------------------------------------------------------------------

def _field(result: dict, dotted: str) -> tuple[bool, object]:
    """Whether the field is there, and its value."""
    value: object = result
    for name in dotted.split("."):
        if not isinstance(value, dict) or name not in value:
            return False, None
        value = value[name]
    return True, value


def check_result(result: dict) -> None:
    """Raise IncompleteResult naming every required field that `result` lacks, or a number that is not finite."""
    missing = [name for name in REQUIRED if not _field(result, name)[0]]
    for key, fields in (("rounds", REQUIRED_OF_A_ROUND), ("completions", REQUIRED_OF_A_COMPLETION)):
        entries = result.get(key) or []
        missing += [f"{key}[{i}].{name}" for i, entry in enumerate(entries) for name in fields if name not in entry]
        if key in result and not entries:
            missing.append(f"{key}[0]")
    if missing:
        raise IncompleteResult(f"the result lacks {', '.join(missing)}; run the benchmark again with this version")
    endless = sorted(name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value))
    if endless:
        raise IncompleteResult(f"{', '.join(endless)} of the result is not a finite number")


def why_not_ranked(result: dict) -> str | None:
    """Why a complete result may not be set beside others, or None when it may."""
    check_result(result)
    if len(result["rounds"]) < MIN_ROUNDS:
        return (f"it has {len(result['rounds'])} measured round(s) and a ranking takes at least {MIN_ROUNDS}: "
                "raise --n_rounds")
    unknown = [name for name in NEEDED_TO_RANK if _field(result, name)[1] in (None, {}, [])]
    return f"{', '.join(unknown)} could not be told in this run" if unknown else None


def ranking(results: Sequence[dict]) -> str:
    """Results side by side, fastest decode first. Raises IncompleteResult rather than rank one that lacks anything."""
    for number, result in enumerate(results, start=1):
        reason = why_not_ranked(result)
        if reason:
            raise IncompleteResult(f"no ranking: result {number} ({result['model_name']}): {reason}")
    rows = [[r["model_name"], _devices(r), _dtype(r), _backends(r), r["batch"],
             _span(r["workload"]["prompt_tokens"]), _span(r["workload"]["output_tokens"]),
             _with_spread(r, "prefill_tps"), _with_spread(r, "decode_tps"), f"{r['floor_fraction']:.0%}",
             r["commit"][:8] + ("-dirty" if r["commit"].endswith("-dirty") else "")]
            for r in sorted(results, key=lambda r: -r["decode_tps_median"])]
    return tabulate(rows, headers=["model", "device", "dtype", "attention", "batch", "prompt tokens", "output tokens",
                                   "prefill tok/s", "decode tok/s", "of floor", "commit"], disable_numparse=True)


# --- what people see --------------------------------------------------------------------------------------------------

def _backends(result: dict) -> str:
    return ", ".join(f"{group} {backend}" for group, backend in sorted(result["attention_backends"].items()))


def _devices(result: dict) -> str:
    ranks = len(result.get("ranks", []))
    return f"{ranks} ranks, {result['device_name']}" if ranks > 1 else result["device_name"]


def _dtype(result: dict) -> str:
    kinds = [result["four_bit"]["quant_type"]] if result.get("four_bit") else list((result.get("packed") or {}).get("packings", ()))
    return f"{', '.join(kinds)} and {result['dtype']}" if kinds else result["dtype"]


def _span(lengths: dict) -> str:
    return f"{lengths['min']:,} to {lengths['max']:,}, {lengths['total']:,} in all"


def _ple_rows(result: dict) -> list[tuple[str, str]]:
    """Where the table of per-layer embeddings is, for a model that has one and a result that says so."""
    table = result.get("memory", {}).get("ple_host", 0)
    if not table:
        return []
    steps = result["config"]["decode_steps_per_sync"]
    return [("per-layer embeddings", f"{_bytes(table)} in host memory; every step, captured or not, reads its tokens' rows, up "
                                     f"to {steps} steps between syncs")]


def _with_spread(result: dict, name: str) -> str:
    summary = result["spread"][name]
    if summary is None:
        return "none"
    return f"{summary['median']:,.1f} ({summary['min']:,.1f} to {summary['max']:,.1f})"


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def table(result: dict) -> str:
    """One run as two columns; what each row means is in scripts/benchmarks/README.md. Raises IncompleteResult."""
    check_result(result)
    floor, prefill, workload = result["floor"], result["prefill_floor"], result["workload"]
    reached = {"decode": "no decode step was run", "prefill": "not all of the prompts was computed"}
    if result["floor_fraction"] is not None:
        reached["decode"] = f"{floor['ms_per_step']:.3f} ms by {floor['bound']}, {result['floor_fraction']:.1%} of it reached"
    if result["prefill_floor_fraction"] is not None:
        reached["prefill"] = (f"{prefill['ms_per_round']:.1f} ms a round by {prefill['bound']}, "
                              f"{result['prefill_floor_fraction']:.1%} of it reached")
    samples = f" x {workload['samples']} samples" if workload.get("samples", 1) > 1 else ""
    ranks = result.get("ranks", [])      # of a job that torchrun started
    a_rank = f" on each of {len(ranks)} ranks" if len(ranks) > 1 else ""
    rows = [
        ("model", f"{result['model_name']}, {_dtype(result)} on {_devices(result)}"),
        ("attention", f"{_backends(result)}; shared layers {result['shared_kv']}"),
        ("prompts", f"{workload['n_prompts']}{samples}, batch {result['batch']}{a_rank}, "
                    f"rounds after warm-up: {len(result['rounds'])}"),
        ("prompt tokens", _span(workload["prompt_tokens"])),
        ("output tokens", _span(workload["output_tokens"])),
        *([("whole job, tok/s", _with_spread(result, "job_tps"))] if ranks else []),
        ("prefill tok/s", _with_spread(result, "prefill_tps")),
        ("decode tok/s", _with_spread(result, "decode_tps")),
        ("time to first token, ms", _with_spread(result, "ttft_ms")),
        ("ms per decode step", _with_spread(result, "ms_per_step")),
        ("floor of a decode step", reached["decode"]),
        ("floor of prefill", reached["prefill"]),
        ("measured bandwidth", f"{result['bandwidth_bytes_per_s'] / 1e9:,.1f} GB/s"),
        ("measured matmul rate", f"{result['matmul_flop_per_s'] / 1e9:,.0f} GFLOP/s"),
        ("peak memory", _bytes(result["peak_memory_bytes"])),
        *_ple_rows(result),
        *((f"KV per token, {group}", _bytes(count)) for group, count in sorted(result["kv_bytes_per_token"].items())),
        ("fits at once", ", ".join(f"{fit['sequences']:,} x {fit['tokens']:,} tokens" for fit in result["fits"])),
        ("decode steps", f"{result['steps_replayed']:,} replayed, {result['steps_eager']:,} eager"),
        ("compile", f"{result['compile_s']:.2f} s, not in the figures above"),
        ("capture", f"{result['capture_s']:.2f} s, not in the figures above"),
    ]
    if result["answers"]["asked"]:
        rows.append(("answers", f"{result['answers']['exact']} of {result['answers']['asked']} right word for word"))
    text = tabulate(rows, disable_numparse=True)
    reason = why_not_ranked(result)
    return text if reason is None else f"{text}\nNot to be ranked: {reason}."


def write_result(result: dict, path: str | Path) -> None:
    """Write a complete result as one JSON file, all of it or nothing. Raises IncompleteResult."""
    check_result(result)
    stats_file.write_json(result, path)
