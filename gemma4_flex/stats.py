"""What an engine counts. Host only."""
from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EngineStats:
    """Counts and seconds since the engine was made or `reset_stats`; compile and capture stand apart from the steps."""
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    mixed_tokens: int = 0        # drawn in prefill passes, with mixed_prefill
    steps_replayed: int = 0
    steps_eager: int = 0
    num_preemptions: int = 0
    prefix_hit_tokens: int = 0   # taken over from the prefix cache, or from another sample of the prompt, and never computed
    group_hit_tokens: int = 0
    shared_bytes: int = 0        # of K/V pages so taken over, and not allocated again
    ttft_ms: list[float] = field(default_factory=list)
    compile_s: float = 0.0
    capture_s: float = 0.0
