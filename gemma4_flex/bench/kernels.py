"""What the engine's own attention kernels take on GPUs that are not here: which (tile, stages, warps) fit, and which spill.

`Sweep` cross-compiles attention.py's flex_attention call for decode and prefill at both head sizes of the E-series: with
torch's default options, with CANDIDATES, and with the rows chosen from these (kernel_options.TABLE) in float32 and on
the cards that borrow them. Nothing here says how fast a kernel is.
"""
from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gemma4_flex import attention
from gemma4_flex.bench.cross_compile import Kernel, compile_kernel, generate
from gemma4_flex.bench.kernel_page import line
from gemma4_flex.bench.pretended_gpu import GPUS
from gemma4_flex.kernel_options import HEAD_DIMS, TABLE, Fit

# cards that borrow another's rows of kernel_options.TABLE: whose, and their own limit
RELATIVES = {"sm_86": ("sm_80", 101_376), "sm_89": ("sm_80", 101_376), "sm_120": ("sm_80", 101_376), "sm_103": ("sm_100", 232_448)}
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


def engine_call(head_dim: int, phase: str, options: dict[str, int], dtype: str = "bfloat16",
                ) -> tuple[Callable, Callable[[], tuple]]:
    """attention.py's flex call as (fn, make_args) for E2B's shapes, with `options` as kernel options."""
    num_rows, width = ROWS[phase]

    def make_args() -> tuple:
        def lists() -> tuple:
            return torch.empty(num_rows, 1, 1, dtype=torch.int32), torch.empty(num_rows, 1, 1, COLUMNS, dtype=torch.int32)
        table, logical = torch.empty(num_rows + 1, COLUMNS, dtype=torch.int32), torch.empty(NUM_PAGES, dtype=torch.int32)
        slots, first = (torch.empty(num_rows, dtype=torch.int64) for _ in range(2))
        return (*_qkv(head_dim, num_rows, width, dtype), *lists(), *lists(), table, logical, slots, first)

    def fn(*tensors: Tensor) -> Tensor:
        return attention._flex(*tensors, page_size=PAGE_SIZE, window=WINDOW[head_dim], q_block=128, options=options)
    return fn, make_args


def owner_map_call(phase: str) -> tuple[Callable, Callable[[], tuple]]:
    """The same attention at head_dim 512 under the mask of KNOWN_FIGURES: one owner a page, and no list of whole pages."""
    num_rows, width = ROWS[phase]

    def make_args() -> tuple:
        lists = torch.empty(num_rows, 1, 1, dtype=torch.int32), torch.empty(num_rows, 1, 1, COLUMNS, dtype=torch.int32)
        owner, logical = (torch.empty(NUM_PAGES, dtype=torch.int64) for _ in range(2))
        return (*_qkv(512, num_rows, width, "bfloat16"), *lists, owner, logical, torch.empty(num_rows, dtype=torch.int64))

    def fn(q, keys, values, num_blocks, blocks, owner, logical, first):
        def visible(b, h, q_index, kv):
            position = logical[kv // PAGE_SIZE] * PAGE_SIZE + kv % PAGE_SIZE
            return (owner[kv // PAGE_SIZE] == b) & (position <= first[b] + q_index)
        mask = BlockMask.from_kv_blocks(num_blocks, blocks, BLOCK_SIZE=(128, PAGE_SIZE), mask_mod=visible,
                                        seq_lengths=(width, NUM_PAGES * PAGE_SIZE), compute_q_blocks=False)
        return flex_attention(q, keys, values, block_mask=mask, enable_gqa=True, scale=1.0)
    return fn, make_args


def _qkv(head_dim: int, num_rows: int, width: int, dtype: str) -> tuple:
    of_dtype = getattr(torch, dtype)
    return (torch.empty(num_rows, NUM_HEADS, width, head_dim, dtype=of_dtype),
            *(torch.empty(1, 1, NUM_PAGES * PAGE_SIZE, head_dim, dtype=of_dtype) for _ in range(2)))


class Sweep:
    """Compiles cases, keeping generated kernels: with its tile given, a kernel's source is the same for every card."""

    def __init__(self, progress: Callable[[str], None]):
        self.progress = progress
        self.generated: dict[tuple, Kernel] = {}

    def run(self) -> dict:
        """The record that results/kernel_report.json holds. Half an hour on one core."""
        return {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
                "page_size": PAGE_SIZE, "num_heads": NUM_HEADS, "num_kv_heads": 1,
                "gpus": {arch: {"name": gpu.name, "shared_limit_bytes": gpu.shared_limit} for arch, gpu in GPUS.items()},
                "known_figures": list(self.known_figures()), "defaults": list(self.defaults()),
                "candidates": list(self.candidates()), "table_float32": list(self.table_in_float32()),
                "table_on_relatives": list(self.table_on_relatives())}

    def known_figures(self) -> Iterator[dict]:
        """KNOWN_FIGURES again, here."""
        for phase in PHASES:
            kernel = generate(*owner_map_call(phase), GPUS["sm_90"])
            for num_stages in (2, 3):
                options = {"num_stages": num_stages, "num_warps": 8}
                yield self.row("sm_90", 512, phase, kernel, options, known_shared_bytes=KNOWN_FIGURES[phase, num_stages])

    def defaults(self) -> Iterator[dict]:
        """torch's own options, which depend on the card."""
        for arch, head_dim, phase in itertools.product(GPUS, HEAD_DIMS, PHASES):
            kernel = generate(*engine_call(head_dim, phase, {}), GPUS[arch])
            yield self.row(arch, head_dim, phase, kernel, {})

    def candidates(self) -> Iterator[dict]:
        """CANDIDATES on every card."""
        for (head_dim, phase), tiles in CANDIDATES.items():
            for arch, (tile, shapes) in itertools.product(GPUS, tiles.items()):
                kernel = self.kernel(head_dim, phase, *tile)
                for num_stages, num_warps in shapes:
                    yield self.row(arch, head_dim, phase, kernel, {"num_stages": num_stages, "num_warps": num_warps})

    def table_in_float32(self) -> Iterator[dict]:
        """The rows of kernel_options.TABLE on their cards with float32 pools."""
        for (head_dim, phase, arch), fits in TABLE.items():
            for fit in fits:
                yield self.row(arch, head_dim, phase, self.kernel_of(head_dim, phase, fit, "float32"), fit.options)

    def table_on_relatives(self) -> Iterator[dict]:
        """The rows of kernel_options.TABLE on the cards that borrow them."""
        for relative, (arch, limit) in RELATIVES.items():
            for (head_dim, phase, of), fits in TABLE.items():
                for fit in fits if of == arch else ():
                    kernel = self.kernel_of(head_dim, phase, fit)
                    yield self.row(relative, head_dim, phase, kernel, fit.options, limit=limit,
                                   shared_bytes_in_table=fit.shared_bytes["bfloat16"])

    def kernel(self, head_dim: int, phase: str, block_m: int, block_n: int, dtype: str = "bfloat16") -> Kernel:
        """The engine's kernel with a tile of its own."""
        key = head_dim, phase, block_m, block_n, dtype
        if key not in self.generated:
            tile = {"BLOCK_N": block_n} if phase == "decode" else {"BLOCK_M": block_m, "BLOCK_N": block_n}
            call = engine_call(head_dim, phase, tile, dtype)
            self.generated[key] = generate(*call, GPUS["sm_90"])
        return self.generated[key]

    def kernel_of(self, head_dim: int, phase: str, fit: Fit, dtype: str = "bfloat16") -> Kernel:
        """The engine's kernel with the tile of a row of the table."""
        return self.kernel(head_dim, phase, fit.options.get("BLOCK_M", 16), fit.options["BLOCK_N"], dtype)

    def row(self, arch: str, head_dim: int, phase: str, kernel: Kernel, options: dict, limit: int | None = None,
            **more: int) -> dict:
        """Compile `kernel` for `arch` and say what it takes."""
        compiled = compile_kernel(kernel, int(arch.removeprefix("sm_")), **options)
        limit = limit or GPUS[arch].shared_limit
        found = {"head_dim": head_dim, "phase": phase, "arch": arch, **kernel.options, **options,
                 "shared_bytes": compiled.shared_bytes, "shared_limit_bytes": limit, "fits": compiled.shared_bytes <= limit,
                 "registers": compiled.registers, "spill_bytes": compiled.spill_bytes, **more}
        self.progress(line(found))
        return found
