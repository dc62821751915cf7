"""The parts of the device check in their order, the time each may take, and how they are run one after another."""
from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gemma4_flex.bench import device_correctness, device_formats, device_kernels, device_rivals, device_speed
from gemma4_flex.bench.device_bench import Bench, PartSkipped, Settings
from gemma4_flex.bench.device_record import failure
from gemma4_flex.bench.measure import peak_memory_bytes
from gemma4_flex.bench.report import commit, device_name, versions

PLANNED_MINUTES = 9.0
LEAST_SECONDS = 3.0     # with less than this nothing is begun


@dataclass(frozen=True)
class Part:
    """`run` gives one line for the table, or raises. `seconds` is its share of PLANNED_MINUTES."""

    name: str
    seconds: float
    run: Callable[[Bench], str]


# Correctness first: speed of wrong numbers is worth nothing. The rivals compile longest and can be killed without harm, so
# they come behind all that shares an engine.
PARTS = (
    Part("logits tiny", 25, device_correctness.logits_of_tiny),
    Part("logits scaled-down E2B", 25, device_correctness.logits_of_small_e2b),
    Part("paged equals sidecar", 20, device_correctness.paged_equals_sidecar),
    Part("page placement", 12, device_correctness.page_placement),
    Part("replay after refresh", 12, device_correctness.replay_after_refresh),
    Part("replay allocates nothing", 8, device_correctness.replay_allocates_nothing),
    Part("drift", 15, device_correctness.drift),
    Part("bandwidth", 5, device_speed.bandwidth),
    Part("capture", 70, device_speed.capture),
    Part("decode", 50, device_speed.decode),
    Part("prefill", 20, device_speed.prefill),
    Part("merged LoRA", 25, device_speed.merged_lora),
    Part("formats", 40, device_formats.formats),
    Part("steps per sync", 20, device_speed.steps_per_sync),
    Part("kernel options fit", 30, device_kernels.options_fit),
    Part("kernel options sweep", 25, device_kernels.sweep),
    Part("transformers", 75, device_rivals.transformers_static),
    Part("larger model", 20, device_speed.larger_model),
)


def chosen(names: Sequence[str]) -> list[Part]:
    """The parts called `names`, in the order of PARTS; all for none. Raises ValueError for an unknown name."""
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no part {unknown[0]!r}: choose among {', '.join(known)}.")
    return [part for part in PARTS if not names or part.name in names]


def limits(left: float, share: float, later: float) -> tuple[float, float]:
    """(seconds after which a part should end, seconds after which it is killed), of `left` for it and all later ones.

    It may use what earlier parts left over. It is killed only where it would take half of what the later parts need: a
    slow compile then costs the last rows, not all that was built.
    """
    soft = min(left, max(share, left - later))
    return soft, min(left, max(soft, left - later / 2))


def run_parts(parts: Sequence[Part], settings: Settings, deadline: float, send: Callable[[dict], None]) -> bool:
    """Run `parts`, whatever fails, and send events. `deadline` is a `time.monotonic`. False: the device broke, and what is
    left needs a new process."""
    bench = Bench(settings, send)
    send({"event": "machine", "device": settings.device, "device_name": device_name(settings.device), "versions": versions(),
          "commit": commit(), **_card(settings.device)})
    shares = [part.seconds * settings.minutes / PLANNED_MINUTES for part in parts]
    for n, part in enumerate(parts):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            send({"event": "end", "part": part.name, "status": "skipped", "detail": "no time left"})
            continue
        soft, hard = limits(left, shares[n], sum(shares[n + 1:]))
        send({"event": "begin", "part": part.name, "status": "running", "limit_s": hard})
        bench.begin(part.name, soft)
        start = time.monotonic()
        try:
            ended = {"status": "ok", "detail": part.run(bench)}
        except PartSkipped as why:
            ended = {"status": "skipped", "detail": str(why)}
        except Exception as error:
            ended = failure(f"{type(error).__name__}: {error}", traceback.format_exc().splitlines())
        send({"event": "end", "part": part.name, "seconds": time.monotonic() - start,
              "peak_memory_bytes": peak_memory_bytes(settings.device), **ended})
        if not _tidy(bench):
            return False
    return True


def run_named(names: Sequence[str], settings: Settings, deadline: float, send: Callable[[dict], None]) -> bool:
    """`run_parts` of the parts called `names`: what a process of its own is started with."""
    return run_parts([part for part in PARTS if part.name in names], settings, deadline, send)


def _tidy(bench: Bench) -> bool:
    """Give memory back between parts; False where the device answers nothing but its last error."""
    try:
        bench.synchronize()
        bench.forget()
    except RuntimeError:
        return False
    return True


def _card(device: str) -> dict:
    if device != "cuda":
        return {"threads": torch.get_num_threads()}
    card = torch.cuda.get_device_properties(0)
    return {"card": {"capability": [card.major, card.minor], "multiprocessors": card.multi_processor_count,
                     "memory_bytes": card.total_memory, "shared_memory_per_block_optin": card.shared_memory_per_block_optin,
                     "l2_bytes": card.L2_cache_size}}
