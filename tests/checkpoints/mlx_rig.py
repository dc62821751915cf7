"""Checkpoints that mlx_lm itself writes of tiny models, what it computes with them, and the same weights dequantised by MLX."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from mlx_lm.utils import load_model, quantize_model, save_config, save_model
from safetensors.torch import save_file
from torch import Tensor, nn

from gemma4_flex.geometry import text_fields
from tests.mlx_arrays import torch_of
from tests.tiny import tiny_config, tiny_model

# groups of 64 fill every row: of 64, 128, 192 or 384 values
WIDE = {"hidden_size": 64, "intermediate_size": 64, "hidden_size_per_layer_input": 64}
PROMPT = [2, 17, 40, 9, 33, 5, 60, 21, 8, 44, 13, 52]


def wide_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model(seed, dtype, **WIDE)


def wide_config(**changed: Any) -> dict[str, Any]:
    fields = text_fields(tiny_config(**WIDE)) | {"architectures": ["Gemma4ForCausalLM"]} | changed
    return {name: value for name, value in fields.items() if not isinstance(value, torch.dtype)}


def save_hf(model: nn.Module, path: Path) -> Path:
    path.mkdir(parents=True)
    save_file({k: v.clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(wide_config()))
    return path


def convert(hf: Path, path: Path, group: int, bits: int, mode: str = "affine", how: Callable[[str], Any] | None = None) -> Path:
    """mlx_lm's own conversion; `how` gives, for a module's path, False, True or an override."""
    model, config = load_model(hf)
    predicate = how and (lambda module_path, module: how(module_path))
    model, config = quantize_model(model, config, group, bits, mode=mode, quant_predicate=predicate)
    save_model(path, model)
    save_config(config, path / "config.json")
    return path


def mlx_logits(path: Path, ids: list[int] = PROMPT) -> Tensor:
    """What mlx_lm computes with a checkpoint. [T, V]"""
    model, _ = load_model(path)
    return torch_of(model(mx.array([ids])).astype(mx.float32))[0]


def dequantized_model(path: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Hugging Face's model with what `mx.dequantize` makes of the tensors in a checkpoint of the text-only class."""
    tensors = mx.load(str(path / "model.safetensors"))
    block = json.loads((path / "config.json").read_text())["quantization"]
    model = wide_model(dtype=dtype)
    for name, target in model.state_dict().items():
        module = name.removesuffix(".weight")
        if name == "lm_head.weight":
            continue
        array = tensors[name]
        if f"{module}.scales" in tensors:
            format = block.get(module) or {}
            given = {field: format.get(field, block.get(field)) for field in ("group_size", "bits")}
            mode = format.get("mode", "affine" if f"{module}.biases" in tensors else block["mode"])
            array = mx.dequantize(array, tensors[f"{module}.scales"], tensors.get(f"{module}.biases"), mode=mode, **given)
        target.copy_(torch_of(array))
    return model


def renamed(path: Path, new: Path, name: Callable[[str], str], keys: Callable[[str], str] | None = None, **extra: Tensor) -> Path:
    """A copy of a checkpoint with its tensors under other names, and those in its quantization block by `keys`."""
    new.mkdir()
    tensors = {name(key): torch_of(value) for key, value in mx.load(str(path / "model.safetensors")).items()}
    save_file(tensors | extra, new / "model.safetensors", metadata={"format": "mlx"})
    config = json.loads((path / "config.json").read_text())
    block = {(keys or name)(key) if "." in key else key: value for key, value in config["quantization"].items()}
    (new / "config.json").write_text(json.dumps(config | {"quantization": block, "quantization_config": block}))
    return new
