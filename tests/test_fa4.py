"""FlashAttention-4 is chosen where it can run and has proved itself, refused by name where it was asked for and cannot."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gemma4_flex import attention, fa4
from gemma4_flex.attention import row_width
from gemma4_flex.geometry import FULL, LayerGeometry
from gemma4_flex.params import EngineConfig, InvalidParameterError
from tests.dense import dense_model
from tests.engines import make_engine
from tests.pools import filled_group, prefill_rows, random_queries, written_out

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
FITS = {"dtype": "bfloat16", "page_size": 128, "installed": True}
LAYER = LayerGeometry(0, FULL, 6, 2, 16, None, 8, 0, 0.25)


@pytest.fixture
def uncompiled(monkeypatch):
    """flex_attention's plain form, which computes the same mask and blocks without the kernel."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)


@pytest.mark.parametrize(("head_dim", "capability", "changed", "says"), [
    (128, (9, 0), {}, None), (64, (10, 0), {}, None), (128, (10, 3), {}, None),
    (256, (9, 0), {}, "head_dim 128 and this model has 256"), (512, (10, 0), {}, "has 512"),
    (128, (8, 0), {}, "Hopper or Blackwell"), (128, (12, 0), {}, "Hopper or Blackwell"), (128, None, {}, "Hopper or Blackwell"),
    (128, (9, 0), {"dtype": "float32"}, "float32"), (128, (9, 0), {"page_size": 64}, "page_size is 64"),
    (128, (9, 0), {"installed": False}, "flash_attn.cute is not installed"),
])
def test_what_stands_in_the_way_is_named(head_dim, capability, changed, says):
    found = fa4.obstacle(head_dim, capability, **(FITS | changed))
    assert (found is None) if says is None else says in found


def test_nothing_is_tried_where_it_is_off_or_cannot_run_and_a_line_says_why():
    def never():
        raise AssertionError("tried")
    assert fa4.choose(False, None, never) == (False, None)
    on, line = fa4.choose(None, "it needs another GPU", never)
    assert not on and "Triton" in line and "it needs another GPU" in line and "\n" not in line
    with pytest.raises(InvalidParameterError, match="it needs another GPU.*no-fa4_prefill"):
        fa4.choose(True, "it needs another GPU", never)


def test_a_trial_decides_where_nothing_else_does():
    assert fa4.choose(None, None, lambda: None) == fa4.choose(True, None, lambda: None) == (True, None)
    on, line = fa4.choose(None, None, lambda: "it is 3 off")
    assert not on and "it is 3 off" in line
    with pytest.raises(InvalidParameterError, match="it is 3 off"):
        fa4.choose(True, None, lambda: "it is 3 off")


def test_its_tiles_make_the_rows_as_wide_as_they_have_to_be():
    assert [row_width("cuda", "flex", at_least=fa4.query_tile(c)) for c in ((9, 0), (10, 0))] == [128, 256]
    assert row_width("cuda", "flex") == 128 and row_width("cpu", "flex") == 32


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"head_dim": 16, "kv_heads": 2}, {"head_dim": 16, "window": 5}], ids=str)
def test_rows_one_after_the_other_see_what_rows_in_a_batch_see(shape, uncompiled):
    filled = filled_group({2: 19, 5: 3, 1: 9}, **shape)
    rows = prefill_rows([(2, 4, 8), (5, 0, 3), (2, 12, 7), (1, 1, 8)], width=8)
    q = random_queries(rows, heads=6, head_dim=16)
    backend = attention.PagedBackend("flex", filled.group, {"decode": None, "prefill": fa4.OPTIONS})
    ours = backend.attend(q, filled.group.keys[0], filled.group.values[0], rows, backend.plan(rows), 0, {}, 0.25)
    assert (ours.double() - written_out(q.double() * 0.25, filled, rows)).abs().max() < 1e-5


def test_the_trial_passes_what_is_attention_and_names_what_is_not(uncompiled, monkeypatch):
    with torch.no_grad():
        assert fa4.trial(LAYER, 16, 16, torch.float32, "cpu") is None
        right = attention._flash
        monkeypatch.setattr(attention, "_flash", lambda *args: right(*args[:-1], 1.0))
        assert "off scaled_dot_product_attention" in fa4.trial(LAYER, 16, 16, torch.float32, "cpu")

        def broken(*args):
            raise RuntimeError("BACKEND='FLASH' but flash attention cannot be used\nmore")
        monkeypatch.setattr(attention, "_flash", broken)
        said = fa4.trial(LAYER, 16, 16, torch.float32, "cpu")
    assert "it fails on this card (RuntimeError: BACKEND='FLASH'" in said and "\n" not in said


# ---- what an engine does with it ----------------------------------------------------------------------------------

class Card:
    """A device that says it is a GPU of this compute capability."""

    type = "cuda"

    def __init__(self, monkeypatch, capability, trial=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(fa4, "is_installed", lambda: True)
        monkeypatch.setattr(fa4, "trial", lambda *args: trial)


CONFIG = EngineConfig(dtype="bfloat16", page_size=128)
WIDE = LayerGeometry(0, FULL, 8, 1, 512, None, 8, 0)


def test_a_card_that_passes_the_trial_runs_it_and_the_line_is_there_where_it_does_not(monkeypatch):
    for capability in ((9, 0), (10, 0)):
        assert fa4.prefill_options(LAYER, CONFIG, Card(monkeypatch, capability), name="flex") == ({"BACKEND": "FLASH"}, None)
    options, line = fa4.prefill_options(LAYER, CONFIG, Card(monkeypatch, (9, 0), "it is 3 off"), name="flex")
    assert options is None and "it is 3 off" in line
    options, line = fa4.prefill_options(LAYER, CONFIG, Card(monkeypatch, (8, 0)), name="flex")
    assert options is None and "Triton" in line and "Hopper or Blackwell" in line


@pytest.mark.parametrize(("layer", "fields", "name", "said"), [
    (WIDE, {}, "flex", None), (LAYER, {"fa4_prefill": False}, "flex", None),
    (LAYER, {"prefill_kernel_options": {"num_stages": 2}}, "flex", None),
    (LAYER, {"deterministic": True}, "flex", "deterministic"), (LAYER, {}, "sdpa", "attention runs on sdpa")])
def test_it_stays_off_where_it_is_not_for(layer, fields, name, said, monkeypatch):
    options, line = fa4.prefill_options(layer, dataclasses.replace(CONFIG, **fields), Card(monkeypatch, (9, 0)), name=name)
    assert options is None and (line is None if said is None else said in line)


def test_where_it_is_forced_and_cannot_run_the_engine_is_not_made(monkeypatch):
    with pytest.raises(InvalidParameterError, match="stops at head_dim 128 and this model has 512"):
        fa4.prefill_options(WIDE, dataclasses.replace(CONFIG, fa4_prefill=True), Card(monkeypatch, (9, 0)), name="flex")
    with pytest.raises(InvalidParameterError, match="needs a Hopper or Blackwell GPU"):
        make_engine(dense_model("qwen3"), fa4_prefill=True)
    assert make_engine(dense_model("qwen3")).notices == []


def test_torch_takes_the_option_by_this_name():
    from typing import get_args

    from torch.nn.attention.flex_attention import _Backend
    assert fa4.OPTIONS["BACKEND"] in get_args(_Backend)
