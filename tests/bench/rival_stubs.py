"""Engines that answer a job by rule on a clock of their own, so that a comparison can be told beforehand."""
from __future__ import annotations

from torch import nn

from gemma4_flex.bench.compare import Clock
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.rival import AbsentError, Rival, Setting
from tests.bench import stub

SETTING = Setting(model=nn.Module(), tokenizer=None, geometry=stub.geometry(), model_name="tiny", dtype="float32", device="cpu",
                  threads=1)


class World:
    """The clock all stubs share, and a diary of what they did."""

    def __init__(self):
        self.device, self.diary = stub.AsyncDevice(), []

    @property
    def clock(self) -> Clock:
        return Clock(self.device.synchronize, self.device.clock, load=lambda: 0.25)

    def rival(self, name: str, *seconds: float, tokens=None, **hooks) -> type[Rival]:
        """An engine whose turns, warm-up included, take these seconds, the last for all that follow. `tokens(job)` are its
        answers; `hooks` replace its methods."""
        world = self

        class Stub(Rival):
            def __init__(self, setting: Setting, job: Job):
                super().__init__(setting, job)
                self.turns = 0
                world.diary.append(f"make {name}")

            def run(self):
                world.diary.append(f"run {name}")
                world.device.launch(seconds[min(self.turns, len(seconds) - 1)])      # done only when it is waited for
                self.turns += 1
                return tokens(self.job) if tokens else right_tokens(self.job)

            def warmed_up(self):
                world.diary.append(f"warm {name}")

            def close(self):
                world.diary.append(f"close {name}")

        Stub.name = name
        for method, replacement in hooks.items():
            setattr(Stub, method, replacement)
        return Stub


def right_tokens(job: Job) -> list[list[int]]:
    return [[request + i for i in range(n)] for request, n in enumerate(job.new_tokens)]


def absent(name: str, why: str) -> type[Rival]:
    """An engine that is not installed."""

    def refuse(self, setting, job):
        raise AbsentError(why)

    return type("Absent", (Rival,), {"name": name, "__init__": refuse})


def decode(batch: int = 2, new_tokens: int = 4) -> Job:
    return Job("decode", batch, tuple((request, 7, 9) for request in range(batch)), (new_tokens,) * batch)
