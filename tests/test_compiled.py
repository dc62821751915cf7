"""Compiled regions compute what the plain functions compute, at every size, and see what is written in place."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_flatten

from gemma4_flex import backends as backends_module
from gemma4_flex.compiled import CompilePlan, Regions, compile_obstacle
from gemma4_flex.draws import GREEDY
from gemma4_flex.engine import FlexEngine
from gemma4_flex.models.projections import lay_side_by_side
from gemma4_flex.step_graph import CaptureError
from gemma4_flex.verify.numerics import consult, judge, run_engine
from tests.engines import assert_all_free, greedy, hf_generate, hf_logits, make_engine, pages_hash, some_prompts, tokens_of
from tests.tiny import FULL, SLIDING, tiny_model

SEED = 1
LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 2}      # one of each kind
PROMPTS = some_prompts(9, 3, 17)
FORCED = some_prompts(10, seed=5)[0]
STATIC = CompilePlan("layer", symbolic=False)      # the GPU's way
ONE_SHAPE = {"compile": True, "max_batch_size": 1, "max_seq_length": 64, "page_size": 64, "n_pages": 3, "max_prefill_tokens": 32}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def compiled_engine(model, **overrides) -> FlexEngine:
    """Two rows at most: compiled with sizes as symbols at a batch of 2, and used at 1 and 2."""
    engine = make_engine(model, **({"compile": True, "max_batch_size": 2, "max_seq_length": 64, "n_pages": 33} | overrides))
    engine.prepare()
    return engine


@pytest.fixture(scope="module")
def model():
    model = tiny_model(SEED, **LAYERS)
    lay_side_by_side(model.model)
    return model


@pytest.fixture(scope="module")
def engine(model) -> FlexEngine:
    return compiled_engine(model, capture_cudagraph=True)


# ---- regions ------------------------------------------------------------------------------------------------------

class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None
    number: int


class Counted:
    """A region over a held table and pool, that counts how often it is traced or run."""

    def __init__(self):
        self.calls = 0
        self.held = torch.tensor([10.0, 20.0, 30.0])

    def __call__(self, x: Tensor, pair: Pair, pool: Tensor, same: Tensor) -> dict:
        self.calls += 1
        pool[:] = pool + x.sum()
        return {"sum": x + same + pair.left * pair.number, "held": x.sum() * self.held, "none": pair.right, "number": pair.number}


def call(regions: Regions, fn: Counted, size: int, pool: Tensor, *, number: int = 3) -> dict:
    x = torch.arange(float(size))
    return regions(("counted",), fn, x, Pair(torch.ones(size), None, number), pool, x)


def test_a_region_is_compiled_once_for_all_sizes_and_reads_and_writes_where_tensors_lie():
    regions, fn, pool = Regions(CompilePlan("step", symbolic=True)), Counted(), torch.zeros(2)
    for n, size in enumerate((4, 7, 2, 1, 50)):
        out = call(regions, fn, size, pool)
        assert out["sum"].tolist() == [2 * i + 3 for i in range(size)]
        assert out["held"].tolist() == [size * (size - 1) / 2 * h for h in (10, 20, 30)]
        assert (out["none"], out["number"]) == (None, 3)
        assert pool.tolist() == [sum(s * (s - 1) / 2 for s in (4, 7, 2, 1, 50)[: n + 1])] * 2
    assert (fn.calls, len(regions._compiled)) == (1, 1)
    assert regions.compile_s > 0
    fn.held[1] = -1      # a tensor that nobody gave: it is read where it is, and not as it was
    assert call(regions, fn, 3, pool)["held"].tolist() == [30, -3, 90]
    assert fn.calls == 1


def test_a_recorded_run_of_regions_is_replayed_on_what_its_tensors_hold_now():
    regions, x, y = Regions(CompilePlan("step", symbolic=True)), torch.ones(4), torch.zeros(4)
    def first(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:2] - 1

    def second(doubled: Tensor, y: Tensor) -> Tensor:
        y += doubled
        return y.sum()
    between = []

    def step() -> tuple[Tensor, Tensor, int]:
        between.append(1)
        doubled, less = regions(("first",), first, x)
        return regions(("second",), second, doubled, y), less, 7
    replay = regions.record(step)
    assert y.tolist() == [2] * 4
    x.fill_(10)
    total, less, number = replay()
    assert (total.item(), less.tolist(), number) == (88, [9, 9], 7)
    assert y.tolist() == [22] * 4
    assert between == [1], "the Python between regions is not run again"
    with pytest.raises(AssertionError, match="outside of regions"):
        regions.record(lambda: regions(("second",), second, regions(("first",), first, x)[0][:], y))
    assert regions._calls is None
    assert Regions(STATIC).record(step) is step, "where layers are regions there are views between them"


def test_compiled_code_is_not_given_sizes_it_was_not_compiled_for():
    regions = Regions(CompilePlan("step", symbolic=True))

    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y.sum(1)
    regions(("add",), add, torch.ones(3), torch.ones(3, 5))
    assert regions(("add",), add, torch.ones(4), torch.ones(4, 5)).tolist() == [6] * 4
    with pytest.raises(AssertionError, match="input 1 of a compiled region"):
        regions(("add",), add, torch.ones(4), torch.ones(7, 5))


def test_another_number_another_key_or_another_sharing_of_tensors_is_another_region(monkeypatch):
    made, any_region = [], SimpleNamespace(check=lambda given: None, run=lambda given: given, form=[], spec=tree_flatten(())[1])
    monkeypatch.setattr(Regions, "_compile", lambda self, *rest: made.append(rest) or any_region)
    regions = Regions(CompilePlan("step", symbolic=True))
    x, y = torch.ones(3), torch.ones(3)
    for args in ((x, y, 1), (y, x, 1), (x, y, 2), (x, x, 1), (torch.ones(5), y, 1)):
        regions(("one",), None, *args)
    assert len(made) == 3
    regions(("other",), None, x, y, 1)
    assert len(made) == 4
    static = Regions(STATIC)
    made.clear()
    for args in ((x, y), (y, x), (torch.ones(5), y), (torch.ones(6)[::2], y)):
        static(("one",), None, *args)
    assert len(made) == 3, "sizes and strides count where they are no symbols"


def test_without_a_plan_or_inside_off_nothing_is_compiled():
    for regions in (Regions(), Regions(STATIC)):
        fn, pool = Counted(), torch.zeros(2)
        with regions.off():
            assert call(regions, fn, 2, pool)["sum"].tolist() == [3, 5]
            call(regions, fn, 2, pool)
        assert (fn.calls, regions._compiled) == (2, {})
    assert (Regions().scope, Regions(STATIC).scope) == (None, "layer")


def test_a_machine_without_a_cpp_compiler_runs_uncompiled_and_says_what_to_install(model, monkeypatch):
    from torch._inductor import cpp_builder

    def none():
        raise RuntimeError("no compiler")
    assert compile_obstacle("cpu") is None
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert compile_obstacle("cuda") is None
    engine = make_engine(model, compile=True)
    assert engine.runner.regions.plan is None
    assert len(engine.notices) == 1
    assert "install g++" in engine.notices[0]
    assert tokens_of(engine, PROMPTS[:1], 3)[0] == hf_generate(model, PROMPTS[0], 3)


# ---- the compiled step --------------------------------------------------------------------------------------------

def test_compiled_captured_tokens_are_those_of_transformers_generate_batched_and_alone(model, engine):
    expected = [hf_generate(model, prompt, 20) for prompt in PROMPTS]
    assert tokens_of(engine, PROMPTS, 20) == expected
    assert [tokens_of(engine, [prompt], 20)[0] for prompt in PROMPTS] == expected
    assert engine.stats.steps_eager == 0
    assert engine.notices == []
    assert_all_free(engine)


def test_compiled_logits_are_the_uncompiled_ones(model, engine):
    compiled = engine.trace(PROMPTS[0], FORCED).logits
    plain = make_engine(model).trace(PROMPTS[0], FORCED).logits
    assert torch.allclose(compiled, plain, atol=1e-4)
    assert torch.allclose(compiled, hf_logits(model, PROMPTS[0] + FORCED)[len(PROMPTS[0]) - 1:], atol=1e-4)


def test_one_compile_serves_every_batch_and_every_context(engine):
    compiled, seconds = dict(engine.runner.regions._compiled), engine.stats.compile_s
    engine.generate(PROMPTS, [greedy(n) for n in (30, 7, 45)])
    engine.generate(some_prompts(1, 2, 40, 16, seed=9), greedy(5))
    assert engine.runner.regions._compiled == compiled
    assert engine.stats.compile_s == seconds > 0
    assert Counter(key[0] for (key, *_) in compiled) == {"begin": 2, "layers": 2, "draw": 1}, "decode and prefill"


def test_weights_changed_in_place_are_seen_by_the_next_compiled_step(model, engine):
    first = tokens_of(engine, PROMPTS, 8)
    compiled = dict(engine.runner.regions._compiled)
    pristine = {name: p.clone() for name, p in model.named_parameters()}
    for name, p in tiny_model(SEED + 10, **LAYERS).named_parameters():
        model.get_parameter(name).copy_(p)
    assert tokens_of(engine, PROMPTS, 8) == [hf_generate(model, prompt, 8) for prompt in PROMPTS] != first
    for name, p in model.named_parameters():
        p.copy_(pristine[name])
    assert tokens_of(engine, PROMPTS, 8) == first
    assert engine.runner.regions._compiled == compiled


def test_compiled_padding_rows_touch_the_reserved_page_alone(engine):
    reserved = {SLIDING: {0}, FULL: {0}}
    before = pages_hash(engine, but=reserved)
    engine.runner.state.fill([], 2)
    for columns in engine.runner.column_buckets:
        engine.runner._decode_step(2, columns)
        engine.runner.graphs[2, columns, GREEDY].replay()
    assert pages_hash(engine, but=reserved) == before
    assert pages_hash(engine) != pages_hash(engine, but=reserved)


def test_a_step_that_reads_on_the_host_is_found_before_it_is_compiled(model, monkeypatch):
    engine = make_engine(model, compile=True, max_batch_size=2, capture_cudagraph=True)
    honest = engine.runner.walk._head
    monkeypatch.setattr(engine.runner.walk, "_head", lambda normed: honest(normed * normed.max().item()))
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        engine.runner.capture()
    assert engine.runner.graphs == {}
    assert engine.runner.regions._compiled == {}


def test_compiled_with_a_sidecar_tokens_are_the_same(model):
    engine = compiled_engine(model, shared_kv="sidecar")
    assert tokens_of(engine, PROMPTS, 20) == [hf_generate(model, prompt, 20) for prompt in PROMPTS]
    assert engine.stats.steps_replayed == 0


# ---- the GPU's way of compiling -----------------------------------------------------------------------------------

def test_a_region_a_kind_of_layer_with_fixed_sizes_is_compiled_once_a_kind(monkeypatch):
    model = tiny_model(SEED)      # six layers of four kinds, as a trainer has them: not laid side by side
    monkeypatch.setitem(backends_module.PLANS, "cpu", STATIC)
    engine = make_engine(model, capture_cudagraph=True, **ONE_SHAPE)
    regions, uncached = engine.runner.regions, counters["inductor"]["fxgraph_cache_bypass"]
    assert (regions.scope, regions.plan.symbolic) == ("layer", False)
    engine.runner._decode_step(1, 1)
    assert counters["inductor"]["fxgraph_cache_bypass"] == uncached, "compiled code that is not kept on disk"
    kinds = {(layer.attention_type, layer.owns_kv) for layer in engine.geometry.layers}
    assert len(kinds) == 4 < engine.geometry.num_layers
    assert sorted(key[1:] for key, *_ in regions._compiled if key[0] == "layer") == sorted(kinds)
    assert Counter(key[0] for key, *_ in regions._compiled) == {"begin": 1, "layer": 4, "head": 1, "draw": 1}
    engine.prepare()
    before = dict(regions._compiled)
    assert tokens_of(engine, PROMPTS, 12) == [hf_generate(model, prompt, 12) for prompt in PROMPTS]
    assert regions._compiled == before, "a size was compiled after warm-up"


def test_compiled_in_bf16_every_contract_of_the_numbers_is_kept(monkeypatch):
    """The error against float64 is at most 1.1 of Hugging Face's own."""
    model = tiny_model(SEED, torch.bfloat16, **LAYERS)
    lay_side_by_side(model.model)
    monkeypatch.setitem(backends_module.PLANS, "cpu", STATIC)
    engine = make_engine(model, capture_cudagraph=True, **ONE_SHAPE)
    oracles = consult(model, engine.geometry, some_prompts(1, 5, 17, 30), 8)
    verdict = judge(oracles, run_engine(engine, oracles), torch.bfloat16)
    assert verdict.broken == []
    assert 0 < verdict.stream_ratio < 1.1
    assert engine.stats.steps_eager == 0
