"""How many times as fast as others the engine is to be, and whether it was."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemma4_flex.bench.compare import OURS, Row, best_of_transformers, ratios
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.measure import MIN_ROUNDS, summarize


@dataclass(frozen=True)
class Wanted:
    """At least so many times as fast as `against`, an engine or the best of transformers' modes. `batch` None: any."""

    model_name: str
    dtype: str
    kind: str
    batch: int | None
    against: str
    at_least: float


BEST = "best of transformers"
WANTED = (
    Wanted("tiny", "float32", "decode", 1, BEST, 5.0),
    Wanted("tiny", "float32", "decode", 8, BEST, 4.0),
    Wanted("tiny", "float32", "decode", 32, BEST, 3.0),
    Wanted("tiny", "float32", "decode", 1, "llama_cpp", 0.8),
    Wanted("tiny", "float32", "decode", 8, "llama_cpp", 1.0),
    Wanted("tiny", "float32", "prefill", None, BEST, 2.0),
    Wanted("tiny", "float32", "mixed", None, BEST, 3.0),
    Wanted("synthetic:E2B", "bfloat16", "decode", 1, BEST, 1.3),
    Wanted("synthetic:E2B", "bfloat16", "decode", 8, BEST, 1.5),
)      # on a CPU: what a GPU has to reach is device_check.py's


def wanted_of(model_name: str, dtype: str, device: str) -> list[Wanted]:
    return [w for w in WANTED if device == "cpu" and (w.model_name, w.dtype) == (model_name, dtype)]


def judge(wanted: Wanted, measured: Sequence[tuple[Job, list[Row]]]) -> dict:
    """Wanted against reached: `verdict` is passed, missed, or not measured, which `reason` explains."""
    verdict = {"work": f"{wanted.kind}, batch {wanted.batch}" if wanted.batch else wanted.kind, "against": wanted.against,
               "at_least": wanted.at_least, "reached": None, "verdict": "not measured", "reason": ""}
    fitting = [(job, rows) for job, rows in measured if job.kind == wanted.kind and wanted.batch in (None, job.max_batch)]
    if not fitting:
        return verdict | {"reason": "no such job in this run"}
    job, rows = fitting[0]
    by_name = {row.name: row for row in rows if row.ran}
    theirs = best_of_transformers(rows, job) if wanted.against == BEST else by_name.get(wanted.against)
    if OURS not in by_name or theirs is None:
        return verdict | {"reason": f"{OURS if OURS not in by_name else wanted.against} did not run"}
    found = ratios(by_name[OURS], theirs)
    verdict |= {"engine": theirs.name, "reached": summarize(found).median}
    if len(found) < MIN_ROUNDS:
        return verdict | {"reason": f"a verdict takes at least {MIN_ROUNDS} rounds"}
    return verdict | {"verdict": "passed" if verdict["reached"] >= wanted.at_least else "missed"}
