"""Who runs next: admission, chunked prefill and preemption. Host only.

`running` followed by `waiting` is always in order of arrival: admission moves the first waiting sequence behind the
last running one, and preemption moves it back. So the oldest request advances in every step, and all of them end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from gemma4_flex.page_table import PageTable
from gemma4_flex.prefix import Match, Prefixes
from gemma4_flex.sequence import Sequence


class RequestRefusedError(ValueError):
    """A request that this engine could never run; the message says what to change."""


@dataclass(frozen=True)
class Span:
    """Positions [start, start + count) of a sequence's tokens, prefilled in one step.

    wants_logits: whether the span reaches the last token, so that its last row yields the next one. It is fixed
    when the span is made, and so still true after `complete` has appended that token.
    """

    sequence: Sequence
    start: int
    count: int
    wants_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "wants_logits", self.start + self.count == self.sequence.num_tokens)


@dataclass(frozen=True)
class StepPlan:
    """One step's work; the pages it writes are allocated.

    prefill: spans to compute, of sequences that are not in decode.
    decode: sequences whose last token is computed, at position num_tokens - 1.
    preempted: sequences that lost their slot and pages to make this plan.
    steps: decode steps to run in a row; more than one only where no prefill waits for them.
    """

    prefill: tuple[Span, ...]
    decode: tuple[Sequence, ...]
    preempted: tuple[Sequence, ...]
    steps: int = 1


class Scheduler:
    """Plans steps over page tables.

    tables: page table of each group, by attention type, each with max_batch_size + 1 slots.
    max_batch_size: most sequences running at once; they take slots 1 to max_batch_size.
    max_seq_length: most tokens of a sequence, prompt and output.
    max_prefill_tokens: most tokens prefilled in one step, over all sequences.
    decode_steps: most decode steps planned in a row.
    prefix_cache: whether a sequence may take over what others computed that began alike; samples of one group always may.
    prefix_hit_tokens, group_hit_tokens: tokens that were so taken over, and never computed.
    pages_shared: pages that were taken over and not allocated, by attention type.

    A step is `plan`, then the device's work (page copies first), then `complete`. A plan that is dropped can be made again.
    """

    def __init__(
        self, tables: Mapping[str, PageTable], *, max_batch_size: int, max_seq_length: int, max_prefill_tokens: int,
        decode_steps: int = 1, prefix_cache: bool = False,
    ) -> None:
        for table in tables.values():
            assert table.num_slots == max_batch_size + 1, "a table has one slot a sequence and the reserved slot 0"
            assert table.max_seq_length == max_seq_length
        self.max_batch_size = max_batch_size
        self.max_seq_length = max_seq_length
        self.max_prefill_tokens = max_prefill_tokens
        self.decode_steps = decode_steps
        self.running: list[Sequence] = []  # oldest first
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self._tables = tuple(tables.values())
        self._page_size = self._tables[0].page_size
        assert all(table.page_size == self._page_size for table in self._tables), "all groups have pages of one size"
        self._prefixes = Prefixes(tables, prefix_cache=prefix_cache)
        self._free_slots = list(range(max_batch_size, 0, -1))
        self._unfinished: dict[int, Sequence] = {}  # running and waiting, by request_id

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def has_started(self) -> bool:
        """Whether a request that ran, now or before it was preempted, is unfinished. Such requests come first in line."""
        return bool(self.running or (self.waiting and self.waiting[0].num_preemptions))

    @property
    def prefix_hit_tokens(self) -> int:
        return self._prefixes.prefix_hit_tokens

    @property
    def group_hit_tokens(self) -> int:
        return self._prefixes.group_hit_tokens

    @property
    def pages_shared(self) -> dict[str, int]:
        return dict(self._prefixes.pages_shared)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises RequestRefusedError if it could never run, before anything has changed."""
        assert sequence.request_id not in self._unfinished, f"request {sequence.request_id} is already queued"
        num_prompt = len(sequence.prompt_ids)
        name = f"request {sequence.request_id}"
        if num_prompt == 0:
            raise RequestRefusedError(f"{name} has an empty prompt: give at least one token.")
        if num_prompt >= self.max_seq_length:
            raise RequestRefusedError(
                f"{name} has a prompt of {num_prompt} tokens, which leaves no room for a new one under "
                f"max_seq_length={self.max_seq_length}: shorten the prompt or raise max_seq_length."
            )
        for table in self._tables:
            # The last token generated is returned, never computed, and so needs no place.
            needed = table.least_pages(num_prompt + sequence.max_output - 1)
            if needed > table.n_pages - 1:
                raise RequestRefusedError(
                    f"{name} ({num_prompt} prompt tokens and up to {sequence.max_output} new ones) needs {needed} "
                    f"pages of {table.page_size} tokens in the {table.attention_type} group, which has "
                    f"{table.n_pages - 1}: raise n_pages to at least {needed + 1}, or lower max_new_tokens."
                )
        self._unfinished[sequence.request_id] = sequence
        self.waiting.append(sequence)
        self._prefixes.queued(sequence)

    def plan(self, *, only_started: bool = False) -> StepPlan:
        """Pick the next step's work and allocate its pages.

        Decoding sequences come first and keep their next page, if need be at the cost of the youngest. Then prefill,
        up to max_prefill_tokens: of running sequences, then of waiting ones while slots and pages allow; with
        `only_started`, of those alone that ran before and were preempted. A sequence of which others computed all but the
        last token decodes at once.
        """
        decode: list[Sequence] = []
        prefilling: list[Sequence] = []
        preempted: list[Sequence] = []
        # Preemption takes from the end of this list, so it never reaches a sequence already planned.
        for sequence in self.running:
            if not sequence.is_decoding:
                prefilling.append(sequence)
            elif self._keep_next_page(sequence, preempted):
                decode.append(sequence)
        prefill = self._plan_prefill(prefilling, decode, may_admit=not preempted, only_started=only_started)
        assert decode or prefill or not (self.has_started if only_started else self.has_work), "a step must advance something"
        steps = 1 if prefill or not decode else self._plan_ahead(decode)
        return StepPlan(prefill=tuple(prefill), decode=tuple(decode), preempted=tuple(preempted), steps=steps)

    def _plan_ahead(self, decode: list[Sequence]) -> int:
        """How many steps all of `decode` can take in a row, the pages for them allocated: as many as one of them needs, up to
        decode_steps; one where pages are short, since nobody is preempted for the sake of a later step."""
        steps = min(self.decode_steps, max(s.max_output - len(s.output_ids) for s in decode))
        if steps == 1:
            return 1
        # the last token is returned, never computed
        upto = [min(s.num_computed + steps, len(s.prompt_ids) + s.max_output - 1) for s in decode]
        for table in self._tables:
            if sum(table.pages_needed(s.slot, end) for s, end in zip(decode, upto)) > table.num_free:
                return 1
        for table in self._tables:
            for sequence, end in zip(decode, upto):
                table.extend(sequence.slot, end)
        return steps

    def complete(self, plan: StepPlan, tokens: Mapping[int, int]) -> None:
        """Record that the plan's step ran.

        tokens: next token by request_id, of every decoding sequence and every span that wants logits.
        Sequences that were finished or aborted while the step ran are passed over.
        """
        assert not any(table.num_copies for table in self._tables), "the step ran before its page copies were made"
        for span in plan.prefill:
            self._advance(span.sequence, span.count, tokens if span.wants_logits else None)
        for sequence in plan.decode:
            self._advance(sequence, 1, tokens)
        self.running = [sequence for sequence in self.running if sequence.finish_reason is None]

    def finish(self, request_id: int, reason: str) -> bool:
        """End a request for a reason its tokens do not show, such as a stop string; False if it has ended already."""
        sequence = self._unfinished.pop(request_id, None)
        if sequence is None:
            return False
        sequence.finish_reason = reason
        if sequence.slot is None:
            self.waiting.remove(sequence)
            self._prefixes.withdrawn(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence)
        return True

    def abort(self, request_id: int) -> bool:
        """End a request with finish_reason "abort" and free what it holds; False if it has ended already."""
        return self.finish(request_id, "abort")

    def _keep_next_page(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Hold the page of a decoding sequence's last token; False if the sequence itself had to give way."""
        # Every earlier position is held, so only the first position of a page needs a new one.
        if sequence.num_computed % self._page_size:
            return True
        upto = sequence.num_computed + 1
        while any(table.pages_needed(sequence.slot, upto) > table.num_free for table in self._tables):
            victim = self._preempt_youngest()
            preempted.append(victim)
            if victim is sequence:
                return False
        for table in self._tables:
            table.extend(sequence.slot, upto)
        return True

    def preempt_all(self) -> None:
        """Take back every slot and page, so that all K/V is computed anew; no token is lost and the order is kept."""
        while self.running:
            self._preempt_last()

    def forget_prefixes(self, epoch: int) -> None:
        """The weights are those of `epoch` now: nothing that was computed before is taken over from here on."""
        self._prefixes.forget(epoch, self._unfinished.values())

    def _preempt_youngest(self) -> Sequence:
        assert len(self.running) > 1, "a sequence alone always fits, or `add` would have refused it"
        return self._preempt_last()

    def _preempt_last(self) -> Sequence:
        """Take slot and pages from the youngest running sequence and put it first in the queue.

        Its tokens are kept: once admitted again, it prefills prompt and output together and goes on from there.
        """
        sequence = self.running.pop()
        self._vacate(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
        self._prefixes.queued(sequence)
        return sequence

    def _plan_prefill(
        self, prefilling: list[Sequence], decode: list[Sequence], *, may_admit: bool, only_started: bool
    ) -> list[Span]:
        """Spans for the sequences in `prefilling`, then for waiting ones that can be admitted; of those, the ones that have
        nothing to prefill go to `decode`."""
        spans: list[Span] = []
        budget = self.max_prefill_tokens
        queue = deque(prefilling)
        while budget > 0:
            if queue:
                sequence = queue.popleft()
            # A sequence admitted right after a preemption would take the very pages that were missing.
            elif may_admit and (match := self._next_admission(budget, only_started)) is not None:
                sequence = self._admit_next(match)
                if match.cut and sequence.is_decoding:
                    for table in self._tables:
                        table.extend(sequence.slot, sequence.num_tokens)
                    decode.append(sequence)
                    continue
            else:
                break
            span = self._next_span(sequence, budget)
            if span is None:
                break  # no page is free
            spans.append(span)
            budget -= span.count
        return spans

    def _next_admission(self, budget: int, only_started: bool = False) -> Match | None:
        """What the first waiting sequence takes over, if it can be admitted; None if not."""
        if not self.waiting or not self._free_slots or (only_started and not self.waiting[0].num_preemptions):
            return None
        sequence = self.waiting[0]
        if self._prefixes.must_wait(sequence):
            return None
        match = self._prefixes.match(sequence)
        if not self.running:
            return match  # alone it fits, or `add` would have refused it
        most = len(sequence.prompt_ids) + sequence.max_output - 1      # the last token is returned, never computed
        for table in self._tables:
            upto = sequence.num_tokens if table.window is None else min(sequence.num_tokens, match.cut + budget)
            # One page of headroom, if it will ever need one: without it the next page crossing would preempt what was just
            # admitted.
            if table.cost(match.keys, match.cut, min(upto + table.page_size, most)) > table.num_free:
                return None
        return match

    def _admit_next(self, match: Match) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.slot = self._free_slots.pop()
        self.running.append(sequence)
        self._prefixes.admitted(sequence, match)
        return sequence

    def _next_span(self, sequence: Sequence, budget: int) -> Span | None:
        """The longest span that budget and pages allow, its pages allocated; None if no page is free for it."""
        start = sequence.num_computed
        upto = min(sequence.num_tokens, start + budget, *(table.reach(sequence.slot) for table in self._tables))
        if upto <= start:
            return None
        for table in self._tables:
            table.extend(sequence.slot, upto)
        return Span(sequence, start, upto - start)

    def _advance(self, sequence: Sequence, count: int, tokens: Mapping[int, int] | None) -> None:
        if sequence.slot is None:
            return  # it ended while the step ran
        sequence.num_computed += count
        if sequence.num_computed >= sequence.publish_at:
            self._prefixes.publish(sequence)
        if tokens is not None:
            sequence.append(tokens[sequence.request_id])
            if sequence.finish_reason is not None:
                del self._unfinished[sequence.request_id]
                self._vacate(sequence)
                return
        for table in self._tables:
            table.recycle(sequence.slot, sequence.num_computed)

    def _vacate(self, sequence: Sequence) -> None:
        """Free the slot and every page of a sequence that is no longer in `running`, or is about to leave it."""
        for table in self._tables:
            table.release(sequence.slot)
        self._free_slots.append(sequence.slot)
        self._prefixes.left(sequence)
        sequence.slot = None
