from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest

from gemma4_flex.bench import workload
from gemma4_flex.text import PromptError
from tests.bench.stub import WordTokenizer
from tests.tiny import fake_tokenizer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
USER = {"role": "user", "content": "Hello"}


def write(tmp_path, *lines: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def taught():
    """The rules that the bundled model's text was made by."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import tiny_text
    finally:
        sys.path.remove(str(SCRIPTS))
    return tiny_text


# ---- the bundled prompts


def test_there_are_64_bundled_prompts_or_more_and_each_has_an_answer():
    prompts = workload.bundled_prompts()
    assert len(prompts) >= 64
    assert all(p.messages and p.answer for p in prompts)


def test_no_bundled_prompt_occurs_twice():
    prompts = workload.bundled_prompts()
    assert len({json.dumps(p.messages) for p in prompts}) == len(prompts)


def test_the_first_eight_bundled_prompts_are_of_eight_kinds(taught):
    kinds = [kind_of(taught, p) for p in workload.bundled_prompts()[:8]]
    assert sorted(kinds) == sorted(taught.KINDS)


def kind_of(taught, prompt) -> str:
    def matches(phrasing: str) -> bool:
        return re.fullmatch(re.escape(phrasing).replace(r"\{0\}", "(.+)").replace(r"\{1\}", "(.+)"), asked) is not None

    asked = prompt.question if len(prompt.messages) > 1 else prompt.question.split(". ")[-1]
    answers = {"capital": "The capital of ", "symbol": "The chemical symbol ", "translation": "In ",
               "recall": "The code of "}
    found = [k for k in taught.KINDS if any(map(matches, taught.PHRASINGS[k]))
             and prompt.answer.startswith(answers.get(k, ""))]
    # "What is {0}?" fits almost anything, so trivia is what nothing else claims
    return next((k for k in found if k != "trivia"), "trivia")


def test_every_bundled_answer_is_right(taught):
    for prompt in workload.bundled_prompts():
        answer, asked = prompt.answer, prompt.question
        kind = kind_of(taught, prompt)
        if kind in ("sum", "product"):
            a, b = map(int, re.findall(r"\d+", asked))
            sign, value = ("+", a + b) if kind == "sum" else ("*", a * b)
            assert answer == f"{a} {sign} {b} = {value}."
        elif kind == "count":
            a, b = map(int, re.findall(r"\d+", asked))
            assert answer == ", ".join(map(str, range(a, b + 1))) + "."
        elif kind == "recall":
            [who] = re.fullmatch(r"The code of (\w+) is \d+\.", answer).groups()
            assert re.search(rf"\b{who}\b", asked) and answer in prompt.messages[0]["content"], prompt.where
        elif kind == "capital":
            country = next(c for c in taught.CAPITALS if f" {c}" in asked)
            assert answer == f"The capital of {country} is {taught.CAPITALS[country]}."
        elif kind == "symbol":
            element = next(e for e in taught.SYMBOLS if re.search(rf"\b{e}\b", asked))
            assert answer == f"The chemical symbol for {element} is {taught.SYMBOLS[element]}."
        elif kind == "translation":
            language, word, foreign = re.fullmatch(r"In (\w+), (.+) is (.+)\.", answer).groups()
            assert language in asked and word in asked and taught.GREETINGS[language][word] == foreign
        else:
            topic = next(t for t in taught.TRIVIA if t in asked)
            assert answer == f"{topic[0].upper()}{topic[1:]} is {taught.TRIVIA[topic]}."


def test_bundled_recall_reaches_beyond_the_window_in_one_turn_and_in_several(taught):
    recalls = [p for p in workload.bundled_prompts() if p.answer.startswith("The code of ")]
    assert {len(p.messages) > 1 for p in recalls} == {True, False}
    for prompt in recalls:
        words = " ".join(m["content"] for m in prompt.messages).split()
        told = max(i for i, word in enumerate(words) if word == prompt.answer.split()[-1])
        assert len(words) - told > 32, prompt.where      # a word is a token or more


# ---- prompt files


def test_a_file_gives_chats_texts_and_bare_strings_in_order(tmp_path):
    chat = json.dumps({"messages": [USER], "answer": "Hi"})
    path = write(tmp_path, chat, "", '{"text": "Once upon"}', '"a time"', "")
    chat, text, bare = workload.read_prompts(path)
    assert chat.messages == (USER,) and chat.answer == "Hi" and chat.question == "Hello"
    assert (text.text, bare.text) == ("Once upon", "a time")
    assert bare.where.endswith("line 4")


@pytest.mark.parametrize(("line", "says"), [
    ('{"messages": [', "not JSON"),
    ("hello", "not JSON"),
    ("1" * 5000, "no JSON that can be read"),
    ("[" * 100_000, "no JSON that can be read"),
    ('{"text": "a\\ud800b"}', "half a surrogate pair"),
    ("[1, 2]", "either text or messages"),
    ("{}", "either text or messages"),
    ('{"text": "a", "messages": []}', "either text or messages"),
    ('""', "empty"),
    ('{"text": "  "}', "empty"),
    ('{"text": 3}', "string"),
    ('{"text": "a", "answer": 3}', "answer must be a string"),
    ('{"messages": []}', "empty"),
    ('{"messages": {"role": "user"}}', "list"),
    ('{"messages": ["hello"]}', "role"),
    ('{"messages": [{"role": "robot", "content": "a"}]}', "system, user, assistant"),
    ('{"messages": [{"role": "user", "content": ""}]}', "user message is empty"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "string of text"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', "last message"),
])
def test_a_broken_line_is_named_by_its_number(tmp_path, line, says):
    path = write(tmp_path, '{"text": "fine"}', "", line)
    with pytest.raises(PromptError, match=f"line 3.*{says}"):
        workload.read_prompts(path)


def test_a_file_that_is_absent_empty_a_directory_or_not_utf8_is_named(tmp_path):
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('"caf\u00e9"'.encode("latin-1"))
    for path, says in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, "directory"), (latin, "UTF-8"),
                       (write(tmp_path, "", " "), "holds no prompt")):
        with pytest.raises(PromptError, match=says) as error:
            workload.read_prompts(path)
        assert str(path) in str(error.value)


def test_more_prompts_than_there_are_is_refused_rather_than_repeating_any():
    prompts = [workload.Prompt(text=str(i)) for i in range(3)]
    assert workload.first_prompts(prompts, 2) == prompts[:2]
    assert workload.first_prompts(prompts, None) == prompts
    for n in (4, 0, -1):
        with pytest.raises(PromptError, match="--n_prompts"):
            workload.first_prompts(prompts, n)


# ---- chat templates


def test_auto_takes_the_checkpoints_own_template_and_grpo_where_it_has_none():
    assert workload.resolve_template(WordTokenizer(), "auto") == "native"
    assert workload.resolve_template(WordTokenizer(chat_template=None), "auto") == "grpo"
    assert workload.resolve_template(WordTokenizer(), "grpo") == "grpo"


def test_native_is_refused_where_the_checkpoint_has_no_template():
    with pytest.raises(PromptError, match="--chat_template grpo"):
        workload.resolve_template(WordTokenizer(chat_template=None), "native")


def test_an_unknown_template_mode_is_refused():
    with pytest.raises(PromptError, match="auto, grpo, native"):
        workload.resolve_template(WordTokenizer(), "chatml")


@pytest.mark.parametrize("mode", ["auto", "native", "grpo"])
def test_every_encoded_chat_begins_with_one_bos_and_its_ids_are_those_of_its_text(mode):
    tokenizer = WordTokenizer()
    [encoded] = workload.encode_prompts([workload.Prompt(messages=(USER,))], tokenizer, mode)
    assert encoded.ids[0] == 2 and encoded.ids.count(2) == 1
    assert list(encoded.ids) == tokenizer(encoded.text, add_special_tokens=False)["input_ids"]


def test_grpo_asks_for_the_working_and_the_answer_in_tags_and_uses_no_turn_marker():
    messages = ({"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hi"}, USER)
    [encoded] = workload.encode_prompts([workload.Prompt(messages=messages)], WordTokenizer(), "grpo")
    for tag in ("<reasoning>", "</reasoning>", "<answer>", "</answer>"):
        assert tag in encoded.text
    assert encoded.text.startswith("<bos>System: ")
    assert encoded.text.endswith(" Be brief.\n\nUser: Hello\n\nAssistant: Hi\n\nUser: Hello\n\nAssistant:")


def test_raw_text_gets_one_bos_and_no_template():
    raw, marked = workload.encode_prompts(
        [workload.Prompt(text="ab"), workload.Prompt(text="<bos>ab")], WordTokenizer(), "auto")
    assert raw.text == marked.text == "<bos>ab"
    assert raw.ids == (2, 3 + ord("a"), 3 + ord("b"))


def test_a_bos_that_begins_every_turn_belongs_to_the_template_and_one_out_of_a_message_does_not():
    tokenizer = fake_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ bos_token }}{{ m['content'] }}{% endfor %}{{ bos_token }}"
    [encoded] = workload.encode_prompts([workload.Prompt(messages=(USER,))], tokenizer)
    assert encoded.ids.count(2) == 2
    for prompt in (workload.Prompt(messages=({"role": "user", "content": "a<bos>b"},), where="file line 3"),
                   workload.Prompt(text="a<bos>b", where="file line 3"), workload.Prompt(text="<bos><bos>b", where="file line 3")):
        with pytest.raises(PromptError, match="file line 3 has . BOS tokens"):
            workload.encode_prompts([prompt], tokenizer)


def test_a_template_asked_for_by_name_is_refused_for_raw_text_rather_than_dropped():
    with pytest.raises(PromptError, match=r"file line 7 .*give it as messages"):
        workload.encode_prompts([workload.Prompt(text="ab", where="file line 7")], WordTokenizer(), "grpo")


# ---- random tokens


def test_random_prompts_share_no_prefix_and_are_the_same_for_a_seed():
    prompts = workload.random_prompts(50, 40, 64, seed=3)
    assert [len(p) for p in prompts] == [40] * 50
    assert workload.longest_shared_prefix(prompts) == 0
    assert prompts == workload.random_prompts(50, 40, 64, seed=3) != workload.random_prompts(50, 40, 64, seed=4)


def test_random_prompts_hold_no_id_to_be_avoided_and_none_outside_the_vocabulary():
    avoid = frozenset({0, 1, 5})
    ids = {i for p in workload.random_prompts(8, 200, 16, seed=0, avoid=avoid) for i in p}
    assert ids == set(range(16)) - avoid


@pytest.mark.parametrize(("n", "length", "vocab"), [(65, 4, 64), (0, 4, 64), (1, 0, 64)])
def test_random_prompts_that_cannot_differ_are_refused(n, length, vocab):
    with pytest.raises(PromptError, match="begin differently"):
        workload.random_prompts(n, length, vocab, seed=0)


def test_the_longest_shared_prefix_is_found_wherever_the_pair_stands():
    rng = random.Random(0)
    prompts = [[rng.randrange(9) for _ in range(30)] for _ in range(40)]
    prompts[31] = prompts[4][:17] + [9] + prompts[31][18:]
    slow = max(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), 30)
               for n, a in enumerate(prompts) for b in prompts[:n])
    assert workload.longest_shared_prefix(prompts) == slow == 17
    assert workload.longest_shared_prefix([[1, 2], [1, 2, 3]]) == 2
    assert workload.longest_shared_prefix([[1, 2]]) == 0


def test_the_bundled_prompts_share_less_than_a_page():
    ids = [p.ids for p in workload.encode_prompts(workload.bundled_prompts(), WordTokenizer())]
    words = [p.text.split() for p in workload.encode_prompts(workload.bundled_prompts(), WordTokenizer())]
    assert workload.longest_shared_prefix(words) < 32      # the smaller of the page sizes, in tokens of about a word
    assert len(set(ids)) == len(ids)
