"""What LoRA in two copies costs: a refresh against its floor, merged decode against no adapter and against unmerged."""
from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import asdict

import torch
from tabulate import tabulate

from gemma4_flex.bench.measure import summarize, synchronizer, timed
from gemma4_flex.bench.roofline import copy_bandwidth
from gemma4_flex.engine import FlexEngine
from gemma4_flex.lora.adapters import Adapter
from gemma4_flex.lora.double_copy import DoubleCopy, all_linear_bytes
from gemma4_flex.lora.unmerged import unmerged_view
from gemma4_flex.params import EngineConfig, SamplingParams


def refresh_bytes(double: DoubleCopy, adapter: Adapter) -> int:
    """Bytes a refresh has to move: each target read from the base and written, each adapter matrix read."""
    matrices = sum(m.numel() * m.element_size() for pair in adapter.pairs.values() for m in (pair.down, pair.up))
    return 2 * double.extra_bytes + matrices


def measure_lora(loaded, adapter: Adapter, config: EngineConfig, prompts: Seq[Seq[int]], *, new_tokens: int, rounds: int,
                 on_round: Callable[[], None] = lambda: None) -> dict:
    """Refreshes, and decode rounds of three engines on the same base, taken in turn: A B C A B C.

    `loaded` is a `LoadedModel`; all engines share its tensors. The first round of each warms up and does not count.
    """
    double = DoubleCopy(loaded.model)
    device = next(loaded.model.parameters()).device.type
    synchronize = synchronizer(device)
    refreshes = [timed(lambda: double.refresh(adapter), synchronize=synchronize)[1] for _ in range(rounds + 1)][1:]
    engines = {"no adapter": FlexEngine(loaded.model, loaded.tokenizer, config),
               "merged": FlexEngine(double.inference, loaded.tokenizer, config),
               "unmerged": FlexEngine(unmerged_view(loaded.model, adapter), loaded.tokenizer, config)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    for n in range(rounds + 1):
        for name, engine in engines.items():
            engine.reset_stats()
            engine.generate(list(prompts), params)
            if n:
                rates[name].append(engine.stats.decode_tokens / engine.stats.decode_s)
        on_round()
    bandwidth = copy_bandwidth(device)
    floor_s = refresh_bytes(double, adapter) / bandwidth.bytes_per_s
    median = {name: summarize(values).median for name, values in rates.items()}
    pairwise = {name: summarize([a / b for a, b in zip(rates["merged"], rates[name])]) for name in ("no adapter", "unmerged")}
    expected = all_linear_bytes(engines["merged"].geometry, loaded.model.model.norm.weight.element_size())
    refresh = summarize(refreshes)
    return {
        "batch": len(prompts), "prompt_tokens": [len(p) for p in prompts], "new_tokens": new_tokens, "rounds": rounds,
        "refresh": {"seconds": asdict(refresh), "all": refreshes, "bytes": refresh_bytes(double, adapter), "floor_s": floor_s,
                    "times_floor": refresh.median / floor_s, "bytes_per_s": bandwidth.bytes_per_s},
        "decode_tps": {name: {"median": median[name], "all": rates[name]} for name in rates},
        "merged_over": {name: asdict(ratio) for name, ratio in pairwise.items()},
        "extra_bytes": {"allocated": double.extra_bytes, "all_linear_formula": expected},
        "steps": {name: {"replayed": e.stats.steps_replayed, "eager": e.stats.steps_eager} for name, e in engines.items()},
        "threads": torch.get_num_threads()}


def lora_table(figures: dict) -> str:
    """The figures as a table: what was seen beside what was wanted, and whether it was reached."""
    refresh, over, extra = figures["refresh"], figures["merged_over"], figures["extra_bytes"]
    no_adapter = over["no adapter"]["median"]
    rows = [
        ("refresh", f"{1e3 * refresh['seconds']['median']:.2f} ms, {refresh['times_floor']:.2f} x its floor",
         f"at most 3 x: {'reached' if refresh['times_floor'] <= 3 else 'missed'}"),
        *((f"decode, {name}", f"{rate['median']:.1f} tok/s", "") for name, rate in figures["decode_tps"].items()),
        ("merged against no adapter", f"{no_adapter:.3f} x", f"at least 0.98 x: {'reached' if no_adapter >= 0.98 else 'missed'}"),
        ("merged against unmerged", f"{over['unmerged']['median']:.2f} x", ""),
        ("extra memory", f"{extra['allocated']:,} bytes", f"{extra['all_linear_formula']:,}: "
         f"{'reached' if extra['allocated'] == extra['all_linear_formula'] else 'missed'}")]
    return tabulate(rows, headers=("", "seen", "wanted"))
