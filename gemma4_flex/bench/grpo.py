"""GRPO with TRL, rolling out through the engine or through TRL's own transformers generation, and the two set side by side.

Needs requirements-train.txt; nothing else of the package does.
"""
from __future__ import annotations

import importlib.metadata
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from trl import GRPOConfig, GRPOTrainer

from gemma4_flex.bench import counting, workload
from gemma4_flex.bench.measure import summarize
from gemma4_flex.bench.report import commit, device_name, versions
from gemma4_flex.checkpoints import load_text_model
from gemma4_flex.lora.adapters import ALL_LINEAR, choose_targets
from gemma4_flex.lora.session import drift_result
from gemma4_flex.params import EngineConfig, SamplingParams
from gemma4_flex.rollout import Agreement, Rollout, agreement
from gemma4_flex.text import encode_prompt

ENGINE, TRANSFORMERS = "engine", "transformers"
# Importance ratios before a step's update may be off from 1.0 by this much in the mean over its tokens. Single tokens may be
# off by more: an fp32 forward of Hugging Face's is itself up to a few 1e-5 from float64 on the token it gets worst.
RATIO_TOLERANCE = {"float32": 1e-5}
TRAIN_PACKAGES = ("trl", "peft", "datasets", "accelerate")


@dataclass(frozen=True)
class Settings:
    """One run. A step draws `num_generations` samples of `num_prompts` questions and makes one update."""
    model_name: str = "tiny"
    dtype: str = "float32"
    device: str = "cpu"
    steps: int = 25
    num_prompts: int = 16
    num_generations: int = 8
    max_new_tokens: int = 48
    temperature: float = 1.0
    lr: float = 3e-3
    rank: int = 16
    verify_every: int = 12
    verify_cycles: int = 5
    seed: int = 0
    compile: bool = True
    capture_cudagraph: bool = False
    max_batch_size: int = 64
    job_prompts: int = 16       # of the whole-job comparison
    job_samples: int = 8
    job_rounds: int = 3         # 0: no comparison

    def engine_config(self, longest_prompt: int) -> EngineConfig:
        return EngineConfig(device=self.device, dtype=self.dtype, compile=self.compile, capture_cudagraph=self.capture_cudagraph,
                            max_batch_size=self.max_batch_size, max_seq_length=longest_prompt + self.max_new_tokens, seed=self.seed)


@dataclass
class Step:
    """One step of a run; what the engine alone can say is None with TRL's own generation."""
    step: int
    reward: float
    exact: float
    mean_tokens: float
    seconds: float
    rollout_s: float
    rollout_tokens: int
    refresh_ms: float | None = None
    agreement: Agreement | None = None
    verify_s: float = 0.0
    drift: dict | None = None

    @property
    def rollout_tps(self) -> float:
        return self.rollout_tokens / self.rollout_s


class WatchedTrainer(GRPOTrainer):
    """GRPOTrainer that times its rollouts and keeps its own log-probabilities beside the rollout's, at no cost of its own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rollout_s, self.rollout_tokens = 0.0, 0
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []      # (trainer's, rollout's) of the step's tokens

    def _generate(self, prompts):
        start = time.perf_counter()
        found = super()._generate(prompts)
        self.rollout_s, self.rollout_tokens = time.perf_counter() - start, sum(map(len, found[1]))
        return found

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._policy = found[0].detach()
        return found

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if (drawn := inputs.get("sampling_per_token_logps")) is not None:
            mask = inputs["completion_mask"].bool()
            self.pairs.append((self._policy[mask], drawn[mask]))
        return loss

    def take_agreement(self) -> Agreement | None:
        """Of the tokens of the step's losses; they were computed before its update."""
        pairs, self.pairs = self.pairs, []
        return agreement(*map(torch.cat, zip(*pairs))) if pairs else None


@dataclass
class Run:
    """A trained side: its steps, and greedy answers to held-out questions before and after."""
    side: str
    steps: list[Step] = field(default_factory=list)
    held_out_before: float = 0.0
    held_out_after: float = 0.0
    seconds: float = 0.0
    compile_s: float = 0.0


class Training:
    """A model with a fresh adapter, its rollout and its trainer; `side` says who generates."""

    def __init__(self, settings: Settings, side: str, on_step: Callable[[Step], None] = lambda step: None):
        from datasets import Dataset
        from peft import LoraConfig, get_peft_model
        os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        self.settings, self.run, self.on_step = settings, Run(side), on_step
        loaded = load_text_model(settings.model_name, dtype=getattr(torch, settings.dtype), device=settings.device,
                                 seed=settings.seed)
        torch.manual_seed(settings.seed)
        model = get_peft_model(loaded.model, LoraConfig(
            r=settings.rank, lora_alpha=2 * settings.rank, target_modules=choose_targets(loaded.model, ALL_LINEAR),
            task_type="CAUSAL_LM"))
        train, self.held_out = counting.questions(settings.seed)
        self.jobs_prompts = {
            "bundled prompts": [list(p.messages) for p in workload.first_prompts(workload.bundled_prompts(), settings.job_prompts)],
            "counting, held out": [q["prompt"] for q in self.held_out[:settings.job_prompts]]}
        chats = [q["prompt"] for q in train] + [prompt for prompts in self.jobs_prompts.values() for prompt in prompts]
        longest = max(len(encode_prompt(chat, loaded.tokenizer, loaded.geometry.vocab_size, frozenset())) for chat in chats)
        self.rollout = Rollout(model, loaded.tokenizer, settings.engine_config(longest), seed=settings.seed,
                               verify_every=settings.verify_every, verify_cycles=settings.verify_cycles)
        with tempfile.TemporaryDirectory() as directory:
            self.trainer = WatchedTrainer(
                model=model, reward_funcs=[getattr(counting, name) for name in counting.REWARDS],
                args=trainer_config(settings, directory), train_dataset=Dataset.from_list(train),
                processing_class=loaded.tokenizer, rollout_func=self.rollout if side == ENGINE else None)
        from transformers import PrinterCallback
        self.trainer.remove_callback(PrinterCallback)
        self.trainer.add_callback(_callback(self._take))

    def train(self) -> Run:
        """All steps. Raises DriftError and RolloutError as Rollout does."""
        start = time.perf_counter()
        self.run.held_out_before = self.score_held_out()
        self.trainer.train()
        self.run.held_out_after = self.score_held_out()
        self.run.seconds = time.perf_counter() - start
        self.run.compile_s = self.rollout.engine.stats.compile_s + self.rollout.engine.stats.capture_s
        return self.run

    def score_held_out(self) -> float:
        """Share of held-out questions that the policy, as it is now, answers word for word when greedy."""
        self.rollout.refresh()
        done = self.rollout.engine.generate([q["prompt"] for q in self.held_out], SamplingParams(
            max_new_tokens=self.settings.max_new_tokens, temperature=0.0))
        right = counting.exact([c.text for c in done], [q["numbers"] for q in self.held_out])
        return sum(right) / len(right)

    def _take(self, step: int, logs: dict, seconds: float) -> None:
        trainer = self.trainer
        found = Step(step, logs["reward"], logs["rewards/exact/mean"], logs["completions/mean_length"], seconds,
                     trainer.rollout_s, trainer.rollout_tokens, agreement=trainer.take_agreement())
        if self.run.side == ENGINE:
            figures = self.rollout.history[-1]
            found.refresh_ms, found.verify_s = figures.refresh_ms, figures.verify_s
            found.rollout_s -= figures.verify_s
            found.drift = figures.drift and drift_result(figures.drift)
        self.run.steps.append(found)
        self.on_step(found)

    def jobs(self, on_round: Callable[[], None] = lambda: None) -> dict[str, dict]:
        """Whole rollouts by either side in turn, A B A B, after one of each that does not count: this trainer's own call for
        completions, from chats to ids. By name of the prompts: seconds, tokens, and the ratios round by round."""
        return {name: self._job([p for p in prompts for _ in range(self.settings.job_samples)], on_round)
                for name, prompts in self.jobs_prompts.items()}

    def _job(self, prompts: list, on_round: Callable[[], None]) -> dict:
        trainer, sides = self.trainer, {ENGINE: self.rollout, TRANSFORMERS: None}
        kept, self.rollout.verify_every = (trainer.rollout_func, self.rollout.verify_every), 0
        rounds: dict[str, list[dict]] = {side: [] for side in sides}
        for n in range(self.settings.job_rounds + 1):
            for side, trainer.rollout_func in sides.items():
                found = trainer._generate(prompts)
                if n:
                    rounds[side].append({"seconds": trainer.rollout_s, "tokens": trainer.rollout_tokens})
            on_round()
        trainer.rollout_func, self.rollout.verify_every = kept
        ratios = [theirs["seconds"] / ours["seconds"] for ours, theirs in zip(rounds[ENGINE], rounds[TRANSFORMERS])]
        lengths = [len(ids) for ids in found[0]]
        return {"prompts": len(prompts) // self.settings.job_samples, "samples": self.settings.job_samples,
                "prompt_tokens": {"min": min(lengths), "max": max(lengths)}, "max_new_tokens": self.settings.max_new_tokens,
                "rounds": rounds, "ratio": summarize(ratios).as_dict() | {"rounds": ratios},
                "seconds": {side: summarize([r["seconds"] for r in each]).as_dict() for side, each in rounds.items()},
                "tokens_per_s": {side: summarize([r["tokens"] / r["seconds"] for r in each]).as_dict()
                                 for side, each in rounds.items()}}


def trainer_config(settings: Settings, directory: str) -> GRPOConfig:
    """Plain GRPO: one update a rollout at a rate that falls to zero, no reference model, sampling untruncated, weights in their own
    dtype."""
    return GRPOConfig(
        output_dir=directory, use_cpu=settings.device == "cpu", bf16=False, gradient_checkpointing=False, seed=settings.seed,
        max_steps=settings.steps, per_device_train_batch_size=settings.num_prompts * settings.num_generations,
        num_generations=settings.num_generations, max_completion_length=settings.max_new_tokens, beta=0.0,
        temperature=settings.temperature, top_p=1.0, top_k=0, learning_rate=settings.lr, lr_scheduler_type="linear",
        reward_weights=list(counting.REWARDS.values()), logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True)


def _callback(take: Callable[[int, dict, float], None]):
    from transformers import TrainerCallback

    class Tell(TrainerCallback):
        """Hands each step's logs on, with the seconds since its start."""

        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" in (logs or {}):
                take(state.global_step, logs, time.perf_counter() - self.start)
    return Tell()


def build_result(settings: Settings, runs: list[Run], jobs: dict[str, dict]) -> dict:
    """Everything that was measured, as plain JSON values."""
    return {
        "schema_version": 1, "benchmark": "grpo", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "model_name": settings.model_name, "dtype": settings.dtype, "device": settings.device,
        "device_name": device_name(settings.device), "threads": torch.get_num_threads(),
        "versions": versions() | {name: importlib.metadata.version(name) for name in TRAIN_PACKAGES}, "commit": commit(),
        "config": asdict(settings), "task": {"lengths": list(counting.LENGTHS), "rewards": counting.REWARDS},
        "runs": {run.side: _run(run, settings) for run in runs}, "jobs": jobs}


def _run(run: Run, settings: Settings) -> dict:
    steps = [asdict(step) | {"rollout_tps": step.rollout_tps} for step in run.steps]
    edge = max(1, min(5, len(steps) // 2))      # steps at either end that are averaged: one batch alone is noise
    ends = {name: {"first": sum(s[name] for s in steps[:edge]) / edge, "last": sum(s[name] for s in steps[-edge:]) / edge}
            for name in ("reward", "exact")}
    known = [s.agreement for s in run.steps if s.agreement]
    verified = [s.drift for s in run.steps if s.drift]
    return {
        "steps": steps, "seconds": run.seconds, "compile_s": run.compile_s, **ends, "averaged_steps": edge,
        "held_out": {"before": run.held_out_before, "after": run.held_out_after, "questions": counting.HELD_OUT},
        "rollout_tps": summarize([s.rollout_tps for s in run.steps]).as_dict(),
        "rollout_s": summarize([s.rollout_s for s in run.steps]).as_dict(),
        "refresh_ms": (found := summarize([s.refresh_ms for s in run.steps])) and found.as_dict(),
        "agreement": {"tolerance": RATIO_TOLERANCE.get(settings.dtype), "delta_mean": max(a.delta_mean for a in known),
                      "delta_max": max(a.delta_max for a in known), "ratio_off_mean": max(a.ratio_off_mean for a in known),
                      "ratio_off_max": max(a.ratio_off_max for a in known)} if known else None,
        "drift": {"verified": len(verified), "passed": sum(d["passed"] for d in verified)}}
