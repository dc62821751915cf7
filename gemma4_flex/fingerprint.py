"""Whether tensors are, bit for bit, what they were."""
from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, dtype, shape and raw bytes of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
