"""An empty text model on its target device: built without weights, every weight allocated once, every table right.

A text model constructed on the meta device leaves undone what no checkpoint holds: the rotary tables and Gemma-4's embedding
scales. They are made here, and a table that a newer transformers adds is an error rather than noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemma4_flex.config_fields import fields_of
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models.projections import PLE_TABLE
from gemma4_flex.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MINIMUM_TRANSFORMERS = (5, 5, 2)


class CheckpointError(ValueError):
    """A model that cannot be loaded as named; the message says what to do instead."""


@dataclass(frozen=True)
class LoadedModel:
    """A text model ready to run.

    `model` has its text model at `model.model` and its head at `model.lm_head`; `tokenizer` is None where the
    checkpoint has none; `stop_ids` is the union of the stop ids of tokenizer, config and generation config; `source`
    says where the weights are from; `skipped` counts the checkpoint's tensors that a text model does not use, by kind.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    geometry: ModelGeometry
    source: str
    stop_ids: frozenset[int]
    skipped: dict[str, int] = field(default_factory=dict)


def require_transformers() -> None:
    """Raises CheckpointError where the installed transformers is too old to know these models."""
    import transformers

    found = tuple(int(part) for part in transformers.__version__.split(".")[:3] if part.isdigit())
    if found < MINIMUM_TRANSFORMERS:
        wanted = ".".join(map(str, MINIMUM_TRANSFORMERS))
        raise CheckpointError(f"gemma4-flex needs transformers {wanted} or newer and {transformers.__version__} is "
                              f"installed: pip install --upgrade 'transformers>={wanted}'")


def meta_text_model(config: Any, *, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM of the architecture's class on the meta device for `config` (what `ModelGeometry.from_config`
    takes): names, shapes and dtypes, no storage. The head is the embedding where the config ties them."""
    import transformers

    fields = fields_of(config)
    fields.pop("architectures", None)
    architecture = ARCHITECTURES[fields["model_type"]]
    text_config = getattr(transformers, architecture.config).from_dict(fields)
    text_config.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = getattr(transformers, architecture.model)(text_config)
    finally:
        torch.set_default_dtype(before)
    if fields["tie_word_embeddings"]:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def place_of(path: str, device: str | torch.device, ple: str) -> dict[str, Any]:
    """Where the weight of the module at `path` is allocated, as arguments of `torch.empty`: on `device`, but for the table of
    per-layer embeddings where `ple` is "host", which goes to host memory, pinned for a GPU."""
    if path != PLE_TABLE or ple == "device":
        return {"device": device}
    return {"device": "cpu", "pin_memory": torch.device(device).type == "cuda"}


def place(path: str, tensor: torch.Tensor, device: str | torch.device, ple: str) -> torch.Tensor:
    """`tensor`, a part of the weight of the module at `path`, copied to where it belongs."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, **place_of(path, device, ple)).copy_(tensor)


@torch.no_grad()
def materialize(model: PreTrainedModel, device: str | torch.device, ple: str = "device") -> None:
    """Allocates each weight of a meta model where it belongs (`place_of`), once (tied ones stay tied, contents undefined), and
    makes the tables that no checkpoint holds: rotary frequencies in fp32, embedding scales in the model's dtype."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, meta in module._parameters.items():
            if meta is not None and meta.is_meta:
                if id(meta) not in made:
                    where = place_of(path, device, ple)
                    made[id(meta)] = nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, **where), requires_grad=False)
                module._parameters[name] = made[id(meta)]
    for layer in model.model.layers:
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar = torch.empty_like(layer.layer_scalar, device=device)

    text = model.model
    text.rotary_emb = type(text.rotary_emb)(text.config).to(device)
    for embedding in (module for module in text.children() if hasattr(module, "scalar_embed_scale")):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=text.norm.weight.dtype, device=device)
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, f"this transformers version has tensors that the loader does not make: {left}"


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint must hold, by name: parameters (a tied head is not one of its own) and layer scalars."""
    tensors = dict(model.named_parameters())        # each shared parameter once, under its first name
    return tensors | {f"model.layers.{i}.layer_scalar": la.layer_scalar for i, la in enumerate(model.model.layers)
                      if hasattr(la, "layer_scalar")}


def token_ids(value: int | list[int] | None) -> frozenset[int]:
    """An `eos_token_id` of a config, which may be one id, several, or none."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
