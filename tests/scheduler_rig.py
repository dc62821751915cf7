"""A fake device and a checked scheduler for tests: no tensors, but every rule a real pool obeys."""

from __future__ import annotations

import random

from gemma4_flex.page_table import PageTable, sliding_pool_pages
from gemma4_flex.params import SamplingParams
from gemma4_flex.prefix import Group
from gemma4_flex.scheduler import Scheduler, StepPlan
from gemma4_flex.sequence import Sequence

PAGE, WINDOW, VOCAB, STOP = 4, 6, 50, 1
FULL, SLIDING = "full_attention", "sliding_attention"


def next_token(keys: list[int], window: list[int], sample: int = 0) -> int:
    """The fake model: the next token depends on every key in sight, on their order, on the window's extent and on the sample."""
    state = len(window) + 1000 * sample
    for key in keys:
        state = (state * 31 + key + 7) % 1_000_003
    for key in window:
        state = (state * 17 + key + 3) % 1_000_003
    return state % VOCAB


def solo_run(prompt: list[int], params: SamplingParams, max_seq_length: int, sample: int = 0) -> tuple[list[int], str]:
    """What a request gives with no scheduler, no pages and no neighbours."""
    sequence = Sequence(0, prompt, params, stop_ids=frozenset({STOP}), max_seq_length=max_seq_length)
    while not sequence.is_finished:
        tokens = sequence.token_ids
        sequence.append(next_token(tokens, tokens[-WINDOW:], sample))
    return sequence.output_ids, sequence.finish_reason


def lineage(tokens: list[int], epoch: int) -> list[int]:
    """What decides the K/V of each position: the weights and every token up to it."""
    found = [hash(("epoch", epoch))]
    for token in tokens:
        found.append(hash((found[-1], token)))
    return found[1:]


class FakeDevice:
    """Pools and page tables as a device has them; all it knows of pages comes from drain_changes and drain_copies.

    A pool cell keeps what decides its K/V, so that a query that reads another's key, a stale one or none fails. `dense` is a
    copy by slot, as the sidecar keeps it, which knows of pages taken over from drain_adopted.
    """

    def __init__(self, tables: dict[str, PageTable]) -> None:
        self.tables = tables
        self.mirror = {kind: {} for kind in tables}
        self.pool = {kind: {} for kind in tables}
        self.dense = {kind: {} for kind in tables}
        self.epoch = 0
        self.num_rows = self.num_copies = 0

    def sync(self) -> None:
        for kind, table in self.tables.items():
            table.check()
            for slot, logical, page in table.drain_changes():
                if page:
                    self.mirror[kind][slot, logical] = page
                else:
                    self.mirror[kind].pop((slot, logical), None)
            held = {(s, logical): page for s in range(table.num_slots) for logical, page in table.held(s)}
            assert self.mirror[kind] == held
            pool = self.pool[kind]
            for source, destination in table.drain_copies():
                self.num_copies += 1
                for i in range(PAGE):
                    pool[destination, i] = pool.get((source, i))
            for slot in table.drain_adopted():
                for logical, page in table.held(slot):
                    self.dense[kind] |= {(slot, logical * PAGE + i): pool.get((page, i)) for i in range(PAGE)}
            table.check()

    def run(self, plan) -> list[dict[int, int]]:
        """Compute a plan: the tokens of each of its steps. The host is asked for nothing between them; a row that has drawn a
        stop id or its last token writes and draws no more."""
        self.sync()
        assert plan.steps == 1 or not plan.prefill
        drawn: dict[int, list[int]] = {sequence.request_id: [] for sequence in plan.decode}
        results = [self.run_step([(span.sequence, span.start, span.count, span.wants_logits, []) for span in plan.prefill]
                                 + [self.decode_row(sequence, []) for sequence in plan.decode])]
        for _ in range(plan.steps - 1):
            for request_id, token in results[-1].items():
                drawn[request_id].append(token)
            results.append(self.run_step([
                self.decode_row(sequence, drawn[sequence.request_id]) for sequence in plan.decode
                if sequence.active_stop_ids.isdisjoint(drawn[sequence.request_id])
                and len(sequence.output_ids) + len(drawn[sequence.request_id]) < sequence.max_output]))
        return results

    @staticmethod
    def decode_row(sequence: Sequence, drawn: list[int]) -> tuple:
        return sequence, sequence.num_tokens - 1 + len(drawn), 1, True, drawn

    def run_step(self, rows: list[tuple]) -> dict[int, int]:
        """One step of (sequence, start, count, wants_logits, tokens drawn that the host has not seen) rows: every write, then
        every read, as each layer does it for the whole batch."""
        slots = [sequence.slot for sequence, *_ in rows]
        assert len(set(slots)) == len(slots) and 0 not in slots and None not in slots
        written = {kind: set() for kind in self.tables}
        for sequence, start, count, _, drawn in rows:
            tokens = sequence.token_ids + drawn
            assert sequence.num_computed + len(drawn) == start
            known = lineage(tokens, self.epoch)
            for position in range(start, start + count):
                for kind in self.tables:
                    cell = self.cell(kind, sequence, position)
                    assert cell not in written[kind]
                    assert self.tables[kind]._owners[cell[0]] == 1, "a page that others hold was written"
                    written[kind].add(cell)
                    self.pool[kind][cell] = self.dense[kind][sequence.slot, position] = known[position], tokens[position]
        result = {}
        for sequence, start, count, wants_logits, drawn in rows:
            self.num_rows += count
            known = lineage(sequence.token_ids + drawn, self.epoch)
            for query in range(start, start + count):
                keys = self.read(FULL, sequence, range(query + 1), known)
                window = self.read(SLIDING, sequence, range(max(0, query - WINDOW + 1), query + 1), known)
            assert keys == (sequence.token_ids + drawn)[: start + count]
            if wants_logits:
                result[sequence.request_id] = next_token(keys, window, sequence.sample)
        return result

    def cell(self, kind: str, sequence: Sequence, position: int) -> tuple[int, int]:
        page = self.mirror[kind][sequence.slot, position // PAGE]
        assert page != 0
        return page, position % PAGE

    def read(self, kind: str, sequence: Sequence, positions: range, known: list[int]) -> list[int]:
        cells = [self.pool[kind][self.cell(kind, sequence, position)] for position in positions]
        assert [cell[0] for cell in cells] == [known[position] for position in positions]
        assert cells == [self.dense[kind][sequence.slot, position] for position in positions]
        return [cell[1] for cell in cells]


class Rig:
    """A scheduler over two groups with the fake device, checked at every step."""

    def __init__(self, *, full_pages=40, sliding_pages=None, batch=4, max_seq_length=64, budget=16, decode_steps=1,
                 prefix_cache=False) -> None:
        self.max_seq_length = max_seq_length
        self.decode_steps = decode_steps
        if sliding_pages is None:
            sliding_pages = sliding_pool_pages(
                window=WINDOW,
                page_size=PAGE,
                max_batch_size=batch,
                max_prefill_tokens=budget,
                max_seq_length=max_seq_length,
                decode_steps=decode_steps,
                prefix_cache=prefix_cache,
            )
        sizes = {FULL: (full_pages, None), SLIDING: (sliding_pages, WINDOW)}
        self.tables = {
            kind: PageTable(
                kind,
                n_pages=n_pages,
                page_size=PAGE,
                window=window,
                num_slots=batch + 1,
                max_seq_length=max_seq_length,
            )
            for kind, (n_pages, window) in sizes.items()
        }
        self.scheduler = Scheduler(
            self.tables, max_batch_size=batch, max_seq_length=max_seq_length, max_prefill_tokens=budget,
            decode_steps=decode_steps, prefix_cache=prefix_cache,
        )
        self.prefix_cache = prefix_cache
        self.device = FakeDevice(self.tables)
        self.sequences: list[Sequence] = []
        self.num_lost = 0      # tokens that were computed or taken over, and whose pages were then taken back

    def add_group(self, prompt: list[int], n: int, **params) -> list[Sequence]:
        group = Group(len(self.sequences))
        return [self.add(prompt, group, sample, **params) for sample in range(n)]

    def add(self, prompt: list[int], group: Group | None = None, sample: int = 0, **params) -> Sequence:
        sequence = Sequence(
            len(self.sequences),
            prompt,
            SamplingParams(**params),
            stop_ids=frozenset({STOP}),
            max_seq_length=self.max_seq_length,
            group=group,
            sample=sample,
        )
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def refresh(self) -> None:
        """New weights: what runs keeps its tokens and computes all K/V anew."""
        self.num_lost += sum(sequence.num_computed for sequence in self.scheduler.running)
        self.scheduler.preempt_all()
        self.device.epoch += 1
        self.scheduler.forget_prefixes(self.device.epoch)

    def step(self, meanwhile=lambda: None):
        scheduler = self.scheduler
        computed = {sequence: sequence.num_computed for sequence in scheduler.running}
        plan = scheduler.plan()
        self.num_lost += sum(computed[sequence] for sequence in plan.preempted)
        self.check_plan(plan)
        results = self.device.run(plan)
        meanwhile()
        for span in plan.prefill:      # as the engine does, once the prompt's log-probabilities are known
            if span.start + span.count >= len(span.sequence.prompt_ids) - 1:
                for sequence in self.sequences:
                    if sequence is span.sequence or (sequence.group is not None and sequence.group is span.sequence.group):
                        sequence.must_compute_prompt = False
        scheduler.complete(plan, results[0])
        for tokens in results[1:]:      # as the engine does it
            left = tuple(sequence for sequence in plan.decode if not sequence.is_finished)
            scheduler.complete(StepPlan((), left, ()), tokens)
        self.check_between_steps()
        return plan

    def check_plan(self, plan) -> None:
        scheduler = self.scheduler
        assert sum(span.count for span in plan.prefill) <= scheduler.max_prefill_tokens
        assert plan.prefill or plan.decode
        assert len(scheduler.running) <= scheduler.max_batch_size
        working = [span.sequence for span in plan.prefill] + list(plan.decode)
        assert scheduler.running[0] in working, "the oldest request must advance"
        assert 1 <= plan.steps <= self.decode_steps
        if plan.steps > 1:
            assert not plan.prefill and plan.steps <= max(s.max_output - len(s.output_ids) for s in plan.decode)
            for sequence in plan.decode:
                last = min(sequence.num_computed + plan.steps, len(sequence.prompt_ids) + sequence.max_output - 1)
                assert not any(table.pages_needed(sequence.slot, last) for table in self.tables.values())
        for sequence in plan.preempted:
            assert sequence not in working and sequence.slot is None and sequence.num_computed == 0
        for span in plan.prefill:
            # A chunk needs its own positions and the window - 1 before it.
            most = -(-(WINDOW - 1 + span.count - 1) // PAGE) + 1
            assert len(self.tables[SLIDING].held(span.sequence.slot)) <= most

    def check_between_steps(self) -> None:
        scheduler = self.scheduler
        order = [sequence.request_id for sequence in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "first come, first served"
        for sequence in scheduler.running:
            sliding = [logical for logical, _ in self.tables[SLIDING].held(sequence.slot)]
            assert len(sliding) <= -(-(WINDOW - 1 + self.decode_steps) // PAGE) + 1
            first_seen = max(0, sequence.num_computed - WINDOW + 1)
            assert {p // PAGE for p in range(first_seen, sequence.num_computed)} <= set(sliding)
        in_use = sorted([sequence.slot for sequence in scheduler.running] + scheduler._free_slots)
        assert in_use == list(range(1, scheduler.max_batch_size + 1))
        for table in self.tables.values():
            table.check()
            assert not any(table.held(slot) for slot in scheduler._free_slots)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    @property
    def num_hits(self) -> int:
        return self.scheduler.prefix_hit_tokens + self.scheduler.group_hit_tokens

    def check_tokens_add_up(self) -> None:
        """Every token was either computed or taken over, each as often as it was wanted; unless a step's work was thrown away."""
        assert self.device.num_rows + self.num_hits == sum(s.num_computed for s in self.sequences) + self.num_lost

    def check_end(self) -> None:
        """Every request ended with exactly its solo tokens, or what it had of them when aborted; nothing is held."""
        for sequence in self.sequences:
            output, reason = solo_run(sequence.prompt_ids, sequence.params, self.max_seq_length, sequence.sample)
            if sequence.finish_reason == "abort":
                assert sequence.output_ids == output[: len(sequence.output_ids)]
            else:
                assert (sequence.output_ids, sequence.finish_reason) == (output, reason)
        self.device.sync()
        assert not any(self.device.mirror.values())
        for table in self.tables.values():
            table.check()
            assert table.num_free == table.n_pages - 1
            assert self.prefix_cache or len(table.free_pages) == table.n_pages - 1, "a group's pages are kept without need"


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, VOCAB) for _ in range(length)]
