"""Between text and token ids: prompts in, completions out."""
from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from itertools import pairwise

REPLACEMENT = "\ufffd"      # what a decoder shows for bytes that are not a whole character yet


class PromptError(ValueError):
    """A prompt the engine cannot run; the message says what to change."""


def encode_prompt(prompt: str | Seq[dict] | Seq[int], tokenizer, vocab_size: int, refused_ids: frozenset[int]) -> list[int]:
    """Token ids of a raw text (one BOS is put in front where the tokenizer has one), a chat (list of messages, rendered by
    the tokenizer's own template), or ids taken as they are. Raises PromptError."""
    if isinstance(prompt, str):
        ids = _encode_text(prompt, tokenizer)
    elif not isinstance(prompt, Seq) or isinstance(prompt, (bytes, bytearray)):
        raise PromptError("a prompt is a string, a list of messages ({'role': ..., 'content': ...}) or a list of token ids; "
                          f"got {prompt!r}. generate takes a list of prompts.")
    elif prompt and all(isinstance(message, dict) for message in prompt):
        ids = _encode_chat(prompt, tokenizer)
    elif all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        ids = prompt
    else:
        raise PromptError("a prompt is a string, a list of messages ({'role': ..., 'content': ...}) or a list of token ids; "
                          f"got {type(prompt).__name__} of {sorted({type(x).__name__ for x in prompt})}.")
    if not ids:
        raise PromptError("the prompt is empty: give it at least one token.")
    return encode_ids(ids, vocab_size, refused_ids)


def encode_ids(ids: Seq[int], vocab_size: int, refused_ids: frozenset[int]) -> list[int]:
    """The ids as a list, once each is one that a text model reads. Raises PromptError."""
    for i in ids:
        if not 0 <= i < vocab_size:
            raise PromptError(f"token id {i} is outside the vocabulary of {vocab_size:,} ids (0 to {vocab_size - 1}).")
        if i in refused_ids:
            raise PromptError(f"token id {i} stands for an image, audio or video, which a text engine cannot read: "
                              "take it out of the prompt.")
    return list(ids)


def _encode_text(text: str, tokenizer) -> list[int]:
    if not text:
        raise PromptError("the prompt is empty: give it at least one character.")
    if tokenizer is None:
        raise PromptError("this model has no tokenizer: give prompts as lists of token ids.")
    ids = _tokenize(text, tokenizer)
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _encode_chat(messages: Seq[dict], tokenizer) -> list[int]:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template: give prompts as text or token ids.")
    for n, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise PromptError(f"message {n} of the chat has no role: write {{'role': 'user', 'content': ...}}.")
        if not isinstance(message.get("content"), (str, list, tuple)) and not message.get("tool_calls"):
            raise PromptError(f"message {n} of the chat has no content: write {{'role': ..., 'content': 'text'}}.")
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:      # a template may raise anything; to a caller it all means this
        raise PromptError(f"the chat template does not take these messages: {error}") from error
    ids = _tokenize(text, tokenizer)
    count = ids.count(tokenizer.bos_token_id)
    if tokenizer.bos_token_id is not None and (not count or misplaced_bos(ids, tokenizer, (m.get("content") for m in messages))):
        raise PromptError(f"the rendered chat holds {count} BOS tokens and must hold what the template itself writes: "
                          "leave the BOS text out of the messages.")
    return ids


def misplaced_bos(ids: Seq[int], tokenizer, contents: Iterable[object]) -> bool:
    """Whether rendered `ids` hold a BOS that does not belong: a second one after the first, or one out of the `contents`. Some
    templates (ChatML's) begin every turn with the BOS: those belong."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and (any(pair == (bos, bos) for pair in pairwise(ids)) or
                                any(tokenizer.bos_token in str(content) for content in contents))


def _tokenize(text: str, tokenizer) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the text holds half a surrogate pair at character {error.start}, which is no character: "
                          "take it out of the prompt.") from None
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class Detokenizer:
    """Text of one growing completion. Markers survive; stop tokens are the caller's to leave out."""

    def __init__(self, tokenizer, stop: Seq[str] = ()):
        self.tokenizer = tokenizer
        self.stop = [s for s in stop if s]
        self.text = ""
        self._head = ""         # text of the ids before `_settled`, which no later id can change
        self._settled = 0
        self._context = 0       # where decoding starts anew: some ids back, since a decoder may treat a first word apart
        self.emitted = 0
        self.stopped = False

    def update(self, ids: Seq[int]) -> bool:
        """Take the completion's ids so far (without a stop token); True once a stop string was found, which cuts the text."""
        if self.tokenizer is None or self.stopped:
            return self.stopped
        before = self._decode(ids[self._context: self._settled])
        tail = self._decode(ids[self._context:])[len(before):]
        self.text = self._head + tail
        if tail and not tail.endswith(REPLACEMENT):
            self._head, self._context, self._settled = self.text, self._settled, len(ids)
        found = [at for at in (self.text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return self.stopped

    def _decode(self, ids: Seq[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

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
