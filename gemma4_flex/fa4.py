"""FlashAttention-4 for prefill: where it can run, and whether what runs there is attention.

torch's flex_attention calls flash-attn's CuTe build (`flash_attn.cute`) with `BACKEND="FLASH"`. Its limits, from its source and
issues: head_dim up to 128, Hopper or Blackwell, 16-bit floats, blocks of keys of exactly 128 (Dao-AILab/flash-attention#2903,
meta-pytorch/attention-gym#212) and of queries of a multiple of 128, on Blackwell of 256 (Dao-AILab/flash-attention#2727).
**This project has not run it on a card**: so before an engine uses it, `trial` sets it beside SDPA on the card at hand.
"""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable

import torch

from gemma4_flex.attention import PagedBackend
from gemma4_flex.geometry import LayerGeometry
from gemma4_flex.kv_cache import KVGroup, store
from gemma4_flex.masks import Rows
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import EngineConfig, InvalidParameterError

MAX_HEAD_DIM, KEY_TILE = 128, 128
ARCHITECTURES = {9: "Hopper", 10: "Blackwell"}      # by the major number of the compute capability
OPTIONS = {"BACKEND": "FLASH"}
TOLERANCE = 2e-2      # of a bf16 attention whose values are about 1


@functools.cache
def is_installed() -> bool:
    """Whether flash-attn's CuTe build can be imported."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def query_tile(capability: tuple[int, int]) -> int:
    """Queries that it takes at once."""
    return 256 if capability[0] == 10 else 128


def in_use(backends: Iterable[PagedBackend]) -> bool:
    """Whether prefill runs on it."""
    return any((backend.options["prefill"] or {}).get("BACKEND") == OPTIONS["BACKEND"] for backend in backends)


def prefill_options(layer: LayerGeometry, config: EngineConfig, device: torch.device, *,
                    name: str) -> tuple[dict | None, str | None]:
    """The prefill options of layers like `layer` with the back end `name`: None where they stay as they are; and the line that
    says why, where FlashAttention-4 could be expected. config: resolved, fa4_prefill apart, which is None for auto.

    Raises InvalidParameterError where it was asked for and cannot run.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    why_not = obstacle(layer.head_dim, capability, dtype=config.dtype, page_size=config.page_size, installed=is_installed())
    if name != "flex":
        why_not = why_not or f"attention runs on {name}"
    if config.deterministic:      # one attention path for prefill and decode
        why_not = why_not or "deterministic=True keeps prefill on decode's path"
    if config.fa4_prefill is None and (capability is None or layer.head_dim > MAX_HEAD_DIM or config.prefill_kernel_options):
        return None, None
    on, line = choose(config.fa4_prefill, why_not, lambda: trial(layer, config.page_size, query_tile(capability),
                                                                 getattr(torch, config.dtype), device))
    return (dict(OPTIONS) if on else None), line


def obstacle(head_dim: int, capability: tuple[int, int] | None, *, dtype: str, page_size: int, installed: bool) -> str | None:
    """Why FlashAttention-4 cannot run prefill, in a few words, or None. capability: (major, minor), None without a GPU."""
    if head_dim > MAX_HEAD_DIM:
        return f"it stops at head_dim {MAX_HEAD_DIM} and this model has {head_dim}"
    if capability is None or capability[0] not in ARCHITECTURES:
        return f"it needs a {' or '.join(ARCHITECTURES.values())} GPU"
    if dtype != "bfloat16":
        return f"it computes in bfloat16 and this engine in {dtype}"
    if page_size != KEY_TILE:
        return f"it reads pages of {KEY_TILE} tokens and page_size is {page_size}"
    return None if installed else "flash_attn.cute is not installed (pip install --pre flash-attn-4)"


def choose(asked: bool | None, why_not: str | None, tried: Callable[[], str | None]) -> tuple[bool, str | None]:
    """Whether prefill takes FlashAttention-4, and the line that says why not where nothing was `asked`.

    `why_not`: of `obstacle`. `tried`: `trial` on the card at hand, run only where nothing else stands in the way.
    Raises InvalidParameterError where it was asked for and cannot run.
    """
    if asked is False:
        return False, None
    why_not = why_not or tried()
    if why_not is None:
        return True, None
    if asked:
        raise InvalidParameterError(f"fa4_prefill: FlashAttention-4 cannot run here: {why_not}. Leave it out or use "
                                    "--no-fa4_prefill.")
    return False, f"prefill runs on flex_attention's Triton kernel, not FlashAttention-4: {why_not}"


@torch.no_grad()
def trial(layer: LayerGeometry, page_size: int, width: int, dtype: torch.dtype, device: torch.device | str) -> str | None:
    """None where two sequences, one of them continued, come out as SDPA has them; else what happened instead."""
    table = PageTable(layer.attention_type, n_pages=7, page_size=page_size, window=None, num_slots=3, max_seq_length=3 * page_size)
    group = KVGroup([layer], table, dtype, device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)
    spans = [(1, 0, width), (2, page_size + 3, width // 2)]      # slot, first position, count
    for slot, first, count in spans:
        length = first + count
        table.extend(slot, length)
        group.apply(table.drain_changes())
        positions = torch.arange(length, device=device)
        rows = group.rows_of(torch.full_like(positions, slot), positions)
        store(group.keys[layer.index], group.values[layer.index], *(normal(length, layer.num_kv_heads, layer.head_dim)
                                                                    for _ in range(2)), rows)
    slots, first, count = (torch.tensor(column, device=device) for column in zip(*spans))
    start = torch.tensor([0, spans[0][2]], device=device)
    within = torch.arange(width, device=device)
    token_of = start[:, None] + torch.minimum(within, count[:, None] - 1)
    place_of = torch.cat([row * width + within[:n] for row, (_, _, n) in enumerate(spans)])
    rows = Rows(slots, first, count, width, token_of, place_of)
    q = normal(int(count.sum()), layer.num_heads, layer.head_dim)
    found = []
    for name, options in (("flex", OPTIONS), ("sdpa", None)):
        backend = PagedBackend(name, group, {"decode": None, "prefill": options})
        try:
            found.append(backend.attend(q, group.keys[layer.index], group.values[layer.index], rows, backend.plan(rows),
                                        layer.index, {}, layer.scale))
        except Exception as error:      # torch and flash-attn raise many kinds; here they all mean this
            return f"it fails on this card ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"
    worst = (found[0].float() - found[1].float()).abs().max().item()
    return None if worst < TOLERANCE else f"on this card it is {worst:.2g} off scaled_dot_product_attention"
