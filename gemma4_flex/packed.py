"""Weights kept in few bits a value, as tensors that a step unpacks.

A packed matrix is a few tensors whose first dimension is the matrix's rows, and a *packing*, which says how a row's values
are made of them. Rows are unpacked on their own, so that a lookup touches the rows it wants and no others. Every packing is
written in plain tensor operations that broadcast: compiled, an unpacked weight need not be stored before it is multiplied.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Packing(Protocol):
    """How rows of `width` values are packed. Hashable: compiled code is kept by it."""

    @property
    def name(self) -> str:
        """What the format calls it: "Q4_0", "affine 4-bit, groups of 64"."""

    @property
    def width(self) -> int:
        """Values a row."""

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The values [..., width], in fp32, of parts [..., what a row holds]; exact where the format says how."""


class PackedWeight(NamedTuple):
    """A matrix [rows, packing.width]: `parts` as the packing has them, each with the rows first. What comes out is in `dtype`."""
    parts: tuple[Tensor, ...]
    packing: Packing
    dtype: torch.dtype

    def dense(self) -> Tensor:
        """The whole matrix [rows, width], rounded once from fp32. A compiler that makes one kernel of this and the product may
        leave that rounding out, and is nearer to the packed values then."""
        return self.packing.unpack(self.parts).to(self.dtype)

    def rows(self, ids: Tensor, gather: Callable[[Tensor, Tensor], Tensor] = torch.Tensor.__getitem__) -> Tensor:
        """The rows of `ids` [...], which are all that is unpacked. `gather(part, ids)` fetches them. [..., width]"""
        return self.packing.unpack(tuple(gather(part, ids) for part in self.parts)).to(self.dtype)

    def halves(self) -> tuple[PackedWeight, PackedWeight]:
        """The upper and the lower half of the rows, over the same storage."""
        first, second = zip(*(part.chunk(2) for part in self.parts))
        return self._replace(parts=first), self._replace(parts=second)

    @property
    def shape(self) -> tuple[int, int]:
        return self.parts[0].shape[0], self.packing.width

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)
