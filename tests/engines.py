"""What the tests of the engine's rooms share: small engines on tiny models, prompts, and Hugging Face as the oracle."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from gemma4_flex.engine import FlexEngine
from gemma4_flex.params import EngineConfig, SamplingParams
from tests.tiny import VOCAB, fake_tokenizer

# One shape for nearly all engines, because every new static shape costs the flex back end seconds of C++ compiling; and
# uncompiled, because one compile of a step takes half a minute: tests/test_compiled.py is where steps are compiled.
SMALL = {"device": "cpu", "attention": "sdpa", "compile": False, "max_batch_size": 4, "page_size": 4, "max_seq_length": 128,
         "n_pages": 41, "max_prefill_tokens": 16}
WINDOW = 4          # tests.tiny's
TIE_MARGIN = 1e-4   # fp32: greedy tokens may part from Hugging Face's where its two best logits are closer than this


def make_engine(model, *, tokenizer=None, **overrides) -> FlexEngine:
    """A `SMALL` engine; `overrides` are EngineConfig fields. Pages are shuffled: no test may lean on their order."""
    engine = FlexEngine(model, tokenizer or fake_tokenizer(), EngineConfig(**(SMALL | overrides)))
    shuffle_pages(engine, seed=1)
    return engine


def shuffle_pages(engine: FlexEngine, seed: int) -> None:
    """Hand the free pages out in another order from here on."""
    for table in engine.runner.tables.values():
        random.Random(seed).shuffle(table.free_pages)


def greedy(n: int, **fields) -> SamplingParams:
    """Exactly `n` tokens, unless a caller's own stop ends them."""
    return SamplingParams(max_new_tokens=n, **({"ignore_eos": True, "temperature": 0.0} | fields))


def some_prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths: a BOS, then ordinary ids."""
    rng = random.Random(seed)
    return [[2, *(rng.randrange(4, VOCAB) for _ in range(n - 1))] for n in lengths]


def tokens_of(engine: FlexEngine, prompts: list[list[int]], n: int, **fields) -> list[list[int]]:
    """Output ids of `n` greedy tokens a prompt, all prompts at once."""
    return [done.token_ids for done in engine.generate(prompts, greedy(n, **fields))]


@torch.no_grad()
def hf_logits(model, ids: list[int]) -> Tensor:
    """Hugging Face's logits [T, V] of a whole sequence in one uncached forward."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def hf_generate(model, prompt: list[int], n: int, **kwargs) -> list[int]:
    """What `transformers` generate adds to a prompt, greedily."""
    kwargs = {"eos_token_id": None, "pad_token_id": 0} | kwargs
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, **kwargs)
    return ids[0, len(prompt):].tolist()


def assert_greedy_as_hf(model, prompt: list[int], output: list[int]) -> None:
    """Every token is the one Hugging Face would pick after those before it, by a re-prefill at each step (all steps in
    one causal forward); where it is not, Hugging Face's own two best logits must be a tie."""
    logits = hf_logits(model, prompt + output[:-1])[len(prompt) - 1:]
    best = logits.topk(2).values
    for step, (row, token) in enumerate(zip(logits, output)):
        if row.argmax() != token:
            assert best[step, 0] - best[step, 1] < TIE_MARGIN, f"step {step}: {token}, Hugging Face {row.argmax()}"


def assert_all_free(engine: FlexEngine) -> None:
    """Nothing runs, every page but the reserved one is free, and none has two owners."""
    assert not engine.has_work
    for table in engine.runner.tables.values():
        table.check()
        assert table.num_free == table.n_pages - 1


def pages_hash(engine: FlexEngine, but: dict[str, set[int]] | None = None) -> dict[str, bytes]:
    """The bytes of every pool, without the pages `but` lists by attention type."""
    found = {}
    for kind, group in engine.runner.cache.groups.items():
        keep = [page for page in range(group.num_pages) if page not in (but or {}).get(kind, set())]
        for name, pools in (("keys", group.keys), ("values", group.values)):
            for layer, pool in pools.items():
                pages = pool.view(pool.shape[1], group.num_pages, group.page_size, -1)[:, keep]
                found[f"{name}.{layer}"] = pages.contiguous().numpy().tobytes()
    return found


def held_pages(engine: FlexEngine) -> dict[str, set[int]]:
    """Pages that some sequence holds, by attention type."""
    return {kind: {page for slot in range(table.num_slots) for _, page in table.held(slot)}
            for kind, table in engine.runner.tables.items()}
