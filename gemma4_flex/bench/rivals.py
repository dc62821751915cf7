"""The engines that run on the shared model itself: ours, and the modes of transformers' `generate`; and the list of all."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from gemma4_flex.bench.installed_rivals import LlamaCpp, Vllm
from gemma4_flex.bench.job import Job
from gemma4_flex.bench.rival import FalseClaimError, Rival, Setting, compile_counts
from gemma4_flex.params import EngineConfig, SamplingParams


class Flex(Rival):
    """FlexEngine, decode steps captured."""

    name = "flex"
    captured = True

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        from gemma4_flex.engine import FlexEngine
        config = EngineConfig(device=setting.device, dtype=setting.dtype, capture_cudagraph=self.captured,
                              max_batch_size=job.max_batch, max_seq_length=job.max_seq_length, **setting.flex_config)
        self.engine = FlexEngine(setting.model, setting.tokenizer, config)
        self.params = [SamplingParams(temperature=0.0, max_new_tokens=n, ignore_eos=True) for n in job.new_tokens]

    def run(self) -> list[list[int]]:
        return [done.token_ids for done in self.engine.generate([list(p) for p in self.job.prompts], self.params)]

    def warmed_up(self) -> None:
        stats = self.engine.stats
        if self.captured and max(self.job.new_tokens) > 1 and (stats.steps_eager or not stats.steps_replayed):
            why = "; ".join(self.engine.notices) or "the engine gives no reason"
            raise FalseClaimError(f"{stats.steps_eager} decode steps ran eagerly, {stats.steps_replayed} replayed: {why}")
        self.engine.reset_stats()

    def account(self) -> dict:
        stats = self.engine.stats
        return {"config": dataclasses.asdict(self.engine.config), "attention_backends": dict(self.engine.attention_backends),
                "notices": list(self.engine.notices), "compile_s": stats.compile_s, "capture_s": stats.capture_s,
                "steps_replayed": stats.steps_replayed, "steps_eager": stats.steps_eager,
                "prefill_s": stats.prefill_s, "decode_s": stats.decode_s}


class FlexEager(Flex):
    """FlexEngine, nothing captured."""

    name = "flex_eager"
    captured = False


class Transformers(Rival):
    """`generate` with its dynamic cache: batches of at most `max_batch`, in the order of arrival, padded on the left.

    A batch goes on until its longest request is done; what others got beyond their own wish is no use and not counted.
    """

    name = "transformers"
    pad_id = 0

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        n, size = len(job.prompts), job.max_batch
        self.batches = [range(start, min(start + size, n)) for start in range(0, n, size)]

    def options(self) -> dict:
        """What `generate` is told beyond the prompts."""
        return {}

    def run(self) -> list[list[int]]:
        return [tokens for batch in self.batches for tokens in self._generate(batch)]

    def _generate(self, batch: range) -> list[list[int]]:
        import torch
        prompts, wanted = [self.job.prompts[i] for i in batch], [self.job.new_tokens[i] for i in batch]
        width = max(map(len, prompts))
        ids = [[self.pad_id] * (width - len(p)) + list(p) for p in prompts]
        mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        device = self.setting.device
        out = self.setting.model.generate(
            torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device), do_sample=False,
            eos_token_id=None, pad_token_id=self.pad_id, max_new_tokens=max(wanted), **self.options())
        return [row[:n] for row, n in zip(out[:, width:].tolist(), wanted, strict=True)]

    def account(self) -> dict:
        return {"attention": self.setting.model.config._attn_implementation, "batches": len(self.batches)}


class TransformersStatic(Transformers):
    """`generate` with its static cache and the compiled forward that it takes for decode steps, on a CPU as well.

    `generate` compiles by itself on a GPU alone; `_compile_all_devices` is its own switch for the rest. The compile is left
    to find out which sizes change (dynamic=None): with dynamic=False dynamo makes a graph a position, and after eight of
    them runs eagerly and only warns. So it is counted here what was compiled.
    """

    name = "transformers_static"

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        from transformers import CompileConfig
        self.compile_config = CompileConfig()
        self.compile_config._compile_all_devices = True
        # generate makes its cache as long as the longest that it was ever asked for: here, this job's, for every batch
        widths = [max(len(job.prompts[i]) for i in batch) + max(job.new_tokens[i] for i in batch) for batch in self.batches]
        setting.model._previous_max_cache_length = max(widths)
        self.before = compile_counts()
        self.compiled: dict[str, int] = {}

    def options(self) -> dict:
        return {"cache_implementation": "static", "compile_config": self.compile_config}

    def warmed_up(self) -> None:
        self.compiled = {key: count - self.before[key] for key, count in compile_counts().items()}
        if max(self.job.new_tokens) > 1 and (not self.compiled["graphs"] or self.compiled["frames_left_eager"]):
            raise FalseClaimError(f"its decode steps were not compiled throughout: {self.compiled}")

    def account(self) -> dict:
        return super().account() | {"compiled": self.compiled}


class GenerateBatch(Rival):
    """transformers' continuous batching. One call takes one `max_new_tokens` for all, so requests get the longest one's."""

    name = "generate_batch"

    def __init__(self, setting: Setting, job: Job):
        super().__init__(setting, job)
        self.attention = setting.model.config._attn_implementation

    def run(self) -> list[list[int]]:
        config = copy.deepcopy(self.setting.model.generation_config)
        config.eos_token_id, config.do_sample = -1, False      # -1: its word for none
        done = self.setting.model.generate_batch(
            [list(p) for p in self.job.prompts], generation_config=config, max_new_tokens=max(self.job.new_tokens))
        if failed := [output.error for output in done.values() if output.error]:
            raise RuntimeError(failed[0])
        if len(done) < len(self.job.prompts):      # older versions log why their thread ended, and return what there is
            raise RuntimeError(f"its thread ended after {len(done)} of {len(self.job.prompts)} requests")
        return [list(output.generated_tokens)[:n] for output, n in zip(done.values(), self.job.new_tokens)]

    def close(self) -> None:
        # it gives the model a paged attention of its own, which a failure may leave there for everyone after it
        if self.setting.model.config._attn_implementation != self.attention:
            self.setting.model.set_attn_implementation(self.attention)


ENGINES: dict[str, type[Rival]] = {
    rival.name: rival for rival in (Flex, FlexEager, Transformers, TransformersStatic, GenerateBatch, LlamaCpp, Vllm)}
TRANSFORMERS_MODES = ("transformers", "transformers_static", "generate_batch")


class UnknownEngineError(ValueError):
    """A name that no engine has; the message lists those there are."""


def choose(names: Sequence[str]) -> list[type[Rival]]:
    """The engines called so, each once, in this order. Raises UnknownEngineError."""
    for name in names:
        if name not in ENGINES:
            raise UnknownEngineError(f"there is no engine {name!r}: choose from {', '.join(ENGINES)}")
    return [ENGINES[name] for name in dict.fromkeys(names)]
