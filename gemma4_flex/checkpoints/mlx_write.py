"""A text model as an MLX-LM checkpoint: the directory that `mlx_lm` loads, and that `mlx.load_mlx` reads back."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from gemma4_flex.checkpoints.files import INDEX, SINGLE
from gemma4_flex.checkpoints.mlx_recipe import Format, Recipe
from gemma4_flex.checkpoints.skeleton import CheckpointError, LoadedModel, weights_of
from gemma4_flex.config_fields import fields_of
from gemma4_flex.mlx_packing import quantize
from gemma4_flex.models.packed_modules import is_packed
from gemma4_flex.models.registry import ARCHITECTURES

SHARD = 4 << 30     # bytes of a file, unless a single weight is larger


class Written(NamedTuple):
    """What a checkpoint holds: what became of each matrix, and the bytes of all tensors."""

    plan: dict[str, Format | None]
    num_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """Matrices by format."""
        return dict(Counter("kept" if found is None else str(found) for found in self.plan.values()))


def write_mlx(path: Path, loaded: LoadedModel, recipe: Recipe, *, overwrite: bool = False, shard: int = SHARD,
              changed: Callable[[str, Tensor], Tensor] = lambda name, weight: weight) -> Written:
    """Writes `loaded`, whose weights are unquantised, as the MLX-LM checkpoint directory `path`: weights, config, tokenizer and
    generation config. `changed(name, weight)` may give other values for a weight, which are rounded to its dtype first.

    Raises CheckpointError, before anything is written, for a model whose weights are quantised, a recipe that does not fit it,
    and a directory that is in the way; and for a weight that is not finite, with nothing left of what was written.
    """
    if quantised := [name for name, module in loaded.model.named_modules() if is_packed(module)]:
        raise CheckpointError(f"{loaded.source} has {quantised[0]} quantised already: name the checkpoint it was made from")
    plan = recipe.plan(loaded.model)
    if path.exists() and not (overwrite and (path / "config.json").is_file()):
        raise CheckpointError(f"{path} exists" + (" and is no checkpoint: name another directory" if overwrite else
                                                  ": name another directory, or --overwrite to replace it"))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        num_bytes = _write_tensors(partial, loaded, plan, shard, changed)
        (partial / "config.json").write_text(json.dumps(config_of(loaded, recipe, plan), indent=2, sort_keys=True) + "\n")
        loaded.model.generation_config.save_pretrained(partial)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(partial)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(plan, num_bytes)


def config_of(loaded: LoadedModel, recipe: Recipe, plan: dict[str, Format | None]) -> dict[str, Any]:
    """What config.json says: the text model's fields in the form every reader takes, and the quantization block, twice, with an
    entry for each matrix that is not as the default has it; one whose rows groups of the default do not fill needs none."""
    fields = fields_of(loaded.model.config)
    block: dict[str, Any] = recipe.default._asdict()
    for path, found in plan.items():
        if found is None:
            width = loaded.model.get_submodule(path).weight.shape[1]
            block |= {} if width % recipe.default.group_size else {path: False}
        elif found != recipe.default:
            block[path] = found._asdict()
    fields |= {"architectures": [ARCHITECTURES[fields["model_type"]].model], "quantization": block, "quantization_config": block,
               "dtype": _dtype_name(loaded.model.model.norm.weight)}
    if loaded.stop_ids:
        fields["eos_token_id"] = sorted(loaded.stop_ids)
    return {name: value for name, value in fields.items() if name not in ("torch_dtype", "_name_or_path")}


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _tensors_of(name: str, weight: Tensor, found: Format | None, source: str) -> dict[str, Tensor]:
    """What a weight is in the file, by name."""
    if found is None:
        return {name: weight.contiguous()}
    if not weight.isfinite().all():
        raise CheckpointError(f"{source} has {name} with values that are not finite, which cannot be quantised")
    module = name.removesuffix(".weight")
    words, scales, biases = quantize(weight, **found._asdict())
    return {name: words, f"{module}.scales": scales, **({} if biases is None else {f"{module}.biases": biases})}


def _num_bytes(weight: Tensor, found: Format | None) -> int:
    if found is None:
        return weight.nbytes
    scale = 2 * weight.element_size() if found.mode == "affine" else 1
    return weight.numel() * found.bits // 8 + weight.numel() // found.group_size * scale


@torch.no_grad()
def _write_tensors(directory: Path, loaded: LoadedModel, plan: dict[str, Format | None], shard: int,
                   changed: Callable[[str, Tensor], Tensor]) -> int:
    """Writes the files, one in memory at a time, and for several their index. Returns the bytes of all tensors."""
    shards: list[list[str]] = [[]]
    weights, filled, total = weights_of(loaded.model), 0, 0
    for name, weight in weights.items():
        size = _num_bytes(weight, plan.get(name.removesuffix(".weight")))
        if shards[-1] and filled + size > shard:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            weight = weights[name]
            values = changed(name, weight).to(weight.dtype).cpu()
            tensors |= _tensors_of(name, values, plan.get(name.removesuffix(".weight")), loaded.source)
        save_file(tensors, directory / file, metadata={"format": "mlx"})
        index |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        (directory / INDEX).write_text(json.dumps(listed, indent=2) + "\n")
    return total
