"""What a run asks: the bundled prompts, a prompt file, or random tokens, and how a chat becomes token ids.

A prompt file holds one JSON a line: `{"messages": [...]}` (a chat that ends with the user's turn), `{"text": "..."}`
or a bare JSON string (a raw completion, no chat template). An `answer` beside it is what a right reply says, word for
word.
"""
from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gemma4_flex.text import PromptError, misplaced_bos

BUNDLED = Path(__file__).resolve().parent.parent / "assets" / "prompts.jsonl"
CHAT_TEMPLATES = ("auto", "grpo", "native")
RANDOM_LENGTH = 64
ROLES = ("system", "user", "assistant")
EXAMPLE = '{"messages": [{"role": "user", "content": "Hello"}]} or {"text": "Hello"}'

# Plain headings instead of turn markers, so that any text model can be asked to reason, trained for chat or not.
GRPO_TEMPLATE = (
    "{{- bos_token -}}"
    "System: Work through the problem step by step between <reasoning> and </reasoning>, "
    "then give only the final answer between <answer> and </answer>."
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ ' ' + message.content }}"
    "{%- else -%}{{ '\n\n' + ('User: ' if message.role == 'user' else 'Assistant: ') + message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\n\nAssistant:' }}{%- endif -%}"
)


@dataclass(frozen=True)
class Prompt:
    """A chat (`messages`) or a raw completion (`text`): exactly one of the two is set."""

    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    answer: str | None = None
    where: str = "prompt"

    @property
    def question(self) -> str:
        """What the user said last: the short form of the prompt that people read."""
        return self.messages[-1]["content"] if self.text is None else self.text


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it: `text` rendered with every marker, `ids` exactly the tokens of that text."""

    prompt: Prompt
    text: str
    ids: tuple[int, ...]


def bundled_prompts() -> list[Prompt]:
    """The prompts that ship with the package, kinds of question taking turns."""
    return read_prompts(BUNDLED)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a JSONL file, in order; blank lines are passed over.

    Raises PromptError naming the file and, where one is at fault, the line.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptError(
            f"can't read the prompt file {path}: {error.strerror}; give a file with one JSON a line") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"the prompt file {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    prompts = [_prompt(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise PromptError(f"the prompt file {path} holds no prompt; write one JSON a line, like {EXAMPLE}")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where} is not JSON ({error.msg}, column {error.colno}); write {EXAMPLE}") from None
    except (ValueError, RecursionError):      # a number of thousands of digits, brackets in brackets without end
        raise PromptError(f"{where} is no JSON that can be read; write {EXAMPLE}") from None
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise PromptError(f"{where} holds half a surrogate pair (\\ud800 to \\udfff alone), which is no character; "
                          "take it out") from None
    if isinstance(entry, str):
        entry = {"text": entry}
    if not isinstance(entry, dict) or ("text" in entry) == ("messages" in entry):
        raise PromptError(f"{where} must have either text or messages; write {EXAMPLE}")
    answer = entry.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise PromptError(f"{where}: answer must be a string")
    if "text" in entry:
        if not isinstance(entry["text"], str) or not entry["text"].strip():
            raise PromptError(f"{where}: the prompt is empty; its text must be a string with something in it")
        return Prompt(text=entry["text"], answer=answer, where=where)
    return Prompt(messages=_messages(entry["messages"], where), answer=answer, where=where)


def _messages(messages: object, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise PromptError(f"{where}: the prompt is empty; messages must be a list with at least the user's turn")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise PromptError(f"{where}: each message needs a role, one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise PromptError(f"{where}: the {message['role']} message is empty; its content must be a string of text")
    if messages[-1]["role"] != "user":
        raise PromptError(f"{where}: the last message must be the user's, the one that is to be answered")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)


def first_prompts(prompts: Sequence[Prompt], n: int | None) -> list[Prompt]:
    """The first `n` prompts, all where `n` is None. None is ever used twice: a repeat would measure a cache (B128)."""
    if n is None:
        return list(prompts)
    if n < 1:
        raise PromptError(f"--n_prompts must be at least 1, not {n}")
    if n > len(prompts):
        raise PromptError(f"--n_prompts {n} asks for more than the {len(prompts)} prompts there are; "
                          "give a longer file with --prompts")
    return list(prompts[:n])


def resolve_template(tokenizer, mode: str) -> str:
    """`native` or `grpo` for a --chat_template mode: auto takes the checkpoint's own wherever it has one."""
    if mode not in CHAT_TEMPLATES:
        raise PromptError(f"--chat_template must be one of {', '.join(CHAT_TEMPLATES)}, not {mode!r}")
    if tokenizer is None:
        raise PromptError("this model has no tokenizer and can read no text; leave out --prompts to use random tokens")
    has_own = bool(getattr(tokenizer, "chat_template", None))
    if mode == "native" and not has_own:
        raise PromptError("this checkpoint has no chat template of its own; "
                          "use --chat_template grpo, or prompts given as text")
    if mode == "auto":
        return "native" if has_own else "grpo"
    return mode


def encode_prompts(prompts: Sequence[Prompt], tokenizer, mode: str = "auto") -> list[EncodedPrompt]:
    """Token ids of each prompt, beginning with one BOS and never two (B116).

    Chats go through the template that `mode` resolves to. Raw text takes none, so a template asked for by name is
    refused for it rather than dropped. Raises PromptError.
    """
    template = GRPO_TEMPLATE if resolve_template(tokenizer, mode) == "grpo" else None
    encoded, bos = [], getattr(tokenizer, "bos_token", None) or ""
    for prompt in prompts:
        if prompt.text is None:
            text = tokenizer.apply_chat_template(
                list(prompt.messages), chat_template=template, tokenize=False, add_generation_prompt=True)
        elif mode == "auto":
            text = prompt.text if prompt.text.startswith(bos) else bos + prompt.text
        else:
            raise PromptError(f"{prompt.where} is plain text, which takes no chat template; "
                              f"give it as messages, or leave out --chat_template {mode}")
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        contents = [m["content"] for m in prompt.messages] if prompt.text is None else [text.removeprefix(bos)]
        if misplaced_bos(ids, tokenizer, contents):
            raise PromptError(f"{prompt.where} has {ids.count(tokenizer.bos_token_id)} BOS tokens where one begins a prompt; "
                              "leave the BOS text out of it")
        encoded.append(EncodedPrompt(prompt, text, ids))
    return encoded


def random_prompts(n: int, length: int, vocab_size: int, seed: int, *,
                   avoid: frozenset[int] = frozenset()) -> list[list[int]]:
    """`n` prompts of `length` random token ids, the same for a seed, none of `avoid` (placeholder and stop ids).

    No two begin with the same token, so no prefix cache can serve one from another (B128).
    Raises PromptError when the vocabulary has fewer than `n` usable ids.
    """
    usable = [token for token in range(vocab_size) if token not in avoid]
    if n < 1 or length < 1 or n > len(usable):
        raise PromptError(
            f"can't draw {n} prompts of {length} tokens that begin differently from {len(usable)} usable ids")
    rng = random.Random(seed)
    return [[first, *rng.choices(usable, k=length - 1)] for first in rng.sample(usable, n)]


def encode_random(n: int, vocab_size: int, seed: int, *, avoid: frozenset[int] = frozenset()) -> list[EncodedPrompt]:
    """What stands in for prompts where a model has no tokenizer: `random_prompts` of RANDOM_LENGTH tokens, textless."""
    return [EncodedPrompt(Prompt(text=""), "", tuple(ids))
            for ids in random_prompts(n, RANDOM_LENGTH, vocab_size, seed, avoid=avoid)]


def longest_shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens of the longest prefix that any two prompts share: under a page, and no prefix cache can play a part."""
    ordered = sorted(prompts)
    longest = 0
    for one, other in pairwise(ordered):
        shorter = min(len(one), len(other))
        same = next((i for i in range(shorter) if one[i] != other[i]), shorter)
        longest = max(longest, same)
    return longest
