"""How each kind of result is told in a README: a Markdown table from the records in results/. Needs no torch."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemma4_flex.bench import deterministic_page, growth_page, grpo_report, recipes_page
from gemma4_flex.bench.table import Table, spread
from gemma4_flex.kernel_options import TABLE

Results = Mapping[str, dict]          # file name -> record, in order of the names
Link = Callable[[str], str]           # file name -> where it lies, seen from the page


@dataclass(frozen=True)
class Kind:
    """One sort of result: which files hold it, how they are told, and what draws one of them that has something to draw."""
    pattern: str
    tell: Callable[[Results, Link], str]
    plot: Callable[[dict, Path], None] | None = None
    has_plot: Callable[[dict], bool] = lambda result: True


def model(result: dict) -> str:
    """The model's name, a config file's by its stem."""
    name = result["model_name"]
    return "synthetic:" + Path(name).stem if name.endswith(".json") else name


def source(name: str, link: Link) -> str:
    return f"[json]({link(name)})"


def picture(name: str, link: Link) -> str:
    stem = name.removesuffix(".json")
    return f"![{stem}]({link(stem + '.png')})"


def machine(result: dict) -> str:
    """What a result was measured on and with."""
    threads = result.get("threads")
    parts = [result.get("device_name") or result["device"], threads and f"{threads} thread" + "s" * (threads > 1),
             f"torch {result['versions']['torch']}", f"transformers {result['versions']['transformers']}"]
    return ", ".join(part for part in parts if part)


def machines(results: Results) -> str:
    """One line for all results of a table, or one a file where they differ."""
    found = {name: machine(result) for name, result in results.items()}
    if len(set(found.values())) == 1:
        return f"Measured on {next(iter(found.values()))}."
    return "Measured on " + "; ".join(f"{said} ({name})" for name, said in found.items()) + "."


def steps(replayed: int, eager: int) -> str:
    return f"{replayed:,} replayed" * bool(replayed) + ", " * bool(replayed and eager) + f"{eager:,} eager" * bool(eager)


# ---- the kinds ------------------------------------------------------------------------------------------------------

def tell_lora(results: Results, link: Link) -> str:
    rows = []
    for name, r in results.items():
        refresh, over = r["refresh"], r["merged_over"]
        rows.append([model(r), f"{r['dtype']}, {r['attention']}, {'captured' if r['captured'] else 'eager'}", str(r["batch"]),
                     f"{1e3 * refresh['seconds']['median']:.1f} ms", f"{refresh['times_floor']:.1f} x",
                     f"{over['no adapter']['median']:.3f}", f"{over['unmerged']['median']:.2f}",
                     f"{r['extra_bytes']['allocated']:,}", source(name, link)])
    return Table(["model", "run as", "batch", "refresh", "of its floor", "merged / no adapter", "merged / unmerged",
                 "second copy, bytes", "from"], rows).markdown() + "\n\n" + machines(results)


def tell_verify(results: Results, link: Link) -> str:
    rows = []
    for name, r in results.items():
        logits = r["levels"][-1]
        kept = sum(contract["passed"] for contract in r["contracts"])
        backends = "/".join(sorted(set(r["attention_backends"].values())))
        rows.append([model(r), f"{r['dtype']}, {backends}", steps(r["steps_replayed"], r["steps_eager"]),
                     f"{logits['hf_mean']:.2e}", f"{logits['engine_mean']:.2e}", f"{logits['ratio']:.3f}",
                     f"{r['stream_ratio']:.3f}", f"{logits['between_max']:.2e}", f"{r['top1']['hf=engine']:.1%}",
                     f"{kept} of {len(r['contracts'])}", source(name, link)])
    return Table(["model", "run as", "decode steps", "logits error, HF", "logits error, engine", "engine / HF",
                 "engine / HF, all layers", "largest engine - HF", "same top token", "contracts kept", "from"], rows).markdown() \
        + "\n\nErrors are mean differences from the float64 reference. " + machines(results)


def tell_inference(results: Results, link: Link) -> str:
    rows = []
    for name, r in results.items():
        backends = "/".join(sorted(set(r["attention_backends"].values())))
        rows.append([model(r), f"{r['dtype']}, {backends}, {steps(r['steps_replayed'], r['steps_eager'])}", str(r["batch"]),
                     spread(r["spread"]["prefill_tps"], 1), spread(r["spread"]["decode_tps"], 1),
                     spread(r["spread"]["ms_per_step"], 1), f"{r['floor']['ms_per_step']:.1f}",
                     f"{r['floor_fraction']:.0%}", f"{r['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s",
                     f"{r['peak_memory_bytes'] / 2**30:.1f} GiB", source(name, link)])
    return Table(["model", "run as", "batch", "prefill tok/s", "decode tok/s", "ms a step", "floor, ms", "of floor", "bandwidth",
                 "peak memory", "from"], rows).markdown() + "\n\n" + machines(results)


def tell_growth(results: Results, link: Link) -> str:
    parts = []
    for name, r in results.items():
        parts += [f"{model(r)}, {r['dtype']}, on {machine(r)} ({source(name, link)}).", growth_page.told(r, Table.markdown),
                  picture(name, link)]
    return "\n\n".join(parts)


def tell_deterministic(results: Results, link: Link) -> str:
    return "\n\n".join(
        f"{model(r)}, {r['dtype']}, {'captured' if r['captured'] else 'eager'}, {'compiled' if r['compiled'] else 'not compiled'}, "
        f"batch {r['max_batch_size']}, on {machine(r)} ({source(name, link)}).\n\n{deterministic_page.told(r, Table.markdown)}"
        for name, r in results.items())


def tell_recipes(results: Results, link: Link) -> str:
    return "\n\n".join(
        f"{model(r)}, {r['positions']:,} positions of {r['prompts']} prompts, on {machine(r)} ({source(name, link)}).\n\n"
        f"{recipes_page.told(r, Table.markdown)}\n\n{picture(name, link)}" for name, r in results.items())


def tell_kernels(results: Results, link: Link) -> str:
    """The first row of the options table for each head size, phase and architecture, beside torch's own choice."""
    [(name, report)] = results.items()
    seen = {_tile(kernel): kernel for kernel in [*report["defaults"], *report["candidates"]]}
    defaults = {(kernel["head_dim"], kernel["phase"], kernel["arch"]): kernel for kernel in report["defaults"]}
    rows = []
    for (head_dim, phase, arch), fits in TABLE.items():
        chosen = {"BLOCK_M": 16} | fits[0].options | {"head_dim": head_dim, "phase": phase, "arch": arch}
        best, own = seen.get(_tile(chosen)), defaults[head_dim, phase, arch]
        figures = ["not compiled"] * 3 if best is None else [
            f"{best['shared_bytes']:,} of {best['shared_limit_bytes']:,}", str(best["registers"]), f"{best['spill_bytes']:,}"]
        rows.append([str(head_dim), phase, f"{report['gpus'][arch]['name']} ({arch})", _options(chosen), *figures,
                     f"{_options(own)}: {own['shared_bytes']:,}{'' if own['fits'] else ', too much'}; {own['spill_bytes']:,}"])
    return Table(["head_dim", "phase", "GPU", "tile, stages, warps", "shared memory, bytes", "registers", "spilled, bytes",
                  "torch's own choice: shared; spilled"], rows).markdown() \
        + f"\n\nCross-compiled with torch {report['torch']} and triton {report['triton']} ({source(name, link)})."


def _tile(kernel: dict) -> tuple:
    return tuple(kernel[key] for key in ("head_dim", "phase", "arch", "BLOCK_M", "BLOCK_N", "num_stages", "num_warps"))


def _options(kernel: dict) -> str:
    return f"{kernel['BLOCK_M']} x {kernel['BLOCK_N']}, {kernel['num_stages']}, {kernel['num_warps']}"


def tell_speed(results: Results, link: Link) -> str:
    """What is faster, in one line a job: our throughput, and by how much it is above each engine that ran."""
    parts = []
    for name, r in results.items():
        others = list(dict.fromkeys(e["engine"] for job in r["jobs"] for e in job["engines"] if e["flex_over"]))
        rows = []
        for job in r["jobs"]:
            engines = {e["engine"]: e for e in job["engines"]}
            ours = engines.get("flex", {"tokens_per_s": None})
            over = [engines.get(other, {}).get("flex_over") for other in others]
            rows.append([job["name"], spread(ours["tokens_per_s"], 0) if ours["tokens_per_s"] else "did not run",
                         percent(ours.get("floor_fraction")), *(f"{ratio['median']:.2f} x" if ratio else "" for ratio in over)])
        table = Table(["job", "gemma4-flex, tok/s", "of floor", *(f"faster than {other} by" for other in others)], rows,
                      f"{model(r)}, {r['dtype']}, on {machine(r)} ({source(name, link)}):")
        parts += [table.markdown()] + [picture(name, link)] * has_decode(r)
    return "\n\n".join(parts)


def tell_compare(results: Results, link: Link) -> str:
    """Every engine on every job, what did not run and why, and what was wanted."""
    parts = []
    for name, r in results.items():
        rows = [[job["name"], e["engine"], spread(e["tokens_per_s"], 0) if e["tokens_per_s"] else e["status"],
                 percent(e["floor_fraction"]), f"{e['flex_over']['median']:.2f} x" if e["flex_over"] else "",
                 f"{e['agreement']['same']} of {e['agreement']['requests']}" if e["agreement"] else ""]
                for job in r["jobs"] for e in job["engines"]]
        parts.append(Table(["job", "engine", "tok/s", "of floor", "flex faster by", "same tokens as transformers"], rows,
                           f"{model(r)}, {r['dtype']}, on {machine(r)} ({source(name, link)}):").markdown())
        if r["wanted"]:
            wanted = [[w["work"], w["against"], f"{w['at_least']:.1f} x", f"{w['reached']:.2f} x" if w["reached"] else "",
                       w["verdict"] + (f": {w['reason']}" if w["reason"] else "")] for w in r["wanted"]]
            parts.append(Table(["work", "against", "wanted", "reached", "verdict"], wanted).markdown())
        reasons = {(e["engine"], e["reason"]) for job in r["jobs"] for e in job["engines"] if e["status"] != "ran"}
        if reasons:
            parts.append("\n".join(f"- {engine}: {reason}" for engine, reason in sorted(reasons)))
        if has_decode(r):
            parts.append(picture(name, link))
    return "\n\n".join(parts)


def has_decode(result: dict) -> bool:
    """Whether a comparison has what its plot shows."""
    return any(job["kind"] == "decode" for job in result["jobs"])


def draw_compare(result: dict, path: Path) -> None:
    from gemma4_flex.bench.compare_report import picture as draw  # needs torch
    draw(result, path)


def tell_device(results: Results, link: Link) -> str:
    """Decode and prefill rows of the device checks."""
    parts = []
    for name, r in results.items():
        rows = [[row["what"], str(row["batch"]), f"{row['context']:,}", f"{row['ms_per_step']['median']:,.3f}",
                 f"{row['tok_s']:,.0f}", percent(row.get("floor_fraction"))]
                for part in r["parts"] for row in part["rows"] if "ms_per_step" in row]
        parts.append(Table(["decode", "batch", "context", "ms a step", "tok/s", "of floor"], rows,
                           f"{machine(r)} ({source(name, link)}):").markdown())
        prefills = [[f"{row['batch']} x {row['length']:,}", f"{row['with_tok_s']:,.0f}", percent(row.get("floor_fraction")),
                     f"{row['ratio']:.2f} x"] for part in r["parts"] for row in part["rows"] if "with_tok_s" in row]
        if prefills:
            parts.append(Table(["prefill, prompts x tokens", "tok/s", "of floor", "over every row through every layer"],
                               prefills).markdown())
    return "\n\n".join(parts)


def tell_device_parts(results: Results, link: Link) -> str:
    """What each part of the device checks says."""
    parts = []
    for name, r in results.items():
        rows = [[part["name"], part["status"], _first_line(part.get("detail"))] for part in r["parts"]]
        parts.append(Table(["part", "", "says"], rows, f"{machine(r)} ({source(name, link)}):").markdown())
    return "\n\n".join(parts)


def tell_timed_kernels(results: Results, link: Link) -> str:
    """Decode attention by kernel options, where a device check swept them."""
    rows = [[r["device_name"], str(row["head_dim"]), f"{row['requests']} x {row['tokens']:,}",
             ", ".join(f"{option} {value}" for option, value in (row["options"] or {}).items()),
             spread(row["us"], 1), percent(row["of_floor"]), source(name, link)]
            for name, r in results.items() for part in r["parts"] for row in part["rows"] if "us" in row]
    return Table(["measured on", "head_dim", "requests x tokens", "options", "one decode call, µs", "of floor", "from"],
                 rows).markdown() if rows else ""


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _first_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    return lines[0] if lines else ""


def tell_grpo(results: Results, link: Link) -> str:
    rows, jobs, seen = [], [], []
    for name, r in results.items():
        for side, run in r["runs"].items():
            off = run["agreement"]
            rows.append([model(r), side, str(len(run["steps"])), *(f"{run['reward'][end]:.2f}" for end in ("first", "last")),
                         *(f"{run['held_out'][end]:.0%}" for end in ("before", "after")), spread(run["rollout_tps"], 0),
                         spread(run["refresh_ms"]) if run["refresh_ms"] else "",
                         f"{off['ratio_off_mean']:.1e}, {off['ratio_off_max']:.1e}" if off else "", source(name, link)])
        jobs += [[model(r), work, f"{job['prompt_tokens']['min']} to {job['prompt_tokens']['max']}",
                  *(spread(job["seconds"][side], 2) for side in ("engine", "transformers")), spread(job["ratio"], 2)]
                 for work, job in r["jobs"].items()]
        seen.append(picture(name, link))
    trained = Table(["model", "rollouts by", "steps", "reward, first steps", "last", "held out, before", "after", "rollout tok/s",
                     "refresh ms", "importance ratio off 1.0: a step's mean, any token, at most", "from"], rows).markdown()
    compared = Table(["model", "prompts", "tokens of each", "engine, s", "TRL's own generation, s", "engine over it"],
                     jobs).markdown()
    return "\n\n".join([trained, compared, *seen, machines(results)])


KINDS: dict[str, Kind] = {
    "speed": Kind("compare_*.json", tell_speed),
    "compare": Kind("compare_*.json", tell_compare, draw_compare, has_decode),
    "device": Kind("device_*.json", tell_device),
    "device-parts": Kind("device_*.json", tell_device_parts),
    "grpo": Kind("grpo_*.json", tell_grpo, grpo_report.plot),
    "kernels": Kind("kernel_report.json", tell_kernels),
    "timed-kernels": Kind("device_*.json", tell_timed_kernels),
    "growth": Kind("growth_*.json", tell_growth, growth_page.plot),
    "deterministic": Kind("deterministic_*.json", tell_deterministic),
    "recipes": Kind("recipes_*.json", tell_recipes, recipes_page.plot),
    "lora": Kind("bench_lora_*.json", tell_lora),
    "synthetic": Kind("synthetic_*.json", tell_inference),
    "verify": Kind("verify_*.json", tell_verify),
}
