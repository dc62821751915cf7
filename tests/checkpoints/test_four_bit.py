"""4-bit weights: an explicit plan, a stated compute dtype, Hugging Face's own numbers, and no way back to bf16."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from gemma4_flex.bench import workload
from gemma4_flex.checkpoints import CheckpointError, load_text_model
from gemma4_flex.checkpoints.four_bit import (
    dequantized,
    describe_4bit,
    is_4bit,
    layout_4bit,
    plan_4bit,
    quantize_4bit,
    state_tensors,
    step_weight_bytes,
)
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.runner import Runner
from gemma4_flex.step_graph import CaptureError, StepGraph
from tests.engines import assert_greedy_as_hf, greedy, hf_logits, make_engine, some_prompts
from tests.tiny import tiny_model

# every input width a multiple of the 64 values that share a scale
WIDTHS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "global_head_dim": 64, "hidden_size_per_layer_input": 64}
IDS = torch.tensor([[2, 17, 40, 9, 33, 5, 60, 21, 8, 44, 13, 52]])
PROMPTS = some_prompts(9, 1, 22)


def model_4bit(seed: int = 0, **options):
    return quantize_4bit(tiny_model(seed, torch.bfloat16, **WIDTHS), **options)


def logits(model) -> torch.Tensor:
    model.config._attn_implementation = "eager"
    for module in model.modules():      # Hugging Face's own linears too: see `linear_4bit`
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model(IDS).logits


# ---- the plan -----------------------------------------------------------------------------------------------------


def test_the_plan_of_the_tiny_model_is_this_list():
    attention = {i: ("q_proj", "k_proj", "v_proj", "o_proj") if i < 4 else ("q_proj", "o_proj") for i in range(6)}
    quantized = {f"model.layers.{i}.self_attn.{name}" for i, names in attention.items() for name in names}
    quantized |= {f"model.layers.{i}.mlp.{name}" for i in range(6) for name in ("gate_proj", "up_proj", "down_proj")}
    layer = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
             "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm", "self_attn.q_norm")
    kept = {f"model.layers.{i}.{name}" for i in range(6) for name in layer}
    kept |= {f"model.layers.{i}.self_attn.k_norm" for i in range(4)}
    kept |= {"model.embed_tokens", "model.embed_tokens_per_layer", "model.norm", "model.per_layer_model_projection",
             "model.per_layer_projection_norm", "lm_head"}
    plan = plan_4bit(tiny_model())
    assert set(plan.quantized) == quantized and set(plan.kept) == kept
    assert len(plan.quantized) == 38 and len(plan.kept) == len(kept)


def test_the_plan_is_what_quantising_does_and_it_can_be_printed():
    plan = plan_4bit(tiny_model(**WIDTHS))
    assert layout_4bit(model_4bit()) == plan
    assert "quantised: q_proj 6, k_proj 4" in str(plan) and "computed in bfloat16" in str(plan)
    assert "per_layer_input_gate 6" in str(plan).split("kept:")[1]


def test_a_linear_the_plan_does_not_know_is_refused_by_name():
    model = tiny_model(dtype=torch.bfloat16, **WIDTHS)
    model.model.layers[1].mlp.gate_up_proj = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"does not say what becomes of model\.layers\.1\.mlp\.gate_up_proj"):
        quantize_4bit(model)
    assert not layout_4bit(model).quantized


# ---- quantising as it loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_quant", [False, True])
def test_the_compute_dtype_is_always_stated_and_no_float16_is_anywhere(double_quant):
    model = model_4bit(double_quant=double_quant)
    linears = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(linears) == 38
    assert all(m.compute_dtype == torch.bfloat16 and m.compute_type_is_set for m in linears)
    assert all(m.weight.quant_state.dtype == torch.bfloat16 and m.weight.quant_type == "nf4" for m in linears)
    assert all(m.weight.quant_state.nested == double_quant for m in linears)
    assert all(t.dtype != torch.float16 for t in (*model.parameters(), *model.buffers()))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters() if not is_4bit(p))


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_quantised_weight_is_near_its_own_and_its_forward_is_that_of_the_decoded_weight(double_quant):
    plain, model = tiny_model(dtype=torch.bfloat16, **WIDTHS), model_4bit(double_quant=double_quant)
    for path in layout_4bit(model).quantized:
        linear, before = model.get_submodule(path), plain.get_submodule(path).weight.float()
        weight = dequantized(linear.weight)
        assert (weight - before).norm() < 0.12 * before.norm()
        x = torch.randn(3, linear.in_features).bfloat16()
        assert torch.equal(linear(x), torch.nn.functional.linear(x, weight.bfloat16()))


def test_a_forward_leaves_values_scales_and_their_places_as_they_were():
    """bitsandbytes repacks weights at the first forward on CPUs with AVX512-BF16; here nothing may move."""
    model = model_4bit()
    held = {n: (t, t.data_ptr(), t.clone()) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert "model.layers.0.mlp.up_proj.absmax" in held
    model(IDS)
    for module in model.modules():
        if is_4bit(module._parameters.get("weight")):
            assert all(module._buffers[n] is t for n, t in state_tensors(module.weight).items())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert held[name][0] is tensor and held[name][1] == tensor.data_ptr() and torch.equal(held[name][2], tensor)


@pytest.mark.parametrize("change, says", [
    ({"dtype": torch.float32, **WIDTHS}, "made of a bfloat16 model.*float32"),
    ({"dtype": torch.bfloat16}, r"layers\.0\.self_attn\.q_proj has 48 inputs, no multiple of the 64"),
])
def test_a_model_that_cannot_be_quantised_is_refused_and_left_alone(change, says):
    model = tiny_model(**change)
    with pytest.raises(CheckpointError, match=says) as caught:
        quantize_4bit(model)
    assert "\n" not in str(caught.value) and not layout_4bit(model).quantized


def test_without_bitsandbytes_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for job in (lambda: quantize_4bit(tiny_model(dtype=torch.bfloat16, **WIDTHS)),
                lambda: load_text_model("anything", dtype=torch.bfloat16, device="cpu", four_bit=True)):
        with pytest.raises(CheckpointError, match="need bitsandbytes.*pip install bitsandbytes") as caught:
            job()
        assert "\n" not in str(caught.value)


def test_the_floor_counts_the_bytes_that_are_really_there():
    model = model_4bit()
    geometry = ModelGeometry.from_config(model.config)
    saved = 0
    for path in layout_4bit(model).quantized:
        n = model.get_submodule(path).weight.quant_state.shape.numel()
        saved += 2 * n - (n // 2 + 4 * (n // 64) + 4 * 16)      # packed values, a scale a block, sixteen code values
    assert step_weight_bytes(model, geometry) == geometry.step_weight_bytes(2) - saved
    assert describe_4bit(model)["step_weight_bytes"] == geometry.step_weight_bytes(2) - saved
    held = make_engine(model).memory_report()["weights"]
    table = geometry.parameter_count()["ple_table"] * 2
    assert held - table == pytest.approx(step_weight_bytes(model, geometry), abs=2000)     # rotary tables and scalars


# ---- in the engine ------------------------------------------------------------------------------------------------


def widened(model):
    """The same 4-bit model with all arithmetic in fp32: what is left between two forwards is order, not rounding."""
    for module in model.float().modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.compute_dtype = torch.float32
    return model


@pytest.mark.parametrize("double_quant", [False, True])
def test_the_engine_gives_the_tokens_and_logits_of_hugging_faces_forward_on_the_same_modules(double_quant):
    model = widened(model_4bit(3, double_quant=double_quant))
    for prompt, done in zip(PROMPTS, make_engine(model).generate(PROMPTS, greedy(12))):
        assert_greedy_as_hf(model, prompt, done.token_ids)
        ours = make_engine(model).trace(prompt, done.token_ids[:-1]).logits
        theirs = hf_logits(model, prompt + done.token_ids[:-1])[len(prompt) - 1:]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_in_bf16_its_error_is_no_larger_than_hugging_faces_own():
    model, exact = model_4bit(3), widened(model_4bit(3))
    engine, ours, theirs = make_engine(model), [], []
    for prompt, forced in zip(some_prompts(9, 30, 22, 16), some_prompts(12, 12, 12, 12, seed=5)):
        right = hf_logits(exact, prompt + forced)[len(prompt) - 1:]
        ours.append((engine.trace(prompt, forced).logits - right).abs().mean())
        theirs.append((hf_logits(model, prompt + forced)[len(prompt) - 1:].float() - right).abs().mean())
    assert sum(ours) <= 1.1 * sum(theirs), (ours, theirs)


def test_first_token_logits_of_the_bundled_model_stay_near_those_of_bf16():
    """What a wrong compute dtype breaks first (bitsandbytes#1572)."""
    loaded = load_text_model("tiny", dtype=torch.bfloat16, device="cpu")
    prompts = workload.encode_prompts(workload.first_prompts(workload.read_prompts(workload.BUNDLED), 12), loaded.tokenizer, "auto")
    before = [hf_logits(loaded.model, list(p.ids))[-1].float() for p in prompts]
    quantize_4bit(loaded.model)
    cosines = [torch.cosine_similarity(a, hf_logits(loaded.model, list(p.ids))[-1].float(), 0) for a, p in zip(before, prompts)]
    assert sum(cosines) / len(cosines) > 0.98


def test_a_quantised_step_that_cannot_be_captured_runs_eagerly_and_says_so():
    engine = make_engine(model_4bit(), capture_cudagraph=True)
    done = engine.generate(PROMPTS, greedy(6))
    assert (engine.stats.steps_replayed, engine.stats.steps_eager > 0) == (0, True)
    [notice] = engine.notices
    assert notice.startswith("decode steps over quantised weights run eagerly: the step cannot be traced") and "\n" not in notice
    assert [c.token_ids for c in done] == [c.token_ids for c in make_engine(model_4bit()).generate(PROMPTS, greedy(6))]


class FakeGraph(StepGraph):
    """A capture that works: an eager step under another name, or one that forgets its new inputs from `stale` on."""
    stale = None

    @classmethod
    def capture(cls, fn, static, *, pool=None, regions=None):
        first, calls = fn(), [0]

        def replay():
            calls[0] += 1
            return first if cls.stale and calls[0] >= cls.stale else fn()
        return cls(replay, {})


@pytest.mark.parametrize("stale", [None, 1, 3])
def test_captured_quantised_steps_are_used_only_where_three_replays_equal_eager(monkeypatch, stale):
    monkeypatch.setattr(FakeGraph, "stale", stale)
    monkeypatch.setattr("gemma4_flex.runner.StepGraph", FakeGraph)
    engine = make_engine(model_4bit(), capture_cudagraph=True)
    done = engine.generate(PROMPTS, greedy(6))
    assert [c.token_ids for c in done] == [c.token_ids for c in make_engine(model_4bit()).generate(PROMPTS, greedy(6))]
    if stale is None:
        assert engine.stats.steps_eager == 0 and engine.stats.steps_replayed > 0 and engine.notices == []
    else:
        assert engine.stats.steps_replayed == 0 and engine.stats.steps_eager > 0
        assert engine.notices[0].endswith(f"replay {stale} of 3 on new inputs differs from the eager step")


def test_an_unquantised_step_is_not_validated_and_its_failure_stays_an_error(monkeypatch):
    def broken(*args, **kwargs):
        raise CaptureError("planned")

    def never(*args):
        raise AssertionError
    engine = make_engine(tiny_model(), capture_cudagraph=True)
    assert not engine.runner.must_validate
    monkeypatch.setattr(Runner, "_validate", never)
    engine.prepare()
    monkeypatch.setattr(StepGraph, "capture", broken)
    with pytest.raises(CaptureError, match="planned"):
        make_engine(tiny_model(), capture_cudagraph=True).prepare()


# ---- a checkpoint that was quantised before it was saved ------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["plain scales", "nested scales"])
def shard(request, tmp_path_factory) -> Path:
    """What transformers and bitsandbytes save of a tiny model that they quantised themselves."""
    path = tmp_path_factory.mktemp("bf16")
    tiny_model(dtype=torch.bfloat16, **WIDTHS).save_pretrained(path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
                                bnb_4bit_use_double_quant=request.param, llm_int8_skip_modules=["lm_head", "o_proj"])
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.bfloat16, device_map="cpu")
    out = tmp_path_factory.mktemp("nf4")
    model.save_pretrained(out)
    return out


def load(path: Path, **options):
    return load_text_model(str(path), device="cpu", **({"dtype": torch.bfloat16, "four_bit": True} | options))


def copied(shard: Path, to: Path, change=lambda tensors: None, **config) -> Path:
    """The shard with its tensors changed in place by `change`, and fields of its quantization_config."""
    tensors, settings = load_file(shard / "model.safetensors"), json.loads((shard / "config.json").read_text())
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    settings["quantization_config"] |= config
    (to / "config.json").write_text(json.dumps(settings))
    return to


def test_it_gives_the_logits_of_hugging_faces_own_quantised_model_bit_for_bit(shard):
    loaded = load(shard)
    theirs = AutoModelForCausalLM.from_pretrained(shard, dtype=torch.bfloat16, device_map="cpu").eval()
    assert torch.equal(logits(loaded.model), logits(theirs))
    kinds = {path.rpartition(".")[2] for path in layout_4bit(loaded.model).quantized}
    assert kinds == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "per_layer_input_gate",
                     "per_layer_projection", "per_layer_model_projection"}      # the checkpoint's choice, not our plan's
    assert all(t.dtype != torch.float16 for t in (*loaded.model.parameters(), *loaded.model.buffers()))
    assert make_engine(loaded.model).generate(PROMPTS, greedy(4))[0].token_ids


def test_under_the_multimodal_prefix_it_is_the_same_model(shard, tmp_path):
    def wrap(tensors):
        for name in list(tensors):
            tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.vision_tower.x.weight.absmax"] = torch.ones(3)
        dead = "model.language_model.layers.4.self_attn.k_proj.weight"      # a shared layer's, unused
        tensors |= {dead: torch.zeros(4, 1, dtype=torch.uint8), f"{dead}.absmax": torch.ones(1)}
    loaded = load(copied(shard, tmp_path, wrap))
    assert torch.equal(logits(loaded.model), logits(load(shard).model))
    assert loaded.skipped == {"towers": 1, "shared_kv": 2}


def test_it_computes_in_bf16_whatever_its_config_says(shard, tmp_path):
    path = copied(shard, tmp_path, bnb_4bit_compute_dtype="float16")
    assert torch.equal(logits(load(path).model), logits(load(shard).model))


Q = "model.layers.2.self_attn.q_proj"


def without(part):
    return lambda tensors: tensors.pop(f"{Q}.weight{part}")


@pytest.mark.parametrize("change, says", [
    (without(".absmax"), rf"lacks {Q}\.weight\.absmax, without which {Q} cannot be decoded"),
    (without(".quant_map"), rf"lacks {Q}\.weight\.quant_map"),
    (without(".quant_state.bitsandbytes__nf4"), rf"lacks {Q}\.weight\.quant_state\.bitsandbytes__nf4"),
    (without(""), rf"lacks {Q}\.weight, without"),
    (lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(Q)], rf"lacks {Q}\.weight"),
    (lambda tensors: tensors.update({f"{Q}.weight.extra": torch.ones(1)}), rf"{Q}\.weight\.extra, which is no part"),
    (lambda tensors: tensors.update({f"{Q}.weight": torch.zeros(9, 1, dtype=torch.uint8)}), rf"{Q}\.weight holds 9 values of U8"),
    (lambda tensors: [tensors.pop(n) for n in list(tensors) if ".weight." in n], "holds no 4-bit weight although"),
    (lambda tensors: tensors.update({"lm_head.weight.absmax": torch.ones(1)}), "has its head in 4 bits"),
])
def test_what_is_missing_or_wrong_is_named_and_nothing_falls_back(shard, tmp_path, change, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        load(copied(shard, tmp_path, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config, says", [
    ({"quant_method": "gptq"}, "quantised by gptq, not to 4 bits by bitsandbytes"),
    ({"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True}, "not to 4 bits"),
    ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' and only 'nf4'"),
    ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage='bfloat16' and only 'uint8'"),
])
def test_another_quantisation_is_refused_by_name(shard, tmp_path, config, says):
    with pytest.raises(CheckpointError, match=says):
        load(copied(shard, tmp_path, **config))


def test_a_bf16_checkpoint_is_not_taken_for_a_quantised_one_nor_the_other_way_round(shard, tmp_path):
    tiny_model(dtype=torch.bfloat16, **WIDTHS).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is not quantised.*--load_in_4bit"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="synthetic:E2B is not quantised"):
        load_text_model("synthetic:E2B", dtype=torch.bfloat16, device="cpu", four_bit=True)
    with pytest.raises(CheckpointError, match="is a quantised checkpoint.*--model_name_4bit"):
        load(shard, four_bit=False)
    with pytest.raises(CheckpointError, match="use dtype bfloat16"):
        load(shard, dtype=torch.float32)


def test_a_hub_id_that_is_not_quantised_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    fetched = []
    tiny_model(dtype=torch.bfloat16, **WIDTHS).save_pretrained(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download",
                        lambda name, *, allow_patterns: fetched.append(allow_patterns) or str(tmp_path))
    with pytest.raises(CheckpointError, match="someone/a-model is not quantised"):
        load("someone/a-model")
    assert fetched == [["config.json"]]
