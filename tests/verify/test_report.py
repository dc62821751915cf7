"""What one verification says and leaves behind."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.params import EngineConfig
from gemma4_flex.runner import Runner
from gemma4_flex.verify.report import Verification, as_json, describe, verify_model, write
from tests.tiny import tiny_model

CONFIG = EngineConfig(device="cpu", attention="sdpa", page_size=4, compile=False)


def verified(config: EngineConfig = CONFIG) -> Verification:
    model = tiny_model(dtype=getattr(torch, config.dtype if config.dtype != "auto" else "float32"))
    return verify_model(model, None, ModelGeometry.from_config(model.config), config, model_name="made/up name",
                        max_new_tokens=4, text_ids=[5] * 17)


@functools.cache
def right() -> Verification:
    return verified()


def spoiled() -> Verification:
    """As `right`, but the engine's logits were not finite."""
    levels = list(right().verdict.levels)
    levels[-1] = dataclasses.replace(levels[-1], engine_mean=float("nan"), engine_max=float("inf"))
    contracts = [dataclasses.replace(contract, passed=False) for contract in right().verdict.contracts]
    return dataclasses.replace(right(), verdict=dataclasses.replace(right().verdict, levels=levels, contracts=contracts))


def test_the_limits_of_the_engine_are_what_the_prompts_need():
    assert right().prompt_lengths == [1, 2, 3, 4, 5, 17, 17]
    assert (right().config.max_batch_size, right().config.max_seq_length) == (7, 21)
    assert not right().broken


def test_the_text_has_a_row_a_level_and_a_line_a_contract():
    lines = describe(right()).splitlines()
    for name in ("embedding", *(f"layer {i}" for i in range(6)), "logits", "prompt of 17"):
        assert any(line.startswith(name) for line in lines), name
    assert any(line.startswith("layer 4") and "sliding reads 2" in line for line in lines)
    assert [line.split(":")[0] for line in lines[-len(right().verdict.contracts):]] == ["kept"] * 3
    assert sum(line.startswith("BROKEN: ") for line in describe(spoiled()).splitlines()) == 3


def test_a_json_file_and_a_plot_are_written(tmp_path):
    json_path, plot_path = write(right(), tmp_path, {"commit": "abc"})
    assert json_path.name == "verify_up-name_float32_sdpa_paged.json"
    found = json.loads(json_path.read_text())
    assert found["passed"] is True and found["commit"] == "abc" and found["config"]["attention"] == "sdpa"
    assert [at["name"] for at in found["levels"]][::7] == ["embedding", "logits"]
    assert {contract["name"] for contract in found["contracts"]} == {contract.name for contract in right().verdict.contracts}
    assert plot_path.suffix == ".png" and plot_path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_values_that_are_not_finite_are_written_by_name(tmp_path):
    found = json.loads(write(spoiled(), tmp_path, {})[0].read_text())
    assert found["passed"] is False
    assert (found["levels"][-1]["engine_mean"], found["levels"][-1]["engine_max"]) == ("NaN", "Infinity")
    assert as_json(right())["levels"][-1]["engine_mean"] == right().verdict.levels[-1].engine_mean


@pytest.mark.parametrize("captures", [True, False])
def test_steps_that_were_to_be_replayed_and_were_not_break_a_contract(captures, monkeypatch):
    if not captures:
        monkeypatch.setattr(Runner, "capture", lambda self: None)
    done = verified(dataclasses.replace(CONFIG, capture_cudagraph=True))
    assert done.file_stem.endswith("_captured")
    assert (done.steps_replayed > 0) is captures and (done.steps_eager == 0) is captures
    assert [contract.name for contract in done.broken] == ([] if captures else ["decode steps are replayed"])
