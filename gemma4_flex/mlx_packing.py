"""MLX's quantised matrices: made of values, and taken apart into tensors that a step unpacks to the values they stand for.

In the file a row's codes are one little-endian stream of bits, in 32-bit words; each group of a row has a scale, and a bias in
affine mode.

    mode    bits           group        scale               a value
    affine  2 3 4 5 6 8    32, 64, 128  bias's dtype        scale q + bias
    mxfp4   4              32           E8M0: 2^(s - 127)   scale E2M1
    mxfp8   8              32           E8M0                scale E4M3
    nvfp4   4              16           E4M3                scale E2M1

`split` takes a group's codes apart into planes of 8, 4, 2 or 1 bits (3 is 2 + 1, 5 is 4 + 1, 6 is 4 + 2), where byte n of the
1-bit plane of a group of 64 holds bits of codes n, n + 8, ... n + 56: no code straddles bytes, and neighbours unpack alike.

Values are those of `mx.dequantize` (MLX 0.32, CPU), bit by bit. In affine mode it computes in the scales' dtype: the product is
rounded to it, then the sum. Both roundings are made here by integer operations, since a compiler drops a cast to bf16 and back.
The exceptions: an fp16 product above 65504, which MLX makes infinite; an fp32 product that a GPU's compiler fuses with its sum.
The other modes are exact in fp32 and in bf16; in fp16 MLX rounds the scale first, which differs where that is out of range.

`quantize` makes the bytes that `mx.quantize` makes. Affine is computed in fp32 whatever the input, and its codes come of the
scale and the bias before those are rounded to be stored. The exceptions are groups that no model has: of values all below 1e-35,
where MLX's E8M0 scale wraps around, and of values above 1e6 in nvfp4, whose scale ends at 448.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}       # bits of a code, the lowest first
AFFINE_GROUPS = (32, 64, 128)
FIXED = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}              # bits and group of the other modes
DEFAULTS = {"affine": (4, 64), **FIXED}
MODES = tuple(DEFAULTS)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 1 << 24                                                             # codes taken apart at a time


@dataclass(frozen=True)
class MlxPacking:
    """Rows of `width` values; made by `packing_of`. Parts are scales [rows, groups], in affine mode biases too, and planes
    [rows, groups, bytes]."""
    width: int
    mode: str
    bits: int
    group_size: int
    scale_dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"affine {self.bits}-bit, groups of {self.group_size}" if self.mode == "affine" else self.mode

    @property
    def row_words(self) -> int:
        return self.width * self.bits // 32

    @property
    def groups(self) -> int:
        return self.width // self.group_size

    def split(self, words: Tensor, scales: Tensor, biases: Tensor | None = None) -> tuple[Tensor, ...]:
        """The parts of a file's tensors: words [rows, row_words] uint32, scales and biases [rows, groups]."""
        assert words.shape[1:] == (self.row_words,) and scales.shape == (len(words), self.groups)
        assert words.dtype == torch.uint32 and scales.dtype == self.scale_dtype and (biases is None) == (self.mode != "affine")
        planes = tuple(words.new_empty(len(words), self.groups, self.group_size * bits // 8, dtype=torch.uint8)
                       for bits in PLANES[self.bits])
        for rows in chunks(len(words), self.width):
            codes = self._codes_of(words[rows])
            for plane, bits in zip(planes, PLANES[self.bits]):
                plane[rows] = _to_plane(codes, bits)
                codes = codes >> bits
        return (scales, *(() if biases is None else (biases,)), *planes)

    def join(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        """The file's tensors again: words, scales, biases (None but in affine mode)."""
        scales, biases, planes = self._fields(parts)
        words = torch.cat([pack(self._codes(tuple(plane[rows] for plane in planes)).flatten(1), self.bits)
                           for rows in chunks(len(scales), self.width)])
        return words, scales, biases

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The values, fp32 [..., width], of parts [..., groups] and [..., groups, bytes]."""
        scales, biases, planes = self._fields(parts)
        codes = self._codes(planes)
        if self.mode == "affine":
            values = _rounded(codes.float() * scales.float().unsqueeze(-1), self.scale_dtype)
            values = _rounded(values + biases.float().unsqueeze(-1), self.scale_dtype)
        else:
            scale = e4m3(scales) if self.mode == "nvfp4" else e8m0(scales)
            values = (e4m3(codes) if self.bits == 8 else e2m1(codes)) * scale.unsqueeze(-1)
        return values.flatten(-2)

    def _fields(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        return (parts[0], parts[1], parts[2:]) if self.mode == "affine" else (parts[0], None, parts[1:])

    def _codes(self, planes: tuple[Tensor, ...]) -> Tensor:
        """Of planes [..., bytes]: uint8 [..., group_size]."""
        codes, place = None, 0
        for plane, bits in zip(planes, PLANES[self.bits]):
            part = _from_plane(plane, bits) << place if place else _from_plane(plane, bits)
            codes, place = part if codes is None else codes | part, place + bits
        return codes

    def _codes_of(self, words: Tensor) -> Tensor:
        """Of words [rows, row_words]: int32 [rows, groups, group_size]."""
        stream = words.contiguous().view(torch.uint8).unflatten(1, (self.groups, -1)).int()
        first, shift = _places(self.group_size, self.bits, words.device)
        after = (first + 1).clamp_max(stream.shape[-1] - 1)
        return ((stream[..., first] | stream[..., after] << 8) >> shift) & (1 << self.bits) - 1


def packing_of(width: int, *, mode: str, bits: int, group_size: int, scale_dtype: torch.dtype) -> MlxPacking:
    """The packing of rows of `width` values. Raises ValueError for a mode, bits, a group or scales that MLX's files do not have,
    and where groups do not fill a row."""
    check_format(mode, bits, group_size)
    if scale_dtype not in (SCALE_DTYPES if mode == "affine" else (torch.uint8,)):
        raise ValueError(f"{mode} scales are not {scale_dtype}")
    if width <= 0 or width % group_size:
        raise ValueError(f"rows of {width} values are not whole groups of {group_size}")
    return MlxPacking(width, mode, bits, group_size, scale_dtype)


def check_format(mode: str, bits: int, group_size: int) -> None:
    """Raises ValueError unless MLX has the mode with those bits and groups."""
    if mode not in DEFAULTS:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if mode != "affine" and (bits, group_size) != FIXED[mode]:
        raise ValueError(f"{mode} has {FIXED[mode][0]} bits and groups of {FIXED[mode][1]}, not {bits} bits and groups of "
                         f"{group_size}")
    if mode == "affine" and bits not in PLANES:
        raise ValueError(f"affine has {_listed(PLANES)} bits, not {bits}")
    if mode == "affine" and group_size not in AFFINE_GROUPS:
        raise ValueError(f"affine has groups of {_listed(AFFINE_GROUPS)}, not {group_size}")


def _listed(numbers) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}"


# ---- codes and bytes -----------------------------------------------------------------------------------------------------

def chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of `rows`, each of about CHUNK values."""
    step = max(1, CHUNK // width)
    return (slice(start, start + step) for start in range(0, rows, step))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes [rows, width], below 1 << bits, as a file's words: uint32 [rows, width bits / 32]."""
    first, shift = _places(codes.shape[1], bits, codes.device)
    spread = codes.int() << shift
    stream = spread.new_zeros(len(codes), codes.shape[1] * bits // 8 + 1)
    stream.index_add_(1, first, spread & 255).index_add_(1, first + 1, spread >> 8)       # their bits are disjoint
    return stream[:, :-1].to(torch.uint8).contiguous().view(torch.uint32)


def _places(count: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The byte each code of a stream starts in, and at which bit of it. Each [count]"""
    start = torch.arange(0, count * bits, bits, device=device)
    return start // 8, (start % 8).int()


def _to_plane(codes: Tensor, bits: int) -> Tensor:
    """The lowest `bits` of codes [..., n]: uint8 [..., n bits / 8]."""
    fields = (codes & (1 << bits) - 1).unflatten(-1, (8 // bits, -1))
    shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device).unsqueeze(-1)
    return (fields << shifts).sum(-2).to(torch.uint8)


def _from_plane(plane: Tensor, bits: int) -> Tensor:
    """uint8 [..., bytes] to [..., 8 bytes / bits]."""
    if bits == 8:
        return plane
    # by plain numbers: a shift by a tensor cannot be traced where the number of rows is a symbol
    return torch.cat([plane >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1)


# ---- numbers -------------------------------------------------------------------------------------------------------------

def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to the nearest value of `dtype`, ties to even, in fp32. Of fp16, x is a multiple of the smallest, 2^-24."""
    if dtype == torch.float32:
        return x
    dropped = 16 if dtype == torch.bfloat16 else 13
    bits = x.view(torch.int32)
    return (bits + (1 << dropped - 1) - 1 + (bits >> dropped & 1) & -(1 << dropped)).view(torch.float32)


def e2m1(codes: Tensor) -> Tensor:
    """The fp32 values of 4-bit floats: a sign, two bits of exponent, one of mantissa."""
    bits = codes.int()
    size = bits & 7
    values = torch.where(size < 2, size * 0.5, ((size << 22) + (126 << 23)).view(torch.float32))
    return torch.where(bits > 7, -values, values)


def e4m3(codes: Tensor) -> Tensor:
    """The fp32 values of 8-bit floats: a sign, four bits of exponent, three of mantissa; the largest is NaN, none is infinite."""
    bits = codes.int()
    size = bits & 127
    values = torch.where(size < 8, size * 2.0**-9, ((size << 20) + (120 << 23)).view(torch.float32))
    values = torch.where(size == 127, torch.nan, values)
    return torch.where(bits > 127, -values, values)


def e8m0(codes: Tensor) -> Tensor:
    """The fp32 powers of two of bytes: 2^(s - 127), a subnormal for 0."""
    bits = codes.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)


# ---- values to files' tensors --------------------------------------------------------------------------------------------

class Quantized(NamedTuple):
    """A matrix as a file holds it: words uint32 [rows, width bits / 32], scales [rows, groups], biases in affine mode alone."""
    words: Tensor
    scales: Tensor
    biases: Tensor | None


def quantize(matrix: Tensor, *, mode: str, bits: int, group_size: int) -> Quantized:
    """Of fp32, fp16 or bf16 [rows, width], finite. Affine scales and biases are in the matrix' dtype.

    Raises ValueError for what MLX's files do not have, and where groups do not fill a row.
    """
    scale_dtype = matrix.dtype if mode == "affine" else torch.uint8
    packing_of(matrix.shape[1], mode=mode, bits=bits, group_size=group_size, scale_dtype=scale_dtype)
    pieces = []
    for rows in chunks(*matrix.shape):
        groups = matrix[rows].float().unflatten(1, (-1, group_size))
        codes, *scales = _affine(groups, bits, matrix.dtype) if mode == "affine" else _floats(groups, mode, matrix.dtype)
        pieces.append((pack(codes.flatten(1), bits), *scales))
    words, scales, *biases = map(torch.cat, zip(*pieces))
    return Quantized(words, scales, biases[0] if biases else None)


def _affine(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Codes, scales, biases. The bias is the group's end that is farther from zero, and the scale points from it to the other,
    stretched so that zero is a code; where zero is nearest that end, the bias is zero."""
    top = (1 << bits) - 1
    low, high = groups.amin(-1), groups.amax(-1)
    from_low = low.abs() > high.abs()
    end = torch.where(from_low, low, high)
    scale = ((high - low) / top).clamp_min(1e-7)
    scale = torch.where(from_low, scale, -scale)
    zero = (end / scale).round()
    scale, bias = torch.where(zero != 0, end / zero, scale), torch.where(zero != 0, end, 0.0)
    codes = ((groups - bias.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, top).int()
    return codes, scale.to(dtype), bias.to(dtype)


def _floats(groups: Tensor, mode: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales. The largest value of a group is not above the largest code; an nvfp4 scale is rounded to nearest."""
    bits = FIXED[mode][0]
    scale = (groups.abs().amax(-1).to(dtype) / (448 if bits == 8 else 6)).float()
    if mode == "nvfp4":
        stored = scale.clamp_max(448).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = e4m3(stored)
    else:
        fraction, exponent = torch.frexp(scale)
        stored = (torch.where(fraction == 0.5, exponent - 1, exponent) + 127 & 255).to(torch.uint8)
        scale = e8m0(stored)
    scaled = torch.where(scale.unsqueeze(-1) == 0, 0.0, groups / scale.unsqueeze(-1))
    if bits == 8:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), stored
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=groups.device)
    size = torch.bucketize(scaled.abs(), halfway)                            # a tie goes to the smaller
    return torch.where((scaled < 0) & (size > 0), size + 8, size).to(torch.uint8), stored
