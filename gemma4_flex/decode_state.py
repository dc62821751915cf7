"""What decode steps read and leave for each other: one row a running sequence, on the device, at fixed addresses.

A step draws each row's next token and moves the row on by itself, so that several steps run before the host looks: it
writes the rows once (`fill`), lets steps run, and reads what they drew (`read`). A row whose sequence has ended (a stop id,
its last token, numbers that broke) becomes a padding row, which touches the reserved page only.

B: rows, S: stop ids a row, K: steps between two looks.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from gemma4_flex.draws import GREEDY, DrawTable, Features
from gemma4_flex.logprobs import TokenLogprob
from gemma4_flex.sampling import NON_FINITE, alternatives, draw
from gemma4_flex.sequence import MAX_STOP_IDS, Sequence


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


class Kept(NamedTuple):
    """Where a step leaves what it drew: tokens [rows, K] (int64), the step [1] that comes next, log-probabilities [rows, K, 2]
    and alternatives, ids and values [rows, K, A], where they are kept."""
    drawn: Tensor
    cursor: Tensor
    logprobs: Tensor | None
    alternatives: tuple[Tensor, Tensor] | None


class DecodeState:
    """The static buffers of up to `rows` rows and `steps` steps. `table` has what each slot asks of its draws."""

    def __init__(self, rows: int, steps: int, device: torch.device | str, table: DrawTable | None = None):
        self.device = torch.device(device)
        self.table = table
        self.rows = RowState(*(torch.zeros(rows, dtype=torch.long, device=device) for _ in range(5)),
                             torch.full((rows, MAX_STOP_IDS), -1, device=device), torch.arange(rows, device=device),
                             torch.ones(rows, dtype=torch.long, device=device))
        self.drawn = torch.zeros(rows, steps, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows, steps, 2, device=device)         # raw and processed, where they are kept
        self.alternatives: dict[int, tuple[Tensor, Tensor]] = {}           # ids and raw [rows, steps, A], by A, where kept
        self.cursor = torch.zeros(1, dtype=torch.long, device=device)      # the step of `drawn` that comes next
        self._host = torch.empty(rows, steps, dtype=torch.long, pin_memory=self.device.type == "cuda")

    def tensors(self) -> dict[str, Tensor]:
        """Every buffer, by name."""
        kept = {f"alternatives.{n}.{i}": t for n, pair in self.alternatives.items() for i, t in enumerate(pair)}
        return {**self.rows._asdict(), "drawn": self.drawn, "logprobs": self.logprobs, "cursor": self.cursor, **kept}

    def kept(self, features: Features) -> Kept:
        """The buffers that steps with `features` write."""
        return Kept(self.drawn, self.cursor, self.logprobs if features.logprobs else None,
                    self.alternatives[features.alternatives] if features.alternatives else None)

    def make_room(self, features: Features) -> None:
        """Make the buffers that steps with `features` write."""
        if (count := features.alternatives) and count not in self.alternatives:
            shape = (*self.drawn.shape, count)
            self.alternatives[count] = (torch.zeros(shape, dtype=torch.long, device=self.device),
                                        torch.zeros(shape, device=self.device))

    def upto(self, size: int) -> RowState:
        """The first `size` rows."""
        return RowState(*(buffer[:size] for buffer in self.rows))

    def fill(self, sequences: Seq[Sequence], size: int) -> None:
        """Write the rows of `sequences`; up to `size` the others become padding. The next step is the first to be read."""
        self._write([(s.last_token, s.num_tokens - 1, s.slot, len(s.prompt_ids) + min(s.params.min_new_tokens, s.max_output),
                      len(s.prompt_ids) + s.max_output) for s in sequences], sequences, size)

    def fill_tokens(self, tokens: Seq[tuple[Sequence, int, int]], size: int) -> None:
        """The same of tokens anywhere in their sequences, for one step: (sequence, position, id). What is drawn behind a token
        that is not its sequence's last means nothing."""
        self._write([(token, at, s.slot, len(s.prompt_ids) + min(s.params.min_new_tokens, s.max_output),
                      len(s.prompt_ids) + s.max_output if at + 1 == s.num_tokens else 0) for s, at, token in tokens],
                    [s for s, _, _ in tokens], size)

    def _write(self, host: list[tuple[int, ...]], sequences: Iterable[Sequence], size: int) -> None:
        columns = torch.tensor(host + [(0, 0, 0, 0, 0)] * (size - len(host))).T.contiguous()
        stops = torch.tensor([padded_stop_ids(s) for s in sequences] + [[-1] * MAX_STOP_IDS] * (size - len(host)))
        for buffer, values in zip(self.rows, (*columns, stops)):
            buffer[:size].copy_(values)
        self.cursor.zero_()

    def finish(self, logits: Tensor, rows: RowState, kept: Kept | None = None, features: Features = GREEDY) -> Tensor:
        """Draw every row's token from logits [B, V] and move the rows on; the tokens [B]. Part of the step, which is given all
        it writes but the table. Rows whose limit is passed are drawn for, and end."""
        kept = kept or self.kept(features)
        at = rows.positions + 1
        draws = None if features == GREEDY else self.table.rows(rows.slots, features)
        drawn, logprobs = draw(logits, at < rows.free_from, rows.stop_ids, at, draws, features)
        ended = (drawn == NON_FINITE) | (drawn[:, None] == rows.stop_ids).any(-1) | (at + 1 >= rows.limit)
        slots = torch.where(ended, 0, rows.slots)
        kept.drawn[rows.place, kept.cursor] = drawn
        if features.logprobs:
            kept.logprobs[rows.place, kept.cursor] = logprobs
        if features.alternatives:
            for buffer, found in zip(kept.alternatives, alternatives(logits, features.alternatives)):
                buffer[rows.place, kept.cursor] = found
        if features.edits:
            self.table.note(slots, drawn)
        kept.cursor.copy_((kept.cursor + 1) % kept.drawn.shape[1])
        rows.ids.copy_(torch.where(ended, 0, drawn))
        rows.positions.copy_(torch.where(ended, 0, at))
        rows.slots.copy_(slots)
        return drawn

    def read(self, count: int, steps: int) -> list[list[int]]:
        """What the first `count` rows drew in the last `steps` steps, waited for: after its end a row's tokens mean nothing."""
        host = self._host[:count, :steps]
        host.copy_(self.drawn[:count, :steps], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return host.tolist()

    def read_logprobs(self, count: int, steps: int, features: Features) -> list[list[TokenLogprob]]:
        """The same of what is known of those draws, by row and step; of `features` with logprobs."""
        pairs = self.logprobs[:count, :steps].tolist()
        if not features.alternatives:
            return [[TokenLogprob(raw, processed, ()) for raw, processed in row] for row in pairs]
        ids, values = (kept[:count, :steps].tolist() for kept in self.alternatives[features.alternatives])
        return [[TokenLogprob(raw, processed, tuple(zip(*top))) for (raw, processed), *top in zip(*row)]
                for row in zip(pairs, ids, values)]


def padded_stop_ids(sequence: Sequence) -> list[int]:
    """A sequence's stop ids, at most MAX_STOP_IDS of them, repeated to that length; -1 where it has none."""
    return (sorted(sequence.active_stop_ids) * MAX_STOP_IDS or [-1] * MAX_STOP_IDS)[:MAX_STOP_IDS]
