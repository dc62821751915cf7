"""The table of per-layer embeddings in host memory: the same bits, out of captured steps too, and never a copy of it."""
from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.engine import FlexEngine
from gemma4_flex.host_table import host_rows
from gemma4_flex.models import projections
from gemma4_flex.models.projections import look_up
from gemma4_flex.params import EngineConfig, InvalidParameterError
from tests.dense import dense_model
from tests.engines import hf_generate, make_engine, some_prompts, tokens_of
from tests.packings import packed_twins
from tests.tiny import tiny_model

UNRELATED = some_prompts(9, 3, 17, 12, seed=8)
CAPTURED = {"capture_cudagraph": True, "max_batch_size": 1}


@pytest.fixture(scope="module")
def model():
    return tiny_model(4)


def test_rows_are_fetched_whatever_their_shape_and_dtype():
    ids = torch.tensor([3, 0, 3, 6])
    for table in (torch.randn(7, 5), torch.randn(7, 5).bfloat16(), torch.randint(0, 255, (7, 4, 3)).byte()):
        assert torch.equal(host_rows(table, ids), table[ids])
        torch.library.opcheck(host_rows, (table, ids), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("how", [{}, CAPTURED | {"decode_steps_per_sync": 1}, CAPTURED | {"decode_steps_per_sync": 8}],
                         ids=["eager", "captured", "captured, many steps between syncs"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_placements_give_the_same_bits(model, packed, how):
    model = packed_twins(model, lambda path: path == "model.embed_tokens_per_layer")[0] if packed else model
    device, host = (make_engine(model, ple=place, **how) for place in ("device", "host"))
    assert torch.equal(device.trace(UNRELATED[0], UNRELATED[1]).logits, host.trace(UNRELATED[0], UNRELATED[1]).logits)
    assert tokens_of(device, UNRELATED, 14) == tokens_of(host, UNRELATED, 14)
    assert host.stats.steps_eager == (0 if how else host.stats.steps_eager) and (host.stats.steps_replayed > 0) == bool(how)


def test_one_captured_graph_answers_four_unrelated_prompts(model):
    engine = make_engine(model, ple="host", **CAPTURED)
    for prompt in UNRELATED:
        assert tokens_of(engine, [prompt], 12) == [hf_generate(model, prompt, 12)]
    assert len(engine.runner.graphs) == 1 and engine.stats.steps_eager == 0 and engine.stats.steps_replayed >= 44


def test_a_gather_that_is_frozen_at_capture_is_seen(model, monkeypatch):
    found: dict[int, torch.Tensor] = {}

    def frozen(table, ids):     # fetched by the host when the step is recorded, and a constant from then on
        return found.setdefault(len(ids), table[torch.full_like(ids, 5, device="cpu")])
    wanted = [hf_generate(model, prompt, 12) for prompt in UNRELATED]
    monkeypatch.setattr(projections, "host_rows", frozen)
    engine = make_engine(model, ple="host", **CAPTURED)
    assert [tokens_of(engine, [prompt], 12)[0] for prompt in UNRELATED] != wanted


class Copies(TorchDispatchMode):
    """Notes which operations take, or make, a tensor as large as a table."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.seen = size, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        if any(t.numel() >= self.size and t.device.type != "meta" for t in tensors):
            self.seen.append(func.overloadpacket.__name__)
        return made


@contextmanager
def pretended_cuda():
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


def test_a_gpus_ids_bring_rows_and_no_copy_that_a_capture_forbids():
    """With fake tensors: the only operation that touches the table is the one whose kernel reads pinned memory."""
    with pretended_cuda(), Copies(900) as copies:
        ids = torch.empty(4, dtype=torch.int64, device="cuda")
        found = look_up(torch.randn(900, 16), ids, in_host_memory=True)
        assert found.device.type == "cuda" and found.shape == (4, 16)
    assert set(copies.seen) - {"randn"} == {"host_rows"}


def test_the_table_is_made_once_and_never_copied_whole():
    size = load_text_model("tiny", dtype=torch.float32, device="cpu").model.model.embed_tokens_per_layer.weight.numel()
    with Copies(size) as copies:
        loaded = load_text_model("tiny", dtype=torch.float32, device="cpu", ple="host")
    assert copies.seen.count("copy_") == 1 and copies.seen.count("empty") == 1
    assert not {"_to_copy", "clone", "cat"} & set(copies.seen)
    engine = FlexEngine(loaded.model, loaded.tokenizer, EngineConfig(ple="host", dtype="float32", compile=False, max_batch_size=1,
                                                                      max_seq_length=128, attention="sdpa"))
    with Copies(size) as copies:
        tokens_of(engine, [[2, 5, 9]], 3)
    assert set(copies.seen) <= {"host_rows", "detach"}


def test_memory_in_host_memory_is_told_apart(model):
    device, host = (make_engine(model, ple=place).memory_report() for place in ("device", "host"))
    table = model.model.embed_tokens_per_layer.weight.nbytes
    assert device["ple_host"] == 0 and host["ple_host"] == table and device["weights"] - host["weights"] == table


def test_a_model_without_the_table_is_refused():
    with pytest.raises(InvalidParameterError, match="no per-layer embeddings"):
        make_engine(dense_model("qwen3"), ple="host")
    with pytest.raises(InvalidParameterError, match="ple"):
        EngineConfig(ple="disk")
