"""An adapter applied beside the weights, PEFT's way: W x + scaling * B A x, nothing merged."""
from __future__ import annotations

import torch
from torch import nn

from gemma4_flex.lora.adapters import Adapter, bind, linears_of
from gemma4_flex.lora.double_copy import pristine_view


def unmerged_view(model: nn.Module, adapter: Adapter) -> nn.Module:
    """A view of `model`'s own tensors with PEFT's LoRA layers around the linears that `adapter` names.

    The LoRA matrices are copies in the adapter's dtype, or fp32 where it is float16 (PEFT casts activations to it).
    Raises AdapterError when the adapter does not fit.
    """
    from peft import LoraConfig, inject_adapter_in_model
    view = pristine_view(model)
    linears = linears_of(view)
    bind(adapter, {path: (module.out_features, module.in_features) for path, module in linears.items()})
    ranks = {path: pair.down.shape[0] for path, pair in adapter.pairs.items()}
    config = LoraConfig(
        target_modules=list(adapter.pairs), r=max(ranks.values()), lora_alpha=1,
        rank_pattern={f"^{path}": rank for path, rank in ranks.items()},
        alpha_pattern={f"^{path}": pair.scaling * ranks[path] for path, pair in adapter.pairs.items()})
    wants_grad = {name: p.requires_grad for name, p in view.named_parameters()}
    inject_adapter_in_model(config, view)
    for name, parameter in view.named_parameters():      # PEFT freezes what it wraps: these tensors are the caller's
        if name.replace(".base_layer", "") in wants_grad:
            parameter.requires_grad_(wants_grad[name.replace(".base_layer", "")])
    linears, device = linears_of(view), view.model.norm.weight.device
    for path, pair in adapter.pairs.items():
        module = linears[path]
        dtype = torch.float if pair.down.dtype == torch.float16 else pair.down.dtype
        for place, tensor in ((module.lora_A, pair.down), (module.lora_B, pair.up)):
            place["default"].weight = nn.Parameter(tensor.detach().to(device, dtype), requires_grad=False)
        assert abs(module.scaling["default"] - pair.scaling) <= 1e-6 * abs(pair.scaling)
        module.scaling["default"] = pair.scaling
    return view.eval()
