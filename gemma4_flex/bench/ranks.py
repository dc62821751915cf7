"""Data parallel under torchrun: each rank is a process with an engine of its own, and runs a share of the prompts.

Between ranks go only host objects, over gloo, which tells at once when a peer's process is gone. On GPUs the ranks also meet
over nccl before a model is loaded, so that a GPU that cannot be reached is found then.
"""
from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from gemma4_flex.bench.inference_flags import UsageError
from gemma4_flex.params import SamplingParams

Item = TypeVar("Item")
Value = TypeVar("Value")
PATIENCE = timedelta(minutes=30)      # for a rank that lives and is slower than the others, not for one that died
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class LostRankError(RuntimeError):
    """Another rank of the job is gone, so that there will be no whole result."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in a job: `rank` of `size`, which takes GPU `local_rank`. Without a launcher a job is one process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """The place torchrun gave this process, or that of a process alone."""
        if any(name not in environment for name in LAUNCHER):
            return cls()
        rank, size, local_rank = (int(environment[name]) for name in LAUNCHER[:3])
        return cls(rank, size, local_rank, launched=True)

    def at_most(self, size: int) -> Ranks:
        """The same place in a job of no more than `size` ranks: those above are idle and should leave."""
        return replace(self, size=min(size, self.size))

    @property
    def idle(self) -> bool:
        return self.rank >= self.size

    @property
    def first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # ---- who does what

    def bounds(self, n: int) -> tuple[int, int]:
        """The first of this rank's `n` things and the one after its last. Shares are runs, so that prompts that begin alike
        stay together, in the order of ranks; no share is larger than rank 0's, or smaller by more than one."""
        least, more = divmod(n, self.size)
        start = self.rank * least + min(self.rank, more)
        return start, start + least + (self.rank < more)

    def share(self, items: Sequence[Item]) -> list[Item]:
        start, end = self.bounds(len(items))
        return list(items[start:end])

    def params_for(self, n_prompts: int, params: SamplingParams, seed: int) -> SamplingParams | list[SamplingParams]:
        """`params`, or under a launcher and without a seed one for each prompt of this rank's share, seeded by `seed` and the
        prompt's number in the job: an engine would go by the number of the request, which hangs on how many ranks there are."""
        if not self.launched or params.seed is not None:
            return params
        return [replace(params, seed=random.Random(f"{seed} prompt {number}").getrandbits(63))
                for number in range(*self.bounds(n_prompts))]

    # ---- what the processes do together

    @contextmanager
    def job(self) -> Iterator[None]:
        """Inside, only rank 0 prints, and a rank that torchrun ends says so; ranks that have joined part at its end."""
        if not self.launched:
            yield
            return
        with self._ended_with_the_others(), nullcontext() if self.first else _silence():
            try:
                yield
            finally:
                dist = sys.modules.get("torch.distributed")      # not there where a slip was told before anything was loaded
                if dist and dist.is_initialized():
                    dist.destroy_process_group()

    def join(self, device: str) -> None:
        """Make it possible to meet and gather, and "cuda" this rank's GPU. `device`: cpu, cuda or auto.

        Raises UsageError where there is no GPU for this rank, LostRankError where not all ranks join.
        """
        if not self.launched:
            return
        import torch
        import torch.distributed as dist
        cuda = device != "cpu" and torch.cuda.is_available()
        if cuda:
            if self.local_rank >= (count := torch.cuda.device_count()):
                raise UsageError(f"each rank takes one GPU and this machine has {count}: lower --nproc_per_node to that, or give "
                                 "--device cpu")
            torch.cuda.set_device(self.local_rank)

        def meet_first():
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=PATIENCE)
            if cuda:
                dist.all_reduce(here := torch.ones(1, device="cuda"))
                assert here.item() == self.size
        self._with_the_others(meet_first)

    def meet(self) -> None:
        """Wait until every rank has come here. Raises LostRankError."""
        if self.launched:
            import torch.distributed as dist
            self._with_the_others(dist.barrier)

    def gather(self, value: Value) -> list[Value] | None:
        """Every rank's value on rank 0, by rank, and None on the others. Raises LostRankError."""
        if not self.launched:
            return [value]
        import torch.distributed as dist
        values = [None] * self.size if self.first else None
        self._with_the_others(lambda: dist.gather_object(value, values, dst=0))
        return values

    def _with_the_others(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError as error:      # gloo's, torch.distributed's own, and those of its store
            raise LostRankError(f"another rank died, failed or did not come within {PATIENCE}; there is no result, and torchrun's "
                                f"report names the rank ({str(error).splitlines()[0]})") from error

    @contextmanager
    def _ended_with_the_others(self) -> Iterator[None]:
        """torchrun sends SIGTERM when another rank is gone: end at once and say so, also where the main thread waits inside
        PyTorch, where it would run no signal handler before the wait is over."""
        read, write = os.pipe()
        os.set_blocking(write, False)

        def wait() -> None:
            while told := os.read(read, 1):      # nothing: the pipe was closed, since the job is over
                if told[0] == signal.SIGTERM:
                    os.write(2, f"error: {self}: ended by torchrun, because another rank died or failed or the run was "
                                "interrupted\n".encode())
                    os._exit(1)
        # Python writes a signal's number to the pipe the moment it comes, but only where the signal has a handler.
        before, pipe_before = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(write)
        watch = threading.Thread(target=wait, daemon=True)
        watch.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(pipe_before)
            signal.signal(signal.SIGTERM, before)
            os.close(write)
            watch.join()
            os.close(read)


@contextmanager
def _silence() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield
