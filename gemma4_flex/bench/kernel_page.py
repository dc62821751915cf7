"""How the record of compiled kernels is written down, as JSON and as a page. Needs neither torch nor triton."""
from __future__ import annotations

import json


def line(row: dict) -> str:
    """One compiled kernel in one line, for a terminal."""
    return (f"head_dim {row['head_dim']} {row['phase']:7} {row['arch']:6} {row['BLOCK_M']:3} x {row['BLOCK_N']:<3} "
            f"stages {row['num_stages']} warps {row['num_warps']}  shared {row['shared_bytes']:>7,} of "
            f"{row['shared_limit_bytes']:,} {'ok  ' if row['fits'] else 'OVER'}  registers {row['registers']:>3}  "
            f"spilled {row['spill_bytes']:,}")


def record(report: dict) -> str:
    """The report as JSON, one kernel a line."""
    def block(value: object) -> str:
        if isinstance(value, list):
            return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
        return json.dumps(value)
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {block(value)}" for key, value in report.items()) + "\n}\n"


def markdown(report: dict) -> str:
    """The report as a page: defaults, candidates by head size and phase, and the figures known from elsewhere."""
    gpus = ", ".join(f"{arch} ({gpu['name']}): {gpu['shared_limit_bytes']:,} B" for arch, gpu in report["gpus"].items())
    lines = [
        "# Attention kernels, cross-compiled", "",
        f"Made by `scripts/kernel_report.py` with torch {report['torch']} and triton {report['triton']}, no GPU present. "
        f"The kernels are those of `gemma4_flex/attention.py` over {report['page_size']}-token pages, in bf16 "
        "unless float32 is named. A block may use so much shared memory: " + gpus + ". Registers are per thread (255 is the "
        "most there are); *spilled* is bytes per thread that went to memory for want of registers. These figures say what fits, "
        "not what is fast: nothing here was timed on a card.", "",
        "## torch's default options", ""]
    lines += _table(report["defaults"], head=True)
    for head_dim, phase in sorted({(r["head_dim"], r["phase"]) for r in report["candidates"]}):
        lines += ["", f"## head_dim {head_dim}, {phase}", ""]
        lines += _table([r for r in report["candidates"] if (r["head_dim"], r["phase"]) == (head_dim, phase)])
    lines += ["", "## The chosen rows in float32", "",
              "`gemma4_flex/kernel_options.py` holds what was chosen from the tables above.", ""]
    lines += _table(report["table_float32"], head=True)
    lines += ["", "## The chosen rows on cards that borrow them", "",
              "What does not fit here is passed over for the next row. *table*: the figure of the card whose rows they are.", ""]
    lines += _table(report["table_on_relatives"], head=True)
    lines += ["", "## Figures known from elsewhere", "",
              "head_dim 512 on sm_90 under a mask that looks each page's owner up in one map (the engine's own mask goes "
              "through the page table, and takes a little more or less).", "",
              "| phase | tile | stages | warps | known | here |", "|---|---|---|---|---|---|"]
    lines += [f"| {r['phase']} | {r['BLOCK_M']} x {r['BLOCK_N']} | {r['num_stages']} | {r['num_warps']} | "
              f"{r['known_shared_bytes']:,} | {r['shared_bytes']:,} |" for r in report["known_figures"]]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict], head: bool = False) -> list[str]:
    has_table = "shared_bytes_in_table" in rows[0]
    where = "head_dim | phase | GPU" if head else "GPU"
    lines = [f"| {where} | tile | stages | warps | shared memory | fits | registers | spilled |" + " table |" * has_table,
             "|---" * (8 + 2 * head + has_table) + "|"]
    for r in rows:
        place = f"{r['head_dim']} | {r['phase']} | {r['arch']}" if head else r["arch"]
        lines.append(f"| {place} | {r['BLOCK_M']} x {r['BLOCK_N']} | {r['num_stages']} | {r['num_warps']} | "
                     f"{r['shared_bytes']:,} | {'ok' if r['fits'] else 'OVER'} | {r['registers']} | {r['spill_bytes']:,} |"
                     + (f" {r['shared_bytes_in_table']:,} |" if has_table else ""))
    return lines
