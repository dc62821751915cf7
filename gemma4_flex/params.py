"""What a caller may ask for: `SamplingParams` for one request, `EngineConfig` for one engine.

Both are frozen and checked when they are made, and every default of the project stands here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gemma4_flex.kernel_options import check_options

DEFAULT_PAGE_SIZE = {"cuda": 128, "cpu": 32}
DEFAULT_ATTENTION = {"cuda": "flex", "cpu": "sdpa"}
LARGEST = 1e30
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


class InvalidParameterError(ValueError):
    """A parameter has a value that cannot be used; the message says which values can."""


def _require_int(name: str, value: object, *, minimum: int) -> None:
    # bool is an int in Python, and True for a size is a slip, not a size.
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidParameterError(f"{name}={value!r} cannot be used: give a whole number of at least {minimum}.")


def _require_number(name: str, value: object, fits: Callable[[float], bool], says: str, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    # not NaN, and small enough that no sum of it with a logit leaves fp32
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST or not fits(value):
        raise InvalidParameterError(f"{name}={value!r} cannot be used: give {says}.")


def _require_seed(seed: object) -> None:
    _require_int("seed", seed, minimum=0)
    if seed >= 1 << 63:
        raise InvalidParameterError(f"seed={seed} cannot be used: give one below 2^63.")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameterError(f"{name}={value!r} cannot be used: give True or False.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise InvalidParameterError(f"{name}={value!r} cannot be used: choose one of {listed}.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    max_new_tokens: most tokens to generate, the stop token included.
    n: samples of the prompt, which differ and repeat as a set.
    temperature, top_k, top_p, min_p, repetition_penalty: as transformers' processors have them; temperature 0.0 is greedy,
        top_k 0 and top_p 1.0 keep everything. None: what the checkpoint's generation config says, else off.
    presence_penalty, frequency_penalty: taken from the logits of generated tokens, once and by their count.
    logit_bias: a mapping, what is added to the logits of these ids; kept as sorted pairs.
    allowed_token_ids: the only ids that may be drawn, None for all. banned_token_ids: those that may not.
    seed: decides the draws, below 2^63; requests that are to be independent need seeds of their own. None: the engine's seed
        and the request's number decide.
    logprobs: None, or how many alternatives to give beside each generated token's log-probabilities (0: none).
    prompt_logprobs: the same of the prompt's tokens.
    ignore_eos: the model's own stop ids do not end the request; `stop_token_ids` still do.
    min_new_tokens: no stop id may be drawn before this many tokens are generated.
    stop: texts that end the request where they first appear (a single str is taken as one of them).
    stop_token_ids: ids that end the request, added to the model's own.

    Raises InvalidParameterError for a value that cannot be used.
    """

    max_new_tokens: int = 128
    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, minimum=1)
        _require_int("n", self.n, minimum=1)
        _require_int("min_new_tokens", self.min_new_tokens, minimum=0)
        _require_bool("ignore_eos", self.ignore_eos)
        _require_number("temperature", self.temperature, lambda x: x >= 0, "0.0 (greedy) or more")
        _require_number("top_p", self.top_p, lambda x: 0 < x <= 1, "a share above 0.0 and up to 1.0")
        _require_number("min_p", self.min_p, lambda x: 0 <= x <= 1, "a share from 0.0 to 1.0")
        _require_number("repetition_penalty", self.repetition_penalty, lambda x: 1e-6 <= x <= 1e6,
                        "a factor above 0.0 (1e-6 to 1e6), 1.0 for none")
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), lambda x: True, "a finite number", optional=False)
        for name in ("top_k", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), minimum=0)
        if self.seed is not None:
            _require_seed(self.seed)
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidParameterError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second."
            )
        # A frozen dataclass is written once, here, so that lists given by a caller cannot change under the engine.
        object.__setattr__(self, "stop", self._checked_stop())
        for name in ("stop_token_ids", "banned_token_ids", "allowed_token_ids"):
            object.__setattr__(self, name, self._checked_ids(name))
        object.__setattr__(self, "logit_bias", self._checked_bias())
        if self.allowed_token_ids is not None and not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise InvalidParameterError(
                "allowed_token_ids and banned_token_ids leave no id that could be drawn: take one out of the bans.")

    def with_defaults(self, generation: Mapping[str, object]) -> SamplingParams:
        """These parameters with every None that a checkpoint's generation config answers filled in; what it does not say is
        off, and one that does not say do_sample is greedy. Raises InvalidParameterError for a value of it that cannot be used."""
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        found = {name: default if generation.get(name) is None else generation[name] for name, default in off.items()}
        if not generation.get("do_sample"):
            found["temperature"] = 0.0
        missing = {name: value for name, value in found.items() if getattr(self, name) is None}
        try:
            return dataclasses.replace(self, **missing)
        except InvalidParameterError as error:
            raise InvalidParameterError(f"the checkpoint's generation config: {error} Give your own.") from None

    def _checked_stop(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, Iterable):
            raise InvalidParameterError(f"stop={self.stop!r} cannot be used: give a text or a list of texts.")
        texts = tuple(texts)
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidParameterError(f"stop={self.stop!r} cannot be used: every stop must be a non-empty text.")
        return texts

    def _checked_ids(self, name: str) -> tuple[int, ...] | None:
        given = getattr(self, name)
        if given is None and name == "allowed_token_ids":
            return None
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise InvalidParameterError(f"{name}={given!r} cannot be used: give a list of token ids.")
        ids = tuple(given)
        for token in ids:
            _require_int(f"a {name} entry", token, minimum=0)
        return ids

    def _checked_bias(self) -> tuple[tuple[int, float], ...]:
        try:
            biases = dict(self.logit_bias)
        except (TypeError, ValueError):
            raise InvalidParameterError(
                f"logit_bias={self.logit_bias!r} cannot be used: give a mapping of token ids to numbers.") from None
        for token, bias in biases.items():
            _require_int("a logit_bias id", token, minimum=0)
            _require_number(f"logit_bias[{token}]", bias, lambda x: True, "a finite number, or ban the id", optional=False)
        return tuple(sorted(biases.items()))


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is set up; `resolved` replaces every None and "auto".

    device: "auto", "cpu" or "cuda".
    dtype: "auto", "float32" or "bfloat16"; float16 is refused because Gemma-4's activations overflow it.
    attention: "flex" (compiled flex_attention), "sdpa" (pages gathered, then scaled_dot_product_attention) or "auto": flex on
        a GPU, sdpa on a CPU, where it is part of the compiled step.
    shared_kv: "paged" (shared layers read their owner's pages) or "sidecar" (they read a fixed-address copy).
    ple: where the table of per-layer embeddings is, "device" or "host": in (pinned) host memory, out of which a step fetches the
        rows of its tokens.
    capture_cudagraph: capture one decode graph per batch bucket and replay it.
    compile: compile steps with Inductor.
    decode_steps_per_sync: most decode steps that run before the host looks at what they drew; what is drawn is the same.
    mixed_prefill: compute waiting prompts and the running sequences' next tokens in one pass where both are due.
    prefix_cache: keep the pages of computed prompts, as long as nobody needs them, for prompts that begin alike.
    deterministic: compute every token by one captured shape, so that a request's tokens and log-probabilities are bitwise the
        same alone and in any batch; prompts take as long as if they were generated, max_batch_size tokens a step.
    max_batch_size: most sequences running at once.
    max_seq_length: most tokens of a sequence, prompt and output together.
    n_pages: pages of the full-attention group, the reserved page 0 included; None: what a full batch of the longest sequences
        needs, or as many of them as gpu_memory_utilization leaves room for.
    gpu_memory_utilization: share of the device's memory (on a CPU: of the machine's) that weights, a step and K/V may take.
    page_size: tokens a page holds, a power of two.
    max_prefill_tokens: most prompt tokens computed in one step, over all sequences.
    decode_kernel_options, prefill_kernel_options: flex_attention `kernel_options` that override the engine's table.
    fa4_prefill: True forces FlashAttention-4 for prefill, None leaves the choice to the engine.
    seed: seed of everything random.

    Raises InvalidParameterError for a value that cannot be used.
    """

    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    shared_kv: str = "paged"
    ple: str = "device"
    capture_cudagraph: bool = False
    compile: bool = True
    decode_steps_per_sync: int = 8
    mixed_prefill: bool = False
    prefix_cache: bool = False
    deterministic: bool = False
    max_batch_size: int = 8
    max_seq_length: int = 2048
    n_pages: int | None = None
    gpu_memory_utilization: float | None = None
    page_size: int | None = None
    max_prefill_tokens: int = 2048
    decode_kernel_options: dict | None = None
    prefill_kernel_options: dict | None = None
    fa4_prefill: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require_choice("device", self.device, ("auto", "cpu", "cuda"))
        if self.dtype == "float16":
            raise InvalidParameterError(
                "dtype='float16' cannot be used: Gemma-4's activations overflow it; use 'bfloat16' or 'float32'."
            )
        _require_choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _require_choice("attention", self.attention, ("auto", "flex", "sdpa"))
        _require_choice("shared_kv", self.shared_kv, ("paged", "sidecar"))
        _require_choice("ple", self.ple, ("device", "host"))
        for name in ("capture_cudagraph", "compile", "mixed_prefill", "prefix_cache", "deterministic"):
            _require_bool(name, getattr(self, name))
        _require_int("decode_steps_per_sync", self.decode_steps_per_sync, minimum=1)
        _require_int("max_batch_size", self.max_batch_size, minimum=1)
        # One prompt token and one new one: anything shorter could not run a single request.
        _require_int("max_seq_length", self.max_seq_length, minimum=2)
        _require_int("max_prefill_tokens", self.max_prefill_tokens, minimum=1)
        _require_seed(self.seed)
        if self.n_pages is not None:
            # Page 0 is reserved, so a pool of one page holds nothing.
            _require_int("n_pages", self.n_pages, minimum=2)
            if self.gpu_memory_utilization is not None:
                raise InvalidParameterError("n_pages and gpu_memory_utilization both size the pools: give one of them.")
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1):
            raise InvalidParameterError(f"gpu_memory_utilization={share!r} cannot be used: give a share such as 0.9.")
        if self.page_size is not None:
            self._check_page_size()
        if self.fa4_prefill is not None:
            _require_bool("fa4_prefill", self.fa4_prefill)
        for name in ("decode_kernel_options", "prefill_kernel_options"):
            self._check_kernel_options(name)

    def _check_page_size(self) -> None:
        size = self.page_size
        _require_int("page_size", size, minimum=1)
        if size & (size - 1):
            below = 1 << (size.bit_length() - 1)
            raise InvalidParameterError(
                f"page_size={size} cannot be used: give a power of two, such as {below} or {2 * below}."
            )

    def _check_kernel_options(self, name: str) -> None:
        options = getattr(self, name)
        if options is None:
            return
        if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
            raise InvalidParameterError(
                f"{name}={options!r} cannot be used: give a mapping of option names to values, "
                'such as {"num_stages": 2}.'
            )
        try:
            check_options(options)
        except ValueError as error:
            raise InvalidParameterError(f"{name}: {error}") from None
        object.__setattr__(self, name, dict(options))

    def resolved(self, device_type: str) -> EngineConfig:
        """Return a config in which no field is None or "auto", but for fa4_prefill, which the card decides; this one stays as it
        is. Of n_pages and gpu_memory_utilization, one sizes the pools and the other is None.

        device_type: "cuda" or "cpu", the best kind of device present; a `device` that was asked for by name wins
        over it, and "cuda" where there is none raises InvalidParameterError.
        """
        assert device_type in DEFAULT_DTYPE, device_type
        if self.device == "cuda" and device_type != "cuda":
            raise InvalidParameterError(
                "device='cuda' cannot be used: PyTorch sees no CUDA device here; use device='cpu' or 'auto'."
            )
        device = device_type if self.device == "auto" else self.device
        page_size = self.page_size or DEFAULT_PAGE_SIZE[device]
        pages_a_sequence = -(-self.max_seq_length // page_size)
        return dataclasses.replace(
            self,
            device=device,
            dtype=DEFAULT_DTYPE[device] if self.dtype == "auto" else self.dtype,
            attention=DEFAULT_ATTENTION[device] if self.attention == "auto" else self.attention,
            page_size=page_size,
            n_pages=self.n_pages or (None if self.gpu_memory_utilization else 1 + self.max_batch_size * pages_a_sequence),
            decode_kernel_options=self.decode_kernel_options or {},
            prefill_kernel_options=self.prefill_kernel_options or {},
        )
