"""Adapters alone in llama.cpp's format: what it computes from such a file is what the adapter does."""

from __future__ import annotations

import dataclasses
import json

import gguf
import pytest
import torch

from gemma4_flex.checkpoints.gguf_header import scan
from gemma4_flex.checkpoints.gguf_names import hf_name
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import LINEARS, Adapter, AdapterError, Pair, load_adapter, random_adapter, save_adapter
from gemma4_flex.lora.gguf_adapter import merging, write_gguf_adapter
from tests.tiny import tiny_model

MODEL = tiny_model(3)
TARGETS = [name for name in LINEARS if name != "per_layer_model_projection"]


def an_adapter(rank: int = 4, alpha: float = 6.0) -> Adapter:
    return random_adapter(MODEL, TARGETS, rank=rank, alpha=alpha, strength=0.3, seed=0)


def with_pair(adapter: Adapter, path: str, **fields) -> Adapter:
    return dataclasses.replace(adapter, pairs=adapter.pairs | {path: dataclasses.replace(adapter.pairs[path], **fields)})


def deltas_of(path) -> dict[str, torch.Tensor]:
    """By module, as llama.cpp computes them: alpha over the rows of A, in fp32."""
    tensors = {tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
               for tensor in gguf.GGUFReader(path).tensors}
    alpha = torch.tensor(scan(path).metadata["adapter.lora.alpha"])
    found = {}
    for name in [name for name in tensors if name.endswith(".lora_a")]:
        base = name.removesuffix(".lora_a")
        a, b = tensors.pop(name), tensors.pop(f"{base}.lora_b")
        found[hf_name(base).removesuffix(".weight")] = alpha / b.shape[1] * (b @ a)
    assert not tensors
    return found


def assert_same_deltas(path, adapter: Adapter, rtol: float = 1e-6) -> None:
    found = deltas_of(path)
    assert found.keys() == adapter.pairs.keys()
    for module, pair in adapter.pairs.items():
        wanted = pair.scaling * (pair.up @ pair.down)
        assert (found[module] - wanted).abs().max() <= rtol * wanted.abs().max(), module


def test_a_written_adapter_has_the_deltas_and_the_matrices_of_the_adapter(tmp_path):
    adapter = an_adapter()
    num_bytes = write_gguf_adapter(tmp_path / "a.gguf", adapter, MODEL)
    assert_same_deltas(tmp_path / "a.gguf", adapter)
    metadata = scan(tmp_path / "a.gguf").metadata
    assert {key: metadata[key] for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha")} == {
        "general.architecture": "gemma4", "general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}
    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    pair = adapter.pairs["model.layers.2.mlp.down_proj"]
    assert torch.equal(tensors["blk.2.ffn_down.weight.lora_a"], pair.down)
    assert torch.equal(tensors["blk.2.ffn_down.weight.lora_b"], pair.up)
    assert num_bytes == (tmp_path / "a.gguf").stat().st_size


def test_ranks_alphas_and_rslora_of_a_saved_adapter_come_through(tmp_path):
    adapter = an_adapter()
    few = Pair(adapter.pairs["model.layers.0.mlp.up_proj"].down[:2], adapter.pairs["model.layers.0.mlp.up_proj"].up[:, :2], 3.0)
    adapter = dataclasses.replace(adapter, pairs=adapter.pairs | {"model.layers.0.mlp.up_proj": few})
    adapter = with_pair(adapter, "model.layers.1.self_attn.q_proj", scaling=0.7)
    save_adapter(adapter, tmp_path / "peft", base="x")
    for rslora in (False, True):
        config = json.loads((tmp_path / "peft/adapter_config.json").read_text()) | {"use_rslora": rslora}
        (tmp_path / "peft/adapter_config.json").write_text(json.dumps(config))
        read = load_adapter(tmp_path / "peft", ModelGeometry.from_config(MODEL.config))
        assert len({pair.scaling * pair.down.shape[0] for pair in read.pairs.values()}) > 1
        write_gguf_adapter(tmp_path / "a.gguf", read, MODEL, overwrite=True)
        assert_same_deltas(tmp_path / "a.gguf", read)


@pytest.mark.parametrize("type_name, rtol", [("F16", 2e-3), ("BF16", 2e-2)])
def test_16_bits_hold_scalings_that_differ_by_powers_of_two_and_no_others(tmp_path, type_name, rtol):
    path = "model.layers.1.self_attn.q_proj"
    adapter = with_pair(an_adapter(), path, scaling=6.0)
    write_gguf_adapter(tmp_path / "a.gguf", adapter, MODEL, type_name=type_name)
    assert_same_deltas(tmp_path / "a.gguf", adapter, rtol)
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[type_name]
    assert {tensor.type for tensor in scan(tmp_path / "a.gguf").tensors.values()} == {type_name}
    [b] = [tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors if tensor.name == "blk.1.attn_q.weight.lora_b"]
    held = torch.from_numpy(gguf.quants.dequantize(b.data, b.tensor_type).copy())
    assert torch.equal(held, adapter.pairs[path].up.to(dtype).float() * 4)
    with pytest.raises(AdapterError, match=f"scales {path} by 1.4, others otherwise, .* would round its matrices in {type_name}"):
        write_gguf_adapter(tmp_path / "b.gguf", with_pair(adapter, path, scaling=1.4), MODEL, type_name=type_name)


def test_what_llama_cpp_would_pass_over_or_take_for_something_else_is_refused(tmp_path):
    def refused(adapter, why, error=AdapterError, **options):
        with pytest.raises(error, match=why):
            write_gguf_adapter(tmp_path / "a.gguf", adapter, MODEL, **options)

    everywhere = random_adapter(MODEL, "all-linear", rank=2, alpha=2, strength=0.1, seed=0)
    refused(everywhere, "adapts model.per_layer_model_projection, where llama.cpp applies none: merge it")
    zero = dataclasses.replace(an_adapter(), pairs={module: dataclasses.replace(pair, scaling=0.0)
                                                    for module, pair in an_adapter().pairs.items()})
    refused(zero, "has alpha 0, which llama.cpp takes for no alpha")
    refused(an_adapter(), "cannot be written as Q8_0: name one of F32, F16, BF16", type_name="Q8_0")
    path = "model.layers.0.mlp.up_proj"
    refused(with_pair(an_adapter(), path, up=torch.full_like(an_adapter().pairs[path].up, torch.nan)), f"not finite at {path}")
    refused(with_pair(an_adapter(), path, up=torch.ones(5, 4)), "is for another base")
    refused(with_pair(an_adapter(), path, up=an_adapter().pairs[path].up * 1e7),
            "blk.0.ffn_up.weight.lora_b cannot be written as F16", error=CheckpointError, type_name="F16")
    assert not list(tmp_path.iterdir())
    (tmp_path / "a.gguf").write_text("mine")
    refused(an_adapter(), "a.gguf exists", error=CheckpointError)
    assert (tmp_path / "a.gguf").read_text() == "mine"


def test_merging_refuses_an_adapter_that_does_not_fit_and_leaves_other_weights_alone():
    adapter = an_adapter()
    with pytest.raises(AdapterError, match="is for another base"):
        merging(with_pair(adapter, "model.layers.0.mlp.up_proj", up=torch.ones(5, 4)), MODEL)
    table = MODEL.model.embed_tokens.weight
    assert merging(adapter, MODEL)("model.embed_tokens.weight", table) is table
