"""Which flex_attention kernel options to use on a GPU: tiles that fit its shared memory, as data.

torch picks its own tiles for head_dim 512 without asking whether they fit: prefill takes 262,144 B where an H100 gives a
block 232,448 (NVIDIA-NeMo/Automodel#3064), and decode, on two warps, spills 27 KB of registers a thread. So the engine
passes options for both phases, from the table below.

The rows were **chosen by fit and have not been timed on a card**: scripts/kernel_report.py cross-compiles the engine's
own kernels, and results/kernel_report.md shows all that were tried. For each head size, phase and architecture come the
largest tile that fits with two or more stages and no register spilled (torch's own default where it meets that), then
smaller ones for cards with less shared memory and for shorter pages. In float32, which serves for proofs, the same rows
are only known to fit; some spill.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fit:
    """Kernel options and the shared memory a block was seen to take with them, in bytes, by dtype of the pools."""
    options: dict[str, int]
    shared_bytes: dict[str, int]


def _decode(block_n: int, num_stages: int, num_warps: int, bfloat16: int, float32: int) -> Fit:
    # no BLOCK_M: a decode kernel packs the query heads of a kv head into it, 16 for 16 heads or fewer
    return Fit({"BLOCK_N": block_n, "num_stages": num_stages, "num_warps": num_warps},
               {"bfloat16": bfloat16, "float32": float32})


def _prefill(block_m: int, block_n: int, num_stages: int, num_warps: int, bfloat16: int, float32: int) -> Fit:
    return Fit({"BLOCK_M": block_m, "BLOCK_N": block_n, "num_stages": num_stages, "num_warps": num_warps},
               {"bfloat16": bfloat16, "float32": float32})


_DECODE_256 = (_decode(64, 2, 4, 76_032, 151_872), _decode(32, 2, 4, 42_112, 84_160), _decode(16, 2, 4, 25_152, 50_368))
_DECODE_512 = (_decode(64, 2, 8, 149_760, 299_328), _decode(32, 2, 4, 83_072, 166_080), _decode(16, 2, 4, 49_728, 99_520),
               _decode(16, 1, 4, 33_280, 65_536))
_SMALL_PREFILL_256 = (_prefill(32, 32, 2, 4, 51_328, 102_656), _prefill(16, 16, 2, 4, 25_152, 50_368))
_SMALL_PREFILL_512 = (_prefill(32, 16, 2, 8, 66_624, 133_312), _prefill(16, 16, 2, 4, 49_728, 99_520),
                      _prefill(16, 16, 1, 4, 33_280, 65_536))

# (head_dim, phase, architecture) -> options, the best first
TABLE: dict[tuple[int, str, str], tuple[Fit, ...]] = {
    (256, "decode", "sm_80"): _DECODE_256,
    (256, "decode", "sm_90"): _DECODE_256,
    (256, "decode", "sm_100"): _DECODE_256,
    (512, "decode", "sm_80"): _DECODE_512,
    (512, "decode", "sm_90"): _DECODE_512,
    (512, "decode", "sm_100"): _DECODE_512,
    (256, "prefill", "sm_80"): (
        _prefill(32, 64, 3, 4, 151_552, 303_232), _prefill(64, 32, 2, 8, 69_760, 139_648), *_SMALL_PREFILL_256),
    (256, "prefill", "sm_90"): (
        _prefill(64, 32, 3, 4, 131_072, 205_056), _prefill(64, 32, 2, 4, 98_432, 139_648), *_SMALL_PREFILL_256),
    (256, "prefill", "sm_100"): (
        _prefill(64, 32, 3, 4, 131_104, 205_056), _prefill(64, 32, 2, 4, 98_472, 139_648), *_SMALL_PREFILL_256),
    (512, "prefill", "sm_80"): (
        _prefill(64, 16, 3, 8, 133_120, 266_496), _prefill(64, 16, 2, 8, 100_416, 201_024), *_SMALL_PREFILL_512),
    (512, "prefill", "sm_90"): (
        _prefill(64, 32, 2, 8, 196_736, 270_720), _prefill(64, 16, 2, 8, 131_136, 201_024), *_SMALL_PREFILL_512),
    (512, "prefill", "sm_100"): (
        _prefill(64, 32, 2, 8, 197_288, 270_720), _prefill(64, 16, 2, 8, 131_688, 201_024), *_SMALL_PREFILL_512),
}
HEAD_DIMS = (256, 512)

# Whose rows a card uses, by the major number of its compute capability. sm_86, sm_89 and sm_120 multiply matrices with
# sm_80's instructions, and their kernels take the same shared memory, as do sm_103's and sm_100's (results/kernel_report.md).
ARCHITECTURE_OF = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_80"}


def choose(head_dim: int, phase: str, capability: tuple[int, int], shared_limit_bytes: int, *, dtype: str = "bfloat16",
           page_size: int = 128) -> dict[str, int] | None:
    """The best options of the table that a card can run, or None where there are none (the layer type then takes sdpa).

    phase: "decode" or "prefill". capability: (major, minor). shared_limit_bytes: shared memory a block may opt in to
    (`torch.cuda.get_device_properties(...).shared_memory_per_block_optin`). dtype of the pools: "bfloat16" or "float32".
    A kernel tile may not reach over a page, so pages of fewer than 16 tokens have none.

    A head size between the table's takes the rows of the next one up, whose kernels need at least as much.
    """
    assert phase in ("decode", "prefill"), phase
    rows_of = next((known for known in HEAD_DIMS if head_dim <= known), None)
    for fit in TABLE.get((rows_of, phase, ARCHITECTURE_OF.get(capability[0])), ()):
        if fit.shared_bytes[dtype] <= shared_limit_bytes and fit.options["BLOCK_N"] <= page_size:
            return dict(fit.options)
    return None


def decode_layout(rows: int, *, windowed: bool, queries_a_key: int) -> dict[str, int | bool]:
    """How a GPU's decode attention over `rows` sequences is spread: chosen by counting launches (results/kernel_steps.md),
    not by timing. queries_a_key: query heads to a K/V head.

    One kernel without a combine step where a sequence has little to read (sliding layers, whose window is short), there are
    sequences enough to fill the card, or torch's decode kernel cannot take the heads (it wants a power of two); else that
    kernel in eight splits, the most that its combine step adds up in two launches (its own choice, 264 at one sequence, takes
    five).
    """
    if windowed or rows >= 64 or queries_a_key & (queries_a_key - 1):
        return {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": 16}
    return {"SPLIT_KV": 8}


# ---- options from the user ------------------------------------------------------------------------------------------

EXAMPLE = '{"BLOCK_N": 32, "num_stages": 2}'


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_tile(value: object) -> bool:
    return _is_count(value) and value >= 16 and value & (value - 1) == 0


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


# name -> (what it may be, in words; the test for it)
KNOWN_OPTIONS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "BLOCK_M": ("a power of two, 16 or more", _is_tile),
    "BLOCK_N": ("a power of two, 16 or more", _is_tile),
    "num_stages": ("a whole number, 1 or more", _is_count),
    "num_warps": ("1, 2, 4, 8 or 16", lambda value: _is_count(value) and value in (1, 2, 4, 8, 16)),
    "SPLIT_KV": ("a whole number, 1 or more", _is_count),
    "USE_TMA": ("true or false", _is_bool),
    "FORCE_USE_FLEX_ATTENTION": ("true or false", _is_bool),
    "BACKEND": ('"AUTO", "TRITON" or "TRITON_DECODE"', lambda value: value in ("AUTO", "TRITON", "TRITON_DECODE")),
}
REFUSED_OPTIONS = {
    "BLOCKS_ARE_CONTIGUOUS": "pages of a sequence lie anywhere in the pool",
    "ROWS_GUARANTEED_SAFE": "padding rows may see no key",
    "PRESCALE_QK": "it rounds the scaled queries, and results would no longer be exact",
}


def parse_options(text: str) -> dict:
    """Kernel options from a command line's JSON. Raises ValueError, with the fix, for anything but valid options."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"kernel options {text!r} are not JSON ({error.msg} at character {error.pos + 1}): "
                         f"write them like '{EXAMPLE}'.") from None
    except (ValueError, RecursionError):      # a number of thousands of digits, brackets in brackets without end
        raise ValueError(f"kernel options that begin {text[:40]!r} are no JSON that can be read: "
                         f"write them like '{EXAMPLE}'.") from None
    if not isinstance(options, dict):
        raise ValueError(f"kernel options {text!r} are not a JSON object: write them like '{EXAMPLE}'.")
    check_options(options)
    return options


def check_options(options: Mapping[str, object]) -> None:
    """Raise ValueError, with the fix, for a name flex_attention would not know or a value it could not take."""
    for name, value in options.items():
        if name in REFUSED_OPTIONS:
            raise ValueError(f"kernel option {name} cannot be used over paged K/V: {REFUSED_OPTIONS[name]}. Leave it out.")
        if name not in KNOWN_OPTIONS:
            raise ValueError(f"kernel option {name!r} is unknown: use some of {', '.join(KNOWN_OPTIONS)}.")
        allowed, is_valid = KNOWN_OPTIONS[name]
        if not is_valid(value):
            raise ValueError(f"kernel option {name}={json.dumps(value, default=repr)} cannot be used: give {allowed}.")
