"""Between text and token ids: prompts in, completions out."""
from __future__ import annotations

from collections.abc import Sequence as Seq

REPLACEMENT = "\ufffd"      # what a decoder shows for bytes that are not a whole character yet


class PromptError(ValueError):
    """A prompt the engine cannot run; the message says what to change."""


def encode_prompt(prompt: str | Seq[dict] | Seq[int], tokenizer, vocab_size: int, refused_ids: frozenset[int]) -> list[int]:
    """Token ids of a raw text (one BOS is put in front where the tokenizer has one), a chat (list of messages, rendered by
    the tokenizer's own template), or ids taken as they are. Raises PromptError."""
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer)
    elif not isinstance(prompt, Seq):
        raise PromptError("a prompt is a string, a list of messages ({'role': ..., 'content': ...}) or a list of token ids; "
                          f"got {prompt!r}. generate takes a list of prompts.")
    elif prompt and all(isinstance(message, dict) for message in prompt):
        ids = _encode_chat(prompt, tokenizer)
    elif all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = list(prompt)
    else:
        raise PromptError("a prompt is a string, a list of messages ({'role': ..., 'content': ...}) or a list of token ids; "
                          f"got {type(prompt).__name__} of {sorted({type(x).__name__ for x in prompt})}.")
    if not ids:
        raise PromptError("the prompt is empty: give it at least one token.")
    for i in ids:
        if not 0 <= i < vocab_size:
            raise PromptError(f"token id {i} is outside the vocabulary of {vocab_size:,} ids (0 to {vocab_size - 1}).")
        if i in refused_ids:
            raise PromptError(f"token id {i} stands for an image, audio or video, which a text engine cannot read: "
                              "take it out of the prompt.")
    return ids


def _encode_text(text: str, tokenizer) -> list[int]:
    if not text:
        raise PromptError("the prompt is empty: give it at least one character.")
    if tokenizer is None:
        raise PromptError("this model has no tokenizer: give prompts as lists of token ids.")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _encode_chat(messages: Seq[dict], tokenizer) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template: give prompts as text or token ids.")
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None and ids.count(bos) != 1:
        raise PromptError(f"the rendered chat holds {ids.count(bos)} BOS tokens and must hold exactly one: "
                          "leave the BOS text out of the messages.")
    return ids


class Detokenizer:
    """Text of one growing completion. Markers survive; stop tokens are the caller's to leave out."""

    def __init__(self, tokenizer, stop: Seq[str] = ()):
        self.tokenizer = tokenizer
        self.stop = [s for s in stop if s]
        self.text = ""
        self.emitted = 0
        self.stopped = False

    def update(self, ids: Seq[int]) -> bool:
        """Take the completion's ids so far (without a stop token); True once a stop string was found, which cuts the text."""
        if self.tokenizer is None or self.stopped:
            return self.stopped
        self.text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        found = [at for at in (self.text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def take(self, finished: bool) -> str:
        """Text not handed out yet. While unfinished, holds back half characters and what may become a stop string."""
        end = len(self.text)
        if not finished:
            end = len(self.text.rstrip(REPLACEMENT))
            end = min(end, *(len(self.text) - _overlap(self.text, s) for s in self.stop)) if self.stop else end
        delta = self.text[self.emitted: end]
        self.emitted = max(self.emitted, end)
        return delta


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
