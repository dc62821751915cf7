"""The tokenizer that a `gemma4` GGUF file's metadata describe, as Hugging Face's.

Such a file says which tokens and merges there are; the rest is Gemma-4's own, whatever its flags say: spaces are `▁`, newlines
merge among themselves alone, what is no token is bytes, and one begin-of-sequence token stands before a text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemma4_flex.checkpoints.gguf_header import Header
from gemma4_flex.checkpoints.gguf_vocabulary import CONTROL, IDS, SPACE, UNUSED, USER_DEFINED, VISIBLE
from gemma4_flex.checkpoints.skeleton import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL, NO_MODEL = "gemma4", ("none", "no_vocab")
UNKNOWN = 2                                             # a token type, besides those that are written
MATCHED = (UNKNOWN, CONTROL, USER_DEFINED)              # types of the tokens that a text may hold whole
# Matched in any case: turns, thoughts and calls fall apart without them (ggml-org/llama.cpp#21343).
MARKERS = (*VISIBLE, "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|think|>")
NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
LINES = r"[^\n]+|[\n]+"


def tokenizer_of(header: Header) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a file, None where it has none. Raises CheckpointError for metadata that do not make up Gemma-4's kind."""
    data = _Vocabulary(header)
    if not any(key.startswith("tokenizer.ggml.") for key in header.metadata):
        return None
    model = data.of("model", str, "a string")
    if model in NO_MODEL:
        return None
    if model != MODEL:
        raise CheckpointError(f"the tokenizer of {header.path} is of the kind {model[:60]!r}, and a Gemma-4 has one of the kind "
                              f"{MODEL!r}: convert the model again")
    tokens, types = data.tokens(), data.types()
    ids = {token: index for index, token in enumerate(tokens) if not (types[index] == UNUSED and token == f"[PAD{index}]")}
    data.check_vocabulary(ids)
    merges, special = data.merges(ids), data.special(tokens, ids)
    template = data.of("chat_template", str, "a string", root=True)
    try:
        return _assemble(ids, types, merges, special, template)
    except Exception as error:      # tokenizers raises bare Exceptions
        why = " ".join(str(error).split())
        raise CheckpointError(f"the tokenizer in {header.path} cannot be made: {why:.200}") from error


def _assemble(ids: dict[str, int], types: list[int], merges: list[tuple[str, str]], special: dict[str, str],
              template: str | None) -> PreTrainedTokenizerFast:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bpe = models.BPE(ids, merges, unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if bos := special.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, ids[bos])])
    whole = [token for token, index in ids.items() if types[index] in MATCHED or token in MARKERS or token in special.values()]
    hidden = [token for token in whole if types[ids[token]] != USER_DEFINED or token in MARKERS]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole if token not in hidden])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in hidden])
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side="left", clean_up_tokenization_spaces=False, **special,
        extra_special_tokens=[token for token in hidden if token not in special.values()])
    found.chat_template = template
    return found


class _Vocabulary:
    """Typed reading of the keys `tokenizer.*`; every way to be wrong is one sentence."""

    def __init__(self, header: Header):
        self.path, self.found = header.path, header.metadata
        table = header.tensors.get("token_embd.weight")
        self.rows = table.shape[0] if table else None

    def wrong(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"tokenizer.ggml.{key} in {self.path} {what}: convert the model again")

    def of(self, key: str, kind: type, called: str, root: bool = False) -> Any:
        """The value of `tokenizer.ggml.<key>`, which must be there, or of `tokenizer.<key>`, which may be absent."""
        name = f"tokenizer.{key}" if root else f"tokenizer.ggml.{key}"
        if name not in self.found:
            if root:
                return None
            raise CheckpointError(f"{self.path} lacks the metadata key {name}, without which there is no tokenizer: convert the "
                                  "model again")
        value = self.found[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            shown = f"an array of {len(value)} elements" if isinstance(value, list) else f"{value!r:.60}"
            raise CheckpointError(f"{name} in {self.path} is {shown}, not {called}: convert the model again")
        return value

    def array(self, key: str, kind: type, called: str) -> list[Any]:
        values = self.of(key, list, f"an array of {called}")
        if not all(type(value) is kind for value in values):
            raise self.wrong(key, f"is not an array of {called}")
        return values

    def tokens(self) -> list[str]:
        tokens = self.array("tokens", str, "strings")
        if self.rows is not None and len(tokens) > self.rows:
            raise self.wrong("tokens", f"has {len(tokens)} elements and the model's table of tokens {self.rows} rows")
        if len(set(tokens)) != len(tokens):
            seen: set[str] = set()
            twice = next(token for token in tokens if token in seen or seen.add(token))
            raise self.wrong("tokens", f"holds {twice!r:.60} twice")
        for key in ("token_type", "scores"):
            values = self.found.get(f"tokenizer.ggml.{key}", tokens)
            if isinstance(values, list) and len(values) != len(tokens):
                raise self.wrong(key, f"has {len(values)} elements and there are {len(tokens)} tokens")
        return tokens

    def types(self) -> list[int]:
        types = self.array("token_type", int, "numbers")
        if wrong := [kind for kind in types if not 0 <= kind <= 6]:
            raise self.wrong("token_type", f"holds {wrong[0]}, which is no type of a token")
        return types

    def check_vocabulary(self, ids: dict[str, int]) -> None:
        if lacking := [token for token in map("<0x{:02X}>".format, range(256)) if token not in ids]:
            raise self.wrong("tokens", f"lacks {lacking[0]}, one of the 256 bytes that other characters are made of")

    def merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        found = []
        for merge in self.array("merges", str, "strings"):
            first, _, second = merge.partition(" ")
            if not (first and second) or " " in second:
                raise self.wrong("merges", f"holds {merge!r:.60}, which is not two tokens and a space between them")
            if first not in ids or second not in ids or first + second not in ids:
                absent = next(token for token in (first, second, first + second) if token not in ids)
                raise self.wrong("merges", f"holds {merge!r:.60}, and {absent!r:.60} is no token")
            found.append((first, second))
        return found

    def special(self, tokens: list[str], ids: dict[str, int]) -> dict[str, str]:
        """The tokens with a part of their own, by what Hugging Face calls them: those that the metadata name, else Gemma-4's."""
        found = {}
        for key, name in IDS.items():
            called = name.removesuffix("_id")
            if f"tokenizer.ggml.{key}" in self.found:
                index = self.of(key, int, "one number")
                if not 0 <= index < len(tokens):
                    raise self.wrong(key, f"is {index} and there are {len(tokens)} tokens")
                if tokens[index] not in ids or not tokens[index]:
                    raise self.wrong(key, f"is {index}, which is the id of {tokens[index]!r:.60}, no token")
                found[called] = tokens[index]
            elif NAMES[called] in ids:
                found[called] = NAMES[called]
        return found
