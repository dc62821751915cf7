"""What a caller may ask for: `SamplingParams` for one request, `EngineConfig` for one engine.

Both are frozen and checked when they are made, and every default of the project stands here and nowhere else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gemma4_flex.kernel_options import check_options

DEFAULT_PAGE_SIZE = {"cuda": 128, "cpu": 32}
DEFAULT_ATTENTION = {"cuda": "flex", "cpu": "sdpa"}
DEFAULT_DTYPE = {"cuda": "bfloat16", "cpu": "float32"}


class InvalidParameterError(ValueError):
    """A parameter has a value that cannot be used; the message says which values can."""


def _require_int(name: str, value: object, *, minimum: int) -> None:
    # bool is an int in Python, and True for a size is a slip, not a size.
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidParameterError(f"{name}={value!r} cannot be used: give a whole number of at least {minimum}.")


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
    temperature: 0.0, greedy; anything else is refused until sampling exists.
    ignore_eos: the model's own stop ids do not end the request; `stop_token_ids` still do.
    min_new_tokens: no stop id may be drawn before this many tokens are generated.
    stop: texts that end the request where they first appear (a single str is taken as one of them).
    stop_token_ids: ids that end the request, added to the model's own.

    Raises InvalidParameterError for a value that cannot be used.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_int("max_new_tokens", self.max_new_tokens, minimum=1)
        _require_int("min_new_tokens", self.min_new_tokens, minimum=0)
        _require_bool("ignore_eos", self.ignore_eos)
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, (int, float)) or self.temperature:
            raise InvalidParameterError(
                f"temperature={self.temperature!r} cannot be used: sampling comes later, this version is greedy; "
                "leave temperature at 0."
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidParameterError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}: "
                "lower the first or raise the second."
            )
        # A frozen dataclass is written once, here, so that lists given by a caller cannot change under the engine.
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_token_ids())

    def _checked_stop(self) -> tuple[str, ...]:
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, Iterable):
            raise InvalidParameterError(f"stop={self.stop!r} cannot be used: give a text or a list of texts.")
        texts = tuple(texts)
        if not all(isinstance(text, str) and text for text in texts):
            raise InvalidParameterError(f"stop={self.stop!r} cannot be used: every stop must be a non-empty text.")
        return texts

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        if not isinstance(self.stop_token_ids, Iterable) or isinstance(self.stop_token_ids, str):
            raise InvalidParameterError(
                f"stop_token_ids={self.stop_token_ids!r} cannot be used: give a list of token ids."
            )
        ids = tuple(self.stop_token_ids)
        for token in ids:
            _require_int("a stop_token_ids entry", token, minimum=0)
        return ids


@dataclass(frozen=True)
class EngineConfig:
    """How one engine is set up; `resolved` replaces every None and "auto".

    device: "auto", "cpu" or "cuda".
    dtype: "auto", "float32" or "bfloat16"; float16 is refused because Gemma-4's activations overflow it.
    attention: "flex" (compiled flex_attention), "sdpa" (pages gathered, then scaled_dot_product_attention) or "auto": flex on
        a GPU, sdpa on a CPU, where it is part of the compiled step.
    shared_kv: "paged" (shared layers read their owner's pages) or "sidecar" (they read a fixed-address copy).
    capture_cudagraph: capture one decode graph per batch bucket and replay it.
    compile: compile steps with Inductor.
    decode_steps_per_sync: most decode steps that run before the host looks at what they drew; what is drawn is the same.
    mixed_prefill: compute waiting prompts and the running sequences' next tokens in one pass where both are due.
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
    capture_cudagraph: bool = False
    compile: bool = True
    decode_steps_per_sync: int = 8
    mixed_prefill: bool = False
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
        for name in ("capture_cudagraph", "compile", "mixed_prefill"):
            _require_bool(name, getattr(self, name))
        _require_int("decode_steps_per_sync", self.decode_steps_per_sync, minimum=1)
        _require_int("max_batch_size", self.max_batch_size, minimum=1)
        # One prompt token and one new one: anything shorter could not run a single request.
        _require_int("max_seq_length", self.max_seq_length, minimum=2)
        _require_int("max_prefill_tokens", self.max_prefill_tokens, minimum=1)
        _require_int("seed", self.seed, minimum=0)
        if self.seed >= 1 << 63:
            raise InvalidParameterError(f"seed={self.seed} cannot be used: give one below 2^63.")
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
        """Return a config in which no field is None or "auto"; this one stays as it is. Of n_pages and gpu_memory_utilization,
        one sizes the pools and the other is None.

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
            fa4_prefill=bool(self.fa4_prefill),
        )
