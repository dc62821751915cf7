"""LoRA over packed weights: beside them, and merged into an unpacked copy of the targets."""
from __future__ import annotations

import pytest
import torch

from gemma4_flex import EngineConfig, FlexEngine
from gemma4_flex.fingerprint import fingerprint
from gemma4_flex.lora import drift
from gemma4_flex.lora.adapters import linears_of, random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.unmerged import unmerged_view
from gemma4_flex.models.packed_modules import is_packed
from tests.engines import hf_logits, make_engine, some_prompts
from tests.packings import packed_twins
from tests.tiny import fake_tokenizer, tiny_model

PROMPT, FORCED = some_prompts(11, 6, seed=3)
CONFIG = EngineConfig(attention="sdpa", compile=False, capture_cudagraph=True, max_batch_size=1, max_seq_length=128, page_size=4,
                      max_prefill_tokens=16)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def twins(request):
    packed, dense = packed_twins(tiny_model(2, request.param))
    return packed, dense, random_adapter(packed, "all-linear", rank=3, alpha=6, strength=0.05, seed=0)


def test_an_adapter_made_for_packed_weights_is_the_one_made_for_their_values(twins):
    packed, dense, lora = twins
    twin = random_adapter(dense, "all-linear", rank=3, alpha=6, strength=0.05, seed=0)
    assert lora.pairs.keys() == twin.pairs.keys() == linears_of(packed).keys()
    assert all(torch.equal(pair.up, twin.pairs[path].up) for path, pair in lora.pairs.items())


def test_an_unmerged_adapter_over_packed_weights_is_the_one_over_their_values(twins):
    packed, dense, lora = twins
    ours, theirs = unmerged_view(packed, lora), unmerged_view(dense, lora)
    assert torch.equal(hf_logits(ours, PROMPT), hf_logits(theirs, PROMPT))
    assert not torch.equal(hf_logits(ours, PROMPT), hf_logits(packed, PROMPT))
    logits = make_engine(ours).trace(PROMPT, FORCED).logits
    wanted = make_engine(theirs).trace(PROMPT, FORCED).logits
    assert (logits - wanted).abs().max() < (1e-4 if packed.model.norm.weight.dtype == torch.float32 else 0.5)


def test_a_double_copy_over_packed_weights_is_the_one_over_their_values_bit_for_bit(twins):
    packed, dense, lora = twins
    before = fingerprint(drift.state(packed))
    ours, theirs = DoubleCopy(packed), DoubleCopy(dense)
    assert ours.extra_bytes == theirs.extra_bytes
    for adapter in (lora, None, lora):
        ours.refresh(adapter)
        theirs.refresh(adapter)
        for path, weight in linears_of(theirs.inference).items():
            assert torch.equal(linears_of(ours.inference)[path].weight, weight.weight), path
        assert torch.equal(hf_logits(ours.inference, PROMPT), hf_logits(theirs.inference, PROMPT))
    assert fingerprint(drift.state(packed)) == before and all(map(is_packed, linears_of(packed).values()))


def test_targets_alone_are_unpacked(twins):
    packed, _, _ = twins
    double = DoubleCopy(packed, ["q_proj", "model.layers.1.mlp.down_proj"])
    dense = {path for path, linear in linears_of(double.inference).items() if not is_packed(linear)}
    assert dense == set(double.merged) == {p for p in linears_of(packed) if p.endswith("q_proj")} | {"model.layers.1.mlp.down_proj"}
    tables = [m.get_submodule("model.embed_tokens_per_layer").packed.parts[0] for m in (packed, double.inference)]
    assert tables[0].data_ptr() == tables[1].data_ptr()


def test_drift_verification_over_packed_weights_passes_and_catches_every_control(twins):
    packed, _, lora = twins

    def build(model):
        return FlexEngine(model, fake_tokenizer(), CONFIG)
    double = DoubleCopy(packed)
    engine = build(double.inference)
    double.attach(engine)
    report = drift.verify_no_drift(engine, double, lora, build, [PROMPT, FORCED], iterations=3)
    assert report.passed, [t for t in (*report.tiers, *report.controls) if not t.passed]
    assert len(report.tiers) == 6 and len(report.controls) == 4
