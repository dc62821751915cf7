"""What a step does to the device: it writes where it must and nowhere else, reads nothing on the host, and replays."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex import backends as backends_module, decode_state
from gemma4_flex.backends import choose_backends
from gemma4_flex.engine import FlexEngine
from gemma4_flex.masks import page_mask
from gemma4_flex.params import EngineConfig
from gemma4_flex.runner import buckets_up_to
from gemma4_flex.step_graph import CaptureError, NoHostReads
from tests.engines import (
    assert_all_free,
    greedy,
    held_pages,
    make_engine,
    pages_hash,
    shuffle_pages,
    some_prompts,
    tokens_of,
)
from tests.pools import decode_rows, filled_group, prefill_rows
from tests.tiny import FULL, SLIDING, tiny_model

SEED = 1
PROMPTS = some_prompts(9, 1, 22)
MODES = [("flex", "paged"), ("flex", "sidecar"), ("sdpa", "paged"), ("sdpa", "sidecar")]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():       # as `FlexEngine.step` runs them: pools written with autograd on would join its graph
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_model(SEED)


@pytest.fixture(scope="module")
def engines(model):
    """Engines on one model by their settings, made once."""
    @functools.cache
    def get(attention="sdpa", shared_kv="paged", captured=False) -> FlexEngine:
        engine = make_engine(model, attention=attention, shared_kv=shared_kv, capture_cudagraph=captured)
        engine.prepare()
        return engine
    return get


def wipe(engine: FlexEngine) -> None:
    """One value in every page but the reserved one, so that any write shows."""
    for group in engine.runner.cache.groups.values():
        for pool in (*group.keys.values(), *group.values.values()):
            pool[:, :, group.page_size:] = 3.0


def start(engine: FlexEngine, prompts, n: int = 40) -> list[int]:
    """Submit prompts and step until all of them decode, on pools where nothing is left of earlier runs."""
    wipe(engine)
    ids = [engine.submit(prompt, greedy(n)) for prompt in prompts]
    while not all(s.is_decoding for s in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return ids


def stop(engine: FlexEngine, ids: list[int]) -> None:
    for i in ids:
        engine.abort(i)
        engine.completion(i)
    assert_all_free(engine)


# ---- sizes --------------------------------------------------------------------------------------------------------

def test_buckets_are_powers_of_the_base_and_the_most_there_can_be():
    assert [buckets_up_to(n, 2) for n in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]
    assert buckets_up_to(8, 4) == [1, 4, 8]


def test_a_prefill_step_never_has_more_rows_than_the_largest_bucket(engines):
    """Most rows: every sequence of the batch with a span of its own that ends one token into a row."""
    runner = engines().runner
    worst = max(sum(-(-n // runner.width) for n in (16 - 3 * k, k, k, k)) for k in range(1, 5))
    assert runner.row_buckets[-1] >= worst


# ---- what a step writes -------------------------------------------------------------------------------------------

def rows_written(engine: FlexEngine, step) -> dict[str, set[int]]:
    """Pool rows that `step()` changes, by attention type, those of the reserved page left out."""
    pools = {kind: [*g.keys.values(), *g.values.values()] for kind, g in engine.runner.cache.groups.items()}
    before = {kind: [pool.clone() for pool in of] for kind, of in pools.items()}
    step()
    found = {}
    for kind, of in pools.items():
        changed = torch.stack([(pool != old).any(-1).any(1)[0] for pool, old in zip(of, before[kind])]).any(0)
        found[kind] = {row for row in changed.nonzero().flatten().tolist() if row >= engine.config.page_size}
    return found


def rows_of_last_tokens(engine: FlexEngine) -> dict[str, set[int]]:
    size = engine.config.page_size
    return {kind: {dict(table.held(s.slot))[(s.num_tokens - 1) // size] * size + (s.num_tokens - 1) % size
                   for s in engine.scheduler.running} for kind, table in engine.runner.tables.items()}


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_three_sequences_in_a_bucket_of_four_write_three_rows_and_the_reserved_page(engines, captured):
    engine = engines(captured=captured)
    ids = start(engine, PROMPTS)
    for _ in range(6):
        plan = engine.scheduler.plan()
        expected = rows_of_last_tokens(engine)
        assert rows_written(engine, lambda: engine.runner.decode(plan.decode)) == expected
        engine.scheduler.complete(plan, {s.request_id: 7 for s in plan.decode})
    stop(engine, ids)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_run_of_steps_writes_a_row_for_each_token_computed_and_nothing_after_a_sequences_end(engines, captured):
    """One ends by length after three steps and one by a stop id after two; the third goes on for all eight."""
    engine = engines(captured=captured)
    outputs = [done.token_ids for done in engine.generate(PROMPTS, greedy(40))]
    ids = start(engine, PROMPTS)
    running = engine.scheduler.running
    already = [len(s.output_ids) for s in running]
    running[0].max_output = already[0] + 3
    stop_at = next(n for n in range(already[1] + 1, 40) if outputs[1][n] not in outputs[1][already[1]: n])
    running[1].active_stop_ids = frozenset({outputs[1][stop_at]})
    computed = [3, stop_at + 1 - already[1], 8]
    assert 1 < computed[1] < 8
    plan = engine.scheduler.plan()
    assert plan.steps == 8
    expected, size = {}, engine.config.page_size
    for kind, table in engine.runner.tables.items():
        places = [(s.slot, s.num_tokens - 1 + k) for s, count in zip(running, computed) for k in range(count)]
        expected[kind] = {dict(table.held(slot))[at // size] * size + at % size for slot, at in places}
    drawn: dict = {}
    assert rows_written(engine, lambda: drawn.update(engine.runner.decode(plan.decode, steps=plan.steps)[0])) == expected
    for s, count, n, output in zip(running, computed, already, outputs):
        assert drawn[s.request_id][:count] == output[n: n + count]
    stop(engine, ids)


def test_the_check_above_catches_a_padding_row_in_a_live_slot(engines):
    engine = engines()
    ids = start(engine, PROMPTS)
    plan = engine.scheduler.plan()
    engine.runner.mirror_tables()
    engine.runner.state.fill(plan.decode, 4)
    engine.runner.state.rows.slots[3] = plan.decode[0].slot
    assert rows_written(engine, lambda: engine.runner._decode_step(4, 32)) != rows_of_last_tokens(engine)
    stop(engine, ids)


def test_a_prefill_step_writes_its_spans_rows_and_the_reserved_page(engines):
    engine = engines()
    wipe(engine)
    ids = [engine.submit(prompt, greedy(9)) for prompt in PROMPTS]
    for _ in range(2):      # 32 prompt tokens in chunks of 16
        plan = engine.scheduler.plan()
        expected = {kind: set() for kind in engine.runner.tables}
        for kind, table in engine.runner.tables.items():
            for span in plan.prefill:
                page = dict(table.held(span.sequence.slot))
                expected[kind] |= {page[p // 4] * 4 + p % 4 for p in range(span.start, span.start + span.count)}
        assert rows_written(engine, lambda: engine.runner.prefill(plan.prefill)) == expected
        engine.scheduler.complete(plan, dict.fromkeys(ids, 7))
    stop(engine, ids)


def test_the_reserved_page_and_slot_are_never_handed_out_and_stay_finite(engines):
    engine = engines()
    ids = start(engine, PROMPTS)
    assert all(0 not in pages for pages in held_pages(engine).values())
    assert all(s.slot > 0 for s in engine.scheduler.running)
    for group in engine.runner.cache.groups.values():
        assert not group.table[0].any()
        assert all(p[:, :, : group.page_size].isfinite().all() for p in [*group.keys.values(), *group.values.values()])
    stop(engine, ids)


def test_warming_up_and_capturing_touch_the_reserved_page_alone(model):
    engine = make_engine(model, capture_cudagraph=True, max_batch_size=1)
    engine.prepare()
    assert engine.runner.graphs
    assert not any(any(pages) for pages in pages_hash(engine, but={SLIDING: {0}, FULL: {0}}).values())
    assert not any(group.table.any() for group in engine.runner.cache.groups.values())


@pytest.mark.parametrize(("attention", "shared_kv"), MODES)
def test_garbage_in_unused_pages_changes_no_bit(engines, attention, shared_kv):
    engine = engines(attention, shared_kv)
    results = []
    for garbage in (0.0, 1e4):
        stores = [engine.runner.cache, *([engine.runner.sidecar] if shared_kv == "sidecar" else [])]
        for tensor in (tensor for store in stores for tensor in store.tensors().values()):
            if tensor.is_floating_point():
                tensor.fill_(garbage)
        shuffle_pages(engine, seed=3)
        results.append(engine.trace(PROMPTS[2], PROMPTS[0]).logits)
    assert torch.equal(*results)


# ---- where nothing may depend on ----------------------------------------------------------------------------------

@pytest.mark.parametrize(("attention", "shared_kv"), MODES)
def test_where_pages_lie_changes_no_bit_of_the_logits(engines, attention, shared_kv):
    engine, results = engines(attention, shared_kv), []
    for seed in (1, 2, 3):
        shuffle_pages(engine, seed)
        results.append(engine.trace(PROMPTS[2], PROMPTS[0]).logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_which_slot_a_sequence_has_changes_no_bit_of_the_logits(engines):
    engine, results = engines(), []
    for order in ([1, 2, 3, 4], [3, 1, 4, 2]):
        engine.scheduler._free_slots[:] = order
        results.append(engine.trace(PROMPTS[2], PROMPTS[0]).logits)
    assert torch.equal(*results)


# ---- nothing read on the host -------------------------------------------------------------------------------------

@pytest.mark.parametrize(("attention", "shared_kv"), MODES)
def test_a_decode_step_reads_nothing_on_the_host(engines, attention, shared_kv):
    engine = engines(attention, shared_kv)
    with NoHostReads():
        engine.runner._decode_step(4, 32)


@pytest.mark.parametrize("read", [
    lambda x: x * x.max().item(), lambda x: x.index_select(0, x[:, 0].isfinite().nonzero()[:, 0]),
    lambda x: x[x[:, 0].isfinite()]], ids=["item", "nonzero", "bool mask"])
def test_a_decode_step_that_reads_on_the_host_is_caught_and_not_captured(engines, read, monkeypatch):
    runner = engines().runner
    honest = runner.walk._head
    monkeypatch.setattr(runner.walk, "_head", lambda normed: honest(read(normed)))
    with NoHostReads(), pytest.raises(CaptureError):
        runner._decode_step(4, 32)
    with pytest.raises(CaptureError):
        runner.capture()
    assert runner.graphs == {}


# ---- captured steps -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("attention", "shared_kv"), [("flex", "paged"), ("sdpa", "paged"), ("sdpa", "sidecar")])
def test_replays_over_page_crossings_are_the_eager_steps(engines, attention, shared_kv):
    """13 steps cross at least three pages of 4, and the window's recycled pages with them."""
    forced = some_prompts(14, seed=8)[0]
    eager, captured = engines(attention, shared_kv), engines(attention, shared_kv, captured=True)
    replayed = captured.trace(PROMPTS[0], forced)
    assert torch.allclose(replayed.logits, eager.trace(PROMPTS[0], forced).logits, atol=1e-5)
    assert tokens_of(captured, PROMPTS, 14) == tokens_of(eager, PROMPTS, 14)


def test_a_replay_with_page_tables_left_as_they_were_at_capture_is_caught(engines, monkeypatch):
    engine = engines(captured=True)
    right = tokens_of(engine, PROMPTS, 14)
    mirror = engine.runner.mirror_tables
    steps = []

    def only_at_first():
        steps.append(1)
        if len(steps) < 4:      # two chunks of prefill and the decode step beside the second
            mirror()
    monkeypatch.setattr(engine.runner, "mirror_tables", only_at_first)
    assert tokens_of(engine, PROMPTS, 14) != right
    monkeypatch.undo()
    assert tokens_of(engine, PROMPTS, 14) == right


def test_replayed_and_eager_steps_are_counted_apart(engines):
    for captured in (True, False):
        engine = engines(captured=captured)
        engine.reset_stats()
        tokens_of(engine, PROMPTS[:1], 6)
        assert (engine.stats.steps_replayed, engine.stats.steps_eager) == ((5, 0) if captured else (0, 5))


def test_a_step_that_cannot_be_captured_is_an_error_and_no_quiet_eager_run(model, monkeypatch):
    honest = decode_state.draw

    def reading(logits, *rest):
        assert logits.sum().item() is not None
        return honest(logits, *rest)
    monkeypatch.setattr(decode_state, "draw", reading)
    engine = make_engine(model, capture_cudagraph=True)
    for job in (engine.prepare, lambda: engine.generate(PROMPTS), lambda: list(engine.stream(PROMPTS))):
        with pytest.raises(CaptureError, match="_local_scalar_dense"):
            job()
        assert engine.stats.prefill_tokens == 0
        assert_all_free(engine)


# ---- weights that change ------------------------------------------------------------------------------------------

def test_weights_changed_in_place_are_seen_by_the_next_replay_and_move_nothing():
    model = tiny_model(SEED)
    engine = make_engine(model, capture_cudagraph=True, shared_kv="sidecar")
    pristine = {name: p.clone() for name, p in model.named_parameters()}
    engine.prepare()
    addresses = {name: t.data_ptr() for name, t in engine.runner.static_tensors().items()}
    first = tokens_of(engine, PROMPTS, 8)
    assert {"lm_head.weight", "model.embed_tokens.weight", "sidecar.keys.2", "full_attention.table"} <= addresses.keys()
    for refresh in range(5):
        other = dict(tiny_model(refresh + 10).named_parameters())
        for name, p in model.named_parameters():
            p.copy_(other[name])
        assert tokens_of(engine, PROMPTS, 8) == tokens_of(make_engine(model), PROMPTS, 8) != first
    for name, p in model.named_parameters():
        p.copy_(pristine[name])
    assert tokens_of(engine, PROMPTS, 8) == first
    assert {n: t.data_ptr() for n, t in engine.runner.static_tensors().items()} == addresses


def rebind_q(model):
    model.model.layers[2].self_attn.q_proj.weight = torch.nn.Parameter(torch.zeros(64, 48))


def rebind_head(model):
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(64, 48))


def rebind_scalar(model):
    model.model.layers[3].layer_scalar = torch.ones(1)


@pytest.mark.parametrize(("rebind", "name"), [
    (rebind_q, "layers.2.self_attn.q_proj.weight"), (rebind_head, "lm_head.weight"),
    (rebind_scalar, "layers.3.layer_scalar")])
def test_a_rebound_weight_is_an_error_that_names_it(rebind, name):
    model = tiny_model(SEED)
    engine = make_engine(model)
    tokens_of(engine, PROMPTS[:1], 2)
    rebind(model)
    with pytest.raises(RuntimeError, match=f"{name} of the model was rebound.*in place"):
        engine.generate(PROMPTS[:1])
    assert_all_free(engine)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_storage_swapped_under_a_weight_is_an_error_that_names_it(captured):
    """Also before anything has run: the walk took what it reads of the weights when the engine was made."""
    model = tiny_model(SEED)
    engine = make_engine(model, capture_cudagraph=captured, max_batch_size=1)
    if captured:
        engine.prepare()
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match=r"layers.1.mlp.up_proj.weight of the model was rebound to new storage"):
        engine.generate(PROMPTS[:1])


def test_storage_swapped_under_a_captured_pool_is_an_error_that_names_it(model):
    engine = make_engine(model, capture_cudagraph=True, max_batch_size=1)
    engine.prepare()
    pool = engine.runner.cache.groups[FULL].keys[3]
    pool.data = pool.data.clone()
    with pytest.raises(RuntimeError, match=r"full_attention.keys.3 moved after the step of batch 1 was captured"):
        engine.generate(PROMPTS[:1])


# ---- compiling ----------------------------------------------------------------------------------------------------

def test_nothing_is_compiled_after_warm_up_over_page_crossings_and_a_batch_that_falls_from_3_to_1(engines):
    engine = engines("flex")
    before = dict(counters["stats"])
    assert before["unique_graphs"] > 0, "the counter counts nothing"
    lengths = [greedy(45), greedy(7), greedy(20)]       # over 64 decoded tokens and a dozen pages
    engine.generate(PROMPTS, lengths)
    engine.generate(some_prompts(40, 2, 3, 17, 6, seed=4), greedy(3))
    assert dict(counters["stats"]) == before


def test_flex_equals_sdpa(engines):
    assert tokens_of(engines("flex"), PROMPTS, 12) == tokens_of(engines("sdpa"), PROMPTS, 12)
    flex, sdpa = (engines(name).trace(PROMPTS[0], PROMPTS[2]) for name in ("flex", "sdpa"))
    assert torch.allclose(flex.logits, sdpa.logits, atol=1e-4)
    assert torch.allclose(flex.hidden, sdpa.hidden, atol=1e-4)


# ---- where flex cannot run ----------------------------------------------------------------------------------------

def test_without_a_cpp_compiler_sdpa_runs_and_says_what_to_install(model, monkeypatch):
    monkeypatch.setattr(backends_module, "flex_obstacle", lambda device: "no C++ compiler: install g++ for more speed")
    engine = make_engine(model, attention="flex")
    assert engine.attention_backends == {FULL: "sdpa", SLIDING: "sdpa"}
    assert engine.notices == ["no C++ compiler: install g++ for more speed"]
    assert len(tokens_of(engine, PROMPTS[:1], 3)[0]) == 3


def test_nothing_is_noticed_where_what_was_asked_for_runs(engines):
    for name in ("flex", "sdpa"):
        assert engines(name).notices == []
        assert set(engines(name).attention_backends.values()) == {name}


def backends_on_a_card(engine: FlexEngine, monkeypatch, choose, **config):
    """What a runner would choose on a GPU for which the table of kernel options answers `choose`."""
    card = types.SimpleNamespace(name="Pretend 5", major=5, minor=0, shared_memory_per_block_optin=65_536)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(backends_module, "choose", choose)
    monkeypatch.setattr(backends_module, "flex_obstacle", lambda device: None)
    settings = EngineConfig(attention="flex", dtype="bfloat16", page_size=16, fa4_prefill=False, **config).resolved("cuda")
    notices: list[str] = []
    return choose_backends(engine.geometry, settings, engine.runner.cache, inline=True, notices=notices), notices


def test_a_type_no_flex_configuration_fits_runs_on_sdpa_by_name_and_leaves_the_other_on_flex(engines, monkeypatch):
    """Head_dim 512 is 32 here."""
    def choose(head_dim, phase, capability, limit, *, dtype, page_size):
        assert (capability, limit, dtype, page_size) == ((5, 0), 65_536, "bfloat16", 16)
        return None if (head_dim, phase) == (32, "prefill") else {"num_stages": 1}
    backends, notices = backends_on_a_card(engines(), monkeypatch, choose)
    assert {kind: b.name for kind, b in backends.items()} == {FULL: "sdpa", SLIDING: "flex"}
    assert backends[SLIDING].options == {"decode": {"num_stages": 1}, "prefill": {"num_stages": 1}}
    assert backends[SLIDING].inline, "on a card the compiled region has the flex call in it"
    assert len(notices) == 1
    assert notices[0].startswith("full_attention: no flex_attention configuration for head_dim 32 fits Pretend 5")
    assert "(65,536 B" in notices[0]


def test_kernel_options_given_by_hand_override_the_table_and_stand_in_for_it(engines, monkeypatch):
    table = {"decode": {"num_stages": 2, "BLOCK_N": 32}, "prefill": None}
    given = {"decode_kernel_options": {"num_stages": 1}, "prefill_kernel_options": {"BLOCK_M": 16}}
    backends, notices = backends_on_a_card(engines(), monkeypatch, lambda head_dim, phase, *rest, **more: table[phase], **given)
    assert notices == []
    assert backends[FULL].options == {"decode": {"num_stages": 1, "BLOCK_N": 32}, "prefill": {"BLOCK_M": 16}}


# ---- memory -------------------------------------------------------------------------------------------------------

class Largest(TorchDispatchMode):
    """The largest tensor, in elements, that any operation returns."""
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_s_squared_elements_is_made_for_a_prompt_of_s(model):
    """By chunks: sdpa's largest is chunk x heads x S, and flex, which gathers nothing, is below it."""
    S = 2048
    engine = make_engine(model, max_seq_length=S + 8, page_size=128, n_pages=20, max_prefill_tokens=64,
                         max_batch_size=1)
    with Largest() as largest:
        engine.trace(some_prompts(S)[0], [5, 6])
    assert 0 < largest.numel < S * S / 4
    dense = Largest()
    with dense:
        torch.zeros(S, S)
    assert dense.numel == S * S


def test_masks_of_a_long_prompt_are_rows_by_pages():
    S = 4096
    filled = filled_group({1: S}, page_size=128, max_seq_length=S)
    rows = prefill_rows([(1, at, 128) for at in range(0, S, 128)], width=128)
    with Largest() as largest:
        page_mask(filled.group, rows)
        page_mask(filled.group, decode_rows({1: S - 1}))
    assert largest.numel <= 32 * 128 * 2


def test_masks_are_made_on_the_device_of_the_rows():
    """flex_attention's own helpers default to CUDA; ours must not."""
    filled = filled_group({1: 9})
    mask = page_mask(filled.group, decode_rows({1: 8}))
    assert {t.device.type for t in (mask.partial, mask.whole, mask.num_partial, mask.num_whole)} == {"cpu"}
