"""The verification passes a right engine and catches every fault planted into one.

The faults go into the engine alone, in code or in module objects of its own, after Hugging Face and the reference have
spoken: the weights and Hugging Face's model stay whole.
"""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from gemma4_flex import attention
from gemma4_flex.decode_state import DecodeState
from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models import gemma4
from gemma4_flex.params import EngineConfig
from gemma4_flex.rotary import cos_sin, rotate
from gemma4_flex.runner import Runner
from gemma4_flex.verify.numerics import (
    EngineRun,
    Level,
    Oracle,
    Trace,
    consult,
    find_partings,
    judge,
    last_row_of_each_level,
    make_prompts,
    pooled_ratio,
    run_engine,
    trace_hf,
)
from tests.tiny import FULL, SLIDING, tiny_config, tiny_model

ROWS = 8
DTYPES = [torch.float32, torch.bfloat16]


@functools.cache
def consulted(dtype: torch.dtype) -> tuple[nn.Module, list[Oracle]]:
    """A tiny model of `dtype`, and what Hugging Face and the reference say of the standard prompts."""
    model = tiny_model(dtype=dtype)
    if dtype == torch.bfloat16:
        model.model.norm.weight.data *= 3  # logits far enough up the softcap that bf16 noise does not hide its lack
    geometry = ModelGeometry.from_config(model.config)
    return model, consult(model, geometry, make_prompts(geometry, max_new_tokens=ROWS), ROWS)


def engine_on(model: nn.Module, **config) -> FlexEngine:
    longest = 17 + ROWS
    return FlexEngine(model, None, EngineConfig(
        **{"attention": "sdpa", "compile": False, "page_size": 4, "max_batch_size": 6, "max_seq_length": longest} | config))


def verdict_on(dtype: torch.dtype, plant, monkeypatch, prompts: slice = slice(None), **config):
    model, oracles = consulted(dtype)
    oracles = oracles[prompts]
    engine = engine_on(model, **config)
    plant(engine, monkeypatch)
    return judge(oracles, run_engine(engine, oracles), dtype)


# --- the faults ---------------------------------------------------------------------------------------------------


def text(engine: FlexEngine) -> nn.Module:
    """The engine's own text model: module objects of its own over the caller's tensors."""
    return engine.runner.walk.text


def nothing(engine, monkeypatch):
    pass


def scale_one_over_root_d(engine, monkeypatch):
    layers = [dataclasses.replace(la, scale=16**-0.5) for la in engine.geometry.layers]      # where head_dim is 16
    engine.runner.walk.geometry = dataclasses.replace(engine.geometry, layers=tuple(layers))


def reweigh(engine: FlexEngine, change, layers: slice = slice(None)) -> None:
    """Replace what the walk holds of its layers' weights."""
    engine.runner.walk.layers[layers] = [change(weights) for weights in engine.runner.walk.layers[layers]]


def one_plus_w_norm(engine, monkeypatch):
    reweigh(engine, lambda w: w._replace(post_attention_norm=1 + w.post_attention_norm.float()))


def window_one_short(engine, monkeypatch):
    engine.runner.cache.groups[SLIDING].window -= 1


def window_one_long(engine, monkeypatch):
    engine.runner.cache.groups[SLIDING].window += 1


def layer_scalar_dropped(engine, monkeypatch):
    reweigh(engine, lambda w: w._replace(scalar=torch.ones_like(w.scalar)))


def one_layer_scalar_dropped(engine, monkeypatch):
    reweigh(engine, lambda w: w._replace(scalar=torch.ones_like(w.scalar)), slice(3, 4))  # its scalar is .98


def rotary_on_the_first_quarter(engine, monkeypatch):
    def first_quarter(x, cos, sin):
        if x.shape[-1] != 32:
            return rotate(x, cos, sin)
        turned = rotate(x[..., :8], *(torch.cat([t[:, :4], t[:, :4]], -1) for t in (cos, sin)))
        return torch.cat([turned, x[..., 8:]], -1)
    monkeypatch.setattr(gemma4, "rotate", first_quarter)


def rotary_exponent_over_the_rotated_width(engine, monkeypatch):
    frequencies = engine.runner.walk.frequencies[FULL].clone()
    frequencies[:4] = 1e6 ** (-torch.arange(4) / 4)
    engine.runner.walk.frequencies[FULL] = frequencies


def wrong_owner(engine, monkeypatch):
    layers = [la if la.index != 4 else dataclasses.replace(la, kv_owner=0) for la in engine.geometry.layers]
    engine.runner.walk.geometry = dataclasses.replace(engine.geometry, layers=tuple(layers))


def v_norm_dropped(engine, monkeypatch):
    right = gemma4.rms_norm     # the one norm without a weight
    monkeypatch.setattr(gemma4, "rms_norm", lambda x, weight, eps: x if weight is None else right(x, weight, eps))


def ple_lookup_scale_dropped(engine, monkeypatch):
    table = text(engine).embed_tokens_per_layer
    table.embed_scale = torch.ones_like(table.embed_scale)


def change_ple(engine: FlexEngine, change) -> None:
    walk = engine.runner.walk
    right = walk._begin

    def begin(step):
        begun = right(step)
        return begun._replace(ple=tuple(change(begun.ple)))
    walk._begin = begin


def ple_combine_scale_dropped(engine, monkeypatch):
    change_ple(engine, lambda ple: [rows * 2**0.5 for rows in ple])


def ple_slices_shifted(engine, monkeypatch):
    change_ple(engine, lambda ple: [ple[-1], *ple[:-1]])


def softcap_dropped(engine, monkeypatch):
    engine.runner.walk.geometry = dataclasses.replace(engine.geometry, final_softcap=None)


def softcap_twice(engine, monkeypatch):
    right = engine.runner.walk._head
    engine.runner.walk._head = lambda normed: 30 * torch.tanh(right(normed) / 30)


def shared_k_rotated_again(engine, monkeypatch):
    right, walk = gemma4.PagedKV.attend, engine.runner.walk

    def attend(self, layer, pools, step, q, gathered):
        if not layer.owns_kv:
            group, gathered = self.backends[layer.attention_type].group, {}
            rows = torch.arange(pools.keys.shape[2])
            positions = group.logical[rows // group.page_size] * group.page_size + rows % group.page_size
            table = cos_sin(positions, walk.frequencies[layer.attention_type], pools.keys.dtype)
            pools = pools._replace(keys=rotate(pools.keys[0].transpose(0, 1), *table).transpose(0, 1)[None])
        return right(self, layer, pools, step, q, gathered)
    monkeypatch.setattr(gemma4.PagedKV, "attend", attend)


def shared_q_rotated_one_further(engine, monkeypatch):
    right, walk = gemma4.PagedKV.attend, engine.runner.walk

    def attend(self, layer, pools, step, q, gathered):
        if not layer.owns_kv:
            q = rotate(q, *cos_sin(torch.ones(len(q)), walk.frequencies[layer.attention_type], q.dtype))
        return right(self, layer, pools, step, q, gathered)
    monkeypatch.setattr(gemma4.PagedKV, "attend", attend)


def embedding_scale_dropped(engine, monkeypatch):
    table = text(engine).embed_tokens
    table.embed_scale = torch.ones_like(table.embed_scale)


def gelu_exact(engine, monkeypatch):
    monkeypatch.setattr(gemma4, "gelu", nn.functional.gelu)


def rows_of_a_batch_one_position_late(engine, monkeypatch):
    right = DecodeState.fill

    def fill(self, sequences, size):
        right(self, sequences, size)
        self.rows.positions[1: len(sequences)] -= 1
    monkeypatch.setattr(DecodeState, "fill", fill)


FAULTS = [
    scale_one_over_root_d, one_plus_w_norm, window_one_short, window_one_long, layer_scalar_dropped,
    rotary_on_the_first_quarter, rotary_exponent_over_the_rotated_width, wrong_owner, v_norm_dropped,
    ple_lookup_scale_dropped, ple_slices_shifted, softcap_dropped, softcap_twice, shared_k_rotated_again,
    shared_q_rotated_one_further, embedding_scale_dropped,
]
# Below bf16's own rounding: the norm behind the PLE projection cancels its scale but for epsilon.
SUBTLE_FAULTS = [one_layer_scalar_dropped, ple_combine_scale_dropped, gelu_exact]


@pytest.mark.parametrize("shared_kv", ["paged", "sidecar"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_engine_keeps_every_contract(dtype, shared_kv, monkeypatch):
    verdict = verdict_on(dtype, nothing, monkeypatch, shared_kv=shared_kv)
    assert not verdict.broken
    assert [at.name for at in verdict.levels] == ["embedding", *(f"layer {i}" for i in range(6)), "logits"]
    assert verdict.levels[0].engine_mean == verdict.levels[0].hf_mean > 0
    assert verdict.kl["hf||engine"] < (1e-9 if dtype == torch.float32 else 1e-1)


@pytest.mark.parametrize("fault", FAULTS + SUBTLE_FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_in_fp32(fault, monkeypatch):
    broken = {contract.name for contract in verdict_on(torch.float32, fault, monkeypatch).broken}
    assert "logits equal HF's" in broken and "reference agrees with HF" not in broken


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_in_bf16(fault, monkeypatch):
    broken = {contract.name for contract in verdict_on(torch.bfloat16, fault, monkeypatch).broken}
    assert "logits error within 1.1 of HF's" in broken and "reference agrees with HF" not in broken


@pytest.mark.parametrize("fault", [nothing, scale_one_over_root_d, window_one_short, window_one_long, shared_k_rotated_again],
                         ids=lambda fault: fault.__name__)
def test_a_fault_in_the_flex_path_is_caught(fault, monkeypatch):
    monkeypatch.setattr(attention, "flex_obstacle", lambda device: None)
    # the same masks without minutes of compiling: the plain operator, and not through the compiler it calls by itself
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(Runner, "warm_up", lambda self: None)
    broken = verdict_on(torch.float32, fault, monkeypatch, slice(5, 6), attention="flex", max_batch_size=1,
                        max_prefill_tokens=32).broken
    assert [contract.name for contract in broken][:1] == ([] if fault is nothing else ["logits equal HF's"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fault_of_batches_alone_is_caught_by_the_generation(dtype, monkeypatch):
    broken = verdict_on(dtype, rows_of_a_batch_one_position_late, monkeypatch).broken
    expected = "greedy tokens equal HF's" if dtype == torch.float32 else "tokens part from HF's by rounding only"
    assert [contract.name for contract in broken] == [expected]


# --- what could let a fault through -------------------------------------------------------------------------------


def runs_of(oracles: list[Oracle], trace_of) -> list[EngineRun]:
    return [EngineRun(trace_of(oracle), oracle.tokens) for oracle in oracles]


def test_an_engine_that_shares_a_wrong_reference_is_caught():
    """In bf16 only the reference judges: geometry that reads the window wrongly would mislead it and the engine alike."""
    model, oracles = consulted(torch.bfloat16)
    geometry = ModelGeometry.from_config(tiny_config(sliding_window=5))
    wrong = consult(model, geometry, [oracle.prompt_ids for oracle in oracles], ROWS)
    verdict = judge(wrong, runs_of(wrong, lambda oracle: oracle.reference), torch.bfloat16)
    assert verdict.stream_ratio == 0
    assert [contract.name for contract in verdict.broken] == ["reference agrees with HF"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_keep_no_contract(dtype):
    _, oracles = consulted(dtype)
    spoiled = [Trace(oracle.hf.hidden.clone(), oracle.hf.logits.clone()) for oracle in oracles]
    spoiled[2].logits[3, 7] = float("nan")
    verdict = judge(oracles, [EngineRun(t, oracle.tokens) for t, oracle in zip(spoiled, oracles)], dtype)
    assert {"logits equal HF's", "logits error within 1.1 of HF's"} & {contract.name for contract in verdict.broken}


def test_a_small_stream_counts_as_much_as_a_large_one():
    large = Level("layer 0", size=100.0, hf_mean=1.0, hf_max=1.0, engine_mean=1.0, engine_max=1.0, between_max=0.0)
    small = Level("layer 1", size=1.0, hf_mean=0.01, hf_max=0.01, engine_mean=0.03, engine_max=0.03, between_max=0.0)
    assert pooled_ratio([large, small]) == pytest.approx(2.0)


def parted(margin: float, generated: list[int]) -> tuple[list, list]:
    """One prompt, three rows of four logits; HF picks 1, 2, 3, by `margin` over token 0 in the last row."""
    logits = torch.zeros(3, 4, dtype=torch.float64)
    logits[0, 1] = logits[1, 2] = 1.0
    logits[2, 3] = margin
    hidden = torch.ones(2, 3, 5, dtype=torch.float64)
    hf = Trace(hidden, logits)
    engine = Trace(hidden, logits.clone())
    engine.logits[2, 0] = 2 * margin
    oracle = Oracle([9], [1, 2, 3], hf, Trace(hidden + 1e-7, logits + 1e-7))
    return [oracle], [EngineRun(engine, generated)]


def test_tokens_may_part_only_where_hf_is_undecided():
    for margin, excused in ((5e-5, True), (2e-4, False)):
        oracles, runs = parted(margin, [1, 2, 0])
        forced, generated = find_partings(oracles, runs)
        assert (forced.run, forced.step, forced.hf_token, forced.engine_token) == ("forced", 2, 3, 0)
        assert (generated.run, generated.step, generated.hf_token, generated.engine_token) == ("generated", 2, 3, 0)
        assert forced.margin == pytest.approx(margin)
        broken = [contract for contract in judge(oracles, runs, torch.float32).broken if "greedy" in contract.name]
        assert bool(broken) is not excused


def test_a_generation_is_judged_up_to_its_first_parting_and_must_not_stop_early():
    oracles, _ = parted(0.5, [])
    engine = oracles[0].hf
    first = find_partings(oracles, [EngineRun(engine, [0, 0, 0])])
    assert [(p.run, p.step) for p in first] == [("generated", 0)]
    short = find_partings(oracles, [EngineRun(engine, [1, 2])])
    assert [(p.run, p.step, p.engine_token) for p in short] == [("generated", 2, -1)]


# --- Hugging Face's side ------------------------------------------------------------------------------------------


def test_hf_trace_takes_the_tokens_that_generate_takes():
    model = tiny_model()
    model.generation_config.eos_token_id = None
    for oracle in consulted(torch.float32)[1]:
        prompt = torch.tensor([oracle.prompt_ids])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ROWS, do_sample=False)
        assert ids[0, prompt.shape[1]:].tolist() == oracle.tokens


def test_hf_trace_holds_the_streams_of_a_whole_forward():
    model, prompt = tiny_model(), list(range(3, 20))
    trace, tokens = trace_hf(model, prompt, ROWS)
    with torch.no_grad():
        output = model(torch.tensor([prompt + tokens[:-1]]), use_cache=True, output_hidden_states=True)
    whole = torch.stack(output.hidden_states)[:, 0, len(prompt) - 1:].double()
    assert trace.hidden.shape == whole.shape == (7, ROWS, 48)
    torch.testing.assert_close(trace.hidden[:-1], whole[:-1], rtol=0, atol=1e-4)  # the last one is normed there
    torch.testing.assert_close(trace.logits, output.logits[0, len(prompt) - 1:].double(), rtol=0, atol=1e-4)


def test_hf_trace_leaves_no_hook_behind():
    model = tiny_model()
    trace_hf(model, [5, 6], 1)
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_streams_are_taken_from_layers_that_return_tuples():
    class Layer(nn.Module):
        def forward(self, hidden_states):
            return (hidden_states + 1, "attention weights")

    layers = nn.ModuleList([Layer(), Layer()])
    model = types.SimpleNamespace(model=types.SimpleNamespace(layers=layers))
    with last_row_of_each_level(model) as rows:
        for _ in range(2):  # the second forward replaces the first's rows
            x = torch.arange(6.0).reshape(1, 3, 2)
            layers[1](hidden_states=layers[0](hidden_states=x)[0])
        assert torch.stack(rows).tolist() == [[4, 5], [5, 6], [6, 7]]


# --- prompts ------------------------------------------------------------------------------------------------------


def test_prompts_run_from_one_token_to_several_windows():
    geometry = ModelGeometry.from_config(tiny_config(sliding_window=8))
    prompts = make_prompts(geometry, max_new_tokens=4)
    assert [len(prompt) for prompt in prompts] == [1, 2, 7, 8, 9, 29]
    assert prompts == make_prompts(geometry, max_new_tokens=4) != make_prompts(geometry, max_new_tokens=4, seed=1)


def test_a_long_enough_text_gives_one_more_prompt():
    geometry = ModelGeometry.from_config(tiny_config())
    assert make_prompts(geometry, max_new_tokens=4, text_ids=[7] * 20)[-1] == [7] * 17
    assert len(make_prompts(geometry, max_new_tokens=4, text_ids=[7] * 16)) == 6


def test_prompts_hold_no_placeholder_and_stay_below_the_last_position():
    geometry = ModelGeometry.from_config(tiny_config(max_position_embeddings=20))
    geometry = dataclasses.replace(geometry, placeholder_ids=frozenset(range(2, 64)))
    prompts = make_prompts(geometry, max_new_tokens=16)
    assert [len(prompt) for prompt in prompts] == [1, 2, 3, 4]
    assert {i for prompt in prompts for i in prompt} <= {0, 1}
