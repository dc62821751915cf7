"""The one room that touches the device: steps from a plan, through static buffers, to token ids.

Prefill runs on the flat tokens of all spans. Decode runs on fixed buffers, a row a sequence, up to a bucket's size: as it is,
or captured; several steps in a row where the plan says so. Nothing asks the device where anything is: page tables are
mirrored before the step.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence as Seq

import torch
from torch import Tensor, nn

from gemma4_flex.attention import PagedBackend, flex_obstacle, row_width
from gemma4_flex.compiled import PLANS, Regions, compile_obstacle
from gemma4_flex.decode_state import DecodeState, padded_stop_ids
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kernel_options import choose
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.masks import Rows
from gemma4_flex.models.gemma4 import Gemma4Walk, PagedKV, StepInputs, view_of
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import EngineConfig
from gemma4_flex.prefill import Sizes, prefill_inputs, sizes_of
from gemma4_flex.sampling import NON_FINITE, draw
from gemma4_flex.scheduler import Span
from gemma4_flex.sequence import Sequence
from gemma4_flex.shared_kv import Sidecar
from gemma4_flex.step_graph import CaptureError, NoHostReads, StepGraph

VALIDATED_REPLAYS = 3     # of a captured step that has to prove itself


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
        self.device, self.dtype = model.lm_head.weight.device, model.lm_head.weight.dtype
        self.notices: list[str] = []
        self.cache = KVCache(geometry, tables, self.dtype, self.device)
        self.sidecar = Sidecar(geometry, config.max_batch_size + 1, config.max_seq_length, config.page_size, self.dtype,
                               self.device) if config.shared_kv == "sidecar" else None
        view = view_of(model)
        self.weights = dict(view.named_parameters(remove_duplicate=False)) | dict(view.named_buffers())
        self.addresses = {name: weight.data_ptr() for name, weight in self.weights.items()}
        # dequantising has returned wrong data under capture (bitsandbytes#1308): a quantised step proves itself first
        self.must_validate = any(getattr(w, "quant_state", None) is not None for w in self.weights.values())
        self.regions = self._choose_regions()
        self.backends = self._choose_backends()
        self.walk = Gemma4Walk(model, geometry, PagedKV(self.backends, self.sidecar), self.regions)
        on_cpu_by_flex = self.device.type == "cpu" and any(b.name == "flex" for b in self.backends.values())
        # on a CPU every size costs flex seconds of C++ compiling, and padding rows next to nothing
        self.buckets = buckets_up_to(config.max_batch_size, 4 if on_cpu_by_flex else 2)
        self.width = row_width(self.device.type, "flex" if on_cpu_by_flex else "sdpa")
        most_tokens = config.max_prefill_tokens + (config.max_batch_size if config.mixed_prefill else 0)
        self.token_buckets = [size for size in buckets_up_to(most_tokens, 2) if size >= min(self.width, most_tokens)]
        self.row_buckets = buckets_up_to(self._most_rows(config.max_prefill_tokens), 8)[1:]
        # how many pages of a sequence a step looks at, where it copies them or their sidecar; flex reads what there is. A trace
        # of uncompiled steps is slow to make: one for all
        pages = -(-config.max_seq_length // config.page_size)
        copies = self.sidecar is not None or any(b.name == "sdpa" and b.group.window is None for b in self.backends.values())
        traced = config.capture_cudagraph and self.regions.plan is None and self.device.type == "cpu"
        self.column_buckets = buckets_up_to(pages, 2) if copies and not traced else [pages]
        self.columns = torch.arange(pages, device=self.device)
        self.state = DecodeState(max(2, config.max_batch_size), config.decode_steps_per_sync, self.device)
        self.graphs: dict[tuple[int, int], StepGraph] = {}      # by batch and column bucket
        self.warm_up_s = self.capture_s = 0.0
        self.steps_replayed = self.steps_eager = 0

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling, kernels and regions."""
        return self.warm_up_s + self.regions.compile_s

    def _choose_regions(self) -> Regions:
        """What is compiled; nothing, by name in `notices`, where nothing can be."""
        obstacle = None
        if self.config.compile:
            if self.must_validate:
                obstacle = "4-bit weights: steps run uncompiled, bitsandbytes' parameters cannot be traced"
            else:
                obstacle = compile_obstacle(self.device.type)
            if obstacle:
                self.notices.append(obstacle)
        return Regions(PLANS[self.device.type] if self.config.compile and not obstacle else None)

    def _choose_backends(self) -> dict[str, PagedBackend]:
        """`config.attention` for each attention type, or sdpa, by name in `notices`, where flex cannot run."""
        obstacle = flex_obstacle(self.device.type) if self.config.attention == "flex" else None
        if obstacle:
            self.notices.append(obstacle)
        backends = {}
        for kind, group in self.cache.groups.items():
            name = "sdpa" if obstacle else self.config.attention
            given = {"decode": self.config.decode_kernel_options, "prefill": self.config.prefill_kernel_options}
            options: dict[str, dict | None] = {phase: asked or None for phase, asked in given.items()}
            if name == "flex" and self.device.type == "cuda":
                card = torch.cuda.get_device_properties(self.device)
                head_dim = self.geometry.layers[self.geometry.owners(kind)[0]].head_dim
                for phase, asked in given.items():
                    chosen = choose(head_dim, phase, (card.major, card.minor), card.shared_memory_per_block_optin,
                                    dtype=self.config.dtype, page_size=self.config.page_size)
                    options[phase] = chosen if not asked else {**(chosen or {}), **asked}
                if None in options.values():
                    name = "sdpa"
                    self.notices.append(f"{kind}: no flex_attention configuration for head_dim {head_dim} fits {card.name} "
                                        f"({card.shared_memory_per_block_optin:,} B of shared memory): sdpa instead")
            backends[kind] = PagedBackend(name, group, options, inline=self.regions.plan is not None and self.device.type == "cuda")
        return backends

    # ---- static state -------------------------------------------------------------------------------------------

    def mirror_tables(self) -> None:
        """Bring the device page tables up to date with the host's, in place."""
        for kind, table in self.tables.items():
            self.cache.groups[kind].apply(table.drain_changes())

    def static_tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes through its storage."""
        named = {**self.weights, **self.cache.tensors(), "columns": self.columns}
        named |= {f"decode.{name}": buffer for name, buffer in self.state.tensors().items()}
        return named | (self.sidecar.tensors() if self.sidecar else {})

    def warm_up(self) -> None:
        """Compile every kernel and region a step can ask for, on padding rows only, and time it apart."""
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
        if plan is not None and not plan.symbolic:
            return [Sizes(tokens, self._most_rows(tokens), batch) for tokens in self.token_buckets]
        if flex:      # wanted tokens take the kernels of decode
            return [Sizes(2, rows, 0 if plan is None else _bucket(self.buckets, min(2, batch))) for rows in self.row_buckets]
        return [] if plan is None else [Sizes(2 * self.width, 2, 2)]      # a size of 1 would be taken for a constant

    def _shapes(self) -> list[tuple[int, int]]:
        """Batch and column buckets of decode steps."""
        return [(size, columns) for size in self.buckets for columns in self.column_buckets]

    def capture(self) -> None:
        """Capture the decode step of every bucket, largest first, in one memory pool.

        A step that cannot be captured is an error; one over quantised weights, that or whose replays are not the eager
        step's, runs eagerly and `notices` say why.
        """
        start, before = time.perf_counter(), self.regions.compile_s
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self.state.fill([], self.buckets[-1])
        graphs = {}
        try:
            for shape in reversed(self._shapes()):
                step = functools.partial(self._decode_step, *shape)
                if not graphs and self.regions.plan is not None:      # compiled code would hide what the step asks for
                    with self.regions.off(), NoHostReads():
                        step()
                graphs[shape] = StepGraph.capture(step, self.static_tensors(), pool=pool,
                                                   regions=self.regions if self.regions.plan else None)
                if self.must_validate:
                    self._validate(graphs[shape], step, shape[0])
        except CaptureError as error:
            if not self.must_validate:
                raise
            graphs = {}
            self.notices.append(f"decode steps over quantised weights run eagerly: {str(error).splitlines()[0].rstrip(':')}")
        self.graphs = graphs
        self._synchronise()
        self.capture_s += time.perf_counter() - start - (self.regions.compile_s - before)

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

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode_step(self, size: int, columns: int, record: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Token ids [size] and logits [size, V] of the decode step on the static buffers, which it moves on."""
        state = self.state.upto(size)
        rows = Rows(state.slots, state.positions, state.count, 1, columns=self.columns[:columns])
        step = StepInputs(state.ids, state.positions, state.slots, rows, state=state)
        ids, logits, _ = self.walk(step, record, self._finish)
        return ids, logits

    def _finish(self, logits: Tensor, step: StepInputs) -> tuple[Tensor, Tensor]:
        return self.state.finish(logits, step.state), logits

    def decode(self, sequences: Seq[Sequence], record: list[Tensor] | None = None, *, steps: int = 1,
               ) -> tuple[dict[int, list[int]], Tensor]:
        """The next `steps` tokens of each sequence, by request_id, and the last step's logits [n, V]; `record` takes each
        layer's stream, from an eager pass. What follows a sequence's end means nothing. A token of NON_FINITE says that the
        sequence's numbers broke."""
        self.mirror_tables()
        size = _bucket(self.buckets, len(sequences))
        reach = -(-(max(s.num_tokens for s in sequences) + steps - 1) // self.config.page_size)
        shape = size, _bucket(self.column_buckets, min(reach, self.column_buckets[-1]))
        if record is not None or shape not in self.graphs:
            self.state.fill(sequences, size)
            for _ in range(steps):
                _, logits = self._decode_step(*shape, record)
        if shape in self.graphs:
            self.state.fill(sequences, size)
            for _ in range(steps):
                _, logits = self.graphs[shape].replay()
            self.steps_replayed += steps
        else:
            self.steps_eager += steps
        drawn = self.state.read(len(sequences), steps)
        return dict(zip((s.request_id for s in sequences), drawn)), logits[: len(sequences)]

    # ---- prefill ------------------------------------------------------------------------------------------------

    def prefill(self, spans: Seq[Span], record: list[Tensor] | None = None) -> tuple[dict[int, int], Tensor]:
        """Next token, by request_id, of the spans that reach their sequence's end, and their logits [n, V]. A span whose
        numbers broke has NON_FINITE, whether or not it reaches the end."""
        self.mirror_tables()
        ending = [span.sequence for span in spans if span.wants_logits]
        logits, finite = self._walk_prefill(spans, self._prefill_sizes(sizes_of(spans, self.width)), record)
        tokens: dict[int, int] = {}
        if ending:
            ban = torch.tensor([s.bans_stops for s in ending])
            stops = torch.tensor([padded_stop_ids(s) for s in ending])
            ids = draw(logits[: len(ending)], ban.to(self.device), stops.to(self.device))
            tokens = dict(zip((s.request_id for s in ending), ids.tolist()))
        whole = iter(finite.tolist())
        for span in spans:
            if not all([next(whole) for _ in range(span.count)]):
                tokens[span.sequence.request_id] = NON_FINITE
        return tokens, logits[: len(ending)]

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
        # without spans two pages: one would be taken for a constant by what compiles sizes as symbols
        reach = max((span.start + span.count for span in spans), default=2 * self.config.page_size)
        columns = min(-(-reach // self.config.page_size), len(self.columns))
        if self.regions.plan is not None and not self.regions.plan.symbolic:
            columns = _bucket(self.column_buckets, columns)
        step = prefill_inputs(spans, sizes, self.width, self.columns[:columns], self.device)
        return self.walk(step, record)

    def scrub(self, sequence: Sequence) -> None:
        """Zero what a sequence with non-finite values holds, before its pages go to another, and the reserved page and slot:
        where the weights themselves broke, padding rows wrote there what every captured step reads."""
        for kind, table in self.tables.items():
            self.cache.groups[kind].scrub([0, *(page for _, page in table.held(sequence.slot))])
        if self.sidecar:
            self.sidecar.scrub(sequence.slot)
            self.sidecar.scrub(0)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
