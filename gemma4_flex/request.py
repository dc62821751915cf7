"""One request as its caller sees it: what it was, its tokens as they come, and what became of it."""
from __future__ import annotations

from dataclasses import dataclass

from gemma4_flex.logprobs import Logprobs, TokenLogprob
from gemma4_flex.params import SamplingParams
from gemma4_flex.sequence import MAX_STOP_IDS, Sequence
from gemma4_flex.text import Detokenizer, PromptError


@dataclass(frozen=True)
class Completion:
    """What became of one sample of a prompt. `token_ids` hold the stop token where one ended it; `text` does not. `logprobs`
    have an entry a token of `token_ids`, `prompt_logprobs` one a token of `prompt_ids` (the first is None), where asked for."""
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str           # stop, length, abort, or non_finite (the model gave NaN or infinity)
    num_preemptions: int
    epoch_started: int           # the engine's weight epoch at the first step and at the last token: equal unless the
    epoch_ended: int             # weights were updated in between with the policy "recompute"
    sample: int = 0              # which of the prompt's n samples
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class TokenEvent:
    """One token of one request, as it comes; `finish_reason` with its last. A request that ends because its numbers broke
    has a last event without a token."""
    request_id: int
    token_id: int | None
    text: str
    finish_reason: str | None
    logprob: TokenLogprob | None = None


@dataclass
class Request:
    """A sequence with its text, and the weight epochs it was computed under; `submitted` is a `time.perf_counter`. Samples of
    one prompt share their `prompt_logprobs`."""
    sequence: Sequence
    detokenizer: Detokenizer
    submitted: float
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    epoch_started: int | None = None
    epoch_ended: int | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs.raw) < len(self.sequence.prompt_ids)

    def take_prompt(self, start: int, scored: list[TokenLogprob]) -> None:
        """Log-probabilities of prompt tokens start, start + 1, ...; those there already, from before a preemption, stay."""
        assert start <= len(self.prompt_logprobs.raw), "a prompt token was passed over"
        for one in scored[len(self.prompt_logprobs.raw) - start:]:
            self.prompt_logprobs.append(one, self.sequence.params.prompt_logprobs)

    def completion(self, epoch: int) -> Completion:
        """The finished request's completion; `epoch` stands for steps it never had."""
        started, ended = (epoch if e is None else e for e in (self.epoch_started, self.epoch_ended))
        s = self.sequence
        return Completion(list(s.prompt_ids), list(s.output_ids), self.detokenizer.text, s.finish_reason, s.num_preemptions,
                          started, ended, s.sample, self.logprobs, self.prompt_logprobs)


def check_against_model(params: SamplingParams, vocab: int, stop_ids: frozenset[int], *, has_tokenizer: bool) -> None:
    """Raise PromptError for what a model of `vocab` ids, which stops at `stop_ids`, or its tokenizer cannot give."""
    if params.stop and not has_tokenizer:
        raise PromptError("stop strings need a tokenizer: use stop_token_ids.")
    named = {name: getattr(params, name) or () for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids")}
    for name, ids in {**named, "logit_bias": [token for token, _ in params.logit_bias]}.items():
        if outside := [i for i in ids if i >= vocab]:
            raise PromptError(f"{name} has {outside[0]}, which is outside the vocabulary of {vocab:,} ids.")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab:
            raise PromptError(f"{name}={getattr(params, name)} is more than the vocabulary of {vocab:,} ids: lower it.")
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else stop_ids)
    if params.min_new_tokens and len(stops) > MAX_STOP_IDS:
        raise PromptError(f"min_new_tokens can hold back at most {MAX_STOP_IDS} stop ids and this request has {len(stops)}.")
    drawable = set(range(vocab) if params.allowed_token_ids is None else params.allowed_token_ids)
    if params.banned_token_ids or params.allowed_token_ids is not None:
        drawable -= set(params.banned_token_ids)
        if not drawable:
            raise PromptError("banned_token_ids leave no id that could be drawn: ban fewer.")
        if params.min_new_tokens and not drawable - stops:
            raise PromptError("min_new_tokens holds back the stop ids and no other id may be drawn: lower it, or allow more.")
