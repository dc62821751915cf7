"""Kernel options on the card that is here: whether each of the table runs and is right, and how fast decode is with others.

A case is what attention sees in a step: requests of equal length over shuffled pages, some layers with pools of their own,
so that a timed replay reads from memory and not from a cache.
"""
from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from gemma4_flex import attention
from gemma4_flex.bench.device_bench import Bench, CheckFailed
from gemma4_flex.bench.measure import MIN_ROUNDS, summarize, timed
from gemma4_flex.geometry import FULL, SLIDING, LayerGeometry
from gemma4_flex.kernel_options import ARCHITECTURE_OF, TABLE
from gemma4_flex.kv_cache import KVGroup
from gemma4_flex.masks import PageMask, Rows
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import DEFAULT_PAGE_SIZE
from gemma4_flex.step_graph import StepGraph

WINDOWS = {256: 512, 512: None}     # E-series: sliding layers have head_dim 256, full layers 512
NUM_HEADS = 8
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}     # largest |flex - sdpa| over the largest |sdpa|

# decode options beyond the table's, (BLOCK_N, num_stages, num_warps) by head_dim: some of those that fit without spilling
SWEEP = {256: ((128, 2, 4), (64, 3, 4), (64, 2, 8), (32, 3, 4)), 512: ((64, 2, 4), (32, 3, 4), (32, 2, 8), (32, 1, 4))}


@dataclass(frozen=True)
class Case:
    """Queries [R, H, Q, D] of the last positions of R requests, and pools for each of `layers` layers."""

    q: Tensor
    group: KVGroup
    rows: Rows

    def plan(self) -> PageMask:
        return attention.PagedBackend("flex", self.group, {}).plan(self.rows)

    def flex(self, layer: int, plan: PageMask, options: dict | None) -> Tensor:
        keys, values = self.group.keys[layer], self.group.values[layer]
        return attention.paged_flex(self.q, keys, values, self.group, self.rows, plan, options)

    def sdpa(self, layer: int) -> Tensor:
        keys, values = self.group.keys[layer], self.group.values[layer]
        return attention.paged_sdpa(self.q, keys, values, attention.gather_plan(self.group, self.rows))

    def bytes_in_view(self, layers: int) -> int:
        """K and V that `layers` calls must read, for queries of one token."""
        seen = min(int(self.rows.first[0]) + 1, self.group.window or 1 << 62)
        pool = self.group.keys[0]
        return 2 * layers * len(self.rows.first) * seen * pool.shape[1] * pool.shape[3] * pool.element_size()


def make_case(bench: Bench, head_dim: int, phase: str, dtype: str, *, requests: int, tokens: int, layers: int) -> Case:
    """Random queries and pools; pages are handed out shuffled, as in a pool that has been used for long."""
    page, window = DEFAULT_PAGE_SIZE[bench.device], WINDOWS[head_dim]
    kind = SLIDING if window else FULL
    table = PageTable(kind, n_pages=1 + requests * -(-tokens // page), page_size=page, window=window, num_slots=requests + 1,
                      max_seq_length=tokens)
    random.Random(bench.settings.seed).shuffle(table.free_pages)
    for slot in range(1, requests + 1):
        table.extend(slot, tokens)
    shape = [LayerGeometry(i, kind, NUM_HEADS, 1, head_dim, window, 0, i) for i in range(layers)]
    group = KVGroup(shape, table, getattr(torch, dtype), bench.device)
    group.apply(table.drain_changes())
    generator = torch.Generator(device=bench.device).manual_seed(bench.settings.seed)
    for pool in (*group.keys.values(), *group.values.values()):
        pool.normal_(generator=generator)
    width = 1 if phase == "decode" else min(attention.row_width(bench.device, "sdpa" if bench.device == "cpu" else "flex"), tokens)
    slots = torch.arange(1, requests + 1, device=bench.device)
    first = torch.full_like(slots, tokens - width)
    q = torch.empty(requests, NUM_HEADS, width, head_dim, dtype=getattr(torch, dtype), device=bench.device)
    q.normal_(std=head_dim ** -0.5, generator=generator)      # scores of deviation 1, as trained norms leave them
    return Case(q, group, Rows(slots, first, torch.full_like(slots, width), width))


def options_fit(bench: Bench) -> str:
    """Every row of kernel_options.TABLE for this card: its shared memory against the card's, then run and compared with sdpa.
    A row whose kernels do not fit by the table is passed over, as `choose` would."""
    with torch.no_grad():
        return _options_fit_cuda(bench) if bench.device == "cuda" else _backends_agree(bench)


def _options_fit_cuda(bench: Bench) -> str:
    card = torch.cuda.get_device_properties(0)
    arch, limit = ARCHITECTURE_OF.get(card.major), card.shared_memory_per_block_optin
    ran, wrong = 0, []
    for (head_dim, phase, of), fits in TABLE.items():
        if of != arch:
            continue
        cases = {dtype: make_case(bench, head_dim, phase, dtype, requests=2, tokens=bench.scale.kernel_case[1] // 4, layers=1)
                 for dtype in TOLERANCE}
        for fit in fits:
            for dtype, case in cases.items():
                row = {"head_dim": head_dim, "phase": phase, "dtype": dtype, "options": fit.options,
                       "shared_bytes": fit.shared_bytes[dtype], "limit_bytes": limit,
                       "fits": fit.shared_bytes[dtype] <= limit}
                # float32 serves for proofs alone, and each kernel takes seconds to compile: its best fitting row is run
                wanted = row["fits"] and (dtype == "bfloat16" or fit is next(f for f in fits if f.shared_bytes[dtype] <= limit))
                if wanted and bench.left() > 1:
                    row |= _try(case, fit.options, dtype)
                    ran += 1
                    if row["error"] or not row["agrees"]:
                        wrong.append(f"head_dim {head_dim} {phase} {dtype} {json.dumps(fit.options)}: "
                                     f"{row['error'] or 'differs from sdpa by ' + format(row['difference'], '.3g')}")
                bench.row(**row)
    if not ran:
        raise CheckFailed(f"the table has no rows for compute capability {card.major}.{card.minor}, or no time was left")
    if wrong:
        raise CheckFailed("; ".join(wrong))
    return f"{ran} rows of the table run on {arch} and agree with sdpa"


def _try(case: Case, options: dict | None, dtype: str) -> dict:
    """Run flex with these options once: the error by which it does not run, or its difference from sdpa."""
    try:
        found = case.flex(0, case.plan(), options).float()
    except Exception as error:      # too much shared memory is the compiler's or the driver's error, by version
        return {"error": f"{type(error).__name__}: {str(error).strip()[-300:]}"}
    expected = case.sdpa(0).float()
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    return {"error": None, "difference": difference, "agrees": difference <= TOLERANCE[dtype]}


def _backends_agree(bench: Bench) -> str:
    """Without a GPU the table has nothing to run on: its cases are made, and sdpa must not care where their pages lie."""
    requests, tokens, _ = bench.scale.kernel_case
    for head_dim in WINDOWS:
        for phase in ("decode", "prefill"):
            found = [make_case(bench, head_dim, phase, "float32", requests=requests, tokens=tokens, layers=1).sdpa(0)
                     for _ in range(2)]
            bench.row(head_dim=head_dim, phase=phase, backend="sdpa", finite=bool(torch.isfinite(found[0]).all()))
            if not torch.equal(*found):
                raise CheckFailed(f"head_dim {head_dim} {phase}: two runs of one case differ")
    return "no GPU: cases were made, and no row of the table was run"


def sweep(bench: Bench) -> str:
    """Decode attention with each option for both head sizes, beside the K/V bytes it must read."""
    requests, tokens, layers = bench.scale.kernel_case
    best: dict[int, dict] = {}
    for head_dim in WINDOWS:
        case = make_case(bench, head_dim, "decode", "bfloat16", requests=requests, tokens=tokens, layers=layers)
        floor_us = 1e6 * case.bytes_in_view(1) / bench.bandwidth().bytes_per_s
        for options in _candidates(bench, head_dim):
            row = {"head_dim": head_dim, "requests": requests, "tokens": tokens, "options": options, "floor_us": floor_us}
            if bench.left() < 1:
                bench.row(**row, skipped="no time left")
                continue
            try:
                times = time_calls(bench, case, options, layers)
            except Exception as error:
                bench.row(**row, error=f"{type(error).__name__}: {str(error).strip()[-300:]}")
                continue
            row |= {"us": summarize(times).as_dict(), "of_floor": floor_us / summarize(times).median}
            bench.row(**row)
            if head_dim not in best or row["us"]["median"] < best[head_dim]["us"]["median"]:
                best[head_dim] = row
        del case
    if not best:
        raise CheckFailed("no option could be timed")
    return "; ".join(f"head_dim {head_dim}: {json.dumps(row['options'])} {row['us']['median']:.1f} us, "
                     f"{row['of_floor']:.0%} of its floor" for head_dim, row in best.items())


def _candidates(bench: Bench, head_dim: int) -> Seq[dict | None]:
    """The table's rows of this card first, then SWEEP; on a CPU the one option there is, sdpa's."""
    if bench.device == "cpu":
        return [None]
    arch = ARCHITECTURE_OF.get(torch.cuda.get_device_capability(0)[0])
    known = [fit.options for fit in TABLE.get((head_dim, "decode", arch), ())]
    return known + [dict(zip(("BLOCK_N", "num_stages", "num_warps"), tried)) for tried in SWEEP[head_dim]]


@torch.no_grad()
def time_calls(bench: Bench, case: Case, options: dict | None, layers: int) -> list[float]:
    """Microseconds of one attention call, rounds of a replay that makes `calls` of them over the layers in turn."""
    on_cpu = bench.device == "cpu"
    plan = None if on_cpu else case.plan()      # once: a step's layers share it

    def calls() -> list[Tensor]:
        return [case.sdpa(n % layers) if on_cpu else case.flex(n % layers, plan, options) for n in range(bench.scale.calls)]

    calls()      # compiles
    graph = StepGraph.capture(calls, {"q": case.q})
    graph.replay()
    return [1e6 * seconds_of(bench, graph.replay) / bench.scale.calls for _ in range(2 * MIN_ROUNDS)]


def seconds_of(bench: Bench, work: Callable[[], object]) -> float:
    """Seconds `work` takes on the device: by events on a GPU, where launching is not to be counted."""
    if bench.device == "cpu":
        return timed(work, synchronize=bench.synchronize)[1]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
