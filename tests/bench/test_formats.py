"""Formats set beside bf16: KL, agreement and floors are what their definitions say, on a model small enough for a test."""
from __future__ import annotations

import pytest
import torch

from gemma4_flex.bench import formats_page, recipes_page
from gemma4_flex.bench.formats import SIDES, engines_of, measure_formats
from gemma4_flex.bench.recipes import Candidate, candidates, compare_recipes, distance, weight_bytes
from gemma4_flex.bench.table import Table
from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.checkpoints.published import ASSETS
from gemma4_flex.params import EngineConfig

NAME = f"synthetic:{ASSETS / 'configs' / 'e4b-small.json'}"
CONFIG = EngineConfig(device="cpu", dtype="bfloat16", compile=False, attention="sdpa", max_batch_size=2,
                      max_seq_length=64).resolved("cpu")


@pytest.fixture(scope="module")
def base():
    return load_text_model(NAME, dtype=torch.bfloat16, device="cpu")


def test_distance_is_the_kl_of_the_definition_and_zero_for_the_same():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1]]), torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]])
    found = distance([p.log()], [q.log()])
    by_hand = [(p[n] * (p[n] / q[n]).log()).sum().item() for n in (0, 1)]
    assert found["kl_mean"] == pytest.approx(sum(by_hand) / 2, rel=1e-5)
    assert found["kl_max"] == pytest.approx(max(by_hand), rel=1e-5)
    assert found["top1"] == 0.5 and distance([p.log()], [p.log()])["kl_mean"] == 0


def test_more_bits_are_nearer_and_larger_and_bf16_is_bf16(base):
    prompts = [[2, 9, 30, 41, 7], [2, 100, 50]]
    which = candidates(["BF16", "Q8_0", "Q4_0"], [], ["Q4_0"])
    record = compare_recipes(base, CONFIG, prompts, which, new_tokens=5)
    kl = {row["name"]: row["kl_mean"] for row in record["formats"]}
    size = {row["name"]: row["weight_bytes"] for row in record["formats"]}
    assert kl["GGUF BF16"] == 0 < kl["GGUF Q8_0"] < kl["GGUF Q4_0"]
    assert size["GGUF Q4_0, PLE table too"] < size["GGUF Q4_0"] < size["GGUF Q8_0"] < size["GGUF BF16"] == weight_bytes(base.model)
    assert record["positions"] == 2 * 5
    told = recipes_page.told({"model_name": "x", **record}, Table.text)
    assert all(name in told for name in kl)


def test_every_side_has_its_own_bytes_and_a_table_in_host_memory_the_same_tokens(base, tmp_path, monkeypatch):
    monkeypatch.setattr("gemma4_flex.bench.formats.SIDES", SIDES[:4])     # groups of 64 do not fill these rows
    engines = engines_of(NAME, base, CONFIG, tmp_path, 0)
    record = measure_formats(engines, batches=[2], prompt_tokens=4, new_tokens=3, rounds=1, seed=0)
    [job] = record["jobs"]
    host, q8, q4 = (job["sides"][name] for name in ("bf16, PLE table in host memory", "GGUF Q8_0", "GGUF Q4_0"))
    assert host["same_tokens_as_bf16"] and host["step_weight_bytes"] == job["sides"]["bf16"]["step_weight_bytes"]
    assert q4["step_weight_bytes"] < q8["step_weight_bytes"] < host["step_weight_bytes"]
    memory = record["memory"]
    table = base.model.model.embed_tokens_per_layer.weight.nbytes
    assert memory["bf16"]["weights"] - memory["bf16, PLE table in host memory"]["weights"] == table
    assert "over bf16" in formats_page.told(record, Table.text)


def test_candidates_are_written_as_they_are_named():
    assert candidates(["Q8_0"], ["4bit"], ["Q4_0"]) == [
        Candidate("GGUF Q8_0", gguf_type="Q8_0"), Candidate("GGUF Q4_0, PLE table too", gguf_type="Q4_0", ple_type="Q4_0"),
        Candidate("MLX 4bit", recipe="4bit")]
