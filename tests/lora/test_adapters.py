"""Adapters: what PEFT writes is read exactly, under both prefixes, or refused by name."""
from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.lora.adapters import (
    LINEARS,
    Adapter,
    AdapterError,
    Pair,
    adapter_of,
    bind,
    choose_targets,
    linears_of,
    load_adapter,
    module_path,
    random_adapter,
    save_adapter,
)
from tests.tiny import tiny_model

GEOMETRY = ModelGeometry.from_config(tiny_model().config)


def saved(tmp_path, **config):
    """A trained-looking PEFT adapter of the tiny model, saved by PEFT itself; the directory and the live model."""
    peft_model = get_peft_model(tiny_model(), LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(str(tmp_path))
    return tmp_path, peft_model


def rewrite(directory, change):
    """Save the adapter's tensors again under the names that `change` gives them."""
    file = directory / "adapter_model.safetensors"
    save_file({change(k): v for k, v in load_file(file).items()}, file)


def test_a_saved_adapter_has_the_deltas_of_the_live_peft_model(tmp_path):
    directory, peft_model = saved(tmp_path)
    loaded, live = load_adapter(directory, GEOMETRY), adapter_of(peft_model)
    assert loaded.pairs.keys() == live.pairs.keys() == linears_of(tiny_model()).keys()
    modules = {module_path(n): m for n, m in peft_model.named_modules() if hasattr(m, "lora_A")}
    for path, pair in loaded.pairs.items():
        delta = (pair.up @ pair.down) * pair.scaling
        torch.testing.assert_close(delta, modules[path].get_delta_weight("default"), rtol=0, atol=0)
        assert torch.equal(pair.up, live.pairs[path].up)


@pytest.mark.parametrize("config", [
    {"use_rslora": True}, {"alpha_pattern": {"q_proj": 32}, "rank_pattern": {"q_proj": 2, "layers.3.mlp.up_proj": 6}}])
def test_rslora_and_patterns_scale_as_peft_does(tmp_path, config):
    directory, peft_model = saved(tmp_path, **config)
    live = adapter_of(peft_model)
    scalings = {path: pair.scaling for path, pair in load_adapter(directory, GEOMETRY).pairs.items()}
    assert scalings == {path: pytest.approx(pair.scaling) for path, pair in live.pairs.items()}
    assert len(set(scalings.values())) == (1 if "use_rslora" in config else len(set(scalings.values())))


def test_an_adapter_of_the_multimodal_class_binds_the_same_modules(tmp_path):
    directory, _ = saved(tmp_path)
    before = load_adapter(directory, GEOMETRY)
    rewrite(directory, lambda k: k.replace("base_model.model.model.", "base_model.model.model.language_model."))
    after = load_adapter(directory, GEOMETRY)
    assert before.pairs.keys() == after.pairs.keys()
    assert all(torch.equal(before.pairs[p].up, after.pairs[p].up) for p in before.pairs)


def test_a_pattern_written_for_the_multimodal_class_counts_for_its_modules(tmp_path):
    directory, _ = saved(tmp_path)
    rewrite(directory, lambda k: k.replace("base_model.model.model.", "base_model.model.model.language_model."))
    file = directory / "adapter_config.json"
    pattern = {"model.language_model.layers.3.mlp.up_proj": 80}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": pattern}))
    scalings = {path: pair.scaling for path, pair in load_adapter(directory, GEOMETRY).pairs.items()}
    assert scalings.pop("model.layers.3.mlp.up_proj") == 20
    assert set(scalings.values()) == {2}


@pytest.mark.parametrize("change", [("lora_A.weight", "lora_A.other.weight"),
                                    ("model.model.layers", "model.model.language_model.layers")])
def test_a_module_that_is_there_twice_is_refused_rather_than_read_once(tmp_path, change):
    directory, _ = saved(tmp_path)
    tensors = load_file(directory / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(tensors | {key.replace(*change): 2 * tensors[key]}, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"lora_A of model.layers.0.mlp.up_proj twice"):
        load_adapter(directory, GEOMETRY)


@pytest.mark.parametrize("change", [lambda a: a[:0], lambda a: a.reshape(-1), lambda a: a[None], lambda a: a.to(torch.int8),
                                    lambda a: a.to(torch.complex64), lambda a: a > 0])
def test_what_is_no_matrix_of_floats_is_refused(tmp_path, change):
    directory, _ = saved(tmp_path)
    tensors = load_file(directory / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(tensors | {key: change(tensors[key]).contiguous()}, directory / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"layers.0.mlp.up_proj .*no matrix of floats"):
        load_adapter(directory, GEOMETRY)


@pytest.mark.parametrize(("changed", "named"), [
    ({"lora_alpha": None}, "needs lora_alpha"), ({"lora_alpha": "8"}, "needs lora_alpha"),
    ({"alpha_pattern": 5}, "alpha_pattern"), ({"alpha_pattern": {"(": 5}}, "alpha_pattern")])
def test_an_alpha_that_cannot_be_read_is_one_sentence(tmp_path, changed, named):
    directory, _ = saved(tmp_path)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    with pytest.raises(AdapterError, match=named):
        load_adapter(directory, GEOMETRY)


def test_kv_of_shared_layers_is_listed_as_inert_and_left_out(tmp_path):
    directory, _ = saved(tmp_path)
    tensors = load_file(directory / "adapter_model.safetensors")
    extra = {f"base_model.model.model.layers.{layer}.self_attn.{m}.lora_{side}.weight": torch.ones(4, 4)
             for layer in (4, 5) for m in ("k_proj", "v_proj") for side in "AB"}
    save_file(tensors | extra, directory / "adapter_model.safetensors")
    adapter = load_adapter(directory, GEOMETRY)
    assert sorted(adapter.inert) == sorted(f"model.layers.{n}.self_attn.{m}" for n in (4, 5) for m in ("k_proj", "v_proj"))
    assert not set(adapter.inert) & set(adapter.pairs)


@pytest.mark.parametrize("field, value, named", [
    ("use_dora", True, "DoRA"), ("bias", "all", "bias"), ("lora_bias", True, "LoRA bias"),
    ("modules_to_save", ["lm_head"], "modules_to_save"), ("trainable_token_indices", [1], "trainable tokens"),
    ("fan_in_fan_out", True, "transposed")])
def test_what_a_merge_cannot_hold_is_refused_by_name(tmp_path, field, value, named):
    directory, _ = saved(tmp_path)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(AdapterError, match=named):
        load_adapter(directory, GEOMETRY)


def test_lora_on_the_tied_table_is_refused_by_name(tmp_path):
    directory, _ = saved(tmp_path, target_modules=["lm_head", "q_proj"])
    with pytest.raises(AdapterError, match=r"lm_head.*tied"):
        load_adapter(directory, GEOMETRY)


def test_a_live_adapter_on_the_embedding_is_refused():
    peft_model = get_peft_model(tiny_model(), LoraConfig(target_modules=["embed_tokens"]))
    with pytest.raises(AdapterError, match="embed_tokens"):
        adapter_of(peft_model)


@pytest.mark.parametrize("spoil, said", [
    (lambda d: (d / "adapter_model.safetensors").unlink(), "missing"),
    (lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:-9]), "half written"),
    (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json is missing"),
    (lambda d: (d / "adapter_config.json").write_text("{"), "not JSON"),
])
def test_a_broken_directory_is_one_sentence(tmp_path, spoil, said):
    directory, _ = saved(tmp_path)
    spoil(directory)
    with pytest.raises(AdapterError, match=said):
        load_adapter(directory, GEOMETRY)


def weights():
    return {path: tuple(m.weight.shape) for path, m in linears_of(tiny_model()).items()}


def pair_for(shape, rank=2):
    return Pair(torch.ones(rank, shape[1]), torch.ones(shape[0], rank), 1.0)


def test_an_adapter_that_binds_nothing_or_part_of_itself_is_an_error():
    shapes = weights()
    path = next(iter(shapes))
    with pytest.raises(AdapterError, match="binds no module"):
        bind(Adapter("a", {"model.blocks.0.q": pair_for((4, 4))}), shapes)
    with pytest.raises(AdapterError, match=r"binds 1 modules but not model\.blocks\.0\.q"):
        bind(Adapter("a", {path: pair_for(shapes[path]), "model.blocks.0.q": pair_for((4, 4))}), shapes)


def test_an_adapter_for_another_base_names_the_shapes():
    shapes = weights()
    path = next(iter(shapes))
    with pytest.raises(AdapterError, match=r"another base.*q_proj is \[64, 48\].*\[10, 2\]"):
        bind(Adapter("a", {path: pair_for((10, 48))}), shapes)


def test_targets_are_chosen_by_whole_components():
    model = tiny_model()
    assert choose_targets(model, "gate_proj") == [f"model.layers.{i}.mlp.gate_proj" for i in range(6)]
    assert choose_targets(model, ["layers.3.mlp.up_proj"]) == ["model.layers.3.mlp.up_proj"]
    with pytest.raises(AdapterError, match="gate_pro,|gate_pro:"):
        choose_targets(model, ["gate_pro"])


def test_all_linear_is_every_text_linear_and_shared_layers_have_no_kv():
    # 6 layers x (q o gate up down ple_gate ple_projection) + 4 owners x (k v) + the prelude's projection
    chosen = choose_targets(tiny_model(), "all-linear")
    assert len(chosen) == 6 * 7 + 4 * 2 + 1
    assert {p.rpartition(".")[2] for p in chosen} == set(LINEARS)
    assert not any("lm_head" in p or "embed" in p for p in chosen)


def test_a_random_adapter_survives_its_directory(tmp_path):
    made = random_adapter(tiny_model(), ["q_proj", "down_proj"], rank=3, alpha=6, strength=0.1, seed=5)
    save_adapter(made, tmp_path, base="tiny")
    read = load_adapter(tmp_path, GEOMETRY)
    assert read.pairs.keys() == made.pairs.keys()
    for path, pair in made.pairs.items():
        assert torch.equal(pair.up, read.pairs[path].up) and pair.scaling == read.pairs[path].scaling
        assert pair.up.abs().min() >= 0 and pair.up.abs().max() > 0
