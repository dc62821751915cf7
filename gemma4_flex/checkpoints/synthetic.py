"""Random weights at a published geometry, for measuring speed and memory where the weights cannot be had.

The text says nothing, but shapes, bytes and kernels are the real model's, and the values are chosen so that nothing is
hidden: the stream neither dies nor explodes, logits reach the softcap's bend, norms and layer scalars are away from 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gemma4_flex.checkpoints.bundled import bundled_tokenizer
from gemma4_flex.checkpoints.files import read_json
from gemma4_flex.checkpoints.hf import attach_generation_config, tokenizer_stop_ids
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

CHUNK = 1 << 20     # elements drawn at a time: small enough to stay in a CPU's cache


def load_synthetic(which: str, *, dtype: torch.dtype, device: str, seed: int, ple: str = "device") -> LoadedModel:
    """Random weights for `which`: a name in PUBLISHED, or the path of a config.json, made straight on `device` in `dtype`.

    The same seed and device type give the same weights, and bf16 ones are the fp32 ones rounded.
    """
    path = PUBLISHED.get(which) or Path(which).expanduser()
    if not path.is_file():
        raise CheckpointError(f"synthetic:{which} is none of {', '.join(PUBLISHED)} and no config.json file")
    config = read_json(path)
    geometry = ModelGeometry.from_config(config)
    model = meta_text_model(config, dtype=dtype)
    geometry.assert_matches(model.model)
    materialize(model, device, ple)
    randomize(model, geometry, seed)
    tokenizer = bundled_tokenizer(geometry.vocab_size)
    stops = token_ids(model.config.eos_token_id) | tokenizer_stop_ids(tokenizer)
    attach_generation_config(model, {}, stops)
    return LoadedModel(model=model, tokenizer=tokenizer, geometry=geometry, stop_ids=stops,
                       source=f"synthetic {which}, random weights, seed {seed}")


@torch.no_grad()
def randomize(model: Any, geometry: ModelGeometry, seed: int) -> None:
    """Fills every weight with uniform noise of a mean and deviation that suit its place."""
    device = model.model.embed_tokens.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    scratch = torch.empty(CHUNK, device=device)
    for name, weight in weights_of(model).items():
        mean, deviation = moments(name, weight.shape, geometry)
        half_width = 3 ** 0.5 * deviation
        for part in weight.view(-1).split(CHUNK):
            part.copy_(scratch[: part.numel()].uniform_(mean - half_width, mean + half_width, generator=generator))


# a branch as large as the stream it joins makes a random net so ill-conditioned that Hugging Face's own fp32 logits are
# 1e-3 off float64: smaller branches leave arithmetic, not chaos, to be compared
BRANCH_NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "post_per_layer_input_norm.weight")


def moments(name: str, shape: torch.Size, geometry: ModelGeometry) -> tuple[float, float]:
    """Mean and deviation for a weight by its name and shape."""
    if name.endswith("layer_scalar"):
        return 0.9, 0.05
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        center = (2 / (shape[0] ** 0.5 * geometry.layers[0].scale)) ** 0.5      # attention scores of deviation 2 at any head_dim
        return center, 0.2 * center
    if geometry.ple_width and name.endswith(BRANCH_NORMS):
        return 0.4, 0.08
    if len(shape) == 1:
        return 1.0, 0.2
    if name.endswith("embed_tokens.weight"):
        return 0.0, 3 / geometry.hidden_size ** 0.5     # logits of deviation 3
    if name.endswith("embed_tokens_per_layer.weight"):
        return 0.0, 1 / geometry.ple_width ** 0.5
    return 0.0, 1 / shape[1] ** 0.5
