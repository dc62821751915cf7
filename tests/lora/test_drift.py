"""Drift verification: passes on a sound engine, and every fault it looks for is really seen."""
from __future__ import annotations

import pytest
import torch

from gemma4_flex import EngineConfig, FlexEngine
from gemma4_flex.lora import drift
from gemma4_flex.lora.adapters import random_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from tests.tiny import fake_tokenizer, tiny_model

CONFIG = EngineConfig(attention="sdpa", compile=False, capture_cudagraph=True, max_batch_size=1, max_seq_length=128, page_size=4,
                      max_prefill_tokens=16)
PROMPTS = [[2, 5, 9, 13, 40], [2, 7, 7, 7, 30, 31, 32, 33, 34, 35]]


def build(model):
    return FlexEngine(model, fake_tokenizer(), CONFIG)


def verify(dtype, tamper=lambda double: None, iterations=4):
    model = tiny_model(dtype=dtype)
    double = DoubleCopy(model)
    engine = build(double.inference)
    double.attach(engine)
    lora = random_adapter(model, "all-linear", rank=3, alpha=6, strength=0.05, seed=0)
    return drift.verify_no_drift(engine, double, lora, build, PROMPTS, iterations=iterations,
                                 on_cycle=lambda n: tamper(double) if n == iterations - 1 else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_engine_passes_every_tier_and_catches_every_control(dtype):
    report = verify(dtype)
    assert report.passed, [t for t in (*report.tiers, *report.controls) if not t.passed]
    assert len(report.tiers) == 6 and len(report.controls) == 4


def one_base_bit(double):
    weight = next(iter(double.pristine.values()))
    weight.detach().view(torch.uint8).view(-1)[0] ^= 1


def test_a_base_weight_changed_during_training_fails_the_run():
    report = verify(torch.bfloat16, one_base_bit)
    assert not report.passed
    assert next(t.name for t in report.tiers if not t.passed) == "base bit-identity"


def test_a_merge_that_is_off_by_a_rounding_fails_the_run(monkeypatch):
    def rounded_twice(merged, base, pair):       # the habit this project exists to avoid: the delta rounded before it is added
        merged.copy_(base.float() + (drift.merge(base, pair) - base.float()).bfloat16().float())
    monkeypatch.setattr("gemma4_flex.lora.double_copy._merge_by_rows", rounded_twice)
    assert [t.name for t in verify(torch.bfloat16).tiers if not t.passed] == ["accuracy"]


def test_half_a_last_place_is_half_the_spacing():
    x = torch.tensor([1.0, 1.5, 3.0, -0.75], dtype=torch.float64)
    assert drift.half_ulp(x, torch.bfloat16).tolist() == [2**-8, 2**-8, 2**-7, 2**-9]
