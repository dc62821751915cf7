"""What `bench.recipes` found, as a table and as a picture. Needs no torch."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemma4_flex.bench.table import Table


def told(record: dict, form: Callable[[Table], str]) -> str:
    """A row a format, the nearest to bf16 first."""
    rows = [["bf16", _size(record["bf16"]["weight_bytes"]), "", "", "", ""]]
    for row in sorted(record["formats"], key=lambda row: row["kl_mean"]):
        spread = row["kl_by_prompt"]
        rows.append([row["name"], _size(row["weight_bytes"]), _size(row["file_bytes"]), f"{row['kl_mean']:.2e}",
                     f"{spread['min']:.1e} to {spread['max']:.1e}", f"{row['top1']:.2%}"])
    return form(Table(["format", "weights here", "file", "mean KL from bf16", "prompts' means", "same top-1"], rows))


def _size(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def plot(record: dict, path: Path) -> None:
    """Mean KL against the size of the weights."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for maker, mark in (("GGUF", "o"), ("MLX", "s")):
        rows = [row for row in record["formats"] if row["name"].startswith(maker)]
        axes.plot([row["weight_bytes"] / 1e6 for row in rows], [row["kl_mean"] for row in rows], mark, label=maker)
        for row in rows:
            axes.annotate(row["name"].removeprefix(f"{maker} "), (row["weight_bytes"] / 1e6, row["kl_mean"]), fontsize=8,
                          xytext=(4, 4), textcoords="offset points")
    axes.axvline(record["bf16"]["weight_bytes"] / 1e6, color="grey", linestyle="--", label="bf16")
    axes.set(xlabel="weights, MB", ylabel="mean KL from bf16, nats", yscale="log", title=f"{record['model_name']}: bits against KL")
    axes.legend()
    figure.savefig(path, dpi=110)
