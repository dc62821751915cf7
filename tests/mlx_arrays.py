"""MLX, the oracle of its own formats: its arrays as tensors, and what it makes of a matrix."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from gemma4_flex.mlx_packing import FIXED

DTYPES = {torch.float32: mx.float32, torch.float16: mx.float16, torch.bfloat16: mx.bfloat16}
AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = AFFINE + [(mode, *FIXED[mode]) for mode in FIXED]


def mx_of(tensor: Tensor) -> mx.array:
    """An array of the same bits."""
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.contiguous().view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    return mx.array(tensor.contiguous().numpy())


def torch_of(array: mx.array) -> Tensor:
    """A tensor of the same bits."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def quantized(matrix: Tensor, mode: str, bits: int, group: int) -> list[Tensor]:
    """Words, scales and, in affine mode, biases of `mx.quantize`."""
    return [torch_of(part) for part in mx.quantize(mx_of(matrix), group_size=group, bits=bits, mode=mode)]


def dequantized(parts: list[Tensor], mode: str, bits: int, group: int, dtype: torch.dtype | None = None) -> Tensor:
    """`mx.dequantize`; `dtype` None is what it takes itself."""
    return torch_of(mx.dequantize(*map(mx_of, parts), group_size=group, bits=bits, mode=mode, dtype=dtype and DTYPES[dtype]))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of one dtype, shape and value, where NaN is NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) and torch.equal(a.isnan(), b.isnan()) if a.is_floating_point() \
        else torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
