"""The walk over paged K/V is the Hugging Face model: layer by layer, cached or not, however the prompt was cut."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex.attention import PagedBackend
from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.engine import FlexEngine
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.models import gemma4
from gemma4_flex.models.gemma4 import layer_weights
from gemma4_flex.models.projections import lay_side_by_side, projection, projection_groups, side_by_side, view_of
from tests.engines import hf_logits, make_engine, pages_hash, some_prompts, tokens_of
from tests.tiny import VOCAB, tiny_config, tiny_model

TOLERANCE = 1e-4        # DESIGN.md, Numbers
SEED = 1                # where Hugging Face is itself 2e-5 from float64; on some seeds it is 1e-4
PROMPT = some_prompts(13)[0]
FORCED = some_prompts(9, seed=5)[0]     # fed whatever the model would draw: every step's logits count


@pytest.fixture(scope="module")
def model():
    return tiny_model(SEED)


@pytest.fixture(scope="module")
def engine(model) -> FlexEngine:
    return make_engine(model)


def hf_stream(model, ids: list[int]) -> torch.Tensor:
    """[L+1, T, H]: the scaled embedding and the stream after each layer, from one uncached forward."""
    kept, hooks = [], []
    modules = [model.model.embed_tokens, *model.model.layers]
    for module in modules:
        hooks.append(module.register_forward_hook(
            lambda m, args, out: kept.append((out[0] if isinstance(out, tuple) else out).clone())))
    hf_logits(model, ids)
    for hook in hooks:
        hook.remove()
    return torch.cat(kept)


def worst(engine: FlexEngine, model, prompt=PROMPT, forced=FORCED) -> float:
    """Largest difference of a logit between cached steps and Hugging Face's re-prefill of all tokens."""
    traced = engine.trace(prompt, forced).logits
    return (traced - hf_logits(model, prompt + forced)[len(prompt) - 1:]).abs().max().item()


# ---- equal to Hugging Face ----------------------------------------------------------------------------------------

def test_every_layer_of_prefill_and_of_each_cached_step_is_hugging_faces(engine, model):
    ours = engine.trace(PROMPT, FORCED).hidden
    theirs = hf_stream(model, PROMPT + FORCED)[:, len(PROMPT) - 1:]
    assert ours.shape == theirs.shape == (7, len(FORCED) + 1, 48)
    assert torch.equal(ours[0], theirs[0])
    for layer, (a, b) in enumerate(zip(ours, theirs)):
        assert torch.allclose(a, b, atol=TOLERANCE), f"after layer {layer - 1}: {(a - b).abs().max()}"


@pytest.mark.parametrize("length", [1, 2, 4, 5, 40])
def test_cached_steps_give_the_logits_of_a_re_prefill(engine, model, length):
    assert worst(engine, model, some_prompts(length, seed=length)[0]) < TOLERANCE


@pytest.mark.parametrize("fields", [
    {"num_kv_shared_layers": 0}, {"num_key_value_heads": 2}, {"use_double_wide_mlp": False}, {"sliding_window": 7},
    {"num_kv_shared_layers": 4}, {"final_logit_softcapping": None}], ids=str)
def test_other_shapes_are_hugging_faces_too(fields):
    model = tiny_model(3, **fields)
    assert worst(make_engine(model), model) < TOLERANCE


def test_scalars_norms_and_the_softcap_are_not_idle_in_these_models(model):
    """Without this the tests above would pass with the mechanism left out."""
    logits = hf_logits(model, PROMPT)
    for change in (lambda m: m.model.layers[1].layer_scalar.fill_(1.0),
                   lambda m: m.model.layers[0].input_layernorm.weight.fill_(1.0),
                   lambda m: m.model.embed_tokens_per_layer.weight.zero_(),
                   lambda m: setattr(m.config, "final_logit_softcapping", None)):
        other = tiny_model(SEED)
        with torch.no_grad():
            change(other)
        assert (hf_logits(other, PROMPT) - logits).abs().max() > 0.01


def test_the_softcap_is_applied_once():
    loud = tiny_model(SEED)
    with torch.no_grad():
        loud.model.norm.weight.mul_(50)
    traced = make_engine(loud).trace(PROMPT, FORCED).logits
    assert traced.abs().max() <= 30
    assert (traced.abs() > 29.9).any()
    assert torch.allclose(traced, hf_logits(loud, PROMPT + FORCED)[len(PROMPT) - 1:], atol=50 * TOLERANCE)


def test_the_per_layer_rows_belong_to_their_layers(engine, model):
    swapped = tiny_model(SEED)
    table = swapped.model.embed_tokens_per_layer.weight.data.view(VOCAB, 6, 8)
    table[:, [1, 2]] = table[:, [2, 1]]
    ours, base = make_engine(swapped).trace(PROMPT, FORCED).logits, engine.trace(PROMPT, FORCED).logits
    assert (ours - base).abs().max() > 0.01
    assert torch.allclose(ours, hf_logits(swapped, PROMPT + FORCED)[len(PROMPT) - 1:], atol=TOLERANCE)


def of_layer_1(engine: FlexEngine) -> tuple[torch.Tensor, torch.Tensor]:
    group = engine.runner.cache.groups["full_attention"]
    return group.keys[1], group.values[1]


@pytest.mark.parametrize("fault", ["scale", "positions counted within a step", "owner", "window"])
def test_a_planted_fault_is_seen_in_the_logits(model, fault, monkeypatch):
    if fault == "scale":
        honest = PagedBackend.attend
        monkeypatch.setattr(PagedBackend, "attend", lambda *args: honest(*args[:-1], 16**-0.5))
    if fault == "positions counted within a step":
        honest = gemma4.cos_sin
        monkeypatch.setattr(gemma4, "cos_sin", lambda positions, *rest: honest(positions + positions.numel(), *rest))
    engine = make_engine(model)
    if fault == "owner":
        backend, keys, values = (engine.runner.backends["full_attention"], *of_layer_1(engine))
        attend = backend.attend
        backend.attend = lambda q, k, v, rows, plan, owner, *rest: attend(q, keys, values, rows, plan, 1, *rest)
    if fault == "window":
        engine.runner.cache.groups["sliding_attention"].window = 3
    assert worst(engine, model) > 100 * TOLERANCE


# ---- shared layers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("geometry", "first", "sliding", "full"), [
    (ModelGeometry.from_config(tiny_config()), 4, 2, 3),
    (published_geometry("E2B"), 15, 13, 14), (published_geometry("E4B"), 24, 22, 23)], ids=["tiny", "E2B", "E4B"])
def test_shared_layers_read_the_last_owner_of_their_type(geometry, first, sliding, full):
    expected = {"sliding_attention": sliding, "full_attention": full}
    assert [la.kv_owner for la in geometry.layers[:first]] == list(range(first))
    shared = geometry.layers[first:]
    assert [la.kv_owner for la in shared] == [expected[la.attention_type] for la in shared]


def test_a_shared_layer_leaves_every_page_bitwise_as_it_was(model):
    engine = make_engine(model)
    walk, hashes = engine.runner.walk, []
    honest = walk._layer_body

    def watched(layer, *rest):
        if layer.index < 4:
            return honest(layer, *rest)
        hashes.append(pages_hash(engine))
        out = honest(layer, *rest)
        hashes.append(pages_hash(engine))
        return out
    walk._layer_body = watched
    engine.trace(PROMPT, FORCED)
    assert len(hashes) == 4 * (1 + len(FORCED))
    for step in range(0, len(hashes), 4):
        assert hashes[step] == hashes[step + 1] == hashes[step + 2] == hashes[step + 3]
    assert hashes[0] != hashes[4], "owners wrote nothing between two steps: the hash is blind"


def test_shared_layers_have_no_k_and_v_to_read_by_mistake(engine):
    assert all(not hasattr(layer.self_attn, "k_proj") for layer in engine.runner.walk.text.layers[4:])
    assert [weights.k_norm is None for weights in engine.runner.walk.layers] == [False] * 4 + [True] * 2
    assert set(engine.runner.cache.groups["sliding_attention"].keys) == {0, 2}
    assert set(engine.runner.cache.groups["full_attention"].keys) == {1, 3}


def rows_into(engine: FlexEngine, layer: int) -> list[int]:
    """The number of tokens that enter `layer` at each of its calls, from now on."""
    counts, honest = [], engine.runner.walk._layer_body

    def counted(at, gathered, weights, pools, next_norm, hidden, *rest):
        if at.index == layer:
            counts.append(hidden.shape[0])
        return honest(at, gathered, weights, pools, next_norm, hidden, *rest)
    engine.runner.walk._layer_body = counted
    return counts


def test_prefill_rows_without_wanted_logits_never_enter_a_shared_layer(model):
    engine = make_engine(model)
    owners, shared = rows_into(engine, 3), rows_into(engine, 4)
    engine.trace(some_prompts(40)[0], [])
    assert owners == [16, 16, 8]        # max_prefill_tokens is 16
    assert shared == [1]                # the first two chunks do not call it at all


def test_shared_layers_see_a_row_for_each_prompt_that_ends(model):
    engine = make_engine(model)
    shared = rows_into(engine, 5)
    tokens_of(engine, some_prompts(4, 5, 6), 1)
    assert shared == [3]


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 12])
def test_a_prompt_of_three_windows_is_the_same_in_chunks_of_any_length(model, chunk):
    """W - 1, W and W + 1 among them; a chunk of 1 is token by token."""
    prompt = some_prompts(12, seed=2)[0]
    assert worst(make_engine(model, max_prefill_tokens=chunk), model, prompt) < TOLERANCE


# ---- weights side by side -----------------------------------------------------------------------------------------

def test_weights_laid_side_by_side_are_the_same_parameters_and_one_matrix_a_group():
    model, original = tiny_model(SEED), dict(tiny_model(SEED).named_parameters())
    before = dict(model.named_parameters())
    held = make_engine(model).memory_report()["weights"]
    lay_side_by_side(model.model)
    assert all(p is before[name] and torch.equal(p, original[name]) for name, p in model.named_parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for layer, weights in zip(model.model.layers, map(layer_weights, model.model.layers)):
        parts = [p.weight for p in (layer.self_attn.q_proj, *([] if weights.k_norm is None else
                                                              [layer.self_attn.k_proj, layer.self_attn.v_proj]))]
        assert torch.equal(weights.qkv, torch.cat(parts))
        assert torch.equal(weights.gate_up, torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]))
        assert weights.qkv.data_ptr() == parts[0].data_ptr()
    assert make_engine(model).memory_report()["weights"] == held
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    lay_side_by_side(model.model)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places, "a second time moves nothing"


def test_the_walk_reads_one_matrix_where_they_lie_so_and_one_after_the_other_where_not_to_the_same_logits(model):
    together = tiny_model(SEED)
    lay_side_by_side(together.model)
    apart, joined = make_engine(model), make_engine(together)
    assert {type(weights.gate_up) for weights in apart.runner.walk.layers} == {tuple}
    assert {type(weights.gate_up) for weights in joined.runner.walk.layers} == {torch.Tensor}
    logits = [engine.trace(PROMPT, FORCED).logits for engine in (apart, joined)]
    assert torch.allclose(*logits, atol=1e-5)
    assert worst(joined, together) < TOLERANCE


def test_a_write_in_place_to_one_of_them_reaches_the_matrix():
    model = tiny_model(SEED)
    lay_side_by_side(model.model)
    engine = make_engine(model, capture_cudagraph=True)
    first = engine.trace(PROMPT, FORCED).logits
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(-1)
        model.model.layers[4].mlp.up_proj.weight.mul_(0.5)
    assert (engine.trace(PROMPT, FORCED).logits - first).abs().max() > 0.01
    assert worst(engine, model) < TOLERANCE


def test_only_weights_that_may_be_moved_are_moved_and_a_group_whole_or_not_at_all():
    model = tiny_model(SEED)
    layers = model.model.layers
    movable = {layers[0].self_attn.q_proj.weight, layers[0].self_attn.k_proj.weight, layers[0].self_attn.v_proj.weight,
               layers[1].mlp.gate_proj.weight}
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    lay_side_by_side(model.model, movable)
    moved = {name for name, p in model.named_parameters() if p.data_ptr() != places[name]}
    assert moved == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}


def test_what_is_no_plain_matrix_is_called_as_the_module_it_is():
    plain, bias = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 3)

    class Adapted(torch.nn.Linear):
        pass
    adapted = Adapted(4, 3, bias=False)
    assert isinstance(projection(plain), torch.Tensor)
    for module in (bias, adapted):
        assert projection(module) == (module,)
        beside, called = projection(plain, module)
        assert called is module
        assert beside.data_ptr() == plain.weight.data_ptr()
    assert [type(part) for part in projection(plain, torch.nn.Linear(4, 5, bias=False))] == [torch.Tensor] * 2


def test_matrices_are_side_by_side_only_in_order_without_a_gap_and_of_one_storage():
    whole = torch.arange(60.0).view(10, 6)
    assert torch.equal(side_by_side([whole[1:4], whole[4:9]]), whole[1:9])
    for apart in ([whole[4:9], whole[1:4]], [whole[1:4], whole[5:9]], [whole[1:4], whole[4:9].clone()],
                  [whole[:, :3], whole[:, 3:]], [whole.view(20, 3)[:4], whole[2:]]):
        assert side_by_side(apart) is None


def test_projection_groups_are_the_linears_that_read_one_input(model):
    names = {module: name for name, module in model.model.named_modules()}
    found = [[names[m].split(".", 2)[2] for m in group] for group in projection_groups(model.model)]
    attention, mlp = [f"self_attn.{n}_proj" for n in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
    assert found == [attention, mlp] * 4 + [attention[:1], mlp] * 2


# ---- the caller's model -------------------------------------------------------------------------------------------

def test_the_callers_model_is_read_and_never_changed(model):
    before, names = hf_logits(model, PROMPT), [type(m).forward for m in model.modules()]
    state = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    make_engine(model).trace(PROMPT, FORCED)
    assert all("forward" not in vars(m) for m in model.modules())
    assert [type(m).forward for m in model.modules()] == names
    assert all(t.data_ptr() == state[n][0] and torch.equal(t, state[n][1]) for n, t in model.state_dict().items())
    assert torch.equal(hf_logits(model, PROMPT), before)


def test_two_engines_on_one_model_do_not_meet(model):
    paged, sidecar = make_engine(model), make_engine(model, shared_kv="sidecar")
    alone = paged.trace(PROMPT, FORCED).logits
    sidecar.trace(some_prompts(20, seed=3)[0], FORCED)
    assert torch.equal(paged.trace(PROMPT, FORCED).logits, alone)


def test_a_view_has_its_own_modules_over_the_same_tensors_and_keeps_the_tie(model):
    view = view_of(model)
    assert all(a is not b for a, b in zip(view.modules(), model.modules()))
    pairs = zip(view.named_parameters(remove_duplicate=False), model.named_parameters(remove_duplicate=False))
    assert all(name == other and p is q for (name, p), (other, q) in pairs)
    assert view.lm_head.weight is view.model.embed_tokens.weight
    view.model.layers[0].self_attn.forward = None
    assert model.model.layers[0].self_attn.forward is not None


def test_gradients_still_flow_through_the_callers_model_after_the_engine_ran(model):
    trained = tiny_model(SEED)
    make_engine(trained).trace(PROMPT, FORCED)
    ids = torch.tensor([PROMPT])
    trained(ids, labels=ids, use_cache=True).loss.backward()
    kv_weights = {n: p for n, p in trained.named_parameters() if "k_proj" in n or "v_proj" in n}
    assert len(kv_weights) == 8
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in kv_weights.values())
