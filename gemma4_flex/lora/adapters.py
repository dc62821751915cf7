"""LoRA adapters: PEFT directories and live PEFT models, as plain pairs of matrices by module path.

A *path* names a linear of the text model from the causal LM down: `model.layers.3.mlp.up_proj`. Adapters trained on the
multimodal class (`model.language_model.layers...`) and on the text class use the same paths here.
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.packed_modules import unpacked, weight_of

# the text linears of a layer, and of an E-series layer or prelude, by the last component of their path
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
           "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection")
ALL_LINEAR = "all-linear"
REFUSED = {      # fields of adapter_config.json whose use would change what a linear computes beyond W + scaling * B A
    "use_dora": "DoRA", "lora_bias": "a LoRA bias", "modules_to_save": "fully trained modules (modules_to_save)",
    "trainable_token_indices": "trainable tokens", "layer_replication": "layer replication", "use_qalora": "QALoRA",
    "target_parameters": "LoRA on bare parameters (target_parameters)", "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA", "arrow_config": "Arrow routing", "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "kasa_config": "KaSA", "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA"}
TIED = ("lm_head", "embed_tokens", "embed_tokens_per_layer")
_PREFIX = re.compile(r"^(base_model\.model\.)?(model\.)?(language_model\.)?(model\.)?")
_KEY = re.compile(r"(.+)\.lora_(A|B|magnitude_vector)(?:\.(?!weight$)[^.]+)?(?:\.weight)?$")


class AdapterError(ValueError):
    """An adapter that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Pair:
    """One module's adapter: its delta is `scaling * up @ down`."""
    down: Tensor          # A, [rank, in]
    up: Tensor            # B, [out, rank]
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """Pairs by path. `inert` names modules the adapter holds but the model has not: k/v of layers that share theirs."""
    name: str
    pairs: dict[str, Pair]
    inert: tuple[str, ...] = ()


def module_path(name: str) -> str:
    """`name` of a module or key under any of PEFT's and Hugging Face's prefixes as a path of the text causal LM."""
    rest = _PREFIX.sub("", name)
    return rest if rest.startswith("lm_head") else f"model.{rest}"


def linears_of(model: nn.Module) -> dict[str, nn.Module]:
    """The text linears of a causal LM that an adapter may change, by path, in the model's order."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in LINEARS}


def choose_targets(model: nn.Module, targets: str | Iterable[str]) -> list[str]:
    """Paths of `model` that `targets` name: "all-linear", or whole path components such as `q_proj` or
    `layers.3.mlp.up_proj`. Raises AdapterError for a name that matches nothing."""
    found = linears_of(model)
    if targets == ALL_LINEAR:
        return list(found)
    names = [targets] if isinstance(targets, str) else list(targets)
    chosen = {name: {p for p in found if f".{p}".endswith(f".{name}")} for name in names}
    if unknown := [name for name, paths in chosen.items() if not paths]:
        raise AdapterError(f"no linear of the text model is called {', '.join(unknown)}: "
                           f"use {ALL_LINEAR} or names among {', '.join(LINEARS)}.")
    return [p for p in found if any(p in paths for paths in chosen.values())]


def load_adapter(directory: str | Path, geometry: ModelGeometry) -> Adapter:
    """Read a PEFT LoRA directory. Raises AdapterError when it is broken or holds what cannot be merged exactly."""
    directory = Path(directory)
    config = _read_config(directory)
    tensors = _read_tensors(directory)
    modules: dict[str, dict[str, Tensor]] = {}
    names: dict[str, str] = {}        # what PEFT called the module: a pattern is written for that name
    for key, tensor in tensors.items():
        if tied := [part for part in key.split(".") if part in TIED]:
            why = ("the head and the embedding are one tied table, so a merge into one would change the other"
                   if geometry.tied_head else "only linears of the layers are merged")
            raise AdapterError(f"{directory} adapts {tied[0]}: {why}. Leave it out of target_modules.")
        match = _KEY.match(key)
        if match is None:
            raise AdapterError(f"{directory}: {key} is not a LoRA tensor of a linear, and this engine would have to drop it.")
        path = module_path(match[1])
        if match[2] in modules.setdefault(path, {}):
            raise AdapterError(f"{directory} holds lora_{match[2]} of {path} twice, under two prefixes or adapter names: "
                               "save one adapter alone.")
        modules[path][match[2]] = tensor
        names[path] = match[1].removeprefix("base_model.model.")
    pairs, inert = {}, []
    for path, parts in modules.items():
        _refuse_parts(directory, path, parts)
        if _is_shared_kv(path, geometry):
            inert.append(path)
            continue
        pairs[path] = Pair(parts["A"], parts["B"], _scaling(config, names[path], parts["A"].shape[0]))
    return Adapter(str(directory), pairs, tuple(inert))


def adapter_of(peft_model: nn.Module, adapter_name: str = "default") -> Adapter:
    """The pairs a live PEFT model trains, by reference: no tensor is copied. Raises AdapterError as `load_adapter` does."""
    from peft.tuners.lora import LoraLayer
    config = peft_model.peft_config[adapter_name]
    _refuse_config(f"adapter {adapter_name!r}", config.to_dict())
    pairs = {}
    for name, module in peft_model.named_modules():
        if not isinstance(module, LoraLayer) or adapter_name not in module.scaling:
            continue
        path = module_path(name)
        if adapter_name not in module.lora_A or path.rpartition(".")[2] in TIED:
            raise AdapterError(f"adapter {adapter_name!r} adapts {path}, which is not a linear with a weight of its own: "
                               "leave it out of target_modules.")
        pairs[path] = Pair(module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight, module.scaling[adapter_name])
    return Adapter(adapter_name, pairs)


def random_adapter(model: nn.Module, targets: str | Iterable[str], *, rank: int, alpha: float, strength: float,
                   seed: int) -> Adapter:
    """A seeded adapter of `model`'s linears with neither matrix zero: each delta has `strength` times its weight's RMS."""
    generator = torch.Generator().manual_seed(seed)
    linears, pairs = linears_of(model), {}
    for path in choose_targets(model, targets):
        weight = unpacked(weight_of(linears[path])).detach()
        down = torch.randn(rank, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
        up = torch.randn(weight.shape[0], rank, generator=generator)
        scaling = alpha / rank
        delta_rms = scaling * (rank / weight.shape[1]) ** 0.5
        pairs[path] = Pair(down, up * (strength * weight.float().pow(2).mean().sqrt().item() / delta_rms), scaling)
    return Adapter(f"seed {seed}", pairs)


def save_adapter(adapter: Adapter, directory: str | Path, *, base: str) -> None:
    """Write `adapter` as a PEFT directory for the text class."""
    from peft import LoraConfig
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    ranks = {path: pair.down.shape[0] for path, pair in adapter.pairs.items()}
    rank = max(ranks.values())
    scaling = next(iter(adapter.pairs.values())).scaling
    config = LoraConfig(
        base_model_name_or_path=base, task_type="CAUSAL_LM", r=rank, lora_alpha=scaling * rank,
        target_modules=sorted(adapter.pairs),
        rank_pattern={path: r for path, r in ranks.items() if r != rank},
        alpha_pattern={path: pair.scaling * ranks[path] for path, pair in adapter.pairs.items()
                       if pair.scaling * ranks[path] != scaling * rank})
    tensors = {f"base_model.model.{path}.lora_{side}.weight": matrix.detach().contiguous()
               for path, pair in adapter.pairs.items() for side, matrix in (("A", pair.down), ("B", pair.up))}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.inference_mode = True
    config.save_pretrained(str(directory))


def bind(adapter: Adapter, weights: dict[str, tuple[int, ...]]) -> None:
    """Check an adapter against the linears it is for, [out, in] shapes by path. Raises AdapterError when it binds none of
    them, leaves a pair over, or a shape differs."""
    bound = [path for path in adapter.pairs if path in weights]
    if not bound:
        raise AdapterError(f"adapter {adapter.name} binds no module of this model: it names {_listed(adapter.pairs)}.")
    if left := [path for path in adapter.pairs if path not in weights]:
        raise AdapterError(f"adapter {adapter.name} binds {len(bound)} modules but not {_listed(left)}: "
                           "it was trained on another model or on modules that are no targets here.")
    for path, pair in adapter.pairs.items():
        shape = (pair.up.shape[0], pair.down.shape[1])
        if shape != tuple(weights[path]) or pair.up.shape[1] != pair.down.shape[0]:
            raise AdapterError(f"adapter {adapter.name} is for another base: {path} is {list(weights[path])} here and "
                               f"B {list(pair.up.shape)} x A {list(pair.down.shape)} there.")


def _listed(paths: Iterable[str], most: int = 4) -> str:
    paths = list(paths)
    return ", ".join(paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _read_config(directory: Path) -> dict:
    file = directory / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
    except OSError:
        raise AdapterError(f"{directory} is no PEFT adapter: adapter_config.json is missing there.") from None
    except json.JSONDecodeError as error:
        raise AdapterError(f"{file} is not JSON ({error}): the adapter was half written, save it again.") from None
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 0), (int, float)):
        raise AdapterError(f"{file} is no adapter config: it needs lora_alpha, a number; save the adapter again.")
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{directory} holds a {config.get('peft_type')} adapter: only LoRA can be merged.")
    _refuse_config(str(directory), config)
    if "lora_alpha" not in config:
        raise AdapterError(f"{file} is no adapter config: it needs lora_alpha, a number; save the adapter again.")
    return config


def _refuse_config(name: str, config: dict) -> None:
    used = [text for field, text in REFUSED.items() if config.get(field)]
    if (config.get("bias") or "none") != "none":
        used.append(f"trained biases (bias={config['bias']!r})")
    if used:
        raise AdapterError(f"{name} uses {' and '.join(used)}, which a merged W + B A cannot hold: train plain LoRA.")


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    file = directory / "adapter_model.safetensors"
    if not file.exists():
        raise AdapterError(f"{directory} is no whole adapter: adapter_model.safetensors is missing; save the adapter again.")
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}      # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} cannot be read ({error}): it was half written, save the adapter again.") from None


def _refuse_parts(directory: Path, path: str, parts: dict[str, Tensor]) -> None:
    if set(parts) != {"A", "B"}:
        raise AdapterError(f"{directory}: {path} holds {', '.join(sorted(parts))} where A and B are wanted: "
                           "save the adapter again.")
    for side, tensor in parts.items():
        if tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.numel():
            raise AdapterError(f"{directory}: lora_{side} of {path} is {tensor.dtype} {list(tensor.shape)} and no matrix of "
                               "floats: save the adapter again.")


def _is_shared_kv(path: str, geometry: ModelGeometry) -> bool:
    match = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_proj", path)
    return bool(match) and int(match[1]) < geometry.num_layers and not geometry.layers[int(match[1])].owns_kv


def _scaling(config: dict, name: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) with rsLoRA; `alpha_pattern` by PEFT's own rule for the name it trained under."""
    from peft.utils.other import get_pattern_key
    pattern = config.get("alpha_pattern") or {}
    try:
        alpha = pattern.get(get_pattern_key(pattern.keys(), name), config["lora_alpha"])
    except (AttributeError, re.error) as error:
        raise AdapterError(f"alpha_pattern={pattern!r} of the adapter cannot be read ({error}): save the adapter again.") from None
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def is_finite(pair: Pair) -> bool:
    """Whether both matrices hold numbers only."""
    return bool(torch.isfinite(pair.down).all()) and bool(torch.isfinite(pair.up).all())
