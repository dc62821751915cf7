"""Every packing is unpacked in steps whose number of rows is a symbol, as a CPU's compiled step has it."""
from __future__ import annotations

import pytest
import torch

from gemma4_flex import ggml_blocks, mlx_packing
from gemma4_flex.compiled import trace
from gemma4_flex.packed import Packing

ROWS, WIDTH = 20, 256


def some_parts(packing: Packing, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random contents of a file's tensors, with finite scales."""
    random = torch.Generator().manual_seed(seed)
    if isinstance(packing, ggml_blocks.GgmlPacking):
        parts = packing.split(torch.randint(0, 256, (ROWS, packing.row_bytes), dtype=torch.uint8, generator=random))
        return tuple(torch.randn(p.shape, generator=random).half() if p.dtype == torch.float16 else p for p in parts)
    words = torch.randint(0, 1 << 31, (ROWS, packing.row_words), generator=random).to(torch.uint32)
    if packing.mode != "affine":
        return packing.split(words, torch.randint(100, 120, (ROWS, packing.groups), dtype=torch.uint8, generator=random))
    scales = torch.randn(ROWS, packing.groups, generator=random).bfloat16()
    return packing.split(words, scales, scales.flip(0))


def packings() -> list[Packing]:
    affine = [mlx_packing.packing_of(WIDTH, mode="affine", bits=bits, group_size=64, scale_dtype=torch.bfloat16)
              for bits in mlx_packing.PLANES]
    fixed = [mlx_packing.packing_of(WIDTH, mode=mode, bits=bits, group_size=group, scale_dtype=torch.uint8)
             for mode, (bits, group) in mlx_packing.FIXED.items()]
    return [*(ggml_blocks.packing_of(name, WIDTH) for name in ggml_blocks.TYPES), *affine, *fixed]


@pytest.mark.parametrize("packing", packings(), ids=lambda packing: packing.name)
def test_a_lookup_is_traced_once_for_every_number_of_rows(packing):
    parts = some_parts(packing)

    def look_up(ids: torch.Tensor) -> list[torch.Tensor]:
        return [packing.unpack(tuple(part[ids] for part in parts))]
    graph, more = trace(look_up, [torch.arange(5)], symbolic=True)
    for count in (5, 9, 2):
        ids = torch.arange(count).flip(0)
        torch.testing.assert_close(graph(ids, *more)[0], look_up(ids)[0], rtol=0, atol=0, equal_nan=True)
