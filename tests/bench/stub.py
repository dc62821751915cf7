"""A device that works on its own clock, and an engine that runs on it: time without waiting for any."""
from __future__ import annotations

from types import SimpleNamespace

from torch import nn

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.params import EngineConfig

CONFIG = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 64,
    "vocab_size_per_layer_input": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 32, "sliding_window": 4,
    "hidden_size_per_layer_input": 8, "final_logit_softcapping": 30.0, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
}


def geometry() -> ModelGeometry:
    return ModelGeometry.from_config(CONFIG)


class AsyncDevice:
    """Launches return at once; the work is only done, and the clock only moves, when someone waits for it."""

    def __init__(self):
        self.now = self.queued = 0.0

    def launch(self, seconds: float) -> None:
        self.queued += seconds

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def clock(self) -> float:
        return self.now


class WordTokenizer:
    """A token a character; a BOS that is one token; a chat template with turn markers, or none."""

    bos_token = "<bos>"

    def __init__(self, chat_template: str | None = "own"):
        self.chat_template = chat_template

    def apply_chat_template(self, messages, *, chat_template=None, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        if chat_template is None:
            return self.bos_token + "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<model>"
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)   # as transformers sets it up
        return environment.from_string(chat_template).render(
            messages=messages, bos_token=self.bos_token, add_generation_prompt=True)

    def __call__(self, text: str, *, add_special_tokens: bool):
        assert not add_special_tokens
        ids, bos = [], self.bos_token
        while text:
            ids.append(2 if text.startswith(bos) else 3 + ord(text[0]))
            text = text[len(bos):] if text.startswith(bos) else text[1:]
        return {"input_ids": ids}


class StubEngine:
    """Answers every prompt with `reply` tokens; prefill takes 1 ms a token and a decode step `step_s`.

    With `waits` off, its timers stop before the device has done anything, as those of a careless engine do.
    """

    def __init__(self, device: AsyncDevice, *, reply: int = 5, step_s: float = 0.01, first_extra_s: float = 0.0,
                 waits: bool = True, changes: bool = False):
        self.device, self.reply, self.step_s, self.waits, self.changes = device, reply, step_s, waits, changes
        self.first_extra_s, self.calls = first_extra_s, 0
        self.params = self.logprobs = None
        StubEngine.last = self
        self.sizing = ""
        self.notices = ["sdpa instead of flex: no C++ compiler here"]
        self.attention_backends = {"sliding_attention": "flex", "full_attention": "sdpa"}
        self.runner = SimpleNamespace(buckets=[1, 2, 4, 8], column_buckets=[1, 2, 64], token_buckets=[16, 2048])
        self.config = EngineConfig(device="cpu").resolved("cpu")
        self.geometry, self.tokenizer, self.model = geometry(), WordTokenizer(), nn.Module()
        self.stats = SimpleNamespace(prefill_tokens=0, decode_tokens=0, prefill_s=0.0, decode_s=0.0, steps_replayed=0,
                                     steps_eager=0, num_preemptions=0, compile_s=0.5, capture_s=0.25, ttft_ms=[])

    def _run(self, seconds: float) -> float:
        start = self.device.clock()
        self.device.launch(seconds)
        if self.waits:
            self.device.synchronize()
        return self.device.clock() - start

    def generate(self, prompts, params):
        self.calls, self.params = self.calls + 1, params
        steps, samples = self.reply - 1, getattr(params, "n", 1)
        tokens = sum(map(len, prompts))
        self.stats.prefill_s += self._run(1e-3 * tokens)
        self.stats.ttft_ms += [1e3 * self.device.clock()] * len(prompts)
        self.stats.decode_s += self._run(steps * self.step_s + (self.first_extra_s if self.calls == 1 else 0))
        self.stats.prefill_tokens += tokens
        self.stats.decode_tokens += steps * len(prompts) * samples
        self.stats.steps_replayed += steps
        first = self.calls if self.changes else 0
        return [SimpleNamespace(token_ids=[first, *range(1, self.reply)], text="Paris.", finish_reason="stop",
                                logprobs=self.logprobs)
                for _ in prompts for _ in range(samples)]

    def memory_report(self):
        return {"weights": 1000}
