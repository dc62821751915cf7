"""LoRA adapters and GGUF files: merged into the weights as they are written, or in llama.cpp's format for adapters.

Such a file has one alpha for all modules: a module's delta is `alpha / rank * B A`. Where a module wants another scaling, its B
is multiplied by what is lacking.
"""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from gemma4_flex.checkpoints.gguf_config import ARCHITECTURE
from gemma4_flex.checkpoints.gguf_file import PLAIN, Outgoing, write_file
from gemma4_flex.checkpoints.gguf_names import gguf_name
from gemma4_flex.lora.adapters import Adapter, AdapterError, Pair, bind, is_finite, linears_of
from gemma4_flex.lora.double_copy import merge

UNSUPPORTED = "model.per_layer_model_projection"        # llama.cpp multiplies by it without looking for an adapter


def merging(adapter: Adapter, model: nn.Module) -> Callable[[str, Tensor], Tensor]:
    """A function from a weight's name and values to its values with `adapter` merged, in fp32 and not rounded, for
    `checkpoints.gguf_write.write_gguf`. Raises AdapterError where the adapter does not fit `model`."""
    _bind(adapter, model)

    def merged(name: str, weight: Tensor) -> Tensor:
        pair = adapter.pairs.get(name.removesuffix(".weight"))
        return weight if pair is None else merge(weight, pair)

    return merged


def write_gguf_adapter(path: Path, adapter: Adapter, model: nn.Module, *, type_name: str = "F32", overwrite: bool = False) -> int:
    """Writes `adapter`, which was trained for `model`, as a file that llama.cpp takes beside the model's; returns its bytes.

    Raises AdapterError where it does not fit `model`, holds what llama.cpp would pass over in silence, or has scalings that the
    type (F32, F16 or BF16) would round; CheckpointError as `write_file` does.
    """
    if type_name not in PLAIN:
        raise AdapterError(f"an adapter's matrices cannot be written as {type_name}: name one of {', '.join(PLAIN)}.")
    _bind(adapter, model)
    if UNSUPPORTED in adapter.pairs:
        raise AdapterError(f"adapter {adapter.name} adapts {UNSUPPORTED}, where llama.cpp applies none: merge it into the model, "
                           "or train without.")
    alphas = {module: pair.scaling * pair.down.shape[0] for module, pair in adapter.pairs.items()}
    if not any(alphas.values()):
        raise AdapterError(f"adapter {adapter.name} has alpha 0, which llama.cpp takes for no alpha at all: "
                           "train it with another.")
    [(alpha, _)] = Counter(filter(None, alphas.values())).most_common(1)
    tensors = []
    for module, pair in adapter.pairs.items():
        factor = alphas[module] / alpha
        if type_name != "F32" and abs(math.frexp(factor)[0]) not in (0.0, 0.5):
            raise AdapterError(f"adapter {adapter.name} scales {module} by {pair.scaling:g}, others otherwise, and a file with "
                               f"one alpha would round its matrices in {type_name}: write it as F32.")
        name = gguf_name(f"{module}.weight")
        tensors += [Outgoing(f"{name}.lora_a", type_name, tuple(pair.down.shape), lambda pair=pair: pair.down.detach()),
                    Outgoing(f"{name}.lora_b", type_name, tuple(pair.up.shape), _scaled(pair, factor))]
    metadata = {"general.architecture": ARCHITECTURE, "general.type": "adapter", "general.name": Path(adapter.name).name,
                "adapter.type": "lora", "adapter.lora.alpha": float(alpha)}
    write_file(path, metadata, tensors, overwrite=overwrite)
    return path.stat().st_size


def _scaled(pair: Pair, factor: float) -> Callable[[], Tensor]:
    return lambda: pair.up.detach() if factor == 1 else pair.up.detach().float() * factor


def _bind(adapter: Adapter, model: nn.Module) -> None:
    bind(adapter, {path: (linear.out_features, linear.in_features) for path, linear in linears_of(model).items()})
    if broken := [path for path, pair in adapter.pairs.items() if not is_finite(pair)]:
        raise AdapterError(f"adapter {adapter.name} is not finite at {broken[0]}: train it again with a lower rate.")
