"""How the record of a step's kernels is written down, as JSON and as a page. Needs neither torch nor triton."""
from __future__ import annotations

import json

SOURCE = "scripts/kernel_report.py --part step"
KINDS = ("matmul", "flex", "reduction", "pointwise", "other", "between")


def step_line(row: dict) -> str:
    """One step in one line, for a terminal."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in row["by_kind"].items())
    return (f"{row['model']} {row['phase']:7} {row['arch']:6} {row['batch']:>3} x {row['length']:<5} "
            f"{row['launches']:>4} launches ({kinds}), {row['num_bytes'] / 1e9:.2f} GB, "
            f"{row['spilling_hot_kernels']} hot kernels spill")


def step_record(report: dict) -> str:
    """The report as JSON: a step's facts in a line, then its kernels, one a line."""
    lines = []
    for row in report["steps"]:
        kernels = ",\n".join(json.dumps(kernel) for kernel in row["kernels"])
        facts = json.dumps({key: value for key, value in row.items() if key != "kernels"})
        lines.append(f'{facts[:-1]}, "kernels": [\n{kernels}\n]}}')
    head = json.dumps({key: value for key, value in report.items() if key != "steps"})
    return head[:-1] + ', "steps": [\n' + ",\n".join(lines) + "\n]}\n"


def step_markdown(after: dict, before: dict | None = None) -> str:
    """The report as a page: launches by step, before and after where both are known, and the kernels of decode steps."""
    lines = [
        "# Kernels of a step, planned without a GPU", "",
        f"Made by `{SOURCE}` with torch {after['torch']} and triton {after['triton']}: the engine's own decode and prefill steps "
        "at full geometry, on fake tensors, region by region as the walk compiles them. *between*: operations that run outside of "
        "regions. *GB*: what the kernels must move, each its own inputs and outputs once (weights and K/V in view, and what one "
        "kernel hands the next). A hot kernel is launched three times or more a step. Decode steps have 2,048 tokens a sequence "
        "behind them. Nothing here was timed on a card.", "",
        "## Launches a step", ""]
    lines += _launch_table(after["steps"], {_step(row): row for row in before["steps"]} if before else {})
    if before:
        lines += ["", f"*before*: {before['what']}"]
    lines += ["", "## Regions of a decode step", "", "Launches of a region, and how often a step calls it (sm_90).", ""]
    lines += _region_table([row for row in after["steps"] if row["phase"] == "decode" and row["arch"] == "sm_90"])
    for row in after["steps"]:
        if row["phase"] == "decode" and row["arch"] == "sm_90":
            lines += ["", f"## {row['model']}, decode, batch {row['batch']}", ""]
            lines += _kernel_table(row, [r for r in after["steps"] if _step(r)[:-1] == _step(row)[:-1]])
    return "\n".join(lines) + "\n"


def _step(row: dict) -> tuple:
    return row["model"], row["phase"], row["batch"], row["length"], row["arch"]


def _launch_table(rows: list[dict], before: dict[tuple, dict]) -> list[str]:
    kinds = [kind for kind in KINDS if any(kind in row["by_kind"] for row in rows)]
    lines = ["| model | step | GPU | " + "before | GB before | " * bool(before) + "launches | " + " | ".join(kinds)
             + " | GB | hot kernels that spill |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for row in rows:
        old = before.get(_step(row))
        was = (f"{old['launches']} | {old['num_bytes'] / 1e9:.2f} | " if old else "| | ") if before else ""
        counts = " | ".join(str(row["by_kind"].get(kind, 0)) for kind in kinds)
        lines.append(f"| {row['model']} | {row['phase']} {row['batch']} x {row['length']} | {row['arch']} | {was}"
                     f"{row['launches']} | {counts} | {row['num_bytes'] / 1e9:.2f} | {row['spilling_hot_kernels']} |")
    return lines


def _region_table(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row["regions"]))
    lines = ["| model | batch | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        cells = [f"{count} x {times}" for times, count in (row["regions"].get(name, (0, 0)) for name in names)]
        lines.append(f"| {row['model']} | {row['batch']} | " + " | ".join(cells) + " |")
    return lines


def _kernel_table(row: dict, same_step: list[dict]) -> list[str]:
    """The kernels of a step; shared memory, registers and spills on every GPU whose step has the same kernel."""
    arches = [other["arch"] for other in same_step]
    lines = ["| region | kernel | kind | launches | KB each | " + " | ".join(arches) + " |", "|---" * (5 + len(arches)) + "|"]
    for kernel in row["kernels"]:
        cells = []
        for other in same_step:
            match = [k for k in other["kernels"] if all(k[key] == kernel[key] for key in ("region", "name", "kind", "num_bytes"))]
            cells.append(_taken(match[0]) if match else "")
        lines.append(f"| {kernel['region']} | {kernel['name']} | {kernel['kind']} | {kernel['launches']} | "
                     f"{kernel['num_bytes'] / 1e3:,.0f} | " + " | ".join(cells) + " |")
    return lines + ["", "A GPU's cell: shared memory in bytes / registers a thread / bytes spilled a thread."]


def _taken(kernel: dict) -> str:
    if "registers" not in kernel:
        return "library"
    return f"{kernel['shared_bytes']:,} / {kernel['registers']} / {kernel['spill_bytes']:,}"
