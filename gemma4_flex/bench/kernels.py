"""What the engine's own attention kernels take on GPUs that are not here: which (tile, stages, warps) fit, and which spill.

`sweep` cross-compiles attention.py's flex_attention call for decode and prefill at both head sizes of the E-series, first
with torch's default options and then with CANDIDATES. `markdown` turns its record into the table in results/. Nothing
here says how fast a kernel is.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

# name, compute capability, multiprocessors, bytes of shared memory a block may opt in to (CUDA C++ Programming Guide,
# table "Technical Specifications per Compute Capability")
GPUS = {
    "sm_80": ("A100", (8, 0), 108, 166_912),
    "sm_90": ("H100, H200", (9, 0), 132, 232_448),
    "sm_100": ("B200", (10, 0), 148, 232_448),
}
HEAD_DIMS = (256, 512)
PHASES = ("decode", "prefill")
WINDOW = {256: 512, 512: None}      # E-series: sliding layers have head_dim 256, full layers 512
NUM_HEADS = 8
PAGE_SIZE = 128
NUM_PAGES = 2048
COLUMNS = 64
ROWS = {"decode": (64, 1), "prefill": (16, 128)}     # rows, queries a row

# (BLOCK_M, BLOCK_N): ((num_stages, num_warps), ...). A decode kernel packs the query heads of one kv head into
# BLOCK_M = 16, whatever the options say.
_DECODE = ((1, 4), (2, 4), (2, 8), (3, 4), (3, 8))
CANDIDATES = {
    (256, "decode"): {(16, 16): _DECODE, (16, 32): _DECODE, (16, 64): _DECODE, (16, 128): _DECODE},
    (512, "decode"): {(16, 16): _DECODE, (16, 32): _DECODE, (16, 64): _DECODE},
    (256, "prefill"): {
        (16, 16): ((1, 4), (2, 4)),
        (32, 32): ((1, 4), (2, 4), (3, 4)),
        (64, 32): ((1, 4), (2, 4), (3, 4), (1, 8), (2, 8), (3, 8)),
        (64, 64): ((1, 4), (2, 4), (1, 8), (2, 8), (3, 8)),
        (128, 32): ((1, 8), (2, 8), (3, 8)),
        (128, 64): ((1, 8), (2, 8), (3, 8)),
    },
    (512, "prefill"): {
        (16, 16): ((1, 4), (2, 4)),
        (16, 32): ((1, 4), (2, 4)),
        (32, 16): ((1, 4), (2, 4), (2, 8)),
        (32, 32): ((1, 4), (2, 4), (1, 8), (2, 8), (3, 8)),
        (64, 16): ((1, 8), (2, 8), (3, 8)),
        (64, 32): ((1, 8), (2, 8), (3, 8)),
        (64, 64): ((1, 8), (2, 8)),
    },
}

# Shared memory others report for head_dim 512 on an H100 class card, under a mask that looks a page's owner up in one map:
# (phase, num_stages) -> bytes. Prefill with three stages is the overflow of NVIDIA-NeMo/Automodel#3064.
KNOWN_FIGURES = {("decode", 2): 150_528, ("decode", 3): 282_624, ("prefill", 2): 197_120, ("prefill", 3): 263_168}


def engine_call(head_dim: int, phase: str, options: dict[str, int]) -> tuple[Callable, Callable[[], tuple]]:
    """attention.py's flex call as (fn, make_args) for E2B's shapes in bf16, with `options` as kernel options."""
    import torch

    from gemma4_flex import attention
    num_rows, width = ROWS[phase]

    def make_args() -> tuple:
        def lists() -> tuple:
            return torch.empty(num_rows, 1, 1, dtype=torch.int32), torch.empty(num_rows, 1, 1, COLUMNS, dtype=torch.int32)
        table, logical = torch.empty(num_rows + 1, COLUMNS, dtype=torch.int32), torch.empty(NUM_PAGES, dtype=torch.int32)
        slots, first = (torch.empty(num_rows, dtype=torch.int64) for _ in range(2))
        return (*_qkv(head_dim, num_rows, width), *lists(), *lists(), table, logical, slots, first)

    def fn(*tensors: torch.Tensor) -> torch.Tensor:
        return attention._flex(*tensors, page_size=PAGE_SIZE, window=WINDOW[head_dim], q_block=128, options=options)
    return fn, make_args


def owner_map_call(phase: str) -> tuple[Callable, Callable[[], tuple]]:
    """The same attention at head_dim 512 under the mask of KNOWN_FIGURES: one owner a page, and no list of whole pages."""
    import torch
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    num_rows, width = ROWS[phase]

    def make_args() -> tuple:
        lists = torch.empty(num_rows, 1, 1, dtype=torch.int32), torch.empty(num_rows, 1, 1, COLUMNS, dtype=torch.int32)
        owner, logical = (torch.empty(NUM_PAGES, dtype=torch.int64) for _ in range(2))
        return (*_qkv(512, num_rows, width), *lists, owner, logical, torch.empty(num_rows, dtype=torch.int64))

    def fn(q, keys, values, num_blocks, blocks, owner, logical, first):      # noqa: ANN001, ANN202
        def visible(b, h, q_index, kv):      # noqa: ANN001, ANN202
            position = logical[kv // PAGE_SIZE] * PAGE_SIZE + kv % PAGE_SIZE
            return (owner[kv // PAGE_SIZE] == b) & (position <= first[b] + q_index)
        mask = BlockMask.from_kv_blocks(num_blocks, blocks, BLOCK_SIZE=(128, PAGE_SIZE), mask_mod=visible,
                                        seq_lengths=(width, NUM_PAGES * PAGE_SIZE), compute_q_blocks=False)
        return flex_attention(q, keys, values, block_mask=mask, enable_gqa=True, scale=1.0)
    return fn, make_args


def _qkv(head_dim: int, num_rows: int, width: int) -> tuple:
    import torch
    return (torch.empty(num_rows, NUM_HEADS, width, head_dim, dtype=torch.bfloat16),
            *(torch.empty(1, 1, NUM_PAGES * PAGE_SIZE, head_dim, dtype=torch.bfloat16) for _ in range(2)))


def cases() -> Iterator[tuple[str, int, str, tuple[int, int] | None, tuple[tuple[int, int], ...]]]:
    """(arch, head_dim, phase, tile, ((num_stages, num_warps), ...)); tile None: torch's default options."""
    for head_dim in HEAD_DIMS:
        for phase in PHASES:
            for arch in GPUS:
                yield arch, head_dim, phase, None, ()
                for tile, shapes in CANDIDATES[head_dim, phase].items():
                    yield arch, head_dim, phase, tile, shapes


def sweep(progress: Callable[[str], None]) -> dict:
    """Compile every case; returns the record that results/kernel_report.json holds. Takes about 20 minutes on one core."""
    import torch
    import triton

    from gemma4_flex.bench import cross_compile
    gpus = {arch: cross_compile.GPU(*GPUS[arch]) for arch in GPUS}

    def row(arch: str, head_dim: int, phase: str, options: dict, compiled: cross_compile.Compiled, **more: object) -> dict:
        limit = GPUS[arch][3]
        found = {"head_dim": head_dim, "phase": phase, "arch": arch, **options, "shared_bytes": compiled.shared_bytes,
                 "shared_limit_bytes": limit, "fits": compiled.shared_bytes <= limit, "registers": compiled.registers,
                 "spill_bytes": compiled.spill_bytes, **more}
        progress(_line(found))
        return found

    known = []
    for phase in PHASES:
        kernel = cross_compile.generate(*owner_map_call(phase), gpus["sm_90"])
        for num_stages in (2, 3):
            options = {**kernel.options, "num_stages": num_stages, "num_warps": 8}
            compiled = cross_compile.compile_kernel(kernel, 90, num_stages=num_stages, num_warps=8)
            known.append(row("sm_90", 512, phase, options, compiled, known_shared_bytes=KNOWN_FIGURES[phase, num_stages]))

    kernels, rows = [], []
    generated: dict[tuple, cross_compile.Kernel] = {}
    for arch, head_dim, phase, tile, shapes in cases():
        gpu = gpus[arch]
        if tile is None:
            kernel = cross_compile.generate(*engine_call(head_dim, phase, {}), gpu)
            kernels.append(row(arch, head_dim, phase, kernel.options, cross_compile.compile_kernel(kernel, gpu.target)))
            continue
        key = head_dim, phase, tile     # with every option given, the source is the same for all cards
        if key not in generated:
            options = {"BLOCK_N": tile[1]} if phase == "decode" else {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}
            generated[key] = cross_compile.generate(*engine_call(head_dim, phase, options), gpu)
        kernel = generated[key]
        for num_stages, num_warps in shapes:
            options = {**kernel.options, "num_stages": num_stages, "num_warps": num_warps}
            compiled = cross_compile.compile_kernel(kernel, gpu.target, num_stages=num_stages, num_warps=num_warps)
            rows.append(row(arch, head_dim, phase, options, compiled))
    return {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0], "dtype": "bfloat16",
            "page_size": PAGE_SIZE, "num_heads": NUM_HEADS, "num_kv_heads": 1,
            "gpus": {arch: {"name": name, "shared_limit_bytes": limit} for arch, (name, _, _, limit) in GPUS.items()},
            "defaults": kernels, "candidates": rows, "known_figures": known}


def _line(row: dict) -> str:
    return (f"head_dim {row['head_dim']} {row['phase']:7} {row['arch']:6} {row['BLOCK_M']:3} x {row['BLOCK_N']:<3} "
            f"stages {row['num_stages']} warps {row['num_warps']}  shared {row['shared_bytes']:>7,} of "
            f"{row['shared_limit_bytes']:,} {'ok  ' if row['fits'] else 'OVER'}  registers {row['registers']:>3}  "
            f"spilled {row['spill_bytes']:,}")


def markdown(report: dict) -> str:
    """The report as a page: defaults, candidates by head size and phase, and the figures known from elsewhere."""
    gpus = ", ".join(f"{arch} ({gpu['name']}): {gpu['shared_limit_bytes']:,} B" for arch, gpu in report["gpus"].items())
    lines = [
        "# Attention kernels, cross-compiled", "",
        f"Made by `scripts/kernel_report.py` with torch {report['torch']} and triton {report['triton']}, no GPU present. "
        f"The kernels are those of `gemma4_flex/attention.py` in {report['dtype']} over {report['page_size']}-token pages. "
        "A block may use so much shared memory: " + gpus + ". Registers are per thread (255 is the most there are); "
        "*spilled* is bytes per thread that went to memory for want of registers. These figures say what fits, "
        "not what is fast: nothing here was timed on a card.", "",
        "## torch's default options", ""]
    lines += _table(report["defaults"], head=True)
    for head_dim in HEAD_DIMS:
        for phase in PHASES:
            lines += ["", f"## head_dim {head_dim}, {phase}", ""]
            lines += _table([r for r in report["candidates"] if (r["head_dim"], r["phase"]) == (head_dim, phase)])
    lines += ["", "## Figures known from elsewhere", "",
              "head_dim 512 on sm_90 under a mask that looks each page's owner up in one map (the engine's own mask goes "
              "through the page table, and takes a little more or less).", "",
              "| phase | tile | stages | warps | known | here |", "|---|---|---|---|---|---|"]
    lines += [f"| {r['phase']} | {r['BLOCK_M']} x {r['BLOCK_N']} | {r['num_stages']} | {r['num_warps']} | "
              f"{r['known_shared_bytes']:,} | {r['shared_bytes']:,} |" for r in report["known_figures"]]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict], head: bool = False) -> list[str]:
    where = "head_dim | phase | GPU" if head else "GPU"
    lines = [f"| {where} | tile | stages | warps | shared memory | fits | registers | spilled |",
             "|---" * (8 + 2 * head) + "|"]
    for r in rows:
        place = f"{r['head_dim']} | {r['phase']} | {r['arch']}" if head else r["arch"]
        lines.append(f"| {place} | {r['BLOCK_M']} x {r['BLOCK_N']} | {r['num_stages']} | {r['num_warps']} | "
                     f"{r['shared_bytes']:,} | {'ok' if r['fits'] else 'OVER'} | {r['registers']} | {r['spill_bytes']:,} |")
    return lines
