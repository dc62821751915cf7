"""The engines themselves, on a real model of a few thousand weights; llama.cpp by a stand-in for its library."""
from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest

from gemma4_flex.bench import installed_rivals, rivals
from gemma4_flex.bench.compare import check_tokens
from gemma4_flex.bench.installed_rivals import LlamaCpp
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.rival import AbsentError, FalseClaimError, Setting
from gemma4_flex.geometry import ModelGeometry
from tests.engines import hf_generate, some_prompts
from tests.tiny import VOCAB, tiny_model


@pytest.fixture(scope="module")
def setting() -> Setting:
    model = tiny_model(attn_implementation="sdpa")
    return Setting(model=model, tokenizer=None, geometry=ModelGeometry.from_config(model.config), model_name="tiny",
                   dtype="float32", device="cpu", threads=1, flex_config={"attention": "sdpa", "compile": False})


@pytest.fixture(scope="module")
def mixed() -> Job:
    """Five requests in batches of two: the last batch is not full, and every batch pads."""
    return Job("mixed", 2, tuple(map(tuple, some_prompts(3, 9, 2, 7, 5))), (6, 2, 3, 8, 4))


@pytest.fixture(scope="module")
def alone(setting, mixed) -> list[list[int]]:
    """What `generate` gives for each prompt by itself."""
    return [hf_generate(setting.model, list(prompt), n) for prompt, n in zip(mixed.prompts, mixed.new_tokens)]


# ---- which there are


def test_engines_are_chosen_by_name_each_once_and_an_unknown_name_is_refused():
    assert rivals.choose(["vllm", "flex", "vllm"]) == [installed_rivals.Vllm, rivals.Flex]
    with pytest.raises(rivals.UnknownEngineError, match="no engine 'vlm': choose from flex, flex_eager, transformers, "):
        rivals.choose(["flex", "vlm"])


# ---- on the shared model


def test_ours_gives_each_request_its_own_tokens(setting, mixed, alone):
    rival = rivals.FlexEager(setting, mixed)
    assert rival.run() == alone
    rival.warmed_up()
    assert rival.engine.stats.decode_tokens == 0       # what follows is counted by itself
    rival.run()
    account = rival.account()
    assert account["steps_replayed"] == 0 < account["steps_eager"] and account["config"]["max_batch_size"] == 2


def test_no_stop_id_ends_a_request_before_its_tokens_are_made(setting, mixed, alone, monkeypatch):
    monkeypatch.setattr(setting.model.generation_config, "eos_token_id", [tokens[0] for tokens in alone])
    for engine in (rivals.FlexEager, rivals.Transformers):
        assert engine(setting, mixed).run() == alone


def test_steps_that_ran_eagerly_are_not_told_as_captured(setting, mixed):
    rival = rivals.Flex(setting, mixed)
    rival.engine = SimpleNamespace(stats=SimpleNamespace(steps_eager=3, steps_replayed=0), notices=["cannot be captured"])
    with pytest.raises(FalseClaimError, match="3 decode steps ran eagerly, 0 replayed: cannot be captured"):
        rival.warmed_up()


def test_transformers_in_padded_batches_gives_what_it_gives_alone_and_nothing_beyond_the_wish(setting, mixed, alone):
    rival = rivals.Transformers(setting, mixed)
    assert rival.run() == alone
    assert rival.account() == {"attention": "sdpa", "batches": 3}


def test_the_static_cache_is_compiled_once_for_all_batches_and_gives_the_same_tokens(setting, mixed, alone):
    rival = rivals.TransformersStatic(setting, mixed)
    rival.compile_config.backend = "eager"         # dynamo's part, which decides what is compiled, without the compiler's
    assert rival.run() == alone
    rival.warmed_up()
    assert rival.account()["compiled"]["graphs"] >= 1 and rival.account()["compiled"]["frames_left_eager"] == 0
    before = rivals.compile_counts()
    assert rival.run() == alone and rivals.compile_counts() == before


def test_a_static_cache_that_was_not_compiled_is_not_told_as_compiled(setting, mixed):
    rival = rivals.TransformersStatic(setting, mixed)
    rival.compile_config._compile_all_devices = False
    rival.run()
    with pytest.raises(FalseClaimError, match="not compiled"):
        rival.warmed_up()


def test_generate_batch_is_really_tried(setting, mixed, alone, monkeypatch):
    def generate_batch(inputs, *, generation_config, max_new_tokens):
        assert generation_config.eos_token_id == -1 and setting.model.generation_config.eos_token_id == 1
        ids = [hf_generate(setting.model, prompt, max_new_tokens) for prompt in inputs]
        return {n: SimpleNamespace(generated_tokens=tokens, error=None) for n, tokens in enumerate(ids)}

    monkeypatch.setattr(setting.model, "generate_batch", generate_batch, raising=False)
    assert rivals.GenerateBatch(setting, mixed).run() == alone
    monkeypatch.setattr(setting.model, "generate_batch",
                        lambda *a, **k: {0: SimpleNamespace(generated_tokens=[], error="out of cache")})
    with pytest.raises(RuntimeError, match="out of cache"):
        rivals.GenerateBatch(setting, mixed).run()
    monkeypatch.setattr(setting.model, "generate_batch", lambda *a, **k: {})
    with pytest.raises(RuntimeError, match="ended after 0 of 5 requests"):
        rivals.GenerateBatch(setting, mixed).run()


def test_the_attention_that_generate_batch_leaves_on_the_shared_model_is_put_back(setting, mixed):
    rival = rivals.GenerateBatch(setting, mixed)
    setting.model.set_attn_implementation("eager")
    rival.close()
    assert setting.model.config._attn_implementation == "sdpa"


# ---- from elsewhere


@pytest.mark.parametrize(("name", "module"), [("llama_cpp", "llama_cpp"), ("vllm", "vllm")])
def test_what_is_not_installed_is_absent(setting, mixed, monkeypatch, name, module):
    monkeypatch.setattr(installed_rivals.importlib.util, "find_spec", lambda wanted: None if wanted == module else 1)
    with pytest.raises(AbsentError, match="not installed"):
        rivals.ENGINES[name](setting, mixed)


class StandInLibrary:
    """What of llama_cpp's functions is used. The next token is a rule of the sequence's sum, so a token in a wrong slot, at a
    wrong position, or left over from an earlier request gives other tokens."""

    def __init__(self):
        self.cache: dict[int, dict[int, int]] = {}
        self.steps: list[int] = []
        self.params = SimpleNamespace()
        for name in ("llama_log_set", "llama_backend_init", "llama_batch_free", "llama_free", "llama_model_free"):
            setattr(self, name, lambda *a: None)
        self.llama_log_callback = lambda call: call
        self.llama_model_default_params = self.llama_context_default_params = lambda: self.params
        self.llama_model_load_from_file = self.llama_init_from_model = lambda *a: "made"
        self.llama_model_get_vocab = self.llama_get_memory = lambda made: "its"
        self.llama_vocab_n_tokens = lambda vocab: VOCAB
        self.llama_memory_seq_rm = lambda memory, slot, start, end: self.cache.pop(slot)

    def llama_batch_init(self, n, embd, n_seq_max):
        return SimpleNamespace(token=[0] * n, pos=[0] * n, logits=[0] * n, n_seq_id=[0] * n, seq_id=[[0] for _ in range(n)])

    def llama_decode(self, context, batch):
        self.rows = {}
        for i in range(batch.n_tokens):
            sequence = self.cache.setdefault(batch.seq_id[i][0], {})
            assert batch.pos[i] == len(sequence) and batch.n_seq_id[i] == 1
            sequence[batch.pos[i]] = batch.token[i]
            if batch.logits[i]:
                self.rows[i] = next_token(list(sequence.values()))
        assert len(self.cache) <= self.params.n_seq_max
        self.steps.append(batch.n_tokens)
        return 0

    def llama_get_logits_ith(self, context, row):
        logits = (ctypes.c_float * VOCAB)()
        logits[self.rows[row]] = 1.0
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


def next_token(ids: list[int]) -> int:
    return (sum(ids) + 7 * len(ids)) % VOCAB


def by_rule(prompt, n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(next_token(ids))
    return ids[len(prompt):]


@pytest.fixture
def library(monkeypatch) -> StandInLibrary:
    stand_in = StandInLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", stand_in)
    monkeypatch.setattr(installed_rivals, "_require", lambda module, package: None)
    return stand_in


def with_file(setting: Setting) -> Setting:
    return Setting(**(vars(setting) | {"gguf": "weights.gguf"}))


def test_llama_cpp_serves_requests_in_parallel_and_refills_their_places(setting, mixed, library):
    rival = LlamaCpp(with_file(setting), mixed)
    for _ in range(2):                             # the second time as the first: nothing is left over
        tokens = rival.run()
        check_tokens(tokens, mixed)
        assert tokens == [by_rule(p, n) for p, n in zip(mixed.prompts, mixed.new_tokens)]
    one_by_one = sum(mixed.new_tokens)
    assert len(library.steps) / 2 < 0.7 * one_by_one      # two at a time
    assert library.params.n_seq_max == 2 and library.params.n_threads == library.params.n_threads_batch == 1


def test_llama_cpp_takes_as_many_prompts_a_step_as_fit(setting, library, monkeypatch):
    monkeypatch.setattr(installed_rivals, "STEP_TOKENS", 10)
    job = Job("prefill", 4, tuple(map(tuple, some_prompts(5, 5, 5, 12))), (1, 1, 1, 1))
    assert LlamaCpp(with_file(setting), job).run() == [by_rule(p, 1) for p in job.prompts]
    assert library.steps == [10, 5, 12]


def test_a_file_of_other_weights_is_refused(setting, mixed, library):
    library.llama_vocab_n_tokens = lambda vocab: 99
    with pytest.raises(ValueError, match="has 99 token ids and tiny 64"):
        LlamaCpp(with_file(setting), mixed)
    with pytest.raises(AbsentError, match="--gguf FILE"):
        LlamaCpp(setting, mixed)


def test_a_geometry_that_would_abort_llama_cpp_and_this_process_with_it_is_refused_first(setting, mixed, library):
    config = tiny_model(layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
                        num_kv_shared_layers=1).config        # owners end with two sliding layers
    other = Setting(**(vars(with_file(setting)) | {"geometry": ModelGeometry.from_config(config)}))
    with pytest.raises(ValueError, match="would abort: it lets layer 5 read layer 4's K/V, and here that is layer 2's"):
        LlamaCpp(other, mixed)


def test_vllm_needs_a_checkpoint_on_disk(setting, mixed, monkeypatch):
    monkeypatch.setattr(installed_rivals, "_require", lambda module, package: None)
    with pytest.raises(AbsentError, match="synthetic weights have none"):
        installed_rivals.Vllm(Setting(**(vars(setting) | {"model_name": "synthetic:E2B"})), mixed)
