"""What requests ask of their draws, on the device: one row a slot, at fixed addresses, written when a request takes the slot.

A step picks its rows' numbers by slot. What no running request asks for costs nothing: a batch's *features* say what its
step has to do, and tables of vocabulary size are made when the first request needs one.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gemma4_flex.params import SamplingParams
from gemma4_flex.sequence import Sequence

WIDTHS = (64, 1024)     # to which the number of sorted logits is rounded up, below the whole vocabulary
LEAST_ALTERNATIVES = 8
WORD = 0xFFFFFFFF


class Features(NamedTuple):
    """What the draws of some rows need, together. edits: some row has a bias, bans or penalties. random: some row is not
    greedy. width: how many of the largest logits are sorted for top_k and top_p, 0 for none. logprobs: log-probabilities are
    kept. alternatives: how many beside them. They are few, since a step is captured for each that occurs."""
    edits: bool = False
    random: bool = False
    width: int = 0
    logprobs: bool = False
    alternatives: int = 0


GREEDY = Features()


def features_of(params: SamplingParams, vocab_size: int) -> Features:
    """The features of one request, whose params have no None that a generation config answers."""
    random = params.temperature > 0
    width = 0
    if random and (params.top_k or params.top_p < 1):
        sizes = (*(size for size in WIDTHS if size < vocab_size), vocab_size)
        width = next(size for size in sizes if size >= min(params.top_k or vocab_size, vocab_size))
    penalties = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    bias = params.logit_bias or params.banned_token_ids or params.allowed_token_ids is not None
    wanted = params.logprobs or 0
    alternatives = wanted and min(vocab_size, max(LEAST_ALTERNATIVES, 1 << (wanted - 1).bit_length()))
    return Features(bool(penalties or bias), random, width, params.logprobs is not None, alternatives)


def together(features: Iterable[Features]) -> Features:
    """The least features that serve all of some."""
    return Features(*map(max, zip(GREEDY, *features)))


class Draws(NamedTuple):
    """Numbers of a step's rows, [B] each: fp32, top_k to sample int64. history and bias: [B, V], where there are edits."""
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    seed_low: Tensor
    seed_high: Tensor
    sample: Tensor
    history: Tensor | None = None
    bias: Tensor | None = None


class DrawTable:
    """The numbers of every slot; slot 0, of padding rows, is greedy.

    history [slots, V] (int32): twice a token's occurrences in the output, and one more where the prompt has it. bias [slots, V]
    (fp32): what is added to the logits, -inf for a ban.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str):
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.reals = torch.zeros(6, num_slots, device=device)
        self.reals[1].fill_(1.0)
        self.reals[3].fill_(1.0)
        self.wholes = torch.zeros(4, num_slots, dtype=torch.long, device=device)
        self.history: Tensor | None = None
        self.bias: Tensor | None = None
        self._features = [GREEDY] * num_slots
        self._holder: list[int | None] = [None] * num_slots       # the request whose numbers a slot has
        self._counted = [0] * num_slots                           # output tokens that a slot's history has

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor a step reads or writes here, by name."""
        named = {"reals": self.reals, "wholes": self.wholes, "history": self.history, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def assign(self, sequences: Iterable[Sequence], steps: int) -> Features:
        """Bring the slots of `sequences` up to date, of which the next `steps` steps draw; the features of those steps."""
        found = []
        for s in sequences:
            if self._holder[s.slot] != s.request_id:
                self._write(s)
            features = self._features[s.slot]
            if features.edits:
                if self._counted[s.slot] != len(s.output_ids):
                    self._count(s)
                self._counted[s.slot] += steps
            found.append(features)
        return together(set(found))

    def _write(self, s: Sequence) -> None:
        p, slot = s.params, s.slot
        features = features_of(p, self.vocab_size)
        self.reals[:, slot] = torch.tensor([p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty,
                                            p.frequency_penalty])
        self.wholes[:, slot] = torch.tensor([min(p.top_k, self.vocab_size), p.seed & WORD, p.seed >> 32, s.sample])
        if features.edits:
            self.make_edits()
        if self.bias is not None:
            self.bias[slot] = self._bias_row(p) if features.edits else 0.0
            self.history[slot] = 0
        self._holder[slot], self._features[slot], self._counted[slot] = s.request_id, features, -1

    def make_edits(self) -> None:
        """Make the tables of vocabulary size, where they are not there."""
        if self.bias is None:
            self.bias = self.reals.new_zeros(len(self._holder), self.vocab_size)
            self.history = torch.zeros(len(self._holder), self.vocab_size, dtype=torch.int32, device=self.device)

    def _bias_row(self, p: SamplingParams) -> Tensor:
        row = torch.zeros(self.vocab_size)
        if p.allowed_token_ids is not None:
            row.fill_(-torch.inf)
            row[list(p.allowed_token_ids)] = 0.0
        for token, bias in p.logit_bias:
            row[token] += bias
        row[list(p.banned_token_ids)] = -torch.inf
        return row

    def _count(self, s: Sequence) -> None:
        """Write a slot's history: of a request that is new in the slot, or came back to it."""
        row = 2 * torch.bincount(torch.tensor(s.output_ids, dtype=torch.long), minlength=self.vocab_size)
        row[torch.tensor(s.prompt_ids)] |= 1
        self.history[s.slot] = row.int()
        self._counted[s.slot] = len(s.output_ids)

    def rows(self, slots: Tensor, features: Features) -> Draws | None:
        """The numbers of rows in `slots` [B], as far as `features` need them. Part of the step."""
        if features._replace(logprobs=False, alternatives=0) == GREEDY:
            return None
        return Draws(*self.reals[:, slots].unbind(), *self.wholes[:, slots].unbind(),
                     self.history[slots] if features.edits else None, self.bias[slots] if features.edits else None)

    def note(self, slots: Tensor, ids: Tensor) -> None:
        """Count the tokens `ids` [B] that rows in `slots` drew; slots differ, but for slot 0. Part of the step."""
        ids = ids.clamp(min=0)
        self.history[slots, ids] = self.history[slots, ids] + 2
