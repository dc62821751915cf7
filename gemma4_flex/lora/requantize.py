"""The double copy over a 4-bit base: each refresh merges the dequantised base with the delta and quantises anew.

The packed values and the whole quantisation state (scales, code) are written into the storage the copy was made with, so
that old scales never meet new values (litgpt#513) and captured steps go on reading the right place. What is merged
against is the dequantised 4-bit base, which is what an adapter trained over it has seen, not the bf16 weights it was made
of (peft#2321); `deviation` says how far a merge is from another choice.
"""
from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gemma4_flex.checkpoints.four_bit import (
    COMPUTE_DTYPE,
    dequantized,
    is_4bit,
    num_bytes,
    put_weight,
    require_bitsandbytes,
    state_tensors,
)
from gemma4_flex.lora.adapters import Adapter, Pair, linears_of
from gemma4_flex.lora.double_copy import DoubleCopy, merge, stays_finite

# relative deviation that rounding to bf16 can explain (half a unit in the last place, 2^-9, as RMS and with some room);
# a merge onto another base is off by NF4's own error, some 2^-4
ROUNDING = 2**-8


def requantized(base: Tensor, pair: Pair) -> nn.Parameter:
    """A 4-bit weight of `dequantised base + delta` (summed in fp32), with fresh state, in the format of `base`."""
    bnb, state = require_bitsandbytes(), base.quant_state
    weight = bnb.nn.Params4bit(
        merge(dequantized(base), pair), requires_grad=False, blocksize=state.blocksize, quant_type=state.quant_type,
        compress_statistics=state.nested, quant_storage=base.dtype)
    return weight.to(base.device)


class RequantizedCopy(DoubleCopy):
    """A double copy whose 4-bit targets are requantised at each refresh; targets that are not 4-bit are merged as ever."""

    def _own_weight(self, path: str, linear: nn.Module) -> nn.Parameter:
        if not is_4bit(self.pristine[path]):
            return super()._own_weight(path, linear)
        weight = copy.deepcopy(self.pristine[path])
        put_weight(linear, weight)
        return weight

    @property
    def extra_bytes(self) -> int:
        return sum(num_bytes(w) for w in self.merged.values())

    @torch.no_grad()
    def write_one(self, path: str, pair: Pair | None) -> None:
        base, merged = self.pristine[path], self.merged[path]
        if not is_4bit(base):
            return super().write_one(path, pair)
        fresh = base if pair is None else requantized(base, pair)
        for mine, new in zip(raw_tensors(merged), raw_tensors(fresh), strict=True):
            mine.copy_(new)

    def _stays_finite(self, path: str, pair: Pair) -> bool:
        if not is_4bit(self.pristine[path]):
            return super()._stays_finite(path, pair)
        return stays_finite(dequantized(self.pristine[path]), pair, COMPUTE_DTYPE)


def raw_tensors(weight: Tensor) -> list[Tensor]:
    """All that a 4-bit weight is decoded from: the packed values, then its state's tensors."""
    return [weight.detach(), *state_tensors(weight).values()]


def is_requantized(merged: Tensor, base: Tensor, pair: Pair | None) -> bool:
    """Whether a 4-bit weight is, bit for bit, its base requantised with `pair`, or its base for None."""
    wanted = base if pair is None else requantized(base, pair)
    return all(torch.equal(a, b) for a, b in zip(raw_tensors(merged), raw_tensors(wanted), strict=True))


@dataclass(frozen=True)
class Deviation:
    """How far merged weights lie from `base + delta`: |difference|, and its RMS over that of the weights."""
    base: str
    modules: int
    max_abs: float
    mean_abs: float
    relative: float

    @property
    def deviates(self) -> bool:
        """Whether this is more than rounding the sum to bf16 explains: a requantised merge, or one onto another base."""
        return self.relative > ROUNDING

    def __str__(self) -> str:
        return (f"{self.modules} modules against the {self.base} plus delta: |difference| at most {self.max_abs:.3g}, "
                f"mean {self.mean_abs:.3g}, {self.relative:.2%} of the weights (RMS)")


@torch.no_grad()
def deviation(merged: nn.Module, base: nn.Module, adapter: Adapter) -> Deviation:
    """Weights of `merged` against those of `base` plus the adapter's delta in fp32, over the modules that are 4-bit in
    either. Both are causal LMs without LoRA layers."""
    ours, theirs = linears_of(merged), linears_of(base)
    paths = [p for p in adapter.pairs if is_4bit(ours[p].weight) or is_4bit(theirs[p].weight)]
    worst, total, square, size, count = 0.0, 0.0, 0.0, 0.0, 0
    for path in paths:
        exact = merge(dequantized(theirs[path].weight), adapter.pairs[path])
        error = (dequantized(ours[path].weight) - exact).abs()
        worst, total, count = max(worst, error.max().item()), total + error.sum().item(), count + error.numel()
        square, size = square + error.pow(2).sum().item(), size + exact.pow(2).sum().item()
    name = "dequantised 4-bit base" if any(is_4bit(theirs[p].weight) for p in paths) else "unquantised base"
    return Deviation(name, len(paths), worst, total / max(count, 1), (square / size) ** 0.5 if size else 0.0)
