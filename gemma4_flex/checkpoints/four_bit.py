"""4-bit weights: which linears of a text model are NF4, by an explicit plan, and what holds them.

The linears are bitsandbytes' own; what this project adds is the plan, a compute dtype that is always stated, and weights
that stay where they are: quantisation state is among a model's buffers, and nothing is repacked at the first forward.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.packed_modules import is_packed

# by the last component of a module's path, compared whole: `gate_proj` is not `per_layer_input_gate`
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KEPT = ("embed_tokens", "embed_tokens_per_layer", "lm_head",
        "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")     # and every norm
QUANT_TYPE, BLOCK = "nf4", 64
COMPUTE_DTYPE = torch.bfloat16      # never left to a default: Gemma's activations overflow float16 (bitsandbytes#1572)


@dataclass(frozen=True)
class FourBitPlan:
    """Paths of the modules with a weight of their own, in the model's order: those in 4 bits, and those left as they are."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]

    def __str__(self) -> str:
        def counted(paths: Iterable[str]) -> str:
            names = (path.rpartition(".")[2] for path in paths)
            return ", ".join(f"{name} {n}" for name, n in Counter("norms" if x.endswith("norm") else x for x in names).items())
        return (f"4-bit plan: {QUANT_TYPE.upper()}, computed in {str(COMPUTE_DTYPE).removeprefix('torch.')}\n"
                f"  quantised: {counted(self.quantized)}\n  kept: {counted(self.kept)}")


def require_bitsandbytes() -> Any:
    """The bitsandbytes package. Raises CheckpointError where it cannot be imported."""
    # it warns of a missing kernel for weights repacked for the CPU, which are never made here
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise CheckpointError(f"4-bit weights need bitsandbytes, which cannot be imported here ({error}): "
                              "pip install bitsandbytes") from error
    return bitsandbytes


def is_4bit(weight: Tensor | None) -> bool:
    """Whether this is the weight of a 4-bit linear: packed values, with a quantisation state."""
    return getattr(weight, "quant_state", None) is not None


def plan_4bit(model: nn.Module) -> FourBitPlan:
    """What `quantize_4bit` will do to a causal LM. Raises CheckpointError for a linear the plan says nothing of, and for weights
    that are packed already."""
    if already := next((m.packing.name for m in model.modules() if is_packed(m)), None):
        raise CheckpointError(f"the checkpoint's weights are quantised already ({already}) and can't be quantised to 4 bits anew: "
                              "leave out --load_in_4bit, or name a checkpoint in bfloat16")
    found: dict[bool, list[str]] = {True: [], False: []}
    for path, module in _weighted(model):
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear) and name not in (*QUANTIZED, *KEPT):
            raise CheckpointError(f"the 4-bit plan does not say what becomes of {path}: only models whose linears are "
                                  f"{', '.join((*QUANTIZED, *KEPT[2:]))} can be quantised")
        found[name in QUANTIZED].append(path)
    return FourBitPlan(tuple(found[True]), tuple(found[False]))


def layout_4bit(model: nn.Module) -> FourBitPlan:
    """What a causal LM holds in 4 bits, whoever quantised it."""
    modules = dict(_weighted(model))
    quantized = tuple(path for path, module in modules.items() if is_4bit(module.weight))
    return FourBitPlan(quantized, tuple(path for path in modules if path not in quantized))


def _weighted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, m) for path, m in model.named_modules() if m._parameters.get("weight") is not None)


@torch.no_grad()
def quantize_4bit(model: nn.Module, *, double_quant: bool = False) -> nn.Module:
    """`model`, a bf16 causal LM on its device, with the plan's linears replaced in place by NF4 ones.

    Linear by linear, so that no more than one is there twice. `double_quant` also quantises the scales, to 8 bits.
    Raises CheckpointError, with nothing changed, for another dtype, for widths that hold no whole blocks, for linears the
    plan does not know, and without bitsandbytes.
    """
    bnb, plan = require_bitsandbytes(), plan_4bit(model)
    if other := [(n, p.dtype) for n, p in model.named_parameters() if p.dtype != COMPUTE_DTYPE]:
        raise CheckpointError(f"4-bit weights are made of a bfloat16 model and {other[0][0]} is {other[0][1]}: "
                              "load it with dtype bfloat16")
    for path in plan.quantized:
        check_width(path, model.get_submodule(path).in_features, BLOCK)
    for path in plan.quantized:
        linear = model.get_submodule(path)
        weight = bnb.nn.Params4bit(linear.weight.detach(), requires_grad=False, blocksize=BLOCK, quant_type=QUANT_TYPE,
                                   compress_statistics=double_quant, quant_storage=torch.uint8)
        model.set_submodule(path, linear_4bit(linear, weight.to(linear.weight.device)))     # `to` is what quantises
    model.is_loaded_in_4bit = True      # by this PEFT knows that its layers go around 4-bit linears
    return model


def check_width(path: str, width: int, block: int) -> None:
    """Raises CheckpointError unless each row holds whole blocks: bitsandbytes' CPU kernel decodes some others wrongly."""
    if width % block:
        raise CheckpointError(f"{path} has {width} inputs, no multiple of the {block} values that share a scale: "
                              "it cannot be kept in 4 bits")


def linear_4bit(like: nn.Linear, weight: nn.Parameter) -> nn.Module:
    """A bitsandbytes linear of the widths of `like`, around a quantised `weight` (a Params4bit with its state)."""
    linear = require_bitsandbytes().nn.Linear4bit(
        like.in_features, like.out_features, bias=False, compute_dtype=COMPUTE_DTYPE, quant_type=weight.quant_type,
        compress_statistics=weight.quant_state.nested, quant_storage=torch.uint8, device="meta")
    # on a CPU with AVX512-BF16 the first forward would move the weight to another storage and round its scales to bf16
    linear.support_avx512bf16_for_cpu = False
    put_weight(linear, weight)
    return linear.eval()


def put_weight(linear: nn.Module, weight: nn.Parameter) -> None:
    """Give a 4-bit linear its weight. The state's tensors become buffers too: what lists, hashes, counts or watches a
    model's tensors then sees them."""
    weight.quant_state.dtype = COMPUTE_DTYPE
    linear._parameters["weight"], linear.quant_state = weight, weight.quant_state
    for name, tensor in state_tensors(weight).items():
        linear.register_buffer(name, tensor, persistent=False)


def state_tensors(weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a 4-bit weight's quantisation state, by the names that checkpoints give them."""
    state = weight.quant_state
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code, "nested_offset": state.offset}
    return found


def num_bytes(weight: Tensor) -> int:
    """Bytes of a weight, with its quantisation state where it has one."""
    return weight.nbytes + (sum(t.nbytes for t in state_tensors(weight).values()) if is_4bit(weight) else 0)


@torch.no_grad()
def dequantized(weight: Tensor) -> Tensor:
    """A linear's weight [out, in] in fp32, decoded without rounding where it is 4-bit."""
    if not is_4bit(weight):
        return weight.detach().float()
    state = copy.copy(weight.quant_state)
    state.dtype = torch.float
    return require_bitsandbytes().functional.dequantize_4bit(weight.detach(), state)


def step_weight_bytes(model: nn.Module, geometry: ModelGeometry) -> int:
    """`geometry.step_weight_bytes` for a bf16 model with 4-bit linears: packed values and state in the place of theirs."""
    packed = [p for p in model.parameters() if is_4bit(p)]
    return geometry.step_weight_bytes(COMPUTE_DTYPE.itemsize) - sum(
        p.quant_state.shape.numel() * COMPUTE_DTYPE.itemsize - num_bytes(p) for p in packed)


def describe_4bit(model: nn.Module) -> dict:
    """A model's 4-bit weights for a result's JSON."""
    layout, packed = layout_4bit(model), next(p for p in model.parameters() if is_4bit(p))
    return {"quant_type": packed.quant_type, "blocksize": packed.blocksize, "double_quant": packed.quant_state.nested,
            "compute_dtype": str(COMPUTE_DTYPE).removeprefix("torch."), "quantized": list(layout.quantized),
            "kept": list(layout.kept), "step_weight_bytes": step_weight_bytes(model, ModelGeometry.from_config(model.config))}
