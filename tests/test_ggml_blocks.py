from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gemma4_flex.ggml_blocks import TYPES, packing_of
from gemma4_flex.packed import PackedWeight

WIDTH, ROWS = 512, 24
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}       # where a block's fp16 scales are


def random_blocks(name: str, *, finite: bool, seed: int = 0) -> Tensor:
    """Random bytes whose fp16 scales are numbers of all sizes and both signs, -0 among them; unless `finite`, inf and nan too."""
    generator = torch.Generator().manual_seed(seed)
    packing = packing_of(name, WIDTH)
    rows = torch.randint(0, 256, (ROWS, packing.row_bytes), dtype=torch.uint8, generator=generator)
    blocks = rows.view(-1, TYPES[name].num_bytes)
    for start in SCALES.get(name, (0,)):
        blocks[:, start + 1][blocks[:, start + 1] & 0x7C == 0x7C] ^= 0x40        # an exponent of all ones is inf or nan
        blocks[0, start:start + 2] = torch.tensor([0, 0x80], dtype=torch.uint8)
        if not finite:
            for block, high in zip(torch.randperm(len(blocks), generator=generator), (0x7C, 0xFC, 0x7E)):
                blocks[block, start:start + 2] = torch.tensor([0, high], dtype=torch.uint8)
    return rows


def reference(name: str, blocks: Tensor) -> Tensor:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_unpack_to_the_bits_of_the_gguf_package(name):
    blocks = random_blocks(name, finite=True)
    wanted = reference(name, blocks)
    packing = packing_of(name, WIDTH)
    assert wanted.isfinite().all() and len(wanted.unique()) > 1000
    assert torch.equal(bits(packing.unpack(packing.split(blocks))), bits(wanted))


@pytest.mark.parametrize("name", TYPES)
def test_scales_that_are_no_numbers_come_out_where_they_are_and_nowhere_else(name):
    blocks = random_blocks(name, finite=False, seed=1)
    wanted = reference(name, blocks)
    packing = packing_of(name, WIDTH)
    found = packing.unpack(packing.split(blocks))
    numbers = ~wanted.isnan()
    assert not numbers.all() and found.isinf().any() and torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(bits(found[numbers]), bits(wanted[numbers]))


@pytest.mark.parametrize("name", TYPES)
def test_split_and_join_are_each_others_inverse_and_sizes_are_the_formats(name):
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    packing, blocks = packing_of(name, WIDTH), random_blocks(name, finite=False)
    assert (TYPES[name].values, TYPES[name].num_bytes, packing.row_bytes) == (values, size, WIDTH // values * size)
    parts = packing.split(blocks)
    assert all(part.shape[:2] == (ROWS, WIDTH // values) and part.is_contiguous() for part in parts)
    assert torch.equal(packing.join(parts), blocks)
    assert packing.join(packing.split(blocks[:0])).shape == (0, packing.row_bytes)


def test_compiled_in_one_graph_they_give_the_same_bits():
    packings = [packing_of(name, WIDTH) for name in TYPES]
    blocks = [random_blocks(name, finite=True, seed=2) for name in TYPES]
    parts = [packing.split(rows) for packing, rows in zip(packings, blocks)]
    found = torch.compile(lambda parts: [p.unpack(x) for p, x in zip(packings, parts)], fullgraph=True)(parts)
    for name, values, rows in zip(TYPES, found, blocks):
        assert torch.equal(bits(values), bits(reference(name, rows))), name


@pytest.mark.parametrize("name", TYPES)
def test_a_lookup_unpacks_its_rows_in_any_shape(name):
    packing, blocks = packing_of(name, WIDTH), random_blocks(name, finite=True)
    weight = PackedWeight(packing.split(blocks), packing, torch.float32)
    assert weight.shape == (ROWS, WIDTH)
    for ids in (torch.tensor(3), torch.tensor([5, 5, 0]), torch.tensor([[1, 2], [23, 0]])):
        assert torch.equal(bits(weight.rows(ids)), bits(reference(name, blocks)[ids]))
    lower = weight.halves()[1]
    assert torch.equal(bits(lower.dense()), bits(reference(name, blocks)[ROWS // 2:]))


def test_packings_are_keys_and_unknown_types_and_broken_rows_are_named():
    assert len({packing_of("Q4_K", 256), packing_of("Q4_K", 256), packing_of("Q4_K", 512), packing_of("Q5_K", 256)}) == 3
    with pytest.raises(ValueError, match="'IQ4_NL' cannot be unpacked; those that can are Q8_0, Q4_0"):
        packing_of("IQ4_NL", 256)
    for width in (0, 128, 300):
        with pytest.raises(ValueError, match=f"rows of {width} values are not whole Q6_K blocks of 256"):
            packing_of("Q6_K", width)
