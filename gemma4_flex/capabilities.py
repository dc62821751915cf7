"""What can be run together: where weights come from, how they are kept, the device, capture, and how an adapter is applied.

One table, consulted before anything is loaded: a combination runs, or it is refused by name with what to do instead.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

FORMATS = {"safetensors": "Hugging Face, unquantised", "bitsandbytes": "Hugging Face, NF4", "gguf": "GGUF", "mlx": "MLX"}
WEIGHTS = {"stored": "as stored", "decoded": "decoded as read", "nf4": "NF4 as read"}
DEVICES = ("cpu", "cuda")
LORAS = {"none": "none", "merged": "merged", "unmerged": "unmerged", "requantized": "requantised"}


class CapabilityError(ValueError):
    """A combination that does not run; the message says why and what to do instead."""


@dataclass(frozen=True)
class Setup:
    """One cell of the table; every field is a key of the names above. `captured`: decode steps are captured and replayed."""

    format: str
    weights: str
    device: str
    captured: bool
    lora: str

    @property
    def is_nf4(self) -> bool:
        return self.format == "bitsandbytes" or self.weights == "nf4"

    def refusal(self) -> str | None:
        """Why it is refused, in one sentence with the fix; None where it runs."""
        if self.weights == "decoded" and self.format != "gguf":
            return "only a GGUF file's weights are decoded as they are read: leave out --gguf_weights dequantize"
        if self.weights == "nf4" and self.format != "safetensors":
            return ("only Hugging Face's unquantised weights are quantised to 4 bits as they are read: leave out --load_in_4bit, "
                    "or name the bf16 checkpoint")
        if self.is_nf4 and self.lora == "merged":
            return ("an adapter cannot be merged into bitsandbytes' 4-bit weights as it is: run it unmerged (--lora_4bit "
                    "unmerged), or quantise what it makes anew (--lora_4bit requantize)")
        if not self.is_nf4 and self.lora == "requantized":
            return ("an adapter is requantised over bitsandbytes' 4-bit weights alone: leave out --lora_4bit, and it is merged "
                    "into a second copy of its targets")
        return None

    def remark(self) -> str | None:
        """What there is to know of a combination that runs."""
        if self.is_nf4 and self.captured:
            return "a captured step has to prove first that it replays the eager step's bits; where it does not, steps run eagerly"
        if self.lora == "merged" and self.format in ("gguf", "mlx") and self.weights == "stored":
            return "the second copy of the adapter's targets is unpacked, in the dtype that the model computes in"
        return None


def setups() -> Iterator[Setup]:
    """Every cell of the table."""
    for cell in itertools.product(FORMATS, WEIGHTS, DEVICES, (False, True), LORAS):
        yield Setup(*cell)


def check(setup: Setup) -> None:
    """Raises CapabilityError where `setup` is refused."""
    if why := setup.refusal():
        raise CapabilityError(why)


def table() -> str:
    """The table as Markdown. Cells that differ in the device or in capture alone are told together."""
    notes: list[str] = []

    def note(text: str) -> str:
        if text not in notes:
            notes.append(text)
        return f"[{notes.index(text) + 1}]"

    def answer(format_: str, weights: str, lora: str) -> str:
        cells = [Setup(format_, weights, device, captured, lora) for device in DEVICES for captured in (False, True)]
        refusals, remarks = {cell.refusal() for cell in cells}, {cell.remark() for cell in cells} - {None}
        assert len(refusals) == 1 and len(remarks) <= 1       # neither the device nor capture alone refuses anything
        if refused := refusals.pop():
            return f"no {note(refused)}"
        return f"yes {note(remarks.pop())}" if remarks else "yes"

    lines = [f"| weights | kept | {' | '.join(f'LoRA {name}' for name in LORAS.values())} |", "|---" * (2 + len(LORAS)) + "|"]
    for format_, weights in itertools.product(FORMATS, WEIGHTS):
        cells = " | ".join(answer(format_, weights, lora) for lora in LORAS)
        lines.append(f"| {FORMATS[format_]} | {WEIGHTS[weights]} | {cells} |")
    said = [f"{n}. {text[0].upper()}{text[1:]}." for n, text in enumerate(notes, 1)]
    return "\n".join([*lines, "", f"Each on {' and '.join(DEVICES)}, with captured decode steps and without.", "", *said])
