"""What `bench.formats` found, as a table. Needs no torch."""
from __future__ import annotations

from collections.abc import Callable

from gemma4_flex.bench.table import Table, spread


def told(record: dict, form: Callable[[Table], str]) -> str:
    """A row a batch and side."""
    rows = []
    for job in record["jobs"]:
        for name, side in job["sides"].items():
            memory = record["memory"][name]
            rows.append([str(job["batch"]), name, _size(memory["weights"]), _size(memory["ple_host"]) if memory["ple_host"] else "",
                         _size(side["step_weight_bytes"]), spread(side["tokens_per_s"]), spread(side["over_bf16"], 2),
                         f"{side['floor_tokens_per_s']:,.0f} by {side['bound']}", f"{side['floor_fraction']:.1%}"])
    return form(Table(["batch", "weights", "on the device", "in host memory", "read a step", "decode tok/s", "over bf16",
                       "floor, tok/s", "of floor"], rows))


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
