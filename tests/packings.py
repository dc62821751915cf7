"""A packing of the tests' own, and tiny models whose matrices are packed by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemma4_flex.models.packed_modules import put_packed
from gemma4_flex.packed import PackedWeight

GROUP = 8


@dataclass(frozen=True)
class Bytes:
    """Signed bytes, and an fp32 scale for each group of 8 of a row: enough to go through every seam."""
    width: int
    name: str = "bytes"

    def unpack(self, parts: tuple[Tensor, ...]) -> Tensor:
        quants, scales = parts
        return (quants.float() * scales[..., None]).flatten(-2)

    def pack(self, matrix: Tensor) -> tuple[Tensor, ...]:
        groups = matrix.float().unflatten(-1, (-1, GROUP))
        scales = groups.abs().amax(-1) / 127
        return (groups / scales[..., None]).round().to(torch.int8), scales


def matrices(model: nn.Module) -> list[str]:
    """Paths of all linears and tables, but for a tied head."""
    return [path for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding)) and path != "lm_head"]


@torch.no_grad()
def packed_twins(model: nn.Module, wanted: Callable[[str], bool] = lambda path: True) -> tuple[nn.Module, nn.Module]:
    """Copies of `model`: one whose matrices with a `wanted` path are packed, and one that holds their values unpacked."""
    packed, dense = copy.deepcopy(model), copy.deepcopy(model)
    for path in filter(wanted, matrices(model)):
        matrix = model.get_submodule(path).weight
        packing = Bytes(matrix.shape[1])
        weight = PackedWeight(packing.pack(matrix), packing, matrix.dtype)
        put_packed(packed, path, weight)
        dense.get_submodule(path).weight.copy_(weight.dense())
    return packed, dense
