"""How much K/V memory holds: pages for a budget of bytes, and the batches and lengths that fit. Host only."""
from __future__ import annotations

from collections.abc import Iterable

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.page_table import sliding_pool_pages
from gemma4_flex.params import EngineConfig


def pool_pages(geometry: ModelGeometry, config: EngineConfig, full_pages: int) -> dict[str, int]:
    """Pages of each attention type's pools, the reserved one included, when the full-attention group has `full_pages`."""
    windows = {kind: geometry.layers[geometry.owners(kind)[0]].window for kind in geometry.attention_types}
    return {kind: full_pages if window is None else sliding_pool_pages(
        window=window, page_size=config.page_size, max_batch_size=config.max_batch_size,
        max_prefill_tokens=config.max_prefill_tokens, max_seq_length=config.max_seq_length,
        decode_steps=config.decode_steps_per_sync, prefix_cache=config.prefix_cache) for kind, window in windows.items()}


def pool_bytes(geometry: ModelGeometry, config: EngineConfig, full_pages: int, bytes_per_element: int) -> int:
    """Bytes of all pools: exactly pages x page size x the geometry's K/V bytes a token."""
    per_token = geometry.kv_bytes_per_token(bytes_per_element)
    return sum(pages * config.page_size * per_token[kind] for kind, pages in pool_pages(geometry, config, full_pages).items())


def full_pages_in(geometry: ModelGeometry, config: EngineConfig, budget: int, bytes_per_element: int) -> int:
    """The most pages the full-attention group can have so that all pools fit in `budget` bytes, and no more than a full batch
    of the longest sequences needs; less than 2 where not even one page beside the reserved one fits."""
    most = 1 + config.max_batch_size * -(-config.max_seq_length // config.page_size)
    fixed = pool_bytes(geometry, config, 0, bytes_per_element)
    per_page = pool_bytes(geometry, config, 1, bytes_per_element) - fixed
    return min(most, (budget - fixed) // per_page) if per_page else most


def fits(geometry: ModelGeometry, config: EngineConfig, lengths: Iterable[int]) -> dict[int, int]:
    """How many sequences of each of `lengths` tokens the pools of `config` hold at once, by length: at most max_batch_size,
    and 0 for a length beyond max_seq_length."""
    return {length: 0 if length > config.max_seq_length else
            min(config.max_batch_size, (config.n_pages - 1) // -(-length // config.page_size)) for length in lengths}
