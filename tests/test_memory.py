"""A step's memory is measured, and the pools get what is left of the share asked for."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex import memory
from gemma4_flex.memory import LiveBytes, step_bytes
from gemma4_flex.params import EngineConfig, InvalidParameterError
from tests.engines import SMALL, hf_generate, make_engine, some_prompts, tokens_of
from tests.tiny import tiny_model

UNSIZED = SMALL | {"n_pages": None}


def test_live_bytes_are_the_most_that_lived_at_once():
    given = torch.zeros(1000)
    with LiveBytes([given]) as counter:
        a = given + 1            # 4,000
        b = a.view(10, 100)      # the same storage
        del a
        c = b * 2                # 8,000
        del b, c
        given.add_(1)            # not made here
        d = given.double()       # 8,000, after all else is gone
    assert counter.peak == 8000
    del d
    assert counter.now == 0


def test_a_step_takes_more_with_more_tokens_and_counts_the_sidecar():
    model, geometry = (engine := make_engine(tiny_model(1))).model, engine.geometry

    def measured(**fields) -> int:
        return step_bytes(model, geometry, EngineConfig(**(SMALL | fields)).resolved("cpu"))
    small, large = measured(max_prefill_tokens=16), measured(max_prefill_tokens=64)
    assert 0 < small < large
    sidecar = make_engine(tiny_model(1), shared_kv="sidecar").runner.sidecar.num_bytes()
    assert measured(shared_kv="sidecar") >= sidecar + small // 2


@pytest.fixture
def a_machine(monkeypatch):
    """A machine of 1 MiB of which 400,000 B are taken."""
    monkeypatch.setattr(memory, "memory_in_use", lambda device: (400_000, 1 << 20))


def test_pools_get_what_is_left_and_work(a_machine):
    model = tiny_model(1)
    engine = make_engine(model, **(UNSIZED | {"gpu_memory_utilization": 0.9}))
    kv = sum(group.num_bytes() for group in engine.runner.cache.groups.values())
    step = step_bytes(model, engine.geometry, engine.config)
    room = int(0.9 * (1 << 20)) - 400_000 - step
    per_page = engine.config.page_size * engine.geometry.kv_bytes_per_token(4)["full_attention"]
    assert room - per_page < kv <= room or engine.config.n_pages == 1 + 4 * 32
    assert "90% of" in engine.sizing and str(engine.config.n_pages) in engine.sizing
    prompts = some_prompts(9, 3)
    assert tokens_of(engine, prompts, 6) == [hf_generate(model, p, 6) for p in prompts]


def test_no_room_is_an_error_that_says_what_to_do(a_machine):
    with pytest.raises(InvalidParameterError, match="leaves no room for K/V.*lower max_batch_size"):
        make_engine(tiny_model(1), **(UNSIZED | {"gpu_memory_utilization": 0.4}))


@pytest.mark.parametrize("share", [0, -0.5, 1.5, True, "most"])
def test_a_share_is_a_number_up_to_one(share):
    with pytest.raises(InvalidParameterError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


def test_two_ways_of_sizing_are_one_too_many():
    with pytest.raises(InvalidParameterError, match="one of them"):
        EngineConfig(n_pages=9, gpu_memory_utilization=0.9)
