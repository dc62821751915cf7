"""A checkpoint in MLX-LM's format to a text model, its quantised matrices left in the bits they are in.

Beside each quantised `X.weight` lie `X.scales` and, in affine mode, `X.biases`. Which modules are quantised, and to how many
bits, is known by these tensors; what the `quantization` block of config.json says of a module must agree with them. Names of
tensors, and of modules in that block, have one of three prefixes: `model.`, `language_model.model.`, `model.language_model.`.
Norms are stored as Hugging Face stores them.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from gemma4_flex.checkpoints.files import INDEX, locate, open_tensors, read_json
from gemma4_flex.checkpoints.hf import check_tensors, check_tied_copy, fill, plan_tensors, with_tokenizer
from gemma4_flex.checkpoints.skeleton import (
    CheckpointError,
    LoadedModel,
    materialize,
    meta_text_model,
    place,
    weights_of,
)
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.mlx_packing import DEFAULTS, MODES, MlxPacking, packing_of
from gemma4_flex.models.packed_modules import put_packed
from gemma4_flex.packed import PackedWeight

BLOCKS = ("quantization", "quantization_config")        # of config.json, where MLX writes the same twice
FIELDS = ("mode", "bits", "group_size")
PREFIX = re.compile(r"(?:model\.)?language_model\.(?:model\.)?|model\.")
PARTS = ("weight", "scales", "biases")
SCALE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}


class Header(NamedTuple):
    """A tensor's, in safetensors' terms."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def is_mlx(path: Path, config: dict[str, Any]) -> bool:
    """Whether the directory at `path` is MLX's, by the `quantization` block of its config, which unlike Hugging Face's names no
    `quant_method`, or by the prefix of its tensors. An unquantised one of a text-only class is in Hugging Face's format too."""
    block = config.get("quantization")
    if block is not None and not (isinstance(block, dict) and ("quant_method" in block or "quant_algo" in block)):
        return True
    if config.get("quantization_config"):
        return False
    try:
        return any(name.startswith("language_model.") for name in locate(path))
    except CheckpointError:
        return False


def load_mlx(path: Path, *, dtype: torch.dtype, device: str, ple: str = "device", source: str | None = None) -> LoadedModel:
    """The text model of the MLX-LM checkpoint in directory `path`: unquantised weights and what quantised ones unpack to in
    `dtype`, on `device`, the table of per-layer embeddings where `ple` says.

    Raises UnsupportedModelError for a config that cannot be run, before any weight is read, and CheckpointError for
    files that do not make up the model.
    """
    config = read_json(path / "config.json")
    declared = declared_formats(path, config)
    config = {key: value for key, value in config.items() if key not in BLOCKS}
    geometry = ModelGeometry.from_config(config)
    model = meta_text_model(config, dtype=dtype)
    geometry.assert_matches(model.model)

    held = canonical_names(path, locate(path))
    packed = find_packed(path, model, headers_of(held), declared)
    parts = {f"{module}.{part}" for module in packed for part in PARTS}
    wanted = {name: tensor for name, tensor in weights_of(model).items() if name not in parts}
    plan, skipped = plan_tensors(path, held.keys() - parts, geometry, wanted.keys())
    plan = {target: held[name][0] for target, name in plan.items()}
    files = dict(held.values())
    check_tensors(files, plan, wanted)

    load_packed(model, held, packed, dtype, device, ple)
    materialize(model, device, ple)
    fill(weights_of(model), files, plan)
    if geometry.tied_head and held.get("lm_head.weight", ("",))[0] == "lm_head.weight":
        check_tied_copy(model, files["lm_head.weight"])

    return with_tokenizer(path, config, model, geometry, source or str(path), skipped)


def canonical(name: str) -> str:
    """`name` of a tensor or module under any of the prefixes, as the causal LM of the text model has it; a tower's, as
    multimodal checkpoints have it."""
    rest = PREFIX.sub("", name, count=1) if PREFIX.match(name) else name
    return rest if rest.split(".", 1)[0] == "lm_head" else f"model.{rest}"


def canonical_names(path: Path, where: dict[str, Path]) -> dict[str, tuple[str, Path]]:
    """Each tensor's name in the file, and the file, by its canonical name. Raises CheckpointError for one held twice."""
    held: dict[str, tuple[str, Path]] = {}
    for name, file in where.items():
        if (known := held.setdefault(canonical(name), (name, file)))[0] != name:
            raise CheckpointError(f"{path} holds {known[0]} and {name}, which are one tensor under two prefixes: save it once")
    return held


# ---- what config.json says of modules ------------------------------------------------------------------------------------

def declared_formats(path: Path, config: dict[str, Any]) -> dict[str, dict[str, Any] | bool]:
    """What the `quantization` block says of modules, by their canonical paths: False, True, or the fields it gives, where null
    is the mode's default. Raises CheckpointError for a block that is not MLX's, and for a module named twice."""
    block = config.get("quantization")
    if block is None:
        return {}
    if not isinstance(block, dict):
        raise CheckpointError(f"{path} has a quantization block that is no JSON object: download config.json again")
    _checked(path, "the default", {key: value for key, value in block.items() if key in FIELDS})
    declared: dict[str, dict[str, Any] | bool] = {}
    for key, entry in block.items():
        if isinstance(entry, (dict, bool)) and key not in FIELDS:
            found = entry if isinstance(entry, bool) else _checked(path, key, entry)
            if declared.setdefault(canonical(key), found) != found:
                raise CheckpointError(f"{path} says two things of {canonical(key)} in its quantization block: leave one")
        elif "." in key:
            raise CheckpointError(f"{path} has {entry!r} for {key} in its quantization block: give an object, true or false")
    return declared


def _checked(path: Path, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The fields that an entry gives; of a mode, its own bits and group where they are null."""
    mode = entry.get("mode")
    if mode is not None and (not isinstance(mode, str) or mode not in MODES):
        raise CheckpointError(f"{path} has mode {mode!r} for {key} in its quantization block: it is none of {', '.join(MODES)}")
    for field in ("bits", "group_size"):
        if (value := entry.get(field)) is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f"{path} has {field} {value!r} for {key} in its quantization block: give a whole number")
    defaults = dict(zip(("bits", "group_size"), DEFAULTS[mode or "affine"]))
    given = {field: defaults.get(field) if value is None else value for field, value in entry.items() if field in FIELDS}
    return {field: value for field, value in given.items() if value is not None}


# ---- what the files hold -------------------------------------------------------------------------------------------------

def headers_of(held: dict[str, tuple[str, Path]]) -> dict[str, Header]:
    """Each tensor's header, by canonical name. Raises CheckpointError for one that is not in the file it is listed for."""
    by_file: dict[Path, dict[str, str]] = {}
    for name, (stored, file) in held.items():
        by_file.setdefault(file, {})[stored] = name
    headers = {}
    for file, names in by_file.items():
        with open_tensors(file) as tensors:
            if absent := sorted(names.keys() - set(tensors.keys())):
                raise CheckpointError(f"{file} lacks {absent[0]}, which {INDEX} lists: download the checkpoint again")
            for stored, name in names.items():
                header = tensors.get_slice(stored)
                headers[name] = Header(header.get_dtype(), tuple(header.get_shape()))
    return headers


def find_packed(path: Path, model: nn.Module, headers: dict[str, Header], declared: dict[str, dict[str, Any] | bool]
                ) -> dict[str, MlxPacking]:
    """The packing of each quantised linear and table of a meta model, by its path.

    Raises CheckpointError where tensors are missing, where their shapes and dtypes are those of no packing or not of the
    module's, and where config.json says something else of them.
    """
    packed = {}
    for module_path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)) or (module_path == "lm_head" and model.config.tie_word_embeddings):
            continue
        entry = declared.get(module_path)
        weight, scales, biases = (headers.get(f"{module_path}.{part}") for part in PARTS)
        if scales is None:
            if entry is True or isinstance(entry, dict) or (weight and weight.dtype == "U32"):
                raise CheckpointError(f"{path} lacks {module_path}.scales, without which its weight cannot be unpacked: download "
                                      "the checkpoint again")
            continue
        if weight is None:
            raise CheckpointError(f"{path} lacks {module_path}.weight, which {module_path}.scales are for: download the "
                                  "checkpoint again")
        if entry is False:
            raise CheckpointError(f"{path} holds {module_path}.scales although its config.json has the module unquantised: one "
                                  "of the two is of another checkpoint")
        packing = _packing(path, module_path, tuple(module.weight.shape), (weight, scales, biases))
        for field, value in entry.items() if isinstance(entry, dict) else ():
            if (found := getattr(packing, field)) != value:
                raise CheckpointError(f"{path} holds {module_path} with {field} {found} although its config.json says {value}: "
                                      "one of the two is of another checkpoint")
        packed[module_path] = packing
    return packed


def _packing(path: Path, module: str, shape: tuple[int, int], parts: tuple[Header, Header, Header | None]) -> MlxPacking:
    """The packing by shapes: the row's words give the bits, its scales the group, and their dtype the mode."""
    (weight, scales, biases), (rows, width) = parts, shape
    problem = f"{path} holds {module} as {weight} with scales {scales}"
    if weight.dtype != "U32" or scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{problem}: words are U32, scales F32, F16, BF16 or U8")
    if not len(weight.shape) == len(scales.shape) == 2 or not weight.shape[0] == scales.shape[0] == rows or not scales.shape[1]:
        raise CheckpointError(f"{problem} and the config makes it {list(shape)}")
    bits, odd_bits = divmod(32 * weight.shape[1], width)
    group, odd_group = divmod(width, scales.shape[1])
    if odd_bits or odd_group:
        raise CheckpointError(f"{problem}, which is no whole number of bits or no whole group for the {width} values of a row")
    fixed = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
    mode = "affine" if scales.dtype != "U8" else fixed.get((bits, group), "mxfp4")
    try:
        packing = packing_of(width, mode=mode, bits=bits, group_size=group, scale_dtype=SCALE_DTYPES[scales.dtype])
    except ValueError as error:
        raise CheckpointError(f"{problem}, which cannot be read: {error}") from None
    if biases != (scales if mode == "affine" else None):
        raise CheckpointError(f"{problem} and {biases or 'no'} biases: affine has biases like its scales, the other modes none")
    return packing


@torch.no_grad()
def load_packed(model: nn.Module, held: dict[str, tuple[str, Path]], packed: dict[str, MlxPacking], dtype: torch.dtype,
                device: str, ple: str) -> None:
    """Put packed modules in the place of a meta model's, one at a time."""
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_tensors(file)) for file in {file for _, file in held.values()}}
        for module, packing in packed.items():
            names = [f"{module}.{part}" for part in ("weight", "scales", *(["biases"] if packing.mode == "affine" else []))]
            tensors = [opened[file].get_tensor(name) for name, file in map(held.__getitem__, names)]
            parts = tuple(place(module, part, device, ple) for part in packing.split(*tensors))
            put_packed(model, module, PackedWeight(parts, packing, dtype))
