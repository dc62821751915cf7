"""A checkpoint that bitsandbytes quantised to 4 bits before it was saved.

Beside each packed `X.weight` lie `X.weight.absmax`, `X.weight.quant_map`, a small JSON in `X.weight.quant_state...` and,
where the scales are quantised too, `X.weight.nested_absmax` and `X.weight.nested_quant_map`. Which linears are packed is
the checkpoint's choice; nothing that it lacks is made up from anything else.
"""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemma4_flex.checkpoints.files import open_tensors
from gemma4_flex.checkpoints.four_bit import COMPUTE_DTYPE, QUANT_TYPE, check_width, linear_4bit, require_bitsandbytes
from gemma4_flex.checkpoints.skeleton import CheckpointError

BLOB = f"quant_state.bitsandbytes__{QUANT_TYPE}"
PARTS = ("weight", "absmax", "quant_map", BLOB)
NESTED = ("nested_absmax", "nested_quant_map")
BLOB_FIELDS = ("quant_type", "blocksize", "dtype", "shape")
BLOB_NESTED = ("nested_blocksize", "nested_dtype", "nested_offset")


def check_quantization(source: str | Path, config: dict[str, Any], *, four_bit: bool) -> None:
    """Raises CheckpointError unless config.json says what was asked for: bitsandbytes' 4-bit weights (`four_bit`), or
    weights that are not quantised."""
    key = next((key for key in ("quantization_config", "quantization") if config.get(key)), None)
    quant = config.get(key) or {}
    if not isinstance(quant, dict):
        raise CheckpointError(f"{source} has a {key} in config.json that is no JSON object: download the checkpoint again")
    is_ours = quant.get("quant_method") == "bitsandbytes" and bool(quant.get("load_in_4bit", quant.get("_load_in_4bit")))
    if not four_bit and key:
        other = "load it as one (--model_name_4bit, four_bit=True) or " if is_ours else ""
        raise CheckpointError(f"{source} is a quantised checkpoint ({key} in config.json): "
                              f"{other}name the bf16 checkpoint it was made from")
    if four_bit and not key:
        raise CheckpointError(f"{source} is not quantised, its config.json has no quantization_config: name a checkpoint that "
                              "bitsandbytes quantised to 4 bits, or quantise this one as it loads (--load_in_4bit)")
    if four_bit and not is_ours:
        raise CheckpointError(f"{source} is quantised by {quant.get('quant_method', 'an unnamed method')}, not to 4 bits by "
                              "bitsandbytes, which is all that can be read packed")
    wanted = {"bnb_4bit_quant_type": QUANT_TYPE, "bnb_4bit_quant_storage": "uint8"}
    for field, value in wanted.items() if four_bit else ():
        if quant.get(field, value) != value:
            raise CheckpointError(f"{source} has {field}={quant[field]!r} and only {value!r} can be read")


def packed_linears(path: Path, model: nn.Module, where: dict[str, Path]) -> dict[str, dict[str, str]]:
    """The checkpoint's name of each part of each packed linear, by the linear's path in `model`.

    Raises CheckpointError for a part that is missing or unknown, a packed head, and where nothing is packed.
    """
    modules, packed = dict(model.named_modules()), {}
    for name in where:
        match = re.fullmatch(r"(.+)\.weight\.(.+)", name)
        target = match and re.sub(r"^model\.language_model\.", "model.", match[1])
        if match and isinstance(modules.get(target), nn.Linear):
            packed.setdefault(target, {"weight": f"{match[1]}.weight"})[match[2]] = name
    if not packed:
        raise CheckpointError(f"{path} holds no 4-bit weight although its config.json says so: download it again")
    if "lm_head" in packed:
        raise CheckpointError(f"{path} has its head in 4 bits, which the engine does not run: keep lm_head as it is")
    for target, names in packed.items():
        wanted = PARTS + (NESTED if any(part in names for part in NESTED) else ())
        lacking = [part for part in wanted if part not in names or names[part] not in where]
        if lacking:
            name = names["weight"] if lacking[0] == "weight" else f"{names['weight']}.{lacking[0]}"
            raise CheckpointError(f"{path} lacks {name}, without which {target} cannot be decoded")
        if surplus := sorted(names.keys() - set(wanted)):
            raise CheckpointError(f"{path} holds {names[surplus[0]]}, which is no part of an {QUANT_TYPE.upper()} weight")
    return packed


def check_packed(model: nn.Module, where: dict[str, Path], packed: dict[str, dict[str, str]]) -> None:
    """Raises CheckpointError unless every packed linear decodes to the shape the config gives it, by headers and blobs."""
    with ExitStack() as stack:
        files = _open_all(stack, where, packed)
        for path, names in packed.items():
            linear = model.get_submodule(path)
            blob = json.loads(bytes(files[names[BLOB]].get_tensor(names[BLOB]).tolist()))
            nested = NESTED[0] in names
            if lacking := [f for f in BLOB_FIELDS + (BLOB_NESTED if nested else ()) if f not in blob]:
                raise CheckpointError(f"{names[BLOB]} lacks {', '.join(lacking)}: {path} cannot be decoded")
            shape = (linear.out_features, linear.in_features)
            if tuple(blob["shape"]) != shape or blob["quant_type"] != QUANT_TYPE:
                raise CheckpointError(f"{names['weight']} is {blob['quant_type']} of shape {blob['shape']} and the config makes "
                                      f"it {QUANT_TYPE} of shape {list(shape)}")
            check_width(path, linear.in_features, blob["blocksize"])
            count = shape[0] * shape[1]
            for part, dtype, size in (("weight", "U8", count // 2),
                                      ("absmax", "U8" if nested else "F32", count // blob["blocksize"])):
                header = files[names[part]].get_slice(names[part])
                held = torch.Size(header.get_shape()).numel()
                if header.get_dtype() != dtype or held != size:
                    raise CheckpointError(f"{names[part]} holds {held} values of {header.get_dtype()} and {path} needs {size} "
                                          f"of {dtype}")


@torch.no_grad()
def load_packed(model: nn.Module, where: dict[str, Path], packed: dict[str, dict[str, str]], device: str) -> None:
    """Put 4-bit linears on `device` in the place of the meta model's, computing in bf16 whatever the checkpoint says."""
    bnb = require_bitsandbytes()
    with ExitStack() as stack:
        files = _open_all(stack, where, packed)
        for path, names in packed.items():
            parts = {part: files[name].get_tensor(name) for part, name in names.items()}
            weight = bnb.nn.Params4bit.from_prequantized(parts.pop("weight"), parts, requires_grad=False, device=device)
            model.set_submodule(path, linear_4bit(model.get_submodule(path), weight))
    model.is_loaded_in_4bit = True


def _open_all(stack: ExitStack, where: dict[str, Path], packed: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The opened file of each part, each file once."""
    names = [name for parts in packed.values() for name in parts.values()]
    opened = {file: stack.enter_context(open_tensors(file)) for file in {where[name] for name in names}}
    return {name: opened[where[name]] for name in names}


def check_dtype(dtype: torch.dtype) -> None:
    """Raises CheckpointError unless the rest of the model is to be in the dtype that 4-bit linears compute in."""
    if dtype != COMPUTE_DTYPE:
        raise CheckpointError(f"4-bit weights compute in bfloat16 and the rest of the model was asked for in {dtype}: "
                              "use dtype bfloat16")
