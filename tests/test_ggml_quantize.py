from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gemma4_flex.ggml_blocks import packing_of
from gemma4_flex.ggml_quantize import QUANTIZED, quantize

WIDTH = 256
SIMPLE = [name for name in QUANTIZED if name != "Q6_K"]


def kinds_of_rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, WIDTH, generator=generator)

    def where(share: float, chosen: Tensor, other: Tensor) -> Tensor:
        return torch.where(torch.rand(chosen.shape, generator=generator) < share, chosen, other)

    return {
        "normal": normal(100) * 0.05,
        "all sizes": normal(100) * torch.logspace(-30, 4, 100).unsqueeze(1),
        "zeros": torch.zeros(2, WIDTH),
        "negative zeros": -torch.zeros(2, WIDTH),
        "zeros among values": where(0.5, torch.zeros(20, WIDTH), normal(20)),
        "negative zeros among values of both signs": where(0.5, -torch.zeros(20, WIDTH), normal(20)),
        "heavy tails": normal(50) ** 3,
        "outliers": where(0.01, normal(50) * 100, normal(50) * 0.01),
        "ties": torch.randint(-8, 9, (100, WIDTH), generator=generator) / 8.0,
        "halves": torch.randint(-254, 255, (100, WIDTH), generator=generator) / 2.0,
        "one magnitude": where(0.5, torch.full((50, WIDTH), 0.3), torch.full((50, WIDTH), -0.3)),
        "one value": torch.full((2, WIDTH), 0.7),
        "positive": normal(50).abs(),
        "negative": -normal(50).abs(),
        "bf16": normal(100).bfloat16().float(),
    }


KINDS = kinds_of_rows()


def unpacked(name: str, blocks: Tensor) -> Tensor:
    packing = packing_of(name, WIDTH)
    return packing.unpack(packing.split(blocks))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIMPLE)
def test_bytes_are_those_of_the_gguf_package(name, kind):
    rows = KINDS[kind]
    wanted = gguf.quants.quantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(quantize(rows, name), torch.from_numpy(wanted))


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
def test_a_minimum_of_zeros_of_both_signs_is_the_first_of_them(name):
    """numpy takes one or the other as its vector lanes fall; which it is changes no value."""
    rows = torch.zeros(2, WIDTH)
    rows[0, 1::2] = -0.0
    rows[1, 0::2] = -0.0
    assert torch.signbit(packing_of(name, WIDTH).split(quantize(rows, name))[0][:, 0, 1]).tolist() == [False, True]


@pytest.mark.parametrize("name", QUANTIZED)
def test_any_floating_dtype_and_any_number_of_rows_are_taken(name, monkeypatch):
    rows = KINDS["bf16"]
    whole = quantize(rows, name)
    assert torch.equal(quantize(rows.bfloat16(), name), whole)
    monkeypatch.setattr("gemma4_flex.ggml_quantize.CHUNK", 3 * WIDTH)
    assert torch.equal(quantize(rows, name), whole) and quantize(rows[:0], name).shape == (0, whole.shape[1])


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_too_small_for_their_inverse_become_zero_and_too_large_ones_are_refused(name):
    assert not unpacked(name, quantize(torch.full((1, WIDTH), 1e-39), name)).any()
    for bad in (3e8, float("inf"), float("nan")):
        rows = torch.zeros(2, WIDTH)
        rows[1, 40] = bad
        with pytest.raises(ValueError, match=f"not finite, or too large for the 16-bit scales of {name}"):
            quantize(rows, name)


def test_other_types_and_widths_are_refused_by_name():
    with pytest.raises(ValueError, match="'Q4_K' cannot be written; those that can are Q8_0"):
        quantize(torch.zeros(1, 256), "Q4_K")
    with pytest.raises(ValueError, match="rows of 48 values are not whole Q8_0 blocks of 32"):
        quantize(torch.zeros(1, 48), "Q8_0")


# ---- Q6_K ----------------------------------------------------------------------------------------------------------------

def least_error(row: Tensor) -> float:
    """The least squared error of a row of one Q6_K block: each group with each 8-bit scale, under many units around the one
    that reaches the largest value."""
    reach = row.abs().max() / 32 / 128
    units = torch.cat([torch.arange(0.8, 1.35, 0.01) * reach, torch.tensor([2.0 ** -24])]).half().float().unique()
    scale = torch.arange(-128, 128).float()
    least = float("inf")
    for unit in units[units > 0]:
        step = (unit * scale)[:, None]
        values = row.view(16, 1, 16)
        quants = torch.where(step == 0, 0, values / step).round().clamp(-32, 31)
        least = min(least, (values - step * quants).square().sum(-1).amin(-1).sum().item())
    return least


@pytest.mark.parametrize("kind, size", [("normal", 1.0), ("normal", 0.02), ("normal", 2e-4), ("heavy tails", 1.0),
                                        ("positive", 1.0), ("one magnitude", 1.0), ("halves", 1.0)])
def test_q6_k_is_within_a_few_percent_of_the_least_error_there_is(kind, size):
    rows = KINDS[kind][:8] * size
    found = (rows - unpacked("Q6_K", quantize(rows, "Q6_K"))).square().sum(-1)
    least = torch.tensor([least_error(row) for row in rows])
    floor = rows.square().sum(-1) * 1e-9                  # rounding of the sums themselves, where a block is exact
    assert ((found + floor) / (least + floor)).max() < 1.2 and ((found + floor) / (least + floor)).mean() < 1.1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all sizes"])
def test_no_value_of_q6_k_is_off_by_more_than_a_step_of_its_group(kind):
    rows = KINDS[kind]
    blocks = quantize(rows, "Q6_K")
    _, _, scales, d = packing_of("Q6_K", WIDTH).split(blocks)
    step = (d[..., None] * scales.flatten(2).float()).abs().repeat_interleave(16, -1).view_as(rows)
    unit = d.float().abs().expand_as(rows)                # a group far smaller than its block's largest has a scale of 0
    off = (rows - unpacked("Q6_K", blocks)).abs()
    assert (off <= torch.maximum(1.2 * step, 16 * unit)).all()


def test_a_block_of_zeros_is_zeros_and_a_neighbour_does_not_change_it():
    rows = torch.zeros(1, 512)
    rows[0, 256:] = torch.linspace(-1, 1, 256)
    packing = packing_of("Q6_K", 512)
    values = packing.unpack(packing.split(quantize(rows, "Q6_K")))
    assert not values[0, :256].any() and not torch.signbit(values[0, :256]).any()
    assert np.allclose(values[0, 256:], rows[0, 256:], atol=0.02)


def test_what_q6_k_can_hold_it_holds():
    """Values that a block stands for, whose groups all reach down to -32, come back as they were."""
    generator = torch.Generator().manual_seed(1)
    quants = torch.randint(-32, 32, (20, 16, 16), generator=generator)
    quants[..., 5] = -32
    scales = torch.randint(64, 128, (20, 16, 1), generator=generator)
    scales[:, 3] = -128
    rows = (quants * scales * 2.0 ** -12).flatten(1)
    assert torch.equal(unpacked("Q6_K", quantize(rows, "Q6_K")), rows)
