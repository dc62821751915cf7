"""What a command line does with an adapter: put it on a model, run, and prove that nothing drifted."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

from tabulate import tabulate
from torch import nn

from gemma4_flex.checkpoints.four_bit import layout_4bit
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import Adapter, AdapterError, load_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.drift import DriftReport, verify_no_drift
from gemma4_flex.lora.requantize import RequantizedCopy, deviation
from gemma4_flex.lora.unmerged import unmerged_view


class LoraSession:
    """An adapter directory on a model: merged into a double copy (requantised over 4-bit weights), or unmerged beside the
    weights."""

    def __init__(self, directory: Path, *, merge: bool):
        self.directory, self.merge = directory, merge
        self.double: DoubleCopy | None = None
        self.adapter: Adapter | None = None

    def put_on(self, model: nn.Module) -> nn.Module:
        """The model an engine is to run. Raises AdapterError, with `model` unchanged, where the adapter does not fit."""
        self.adapter = load_adapter(self.directory, ModelGeometry.from_config(model.config))
        if not self.merge:
            return unmerged_view(model, self.adapter)
        self.double = (RequantizedCopy if layout_4bit(model).quantized else DoubleCopy)(model)
        self.double.refresh(self.adapter)
        return self.double.inference

    def summary(self) -> dict:
        """For the result's JSON: what was bound, what is inert, what the second copy costs and, where it was requantised,
        how far that took it from the merge."""
        requantized = isinstance(self.double, RequantizedCopy)
        off = deviation(self.double.inference, self.double.base, self.adapter) if requantized else None
        return {"directory": str(self.directory), "merged": self.merge, "modules": len(self.adapter.pairs),
                "inert": list(self.adapter.inert), "extra_bytes": self.double.extra_bytes if self.double else 0,
                "deviation": off and {**dataclasses.asdict(off), "text": str(off)}}

    def verify(self, engine, fresh_engine: Callable[[nn.Module], object], prompts: Seq[Seq[int]], *, iterations: int,
               on_cycle: Callable[[int], None] = lambda n: None) -> DriftReport:
        """Drift verification of the engine that runs what `put_on` gave."""
        if self.double is None:
            raise AdapterError("drift verification needs a merged adapter: leave out --no_merge_lora, and over 4-bit weights "
                               "give --lora_4bit requantize.")
        self.double.attach(engine)
        return verify_no_drift(engine, self.double, self.adapter, fresh_engine, prompts, iterations=iterations,
                               on_cycle=on_cycle)


def drift_table(report: DriftReport) -> str:
    """The report as a table: tiers, then the faults that had to be caught."""
    rows = [("tier", t.name, "FAILED" if not t.passed else "ok" if t.applies else "reported", t.detail) for t in report.tiers]
    rows += [("control", t.name, "caught" if t.passed else "MISSED", t.detail) for t in report.controls]
    verdict = "no drift" if report.passed else "DRIFT VERIFICATION FAILED"
    return f"{tabulate(rows, maxcolwidths=[None, None, None, 70])}\n{verdict} after {report.iterations} perturb-and-refresh cycles"


def drift_result(report: DriftReport) -> dict:
    """The report for the result's JSON."""
    return {**dataclasses.asdict(report), "passed": report.passed}
