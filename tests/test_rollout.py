"""Rollouts for a trainer: drawn from the adapter as it is now, with the log-probabilities the trainer itself would give."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from gemma4_flex import EngineConfig, SamplingParams
from gemma4_flex.lora.adapters import AdapterError, choose_targets
from gemma4_flex.rollout import DriftError, Rollout, RolloutError, agreement, log_probs, sampling_of
from tests.engines import SMALL
from tests.tiny import fake_tokenizer, tiny_model

CHATS = [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "and you?"}]]
# fp32 importance ratios, off from 1.0: in the mean, and for one token; logits here reach the softcap, where Hugging Face's own
# forward is up to 3e-5 from float64
MEAN, WORST = 1e-5, 1e-4


def trainer(**fields) -> SimpleNamespace:
    """What a rollout reads of a TRL trainer."""
    return SimpleNamespace(**({"max_completion_length": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
                               "repetition_penalty": 1.0} | fields))


def peft_model(dtype=torch.float32):
    """A tiny model with a LoRA adapter on all its linears, at zero as PEFT makes it."""
    model = tiny_model(dtype=dtype)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=choose_targets(model, "all-linear"),
                                            task_type="CAUSAL_LM"))


@torch.no_grad()
def train(model, seed=0, size=0.05) -> None:
    """Move the adapter in place, as an optimizer's step would."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter += size * torch.randn(parameter.shape, generator=generator)


def make(model, **options) -> Rollout:
    return Rollout(model, fake_tokenizer(), EngineConfig(**SMALL), **options)


def reference(model, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    """Log-probabilities of one sample, alone, unpadded, by the PEFT model's own forward in float64 arithmetic of the softmax."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + output])).logits[0, len(prompt) - 1:-1].double() / temperature
    return [row.log_softmax(-1)[token].item() for row, token in zip(logits, output)]


# ---- the contract with TRL --------------------------------------------------------------------------------------------


def test_a_rollout_gives_one_entry_a_prompt_in_their_order():
    rollout = make(peft_model())
    out = rollout([CHATS[0]] * 3 + [CHATS[1]] * 3, trainer())
    ids = [rollout.tokenizer.apply_chat_template(c, tokenize=True, add_generation_prompt=True, return_dict=False) for c in CHATS]
    assert out["prompt_ids"] == [ids[0]] * 3 + [ids[1]] * 3
    assert [len(x) for x in out["logprobs"]] == [len(x) for x in out["completion_ids"]]
    assert all(0 < len(x) <= 8 for x in out["completion_ids"])
    assert set(out) == {"prompt_ids", "completion_ids", "logprobs"}


def test_samples_of_a_prompt_differ_and_the_next_rollout_draws_anew_and_a_run_repeats():
    runs = []
    for _ in range(2):
        rollout = make(peft_model())
        runs.append([rollout([CHATS[0]] * 4, trainer())["completion_ids"] for _ in range(2)])
    assert runs[0] == runs[1]
    first, second = runs[0]
    assert len({tuple(x) for x in first}) == 4
    assert first != second


def test_no_two_prompts_share_their_draws_nor_do_two_ranks():
    rollout = make(peft_model())
    seeds = {rollout._seed(rank, prompt) for rank in range(4) for prompt in range(32)}
    assert len(seeds) == 128 and all(0 <= seed < 1 << 63 for seed in seeds)
    first, _, again = rollout([CHATS[0], CHATS[1], CHATS[0]], trainer())["completion_ids"]
    other = make(peft_model())([CHATS[0]], trainer(accelerator=SimpleNamespace(process_index=1)))["completion_ids"][0]
    assert len({tuple(first), tuple(again), tuple(other)}) == 3


def test_a_stop_token_ends_a_completion_and_is_part_of_it():
    rollout = make(peft_model())
    out = rollout([CHATS[0]] * 8, trainer(max_completion_length=64, temperature=4.0))
    stops = rollout.engine.stop_ids
    assert any(ids[-1] in stops for ids in out["completion_ids"])
    assert all(not set(ids[:-1]) & stops for ids in out["completion_ids"])


def test_template_arguments_of_the_trainer_reach_the_prompt():
    rollout = make(peft_model())
    rollout.tokenizer.chat_template = rollout.tokenizer.chat_template.replace("model: ", "{{ mood }}: ")
    out = rollout([CHATS[0]], trainer(chat_template_kwargs={"mood": "sad"}))
    assert rollout.tokenizer.decode(out["prompt_ids"][0]).endswith("sad: ")


@pytest.mark.parametrize("field, value", [("tools", [print]), ("environment_factories", {None: dict}),
                                          ("args", SimpleNamespace(generation_kwargs={"num_beams": 2}))])
def test_what_a_rollout_would_leave_out_is_refused(field, value):
    with pytest.raises(RolloutError, match="train without"):
        sampling_of(trainer(**{field: value}))


def test_the_trainers_sampling_is_the_rollouts():
    params = sampling_of(trainer(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1))
    assert params == SamplingParams(max_new_tokens=8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.1,
                                    logprobs=0)


# ---- the policy that is drawn from is the one that is trained ---------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_the_trainers_at_its_temperature(temperature):
    """B92: the importance ratio before the update is 1.0; raw ones, or ones at another temperature, are far from it."""
    model = peft_model()
    train(model)
    rollout = make(model)
    out = rollout([CHATS[0]] * 3 + [CHATS[1]] * 3, trainer(temperature=temperature))
    off = [abs(math.expm1(w - d)) for prompt, output, drawn in zip(*out.values())
           for w, d in zip(reference(model, prompt, output, temperature), drawn)]
    assert sum(off) / len(off) <= MEAN and max(off) <= WORST


def test_a_rollout_sees_what_training_changed_since_the_last():
    model = peft_model()
    rollout = make(model)
    before = rollout([CHATS[0]] * 3, trainer())
    epoch = rollout.engine.weight_epoch
    train(model)
    out = rollout([CHATS[0]] * 3, trainer())
    assert rollout.engine.weight_epoch == epoch + 1
    for prompt, output, drawn in zip(*out.values()):
        assert reference(model, prompt, output, 1.0) == pytest.approx(drawn, abs=WORST)
    stale = [abs(a - b) for p, o, d in zip(*before.values()) for a, b in zip(reference(model, p, o, 1.0), d)]
    assert max(stale) > 100 * WORST      # so a rollout that was not refreshed would show


def test_the_trainers_model_is_left_as_it_was():
    model = peft_model()
    train(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    make(model, verify_every=1, verify_cycles=1)([CHATS[0]] * 2, trainer())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_gradients_reach_the_adapter_after_a_rollout():
    """B46: on a CPU one trains through Hugging Face's own attention, whatever the engine compiled."""
    model = peft_model()
    rollout = make(model)
    out = rollout([CHATS[0]] * 2, trainer())
    ids = torch.tensor([out["prompt_ids"][0] + out["completion_ids"][0]])
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    assert grads and all(g is not None for g in grads) and any(bool(g.any()) for g in grads)


# ---- figures ----------------------------------------------------------------------------------------------------------


def test_compare_finds_agreement_and_a_trainer_that_moved_on():
    model = peft_model()
    train(model)
    rollout = make(model)
    samples = rollout.generate(CHATS, SamplingParams(n=3, temperature=1.0, max_new_tokens=8, logprobs=0, seed=1))
    close = rollout.compare(samples, 1.0)
    assert close.tokens == sum(s.num_output_tokens for s in samples)
    assert close.ratio_off_mean <= MEAN and close.ratio_off_max <= WORST and close.delta_mean <= close.delta_max <= WORST
    assert rollout.compare(samples, 0.6).delta_max > 100 * WORST      # another temperature than it was drawn at
    train(model, seed=1)
    assert rollout.compare(samples, 1.0).ratio_off_max > 100 * WORST


def test_log_probs_do_not_depend_on_who_is_computed_beside_them():
    model = peft_model()
    rollout = make(model)
    samples = rollout.generate(CHATS, SamplingParams(n=2, temperature=1.0, max_new_tokens=8, logprobs=0, seed=1))
    for sample, row in zip(samples, log_probs(model, samples, 1.0, rows=3)):
        assert row.tolist() == pytest.approx(reference(model, sample.prompt_ids, sample.token_ids, 1.0), abs=WORST)


def test_agreement_is_by_token_in_float64():
    found = agreement([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.0])
    assert (found.tokens, found.delta_max, found.delta_mean) == (3, 0.5, pytest.approx(0.5 / 3))
    assert found.ratio_off_max == pytest.approx(math.exp(0.5) - 1)
    assert found.ratio_off_mean == pytest.approx((math.exp(0.5) - 1) / 3)
    with pytest.raises(RolloutError, match="2 log-probabilities of the trainer"):
        agreement([-1.0, -2.0], [-1.0])


def test_figures_count_each_prompt_once_and_every_sample():
    rollout = make(peft_model(), compare=True)
    out = rollout([CHATS[0]] * 3 + [CHATS[1]], trainer())
    (figures,) = rollout.history
    assert figures.samples == 4 and figures.tokens == sum(map(len, out["completion_ids"]))
    assert figures.prompt_tokens == len(out["prompt_ids"][0]) + len(out["prompt_ids"][3])
    assert figures.refresh_ms > 0 and figures.generate_s > 0 and figures.agreement.tokens == figures.tokens
    assert figures.tokens_per_s == pytest.approx(figures.tokens / (figures.refresh_ms / 1e3 + figures.generate_s))


# ---- what must not be trained on --------------------------------------------------------------------------------------


def test_every_nth_rollout_is_verified_once_the_adapter_is_not_zero():
    model = peft_model()
    rollout = make(model, verify_every=2, verify_cycles=1)
    for n in range(4):
        if n == 2:
            train(model)
        rollout([CHATS[0]] * 2, trainer(max_completion_length=4))
    assert [figures.drift is not None for figures in rollout.history] == [False, False, False, True]
    assert rollout.history[3].drift.passed and rollout.history[3].verify_s > 0


def test_drift_ends_the_run(monkeypatch):
    """A refresh that leaves one module out, from here on."""
    model = peft_model()
    train(model)
    rollout = make(model, verify_every=1, verify_cycles=1)
    skipped = next(iter(rollout.double.merged))
    write = rollout.double.write_one
    monkeypatch.setattr(rollout.double, "write_one", lambda path, pair: write(path, None if path == skipped else pair))
    with pytest.raises(DriftError, match="no longer base") as error:
        rollout([CHATS[0]] * 2, trainer(max_completion_length=4))
    assert not error.value.report.passed


def test_an_adapter_that_broke_is_refused_before_anything_is_drawn():
    model = peft_model()
    rollout = make(model)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).fill_(float("nan"))
    with pytest.raises(AdapterError, match="not finite"):
        rollout([CHATS[0]], trainer())
    assert rollout.history == []


def test_a_sample_without_room_is_an_error_with_the_fix():
    rollout = make(peft_model())
    with pytest.raises(RolloutError, match="raise max_seq_length=128"):
        rollout([CHATS[0]], trainer(max_completion_length=127, temperature=0.01))
