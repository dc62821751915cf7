"""Two copies of the weights: a pristine base, and an inference copy that is refreshed in place.

The base is never written. The inference copy is the same tree of modules in which the adapter's targets own their storage
and everything else is the base's own tensors. A refresh writes `round(base + scaling * B A)`, computed in fp32 and rounded
once, so that nothing is ever unmerged and the n-th refresh is as exact as the first.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import (
    ALL_LINEAR,
    Adapter,
    AdapterError,
    Pair,
    bind,
    choose_targets,
    is_finite,
    linears_of,
    load_adapter,
)
from gemma4_flex.models.packed_modules import unpack_linears, unpacked, weight_of
from gemma4_flex.models.projections import lay_side_by_side, view_of
from gemma4_flex.packed import PackedWeight

SLICE = {"cpu": 1 << 18, "cuda": 1 << 22}      # elements merged at a time


def pristine_view(model: nn.Module) -> nn.Module:
    """A view of `model`'s own tensors with PEFT's wrappers taken off: the modules below are what was wrapped."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    view = view_of(model.get_base_model() if isinstance(model, PeftModel) else model)
    for module in view.modules():
        for name, child in list(module._modules.items()):
            while isinstance(child, BaseTunerLayer):
                child = module._modules[name] = child.base_layer
    return view


class DoubleCopy:
    """`base` (a causal LM, plain or wrapped by PEFT) and `inference`, its refreshable twin.

    `targets` are the linears an adapter may ever change: "all-linear", or names by whole path components. A target that is
    packed (GGUF, MLX) is unpacked in the inference copy, into the model's dtype: what is merged is what it computes with.
    """

    def __init__(self, base: nn.Module, targets: str | Iterable[str] = ALL_LINEAR):
        self.base = pristine_view(base)
        self.inference = view_of(self.base)
        paths = choose_targets(self.base, targets)
        if not paths:
            raise AdapterError(f"a double copy without targets can take no adapter: name some, or {ALL_LINEAR!r}.")
        unpack_linears(self.inference, paths)
        mine, theirs = linears_of(self.inference), linears_of(self.base)
        self.pristine: dict[str, Tensor | PackedWeight] = {path: weight_of(theirs[path]) for path in paths}
        self.merged: dict[str, Tensor] = {path: self._own_weight(path, mine[path]) for path in paths}
        lay_side_by_side(self.inference.model, set(self.merged.values()))
        self.engines: weakref.WeakSet = weakref.WeakSet()      # that run `inference` and must hear of a refresh

    def _own_weight(self, path: str, linear: nn.Module) -> nn.Parameter:
        """Give a linear of the inference copy a weight of its own."""
        if isinstance(self.pristine[path], PackedWeight):       # just unpacked
            return linear.weight
        if not self.pristine[path].is_floating_point():
            raise AdapterError(f"{path} is quantised: run the adapter unmerged, or use lora.requantize.RequantizedCopy.")
        weight = nn.Parameter(self.pristine[path].detach().clone(), requires_grad=False)
        linear._parameters["weight"] = weight
        return weight

    def attach(self, engine) -> None:
        """Let `engine`, which runs `inference`, switch adapters, and let every refresh raise its weight epoch."""
        if engine.model is not self.inference:
            raise AdapterError("the engine runs another model: build it on this double copy's `inference`.")
        self.engines.add(engine)
        engine.weight_source = self

    def use(self, path: str | None, policy: str = "drain") -> None:
        """Refresh from the adapter in a directory, or back to the base for None."""
        self.refresh(None if path is None else load_adapter(path, ModelGeometry.from_config(self.base.config)), policy)

    @property
    def extra_bytes(self) -> int:
        """Bytes the inference copy adds to the base: its targets' weights."""
        return sum(w.numel() * w.element_size() for w in self.merged.values())

    @torch.no_grad()
    def refresh(self, adapter: Adapter | None, policy: str = "drain") -> None:
        """Write every target: merged where the adapter has a pair, the base's value elsewhere; None restores the base.

        All targets or none: an adapter that does not fit or is not finite raises AdapterError and changes nothing. The
        adapter's tensors are read now; overwriting them afterwards changes nothing. `policy` says what becomes of requests
        that attached engines are running (`FlexEngine.update_weights`).
        """
        pairs = {} if adapter is None else adapter.pairs
        if adapter is not None:
            linears = linears_of(self.base)
            bind(adapter, {path: (linears[path].out_features, linears[path].in_features) for path in self.merged})
            for path, pair in pairs.items():
                if not self._stays_finite(path, pair):
                    raise AdapterError(f"adapter {adapter.name} is not finite at {path}: nothing was changed. "
                                       "Train it again with a lower rate.")
        with ExitStack() as updates:
            for engine in list(self.engines):
                updates.enter_context(engine.update_weights(policy))
            for path in self.merged:
                self.write_one(path, pairs.get(path))

    @torch.no_grad()
    def write_one(self, path: str, pair: Pair | None) -> None:
        """Write one target in place: merged with `pair`, or the base's value for None. `refresh` does all of them."""
        base = unpacked(self.pristine[path])
        if pair is None:
            self.merged[path].copy_(base)
        else:
            _merge_by_rows(self.merged[path], base, pair)

    def _stays_finite(self, path: str, pair: Pair) -> bool:
        """Whether one target, merged, will be finite in the dtype it is read in."""
        return stays_finite(unpacked(self.pristine[path]), pair, self.merged[path].dtype)


def stays_finite(base: Tensor, pair: Pair, dtype: torch.dtype) -> bool:
    """Whether `merge(base, pair)` is finite in `dtype`: by the largest values, and by merging where they do not tell."""
    if not is_finite(pair):
        return False
    bound = largest(pair.down) * largest(pair.up) * pair.up.shape[1] * abs(pair.scaling) + largest(base)
    return bool(bound < torch.finfo(dtype).max) or bool(torch.isfinite(merge(base, pair).to(dtype)).all())


def largest(x: Tensor) -> Tensor:
    """Largest magnitude in `x` as fp32, in one pass over it."""
    low, high = torch.aminmax(x.detach())
    return torch.maximum(-low.float(), high.float())


def merge(base: Tensor, pair: Pair) -> Tensor:
    """`base + scaling * B A` in fp32 (fp64 for an fp64 base), not rounded yet. [out, in]."""
    wide = torch.promote_types(base.dtype, torch.float)
    up, down = pair.up.to(base.device, wide), pair.down.to(base.device, wide)
    return torch.addmm(base.to(wide), up, down, alpha=pair.scaling)


def _merge_by_rows(merged: Tensor, base: Tensor, pair: Pair) -> None:
    """Write the rounded merge some rows at a time: the fp32 sums of one slice stay in cache, so that memory moves little
    more than the weight's own bytes in and out."""
    wide = torch.promote_types(base.dtype, torch.float)
    up, down = pair.up.to(base.device, wide), pair.down.to(base.device, wide)
    rows = max(1, SLICE[base.device.type] // base.shape[1])
    sums = torch.empty(min(rows, base.shape[0]), base.shape[1], dtype=wide, device=base.device)
    for out, given, left in zip(merged.split(rows), base.split(rows), up.split(rows)):
        part = sums[: len(given)]
        part.copy_(given).addmm_(left, down, alpha=pair.scaling)
        out.copy_(part)


def all_linear_bytes(geometry: ModelGeometry, bytes_per_element: int) -> int:
    """Bytes that an inference copy of all text linears adds to a base of this geometry."""
    hidden, ple = geometry.hidden_size, geometry.ple_width
    count = geometry.num_layers * ple * hidden                     # the prelude's projection
    for layer in geometry.layers:
        kv = 2 * layer.num_kv_heads * layer.head_dim if layer.owns_kv else 0
        count += hidden * (2 * layer.num_heads * layer.head_dim + kv + 3 * layer.mlp_width + 2 * ple)
    return count * bytes_per_element
