"""What a part of the device check is handed: the scale it runs at, the device, its time, and where its figures go."""
from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gemma4_flex.bench.measure import synchronizer
from gemma4_flex.bench.roofline import Bandwidth, MatmulRate, copy_bandwidth, matmul_rate
from gemma4_flex.checkpoints import LoadedModel, load_text_model
from gemma4_flex.models.projections import lay_side_by_side
from gemma4_flex.params import EngineConfig

CONFIGS = Path(__file__).resolve().parent.parent / "assets" / "configs"
NANO = f"synthetic:{CONFIGS / 'e2b-nano.json'}"      # every mechanism in six layers
WIDE = f"synthetic:{CONFIGS / 'e2b-wide.json'}"      # E2B's widths in ten layers


class CheckFailed(AssertionError):
    """What a part was to prove does not hold; the message says by how much."""


class PartSkipped(Exception):
    """A part that has nothing to run on here, or no time; the message says which."""


@dataclass(frozen=True)
class Scale:
    """Sizes of every part. Batches, contexts and lengths count requests and tokens."""

    proof_model: str                                # where the proof is that two ways give the same
    model: str                                      # decode, prefill, LoRA and the rivals
    larger_model: str
    formats_model: str                              # few-bit weights, and the PLE table in host memory
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    larger_batches: tuple[int, ...]
    rival_batches: tuple[int, ...]                  # the one that a target names first
    prefill_shapes: tuple[tuple[int, int], ...]     # prompts at once, tokens each
    window: int                                     # decode steps a timed round
    steps_per_sync: tuple[int, int]                 # decode_steps_per_sync to set side by side
    spare_tokens: int                               # room for those who decode while others are still prefilled
    max_prefill_tokens: int
    page_size: int | None                           # None is the device's own; fewer pages are fewer steps to capture
    proof_pages: int                                # of the longest sequence in a proof
    proof_dtype: str                                # of the logits: bf16's contract takes more rows than a test has time for
    proof_batch: int
    proof_tokens: int                               # rows compared a prompt
    proof_prompts: int                              # over half of proof_pages, beside those around the window
    drift_cycles: int
    copy_bytes: int | None                          # buffer of the bandwidth measurement; None is roofline's own
    matmul_sizes: tuple[int, ...] | None            # of the matmul rate's; None likewise
    kernel_case: tuple[int, int, int]               # requests, tokens each, layers of own pools
    calls: int                                      # attention calls in one timed replay


SCALES = {
    "full": Scale(
        proof_model="tiny", model="synthetic:E2B", larger_model="synthetic:E4B", formats_model=WIDE,
        batches=(1, 8, 32, 64, 128, 256), contexts=(512, 4096), larger_batches=(1, 64), rival_batches=(32, 1),
        prefill_shapes=((8, 4096), (16, 512), (1, 512)), window=32, steps_per_sync=(1, 8),
        spare_tokens=1024, max_prefill_tokens=8192, page_size=None, proof_pages=4,
        proof_dtype="bfloat16", proof_batch=4, proof_tokens=16, proof_prompts=4, drift_cycles=20, copy_bytes=None,
        matmul_sizes=None, kernel_case=(64, 4096, 8), calls=16),
    "tiny": Scale(
        proof_model=NANO, model=NANO, larger_model=NANO, formats_model=NANO, batches=(1, 2), contexts=(32, 64), larger_batches=(1,),
        rival_batches=(2, 1), prefill_shapes=((2, 64),), window=2, steps_per_sync=(1, 8), spare_tokens=64,
        max_prefill_tokens=64, page_size=64, proof_pages=2, proof_dtype="float32", proof_batch=1, proof_tokens=2,
        proof_prompts=1, drift_cycles=2, copy_bytes=16 << 20, matmul_sizes=(256,), kernel_case=(2, 64, 2), calls=2),
}


@dataclass(frozen=True)
class Settings:
    """One run: picklable, since on a GPU the parts run in a process of their own."""

    scale: str
    device: str          # cpu or cuda
    minutes: float
    seed: int


class Bench:
    """Shared by the parts of one process. `send` takes events for the record (device_record)."""

    def __init__(self, settings: Settings, send: Callable[[dict], None], clock: Callable[[], float] = time.monotonic):
        self.settings, self.scale, self.device = settings, SCALES[settings.scale], settings.device
        self.synchronize = synchronizer(settings.device)
        self._send, self._clock = send, clock
        self._part, self._ends = "", 0.0
        self._kept: dict[str, object] = {}

    def begin(self, part: str, seconds: float) -> None:
        """Rows belong to `part` from here on, which is to end within `seconds`."""
        self._part, self._ends = part, self._clock() + seconds

    def row(self, **figures) -> None:
        """One line of the part's result; it is on disk when this returns."""
        self._send({"event": "row", "part": self._part, "row": figures})

    def left(self) -> float:
        """Seconds the part still has. A part asks before each row, and says in the row's place what it had no time for."""
        return self._ends - self._clock()

    def once(self, name: str, make: Callable[[], object]):
        """What `make` gives, made by the first part that asks and kept for the others."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def forget(self, *names: str) -> None:
        """Let go of kept things, and of the device memory that nothing else holds."""
        for name in names:
            self._kept.pop(name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def bandwidth(self) -> Bandwidth:
        """Copy bandwidth of this device, measured once a process."""
        return self.once("bandwidth", lambda: copy_bandwidth(self.device, buffer_bytes=self.scale.copy_bytes))

    def matmul(self) -> MatmulRate:
        """Rate of a bf16 matmul on this device, measured once a process."""
        return self.once("matmul", lambda: matmul_rate(self.device, "bfloat16", sizes=self.scale.matmul_sizes))

    def load(self, name: str, dtype: str = "bfloat16") -> LoadedModel:
        """A model as `FlexEngine.from_pretrained` would lay it out, for several engines to share."""
        loaded = load_text_model(name, dtype=getattr(torch, dtype), device=self.device, seed=self.settings.seed)
        lay_side_by_side(loaded.model.model)
        return loaded

    def config(self, **fields) -> EngineConfig:
        """Captured bf16 decode; uncompiled on a CPU, where compiling takes longer than a test may."""
        return EngineConfig(**{"device": self.device, "dtype": "bfloat16", "capture_cudagraph": True,
                               "compile": self.device == "cuda", "page_size": self.scale.page_size,
                               "seed": self.settings.seed} | fields)
