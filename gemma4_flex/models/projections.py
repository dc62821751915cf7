"""The linears of a text model as weights to multiply by: a *view* of the caller's model, and linears that read one input as one.

A view is module objects of its own over the caller's tensors. Linears that read one input (q, k, v; gate, up) run as one
matmul where their weights lie side by side in memory (`lay_side_by_side`), packed ones too; a linear that is no matrix of ours
(bitsandbytes' 4-bit, with an adapter beside it) is called as the module it is.

T: tokens of a step.
"""
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence as Seq

import torch
from torch import Tensor, nn

from gemma4_flex.host_table import host_rows
from gemma4_flex.models.matmul import Weight, keep, linear
from gemma4_flex.models.packed_modules import PackedEmbedding, PackedLinear
from gemma4_flex.packed import PackedWeight

PLE_TABLE = "model.embed_tokens_per_layer"      # of a causal LM

# a weight, of one linear or of several side by side; or several that lie apart, a module to call where it is no matrix
Projection = Weight | tuple[Weight | nn.Module, ...]


def view_of(module: nn.Module) -> nn.Module:
    """A tree of new module objects over the same parameters and buffers."""
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {name: child and view_of(child) for name, child in module._modules.items()}
    return twin


def projection_groups(text: nn.Module) -> list[list[nn.Module]]:
    """Linears of a text model that read one input: q, k, v of each layer (q alone where it has no others), gate and up."""
    groups = []
    for layer in text.layers:
        attention = layer.self_attn
        groups.append([m for name in ("q_proj", "k_proj", "v_proj") if (m := getattr(attention, name, None)) is not None])
        groups.append([layer.mlp.gate_proj, layer.mlp.up_proj])
    return groups


@torch.no_grad()
def lay_side_by_side(text: nn.Module, movable: Collection[Tensor] | None = None) -> None:
    """Move the weights of each projection group into one storage, group by group: the parameters stay what they are, and
    one matmul can read them all. Needs memory for one group more. `movable`: the only weights that may be moved, where
    others belong to someone else; a group is moved whole or not at all."""
    for group in projection_groups(text):
        if isinstance(projection(*group), Weight):      # one alone, or together already
            continue
        if movable is not None and not all(any(m.weight is w for w in movable) for m in group):
            continue
        if all(_is_plain(m) for m in group):
            for module, rows in zip(group, _together([m.weight.detach() for m in group])):
                module.weight.data = rows
        elif packed := _same_packing(group):
            for n, parts in enumerate(zip(*(weight.parts for weight in packed))):
                for module, rows in zip(group, _together(parts)):
                    module._buffers[f"packed_{n}"] = rows


def _together(tensors: Seq[Tensor]) -> Seq[Tensor]:
    """Copies of `tensors` that follow each other in one storage."""
    return torch.cat(list(tensors)).split([len(tensor) for tensor in tensors])


def side_by_side(tensors: Seq[Tensor]) -> Tensor | None:
    """Tensors [out_i, ...] that follow each other in one storage, as one [sum of out_i, ...]; None where they do not."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        if (not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:] or tensor.storage_offset() != end
                or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()):
            return None
        end += tensor.numel()
    return first.detach().as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride())


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and module.weight.is_floating_point()


def _same_packing(modules: Seq[nn.Module]) -> list[PackedWeight] | None:
    """The packed weights of linears that are all packed one way, else None."""
    if not all(type(m) is PackedLinear for m in modules):
        return None
    weights = [m.packed for m in modules]
    return weights if len({(w.packing, w.dtype) for w in weights}) == 1 else None


def projection(*modules: nn.Module) -> Projection:
    """The linears `modules`, which read one input, as one."""
    if all(_is_plain(m) for m in modules) and (weight := side_by_side([m.weight for m in modules])) is not None:
        return weight
    if packed := _same_packing(modules):
        parts = tuple(side_by_side(parts) for parts in zip(*(weight.parts for weight in packed)))
        if all(part is not None for part in parts):
            return packed[0]._replace(parts=parts)
    return tuple(m.packed if type(m) is PackedLinear else m.weight.detach() if _is_plain(m) else m for m in modules)


def table(embedding: nn.Module) -> Weight:
    """The rows of an embedding."""
    return embedding.packed if isinstance(embedding, PackedEmbedding) else embedding.weight.detach()


def look_up(rows: Weight, ids: Tensor, *, in_host_memory: bool = False) -> Tensor:
    """Rows of a table by ids [T], on the device of the ids: [T, width]. `in_host_memory`: the table is not on it."""
    gather = host_rows if in_host_memory else Tensor.__getitem__
    return rows.rows(ids, gather) if isinstance(rows, PackedWeight) else gather(rows, ids)


def project(x: Tensor, weights: Projection, form: str = "library") -> Tensor:
    """[T, in] through one linear, or several that read it, their outputs joined: [T, sum of out]."""
    if isinstance(weights, Weight):
        return linear(x, weights, form)
    outputs = [linear(x, weight, form) if isinstance(weight, Weight) else weight(x) for weight in weights]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def gated(x: Tensor, gate_up: Projection, form: str, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate x) * up x, [T, MLP width]."""
    parts = gate_up.chunk(2) if isinstance(gate_up, Tensor) else gate_up.halves() if isinstance(gate_up, PackedWeight) else gate_up
    if form in ("sum", "native") and all(isinstance(part, Weight) for part in parts):
        gate, up = parts
        return keep(activation(linear(keep(x), gate, form)) * linear(x, up, form))
    gate, up = project(x, gate_up, form).chunk(2, dim=-1)
    return activation(gate) * up
