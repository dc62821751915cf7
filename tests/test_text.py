"""Prompts become ids once and rightly, and ids become text that does not depend on how it was handed out."""

from __future__ import annotations

import random

import pytest

from gemma4_flex.text import Detokenizer, PromptError, encode_prompt
from tests.tiny import VOCAB, fake_tokenizer

TOKENIZER = fake_tokenizer()
BOS = 2
CHAT = [{"role": "user", "content": "hi"}]


def encode(prompt, tokenizer=TOKENIZER, refused=frozenset()):
    return encode_prompt(prompt, tokenizer, VOCAB, refused)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


# ---- prompts ------------------------------------------------------------------------------------------------------

def test_a_text_gets_one_bos():
    assert encode("ab") == [BOS, *ids_of("ab")]


def test_a_text_that_begins_with_the_bos_text_keeps_its_one_bos():
    assert encode("<bos>ab") == [BOS, *ids_of("ab")]


def test_a_chat_has_the_templates_bos_and_no_second_one():
    assert encode(CHAT) == ids_of("<bos>user: hi\nmodel: ")
    assert encode(CHAT).count(BOS) == 1


def test_ids_are_taken_as_they_are():
    assert encode([5, 6]) == [5, 6]
    assert encode((BOS, BOS, 7)) == [BOS, BOS, 7]


def test_a_chat_whose_message_smuggles_in_a_bos_is_refused():
    with pytest.raises(PromptError, match="2 BOS tokens"):
        encode([{"role": "user", "content": "<bos>hi"}])


def test_a_bos_that_begins_every_turn_belongs_to_the_template_and_one_more_does_not():
    tokenizer = fake_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
                               "{{ bos_token }}model: ")
    chat = [{"role": "user", "content": "hi"}, {"role": "model", "content": "oh"}, {"role": "user", "content": "hm"}]
    assert encode(chat, tokenizer).count(BOS) == 4
    with pytest.raises(PromptError, match="5 BOS tokens"):
        encode([*chat[:2], {"role": "user", "content": "h<bos>m"}], tokenizer)
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(PromptError, match="5 BOS tokens"):
        encode(chat, tokenizer)
    tokenizer.chat_template = "no BOS"
    with pytest.raises(PromptError, match="0 BOS tokens"):
        encode(chat, tokenizer)


@pytest.mark.parametrize("prompt", ["", []])
def test_an_empty_prompt_is_refused(prompt):
    with pytest.raises(PromptError, match="prompt is empty: give it at least one"):
        encode(prompt)


@pytest.mark.parametrize("token", [-1, VOCAB, 10**9])
def test_an_id_outside_the_vocabulary_is_refused_by_number(token):
    with pytest.raises(PromptError, match=f"token id {token} is outside the vocabulary of 64"):
        encode([5, token])


def test_a_placeholder_id_is_refused():
    with pytest.raises(PromptError, match="token id 60 stands for an image"):
        encode([5, 60], refused=frozenset({60}))


@pytest.mark.parametrize("prompt", [[1, "a"], [True], [None], b"ab", {"role": "user", "content": "x"}, 7, [1.5]])
def test_what_is_no_prompt_is_refused_with_the_three_that_are(prompt):
    with pytest.raises(PromptError, match="a string, a list of messages"):
        encode(prompt)


@pytest.mark.parametrize(("prompt", "match"), [("ab", "no tokenizer"), (CHAT, "no chat template")])
def test_text_without_a_tokenizer_is_refused_and_ids_are_not(prompt, match):
    with pytest.raises(PromptError, match=match):
        encode(prompt, tokenizer=None)
    assert encode([5], tokenizer=None) == [5]


@pytest.mark.parametrize(("message", "match"), [
    ({"content": "hi"}, "message 1 of the chat has no role"),
    ({}, "message 1 of the chat has no role"),
    ({"role": "user"}, "message 1 of the chat has no content"),
    ({"role": "user", "content": None}, "message 1 of the chat has no content"),
    ({"role": "user", "content": 3}, "message 1 of the chat has no content"),
])
def test_a_message_that_a_template_would_render_as_nothing_is_refused(message, match):
    with pytest.raises(PromptError, match=match):
        encode([*CHAT, message])


def test_what_the_template_itself_refuses_is_a_prompt_error():
    strict = fake_tokenizer()
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="does not take these messages: roles must alternate"):
        encode(CHAT, tokenizer=strict)


@pytest.mark.parametrize("prompt", ["a\ud800b", [{"role": "user", "content": "a\ud800b"}]])
def test_half_a_surrogate_pair_is_refused(prompt):
    with pytest.raises(PromptError, match="half a surrogate pair"):
        encode(prompt)


def test_a_chat_without_a_template_is_refused():
    bare = fake_tokenizer()
    bare.chat_template = None
    with pytest.raises(PromptError, match="no chat template"):
        encode(CHAT, tokenizer=bare)


# ---- completions --------------------------------------------------------------------------------------------------

class ByteTokenizer:
    """An id is a UTF-8 byte, so that characters are cut by token borders."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf-8", errors="replace")


def streamed(ids: list[int], stop=(), tokenizer=None) -> tuple[list[str], Detokenizer]:
    """Deltas of a completion that ends with its last id or at a stop string."""
    detokenizer, deltas = Detokenizer(tokenizer or TOKENIZER, stop), []
    for n in range(1, len(ids) + 1):
        stopped = detokenizer.update(ids[:n])
        deltas.append(detokenizer.take(finished=stopped or n == len(ids)))
        if stopped:
            break
    return deltas, detokenizer


def test_deltas_join_to_the_whole_text():
    deltas, detokenizer = streamed(ids_of("hello, you"))
    assert "".join(deltas) == detokenizer.text == "hello, you"
    assert deltas[0] == "h"


def test_a_character_of_several_tokens_comes_whole():
    deltas, _ = streamed(list("aé€x".encode()), tokenizer=ByteTokenizer())
    assert deltas == ["a", "", "é", "", "", "€", "x"]


def test_half_a_character_at_the_very_end_is_shown_as_one():
    deltas, _ = streamed(list("a€".encode())[:-1], tokenizer=ByteTokenizer())
    assert "".join(deltas) == "a�"


def test_a_stop_string_across_tokens_cuts_the_text_and_never_leaks():
    deltas, detokenizer = streamed(ids_of("say stop now"), stop=("stop",))
    assert detokenizer.stopped
    assert "".join(deltas) == detokenizer.text == "say "
    assert all("s" not in delta for delta in deltas[2:])


def test_what_only_began_like_a_stop_string_is_handed_out_later():
    deltas, detokenizer = streamed(ids_of("a sto b"), stop=("stop",))
    assert not detokenizer.stopped
    assert "".join(deltas) == "a sto b"


def test_the_stop_string_that_comes_first_in_the_text_wins():
    class Words:
        def decode(self, ids, **kwargs):
            return "".join(["one ", "two three ", "four"][i] for i in ids)
    _, detokenizer = streamed([0, 1, 2], stop=("three", "two"), tokenizer=Words())
    assert detokenizer.text == "one "


def test_markers_survive():
    deltas, _ = streamed([5, 3, 1, 6])
    assert "".join(deltas) == TOKENIZER.decode([5]) + "<unk><eos>" + TOKENIZER.decode([6])


def test_without_a_tokenizer_there_is_no_text():
    detokenizer = Detokenizer(None)
    assert not detokenizer.update([1, 2])
    assert detokenizer.take(finished=True) == ""


def test_random_texts_and_stops_stream_to_what_a_search_in_the_whole_text_gives():
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("aab ") for _ in range(rng.randrange(1, 15)))
        stops = tuple("".join(rng.choice("ab ") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(3)))
        deltas, detokenizer = streamed(ids_of(text), stop=stops)
        # the first prefix in which any stop is found ends it, at the earliest place found there
        cut = next((min(at) for n in range(1, len(text) + 1)
                    if (at := [text[:n].find(s) for s in stops if s in text[:n]])), len(text))
        assert "".join(deltas) == detokenizer.text == text[:cut], (text, stops)


def test_a_long_completion_is_decoded_a_few_ids_at_a_time():
    class Counting:
        bos_token_id, widest = 2, 0

        def decode(self, ids, **kwargs):
            self.widest = max(self.widest, len(ids))
            return TOKENIZER.decode(ids, **kwargs)
    ids = ids_of("a long completion, " * 20)
    counting = Counting()
    deltas, detokenizer = streamed(ids, tokenizer=counting)
    assert "".join(deltas) == detokenizer.text == "a long completion, " * 20
    assert counting.widest <= 3
