"""Values to ggml's blocks: what `ggml_blocks` unpacks, made here.

Q8_0 and the Q4 and Q5 types follow the one reference there is, ggml's, to the last byte, as the `gguf` package does. A Q6_K
block leaves more to choose: 16 groups of 16 values have an 8-bit scale each, of a unit that the block shares. Each group looks
for the scale with the least squared error, the block for the unit that suits these, and each group for its multiple of it.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gemma4_flex.ggml_blocks import TYPES, packing_of

QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K")
CHUNK = 1 << 17         # values at a time, so that a search's copies of them stay small
_TINY = 2.0 ** -24      # the smallest fp16 above 0
_MULTIPLES = range(121, 129)    # of the unit that the largest scale of a block may be, -128 being the most
# values of the largest magnitude to a quant, of which -32 is the largest: past it (clipped) where the others gain by it
_REACHES = tuple(-32 + step / 5 for step in range(-6, 11))


def quantize(x: Tensor, type_name: str) -> Tensor:
    """Rows of values, [rows, width] of any floating dtype, as ggml stores them: uint8 [rows, row_bytes].

    Where a block's largest magnitude is so far below fp32's normal range that its inverse is no number, quants are zero.
    Raises ValueError for another type, for widths that blocks do not fill, and for values that no 16-bit scale reaches.
    """
    if type_name not in QUANTIZED:
        raise ValueError(f"ggml type {type_name!r} cannot be written; those that can are {', '.join(QUANTIZED)}")
    packing, kind = packing_of(type_name, x.shape[1]), TYPES[type_name]
    found = torch.empty(len(x), packing.row_bytes, dtype=torch.uint8, device=x.device)
    rows = max(1, CHUNK // x.shape[1])
    for given, out in zip(x.split(rows), found.split(rows)):
        parts = _MAKERS[type_name](given.float().unflatten(1, (-1, kind.values)))
        if not all(held.isfinite().all() for held in (given, *parts) if held.is_floating_point()):
            raise ValueError("values that are not finite, or too large for the 16-bit scales of "
                             f"{type_name}, cannot be quantised")
        out.copy_(packing.join(parts))
    return found


# ---- types of one scale: [rows, blocks, 32] to parts ---------------------------------------------------------------------

def _inverse(d: Tensor) -> Tensor:
    inverse = d.reciprocal()
    return torch.where(inverse.isfinite(), inverse, 0)


def _q8_0(x: Tensor) -> tuple[Tensor, ...]:
    d = x.abs().amax(-1, keepdim=True) / 127
    scaled = x * _inverse(d)
    whole = scaled.abs().floor()
    quants = scaled.sign() * (whole + (2 * (scaled.abs() - whole)).floor())        # halves away from zero
    return d.half().squeeze(-1), quants.to(torch.int8)


def _centred(x: Tensor, middle: int) -> tuple[Tensor, Tensor]:
    """The value of the largest magnitude, the first of those, becomes the lowest quant. d [...], quants uint8 [..., 32]"""
    d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -middle
    return d.half().squeeze(-1), _rounded_up(x * _inverse(d), middle + 0.5, 2 * middle - 1)


def _affine(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The lowest value, the first of those, becomes quant 0. (d, m) [..., 2], quants uint8 [..., 32]"""
    low = x.gather(-1, x.argmin(-1, keepdim=True))      # of zeros of both signs the first, and not whichever comes out
    d = (x.amax(-1, keepdim=True) - low) / largest
    return torch.cat([d, low], -1).half(), _rounded_up((x - low) * _inverse(d), 0.5, largest)


def _rounded_up(scaled: Tensor, half: float, largest: int) -> Tensor:
    return (scaled + half).to(torch.uint8).clamp_(max=largest)


def _nibbles(quants: Tensor) -> Tensor:
    low, high = (quants & 15).chunk(2, -1)
    return low | high << 4


def _high_bits(quants: Tensor) -> Tensor:
    """Bit 4 of 32 quants as an int32: [..., 32] to [...]"""
    places = torch.arange(32, dtype=torch.int64, device=quants.device)
    return ((quants >> 4).long() << places).sum(-1).to(torch.int32)


def _q4_0(x: Tensor) -> tuple[Tensor, ...]:
    d, quants = _centred(x, 8)
    return d, _nibbles(quants)


def _q4_1(x: Tensor) -> tuple[Tensor, ...]:
    scales, quants = _affine(x, 15)
    return scales, _nibbles(quants)


def _q5_0(x: Tensor) -> tuple[Tensor, ...]:
    d, quants = _centred(x, 16)
    return d, _high_bits(quants), _nibbles(quants)


def _q5_1(x: Tensor) -> tuple[Tensor, ...]:
    scales, quants = _affine(x, 31)
    return scales, _high_bits(quants), _nibbles(quants)


# ---- Q6_K: [rows, blocks, 256] to parts ----------------------------------------------------------------------------------

def _q6_k(x: Tensor) -> tuple[Tensor, ...]:
    groups = x.unflatten(-1, (16, 16))
    d, s = _block_scales(groups, _best_scales(groups))
    quants = (_quants(groups, (d * s).unsqueeze(-1)) + 32).to(torch.uint8)
    quants = quants.unflatten(-2, (2, 4, 2)).flatten(-2)                                        # [..., 2, 4, 32]
    low = quants & 15
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=x.device).unsqueeze(-1)
    high = (quants >> 4 << places).sum(-2, dtype=torch.uint8)                                   # [..., 2, 32]
    nibbles = low[..., :2, :] | low[..., 2:, :] << 4                                            # [..., 2, 2, 32]
    return nibbles.flatten(-2), high, s.to(torch.int8).unflatten(-1, (2, 4, 2)), d.half().squeeze(-1)


def _block_scales(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The block's unit, which fp16 can hold, [..., 1], and for each group the multiple of it that does best [..., 16]."""
    largest = scales.gather(-1, scales.abs().argmax(-1, keepdim=True))
    d = (largest / 128).half().float()
    d = torch.where(d.isinf(), d, 0)                    # too large: seen by who asks
    s, least = torch.zeros_like(scales), groups.square().sum(-1)
    for most in _MULTIPLES:
        unit = (largest / -most).half().float()
        unit = torch.where((unit == 0) & (largest != 0), _TINY, unit)
        tried = (scales * _inverse(unit)).round().clamp_(-128, 127)
        error = _error(groups, unit * tried)
        better = error.sum(-1, keepdim=True) < least.sum(-1, keepdim=True)
        d, s, least = torch.where(better, unit, d), torch.where(better, tried, s), torch.where(better, error, least)
    near = s
    for offset in (-1, 1):
        tried = (near + offset).clamp(-128, 127)
        error = _error(groups, d * tried)
        s, least = torch.where(error < least, tried, s), torch.minimum(error, least)
    return d, s


def _error(groups: Tensor, unit: Tensor) -> Tensor:
    """The squared error of each group with steps of `unit`: [..., 16] and [...] to [...]."""
    unit = unit.unsqueeze(-1)
    return (groups - unit * _quants(groups, unit)).square_().sum(-1)


def _quants(groups: Tensor, unit: Tensor) -> Tensor:
    return (groups * _inverse(unit)).round().clamp_(-32, 31)


def _best_scales(groups: Tensor) -> Tensor:
    """The scale of the least squared error for each group of values, of those that the quants of some trial scale fit best;
    [..., 16] to [...]. With quants q the best is xq / qq, and it leaves xx - (xq)^2 / qq."""
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales, most = torch.zeros_like(largest[..., 0]), torch.zeros_like(largest[..., 0])
    for reach in _REACHES:
        quants = _quants(groups, largest / reach)
        fit, size = (groups * quants).sum(-1), quants.square().sum(-1)
        scale = fit * _inverse(size)
        won = fit * scale
        scales, most = torch.where(won > most, scale, scales), torch.maximum(won, most)
    return scales


_MAKERS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q6_K": _q6_k}
