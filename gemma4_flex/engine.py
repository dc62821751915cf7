"""FlexEngine: the loop that ties scheduler, runner and text together."""
from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import Protocol

import torch
from torch import Tensor, nn

from gemma4_flex import prompt_state
from gemma4_flex.fingerprint import fingerprint
from gemma4_flex.geometry import ModelGeometry, plain_config
from gemma4_flex.kv_cache import memory_bytes
from gemma4_flex.logprobs import Logprobs, TokenLogprob
from gemma4_flex.memory import pages_for, sized_tables
from gemma4_flex.models.projections import table
from gemma4_flex.params import EngineConfig, InvalidParameterError, SamplingParams
from gemma4_flex.prefix import Group
from gemma4_flex.request import Completion, Request, TokenEvent, check_against_model
from gemma4_flex.runner import Drawn, Runner
from gemma4_flex.sampling import NON_FINITE
from gemma4_flex.scheduler import Scheduler, Span, StepPlan
from gemma4_flex.sequence import Sequence
from gemma4_flex.sizing import pool_bytes
from gemma4_flex.stats import EngineStats
from gemma4_flex.text import Detokenizer, PromptError, encode_ids, encode_prompt
from gemma4_flex.trace import Trace, trace

Prompt = str | Seq[dict] | Seq[int]


class WeightSource(Protocol):
    """What an engine's weights come from where they can be switched: the engine knows no more of adapters than this."""

    def use(self, path: str | None, policy: str) -> None: ...


def _uncast(method: Callable) -> Callable:
    """`method` with the weights' own arithmetic, whatever autocast its caller is in."""
    @functools.wraps(method)
    def run(self, *args, **kwargs):
        with torch.autocast(self.config.device, enabled=False):
            return method(self, *args, **kwargs)
    return run


class FlexEngine:
    """Generates with a Gemma-4 E-series text model over paged K/V.

    `model` is a Hugging Face causal LM with its text model at `model.model`; it is read, never changed, and an in-place
    change of its weights is seen by the next step. `tokenizer` may be None where prompts are token ids.
    """

    def __init__(self, model: nn.Module, tokenizer, config: EngineConfig | None = None):
        config = EngineConfig() if config is None else config
        if not isinstance(config, EngineConfig):
            raise ValueError(f"config is a {type(config).__name__}: give an EngineConfig.")
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "layers"):
            raise ValueError(f"{type(model).__name__} is no causal LM with its text model at .model: give a Gemma4ForCausalLM, "
                             "for a PEFT model lora.double_copy.DoubleCopy(model).inference, for a name from_pretrained.")
        weight = model.model.norm.weight      # which is never packed
        dtype = str(weight.dtype).removeprefix("torch.")
        if config.device not in ("auto", weight.device.type):
            raise ValueError(f"the model is on {weight.device} but EngineConfig(device={config.device!r}): move one of them.")
        if config.dtype not in ("auto", dtype):
            raise ValueError(f"the model is in {dtype} but EngineConfig(dtype={config.dtype!r}): load it in that dtype.")
        self.config = replace(config, device=weight.device.type, dtype=dtype).resolved(weight.device.type)
        self.model, self.tokenizer = model, tokenizer
        self.geometry = ModelGeometry.from_config(model.config)
        self.geometry.assert_matches(model.model)
        check_ple(model.model, self.geometry, self.config)
        self.generation = plain_config(getattr(model, "generation_config", None) or {})
        self.stop_ids = frozenset(i for i in model_stop_ids(model, tokenizer) if i < self.geometry.vocab_size)
        self.sizing = ""                             # how gpu_memory_utilization came to the pools' pages
        if config.gpu_memory_utilization is not None:
            pages, self.sizing = pages_for(model, self.geometry, self.config)
            self.config = replace(self.config, n_pages=pages, gpu_memory_utilization=None)
        self._check_room(weight)
        tables = sized_tables(self.geometry, self.config)
        self.scheduler = Scheduler(tables, max_batch_size=self.config.max_batch_size,
                                   max_seq_length=self.config.max_seq_length, max_prefill_tokens=self.config.max_prefill_tokens,
                                   decode_steps=self.config.decode_steps_per_sync, prefix_cache=self.config.prefix_cache)
        self.runner = Runner(model, self.geometry, self.config, tables)
        self._prepared = False
        self.weight_epoch = 0                        # raised by every `update_weights`
        self.weight_source: WeightSource | None = None
        self._fingerprinted: str | None = None      # of the weights as they were seen last
        self._weights_seen = self._versions()
        self._undelivered: list[TokenEvent] = []     # drawn while draining, for the next `step` to hand out
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.reset_stats()

    @classmethod
    def from_pretrained(cls, name: str, config: EngineConfig | None = None,
                        change: Callable[[nn.Module], nn.Module] = lambda model: model, *, four_bit: bool = False,
                        gguf_weights: str = "packed") -> FlexEngine:
        """An engine on a named checkpoint: `tiny`, `synthetic:E2B`, a Hugging Face or MLX directory, a GGUF file or a hub id; with
        `four_bit`, one that bitsandbytes quantised. `gguf_weights`: whether a GGUF file's quantised weights stay "packed" or are
        decoded as they are read ("dequantize"). `change` may put another model over the loaded one (`quantize_4bit`, for one)."""
        from gemma4_flex.checkpoints import load_text_model
        config = config or EngineConfig()
        config = config.resolved("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_text_model(str(name), dtype=getattr(torch, config.dtype), device=config.device, seed=config.seed,
                                 four_bit=four_bit, gguf_weights=gguf_weights, ple=config.ple)
        return cls(change(loaded.model), loaded.tokenizer, config)

    def _check_room(self, weight: Tensor) -> None:
        """Raise InvalidParameterError unless the pools fit the device."""
        config = self.config
        needed = pool_bytes(self.geometry, config, config.n_pages, weight.element_size())
        if needed > (room := memory_bytes(weight.device)):
            raise InvalidParameterError(
                f"the K/V pools need {needed / 2**30:,.1f} GiB and {weight.device} has room for {room / 2**30:,.1f} GiB: lower "
                f"max_batch_size={config.max_batch_size}, max_seq_length={config.max_seq_length} or n_pages={config.n_pages}.")

    @torch.no_grad()
    @_uncast
    def prepare(self) -> None:
        """Compile kernels and capture decode steps, once. The first job does it, after its prompts were found runnable."""
        if self._prepared:
            return
        self.runner.warm_up()
        if self.config.capture_cudagraph:
            self.runner.capture()
        self._prepared = True

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a prompt; the request's id. Raises ValueError, and queues nothing, for one that cannot be run."""
        if isinstance(params, SamplingParams) and params.n != 1:
            raise PromptError(f"submit queues one sample and params ask for n={params.n}: use submit_group.")
        return self.submit_group(prompt, params)[0]

    def submit_group(self, prompt: Prompt, params: SamplingParams | None = None) -> list[int]:
        """Queue `params.n` samples of a prompt, which is computed once; their request ids. Raises as `submit` does."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise PromptError(f"params is a {type(params).__name__}: give a SamplingParams, or a list with one a prompt.")
        if not self.has_work:
            self._check_weights()
        params = params.with_defaults(self.generation)
        if params.seed is None:
            params = replace(params, seed=random.Random(f"{self.config.seed} {self._next_id}").getrandbits(63))
        ids = encode_prompt(prompt, self.tokenizer, self.geometry.vocab_size, self.geometry.placeholder_ids)
        check_against_model(params, self.geometry.vocab_size, self.stop_ids, has_tokenizer=self.tokenizer is not None)
        group = Group(self._next_id) if params.n > 1 else None
        sequences = [Sequence(self._next_id + sample, ids, params, stop_ids=self.stop_ids,
                              max_seq_length=self.config.max_seq_length, group=group, sample=sample) for sample in range(params.n)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = Logprobs()
            prompt_logprobs.append(TokenLogprob(None, None), 0)
        now = time.perf_counter()
        for sequence in sequences:
            self.scheduler.add(sequence)
            self._requests[sequence.request_id] = Request(
                sequence, Detokenizer(self.tokenizer, params.stop), now, None if params.logprobs is None else Logprobs(),
                prompt_logprobs)
        self._next_id += params.n
        return [sequence.request_id for sequence in sequences]

    def abort(self, request_id: int) -> None:
        """End a request and free its pages; its completion holds what it had."""
        self.scheduler.abort(request_id)

    def completion(self, request_id: int) -> Completion:
        """A finished request's completion; the engine forgets the request. Raises ValueError where it is unfinished."""
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"there is no request {request_id}: it was never submitted, or its completion was taken already.")
        sequence = request.sequence
        if not sequence.is_finished:
            raise ValueError(f"request {request_id} is not finished: step until it is, or abort it first.")
        self._forget([request_id])
        return request.completion(self.weight_epoch)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @torch.no_grad()
    def step(self) -> list[TokenEvent]:
        """Run one plan: its prefill spans, then one decode step. The tokens it gave."""
        self.prepare()
        events, self._undelivered = self._undelivered, []
        return events + self._run(self.scheduler.plan())

    @_uncast
    def _run(self, plan: StepPlan) -> list[TokenEvent]:
        for sequence in (*(span.sequence for span in plan.prefill), *plan.decode):
            request = self._requests[sequence.request_id]
            request.epoch_started = self.weight_epoch if request.epoch_started is None else request.epoch_started
        mixed = self.config.mixed_prefill and bool(plan.prefill)
        drawn: list[dict[int, int]] = [{} for _ in range(plan.steps)]
        logprobs: list[dict[int, TokenLogprob]] = [{} for _ in range(plan.steps)]
        if plan.prefill:
            together = tuple(Span(s, s.num_computed, 1) for s in plan.decode) if mixed else ()
            score = {i for span in plan.prefill if self._requests[i := span.sequence.request_id].scores_prompt}
            found, seconds = self._timed(lambda: self.runner.prefill(plan.prefill + together, score=score))
            drawn[0] |= found.tokens
            logprobs[0] |= {request_id: one for request_id, (one,) in found.logprobs.items()}
            for span in plan.prefill:
                self._take_prompt(span, found.prompt.get(span.sequence.request_id, []))
            self.stats.prefill_s += seconds
            self.stats.prefill_tokens += sum(span.count for span in plan.prefill)
            self.stats.mixed_tokens += len(together)
        if plan.decode and not mixed:
            found, seconds = self._timed(lambda: self.runner.decode(plan.decode, steps=plan.steps))
            for step in range(plan.steps):
                drawn[step] |= {request_id: tokens[step] for request_id, tokens in found.tokens.items()}
                logprobs[step] |= {request_id: each[step] for request_id, each in found.logprobs.items()}
            self.stats.decode_s += seconds
        events = []
        for step, (tokens, known) in enumerate(zip(drawn, logprobs)):      # as if the host had looked after each of them
            if step:
                plan = StepPlan((), tuple(s for s in plan.decode if not s.is_finished), ())
                tokens = {s.request_id: tokens[s.request_id] for s in plan.decode}
            self.stats.decode_tokens += 0 if mixed else len(plan.decode)
            events += self._end_non_finite(tokens)
            self.scheduler.complete(plan, tokens)
            events += [self._event(request_id, token, known.get(request_id)) for request_id, token in tokens.items()]
        return events

    def _take_prompt(self, span: Span, scored: list[TokenLogprob]) -> None:
        """Keep what a span gave of its prompt's log-probabilities, for all samples; once they are whole, pages may be shared."""
        request = self._requests[span.sequence.request_id]
        if request.scores_prompt:
            request.take_prompt(span.start + 1, scored)
            if not request.scores_prompt:
                for other in self._requests.values():
                    if other.prompt_logprobs is request.prompt_logprobs:
                        other.sequence.must_compute_prompt = False

    def _timed(self, work: Callable[[], Drawn]) -> tuple[Drawn, float]:
        """What `work` gives, and its seconds without those that compiling and capturing took."""
        start, apart = time.perf_counter(), self.runner.compile_s + self.runner.capture_s
        found = work()
        return found, time.perf_counter() - start - (self.runner.compile_s + self.runner.capture_s - apart)

    def _end_non_finite(self, tokens: dict[int, int]) -> list[TokenEvent]:
        """Take requests whose logits or K/V broke out of the batch, and zero their pages before anyone else gets them."""
        events = []
        for request_id in [r for r, token in tokens.items() if token == NON_FINITE]:
            del tokens[request_id]
            request = self._requests[request_id]
            self.runner.scrub(request.sequence)
            self.scheduler.finish(request_id, "non_finite")
            events.append(TokenEvent(request_id, None, request.detokenizer.take(finished=True), "non_finite"))
        return events

    def _event(self, request_id: int, token: int, logprob: TokenLogprob | None) -> TokenEvent:
        request = self._requests[request_id]
        if logprob is not None:
            request.logprobs.append(logprob, request.sequence.params.logprobs)
        request.epoch_ended = self.weight_epoch
        sequence, detokenizer = request.sequence, request.detokenizer
        if len(sequence.output_ids) == 1:
            self.stats.ttft_ms.append(1e3 * (time.perf_counter() - request.submitted))
        stopped_by_id = sequence.finish_reason == "stop"
        if detokenizer.update(sequence.output_ids[:-1] if stopped_by_id else sequence.output_ids):
            self.scheduler.finish(request_id, "stop")
            sequence.finish_reason = "stop"      # also where the last token allowed completes the stop string
        return TokenEvent(request_id, token, detokenizer.take(sequence.is_finished), sequence.finish_reason, logprob)

    # ---- weights ------------------------------------------------------------------------------------------------

    @contextmanager
    def update_weights(self, policy: str = "drain") -> Iterator[None]:
        """Inside, the caller writes the weights in place; afterwards the weight epoch is one higher. K/V of an earlier epoch
        is never read again: with `drain` the requests that have started run to their end first, on the old weights; with
        `recompute` they keep their tokens and compute all K/V anew. An exception inside leaves the epoch as it was.
        """
        if policy not in ("drain", "recompute"):
            raise ValueError(f"policy={policy!r}: choose drain (started requests end on the old weights) or "
                             "recompute (they go on with the new ones).")
        self._check_weights()
        if policy == "drain":
            with torch.no_grad():
                while self.scheduler.has_started:
                    self._undelivered += self._run(self.scheduler.plan(only_started=True))
        yield
        self.scheduler.preempt_all()
        self._check_weights()
        self.weight_epoch += 1
        self.scheduler.forget_prefixes(self.weight_epoch)

    def use_adapter(self, path: str | None, policy: str = "drain") -> None:
        """Switch to the adapter in the directory `path`, or to the base for None, in place: nothing is captured anew."""
        if self.weight_source is None:
            raise RuntimeError("this engine's weights cannot take an adapter: build it on lora.DoubleCopy(model).inference "
                               "and attach the two.")
        self.weight_source.use(path, policy)

    # ---- whole jobs ---------------------------------------------------------------------------------------------

    def generate(self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None) -> list[Completion]:
        """Completions in the order of `prompts` (strings, chats: lists of messages, or lists of token ids), the n samples of each
        in a row.

        `params` is one for all or one a prompt. Raises ValueError before anything runs when a prompt cannot be run.
        """
        ids = self._submit_all(prompts, params)
        try:
            while any(not self._requests[i].sequence.is_finished for i in ids):
                self._step_for(ids)
            return [self.completion(i) for i in ids]
        finally:
            self._drop(ids)

    def stream(self, prompts: Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None,
               ) -> Iterator[tuple[int, int | None, str]]:
        """(index of the completion, token id, text) as tokens come, and (index, None, text) where a request ends because its
        numbers broke; closing the iterator ends the requests that are left."""
        ids = self._submit_all(prompts, params)
        index = {request_id: n for n, request_id in enumerate(ids)}
        try:
            while any(not self._requests[i].sequence.is_finished for i in ids) or self._left_for(index):
                for event in self._step_for(index):
                    yield index[event.request_id], event.token_id, event.text
        finally:
            self._drop(ids)

    def _left_for(self, ids: Collection[int]) -> list[TokenEvent]:
        """Events of these requests that were drawn while someone else stepped."""
        return [event for event in self._undelivered if event.request_id in ids]

    def _step_for(self, ids: Collection[int]) -> list[TokenEvent]:
        """What is left for these requests, or else one step's events of them; other requests' wait for their own reader."""
        events = self._undelivered if self._left_for(ids) else self.step()
        self._undelivered = [event for event in events if event.request_id not in ids]
        return [event for event in events if event.request_id in ids]

    def _forget(self, ids: Collection[int]) -> None:
        for request_id in ids:
            self._requests.pop(request_id, None)
        self._undelivered = [event for event in self._undelivered if event.request_id not in ids]

    def _drop(self, ids: list[int]) -> None:
        """End and forget what is left of these requests: a job that failed or was closed leaves nothing running."""
        for request_id in ids:
            self.abort(request_id)
        self._forget(ids)

    def _submit_all(self, prompts: Seq[Prompt], params) -> list[int]:
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            what = "string" if isinstance(prompts, str) else type(prompts).__name__
            raise PromptError(f"generate takes a list of prompts: put the {what} in a list.")
        prompts = list(prompts)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise PromptError(f"{len(prompts)} prompts and {len(each)} SamplingParams: give one for all, or one a prompt.")
        self._check_weights()
        ids: list[int] = []
        try:
            for n, (prompt, one) in enumerate(zip(prompts, each)):
                try:
                    ids += self.submit_group(prompt, one)
                except ValueError as error:
                    raise PromptError(f"prompt {n}: {error}") from error
            self.prepare()
        except BaseException:
            self._drop(ids)
            raise
        now = time.perf_counter()
        for request_id in ids:      # time to first token is the engine's, compiling and capture are reported apart
            self._requests[request_id].submitted = now
        return ids

    def _check_weights(self) -> None:
        """A weight that was rebound, not written in place, would leave the engine on the old one: an error, by name. Where one
        was written outside `update_weights`, nothing computed before is found in the prefix cache any more."""
        if (versions := self._versions()) != self._weights_seen:
            self._weights_seen, self._fingerprinted = versions, None
            self.scheduler.forget_prefixes(self.weight_epoch)
        mine = self.runner.addresses
        for name, tensor in (*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()):
            if name in mine and tensor.data_ptr() != mine[name]:
                raise RuntimeError(f"{name} of the model was rebound to new storage after the engine was made: "
                                   "write weights in place (tensor.copy_), or make a new engine.")
        for (size, *_), graph in self.runner.graphs.items():
            if moved := graph.moved():
                raise RuntimeError(f"{moved[0]} moved after the step of batch {size} was captured: write weights in place "
                                   "(tensor.copy_), or make a new engine.")

    @torch.no_grad()
    @_uncast
    def trace(self, prompt_ids: Seq[int], forced_ids: Seq[int]) -> Trace:
        """Run a prompt and then `forced_ids` one paged decode step each, whatever the model would draw, and keep every
        layer's stream. With captured steps the logits are those of the replay."""
        if self.has_work:
            raise RuntimeError("trace needs an idle engine: let its requests finish first.")
        if len(prompt_ids) + len(forced_ids) >= self.config.max_seq_length:
            raise PromptError(f"{len(prompt_ids)} prompt and {len(forced_ids)} forced ids do not fit "
                              f"max_seq_length={self.config.max_seq_length}: raise it.")
        forced_ids = encode_ids(forced_ids, self.geometry.vocab_size, self.geometry.placeholder_ids)
        params = SamplingParams(temperature=0.0, max_new_tokens=len(forced_ids) + 1, ignore_eos=True)
        request_id = self.submit(list(prompt_ids), params)
        try:
            self.prepare()
            return trace(self.scheduler, self.runner, self._requests[request_id].sequence, forced_ids)
        finally:
            self._drop([request_id])

    # ---- prompts in files ---------------------------------------------------------------------------------------

    def save_prompt(self, prompt: Prompt, path: str | PathLike) -> list[int]:
        """Compute a prompt and write its K/V to a file, for `load_prompt`; its token ids. Needs the prefix cache. Raises
        PromptStateError, and ValueError as `submit` does."""
        self._require_cache()
        done = self.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0.0))[0]
        prompt_state.save(path, done.prompt_ids, self.runner, self.weight_epoch, self._fingerprint())
        return done.prompt_ids

    def load_prompt(self, path: str | PathLike) -> list[int]:
        """Take up a prompt that `save_prompt` wrote; its token ids. Prompts that begin with them need not compute them while
        their pages are not needed otherwise. Raises PromptStateError."""
        self._require_cache()
        return prompt_state.load(path, self.runner, self.weight_epoch, self._fingerprint())

    def _require_cache(self) -> None:
        if not self.config.prefix_cache:
            raise prompt_state.PromptStateError("a prompt's state lives in the prefix cache: give EngineConfig(prefix_cache=True).")

    def _fingerprint(self) -> str:
        """Of the weights as they are."""
        self._check_weights()
        self._fingerprinted = self._fingerprinted or fingerprint(sorted(self.runner.weights.items()))
        return self._fingerprinted

    def _versions(self) -> int:
        """Grows with every write to a weight in place, but for writes through `.data`, which PyTorch does not count."""
        return sum(0 if weight.is_inference() else weight._version for weight in self.runner.weights.values())

    # ---- what it is made of -------------------------------------------------------------------------------------

    @property
    def notices(self) -> list[str]:
        """What runs otherwise than asked, and why."""
        return self.runner.notices

    @property
    def attention_backends(self) -> dict[str, str]:
        """The attention back end in use, by layer type."""
        return {kind: backend.name for kind, backend in self.runner.backends.items()}

    @property
    def stats(self) -> EngineStats:
        runner, stats = self.runner, self._stats
        stats.steps_replayed, stats.steps_eager = runner.steps_replayed, runner.steps_eager
        stats.compile_s, stats.capture_s = runner.compile_s, runner.capture_s
        for name, count in self._counts().items():
            setattr(stats, name, count - self._counts_before[name])
        return stats

    def _counts(self) -> dict[str, int]:
        """What the scheduler has counted since the engine was made."""
        scheduler, per_token = self.scheduler, self.geometry.kv_bytes_per_token(self.runner.dtype.itemsize)
        return {"num_preemptions": scheduler.num_preemptions, "prefix_hit_tokens": scheduler.prefix_hit_tokens,
                "group_hit_tokens": scheduler.group_hit_tokens, "shared_bytes": sum(
                    pages * self.config.page_size * per_token[kind] for kind, pages in scheduler.pages_shared.items())}

    def reset_stats(self) -> None:
        """Start counting anew; compile and capture time stay, since they are not repeated."""
        self.runner.steps_replayed = self.runner.steps_eager = 0
        self._counts_before = self._counts()
        self._stats = EngineStats()

    def memory_report(self) -> dict[str, int]:
        """Bytes of weights (each storage once), of what of them is in host memory, of the K/V pools by group, and of the
        sidecar."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.runner.weights.values()}
        table = self.runner.ple_table_bytes() if self.config.ple == "host" else 0
        report = {"weights": sum(storages.values()) - table, "ple_host": table}
        report |= {f"kv.{kind}": group.num_bytes() for kind, group in self.runner.cache.groups.items()}
        report["sidecar"] = self.runner.sidecar.num_bytes() if self.runner.sidecar else 0
        return report


def check_ple(text: nn.Module, geometry: ModelGeometry, config: EngineConfig) -> None:
    """Raise InvalidParameterError unless the table of per-layer embeddings is where `config.ple` says."""
    if not geometry.ple_width:
        if config.ple == "host":
            raise InvalidParameterError(f"ple='host' cannot be used: a {geometry.architecture} model has no per-layer embeddings.")
        return
    weight = table(text.embed_tokens_per_layer)
    place = (weight if isinstance(weight, Tensor) else weight.parts[0]).device.type
    if place != ("cpu" if config.ple == "host" else config.device):
        raise InvalidParameterError(f"the table of per-layer embeddings is in {place} memory and ple={config.ple!r}: load the "
                                    f"model with load_text_model(..., ple={config.ple!r}).")


def model_stop_ids(model: nn.Module, tokenizer) -> frozenset[int]:
    """The union of what tokenizer, config and generation config call an end of sequence."""
    found: set[int] = set()
    for source in (tokenizer, model.config, getattr(model, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        if source is tokenizer and ids == getattr(source, "unk_token_id", None):
            continue        # a name that its vocabulary lacks
        found |= set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)
