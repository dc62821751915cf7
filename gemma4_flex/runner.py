"""The one room that touches the device: steps from a plan, through static buffers, to token ids.

Prefill runs eagerly on the flat tokens of all spans. Decode runs on fixed buffers, one row a slot bucket, eagerly or as a
captured graph per bucket. Neither asks the device where anything is: page tables are mirrored before the step.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence as Seq

import numpy as np
import torch
from torch import Tensor, nn

from gemma4_flex.attention import PagedBackend, flex_obstacle, row_width
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.kernel_options import choose
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.masks import Rows
from gemma4_flex.models.gemma4 import Gemma4Walk, PagedKV, StepInputs
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import EngineConfig
from gemma4_flex.sampling import NON_FINITE, draw
from gemma4_flex.scheduler import Span
from gemma4_flex.sequence import Sequence
from gemma4_flex.shared_kv import Sidecar
from gemma4_flex.step_graph import CaptureError, StepGraph

MAX_BANNED_IDS = 16
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
        self.sidecar = Sidecar(geometry, config.max_batch_size + 1, config.max_seq_length, self.dtype, self.device) \
            if config.shared_kv == "sidecar" else None
        self.backends = self._choose_backends()
        self.walk = Gemma4Walk(model, geometry, PagedKV(self.backends, self.sidecar))
        view = self.walk.model
        self.weights = dict(view.named_parameters(remove_duplicate=False)) | dict(view.named_buffers())
        # dequantising has returned wrong data under capture (bitsandbytes#1308): a quantised step proves itself first
        self.must_validate = any(getattr(w, "quant_state", None) is not None for w in self.weights.values())
        # on a CPU every size costs seconds of C++ compiling and padding rows next to nothing: few sizes, far apart
        self.buckets = buckets_up_to(config.max_batch_size, 2 if self.device.type == "cuda" else 4)
        self.width = row_width(self.device.type)
        self.row_buckets = buckets_up_to(-(-config.max_prefill_tokens // self.width) + config.max_batch_size, 8)[1:]
        rows = config.max_batch_size
        self.inputs = torch.zeros(3, rows, dtype=torch.long, device=self.device)        # ids, positions, slots
        self.ban = torch.zeros(rows, dtype=torch.bool, device=self.device)
        self.banned_ids = torch.zeros(rows, MAX_BANNED_IDS, dtype=torch.long, device=self.device)
        self.graphs: dict[int, StepGraph] = {}
        self.compile_s = self.capture_s = 0.0
        self.steps_replayed = self.steps_eager = 0

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
            backends[kind] = PagedBackend(name, group, options)
        return backends

    # ---- static state -------------------------------------------------------------------------------------------

    def mirror_tables(self) -> None:
        """Bring the device page tables up to date with the host's, in place."""
        for kind, table in self.tables.items():
            self.cache.groups[kind].apply(table.drain_changes())

    def static_tensors(self) -> dict[str, Tensor]:
        """Everything a captured step reads or writes through its storage."""
        named = {**self.weights, **self.cache.tensors(), "inputs": self.inputs, "ban": self.ban, "banned_ids": self.banned_ids}
        return named | (self.sidecar.tensors() if self.sidecar else {})

    def warm_up(self) -> None:
        """Compile every attention kernel a step can ask for, on padding rows only, and time it apart."""
        if all(b.name == "sdpa" for b in self.backends.values()):
            return
        start = time.perf_counter()
        for count in self.row_buckets:
            self._walk_prefill([], count)
        for size in self.buckets:
            self._decode_step(size)
        self._synchronise()
        self.compile_s += time.perf_counter() - start

    def capture(self) -> None:
        """Capture the decode step of every bucket, largest first, in one memory pool.

        A step that cannot be captured is an error; one over quantised weights, that or whose replays are not the eager
        step's, runs eagerly and `notices` say why.
        """
        start = time.perf_counter()
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._fill([])
        graphs = {}
        try:
            for size in reversed(self.buckets):
                step = functools.partial(self._decode_step, size)
                graphs[size] = StepGraph.capture(step, self.static_tensors(), pool=pool)
                if self.must_validate:
                    self._validate(graphs[size], step)
        except CaptureError as error:
            if not self.must_validate:
                raise
            graphs = {}
            self.notices.append(f"decode steps over quantised weights run eagerly: {str(error).splitlines()[0].rstrip(':')}")
        self.graphs = graphs
        self._synchronise()
        self.capture_s += time.perf_counter() - start

    def _validate(self, graph: StepGraph, step: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Raise CaptureError unless replays on inputs the graph was not captured on give the eager step's logits, bit for
        bit. All rows are alike, since all of them are padding and write to the one reserved page."""
        for n in range(1, 1 + VALIDATED_REPLAYS):
            self.inputs[0].fill_(n * self.geometry.vocab_size // (VALIDATED_REPLAYS + 2))
            self.inputs[1].fill_(n % self.config.max_seq_length)
            eager = step()[1].clone()
            if not torch.equal(graph.replay()[1], eager):
                raise CaptureError(f"replay {n} of {VALIDATED_REPLAYS} on new inputs differs from the eager step")
        self.inputs.zero_()

    # ---- decode -------------------------------------------------------------------------------------------------

    def _decode_step(self, size: int, record: list[Tensor] | None = None, reach: int | None = None) -> tuple[Tensor, Tensor]:
        """Token ids [size] and logits [size, V] of the decode step on the static buffers; `reach` as in `Rows`, eagerly."""
        ids, positions, slots = self.inputs[:, :size].unbind()
        rows = Rows(slots, positions, torch.ones_like(slots), width=1, reach=reach)
        logits, _ = self.walk(StepInputs(ids, positions, slots, rows), record)
        return draw(logits, self.ban[:size], self.banned_ids[:size]), logits

    def _fill(self, sequences: Seq[Sequence]) -> int:
        """Write the sequences' last tokens into the buffers; rows up to the bucket's size become padding. The bucket."""
        size = _bucket(self.buckets, max(1, len(sequences)))
        host = np.zeros((3, size), dtype=np.int64)
        for i, s in enumerate(sequences):
            host[:, i] = s.last_token, s.num_tokens - 1, s.slot
        self.inputs[:, :size].copy_(torch.from_numpy(host))
        ban, banned = _bans(sequences, size)
        self.ban[:size].copy_(ban)
        self.banned_ids[:size].copy_(banned)
        return size

    def decode(self, sequences: Seq[Sequence], record: list[Tensor] | None = None) -> tuple[dict[int, int], Tensor]:
        """Next token of each sequence, by request_id, and logits [n, V]; `record` takes each layer's stream, from an eager
        pass. A token of NON_FINITE says that the sequence's numbers broke."""
        self.mirror_tables()
        size = self._fill(sequences)
        if record is not None or size not in self.graphs:
            ids, logits = self._decode_step(size, record, reach=max(s.num_tokens for s in sequences))
        if size in self.graphs:
            ids, logits = self.graphs[size].replay()
            self.steps_replayed += 1
        else:
            self.steps_eager += 1
        return dict(zip((s.request_id for s in sequences), ids.tolist())), logits[: len(sequences)]

    # ---- prefill ------------------------------------------------------------------------------------------------

    def prefill(self, spans: Seq[Span], record: list[Tensor] | None = None) -> tuple[dict[int, int], Tensor]:
        """Next token, by request_id, of the spans that reach their sequence's end, and their logits [n, V]. A span whose
        numbers broke has NON_FINITE, whether or not it reaches the end."""
        self.mirror_tables()
        ending = [span.sequence for span in spans if span.wants_logits]
        logits, finite = self._walk_prefill(spans, None, record)
        tokens: dict[int, int] = {}
        if ending:
            ban, banned = _bans(ending, len(logits))
            ids = draw(logits, ban.to(self.device), banned.to(self.device))
            tokens = dict(zip((s.request_id for s in ending), ids.tolist()))
        whole = iter(finite.tolist())
        for span in spans:
            if not all([next(whole) for _ in range(span.count)]):
                tokens[span.sequence.request_id] = NON_FINITE
        return tokens, logits[: len(ending)]

    def _walk_prefill(self, spans: Seq[Span], num_rows: int | None, record: list[Tensor] | None = None,
                      ) -> tuple[Tensor, Tensor]:
        """Logits of the spans' last tokens, where wanted, padded to a batch bucket, and which tokens were finite.
        No spans: `num_rows` rows of padding."""
        width = self.width
        ids, positions, slots, row_list, places, wanted = [], [], [], [], [], []
        for span in spans:
            ids += span.sequence.token_ids[span.start: span.start + span.count]
            positions += range(span.start, span.start + span.count)
            slots += [span.sequence.slot] * span.count
            for at in range(0, span.count, width):
                count = min(width, span.count - at)
                places += range(len(row_list) * width, len(row_list) * width + count)
                row_list.append((span.sequence.slot, span.start + at, count, len(ids) - span.count + at))
            if span.wants_logits:
                wanted.append(len(ids) - 1)
        if not spans:
            ids, positions, slots, places = [0], [0], [0], [0]
        size = _bucket(self.row_buckets, max(1, len(row_list))) if num_rows is None else num_rows
        row_array = np.zeros((4, size), dtype=np.int64)
        row_array[2] = 1
        if row_list:
            row_array[:, : len(row_list)] = np.array(row_list, dtype=np.int64).T
        tail_size = _bucket(self.buckets, len(wanted)) if wanted else 0
        tail = np.zeros((2, tail_size), dtype=np.int64)                  # slots and positions of wanted rows
        tail[:, : len(wanted)] = [[slots[i] for i in wanted], [positions[i] for i in wanted]]
        token_of = row_array[3][:, None] + np.minimum(np.arange(width), row_array[2][:, None] - 1)

        def put(array) -> Tensor:
            return torch.as_tensor(np.asarray(array, dtype=np.int64)).to(self.device)
        reach = max(positions) + 1
        row_slots, row_first, row_count = put(row_array[:3]).unbind()
        tail_slots, tail_first = put(tail).unbind()
        step = StepInputs(
            put(ids), put(positions), put(slots),
            Rows(row_slots, row_first, row_count, width, put(token_of), put(places), reach),
            put(wanted + [0] * (tail_size - len(wanted))),
            Rows(tail_slots, tail_first, torch.ones_like(tail_slots), 1, reach=reach))
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


def _bans(sequences: Seq[Sequence], size: int) -> tuple[Tensor, Tensor]:
    """`draw`'s ban [size] and banned ids [size, MAX_BANNED_IDS]: stop ids, of sequences too short to stop yet."""
    ban = torch.zeros(size, dtype=torch.bool)
    banned = torch.zeros(size, MAX_BANNED_IDS, dtype=torch.long)
    for i, s in enumerate(sequences):
        if s.bans_stops and s.active_stop_ids:
            stops = sorted(s.active_stop_ids)
            ban[i] = True
            banned[i] = torch.tensor((stops * MAX_BANNED_IDS)[:MAX_BANNED_IDS])
    return ban, banned
