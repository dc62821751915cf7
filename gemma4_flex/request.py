"""One request as its caller sees it: what it was, its tokens as they come, and what became of it."""
from __future__ import annotations

from dataclasses import dataclass

from gemma4_flex.sequence import Sequence
from gemma4_flex.text import Detokenizer


@dataclass(frozen=True)
class Completion:
    """What became of one prompt. `token_ids` hold the stop token where one ended it; `text` does not."""
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str           # stop, length, abort, or non_finite (the model gave NaN or infinity)
    num_preemptions: int
    epoch_started: int           # the engine's weight epoch at the first step and at the last token: equal unless the
    epoch_ended: int             # weights were updated in between with the policy "recompute"

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


@dataclass
class Request:
    """A sequence with its text, and the weight epochs it was computed under; `submitted` is a `time.perf_counter`."""
    sequence: Sequence
    detokenizer: Detokenizer
    submitted: float
    epoch_started: int | None = None
    epoch_ended: int | None = None

    def completion(self, epoch: int) -> Completion:
        """The finished request's completion; `epoch` stands for steps it never had."""
        started, ended = (epoch if e is None else e for e in (self.epoch_started, self.epoch_ended))
        s = self.sequence
        return Completion(list(s.prompt_ids), list(s.output_ids), self.detokenizer.text, s.finish_reason, s.num_preemptions,
                          started, ended)
