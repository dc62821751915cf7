"""What decode steps read and leave for each other: one row a running sequence, on the device, at fixed addresses.

A step draws each row's next token and moves the row on by itself, so that several steps run before the host looks: it
writes the rows once (`fill`), lets steps run, and reads what they drew (`read`). A row whose sequence has ended (a stop id,
its last token, numbers that broke) becomes a padding row, which touches the reserved page only.

B: rows, S: stop ids a row, K: steps between two looks.
"""
from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from gemma4_flex.sampling import NON_FINITE, draw
from gemma4_flex.sequence import Sequence

MAX_STOP_IDS = 16     # that a step looks for; the host looks for all of them


class RowState(NamedTuple):
    """Rows of a step. ids, positions, slots: the token to compute. free_from: the first position where a stop id may be
    drawn. limit: how many tokens the sequence may have. place: the row's number. count: ones. All [B] (int64); stop_ids
    [B, S], -1 where there are none."""
    ids: Tensor
    positions: Tensor
    slots: Tensor
    free_from: Tensor
    limit: Tensor
    stop_ids: Tensor
    place: Tensor
    count: Tensor


class DecodeState:
    """The static buffers of up to `rows` rows and `steps` steps."""

    def __init__(self, rows: int, steps: int, device: torch.device | str):
        self.device = torch.device(device)
        self.rows = RowState(*(torch.zeros(rows, dtype=torch.long, device=device) for _ in range(5)),
                             torch.full((rows, MAX_STOP_IDS), -1, device=device), torch.arange(rows, device=device),
                             torch.ones(rows, dtype=torch.long, device=device))
        self.drawn = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)      # the step of `drawn` that comes next
        self._host = torch.empty(rows, steps, dtype=torch.long, pin_memory=self.device.type == "cuda")

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name."""
        return {**self.rows._asdict(), "drawn": self.drawn, "cursor": self.cursor}

    def upto(self, size: int) -> RowState:
        """The first `size` rows."""
        return RowState(*(buffer[:size] for buffer in self.rows))

    def fill(self, sequences: Seq[Sequence], size: int) -> None:
        """Write the rows of `sequences`; up to `size` the others become padding. The next step is the first to be read."""
        host = [(s.last_token, s.num_tokens - 1, s.slot, len(s.prompt_ids) + s.params.min_new_tokens,
                 len(s.prompt_ids) + s.max_output) for s in sequences]
        columns = torch.tensor(host + [(0, 0, 0, 0, 0)] * (size - len(host))).T.contiguous()
        stops = torch.tensor([padded_stop_ids(s) for s in sequences] + [[-1] * MAX_STOP_IDS] * (size - len(host)))
        for buffer, values in zip(self.rows, (*columns, stops)):
            buffer[:size].copy_(values)
        self.cursor.zero_()

    def finish(self, logits: Tensor, rows: RowState) -> Tensor:
        """Draw every row's token from logits [B, V] and move the rows on; the tokens [B]. Part of the step."""
        at = rows.positions + 1
        drawn = draw(logits, at < rows.free_from, rows.stop_ids)
        ended = (drawn == NON_FINITE) | (drawn[:, None] == rows.stop_ids).any(-1) | (at + 1 >= rows.limit)
        self.drawn[rows.place, self.cursor] = drawn
        self.cursor.copy_((self.cursor + 1) % self.drawn.shape[1])
        rows.ids.copy_(torch.where(ended, 0, drawn))
        rows.positions.copy_(torch.where(ended, 0, at))
        rows.slots.copy_(torch.where(ended, 0, rows.slots))
        return drawn

    def read(self, count: int, steps: int) -> list[list[int]]:
        """What the first `count` rows drew in the last `steps` steps, waited for: after its end a row's tokens mean nothing."""
        host = self._host[:count, :steps]
        host.copy_(self.drawn[:count, :steps], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return host.tolist()


def padded_stop_ids(sequence: Sequence) -> list[int]:
    """A sequence's stop ids, at most MAX_STOP_IDS of them, repeated to that length; -1 where it has none."""
    return (sorted(sequence.active_stop_ids) * MAX_STOP_IDS or [-1] * MAX_STOP_IDS)[:MAX_STOP_IDS]
