"""How llama.cpp is asked and judged, with stubs in its place: `make test-llamacpp` asks the real one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from gemma4_flex.verify.llamacpp import Answers, LlamaCpp, LlamaCppError, _same_margins, _same_tokens
from tests.engines import hf_generate, hf_logits, some_prompts
from tests.tiny import tiny_model

ECHO = """
import json, sys
asked = json.load(sys.stdin)
tokens = [[len(prompt)] * asked["new_tokens"] for prompt in asked["prompts"]]
answers = {"tokens": tokens, "margins": [[1.0]], "ids": [[len(text)] for text in asked["texts"]], "version": "0"}
json.dump(answers, open(sys.argv[1], "w"))
"""


def worker(folder: Path, source: str) -> LlamaCpp:
    (folder / "worker.py").write_text(source)
    return LlamaCpp(Path(sys.executable), folder / "worker.py")


def test_what_is_asked_arrives_and_what_is_answered_comes_back(tmp_path):
    found = worker(tmp_path, ECHO).ask(Path("m.gguf"), [[2, 3], [2]], 2, texts=("abc",))
    assert found == Answers([[2, 2], [1, 1]], [[1.0]], [[3]])


def test_a_missing_environment_and_a_failing_one_are_one_sentence(tmp_path):
    with pytest.raises(LlamaCppError, match="no/python is not there: build it with `make test-llamacpp`"):
        LlamaCpp(Path("no/python"), tmp_path)
    with pytest.raises(LlamaCppError, match=r"llama.cpp failed on m.gguf \(exit code 1\): ValueError: cannot load"):
        worker(tmp_path, "raise ValueError('cannot load')").ask(Path("m.gguf"), [[2]], 1)


def test_tokens_may_part_at_a_near_tie_and_nowhere_else():
    ours = [[5, 6, 7], [5, 6, 7]]
    assert _same_tokens("F32", ours, Answers(ours, [[0.0] * 3] * 2, []), 0.02).holds
    parted = Answers([[5, 6, 7], [5, 9, 9]], [[9.0] * 3, [9.0, 0.01, 9.0]], [])      # what follows the first is another text
    assert _same_tokens("F32", ours, parted, 0.02).holds and not _same_tokens("F32", ours, parted, 0.01).holds
    assert "1 of 2 prompts" in _same_tokens("F32", ours, parted, 0.02).found


def test_margins_are_those_of_hugging_faces_logits_at_each_token():
    model, [prompt] = tiny_model(3), some_prompts(9)
    tokens = hf_generate(model, prompt, 5)
    best = hf_logits(model, prompt + tokens)[len(prompt) - 1:-1].topk(2).values
    margins = (best[:, 0] - best[:, 1]).tolist()

    def judged(theirs: list[int], margins: list[float]):
        return _same_margins(model, [prompt], [tokens], Answers([theirs], [margins], []))

    assert judged(tokens, margins).holds and "at 5 tokens" in judged(tokens, margins).found
    off = [*margins[:4], margins[4] + 0.1]
    assert not judged(tokens, off).holds
    assert judged([*tokens[:4], -1], off).holds                  # not after they part
    assert not judged([-1] * 5, margins).holds                   # nothing was compared
    assert torch.tensor(margins).unique().numel() == 5
