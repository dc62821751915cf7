"""LoRA over 4-bit weights: beside them, or merged into them and quantised anew in the same storage."""
from __future__ import annotations

from dataclasses import replace

import bitsandbytes
import pytest
import torch
from peft.tuners.lora.bnb import Linear4bit as LoraLinear4bit
from torch import nn

from gemma4_flex import EngineConfig, FlexEngine, SamplingParams
from gemma4_flex.checkpoints.four_bit import dequantized, is_4bit, layout_4bit, num_bytes, quantize_4bit, state_tensors
from gemma4_flex.lora import drift
from gemma4_flex.lora.adapters import AdapterError, Pair, random_adapter, save_adapter
from gemma4_flex.lora.double_copy import DoubleCopy, merge
from gemma4_flex.lora.drift import fingerprint, state
from gemma4_flex.lora.requantize import RequantizedCopy, deviation
from gemma4_flex.lora.session import LoraSession
from gemma4_flex.lora.unmerged import unmerged_view
from gemma4_flex.models.projections import view_of
from tests.checkpoints.test_four_bit import WIDTHS
from tests.tiny import fake_tokenizer, tiny_model

CONFIG = EngineConfig(attention="sdpa", compile=False, max_batch_size=2, max_seq_length=128, page_size=4, max_prefill_tokens=16)
PROMPTS = [[2, 5, 9, 13, 40], [2, 7, 7, 7, 30, 31, 32, 33, 34, 35]]
IDS = torch.tensor([PROMPTS[1]])


def bf16_model():
    return tiny_model(dtype=torch.bfloat16, **WIDTHS)


def model_4bit(**options):
    return quantize_4bit(bf16_model(), **options)


def adapter(seed=0, targets="all-linear"):
    return random_adapter(bf16_model(), targets, rank=3, alpha=6, strength=0.3, seed=seed)


def as_plain(model, dtype=torch.float32):
    """The same model with its linears decoded: what a 4-bit base means, without 4-bit arithmetic."""
    plain = view_of(model).float() if dtype == torch.float32 else view_of(model)
    for path in layout_4bit(model).quantized:
        weight = dequantized(model.get_submodule(path).weight).to(dtype)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        parent, _, name = path.rpartition(".")
        plain.get_submodule(parent)._modules[name] = linear
    return plain


def run(model):
    engine = FlexEngine(model, fake_tokenizer(), CONFIG)
    return [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True))]


# ---- unmerged -----------------------------------------------------------------------------------------------------


def test_unmerged_is_pefts_layer_around_the_4_bit_linear_and_the_engine_runs_it():
    model, lora = model_4bit(), adapter()
    before = fingerprint(state(model))
    view = unmerged_view(model, lora)
    q = view.model.layers[0].self_attn.q_proj
    assert isinstance(q, LoraLinear4bit) and isinstance(q.base_layer, bitsandbytes.nn.Linear4bit)
    x, pair = torch.randn(3, 64).bfloat16(), lora.pairs["model.layers.0.self_attn.q_proj"]
    delta = (x.float() @ pair.down.T @ pair.up.T * pair.scaling).bfloat16()
    torch.testing.assert_close(q(x), q.base_layer(x) + delta, rtol=0.01, atol=0.01)
    assert run(view) != run(model)
    assert fingerprint(state(model)) == before


# ---- requantised --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double_quant", [False, True])
def test_a_refresh_is_quantise_of_the_merge_exactly_in_the_same_storage(double_quant):
    double, lora = RequantizedCopy(model_4bit(double_quant=double_quant)), adapter()
    places = {n: t.data_ptr() for n, t in state(double.inference)}
    double.refresh(adapter(1))
    double.refresh(lora)
    assert {n: t.data_ptr() for n, t in state(double.inference)} == places
    for path, merged in double.merged.items():
        wanted = merge(dequantized(double.pristine[path]), lora.pairs[path])
        linear = double.inference.get_submodule(path)
        assert linear.weight is merged
        if not is_4bit(merged):
            assert torch.equal(merged, wanted.bfloat16())
            continue
        packed, fresh = bitsandbytes.functional.quantize_4bit(
            wanted, blocksize=64, quant_type="nf4", compress_statistics=double_quant)
        assert torch.equal(merged.detach(), packed) and torch.equal(merged.quant_state.absmax, fresh.absmax)
        x = torch.randn(5, linear.in_features).bfloat16()
        fresh.dtype = torch.bfloat16
        decoded = bitsandbytes.functional.dequantize_4bit(packed, fresh)
        assert torch.equal(linear(x), torch.nn.functional.linear(x, decoded))


def test_stale_scales_would_show():
    """What a refresh that forgets the quantisation state does to the weights: the test above is able to fail."""
    double, lora = RequantizedCopy(model_4bit()), adapter()
    path = "model.layers.0.mlp.up_proj"
    old = state_tensors(double.merged[path])["absmax"].clone()
    double.refresh(lora)
    right = dequantized(double.merged[path])
    double.merged[path].quant_state.absmax.copy_(old)
    assert (dequantized(double.merged[path]) - right).norm() > 0.02 * right.norm()


@pytest.mark.parametrize("double_quant", [False, True])
def test_only_targets_own_storage_and_the_base_never_changes(double_quant):
    model = model_4bit(double_quant=double_quant)
    before, base = fingerprint(state(model)), {n: t.data_ptr() for n, t in state(model)}
    double = RequantizedCopy(model, ["q_proj", "per_layer_projection"])
    own = {n for n, t in state(double.inference) if t.data_ptr() != base[n]}
    assert own and all(n.split(".")[-2] in ("q_proj", "per_layer_projection") for n in own)
    assert double.extra_bytes == sum(num_bytes(model.get_submodule(p).weight) for p in double.merged)
    assert fingerprint(state(double.inference)) == before
    double.refresh(adapter(targets=["q_proj"]))
    assert fingerprint(state(double.inference)) != before
    double.refresh(None)
    assert fingerprint(state(double.inference)) == before == fingerprint(state(model))


def test_the_engine_sees_a_refresh_and_switches_adapters_on_disk(tmp_path):
    double = RequantizedCopy(model_4bit())
    engine = FlexEngine(double.inference, fake_tokenizer(), CONFIG)
    double.attach(engine)
    for seed in (1, 2):
        save_adapter(adapter(seed), tmp_path / str(seed), base="tiny")

    def tokens():
        return [c.token_ids for c in engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True))]
    seen = []
    for path in (None, tmp_path / "1", tmp_path / "2", tmp_path / "1", None):
        engine.use_adapter(path)
        seen.append(tokens())
        assert seen[-1] == run(double.inference)
    assert seen[0] == seen[4] and seen[1] == seen[3] and len({str(s) for s in seen}) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_an_adapter_that_is_not_finite_changes_nothing_and_is_named(bad):
    double, lora = RequantizedCopy(model_4bit()), adapter()
    before, path = fingerprint(state(double.inference)), "model.layers.3.mlp.down_proj"
    up = lora.pairs[path].up.clone()
    up[0, 0] = bad
    broken = replace(lora, pairs=lora.pairs | {path: Pair(lora.pairs[path].down * 1e3, up, 6.0)})
    with pytest.raises(AdapterError, match=path):
        double.refresh(broken)
    assert fingerprint(state(double.inference)) == before


def test_a_plain_double_copy_of_4_bit_weights_is_refused_with_the_ways_out():
    with pytest.raises(AdapterError, match="unmerged, or use lora.requantize"):
        DoubleCopy(model_4bit())


# ---- which base ---------------------------------------------------------------------------------------------------


def test_a_merge_is_against_the_dequantised_base_and_one_onto_another_base_is_reported_as_deviating():
    base, lora = model_4bit(), adapter()
    plain = as_plain(base)                                  # the 4-bit base, as fp32 numbers
    right, wrong = DoubleCopy(plain), DoubleCopy(bf16_model().float())
    right.refresh(lora)
    wrong.refresh(lora)
    with torch.no_grad():
        unmerged = unmerged_view(plain, lora)(IDS).logits
        torch.testing.assert_close(right.inference(IDS).logits, unmerged, rtol=0, atol=1e-4)
        assert (wrong.inference(IDS).logits - unmerged).abs().max() > 0.1
    on_base, on_other = (deviation(copy.inference, base, lora) for copy in (right, wrong))
    assert not on_base.deviates and on_base.max_abs < 1e-6
    assert on_other.deviates and on_other.relative > 0.03 and "dequantised 4-bit base" in str(on_other)


def test_rounding_the_merge_to_bf16_is_no_deviation():
    base, lora = model_4bit(), adapter()
    double = DoubleCopy(as_plain(base, torch.bfloat16))
    double.refresh(lora)
    assert not deviation(double.inference, base, lora).deviates


@pytest.mark.parametrize("merge_it", [False, True])
def test_a_session_reports_how_far_requantising_went_from_the_merge(tmp_path, merge_it):
    save_adapter(adapter(), tmp_path, base="tiny")
    session, model = LoraSession(tmp_path, merge=merge_it), model_4bit()
    session.put_on(model)
    off = session.summary()["deviation"]
    if merge_it:
        assert off["base"] == "dequantised 4-bit base" and off["modules"] == 38
        assert 0 < off["mean_abs"] < off["max_abs"] < 0.2 and off["relative"] > 0.03
    else:
        assert off is None and session.double is None
        with pytest.raises(AdapterError, match="--lora_4bit requantize"):
            session.verify(None, None, [], iterations=1)


# ---- drift ----------------------------------------------------------------------------------------------------------


def verify(tamper=lambda double: None, **options):
    model = model_4bit(**options)
    double = RequantizedCopy(model)

    def build(on):
        return FlexEngine(on, fake_tokenizer(), replace(CONFIG, capture_cudagraph=True))
    engine = build(double.inference)
    double.attach(engine)
    return drift.verify_no_drift(engine, double, adapter(), build, PROMPTS, iterations=3,
                                 on_cycle=lambda n: tamper(double) if n == 2 else None)


@pytest.mark.parametrize("double_quant", [False, True])
def test_drift_verification_checks_what_applies_and_says_what_does_not(double_quant):
    report = verify(double_quant=double_quant)
    assert report.passed, [t for t in (*report.tiers, *report.controls) if not t.passed]
    tiers = {t.name: t for t in report.tiers}
    assert [name for name, t in tiers.items() if not t.applies] == ["output, against PEFT unmerged"]
    assert tiers["accuracy"].figures["requantized"] == 38
    assert "does not apply to 38 4-bit targets" in tiers["accuracy"].detail
    assert tiers["output, against a fresh engine"].detail == "bitwise equal"


@pytest.mark.parametrize("part", ["quant_map", "absmax"])
def test_a_changed_quantisation_state_of_the_base_fails_the_run(part):
    def tamper(double):
        state_tensors(next(w for w in double.pristine.values() if is_4bit(w)))[part].mul_(1.01)
    report = verify(tamper)
    assert not next(t for t in report.tiers if t.name == "base bit-identity").passed
