"""One engine on one job: what each of those compared has to be able to do."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gemma4_flex.bench.job import Job


class AbsentError(Exception):
    """This engine cannot be had here; the message says why. No fault of the run's."""


class FalseClaimError(RuntimeError):
    """What ran was not what the engine's name says, so its figures must not stand under it."""


@dataclass(frozen=True)
class Setting:
    """What all engines run on: `model` is one Hugging Face model whose weights they share in this process."""

    model: Any
    tokenizer: Any
    geometry: Any
    model_name: str
    dtype: str
    device: str
    threads: int
    gguf: Path | None = None                 # the same weights as a file, for llama.cpp
    flex_config: dict = field(default_factory=dict)     # fields of EngineConfig, over its defaults


class Rival:
    """An engine made ready for one job. Making it may load and allocate; AbsentError where it cannot be had."""

    name: ClassVar[str]

    def __init__(self, setting: Setting, job: Job):
        self.setting, self.job = setting, job

    def run(self) -> list[list[int]]:
        """Do the whole job once: the new token ids of each request, in the order of the prompts."""
        raise NotImplementedError

    def warmed_up(self) -> None:
        """Called between warm-up and the measured rounds. Raises FalseClaimError where the name is not what ran."""

    def account(self) -> dict:
        """After the rounds: what it says of itself, as JSON values."""
        return {}

    def close(self) -> None:
        """Give back what would outlive this object."""


def compile_counts() -> dict[str, int]:
    """Graphs that torch.compile has made in this process, functions it looked at, and those it gave up on."""
    from torch._dynamo.utils import counters
    frames = counters["frames"]
    return {"graphs": counters["stats"]["unique_graphs"], "frames": frames["total"],
            "frames_left_eager": frames["total"] - frames["ok"]}
