"""Tokenizers out of GGUF metadata: Gemma-4's real one, the bundled one, and metadata that are wrong."""

from __future__ import annotations

import time
import unicodedata
from pathlib import Path

import pytest

from gemma4_flex.bench.workload import bundled_prompts
from gemma4_flex.checkpoints.bundled import bundled_tokenizer
from gemma4_flex.checkpoints.gguf_header import Header, TensorInfo, scan
from gemma4_flex.checkpoints.gguf_tokenizer import tokenizer_of
from gemma4_flex.checkpoints.gguf_vocabulary import vocabulary_of
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.text import encode_prompt
from tests.ggufs import bundled_vocabulary

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "ggml-vocab-gemma-4.gguf"
real_data = pytest.mark.skipif(not REAL.is_file(), reason=f"needs llama.cpp's test vocabulary at {REAL}")
TRAPS = ["a\n\n\nb", " a", "  two  spaces ", "\n", "\n\n \n\n", "tab\tand\r\n", unicodedata.normalize("NFC", "é"),
         unicodedata.normalize("NFD", "é"), "naïve — “quoted” 日本語 🦙", "▁already", "<bos>", "<turn|>x<|turn>",
         "<|tool_response>", "<0x41>", "12345", "", "<|\"|>", "a<|channel>thought\n<channel|>b"]


def header(metadata: dict, rows: int | None = None) -> Header:
    tensors = {} if rows is None else {"token_embd.weight": TensorInfo("token_embd.weight", "F32", (rows, 8), 0, 32 * rows)}
    return Header(Path("a.gguf"), metadata, tensors, 0)


def changed(**changes) -> Header:
    """`bundled_vocabulary` with keys of `tokenizer.ggml` at other values, those at None absent."""
    found = bundled_vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return header({key: value for key, value in found.items() if value is not None})


@pytest.fixture(scope="module")
def theirs():
    return bundled_tokenizer(1 << 20)


@pytest.fixture(scope="module")
def real():
    scanned = scan(REAL)
    start = time.process_time()
    tokenizer = tokenizer_of(scanned)
    return scanned, tokenizer, time.process_time() - start


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- Gemma-4's own ---------------------------------------------------------------------------------------------------

@real_data
def test_the_real_vocabulary_gives_the_ids_of_llama_cpps_own_test(real):
    _, tokenizer, _ = real
    texts = REAL.with_name(REAL.name + ".inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = REAL.with_name(REAL.name + ".out").read_text().splitlines()
    assert len(texts) == len(lines) > 40
    for text, line in zip(texts, lines):
        assert ids(tokenizer, text) == [int(number) for number in line.split()], text
        assert tokenizer.decode(ids(tokenizer, text)) == text


@real_data
def test_the_real_vocabulary_is_read_in_seconds_with_every_token_in_its_place(real):
    scanned, tokenizer, seconds = real
    tokens = scanned.metadata["tokenizer.ggml.tokens"]
    assert seconds < 20         # 4 where nothing else runs
    assert len(tokenizer) == len(tokens) == 262_144
    assert tokenizer.convert_ids_to_tokens([0, 105, 107, 9259, 255_968, 262_143]) == [
        tokens[i] for i in (0, 105, 107, 9259, 255_968, 262_143)]
    assert [tokenizer.convert_tokens_to_ids(stop) for stop in ("<eos>", "<turn|>", "<|tool_response>")] == [1, 106, 50]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 1, 0, 3)


@real_data
def test_the_real_template_is_carried_and_writes_the_one_bos(real):
    scanned, tokenizer, _ = real
    chat = [{"role": "user", "content": "Hi\n\n\nthere"}]
    assert tokenizer.chat_template == scanned.metadata["tokenizer.chat_template"]
    found = encode_prompt(chat, tokenizer, 262_144, frozenset())
    assert found[:4] == [2, 105, 2364, 107] and found.count(2) == 1 and found.count(106) == 1 and 109 in found
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == found
    assert encode_prompt("Hello world", tokenizer, 262_144, frozenset()) == [2, 9259, 1902]
    assert tokenizer("Hello world")["input_ids"] == [2, 9259, 1902]


# ---- the bundled one -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("source", ["written", "own"])
def test_the_bundled_tokenizer_is_the_same_out_of_metadata(theirs, source):
    vocab_size = len(theirs) + 8
    found = tokenizer_of(header(vocabulary_of(theirs, vocab_size) if source == "written" else bundled_vocabulary(), vocab_size))
    assert found.get_vocab() == theirs.get_vocab() and len(found) == len(theirs)
    for text in TRAPS + [message["content"] for prompt in bundled_prompts()[:40] for message in prompt.messages or ()]:
        assert ids(found, text) == ids(theirs, text), text
        for skip in (True, False):
            assert found.decode(ids(theirs, text), skip_special_tokens=skip) == theirs.decode(
                ids(theirs, text), skip_special_tokens=skip), text
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "padding_side", "chat_template"):
        assert getattr(found, name) == getattr(theirs, name), name
    assert set(found.all_special_ids) == set(theirs.all_special_ids)


@pytest.mark.parametrize("flag", [True, False, None])
def test_one_bos_stands_before_a_text_whatever_the_flag_says(theirs, flag):
    found = tokenizer_of(changed(add_bos_token=flag))
    bos, size = theirs.bos_token_id, len(theirs)
    for text in ("a\n\n\nb", " a", "é"):
        assert found(text)["input_ids"] == [bos, *ids(theirs, text)] == encode_prompt(text, found, size, frozenset())
    chat = [{"role": "user", "content": "1 + 1?"}]
    through_template = found.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert through_template.count(bos) == 1 and through_template == encode_prompt(chat, found, size, frozenset())
    assert through_template == encode_prompt(chat, theirs, size, frozenset())


def test_ids_that_the_metadata_do_not_name_are_gemma_4s_own_by_the_tokens(theirs):
    found = tokenizer_of(changed(**{f"{name}_token_id": None for name in ("bos", "eos", "unknown", "padding", "mask")}))
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id, found.unk_token_id) == (
        theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id)
    assert found("a")["input_ids"] == [theirs.bos_token_id, *ids(theirs, "a")]


def test_an_end_of_sequence_that_the_metadata_name_is_taken():
    turn = bundled_vocabulary()["tokenizer.ggml.tokens"].index("<turn|>")
    assert tokenizer_of(changed(eos_token_id=turn)).eos_token_id == turn


def test_markers_are_whole_tokens_whatever_their_type_says(theirs):
    metadata = bundled_vocabulary()
    types = [1 if kind == 3 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    found = tokenizer_of(changed(token_type=types))
    for text in TRAPS:
        assert ids(found, text) == ids(theirs, text), text


def test_a_token_that_a_user_defined_is_whole_and_stays_visible(theirs):
    metadata = bundled_vocabulary()
    types = list(metadata["tokenizer.ggml.token_type"])
    token = next(i for i, t in enumerate(metadata["tokenizer.ggml.tokens"]) if types[i] == 1 and len(t) > 2 and t.isalpha())
    text = metadata["tokenizer.ggml.tokens"][token]
    types[token] = 4
    found = tokenizer_of(changed(token_type=types))
    assert ids(found, f"q{text}q")[1] == token
    assert text in found.decode(ids(found, f"q{text}q"), skip_special_tokens=True)


def test_newlines_merge_among_themselves_and_with_nothing_else():
    metadata = bundled_vocabulary()
    tokens, more = metadata["tokenizer.ggml.tokens"], ["\n", "\n\n", "\n\n\n", "\na"]
    found = tokenizer_of(changed(
        tokens=[*tokens, *more], token_type=[*metadata["tokenizer.ggml.token_type"], 1, 1, 1, 1], scores=None,
        merges=["\n \n", "\n\n \n", "\n a", *metadata["tokenizer.ggml.merges"]]))
    a, newline, two, three = (found.convert_tokens_to_ids(token) for token in ("a", "\n", "\n\n", "\n\n\n"))
    assert [newline, two, three] == [len(tokens), len(tokens) + 1, len(tokens) + 2]
    assert ids(found, "a\n\n\na\na\n\na") == [a, three, a, newline, a, two, a]


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": "gemma4", "tokenizer.chat_template": "x"},
                                      {"tokenizer.ggml.model": "none"}, {"tokenizer.ggml.model": "no_vocab"}])
def test_a_file_without_a_tokenizer_has_none(metadata):
    assert tokenizer_of(header(metadata)) is None


def test_a_file_without_a_template_has_none():
    metadata = bundled_vocabulary()
    del metadata["tokenizer.chat_template"]
    assert tokenizer_of(header(metadata)).chat_template is None


# ---- what is wrong ---------------------------------------------------------------------------------------------------

LENGTH = 4096


@pytest.mark.parametrize("changes, named", [
    ({"model": "llama"}, "kind 'llama'"), ({"model": "gpt2"}, "kind 'gpt2'"), ({"model": 3}, "tokenizer.ggml.model"),
    ({"model": None}, "lacks the metadata key tokenizer.ggml.model"), ({"tokens": None}, "lacks .*tokens"),
    ({"tokens": "abc"}, "not an array of strings"), ({"tokens": [1, 2]}, "tokens .*not an array of strings"),
    ({"tokens": []}, "token_type .* has"), ({"token_type": None}, "lacks .*token_type"),
    ({"token_type": [1, 2]}, "has 2 elements"),
    ({"token_type": 1}, "not an array of numbers"), ({"scores": [0.5]}, "scores .* has 1 elements"),
    ({"merges": None}, "lacks .*merges"), ({"merges": ["h"]}, "not two tokens"), ({"merges": ["a b c"]}, "not two tokens"),
    ({"merges": ["h qqqq"]}, "'qqqq' is no token"), ({"merges": ["q ▁i"]}, "'q▁i' is no token"), ({"merges": [3]}, "merges"),
    ({"merges": {"h": "e"}}, "merges"), ({"bos_token_id": LENGTH}, f"bos_token_id .* is {LENGTH}"),
    ({"bos_token_id": -1}, "is -1"), ({"eos_token_id": 1 << 40}, "eos_token_id"), ({"padding_token_id": [0]}, "padding_token_id"),
    ({"unknown_token_id": True}, "unknown_token_id"), ({"mask_token_id": "<mask>"}, "mask_token_id"),
], ids=lambda value: str(value)[:40])
def test_wrong_metadata_are_one_sentence_that_names_them(changes, named):
    with pytest.raises(CheckpointError, match=named) as error:
        tokenizer_of(changed(**changes))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300 and "a.gguf" in str(error.value)


def test_a_template_of_another_type_is_named():
    with pytest.raises(CheckpointError, match="tokenizer.chat_template"):
        tokenizer_of(header(bundled_vocabulary() | {"tokenizer.chat_template": ["x"]}))


def test_a_type_that_no_token_has_is_named():
    kinds = bundled_vocabulary()["tokenizer.ggml.token_type"]
    with pytest.raises(CheckpointError, match="holds 9, which is no type"):
        tokenizer_of(changed(token_type=[9, *kinds[1:]]))


def test_a_token_that_stands_twice_and_a_byte_that_lacks_are_named():
    tokens = bundled_vocabulary()["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match="holds '<pad>' twice"):
        tokenizer_of(changed(tokens=[*tokens[:-1], "<pad>"]))
    with pytest.raises(CheckpointError, match="lacks <0x41>"):
        tokenizer_of(changed(tokens=["other" if token == "<0x41>" else token for token in tokens]))


def test_more_tokens_than_the_table_has_rows_are_refused(theirs):
    with pytest.raises(CheckpointError, match=f"{len(theirs) - 1} rows"):
        tokenizer_of(header(bundled_vocabulary(), len(theirs) - 1))
    tokenizer_of(header(bundled_vocabulary(), len(theirs)))
