"""A Hugging Face checkpoint, text-only or multimodal, local or on the hub, to a text model.

The tensors are read one by one from the safetensors files straight into an empty text model. What must be there is
known before anything is allocated: a missing, surplus or misshapen tensor is named in the error, towers are never read,
and the k/v tensors that some checkpoints carry for KV-shared layers are neither required nor used. Linears that are
packed in 4 bits are read by `prequantized`, where they were asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from gemma4_flex.checkpoints.files import INDEX, locate, open_tensors, read_json
from gemma4_flex.checkpoints.prequantized import check_dtype, check_packed, check_quantization, load_packed, packed_linears
from gemma4_flex.checkpoints.published import PUBLISHED
from gemma4_flex.checkpoints.skeleton import (
    CheckpointError,
    LoadedModel,
    materialize,
    meta_text_model,
    token_ids,
    weights_of,
)
from gemma4_flex.geometry import ModelGeometry

NAMES = (f"tiny, {', '.join(f'synthetic:{name}' for name in PUBLISHED)}, synthetic:<config.json>, a local Hugging Face or MLX "
         "directory, a .gguf file")
TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
SHARED_KV = re.compile(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
ROTARY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")      # tables that old Llama checkpoints hold
FLOATS = ("F64", "F32", "F16", "BF16")


def load_directory(path: Path, *, dtype: torch.dtype, device: str, ple: str = "device", source: str | None = None,
                   four_bit: bool = False) -> LoadedModel:
    """The text model of the Hugging Face checkpoint in directory `path`, cast to `dtype`, on `device`, its table of per-layer
    embeddings where `ple` says; with `four_bit`, of one whose linears bitsandbytes quantised.

    Raises UnsupportedModelError for a config that cannot be run, before any weight is read, and CheckpointError for
    files that do not make up the model.
    """
    config = read_json(path / "config.json")
    geometry = ModelGeometry.from_config(config)
    check_quantization(path, config, four_bit=four_bit)
    if four_bit:
        check_dtype(dtype)
    model = meta_text_model(config, dtype=dtype)
    geometry.assert_matches(model.model)
    where = locate(path)
    packed = packed_linears(path, model, where) if four_bit else {}
    wanted = {name: tensor for name, tensor in weights_of(model).items() if name.removesuffix(".weight") not in packed}
    parts = {name for names in packed.values() for name in names.values()}
    plan, skipped = plan_tensors(path, where.keys() - parts, geometry, wanted.keys())
    check_tensors(where, plan, wanted)
    if packed:
        check_packed(model, where, packed)
        load_packed(model, where, packed, device)
    materialize(model, device, ple)
    fill(weights_of(model), where, plan)
    if geometry.tied_head and "lm_head.weight" in where:
        check_tied_copy(model, where["lm_head.weight"])

    return with_tokenizer(path, config, model, geometry, source or str(path), skipped)


def with_tokenizer(path: Path, config: dict[str, Any], model: Any, geometry: ModelGeometry, source: str,
                   skipped: dict[str, int]) -> LoadedModel:
    """A filled model of the directory `path` with the tokenizer, the generation config and all the stop ids found there."""
    tokenizer = load_tokenizer(path)
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    stops = token_ids(model.config.eos_token_id) | token_ids(config.get("eos_token_id"))
    stops |= token_ids(generation.get("eos_token_id")) | tokenizer_stop_ids(tokenizer)
    attach_generation_config(model, generation, stops)
    return LoadedModel(model=model, tokenizer=tokenizer, geometry=geometry, source=source, stop_ids=stops, skipped=skipped)


def plan_tensors(
    path: Path, names: Collection[str], geometry: ModelGeometry, wanted: Collection[str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Which checkpoint tensor fills each wanted one, and how many are skipped by kind. Both key prefixes are read:
    `model.language_model.` of multimodal checkpoints and `model.` of text-only ones."""
    plan: dict[str, str] = {}
    skipped: Counter[str] = Counter()
    surplus = []
    for name in sorted(names):
        text_name = re.sub(r"^model\.language_model\.", "model.", name)
        shared = SHARED_KV.match(text_name)
        if name.startswith(TOWERS):
            skipped["towers"] += 1
        elif shared and geometry.first_shared <= int(shared[1]) < geometry.num_layers:
            skipped["shared_kv"] += 1
        elif ROTARY.fullmatch(name):
            skipped["rotary"] += 1
        elif name == "lm_head.weight" and geometry.tied_head:
            skipped["tied_head"] += 1
        elif text_name in wanted and text_name not in plan:
            plan[text_name] = name
        else:
            surplus.append(name)
    if missing := [name for name in wanted if name not in plan]:
        raise CheckpointError(f"{path} lacks {_some(missing)}, without which the model cannot be run")
    if surplus:
        raise CheckpointError(f"{path} holds {_some(surplus)}, which its config has no place for")
    return plan, dict(skipped)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")


def by_file(where: dict[str, Path], plan: dict[str, str]) -> list[tuple[Path, list[tuple[str, str]]]]:
    """The plan's (wanted, checkpoint) names, file by file, so that each file is opened once."""
    files: dict[Path, list[tuple[str, str]]] = {}
    for wanted, name in plan.items():
        files.setdefault(where[name], []).append((wanted, name))
    return list(files.items())


def check_tensors(where: dict[str, Path], plan: dict[str, str], wanted: dict[str, torch.Tensor]) -> None:
    """Raises CheckpointError unless every planned tensor has the wanted shape and a floating dtype, by the headers."""
    for file, pairs in by_file(where, plan):
        with open_tensors(file) as tensors:
            held = set(tensors.keys())
            for target, name in pairs:
                if name not in held:
                    raise CheckpointError(f"{file} lacks {name}, which {INDEX} lists: download the checkpoint again")
                header = tensors.get_slice(name)
                if header.get_dtype() not in FLOATS:
                    raise CheckpointError(f"{name} in {file} has dtype {header.get_dtype()}: "
                                          "quantised weights cannot be loaded, name the bf16 checkpoint")
                if tuple(header.get_shape()) != tuple(wanted[target].shape):
                    raise CheckpointError(f"{name} in {file} has shape {header.get_shape()} and the config "
                                          f"makes it {list(wanted[target].shape)}")


@torch.no_grad()
def fill(wanted: dict[str, torch.Tensor], where: dict[str, Path], plan: dict[str, str]) -> None:
    """Reads every planned tensor into its place, one at a time."""
    for file, pairs in by_file(where, plan):
        with open_tensors(file) as tensors:
            for target, name in pairs:
                wanted[target].copy_(tensors.get_tensor(name))


def check_tied_copy(model: Any, file: Path) -> None:
    """A tied checkpoint may carry its head once more; one that differs from the embedding is not tied at all."""
    with open_tensors(file) as tensors:
        head = tensors.get_tensor("lm_head.weight")
    embedding = model.model.embed_tokens.weight
    if head.shape != embedding.shape or not torch.equal(head.to(embedding.dtype), embedding.cpu()):
        raise CheckpointError(f"lm_head.weight in {file} differs from the embedding although the config ties them: "
                              "set tie_word_embeddings to false in config.json")


def load_tokenizer(path: Path) -> Any:
    """The checkpoint's tokenizer, or None where the directory has none."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:      # tokenizers raises bare Exceptions
        raise CheckpointError(f"the tokenizer in {path} cannot be read: {error}") from error


def tokenizer_stop_ids(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's end-of-sequence id, unless its name is not in the vocabulary and so means the unknown token."""
    if tokenizer is None or tokenizer.eos_token_id in (None, tokenizer.unk_token_id):
        return frozenset()
    return frozenset([tokenizer.eos_token_id])


def attach_generation_config(model: Any, generation: dict[str, Any], stop_ids: frozenset[int]) -> None:
    """Gives the model the checkpoint's generation config with the whole stop set, so that Hugging Face's own `generate`
    ends where the engine does."""
    from transformers import GenerationConfig

    settings = {"bos_token_id": model.config.bos_token_id, "pad_token_id": model.config.pad_token_id} | generation
    model.generation_config = GenerationConfig.from_dict(settings | {"eos_token_id": sorted(stop_ids) or None})
