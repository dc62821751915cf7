"""Asks llama.cpp about a GGUF file; run by scripts/verify_llamacpp.py in an environment that has llama-cpp-python.

Reads one JSON object from standard input: `model` and `lora` (paths; null for none), `prompts` (lists of ids), `new_tokens`,
`texts`. Writes one to the path given: `tokens` (greedy, for each prompt) and `margins` (how far the largest logit is above the
next, for each of them), `ids` (of each text, without a begin-of-sequence token), `version`.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(answers: Path) -> None:
    asked = json.load(sys.stdin)
    context = max(map(len, asked["prompts"])) + asked["new_tokens"]
    # keys and values in fp32: what is looked at is the file, not llama.cpp's fp16 cache
    model = llama_cpp.Llama(asked["model"], lora_path=asked["lora"], n_ctx=context, n_batch=context, n_threads=1,
                            n_threads_batch=1, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
                            logits_all=True, verbose=False)
    tokens, margins = zip(*(greedy(model, prompt, asked["new_tokens"]) for prompt in asked["prompts"]))
    ids = [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]]
    answers.write_text(json.dumps({"tokens": tokens, "margins": margins, "ids": ids, "version": llama_cpp.__version__}))


def greedy(model: llama_cpp.Llama, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    model.reset()
    model.eval(prompt)
    tokens, margins = [], []
    for _ in range(count):
        logits = model.scores[model.n_tokens - 1]
        first = int(logits.argmax())
        tokens.append(first)
        margins.append(float(logits[first] - np.delete(logits, first).max()))
        if len(tokens) < count:
            model.eval([first])
    return tokens, margins


if __name__ == "__main__":
    main(Path(sys.argv[1]))
