"""A Hugging Face tokenizer as the metadata of a `gemma4` GGUF file.

Such a file can say one kind of tokenizer: BPE whose spaces are `▁`, whose unknown characters are bytes, and which puts one
begin-of-sequence token before a text. A tokenizer of another kind is refused, since its ids would silently be others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from gemma4_flex.checkpoints.skeleton import CheckpointError

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
SCORE = -1000.0         # merges decide, not scores, but llama.cpp asks for one of each token
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "▁"
# Control tokens whose text is part of what the model says: a reader of its calls and thoughts has to see them.
VISIBLE = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>')
IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "unknown_token_id": "unk_token_id",
       "padding_token_id": "pad_token_id", "mask_token_id": "mask_token_id"}
ENDS = {"eot_token_id": "<turn|>", "eom_token_id": "<|tool_response>"}     # where the model stops besides its eos


def vocabulary_of(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """The keys `tokenizer.*` for a model of `vocab_size` token ids, which a tokenizer may leave unused; None is no tokenizer.
    Raises CheckpointError for a tokenizer that such a file cannot say."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CheckpointError(f"a {type(tokenizer).__name__} cannot be written to a GGUF file: the checkpoint needs a "
                              "tokenizer.json")
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    _check(spec)
    tokens = _tokens(spec, vocab_size)
    marked = {token["content"]: token["special"] for token in spec["added_tokens"]}
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [f"[PAD{index}]" if token is None else token for index, token in enumerate(tokens)],
        "tokenizer.ggml.scores": [SCORE] * vocab_size,
        "tokenizer.ggml.token_type": [_kind(token, marked) for token in tokens],
        "tokenizer.ggml.merges": list(_merges(spec["model"]["merges"])),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    for key, name in IDS.items():
        if getattr(tokenizer, name, None) is not None:
            found[f"tokenizer.ggml.{key}"] = getattr(tokenizer, name)
    found |= {f"tokenizer.ggml.{key}": tokens.index(token) for key, token in ENDS.items() if token in marked}
    template = getattr(tokenizer, "chat_template", None)
    if template := template.get("default") if isinstance(template, dict) else template:
        found["tokenizer.chat_template"] = template
    return found


def _check(spec: dict[str, Any]) -> None:
    model, normalizer = spec["model"], spec.get("normalizer") or {}
    wanted = {"type": "BPE", "byte_fallback": True}
    if wrong := [f"{field} {model.get(field)!r}" for field, value in wanted.items() if model.get(field) != value]:
        raise CheckpointError(f"the tokenizer has {wrong[0]}, and a gemma4 GGUF file holds BPE with byte fallback only: export "
                              "the model with Gemma-4's own kind of tokenizer")
    if normalizer.get("type") != "Replace" or (normalizer["pattern"], normalizer["content"]) != ({"String": " "}, SPACE):
        raise CheckpointError(f"the tokenizer's normalizer is {normalizer.get('type')}, and that of a gemma4 GGUF file replaces "
                              f"spaces by {SPACE} and nothing else: export the model with Gemma-4's own kind of tokenizer")


def _tokens(spec: dict[str, Any], vocab_size: int) -> list[str | None]:
    """Each id's token, None for those without one."""
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    if max(ids.values()) >= vocab_size:
        raise CheckpointError(f"the tokenizer has ids up to {max(ids.values())} and the model's table {vocab_size} rows: "
                              "export the model with its own tokenizer")
    tokens: list[str | None] = [None] * vocab_size
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def _kind(token: str | None, marked: dict[str, bool]) -> int:
    if token is None:
        return UNUSED
    if token in marked:
        return CONTROL if marked[token] and token not in VISIBLE else USER_DEFINED
    return BYTE if BYTE_TOKEN.fullmatch(token) else NORMAL


def _merges(merges: Iterable[str | list[str]]) -> Iterable[str]:
    for merge in merges:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        if " " in first or " " in second:
            raise CheckpointError(f"the tokenizer's merge of {first!r} and {second!r} holds a space, which parts the two in a "
                                  "GGUF file: export the model with Gemma-4's own kind of tokenizer")
        yield f"{first} {second}"
