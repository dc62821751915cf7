"""Modules around packed weights, for a Hugging Face text model: they compute what its own compute on the unpacked values."""
from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.packed import PackedWeight, Packing


class _Packed(nn.Module):
    """Holds a packed weight's tensors as buffers, so that what lists, hashes, moves or counts a model's tensors sees them."""

    def hold(self, weight: PackedWeight) -> None:
        self.packing: Packing = weight.packing
        self.compute_dtype = weight.dtype
        self.num_parts = len(weight.parts)
        for n, part in enumerate(weight.parts):
            self.register_buffer(f"packed_{n}", part)

    @property
    def packed(self) -> PackedWeight:
        parts = tuple(self._buffers[f"packed_{n}"] for n in range(self.num_parts))
        return PackedWeight(parts, self.packing, self.compute_dtype)


class PackedLinear(_Packed, nn.Linear):
    """A linear without bias. An nn.Linear to whoever asks, so that PEFT puts its layers beside it; it has no `weight`, but a
    `qweight`, by which PEFT knows the device."""

    def __init__(self, weight: PackedWeight):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.hold(weight)

    @property
    def qweight(self) -> Tensor:
        return self._buffers["packed_0"]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.packed.dense())


class PackedEmbedding(_Packed):
    """A lookup table whose rows are multiplied by `embed_scale`; `scalar_embed_scale` is None for one without."""

    def __init__(self, weight: PackedWeight, scalar_embed_scale: float | None):
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.hold(weight)
        if scalar_embed_scale is not None:
            self.scalar_embed_scale = scalar_embed_scale
            self.register_buffer("embed_scale", torch.tensor(scalar_embed_scale, dtype=weight.dtype,
                                                             device=weight.parts[0].device), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.packed.rows(ids)
        return found * self.embed_scale if hasattr(self, "scalar_embed_scale") else found


def is_packed(module: nn.Module) -> bool:
    return isinstance(module, _Packed)


def weight_of(module: nn.Module) -> Tensor | PackedWeight:
    """The weight of a linear or an embedding, as it is kept."""
    return module.packed if is_packed(module) else module.weight


def unpacked(weight: Tensor | PackedWeight) -> Tensor:
    """A weight as a matrix: itself, or what a packed one unpacks to."""
    return weight.dense() if isinstance(weight, PackedWeight) else weight


def unpack_linears(model: nn.Module, paths: Iterable[str]) -> None:
    """Put a linear with the unpacked weight, in storage of its own, in the place of each packed one among those at `paths`."""
    for path in paths:
        if is_packed(module := model.get_submodule(path)):
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(module.packed.dense(), requires_grad=False)
            model.set_submodule(path, dense)


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with the `weight` of each packed module in the place of its parts."""
    packed = {path: m for path, m in model.named_modules() if is_packed(m)}
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in packed}
    return state | {f"{path}.weight": m.packed.dense() for path, m in packed.items()}


def put_packed(model: nn.Module, path: str, weight: PackedWeight) -> None:
    """Put `weight` in the place of the linear or embedding at `path` of a causal LM; where the head is tied to the token
    table, it reads the same tensors. Asserts that the shape fits."""
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        assert weight.shape == (module.out_features, module.in_features)
        model.set_submodule(path, PackedLinear(weight))
    else:
        assert weight.shape == (module.num_embeddings, module.embedding_dim)
        model.set_submodule(path, PackedEmbedding(weight, getattr(module, "scalar_embed_scale", None)))
        if path == "model.embed_tokens" and model.config.tie_word_embeddings:
            model.lm_head = PackedLinear(weight)


def describe_packed(model: nn.Module, geometry: ModelGeometry) -> dict | None:
    """A model's packed weights for a result's JSON: how many matrices are in each packing, and their bytes (a tied head counts
    once); and the bytes of weights that a decode step reads, packed and not. None where nothing is packed."""
    modules = [m for m in model.modules() if is_packed(m)]
    if not modules:
        return None
    packings: dict[str, dict[str, int]] = {}
    for weight in {m.packed.parts[0].data_ptr(): m.packed for m in modules}.values():
        entry = packings.setdefault(weight.packing.name, {"matrices": 0, "bytes": 0})
        entry["matrices"] += 1
        entry["bytes"] += weight.num_bytes
    item = model.model.norm.weight.dtype.itemsize
    saved = sum(m.in_features * m.out_features * item - m.packed.num_bytes for m in modules if isinstance(m, PackedLinear))
    return {"packings": packings, "step_weight_bytes": geometry.step_weight_bytes(item) - saved}
