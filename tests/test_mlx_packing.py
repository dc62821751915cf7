"""MLX's formats: bytes are those of mx.quantize, values those of mx.dequantize, for every mode, bits and group."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gemma4_flex import mlx_packing
from gemma4_flex.mlx_packing import FIXED, pack, packing_of, quantize
from gemma4_flex.packed import PackedWeight
from tests.mlx_arrays import AFFINE, FORMATS, dequantized, quantized, same_bits

WIDTH = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
by_name = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def hard_rows(dtype: torch.dtype) -> Tensor:
    """Rows of every kind that a quantiser can get wrong. [rows, WIDTH]"""
    make = torch.Generator().manual_seed(3)
    normal = torch.randn(40, WIDTH, generator=make)
    numbers = lambda low, high, rows=8: torch.randint(low, high, (rows, WIDTH), generator=make).float()
    outliers = torch.where(numbers(0, 40) == 0, 100.0, 1.0) * torch.randn(8, WIDTH, generator=make)
    ties = torch.cat([numbers(-15, 16) / 4, numbers(-8, 8) + 0.5, numbers(0, 16), -numbers(0, 16), numbers(-1, 2)])
    codes = torch.tensor([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, -0.0]).repeat(WIDTH // 16)
    powers = torch.stack([codes * 2.0**n for n in range(-6, 4)])
    constant = torch.tensor([0.0, 1.5, -0.7, 448.0, 1e-9, -1e-9])[:, None].repeat(1, WIDTH)
    ramp = torch.arange(WIDTH)[None] / 16
    sizes = normal * 2.0 ** torch.linspace(-30, 12, 40)[:, None]
    one_sided = torch.cat([normal[:4].abs(), -normal[:4].abs(), normal[:4] + 3, normal[:4] - 3])
    just_above = 6 * 2.0 ** torch.arange(-8.0, 4)[:, None].repeat(1, WIDTH) * (1 + 2.0**-7)      # the next of bf16's numbers
    return torch.cat([normal, outliers, ties, powers, -powers, constant, ramp, -ramp, sizes, one_sided, just_above]).to(dtype)


def packed(parts: Sequence[Tensor], kind: tuple[str, int, int], dtype: torch.dtype) -> PackedWeight:
    mode, bits, group = kind
    packing = packing_of(parts[0].shape[1] * 32 // bits, mode=mode, bits=bits, group_size=group, scale_dtype=parts[1].dtype)
    return PackedWeight(packing.split(*parts), packing, dtype)


@by_name
@pytest.mark.parametrize("mode, bits, group", FORMATS)
def test_a_matrix_is_quantised_to_the_bytes_that_mlx_makes_of_it(mode, bits, group, dtype):
    rows = hard_rows(dtype)
    words, scales, biases = quantize(rows, mode=mode, bits=bits, group_size=group)
    theirs = quantized(rows, mode, bits, group)
    assert same_bits(words, theirs[0]) and same_bits(scales, theirs[1])
    assert biases is None if mode != "affine" else same_bits(biases, theirs[2])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.sampled_from(DTYPES), st.integers(0, 2**31), st.floats(-20, 8), st.floats(-3, 3))
def test_any_matrix_is_quantised_and_unpacked_as_mlx_does(kind, dtype, seed, size, middle):
    mode, bits, group = kind
    rows = (torch.randn(6, 128, generator=torch.Generator().manual_seed(seed)) + middle).mul(2.0**size).to(dtype)
    ours, theirs = quantize(rows, mode=mode, bits=bits, group_size=group), quantized(rows, mode, bits, group)
    assert all(map(same_bits, ours, theirs))
    weight = packed(ours, kind, torch.float32)
    known = torch.float32 if mode != "affine" else None
    assert same_bits(weight.dense(), dequantized(theirs, mode, bits, group, known).float())


@by_name
@pytest.mark.parametrize("mode, bits, group", AFFINE)
def test_affine_values_are_mlxs_rounded_as_it_rounds_and_then_cast(mode, bits, group, dtype):
    parts = quantized(hard_rows(dtype), mode, bits, group)
    theirs = dequantized(parts, mode, bits, group)
    assert theirs.dtype == dtype
    for wanted in DTYPES:
        ours = packed(parts, (mode, bits, group), wanted).dense()
        assert same_bits(ours, theirs.to(wanted)), wanted


@pytest.mark.parametrize("mode", FIXED)
def test_every_code_times_every_scale_is_mlxs_value(mode):
    bits, group = FIXED[mode]
    codes = torch.arange(1 << bits, dtype=torch.uint8).repeat(WIDTH >> bits)[None].repeat(256, 1)
    parts = [pack(codes, bits), torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, WIDTH // group)]
    for dtype in (torch.float32, torch.bfloat16):
        ours = packed(parts, (mode, bits, group), dtype).dense()
        assert same_bits(ours, dequantized(parts, mode, bits, group, dtype))
    half = packed(parts, (mode, bits, group), torch.float16).dense()
    inside = slice(None) if mode == "nvfp4" else slice(103, 143)      # scales that fp16 holds as normal numbers
    assert same_bits(half[inside], dequantized(parts, mode, bits, group, torch.float16)[inside])


@pytest.mark.parametrize("mode, bits, group", FORMATS)
def test_parts_join_to_the_files_bytes_again_and_take_no_more_room(mode, bits, group, monkeypatch):
    monkeypatch.setattr(mlx_packing, "CHUNK", 3 * WIDTH)      # several pieces, the last of them short
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(bits)).bfloat16()
    ours, theirs = quantize(rows, mode=mode, bits=bits, group_size=group), quantized(rows, mode, bits, group)
    weight = packed(theirs, (mode, bits, group), torch.bfloat16)
    again = weight.packing.join(weight.parts)
    assert all(same_bits(a, b) and same_bits(c, b) for a, b, c in zip(again, theirs, ours))
    assert weight.num_bytes == sum(part.nbytes for part in theirs)
    assert all(len(part) == 8 and part.is_contiguous() for part in weight.parts)
    assert weight.shape == (8, WIDTH)


@pytest.mark.parametrize("mode, bits, group", [("affine", 3, 64), ("affine", 4, 32), ("mxfp4", 4, 32), ("nvfp4", 4, 16)])
def test_rows_and_halves_unpack_to_those_of_the_whole(mode, bits, group):
    weight = packed(quantized(hard_rows(torch.bfloat16)[:20], mode, bits, group), (mode, bits, group), torch.bfloat16)
    ids = torch.tensor([[3, 19, 3], [0, 7, 11]])
    assert torch.equal(weight.rows(ids), weight.dense()[ids])
    assert torch.equal(torch.cat([half.dense() for half in weight.halves()]), weight.dense())


def test_compiled_in_one_graph_the_values_are_the_same_bits():
    """With roundings that a compiler would drop, were they casts."""
    kinds = [(("affine", 3, 64), torch.bfloat16), (("affine", 8, 32), torch.float16), (("nvfp4", 4, 16), torch.bfloat16)]
    weights = [packed(quantized(hard_rows(scale)[:64], *kind), kind, torch.float32) for kind, scale in kinds]

    @torch.compile(fullgraph=True, dynamic=False)
    def step(parts):
        return [weight._replace(parts=p).dense() for weight, p in zip(weights, parts)]

    for weight, values in zip(weights, step([weight.parts for weight in weights])):
        assert same_bits(values, weight.dense())


@pytest.mark.parametrize("width, changed, message", [
    (64, {"mode": "q4_0"}, "mode 'q4_0' is none of affine, mxfp4, mxfp8, nvfp4"),
    (64, {"bits": 7}, "affine has 2, 3, 4, 5, 6 or 8 bits, not 7"),
    (64, {"group_size": 16}, "affine has groups of 32, 64 or 128, not 16"),
    (64, {"mode": "nvfp4", "scale_dtype": torch.uint8}, "nvfp4 has 4 bits and groups of 16, not 4 bits and groups of 64"),
    (96, {}, "rows of 96 values are not whole groups of 64"),
    (0, {}, "rows of 0 values"),
    (64, {"scale_dtype": torch.uint8}, "affine scales are not torch.uint8"),
    (64, {"mode": "mxfp8", "bits": 8, "group_size": 32}, "mxfp8 scales are not torch.bfloat16"),
])
def test_what_no_file_of_mlxs_has_is_refused_by_name(width, changed, message):
    fields = {"mode": "affine", "bits": 4, "group_size": 64, "scale_dtype": torch.bfloat16} | changed
    with pytest.raises(ValueError, match=message):
        packing_of(width, **fields)
