"""Rotary position embeddings.

Angles are fp32 products of position and frequency, cos and sin are taken in fp32 and rounded once to the model dtype.
T: tokens, H: heads, D: head_dim.
"""
from __future__ import annotations

import torch
from torch import Tensor

from gemma4_flex.geometry import RopeGeometry


def inverse_frequencies(rope: RopeGeometry, device: torch.device | str) -> Tensor:
    """fp32 [D/2] frequencies `theta^(-2i/D)`; those past the rotated fraction are zero, so their dims never turn.

    The exponent divides by the whole head_dim whatever fraction rotates (HF's "proportional" type).
    """
    half = rope.head_dim // 2
    rotated = int(rope.rotated_fraction * rope.head_dim // 2)
    exponent = torch.arange(0, 2 * rotated, 2, dtype=torch.float) / rope.head_dim
    frequencies = torch.zeros(half, dtype=torch.float)
    frequencies[:rotated] = 1.0 / rope.theta**exponent
    return frequencies.to(device)


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two [T, D] tables in `dtype` for absolute `positions` [T], times the attention `scaling` of the rotary regime (YaRN)."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [T, H, D], dim i paired with dim i + D/2."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x * cos[:, None, :] + turned * sin[:, None, :]
