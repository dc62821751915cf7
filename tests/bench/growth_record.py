"""A record of growth with round figures: sliding attention flat, full attention 10 µs and 20 µs per 1,000 tokens."""
from __future__ import annotations


def summary(median: float) -> dict:
    return {"median": median, "min": 0.9 * median, "max": 1.1 * median, "relative": 0.2, "n": 3}


def row(batch: int, context: int, n_pages: int, ms: float, **more) -> dict:
    return {"batch": batch, "context": context, "n_pages": n_pages, "ms_per_step": summary(ms) | {"all": [ms]}, "floor_ms": ms / 2,
            "floor_fraction": 0.5, "attention_us": {}, "steps_replayed": 48, "steps_eager": 0} | more


def record() -> dict:
    def alone(context: int) -> dict:
        return {"sliding_attention": summary(min(context, 512) / 16), "full_attention": summary(10 + context / 50)}
    groups = {"full_attention": {"window": None}, "sliding_attention": {"window": 512}}
    return {
        "benchmark": "bench_growth", "model_name": "tiny", "dtype": "float32", "device": "cpu", "device_name": "A CPU",
        "threads": 1, "versions": {"torch": "2.13.0", "transformers": "5.24.0"}, "geometry": {"groups": groups},
        "sizes": {"context": 256, "pool_batch": 4, "rounds": 3, "steps": 16},
        "context": [row(1, n, 33, 2 + n / 1000, attention_us=alone(n)) for n in (100, 1000, 2000, 4000)],
        "batch": [row(1, 256, 65, 2.0), row(4, 256, 65, 4.0)],
        "pool": [row(4, 256, 33, 3.0), row(4, 256, 129, 3.0)],
        "scheduler": [{"running": 8, "us_per_step": summary(7), "p99_us": summary(9)},
                      {"running": 256, "us_per_step": summary(150), "p99_us": summary(180)}]}
