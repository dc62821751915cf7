"""Run parts in a process of their own that may hang, crash or lose its device, and go on with the rest in a new one.

An illegal memory access leaves a CUDA context that answers every later call with the same error, and a kernel that hangs
cannot be interrupted from Python: only a second process survives either.
"""
from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from gemma4_flex.bench.device_record import Record, failure

START_SECONDS = 90.0      # to import torch and find the device


def run_isolated(names: Sequence[str], work: Callable, arguments: tuple, record: Record, deadline: float,
                 method: str = "spawn") -> None:
    """Run the parts `names` by `work(names, *arguments, deadline, send)` in child processes, one after another: a new one
    follows where one died or a part passed its limit. `method` starts them; a CUDA child must not be forked."""
    context = multiprocessing.get_context(method)
    waiting = list(names)
    while waiting:
        if time.monotonic() > deadline:
            for name in waiting:
                record.take({"event": "end", "part": name, "status": "skipped", "detail": "no time left"})
            return
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(work, waiting, arguments, deadline, sender))
        child.start()
        sender.close()
        watched: str | None = "interrupted"
        try:
            watched = _watch(receiver, record, deadline)
        finally:
            _end(child, patience=0 if watched else 10)
            receiver.close()
        waiting = [name for name in waiting if record.parts[name]["status"] in ("waiting", "running")]
        if waiting and (watched or record.parts[waiting[0]]["status"] == "running" or child.exitcode):
            why = watched or f"its process ended with exit code {child.exitcode}"
            record.take({"event": "end", "part": waiting.pop(0), **failure(why)})


def _child(work: Callable, names: list[str], arguments: tuple, deadline: float, sender: Connection) -> None:
    os.setpgrp()      # so that what it starts can be ended with it; no session of its own, which would outlive the terminal's
    with sender:
        work(names, *arguments, deadline, sender.send)


def _watch(receiver: Connection, record: Record, deadline: float) -> str | None:
    """Hand events to the record until the child closes its end; why it has to be killed, or None where it ended."""
    allowed, since = START_SECONDS, time.monotonic()
    while True:
        wait = min(since + allowed, deadline) - time.monotonic()
        if not receiver.poll(max(0.0, wait)):
            return f"killed after {time.monotonic() - since:.0f} s: it passed its limit"
        try:
            event = receiver.recv()
        except EOFError:
            return None
        record.take(event)
        if event["event"] == "begin":
            allowed, since = event["limit_s"], time.monotonic()
        elif event["event"] == "end":      # tidying up between two parts
            allowed, since = START_SECONDS, time.monotonic()


def _end(child: multiprocessing.Process, patience: float) -> None:
    """Wait for a child that is on its way out, and kill it with all it started where it is not."""
    child.join(timeout=patience)
    if child.is_alive():
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:      # before it had a group of its own
            child.kill()
        child.join()
