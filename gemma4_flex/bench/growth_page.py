"""How growth is told: tables for a terminal or a page, and a plot, from the record alone. Needs no torch."""
from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from gemma4_flex.bench.table import Table, spread

WANTED_SCHEDULER_US = 200      # at 256 running sequences


def windows(result: dict) -> dict[str, int | None]:
    """Each attention type's window."""
    return {kind: group["window"] for kind, group in result["geometry"]["groups"].items()}


@dataclass(frozen=True)
class Line:
    """The least-squares line through some points, and how far the farthest lies from it, as a share of the largest value."""
    base: float
    slope: float
    deviation: float


def line(xs: Seq[float], ys: Seq[float]) -> Line:
    """A line through two points or more, at different places."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys)) / sum((x - mean_x) ** 2 for x in xs)
    base = mean_y - slope * mean_x
    return Line(base, slope, max(abs(base + slope * x - y) for x, y in zip(xs, ys)) / max(ys))


def verdicts(result: dict) -> list[str]:
    """What the figures show, a sentence each: flat or linear, and by how much."""
    said = []
    for kind, window in windows(result).items():
        beyond = [row for row in result["context"] if row["context"] >= (window or 0)]
        if len(beyond) > 1:
            said.append(_attention_verdict(kind, window, [row["context"] for row in beyond],
                                           [row["attention_us"][kind]["median"] for row in beyond]))
    for name, key in (("context", "context"), ("batch", "batch"), ("pool", "n_pages")):
        first, last = result[name][0], result[name][-1]
        said.append(f"a step takes {last['ms_per_step']['median'] / first['ms_per_step']['median']:.2f} x as long with "
                    f"{last[key] / first[key]:,.1f} x the {name}")
    busiest = result["scheduler"][-1]
    us = busiest["us_per_step"]["median"]
    return [*said, f"the scheduler takes {us:,.0f} µs a step at {busiest['running']} running sequences, "
                   f"{'under' if us < WANTED_SCHEDULER_US else 'over'} the {WANTED_SCHEDULER_US} µs wanted"]


def _attention_verdict(kind: str, window: int | None, tokens: list[int], us: list[float]) -> str:
    said = (f"{kind.removesuffix('_attention')} attention alone takes {us[-1] / us[0]:.2f} x as long at {tokens[-1]:,} tokens as "
            f"at {tokens[0]:,}")
    if window or len(tokens) < 3:
        return said
    fit = line(tokens, us)
    return f"{said}, along a line of {fit.base:,.0f} µs and {1e3 * fit.slope:,.1f} µs per 1,000 tokens to {fit.deviation:.0%}"


def context_table(result: dict) -> Table:
    kinds = list(windows(result))
    rows = [(f"{row['context']:,}", spread(row["ms_per_step"], 3), f"{row['floor_ms']:.3f}",
             *(spread(row["attention_us"][kind], 1) for kind in kinds)) for row in result["context"]]
    heads = [f"{kind.removesuffix('_attention')} attention alone, µs"
             + (f" (window {window})" if window else "") for kind, window in windows(result).items()]
    return Table(("tokens", "ms a step", "floor, ms", *heads), rows, "One sequence, by context:")


def batch_table(result: dict) -> Table:
    rows = [(str(row["batch"]), spread(row["ms_per_step"], 3), f"{1e3 * row['batch'] / row['ms_per_step']['median']:,.0f}",
             f"{row['floor_ms']:.3f}", f"{row['floor_fraction']:.0%}") for row in result["batch"]]
    return Table(("batch", "ms a step", "tok/s", "floor, ms", "of floor"), rows,
                 f"By batch, at {result['sizes']['context']:,} tokens:")


def pool_table(result: dict) -> Table:
    rows = [(f"{row['n_pages']:,}", spread(row["ms_per_step"], 3)) for row in result["pool"]]
    return Table(("pages", "ms a step"), rows, f"By pages in the full-attention pool, batch {result['sizes']['pool_batch']} at "
                 f"{result['sizes']['context']:,} tokens:")


def scheduler_table(result: dict) -> Table:
    rows = [(str(row["running"]), spread(row["us_per_step"], 1), spread(row["p99_us"], 1)) for row in result["scheduler"]]
    return Table(("running sequences", "mean, µs", "99 of 100 below, µs"), rows, "The scheduler alone, pure Python, a step:")


def steps_note(result: dict) -> str:
    """How the timed steps ran."""
    rows = [row for name in ("context", "batch", "pool") for row in result[name]]
    eager = sum(row["steps_eager"] for row in rows)
    return (f"{sum(row['steps_replayed'] for row in rows):,} steps replayed from captured graphs, {eager:,} run eagerly; medians "
            f"of {result['sizes']['rounds']} interleaved rounds, least and greatest in brackets")


def told(result: dict, form: Callable[[Table], str]) -> str:
    """All tables, each as `form` gives it (`Table.text` or `Table.markdown`), and what they show."""
    parts = [form(table(result)) for table in (context_table, batch_table, pool_table, scheduler_table)]
    return "\n\n".join([*parts, "\n".join(f"- {said}" for said in [*verdicts(result), steps_note(result)])])


def plot(result: dict, path: Path) -> None:
    """A PNG of five panels: step against context, attention alone, step against batch and pool, and the scheduler."""
    import matplotlib
    matplotlib.use("Agg")  # no display where this runs
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    panels = panels.ravel()

    def draw(panel, xs, summaries, label: str) -> None:
        middle = [s["median"] for s in summaries]
        below, above = [s["median"] - s["min"] for s in summaries], [s["max"] - s["median"] for s in summaries]
        panel.errorbar(xs, middle, yerr=(below, above), marker="o", markersize=4, capsize=3, label=label)
    for panel, name, key in ((panels[0], "context", "context"), (panels[2], "batch", "batch"), (panels[3], "pool", "n_pages")):
        xs = [row[key] for row in result[name]]
        draw(panel, xs, [row["ms_per_step"] for row in result[name]], "step")
        panel.plot(xs, [row["floor_ms"] for row in result[name]], ":", color="gray", label="floor")
        panel.set(title=f"step against {name}", ylabel="ms")
    panels[3].set_xlabel("pages")
    for kind, window in windows(result).items():
        draw(panels[1], [row["context"] for row in result["context"]],
             [row["attention_us"][kind] for row in result["context"]], kind.removesuffix("_attention"))
        if window:
            panels[1].axvline(window, color="gray", linestyle="--", linewidth=0.8, label=f"window {window}")
    panels[1].set(title="attention alone against context", ylabel="µs")
    draw(panels[4], [row["running"] for row in result["scheduler"]], [row["us_per_step"] for row in result["scheduler"]],
         "scheduler")
    panels[4].axhline(WANTED_SCHEDULER_US, color="gray", linestyle="--", linewidth=0.8, label=f"{WANTED_SCHEDULER_US} µs")
    panels[4].set(title="scheduler, a step", xlabel="running sequences", ylabel="µs")
    for panel in panels[:5]:
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    panels[5].axis("off")
    figure.suptitle(f"{result['model_name']}, {result['dtype']}, {result['device_name']}")
    figure.savefig(path, dpi=100)
    plt.close(figure)
