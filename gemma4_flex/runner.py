"""The one room that touches the device: steps from a plan, through static buffers, to token ids.

Prefill runs on the flat tokens of all spans. Decode runs on fixed buffers, a row a sequence, up to a bucket's size: as it is,
or captured; several steps in a row where the plan says so. Nothing asks the device where anything is: page tables are
mirrored before the step.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence as Seq
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gemma4_flex import fa4
from gemma4_flex.attention import row_width
from gemma4_flex.backends import choose_backends, choose_regions
from gemma4_flex.decode_state import DecodeState, RowState
from gemma4_flex.draws import GREEDY, DrawTable, Features, together
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.logprobs import TokenLogprob
from gemma4_flex.masks import Rows
from gemma4_flex.models.paged import PagedKV
from gemma4_flex.models.projections import PLE_TABLE, view_of
from gemma4_flex.models.registry import walk_class
from gemma4_flex.models.walk import StepInputs
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import EngineConfig
from gemma4_flex.prefill import Sizes, prefill_inputs, sizes_of
from gemma4_flex.sampling import NON_FINITE, alternatives, token_logprobs
from gemma4_flex.scheduler import Span
from gemma4_flex.sequence import Sequence
from gemma4_flex.shared_kv import Sidecar
from gemma4_flex.step_graph import CaptureError, NoHostReads, StepGraph

VALIDATED_REPLAYS = 3     # of a captured step that has to prove itself
SCORED_TOKENS = 256       # of a prompt whose log-probabilities are asked for, at once: each has a row of logits


class Drawn(NamedTuple):
    """What a pass gave, by request_id. tokens: the next one, or the next of each step. logits [n, V]: of the last step's rows, in
    the order of their sequences. logprobs: of each of the tokens, where asked for. prompt: of the prompt's tokens behind the
    ones computed, likewise."""
    tokens: dict[int, int] | dict[int, list[int]]
    logits: Tensor
    logprobs: dict[int, list[TokenLogprob]]
    prompt: dict[int, list[TokenLogprob]]


def buckets_up_to(most: int, base: int) -> list[int]:
    """Sizes that steps are captured and kernels compiled for: powers of `base` below `most`, and `most`."""
    sizes = [1]
    while sizes[-1] * base < most:
        sizes.append(sizes[-1] * base)
    return sizes if most == 1 else [*sizes, most]


def _bucket(buckets: list[int], size: int) -> int:
    return next(b for b in buckets if b >= size)


class Runner:
    """Runs plans on one device. `tables` are the scheduler's page tables, by attention type."""

    def __init__(self, model: nn.Module, geometry: ModelGeometry, config: EngineConfig, tables: Mapping[str, PageTable]):
        self.geometry, self.config, self.tables = geometry, config, tables
        self.device, self.dtype = model.model.norm.weight.device, model.model.norm.weight.dtype
        self.notices: list[str] = []
        self.cache = KVCache(geometry, tables, self.dtype, self.device)
        self.sidecar = Sidecar(geometry, config.max_batch_size + 1, config.max_seq_length, config.page_size, self.dtype,
                               self.device) if config.shared_kv == "sidecar" else None
        view = view_of(model)
        self.weights = dict(view.named_parameters(remove_duplicate=False)) | dict(view.named_buffers())
        self.addresses = {name: weight.data_ptr() for name, weight in self.weights.items()}
        # dequantising has returned wrong data under capture (bitsandbytes#1308): a quantised step proves itself first
        self.must_validate = any(getattr(w, "quant_state", None) is not None for w in self.weights.values())
        self.regions = choose_regions(config, self.notices, quantised=self.must_validate)
        self.backends = choose_backends(geometry, config, self.cache, inline=self.regions.plan is not None, notices=self.notices)
        self.walk = walk_class(geometry)(model, geometry, PagedKV(self.backends, self.sidecar), self.regions, ple=config.ple)
        on_cpu_by_flex = self.device.type == "cpu" and any(b.name == "flex" for b in self.backends.values())
        # on a CPU every size costs flex seconds of C++ compiling, and padding rows next to nothing
        self.buckets = buckets_up_to(config.max_batch_size, 4 if on_cpu_by_flex else 2)[-1 if config.deterministic else 0:]
        tile = fa4.query_tile(torch.cuda.get_device_capability(self.device)) if fa4.in_use(self.backends.values()) else 0
        self.width = row_width(self.device.type, "flex" if on_cpu_by_flex else "sdpa", at_least=tile)
        most_tokens = config.max_prefill_tokens + (config.max_batch_size if config.mixed_prefill else 0)
        self.token_buckets = [size for size in buckets_up_to(most_tokens, 2) if size >= min(self.width, most_tokens)]
        self.row_buckets = buckets_up_to(self._most_rows(config.max_prefill_tokens), 8)[1:]
        # how many pages of a sequence a step looks at, where it copies them or their sidecar; flex reads what there is. A trace
        # of uncompiled steps is slow to make: one for all
        pages = -(-config.max_seq_length // config.page_size)
        copies = self.sidecar is not None or any(b.name == "sdpa" and b.group.window is None for b in self.backends.values())
        traced = config.capture_cudagraph and self.regions.plan is None and self.device.type == "cpu"
        self.column_buckets = buckets_up_to(pages, 2) if copies and not traced and not config.deterministic else [pages]
        self.columns = torch.arange(pages, device=self.device)
        self.draws = DrawTable(config.max_batch_size + 1, geometry.vocab_size, self.device)
        self.state, self.first = (DecodeState(max(2, config.max_batch_size), config.decode_steps_per_sync, self.device, self.draws)
                                  for _ in range(2))            # of decode, and of the draws behind a prefill
        self.graphs: dict[tuple[int, int, Features], StepGraph] = {}      # by batch and column bucket
        self._pool = None                                       # that captured steps share
        # what every step does at least. Where bits must not depend on the neighbours, nor may the kernels: what a request may
        # ask of a draw is always in the step
        most = geometry.vocab_size
        self.features = Features(True, True, most, True, min(32, most)) if config.deterministic else GREEDY
        self._make_room(self.features)
        self._ready: set[Features] = set()                      # features whose draws were compiled
        self.warm_up_s = self.capture_s = 0.0
        self.steps_replayed = self.steps_eager = 0

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling, kernels and regions."""
        return self.warm_up_s + self.regions.compile_s

    def ple_table_bytes(self) -> int:
        """Bytes of the table of per-layer embeddings, wherever it is."""
        name = f"{PLE_TABLE}."
        return sum(t.nbytes for path, t in self.weights.items() if path.startswith(name) and not path.endswith("embed_scale"))

    # ---- static state -------------------------------------------------------------------------------------------

    def mirror_tables(self) -> None:
        """Bring the device up to date with the host's page tables, in place: the tables, pages that are to be copied for a
        second writer, and the sidecar of slots that took over pages."""
        for kind, table in self.tables.items():
            group = self.cache.groups[kind]
            group.apply(table.drain_changes())
            group.copy_pages(table.drain_copies())
            for slot in table.drain_adopted():
                if self.sidecar:
                    self.sidecar.load(kind, slot, table.held(slot), group)

    def static_tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes through its storage."""
        named = {**self.weights, **self.cache.tensors(), "columns": self.columns}
        named |= {f"decode.{name}": buffer for name, buffer in self.state.tensors().items()}
        named |= {f"draws.{name}": buffer for name, buffer in self.draws.tensors().items()}
        return named | (self.sidecar.tensors() if self.sidecar else {})

    def warm_up(self) -> None:
        """Compile every kernel and region a step can ask for, on padding rows only, and time it apart."""
        self._prepare(self.features)
        start, before = time.perf_counter(), self.regions.compile_s
        flex = any(b.name == "flex" for b in self.backends.values())
        for sizes in self._prefill_shapes(flex):
            self._walk_prefill([], sizes)
        if self.regions.plan is not None and self.regions.plan.symbolic and self.buckets == [1]:
            self._decode_step(2, self.column_buckets[-1])      # so here: one row alone would not get the library's matmuls
        if self.regions.plan is not None or flex:
            for size, columns in reversed(self._shapes()):
                self._decode_step(size, columns)
            self.state.fill([], self.buckets[-1])
        self._synchronise()
        self.warm_up_s += time.perf_counter() - start - (self.regions.compile_s - before)

    def _prefill_shapes(self, flex: bool) -> list[Sizes]:
        """Sizes of prefills that have to be compiled before the first job."""
        plan, batch = self.regions.plan, self.config.max_batch_size
        if self.config.deterministic:      # prompts are decode steps
            return []
        if plan is not None and not plan.symbolic:
            return [Sizes(tokens, self._most_rows(tokens), batch) for tokens in self.token_buckets]
        if flex:      # wanted tokens take the kernels of decode
            return [Sizes(2, rows, 0 if plan is None else _bucket(self.buckets, min(2, batch))) for rows in self.row_buckets]
        return [] if plan is None else [Sizes(2 * self.width, 2, 2)]      # a size of 1 would be taken for a constant

    def _shapes(self) -> list[tuple[int, int]]:
        """Batch and column buckets of decode steps."""
        return [(size, columns) for size in self.buckets for columns in self.column_buckets]

    def capture(self) -> None:
        """Capture the greedy decode step of every bucket, largest first, in one memory pool; steps that draw otherwise are
        captured when they first occur.

        A step that cannot be captured is an error; one over quantised weights, that or whose replays are not the eager
        step's, runs eagerly and `notices` say why.
        """
        start, before = time.perf_counter(), self.regions.compile_s
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.state.fill([], self.buckets[-1])
        try:
            if self.regions.plan is not None:      # compiled code would hide what the step asks for
                with self.regions.off(), NoHostReads():
                    self._decode_step(*self._shapes()[-1])
            for size, columns in reversed(self._shapes()):
                self.graphs[size, columns, self.features] = self._captured(size, columns, self.features)
        except CaptureError as error:
            self.graphs = {}
            if not self.must_validate:
                raise
            self.notices.append(f"decode steps over quantised weights run eagerly: {str(error).splitlines()[0].rstrip(':')}")
        self._synchronise()
        self.capture_s += time.perf_counter() - start - (self.regions.compile_s - before)

    def _captured(self, size: int, columns: int, features: Features) -> StepGraph:
        step = functools.partial(self._decode_step, size, columns, features)
        graph = StepGraph.capture(step, self.static_tensors(), pool=self._pool, regions=self.regions if self.regions.plan else None)
        if self.must_validate:
            self._validate(graph, step, size)
        return graph

    def _validate(self, graph: StepGraph, step: Callable[[], tuple[Tensor, Tensor]], size: int) -> None:
        """Raise CaptureError unless replays on inputs the graph was not captured on give the eager step's logits, bit for
        bit. All rows are alike, since all of them are padding and write to the one reserved page."""
        def rows(n: int) -> None:
            self.state.rows.ids[:size] = n * self.geometry.vocab_size // (VALIDATED_REPLAYS + 2)
            self.state.rows.positions[:size] = n % self.config.max_seq_length
        for n in range(1, 1 + VALIDATED_REPLAYS):
            rows(n)
            eager = step()[1].clone()
            rows(n)
            if not torch.equal(graph.replay()[1], eager):
                raise CaptureError(f"replay {n} of {VALIDATED_REPLAYS} on new inputs differs from the eager step")
        self.state.fill([], size)

    def _make_room(self, features: Features) -> None:
        """Make the tables and buffers that draws of `features` read and write."""
        if features.edits:
            self.draws.make_edits()
        for state in (self.state, self.first):
            state.make_room(features)

    def _prepare(self, features: Features, shape: tuple[int, int] | None = None) -> None:
        """Compile the draws of `features`, and where steps are captured that of `shape` with them, on padding rows."""
        start, before = time.perf_counter(), self.regions.compile_s
        if features not in self._ready:
            self._ready.add(features)
            self._make_room(features)
            if self.regions.plan is not None and self.regions.plan.symbolic:      # one row would be taken for a constant
                self.first.fill([], 2)
                logits = torch.zeros(2, self.geometry.vocab_size, dtype=self.dtype, device=self.device)
                self._draw(self.first, logits, self.first.upto(2), features)
        if shape is not None and self.graphs and (key := (*shape, features)) not in self.graphs:
            self.state.fill([], shape[0])
            self.graphs[key] = self._captured(*key)
            self._synchronise()
        self.capture_s += time.perf_counter() - start - (self.regions.compile_s - before)

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode_step(self, size: int, columns: int, features: Features | None = None, record: list[Tensor] | None = None,
                     ) -> tuple[Tensor, Tensor]:
        """Token ids [size] and logits [size, V] of the decode step on the static buffers, which it moves on."""
        state = self.state.upto(size)
        rows = Rows(state.slots, state.positions, state.count, 1, columns=self.columns[:columns])
        logits, _ = self.walk(StepInputs(state.ids, state.positions, state.slots, rows), record)
        return self._draw(self.state, logits, state, features or self.features), logits

    def _draw(self, state: DecodeState, logits: Tensor, rows: RowState, features: Features) -> Tensor:
        """Draw the tokens [B] of `rows` of `state` from logits [B, V], as a region, and move the rows on."""
        return self.regions(("draw", features), functools.partial(state.finish, features=features), logits, rows,
                            state.kept(features))

    def _run_step(self, shape: tuple[int, int], features: Features) -> Tensor:
        """Logits of a decode step, captured where steps are."""
        graph = self.graphs.get((*shape, features))
        return (graph.replay() if graph else self._decode_step(*shape, features))[1]

    def decode(self, sequences: Seq[Sequence], record: list[Tensor] | None = None, *, steps: int = 1) -> Drawn:
        """The next `steps` tokens of each sequence; `record` takes each layer's stream, from an eager pass. What follows a
        sequence's end means nothing. A token of NON_FINITE says that the sequence's numbers broke."""
        self.mirror_tables()
        size = _bucket(self.buckets, len(sequences))
        reach = -(-(max(s.num_tokens for s in sequences) + steps - 1) // self.config.page_size)
        shape = size, _bucket(self.column_buckets, min(reach, self.column_buckets[-1]))
        features = together([self.features, self.draws.assign(sequences, steps)])
        self._prepare(features, shape)
        if record is not None:
            self.state.fill(sequences, size)
            _, logits = self._decode_step(*shape, features, record)
        if record is None or self.graphs:
            self.state.fill(sequences, size)
            for _ in range(steps):
                logits = self._run_step(shape, features)
        if self.graphs:
            self.steps_replayed += steps
        else:
            self.steps_eager += steps
        ids = [s.request_id for s in sequences]
        return Drawn(dict(zip(ids, self.state.read(len(ids), steps))), logits[: len(ids)],
                     self._logprobs(self.state, sequences, steps, features), {})

    def _logprobs(self, state: DecodeState, sequences: Seq[Sequence], steps: int, features: Features,
                  ) -> dict[int, list[TokenLogprob]]:
        """What `state` kept of the last steps' draws of its first rows, for those that asked."""
        if not features.logprobs:
            return {}
        kept = state.read_logprobs(len(sequences), steps, features)
        return {s.request_id: row for s, row in zip(sequences, kept) if s.params.logprobs is not None}

    # ---- prefill ------------------------------------------------------------------------------------------------

    def prefill(self, spans: Seq[Span], record: list[Tensor] | None = None, *, score: Collection[int] = ()) -> Drawn:
        """Next token of the spans that reach their sequence's end. A span whose numbers broke has NON_FINITE, whether or not it
        reaches the end. `score`: the requests whose prompt tokens' log-probabilities are wanted."""
        self.mirror_tables()
        if self.config.deterministic:
            return self._prefill_as_decode(spans, record, score)
        plain = [span for span in spans if span.sequence.request_id not in score]
        scored = [span for span in spans if span.sequence.request_id in score]
        logits, broken, prompt = [], set(), {}
        if plain:
            found, finite = self._walk_prefill(plain, self._prefill_sizes(sizes_of(plain, self.width)), record)
            logits.append(found)
            whole = iter(finite.tolist())
            broken |= {span.sequence.request_id for span in plain if not all([next(whole) for _ in range(span.count)])}
        ending = [span.sequence for span in plain if span.wants_logits]
        if scored:
            logits = [found[: len(ending)] for found in logits]
        for span in scored:
            for start in range(span.start, span.start + span.count, SCORED_TOKENS):
                part = Span(span.sequence, start, min(SCORED_TOKENS, span.start + span.count - start))
                rows = self._walk_scored(part)
                prompt.setdefault(span.sequence.request_id, []).extend(self._score(part, rows))
                if not torch.isfinite(rows.float().sum(-1)).all():
                    broken.add(span.sequence.request_id)
            if span.wants_logits:
                ending.append(span.sequence)
                logits.append(rows[part.count - 1: part.count])
        tokens, logprobs = {}, {}
        rows = torch.cat(logits) if len(logits) > 1 else logits[0] if logits else rows[:0]
        if ending:
            tokens, logprobs = self._draw_first(ending, rows)
        return Drawn(tokens | dict.fromkeys(broken, NON_FINITE), rows[: len(ending)], logprobs, prompt)

    def _draw_first(self, sequences: Seq[Sequence], logits: Tensor) -> tuple[dict[int, int], dict[int, list[TokenLogprob]]]:
        """The next token of each sequence from the first rows of logits [at least n, V], and what is known of it."""
        features = self.draws.assign(sequences, 1)
        self._prepare(features)
        self.first.fill(sequences, len(logits))
        self._draw(self.first, logits, self.first.upto(len(logits)), features)
        drawn = self.first.read(len(sequences), 1)
        return ({s.request_id: token for s, (token,) in zip(sequences, drawn)},
                self._logprobs(self.first, sequences, 1, features))

    def _walk_scored(self, span: Span) -> Tensor:
        """Logits [at least count, V] of every token of a span: no token leaves before the shared layers."""
        sizes = sizes_of([span], self.width)
        symbolic = self.regions.plan is not None and self.regions.plan.symbolic
        if self.regions.plan is not None and not symbolic:
            sizes = Sizes(SCORED_TOKENS, self._most_rows(SCORED_TOKENS), 0)
        step = self._prefill_inputs([span], sizes)._replace(wanted=None, wanted_rows=None)
        with self.regions.off() if symbolic else nullcontext():      # half a minute of C++ would not pay
            return self.walk(step)[0]

    def _score(self, span: Span, logits: Tensor) -> list[TokenLogprob]:
        """Log-probabilities of the prompt's tokens behind those of `span`, from logits [at least count, V] of its tokens."""
        prompt, params = span.sequence.prompt_ids, span.sequence.params
        behind = prompt[span.start + 1: span.start + span.count + 1]
        if not behind:
            return []
        raw = logits[: len(behind)].float()
        ids = torch.tensor(behind, device=raw.device)[:, None]
        values = token_logprobs(raw, ids)[:, 0].tolist()
        top = [()] * len(behind)
        if params.prompt_logprobs:
            top = [tuple(zip(*pair)) for pair in zip(*(t.tolist() for t in alternatives(raw, params.prompt_logprobs)))]
        return [TokenLogprob(value, None, best) for value, best in zip(values, top)]

    def _prefill_as_decode(self, spans: Seq[Span], record: list[Tensor] | None, score: Collection[int]) -> Drawn:
        """`prefill`, by decode steps of one shape: a row a token, whichever sequence it is of. A token's K/V is written before
        any row of its step reads it, and a row sees what is not after it: what it computes does not depend on the others."""
        work = []
        for span in spans:
            ids = span.sequence.token_ids
            work += [(span.sequence, at, ids[at]) for at in range(span.start, span.start + span.count)]
        ending = [span.sequence for span in spans if span.wants_logits]
        shape, features = self._shapes()[-1], together([self.features, self.draws.assign(ending, 1)])
        self._prepare(features, shape)
        tokens, logits, logprobs, prompt, broken = {}, {}, {}, {}, set()
        for start in range(0, len(work), shape[0]):
            some, streams = work[start: start + shape[0]], []
            if record is not None:
                self.state.fill_tokens(some, shape[0])
                self._decode_step(*shape, features, streams)
            self.state.fill_tokens(some, shape[0])
            found = self._run_step(shape, features)
            drawn = self.state.read(len(some), 1)
            known = self.state.read_logprobs(len(some), 1, features) if features.logprobs else [[]] * len(some)
            for row, ((s, at, _), (token,)) in enumerate(zip(some, drawn)):
                if token == NON_FINITE:
                    broken.add(s.request_id)
                if s.request_id in score:
                    prompt.setdefault(s.request_id, []).extend(self._score(Span(s, at, 1), found[row: row + 1]))
                if at + 1 == s.num_tokens:
                    tokens[s.request_id], logits[s.request_id] = token, found[row].clone()
                    if record is not None:
                        record += [stream[row: row + 1] for stream in streams]
                    if s.params.logprobs is not None:
                        logprobs[s.request_id] = known[row]
        rows = [logits[s.request_id] for s in ending]
        return Drawn(tokens | dict.fromkeys(broken, NON_FINITE), torch.stack(rows) if rows else found[:0], logprobs, prompt)

    def _prefill_sizes(self, least: Sizes) -> Sizes:
        """What a prefill of `least` is padded to, so that no size is compiled anew after `warm_up`."""
        flex = any(b.name == "flex" for b in self.backends.values())
        plan = self.regions.plan
        if plan is not None and not plan.symbolic:
            tokens = _bucket(self.token_buckets, least.tokens)
            return Sizes(tokens, self._most_rows(tokens), self.config.max_batch_size)
        wanted = max(least.wanted, 1 if plan is not None else 0)
        if not flex:
            return Sizes(least.tokens, least.rows, wanted)
        return Sizes(least.tokens, _bucket(self.row_buckets, least.rows), wanted and _bucket(self.buckets, wanted))

    def _most_rows(self, tokens: int) -> int:
        """Query rows that a prefill of so many tokens can be cut into: each sequence may leave one half empty."""
        return -(-tokens // self.width) + self.config.max_batch_size

    def _walk_prefill(self, spans: Seq[Span], sizes: Sizes, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Logits of the spans' last tokens, where wanted, and which tokens were finite, both padded to `sizes`."""
        return self.walk(self._prefill_inputs(spans, sizes), record)

    def _prefill_inputs(self, spans: Seq[Span], sizes: Sizes) -> StepInputs:
        # without spans two pages: one would be taken for a constant by what compiles sizes as symbols
        reach = max((span.start + span.count for span in spans), default=2 * self.config.page_size)
        columns = min(-(-reach // self.config.page_size), len(self.columns))
        if self.regions.plan is not None and not self.regions.plan.symbolic:
            columns = _bucket(self.column_buckets, columns)
        return prefill_inputs(spans, sizes, self.width, self.columns[:columns], self.device)

    def scrub(self, sequence: Sequence) -> None:
        """Zero what only a sequence with non-finite values holds, before its pages go to another, and the reserved page and
        slot: where the weights themselves broke, padding rows wrote there what every captured step reads."""
        for kind, table in self.tables.items():
            self.cache.groups[kind].scrub([0, *table.exclusive(sequence.slot)])
        if self.sidecar:
            self.sidecar.scrub(sequence.slot)
            self.sidecar.scrub(0)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
