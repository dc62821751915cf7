"""Rollouts in the trainer's own process: groups of samples drawn from a PEFT model's adapter as it is now.

    rollout = Rollout(peft_model, tokenizer, EngineConfig(max_batch_size=64, max_seq_length=512))
    GRPOTrainer(model=peft_model, rollout_func=rollout, ...)                             # TRL: nothing else to do
    samples = rollout.generate(prompts, SamplingParams(n=8, temperature=1.0, logprobs=0))    # any other trainer

Each rollout first writes base + adapter into the engine's inference copy, in place. The trainer's model is only read: it goes
on computing with its adapter beside the weights, so the two sides differ by what rounding differs, and `compare` says by
how much.
"""
from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from gemma4_flex.engine import FlexEngine, Prompt
from gemma4_flex.lora.adapters import Adapter, adapter_of
from gemma4_flex.lora.double_copy import DoubleCopy
from gemma4_flex.lora.drift import DriftReport, verify_no_drift
from gemma4_flex.lora.session import drift_table
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.request import Completion

VERIFIED_PROMPTS = 2      # of a rollout, whose logits a verification replays


class RolloutError(RuntimeError):
    """A rollout that must not be trained on; the message says why and what to do."""


class DriftError(RolloutError):
    """Drift verification failed: `report` holds its tiers."""

    def __init__(self, report: DriftReport):
        super().__init__(f"the inference copy is no longer base + adapter:\n{drift_table(report)}")
        self.report = report


@dataclass(frozen=True)
class Agreement:
    """The trainer's log-probabilities of a rollout's tokens against the rollout's own. The importance ratio of a token is
    exp(trainer - rollout): 1.0 as long as the policy that is trained is the one that was drawn from."""
    tokens: int
    delta_mean: float          # of |trainer - rollout|
    delta_max: float
    ratio_off_mean: float      # of |ratio - 1|
    ratio_off_max: float


@dataclass
class RolloutFigures:
    """What one rollout took and gave; `drift` is None where it was not verified."""
    samples: int
    prompt_tokens: int         # of each prompt once, however many samples it has
    tokens: int
    refresh_ms: float
    generate_s: float
    weight_epoch: int
    agreement: Agreement | None = None
    drift: DriftReport | None = None
    verify_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole job: refresh and generation."""
        return self.refresh_ms / 1e3 + self.generate_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Rollout:
    """An engine on the inference copy of `model` (a PEFT model whose adapter is being trained), refreshed before each rollout.

    Make it before the trainer, and train the adapter in place, as optimizers do. Every `verify_every` rollouts the engine is
    checked for drift over `verify_cycles` perturb-and-refresh cycles (0: never), and DriftError ends the run where it shows.
    `compare`: also compare every rollout of `__call__` with the trainer's model, which takes one forward of it.
    """

    def __init__(self, model: nn.Module, tokenizer, config: EngineConfig | None = None, *, adapter_name: str = "default",
                 verify_every: int = 0, verify_cycles: int = 5, compare: bool = False, seed: int = 0):
        self.model, self.tokenizer, self.adapter_name = model, tokenizer, adapter_name
        self.double = DoubleCopy(model, list(self.adapter().pairs))
        self.engine = FlexEngine(self.double.inference, tokenizer, config)
        self.double.attach(self.engine)
        self.verify_every, self.verify_cycles, self.compares, self.seed = verify_every, verify_cycles, compare, seed
        self.history: list[RolloutFigures] = []

    def adapter(self) -> Adapter:
        """The adapter as it is now, by reference."""
        return adapter_of(self.model, self.adapter_name)

    def refresh(self) -> float:
        """Write base + adapter into the inference copy; the milliseconds it took. Raises AdapterError for one that is not
        finite, and then nothing was written."""
        start = self._now()
        self.double.refresh(self.adapter())
        return 1e3 * (self._now() - start)

    def generate(self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams]) -> list[Completion]:
        """Refresh, then draw: `params.n` samples of each prompt, in a row. What it took is `history[-1]`.

        Raises RolloutError where a sample broke or had no room, and DriftError where a verification that was due failed.
        """
        refresh_ms = self.refresh()
        start = self._now()
        samples = self.engine.generate(prompts, params)
        seconds = self._now() - start
        for sample, one in zip(samples, _repeated(params, len(prompts))):
            self._check(sample, one)
        firsts = [sample for sample in samples if sample.sample == 0]
        self.history.append(RolloutFigures(
            len(samples), sum(s.num_prompt_tokens for s in firsts), sum(s.num_output_tokens for s in samples), refresh_ms, seconds,
            self.engine.weight_epoch))
        if self.verify_every and len(self.history) % self.verify_every == 0:
            self.verify([s.prompt_ids for s in firsts[:VERIFIED_PROMPTS]])
        return samples

    def __call__(self, prompts: list, trainer) -> dict[str, list]:
        """TRL's `rollout_func`: `prompts` are chats or texts, each repeated as often as it is to be sampled; sampling is what
        the trainer's config asks for. One entry a prompt: ids of the prompt, ids of the completion with its stop token, and
        the log-probability each of these was drawn with."""
        params = sampling_of(trainer)
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        rank = getattr(getattr(trainer, "accelerator", None), "process_index", 0)
        samples = self.generate([self._encode(prompt, trainer) for prompt, _ in groups],
                                [replace(params, n=n, seed=self._seed(rank, i)) for i, (_, n) in enumerate(groups)])
        if self.compares:
            self.history[-1].agreement = self.compare(samples, params.temperature)
        return {"prompt_ids": [s.prompt_ids for s in samples], "completion_ids": [s.token_ids for s in samples],
                "logprobs": [list(s.logprobs.processed) for s in samples]}

    def compare(self, samples: Seq[Completion], temperature: float) -> Agreement:
        """The trainer's model, as it is now, on the tokens of `samples`, which were drawn at `temperature` untruncated."""
        theirs = log_probs(self.model, samples, temperature)
        return agreement([x for row in theirs for x in row.tolist()], [x for s in samples for x in s.logprobs.processed])

    def verify(self, prompts: Seq[Seq[int]]) -> DriftReport | None:
        """Drift verification of the engine as it stands; None where the adapter is still zero and nothing could show."""
        adapter = self.adapter()
        if not any(bool(pair.up.detach().any()) for pair in adapter.pairs.values()):
            return None
        start = self._now()
        report = verify_no_drift(self.engine, self.double, adapter, lambda model: FlexEngine(
            model, self.tokenizer, self.engine.config), prompts, iterations=self.verify_cycles)
        if self.history:
            self.history[-1].drift, self.history[-1].verify_s = report, self._now() - start
        if not report.passed:
            raise DriftError(report)
        return report

    def _check(self, sample: Completion, params: SamplingParams) -> None:
        if sample.finish_reason == "non_finite":
            raise RolloutError("the policy gave NaN or infinity for a sample: train with a lower rate.")
        if sample.finish_reason == "length" and sample.num_output_tokens < params.max_new_tokens:
            raise RolloutError(
                f"a prompt of {sample.num_prompt_tokens} tokens left room for {sample.num_output_tokens} of the "
                f"{params.max_new_tokens} that a sample may have: raise max_seq_length={self.engine.config.max_seq_length}.")

    def _encode(self, prompt, trainer) -> Prompt:
        """A prompt as the engine takes it: a chat that needs the trainer's template arguments is rendered here."""
        arguments = getattr(trainer, "chat_template_kwargs", None)
        if not arguments or isinstance(prompt, str):
            return prompt
        text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **arguments)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _seed(self, rank: int, prompt: int) -> int:
        """A seed for one prompt of the next rollout: the same in every run, and no two alike."""
        name = f"{self.seed} {rank} {len(self.history)} {prompt}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1

    def _now(self) -> float:
        if self.engine.config.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _repeated(params: SamplingParams | Seq[SamplingParams], prompts: int) -> list[SamplingParams]:
    """The params of each sample."""
    each = [params] * prompts if isinstance(params, SamplingParams) else params
    return [one for one in each for _ in range(one.n)]


def sampling_of(trainer) -> SamplingParams:
    """What a TRL trainer's config asks of a sample. Raises RolloutError for what this rollout would have to leave out."""
    left_out = {"tools": getattr(trainer, "tools", None), "environments": getattr(trainer, "environment_factories", None),
                "generation_kwargs": getattr(getattr(trainer, "args", None), "generation_kwargs", None)}
    if asked := [name for name, value in left_out.items() if value]:
        raise RolloutError(f"the trainer asks for {' and '.join(asked)}, which these rollouts do not have: train without, or "
                           "without this rollout_func.")
    return SamplingParams(
        max_new_tokens=trainer.max_completion_length, temperature=trainer.temperature, top_p=trainer.top_p,
        top_k=trainer.top_k or 0, min_p=trainer.min_p or 0.0, repetition_penalty=trainer.repetition_penalty, logprobs=0)


def agreement(trainer: Seq[float] | Tensor, rollout: Seq[float] | Tensor) -> Agreement:
    """Set a trainer's log-probabilities beside the rollout's, token by token, in float64."""
    ours, theirs = (torch.as_tensor(x).detach().cpu().double().reshape(-1) for x in (rollout, trainer))
    if ours.shape != theirs.shape or not len(ours):
        raise RolloutError(f"{len(theirs)} log-probabilities of the trainer cannot be set beside {len(ours)} of the rollout: "
                           "give one of each a token.")
    delta, off = (theirs - ours).abs(), (theirs - ours).expm1().abs()
    return Agreement(len(ours), delta.mean().item(), delta.max().item(), off.mean().item(), off.max().item())


@torch.no_grad()
def log_probs(model: nn.Module, samples: Seq[Completion], temperature: float, rows: int = 32) -> list[Tensor]:
    """Log-probability of each token of each sample by a plain forward of `model`, `rows` samples at a time: what a policy
    gradient sees. One fp32 tensor [tokens] a sample."""
    device, found = next(model.parameters()).device, []
    for start in range(0, len(samples), rows):
        some = samples[start: start + rows]
        ids = nn.utils.rnn.pad_sequence([torch.tensor([*s.prompt_ids, *s.token_ids]) for s in some], batch_first=True).to(device)
        lengths = torch.tensor([s.num_prompt_tokens + s.num_output_tokens for s in some], device=device)
        mask = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
        logits = model(input_ids=ids, attention_mask=mask).logits.float() / temperature      # [rows, T, V]
        drawn = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]          # [rows, T - 1]: of token t + 1
        found += [row[s.num_prompt_tokens - 1: s.num_prompt_tokens + s.num_output_tokens - 1].cpu() for row, s in zip(drawn, some)]
    return found
