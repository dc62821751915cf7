"""How a linear is written down, which decides what Inductor makes of it on a GPU.

A *library* matmul is a kernel of its own, and so is what follows it. Written as a sum of products (one row) or as a matmul
of fp32 operands that Inductor may write itself (`triton.native_matmul`), it becomes one kernel with what follows:
gelu(gate) * up is one launch then instead of three. All forms accumulate in fp32 and round once: bf16 operands are exact in
tf32. results/kernel_steps.md counts the launches; which form is faster is to be measured on a card.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gemma4_flex.packed import PackedWeight

Weight = Tensor | PackedWeight      # a matrix [out, in]


class Matmuls(NamedTuple):
    """The forms of a step's linears. plain: of one whose output the next kernel only reads. gated: of those under a GELU
    gate. Both "library", "opaque" (the library's, hidden from Inductor), "sum" (one row only) or "native"."""
    plain: str = "library"
    gated: str = "library"


def matmuls_for(device_type: str, dtype: torch.dtype, rows: int, *, decode: bool, compiled: bool) -> Matmuls:
    """The forms of a step of `rows` tokens. fp32 on a GPU keeps to the library: tf32 would round its operands."""
    if device_type != "cuda" or not compiled:
        return Matmuls()
    if not decode or dtype != torch.bfloat16:
        return Matmuls("opaque", "opaque")
    return Matmuls("sum", "sum") if rows == 1 else Matmuls("opaque", "native")


@torch.library.custom_op("gemma4_flex::matmul", mutates_args=())
def _opaque(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@_opaque.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Weight, form: str) -> Tensor:
    """x [T, in] times weight [out, in], transposed: [T, out] in x's dtype."""
    if isinstance(weight, PackedWeight):
        weight = weight.dense()
    if form == "sum":
        return (x.float() * weight.float()).sum(-1)[None].to(x.dtype)
    if form == "native":
        return (x.float() @ weight.float().t()).to(x.dtype)
    return _opaque(x, weight) if form == "opaque" else F.linear(x, weight)


def keep(x: Tensor) -> Tensor:
    """`x`, stored by the kernel that makes it: else Inductor computes it again wherever a matmul reads it."""
    return x.as_strided(x.shape, x.stride())
