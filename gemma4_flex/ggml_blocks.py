"""ggml's block formats, as GGUF files hold them: their bytes to aligned tensors and back, and the values those stand for.

A row is blocks of 32 or 256 values, one after the other. In the file a block's scales and quants follow each other, so that
most are not aligned; `split` makes a tensor of each field of all blocks, and `unpack` is broadcasts over those tensors alone.

    type   values  bytes  fields in the file's order (n x bits), and a value
    Q8_0       32     34  d 16, q 32x8 signed                           d q
    Q4_0       32     18  d 16, q 32x4                                  d (q - 8)
    Q4_1       32     20  d 16, m 16, q 32x4                            d q + m
    Q5_0       32     22  d 16, high 32x1, q 32x4                       d (q - 16)
    Q5_1       32     24  d 16, m 16, high 32x1, q 32x4                 d q + m
    Q4_K      256    144  d 16, m 16, (s, t) 8x(6 + 6), q 256x4         (d s) q - m t
    Q5_K      256    176  d 16, m 16, (s, t) 8x(6 + 6), high 256x1, q   (d s) q - m t
    Q6_K      256    210  q 256x4, high 256x2, s 16x8 signed, d 16      (d s) (q - 32)

d and m are fp16. Each product has at most 24 bits, so it is exact in fp32, and a value is rounded once at most: however a
compiler fuses or orders this, the bits are the same.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class _Field(NamedTuple):
    """A field of a block: `shape` items of `dtype`, where the sixteen 6-bit numbers of 12 bytes are uint8 (2, 8)."""
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    six_bit: bool = False

    @property
    def num_bytes(self) -> int:
        return 12 if self.six_bit else self.dtype.itemsize * prod(self.shape)


class _Type(NamedTuple):
    """Blocks of `values` values. `unpack` gives [..., blocks, dimensions of a block's values] of parts [..., blocks, shape]."""
    values: int
    fields: tuple[_Field, ...]
    unpack: Callable[..., Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(field.num_bytes for field in self.fields)


@dataclass(frozen=True)
class GgmlPacking:
    """Rows of `width` values in blocks of one of TYPES; made by `packing_of`. A part is a field of all blocks of all rows:
    [rows, blocks, ...]."""
    name: str
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width // TYPES[self.name].values * TYPES[self.name].num_bytes

    def split(self, blocks: Tensor) -> tuple[Tensor, ...]:
        """The parts of the file's bytes, uint8 [rows, row_bytes], each in storage of its own."""
        kind = TYPES[self.name]
        assert blocks.dtype == torch.uint8 and blocks.shape[1:] == (self.row_bytes,)
        fields = blocks.unflatten(1, (-1, kind.num_bytes)).split([field.num_bytes for field in kind.fields], -1)
        return tuple(_field_of(piece, field) for piece, field in zip(fields, kind.fields))

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The file's bytes again: uint8 [rows, row_bytes]."""
        pieces = [_bytes_of(part, field) for part, field in zip(parts, TYPES[self.name].fields)]
        return torch.cat(pieces, -1).flatten(1)

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The values, fp32 [..., width], of parts [..., blocks, ...]."""
        shape = parts[0].shape[:parts[0].ndim - len(TYPES[self.name].fields[0].shape) - 1]
        return TYPES[self.name].unpack(*parts).reshape(*shape, self.width)


def packing_of(type_name: str, width: int) -> GgmlPacking:
    """The packing of rows of `width` values. Raises ValueError for a type not in TYPES, and where blocks do not fill a row."""
    if type_name not in TYPES:
        raise ValueError(f"ggml type {type_name!r} cannot be unpacked; those that can are {', '.join(TYPES)}")
    if width <= 0 or width % TYPES[type_name].values:
        raise ValueError(f"rows of {width} values are not whole {type_name} blocks of {TYPES[type_name].values}")
    return GgmlPacking(type_name, width)


# ---- fields and bytes: [rows, blocks, bytes] <-> [rows, blocks, ...] ---------------------------------------------------

def _field_of(piece: Tensor, field: _Field) -> Tensor:
    if field.six_bit:
        return _six_bits(piece)
    own = piece.clone(memory_format=torch.contiguous_format)       # aligned, whatever the field's place in a block
    return own.view(field.dtype).reshape(*piece.shape[:2], *field.shape)


def _bytes_of(part: Tensor, field: _Field) -> Tensor:
    if field.six_bit:
        return _twelve_bytes(part)
    return part.unsqueeze(-1).flatten(2).view(torch.uint8)


def _six_bits(piece: Tensor) -> Tensor:
    """Twelve bytes are three rows of four: 6 bits of s 0..3 and of t 0..3, each with the upper 2 of s or t 4..7 above them; then
    the lower 4 of s 4..7, with those of t 4..7 above them. (s, t): [..., 2, 8]"""
    first, last = piece.unflatten(-1, (3, 4)).split([2, 1], -2)
    low = last >> torch.tensor([[0], [4]], dtype=torch.uint8, device=piece.device) & 15
    return torch.cat([first & 63, first >> 6 << 4 | low], -1)


def _twelve_bytes(pairs: Tensor) -> Tensor:
    first, second = pairs.chunk(2, -1)
    low_s, low_t = (second & 15).unbind(-2)
    return torch.cat([first | second >> 4 << 6, (low_s | low_t << 4).unsqueeze(-2)], -2).flatten(-2)


# ---- values: a block's have as many dimensions as its fields need to broadcast ------------------------------------------

def _shifted(quants: Tensor, *, bits: int, count: int, step: int | None = None) -> Tensor:
    """`bits` bits of each number at `count` places, a step apart, a dimension before the last: [..., n] to [..., count, n]. Places
    are plain numbers: a shift by a tensor cannot be traced where the number of rows is a symbol."""
    return torch.stack([quants >> n * (step or bits) & (1 << bits) - 1 for n in range(count)], -2)


def _q5(high: Tensor, quants: Tensor) -> Tensor:
    """Quants of one bit and four: [...] and [..., 16] to [..., 2, 16]."""
    bits = torch.stack([high >> n & 1 for n in range(32)], -1)
    return _shifted(quants, bits=4, count=2) | bits.unflatten(-1, (2, 16)) << 4


def _centred(d: Tensor, quants: Tensor, middle: int) -> Tensor:
    return d.float()[..., None, None] * (quants.float() - middle)


def _affine(scales: Tensor, quants: Tensor) -> Tensor:
    d, m = scales.float()[..., None, None].unbind(-3)
    return d * quants.float() + m


def _k_affine(scales: Tensor, pairs: Tensor, quants: Tensor) -> Tensor:
    """Eight groups of 32, each with its part of both scales: [..., 2], [..., 2, 8], [..., 8, 32]."""
    s, t = (scales.float().unsqueeze(-1) * pairs.float()).unsqueeze(-1).unbind(-3)
    return s * quants.float() - t


def _q8_0(d: Tensor, quants: Tensor) -> Tensor:
    return d.float().unsqueeze(-1) * quants.float()


def _q4_0(d: Tensor, quants: Tensor) -> Tensor:
    return _centred(d, _shifted(quants, bits=4, count=2), 8)


def _q4_1(scales: Tensor, quants: Tensor) -> Tensor:
    return _affine(scales, _shifted(quants, bits=4, count=2))


def _q5_0(d: Tensor, high: Tensor, quants: Tensor) -> Tensor:
    return _centred(d, _q5(high, quants), 16)


def _q5_1(scales: Tensor, high: Tensor, quants: Tensor) -> Tensor:
    return _affine(scales, _q5(high, quants))


def _q4_k(scales: Tensor, pairs: Tensor, quants: Tensor) -> Tensor:
    return _k_affine(scales, pairs, _shifted(quants, bits=4, count=2).flatten(-3, -2))


def _q5_k(scales: Tensor, pairs: Tensor, high: Tensor, quants: Tensor) -> Tensor:
    low = _shifted(quants, bits=4, count=2).flatten(-3, -2)
    return _k_affine(scales, pairs, low | _shifted(high, bits=1, count=8) << 4)


def _q6_k(quants: Tensor, high: Tensor, s: Tensor, d: Tensor) -> Tensor:
    """Two halves of four rows of two groups of 16."""
    low = _shifted(quants, bits=4, count=2).unflatten(-1, (2, 32)).flatten(-3, -2)
    numbers = (low | _shifted(high, bits=2, count=4) << 4).unflatten(-1, (2, 16))
    return (d.float()[..., None, None, None] * s.float()).unsqueeze(-1) * (numbers.float() - 32)


_D, _SCALES = _Field(torch.float16), _Field(torch.float16, (2,))
_HIGH, _NIBBLES = _Field(torch.int32), _Field(torch.uint8, (16,))
_PAIRS, _K_NIBBLES = _Field(torch.uint8, (2, 8), six_bit=True), _Field(torch.uint8, (4, 32))
TYPES = {
    "Q8_0": _Type(32, (_D, _Field(torch.int8, (32,))), _q8_0),
    "Q4_0": _Type(32, (_D, _NIBBLES), _q4_0),
    "Q4_1": _Type(32, (_SCALES, _NIBBLES), _q4_1),
    "Q5_0": _Type(32, (_D, _HIGH, _NIBBLES), _q5_0),
    "Q5_1": _Type(32, (_SCALES, _HIGH, _NIBBLES), _q5_1),
    "Q4_K": _Type(256, (_SCALES, _PAIRS, _K_NIBBLES), _q4_k),
    "Q5_K": _Type(256, (_SCALES, _PAIRS, _Field(torch.uint8, (32,)), _K_NIBBLES), _q5_k),
    "Q6_K": _Type(256, (_Field(torch.uint8, (2, 64)), _Field(torch.uint8, (2, 32)), _Field(torch.int8, (2, 4, 2)), _D), _q6_k),
}
