"""Whole steps at E2B's geometry, planned for a GPU that is not here, without Triton: a change that adds launches is seen.

Patches torch.cuda for the rest of its process, so the counting runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemma4_flex.bench.step_page import step_line, step_markdown, step_record

ROOT = Path(__file__).resolve().parents[2]
COUNT = """
import json, sys
from gemma4_flex.bench.pretended_gpu import GPUS
from gemma4_flex.bench.step_kernels import Work, step_launches
from gemma4_flex.checkpoints.published import PUBLISHED
for phase, batch, length in (("decode", 8, 2048), ("prefill", 8, 256)):
    step = step_launches(PUBLISHED["E2B"], Work(phase, batch, length), GPUS["sm_90"])
    print(json.dumps({"total": step.total, "num_bytes": step.num_bytes, "between": dict(step.between), "regions": {
        name: [times, [[l.kind, l.name, l.num_bytes] for l in launches]] for name, times, launches in step.regions}}))
"""
# a step's launches as planned today; a change that lowers one lowers the number here
MOST_LAUNCHES = {"decode": 396, "prefill": 466}
# E2B, bf16: the weights that a decode step reads (DESIGN.md's floor), and 8 sequences' K/V: 2,048 tokens in 7 full layers of
# 2 x 512, 512 in 28 sliding ones of 2 x 256
FLOOR_BYTES = 4_560_000_000 + 8 * 2 * (7 * 2048 * 2 * 512 + 28 * 512 * 2 * 256)


@pytest.fixture(scope="module")
def steps() -> dict[str, dict]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", COUNT], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    decode, prefill = (json.loads(line) for line in done.stdout.strip().splitlines()[-2:])
    return {"decode": decode, "prefill": prefill}


def layers_of(step: dict) -> dict[str, tuple[int, list]]:
    return {name: (times, launches) for name, (times, launches) in step["regions"].items() if name.startswith("layer")}


@pytest.mark.parametrize("phase", MOST_LAUNCHES)
def test_a_step_makes_no_more_launches_than_it_did(steps, phase):
    assert steps[phase]["total"] <= MOST_LAUNCHES[phase], {n: (t, len(la)) for n, (t, la) in steps[phase]["regions"].items()}


def test_a_decode_step_calls_one_region_a_layer_and_layers_of_a_kind_share_it(steps):
    assert {name: times for name, (times, _) in layers_of(steps["decode"]).items()} == {
        "layer sliding_attention owner": 12, "layer full_attention owner": 3, "layer sliding_attention shared": 16,
        "layer full_attention shared": 4}


def test_the_linears_of_a_layer_are_six_matmuls_and_its_attention_is_one_call(steps):
    for _, launches in layers_of(steps["decode"]).values():
        kinds = [kind for kind, _, _ in launches]
        assert kinds.count("matmul") == 6
        assert kinds.count("flex") == 1


def test_no_kernel_of_a_decode_step_moves_a_whole_pool(steps):
    largest_pool = 2048 * 128 * 512 * 2
    moved = [num_bytes for _, launches in layers_of(steps["decode"]).values() for _, _, num_bytes in launches]
    assert max(moved) < largest_pool


def test_a_decode_step_moves_the_weights_and_the_keys_in_view_and_little_else(steps):
    assert 1.0 <= steps["decode"]["num_bytes"] / FLOOR_BYTES < 1.05


def test_the_page_shows_a_step_before_and_after():
    kernel = {"region": "layer", "kind": "flex", "name": "attention", "launches": 35, "num_bytes": 2_000_000,
              "shared_bytes": 76_032, "registers": 168, "spill_bytes": 0}
    row = {"model": "E2B", "phase": "decode", "batch": 1, "length": 2048, "arch": "sm_90", "launches": 409,
           "by_kind": {"matmul": 212, "flex": 35}, "num_bytes": 4_800_000_000, "spilling_hot_kernels": 0,
           "regions": {"layer": [35, 11]}, "between": {}, "kernels": [kernel]}
    after = {"torch": "2.13.0", "triton": "3.7.1", "steps": [row]}
    before = {"what": "as one graph", "steps": [{**row, "launches": 796}]}
    page = step_markdown(after, before)
    assert "| E2B | decode 1 x 2048 | sm_90 | 796 | 4.80 | 409 | 212 | 35 | 4.80 | 0 |" in page
    assert "| layer | attention | flex | 35 | 2,000 | 76,032 / 168 / 0 |" in page
    assert "409 launches" in step_line(row)
    assert json.loads(step_record(after)) == after
