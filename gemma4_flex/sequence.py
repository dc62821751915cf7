"""One request: its tokens, how far they are computed, and why it ended."""

from __future__ import annotations

from gemma4_flex.params import SamplingParams
from gemma4_flex.prefix import NEVER, Chain, Group

MAX_STOP_IDS = 16     # that a step on the device looks for; the host looks for all of them


class Sequence:
    """The tokens of one request and its state.

    request_id: unique among the requests of an engine.
    prompt_ids, output_ids: token ids; the stop token is kept in output_ids.
    stop_ids: the model's own stop ids; active_stop_ids: the ids that end this request.
    slot: its row in the device tables while it runs, else None.
    num_computed: tokens whose K/V is in the cache, always the first ones.
    finish_reason: None while unfinished, then "stop", "length", "abort" or what `Scheduler.finish` was told.
    num_preemptions: how often its pages were taken back.
    group, sample: the samples of its prompt and which of them it is; None and 0 for one alone.
    must_compute_prompt: no token of it may be taken over, since log-probabilities of the prompt are still to be computed; the
        engine takes it back from all samples when one of them has given those.
    num_cached: tokens that were not computed when it was last admitted, because others had.
    chain, num_published, publish_at: keys of its pages, how many of those that are whole it need not publish any more, and the
        num_computed at which it has something to publish (see `Prefixes`).
    """

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        stop_ids: frozenset[int],
        max_seq_length: int,
        group: Group | None = None,
        sample: int = 0,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = list(prompt_ids)
        self.params = params
        self.stop_ids = frozenset(stop_ids)
        self.active_stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        self.max_output = min(params.max_new_tokens, max_seq_length - len(self.prompt_ids))
        self.output_ids: list[int] = []
        self.slot: int | None = None
        self.num_computed = 0
        self.finish_reason: str | None = None
        self.num_preemptions = 0
        self.group = group
        self.sample = sample
        self.num_cached = 0
        self.must_compute_prompt = params.prompt_logprobs is not None
        self.chain: Chain | None = None
        self.num_published = 0
        self.publish_at = NEVER

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output, as a new list."""
        return self.prompt_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def last_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    @property
    def is_decoding(self) -> bool:
        """Whether one token is left to compute: true also for the last token of a prompt, if only that is left."""
        return self.num_computed == len(self.prompt_ids) + len(self.output_ids) - 1 and self.slot is not None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def bans_stops(self) -> bool:
        """Whether the next token may not be one of active_stop_ids, because min_new_tokens is not reached."""
        return len(self.output_ids) < self.params.min_new_tokens

    def append(self, token: int) -> None:
        """Add a generated token and set finish_reason if it is the last.

        A stop id ends the request with "stop", even as the last token allowed; max_new_tokens and max_seq_length
        end it with "length". A stop id that was banned when it was drawn is an ordinary token.
        """
        assert self.finish_reason is None, f"request {self.request_id} has already finished"
        may_stop = not self.bans_stops
        self.output_ids.append(token)
        if may_stop and token in self.active_stop_ids:
            self.finish_reason = "stop"
        elif len(self.output_ids) >= self.max_output:
            self.finish_reason = "length"

    def __repr__(self) -> str:
        state = self.finish_reason or (f"slot {self.slot}" if self.slot is not None else "waiting")
        return (
            f"Sequence({self.request_id}, {len(self.prompt_ids)}+{len(self.output_ids)} tokens, "
            f"{self.num_computed} computed, {state})"
        )
