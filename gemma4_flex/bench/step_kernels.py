"""The kernels of whole decode and prefill steps at full geometry, planned for GPUs that are not here.

A step is the engine's own: a `Runner` over weights and pools that are fake, whose step functions are called once. Each
region the walk would compile is noted and lowered for a card (lowering.py); what runs between regions is counted too.
Triton, where it is asked for, compiles every kernel, which tells its shared memory, registers and spills. Nothing here
says how fast a kernel is.
"""
from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex.attention import PagedBackend
from gemma4_flex.bench.lowering import KINDS, Launch, lower
from gemma4_flex.bench.pretended_gpu import GPU
from gemma4_flex.checkpoints.files import read_json
from gemma4_flex.checkpoints.skeleton import materialize, meta_text_model
from gemma4_flex.compiled import PLANS, Regions, _tf32 as tf32
from gemma4_flex.decode_state import DecodeState
from gemma4_flex.draws import GREEDY
from gemma4_flex.geometry import LayerGeometry, ModelGeometry
from gemma4_flex.kernel_options import choose
from gemma4_flex.kv_cache import KVCache
from gemma4_flex.models.gemma4 import Gemma4Walk
from gemma4_flex.models.matmul import matmuls_for
from gemma4_flex.models.paged import PagedKV
from gemma4_flex.models.projections import lay_side_by_side
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import SamplingParams
from gemma4_flex.prefill import sizes_of
from gemma4_flex.runner import Runner
from gemma4_flex.scheduler import Span
from gemma4_flex.sequence import Sequence

PAGE_SIZE = 128
NUM_PAGES = 2048
MAX_SEQ_LENGTH = 8192
PREFILL_WIDTH = 128             # queries a prefill row holds on a GPU
NO_LAUNCH = ("device", "empty", "new_empty", "lift", "detach", "_to_copy")
HOT = 3                         # a kernel launched at least so often in a step belongs to layers, not to prelude or head


@dataclass(frozen=True)
class Work:
    """What a step computes. Decode: one token for each of `batch` sequences of `length` tokens. Prefill: `batch` prompts of
    `length` tokens."""
    phase: str
    batch: int
    length: int

    def keys_in_view(self, window: int | None) -> int:
        """Keys that a row of queries sees: all of them, or those of half a prompt on average, or the window's."""
        seen = self.length if self.phase == "decode" else max(min(self.length, PREFILL_WIDTH), self.length // 2)
        width = 1 if self.phase == "decode" else PREFILL_WIDTH
        return seen if window is None else min(seen, window + width - 1)


@dataclass
class Region:
    """A function that a step calls `times` times, on tensors of one set of shapes."""
    name: str
    call: Callable[[], object]
    times: int = 0


class NotedRegions(Regions):
    """Runs regions as they are and notes them; between them, counts operations that would each be a launch."""

    def __init__(self):
        super().__init__(PLANS["cuda"])
        self.noted: dict[tuple, Region] = {}
        self.between: Counter[str] = Counter()

    def __call__(self, key: tuple, fn: Callable, *args):
        if self._inside:
            return fn(*args)
        shapes = tuple((tuple(t.shape), t.stride()) for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
        name = " ".join(part if isinstance(part, str) else {True: "owner", False: "shared"}.get(part, "") for part in key).strip()
        region = self.noted.setdefault((name, shapes), Region(name, lambda: fn(*args)))
        region.times += 1
        with self.off():
            return fn(*args)


class _Between(TorchDispatchMode):
    """Counts what runs outside of regions and is neither a view nor an allocation."""

    def __init__(self, regions: NotedRegions):
        super().__init__()
        self.regions = regions

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not (self.regions._inside or func.is_view or name.startswith(NO_LAUNCH)):
            self.regions.between[name] += 1
        return func(*args, **(kwargs or {}))


class FakeRunner(Runner):
    """A `Runner` for one piece of work at the geometry of a config.json: what its steps touch, on fake tensors."""

    def __init__(self, config_path: Path, work: Work, gpu: GPU, *, dtype: str = "bfloat16"):
        fields = read_json(config_path)
        self.work, self.gpu = work, gpu
        self.geometry = ModelGeometry.from_config(fields)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        model = meta_text_model(fields, dtype=getattr(torch, dtype))
        with self.fake_mode, torch.no_grad():
            materialize(model, "cpu")
            lay_side_by_side(model.model)
            self.cache = KVCache(self.geometry, {kind: self._table(kind) for kind in self.geometry.attention_types},
                                 getattr(torch, dtype), "cpu")
            self.state = DecodeState(work.batch, 1, "cpu")
            self.columns = torch.arange(MAX_SEQ_LENGTH // PAGE_SIZE)
        self.backends = {}
        for kind, group in self.cache.groups.items():
            options = {phase: choose(self._owner(kind).head_dim, phase, gpu.capability, gpu.shared_limit, dtype=dtype,
                                     page_size=PAGE_SIZE) for phase in ("decode", "prefill")}
            self.backends[kind] = PagedBackend("flex", group, options)
            self.backends[kind].on_cpu = False
        self.noted = NotedRegions()
        self.walk = Gemma4Walk(model, self.geometry, PagedKV(self.backends, None), self.noted)
        self.walk.device_type = "cuda"
        self.walk.library = matmuls_for("cuda", getattr(torch, dtype), 0, decode=False, compiled=True).plain
        self.device, self.regions, self.config = torch.device("cpu"), self.noted, _Config(PAGE_SIZE)
        self.features = GREEDY
        self.width, self.column_buckets = PREFILL_WIDTH, [len(self.columns)]

    def _owner(self, kind: str) -> LayerGeometry:
        return self.geometry.layers[self.geometry.owners(kind)[0]]

    def _table(self, kind: str) -> PageTable:
        return PageTable(kind, n_pages=NUM_PAGES, page_size=PAGE_SIZE, window=self._owner(kind).window,
                         num_slots=self.work.batch + 1, max_seq_length=MAX_SEQ_LENGTH)

    def step(self) -> None:
        """The step, as the engine runs it."""
        with self.fake_mode, torch.no_grad(), _Between(self.noted):
            if self.work.phase == "decode":
                self._decode_step(self.work.batch, len(self.columns))
            else:
                spans = [self._span(slot + 1) for slot in range(self.work.batch)]
                self._walk_prefill(spans, sizes_of(spans, self.width))

    def _span(self, slot: int) -> Span:
        sequence = Sequence(slot, [1] * self.work.length, SamplingParams(), stop_ids=frozenset(), max_seq_length=MAX_SEQ_LENGTH)
        sequence.slot = slot
        return Span(sequence, 0, self.work.length)


@dataclass(frozen=True)
class _Config:
    page_size: int


@dataclass(frozen=True)
class StepLaunches:
    """A step's kernels: (region, how often the step calls it, its launches), and operations between regions by name."""
    regions: list[tuple[str, int, list[Launch]]]
    between: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(times * len(launches) for _, times, launches in self.regions) + sum(self.between.values())

    @property
    def num_bytes(self) -> int:
        return sum(times * launch.num_bytes for _, times, launches in self.regions for launch in launches)

    def by_kind(self) -> dict[str, int]:
        """Launches by kind; `between` is what no region holds."""
        counted = Counter({"between": sum(self.between.values())})
        for _, times, launches in self.regions:
            for launch in launches:
                counted[launch.kind] += times
        return {kind: counted[kind] for kind in (*KINDS, "between") if counted[kind]}


def step_launches(config_path: Path, work: Work, gpu: GPU, *, write: bool = False, dtype: str = "bfloat16") -> StepLaunches:
    """The launches of one step. write: kernels are written (needs Triton) and flex_attention counts as the kernels it
    becomes; otherwise a flex_attention call counts as one."""
    runner = FakeRunner(config_path, work, gpu, dtype=dtype)
    runner.step()
    for backend in runner.backends.values():
        backend.inline = write
    owners = [runner._owner(kind) for kind in runner.geometry.attention_types]
    in_view = {owner.head_dim: work.keys_in_view(owner.window) for owner in owners}
    with tf32() if dtype == "bfloat16" else contextlib.nullcontext():
        regions = [(region.name, region.times, lower(region.call, runner.fake_mode, gpu, options=dict(PLANS["cuda"].options),
                                                     write=write, keys_in_view=in_view))
                   for region in runner.noted.noted.values()]
    return StepLaunches(regions, dict(runner.noted.between))


# ---- the record -----------------------------------------------------------------------------------------------------


def step_row(config_path: Path, work: Work, gpu: GPU, *, model: str, arch: str, compiler: Callable[[str], Mapping]) -> dict:
    """One step for the record. `compiler` says of a source what its kernel takes."""
    step = step_launches(config_path, work, gpu, write=True)
    kernels: dict[tuple, dict] = {}
    for name, times, launches in step.regions:
        for launch in launches:
            source = launch.source and anonymous(launch.source)
            key = launch.kind, launch.name, launch.num_bytes, source
            if key not in kernels:
                kernels[key] = {"region": name, "kind": launch.kind, "name": launch.name, "launches": 0,
                                "num_bytes": launch.num_bytes, **(compiler(source) if source else {})}
            kernels[key]["launches"] += times
    hot = [kernel for kernel in kernels.values() if kernel["launches"] >= HOT]
    return {"model": model, **dataclasses.asdict(work), "arch": arch, "launches": step.total, "by_kind": step.by_kind(),
            "num_bytes": step.num_bytes, "spilling_hot_kernels": sum(kernel.get("spill_bytes", 0) > 0 for kernel in hot),
            "regions": {name: [times, len(launches)] for name, times, launches in step.regions}, "between": dict(step.between),
            "kernels": list(kernels.values())}


def anonymous(source: str) -> str:
    """A kernel's source without the names Inductor numbers it by, so that equal kernels are equal text."""
    name = re.search(r"'kernel_name': '(\w+)'", source)
    return source.replace(name[1], "triton_kernel") if name else source
