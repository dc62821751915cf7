"""The double copy: one storage for what is shared, exact refreshes in place, all targets or none."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gemma4_flex import EngineConfig, FlexEngine, SamplingParams
from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.lora.adapters import Adapter, AdapterError, Pair, adapter_of, linears_of, random_adapter, save_adapter
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.drift import fingerprint, half_ulp, state
from gemma4_flex.lora.unmerged import unmerged_view
from tests.tiny import fake_tokenizer, tiny_model

CONFIG = EngineConfig(attention="sdpa", compile=False, max_batch_size=4, max_seq_length=128, page_size=4, max_prefill_tokens=16)
PROMPTS = [[2, 5, 9, 13, 40], [2, 7, 7, 7, 30, 31, 32, 33, 34, 35], [2, 60]]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)


def adapter(seed=0, targets="all-linear", strength=0.3, dtype=torch.float32):
    return random_adapter(tiny_model(dtype=dtype), targets, rank=3, alpha=6, strength=strength, seed=seed)


def tokens(engine):
    return [c.token_ids for c in engine.generate(PROMPTS, GREEDY)]


def test_only_targets_own_storage_and_the_rest_is_the_bases():
    model = tiny_model()
    double = DoubleCopy(model, ["q_proj", "up_proj"])
    base = dict(state(model))
    own = {n for n, t in state(double.inference) if t.data_ptr() != base[n].data_ptr()}
    assert own == {f"{p}.weight" for p in linears_of(model) if p.endswith(("q_proj", "up_proj"))}
    assert double.extra_bytes == sum(base[n].numel() * base[n].element_size() for n in own)


@pytest.mark.parametrize("size, gigabytes", [("E2B", 3.7), ("E4B", 7.9)])
def test_extra_memory_of_all_linear_follows_from_the_geometry(size, gigabytes):
    from gemma4_flex.lora.double_copy import all_linear_bytes
    assert all_linear_bytes(published_geometry(size), 2) / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_the_formula_of_extra_memory_is_what_is_allocated():
    from gemma4_flex.geometry import ModelGeometry
    from gemma4_flex.lora.double_copy import all_linear_bytes
    model = tiny_model()
    assert DoubleCopy(model).extra_bytes == all_linear_bytes(ModelGeometry.from_config(model.config), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_refresh_is_the_float64_merge_rounded_once(dtype):
    double, lora = DoubleCopy(tiny_model(dtype=dtype)), adapter(dtype=dtype)
    double.refresh(lora)
    for path, merged in double.merged.items():
        pair = lora.pairs[path]
        exact = double.pristine[path].double() + pair.scaling * (pair.up.double() @ pair.down.double())
        slack = 8 * torch.finfo(torch.float).eps * (double.pristine[path].double().abs() + exact.abs() + 1)
        assert bool(((merged.double() - exact).abs() <= half_ulp(exact, dtype) + slack).all())


def test_a_hundred_refreshes_leave_what_one_leaves_and_the_base_untouched():
    once, many = (DoubleCopy(tiny_model(dtype=torch.bfloat16)) for _ in range(2))
    before, places = fingerprint(state(many.base)), {n: t.data_ptr() for n, t in state(many.inference)}
    once.refresh(adapter(0))
    for seed in range(100):
        many.refresh(adapter(seed % 7, targets=["q_proj"] if seed % 2 else "all-linear"))
    many.refresh(adapter(0))
    assert fingerprint(state(many.inference)) == fingerprint(state(once.inference))
    assert fingerprint(state(many.base)) == before
    assert places == {n: t.data_ptr() for n, t in state(many.inference)}


def test_no_adapter_and_a_zero_alpha_give_the_base_bit_for_bit():
    double = DoubleCopy(tiny_model(dtype=torch.bfloat16))
    base = fingerprint(state(double.base))
    zero = adapter()
    zero = replace(zero, pairs={p: replace(pair, scaling=0.0) for p, pair in zero.pairs.items()})
    double.refresh(adapter())
    assert fingerprint(state(double.inference)) != base
    for nothing in (None, zero):
        double.refresh(adapter())
        double.refresh(nothing)
        assert fingerprint(state(double.inference)) == base


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_an_adapter_that_is_not_finite_changes_nothing_and_is_named(bad):
    double = DoubleCopy(tiny_model(dtype=torch.bfloat16))
    double.refresh(adapter(1))
    before = fingerprint(state(double.inference))
    lora = adapter(2)
    path = list(lora.pairs)[-1]
    lora.pairs[path] = Pair(lora.pairs[path].down, torch.full_like(lora.pairs[path].up, bad), 1e3)
    with pytest.raises(AdapterError, match=path.replace(".", r"\.")):
        double.refresh(lora)
    assert fingerprint(state(double.inference)) == before


def test_overwriting_the_matrices_after_a_refresh_changes_nothing():
    double, lora = DoubleCopy(tiny_model()), adapter()
    double.refresh(lora)
    before = fingerprint(state(double.inference))
    for pair in lora.pairs.values():
        pair.up.fill_(float("nan"))
    assert fingerprint(state(double.inference)) == before


def test_a_live_peft_model_trains_the_base_that_the_copy_reads():
    model = tiny_model()
    double = DoubleCopy(model)
    trainer = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    double.refresh(adapter_of(trainer))
    assert fingerprint(state(double.inference)) == fingerprint(state(double.base))      # B is still zero
    optimizer = torch.optim.SGD([p for p in trainer.parameters() if p.requires_grad], lr=0.05)
    ids = torch.tensor([PROMPTS[1]])
    for _ in range(3):
        trainer(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    double.refresh(adapter_of(trainer))
    assert fingerprint(state(double.inference)) != fingerprint(state(double.base))
    with torch.no_grad():
        trained = trainer(input_ids=ids).logits
        merged = double.inference(input_ids=ids).logits
    torch.testing.assert_close(merged, trained, rtol=0, atol=1e-4)


def test_a_copy_made_of_a_wrapped_model_is_the_same():
    trainer = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    double = DoubleCopy(trainer)
    assert [n for n, _ in state(double.base)] == [n for n, _ in state(tiny_model())]
    assert fingerprint(state(double.inference)) == fingerprint(state(tiny_model()))


@pytest.mark.parametrize("capture", [False, True])
def test_the_engine_sees_a_refresh_and_equals_a_fresh_engine_and_peft_unmerged(capture):
    double, lora = DoubleCopy(tiny_model()), adapter()
    engine = FlexEngine(double.inference, fake_tokenizer(), replace(CONFIG, capture_cudagraph=capture, max_batch_size=1))
    double.attach(engine)
    plain = tokens(engine)
    double.refresh(lora)
    merged = tokens(engine)
    assert merged != plain
    assert merged == tokens(FlexEngine(double.inference, fake_tokenizer(), replace(CONFIG, max_batch_size=1)))
    unmerged = unmerged_view(double.base, lora)
    for prompt, ours in zip(PROMPTS, merged):
        out = unmerged.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert out[0, len(prompt):].tolist() == ours
    double.refresh(None)
    assert tokens(engine) == plain


def test_the_merged_weights_lie_side_by_side_and_the_base_stays_where_it_was():
    model = tiny_model()
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    double = DoubleCopy(model)
    engine = FlexEngine(double.inference, fake_tokenizer(), CONFIG)
    assert {type(w) for weights in engine.runner.walk.layers for w in (weights.qkv, weights.gate_up)} == {torch.Tensor}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    partly = DoubleCopy(model, ["q_proj", "up_proj"])      # the others of their groups are the base's
    walk = FlexEngine(partly.inference, fake_tokenizer(), CONFIG).runner.walk
    assert {type(weights.gate_up) for weights in walk.layers} == {tuple}
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places
    partly.refresh(adapter(targets=["q_proj", "up_proj"]))
    assert tokens(FlexEngine(partly.inference, fake_tokenizer(), CONFIG)) == tokens(
        FlexEngine(unmerged_view(model, adapter(targets=["q_proj", "up_proj"])), fake_tokenizer(), CONFIG))


def test_the_engine_runs_an_unmerged_adapter_to_the_same_tokens():
    model, lora = tiny_model(), adapter()
    double = DoubleCopy(model)
    double.refresh(lora)
    assert tokens(FlexEngine(unmerged_view(model, lora), fake_tokenizer(), CONFIG)) == tokens(
        FlexEngine(double.inference, fake_tokenizer(), CONFIG))


def attached(**changes):
    double = DoubleCopy(tiny_model())
    engine = FlexEngine(double.inference, fake_tokenizer(), replace(CONFIG, **changes))
    double.attach(engine)
    return double, engine


def run_to_end(engine, ids):
    while engine.has_work:
        engine.step()
    return [engine.completion(i) for i in ids]


@pytest.mark.parametrize(("at_once", "steps"), [(1, 4), (8, 2)])
def test_drain_ends_started_requests_on_the_old_weights_and_starts_waiting_ones_on_the_new(at_once, steps):
    double, engine = attached(max_batch_size=2, decode_steps_per_sync=at_once)
    old = tokens(engine)
    ids = [engine.submit(p, GREEDY) for p in PROMPTS]       # the third has to wait for a slot
    for _ in range(steps):
        engine.step()
    double.refresh(adapter())
    done = run_to_end(engine, ids)
    new = tokens(engine)
    assert [c.token_ids for c in done] == [old[0], old[1], new[2]]
    assert [(c.epoch_started, c.epoch_ended) for c in done] == [(0, 0), (0, 0), (1, 1)]


@pytest.mark.parametrize(("at_once", "steps"), [(1, 4), (8, 2)])
def test_recompute_goes_on_with_the_new_weights_and_fresh_keys(at_once, steps):
    double, engine = attached(decode_steps_per_sync=at_once)
    lora = adapter()
    ids = [engine.submit(p, GREEDY) for p in PROMPTS]
    for _ in range(steps):
        engine.step()
    kept = [list(engine._requests[i].sequence.output_ids) for i in ids]
    double.refresh(lora, policy="recompute")
    done = run_to_end(engine, ids)
    # what an engine on the new weights alone would say after prompt + kept tokens
    for completion, prompt, before in zip(done, PROMPTS, kept):
        params = SamplingParams(temperature=0.0, max_new_tokens=12 - len(before), ignore_eos=True)
        rest = engine.generate([[*prompt, *before]], params)[0]
        assert completion.token_ids == [*before, *rest.token_ids]
        assert (completion.epoch_started, completion.epoch_ended) == (0, 1)


def test_a_stream_gets_the_tokens_that_were_drawn_while_draining():
    double, engine = attached()
    expected = tokens(engine)
    got = {n: [] for n in range(len(PROMPTS))}
    for count, (n, token, _) in enumerate(engine.stream(PROMPTS, GREEDY)):
        got[n].append(token)
        if count == 5:
            double.refresh(adapter())
    assert list(got.values()) == expected


def test_a_refresh_reaches_every_engine_that_is_attached():
    double, one = attached()
    other = FlexEngine(double.inference, fake_tokenizer(), CONFIG)
    double.attach(other)
    old = tokens(one)
    ids = [[engine.submit(p, GREEDY) for p in PROMPTS] for engine in (one, other)]
    for engine in (one, other):
        engine.step()
    double.refresh(adapter())
    assert (one.weight_epoch, other.weight_epoch) == (1, 1)
    started = min(len(PROMPTS), CONFIG.max_batch_size)
    for engine, these in zip((one, other), ids):
        assert [c.token_ids for c in run_to_end(engine, these)][:started] == old[:started]


def test_a_failed_refresh_leaves_the_epoch_and_an_unknown_policy_is_refused():
    double, engine = attached()
    with pytest.raises(AdapterError):
        double.refresh(Adapter("empty", {"model.nothing": Pair(torch.ones(1, 1), torch.ones(1, 1), 1.0)}))
    with pytest.raises(ValueError, match="drain"):
        double.refresh(None, policy="mix")
    assert engine.weight_epoch == 0


def test_the_engine_switches_between_adapters_on_disk(tmp_path):
    _double, engine = attached()
    for seed in (1, 2):
        save_adapter(adapter(seed), tmp_path / str(seed), base="tiny")
    seen = []
    for path in (tmp_path / "1", tmp_path / "2", tmp_path / "1", None):
        engine.use_adapter(path)
        seen.append(tokens(engine))
    assert seen[0] == seen[2] and len({str(s) for s in seen}) == 3
    assert engine.weight_epoch == 4


def test_an_engine_without_a_double_copy_says_how_to_get_one():
    with pytest.raises(RuntimeError, match="DoubleCopy"):
        FlexEngine(tiny_model(), fake_tokenizer(), CONFIG).use_adapter("somewhere")


def test_a_double_copy_without_targets_is_refused():
    with pytest.raises(AdapterError, match="without targets"):
        DoubleCopy(tiny_model(), [])


def test_the_base_saved_after_a_refresh_is_pristine_and_merges_to_the_same_logits(tmp_path):
    double, lora = DoubleCopy(tiny_model()), adapter()
    double.refresh(lora)
    double.base.save_pretrained(tmp_path)
    loaded = type(double.base).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert {n: fingerprint([("", t)]) for n, t in loaded.state_dict().items()} == {
        n: fingerprint([("", t)]) for n, t in tiny_model().state_dict().items()}
    again = DoubleCopy(loaded)
    again.refresh(lora)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        assert torch.equal(again.inference(input_ids=ids).logits, double.inference(input_ids=ids).logits)


def test_rollout_and_trainer_agree_on_log_probabilities():
    """|delta log p| of each token, merged in the engine against PEFT unmerged in the trainer, in fp32."""
    model = tiny_model(seed=1)
    double, lora = DoubleCopy(model), random_adapter(model, "all-linear", rank=3, alpha=6, strength=0.05, seed=0)
    double.refresh(lora)
    engine = FlexEngine(double.inference, fake_tokenizer(), CONFIG)
    trainer = unmerged_view(double.base, lora)
    for prompt in PROMPTS:
        forced = engine.generate([prompt], GREEDY)[0].token_ids
        with torch.no_grad():
            theirs = trainer(input_ids=torch.tensor([[*prompt, *forced]])).logits[0, len(prompt) - 1: -1].log_softmax(-1)
        ours = engine.trace(prompt, forced).logits[:-1].log_softmax(-1)
        chosen = torch.tensor(forced)[:, None]
        assert (ours.gather(1, chosen) - theirs.gather(1, chosen)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_is_one_percent_off_trips_the_accuracy_tier(dtype):
    from gemma4_flex.lora.drift import _accuracy_tier
    double, lora = DoubleCopy(tiny_model(dtype=dtype)), adapter(dtype=dtype)
    double.refresh(lora)
    assert _accuracy_tier(double, lora).passed
    with torch.no_grad():
        double.merged["model.layers.3.mlp.down_proj"].mul_(1.01)
    tier = _accuracy_tier(double, lora)
    assert not tier.passed and "layers.3.mlp.down_proj" in tier.detail


def test_weights_that_generated_join_autograd_afterwards_from_ids_and_mask_alone():
    model = tiny_model()
    double = DoubleCopy(model)
    engine = FlexEngine(double.inference, fake_tokenizer(), CONFIG)
    before = tokens(engine)
    trainer = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    ids = torch.tensor([PROMPTS[0]])
    trainer(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    grads = [p.grad for n, p in trainer.named_parameters() if "lora_B" in n]
    assert grads and all(g is not None and bool(g.abs().sum() > 0) for g in grads)
    assert tokens(engine) == before
