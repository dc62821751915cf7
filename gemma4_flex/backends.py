"""What runs a step on the device it is for: the attention back end of each attention type, and what is compiled. What runs
otherwise than asked is told in `notices`."""
from __future__ import annotations

import torch

from gemma4_flex import fa4
from gemma4_flex.attention import PagedBackend, flex_obstacle
from gemma4_flex.compiled import PLANS, Regions, compile_obstacle
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kernel_options import choose
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.params import EngineConfig


def choose_regions(config: EngineConfig, notices: list[str], *, quantised: bool) -> Regions:
    """Compiled by the device's plan; nothing, by name, where nothing can be. `config` is resolved."""
    if not config.compile:
        return Regions(None)
    obstacle = compile_obstacle(config.device)
    if quantised:
        obstacle = "4-bit weights: steps run uncompiled, bitsandbytes' parameters cannot be traced"
    if obstacle:
        notices.append(obstacle)
    return Regions(None if obstacle else PLANS[config.device])


def choose_backends(geometry: ModelGeometry, config: EngineConfig, cache: KVCache, *, inline: bool,
                    notices: list[str]) -> dict[str, PagedBackend]:
    """`config.attention` for each attention type, or sdpa, by name, where flex cannot run. `config` is resolved; `inline`:
    regions are compiled, and on a GPU the flex call is part of them."""
    obstacle = flex_obstacle(config.device) if config.attention == "flex" else None
    if obstacle:
        notices.append(obstacle)
    backends = {}
    for kind, group in cache.groups.items():
        layer = geometry.layers[geometry.owners(kind)[0]]
        name = "sdpa" if obstacle else config.attention
        given = {"decode": config.decode_kernel_options, "prefill": config.prefill_kernel_options}
        options: dict[str, dict | None] = {phase: asked or None for phase, asked in given.items()}
        if name == "flex" and config.device == "cuda":
            card = torch.cuda.get_device_properties(config.device)
            for phase, asked in given.items():
                chosen = choose(layer.head_dim, phase, (card.major, card.minor), card.shared_memory_per_block_optin,
                                dtype=config.dtype, page_size=config.page_size)
                options[phase] = chosen if not asked else {**(chosen or {}), **asked}
            if None in options.values():
                name = "sdpa"
                notices.append(f"{kind}: no flex_attention configuration for head_dim {layer.head_dim} fits {card.name} "
                               f"({card.shared_memory_per_block_optin:,} B of shared memory): sdpa instead")
        flash, line = fa4.prefill_options(layer, config, torch.device(config.device), name=name)
        options["prefill"] = flash or options["prefill"]
        notices += [line] if line else []
        backends[kind] = PagedBackend(name, group, options, inline=inline and config.device == "cuda")
    return backends
