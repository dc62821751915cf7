"""The result of a job of several ranks, made of the results of their shares.

Tokens, steps and answers add up. Ranks work at the same time, so seconds are the slowest rank's, and a rate is everybody's tokens
over them, which is never more than the sum of the ranks' own rates. Milliseconds a step and shares of the floor are means over
the ranks, weighted by their steps and seconds. Bandwidth and matmul rate are measured by all ranks at once and add up.
"""
from __future__ import annotations

import statistics
from collections.abc import Sequence

from gemma4_flex.bench.measure import summarize
from gemma4_flex.bench.report import length_summary
from gemma4_flex.bench.workload import EncodedPrompt, longest_shared_prefix

RATES = ("decode_tps", "prefill_tps", "ms_per_step", "job_tps")
FRACTIONS = {"floor_fraction": "decode_s", "prefill_floor_fraction": "prefill_s"}      # and the seconds they are shares of
OF_A_RANK = ("device_name", "threads", "rounds", "warmup_rounds", "compile_s", "capture_s", "peak_memory_bytes",
             "bandwidth_bytes_per_s", "matmul_flop_per_s", "floor", "prefill_floor", "token_agreement")


def over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def merge_rounds(rows: Sequence[dict]) -> dict:
    """One round of the job from the same round of every rank, which all began at once (`report.build_result`'s rows)."""
    merged = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, list):
            merged[name] = [item for part in values for item in part]
        elif name.endswith("_s"):
            merged[name] = max(values)
        elif isinstance(value, int):
            merged[name] = sum(values)
    for name, seconds in FRACTIONS.items():
        unknown = any(row[name] is None and row[seconds] for row in rows)
        merged[name] = None if unknown else over(
            sum(row[name] * row[seconds] for row in rows if row[seconds]), sum(row[seconds] for row in rows))
    steps = merged["steps_replayed"] + merged["steps_eager"]
    return merged | {
        "prefill_tps": over(merged["prefill_tokens"], merged["prefill_s"]),
        "decode_tps": over(merged["decode_tokens"], merged["decode_s"]),
        "ms_per_step": over(1e3 * sum(row["decode_s"] for row in rows), steps),
        "job_tps": (merged["prefill_tokens"] + merged["decode_tokens"]) / merged["wall_s"]}


def merge_results(results: Sequence[dict], prompts: Sequence[EncodedPrompt]) -> dict:
    """The job's result from those of the ranks, by rank; `prompts` are all of the job's. What each rank measured is kept whole
    under `ranks`."""
    first = results[0]
    completions = [completion for result in results for completion in result["completions"]]
    rounds = [merge_rounds(rows) for rows in zip(*(result["rounds"] for result in results), strict=True)]
    summaries = {name: summarize([row[name] for row in rounds]) for name in RATES}
    summaries["ttft_ms"] = summarize([ms for row in rounds for ms in row["ttft_ms"]])
    fractions = {name: summarize([row[name] for row in rounds]) for name in FRACTIONS}
    return first | {
        "ranks": [{"rank": rank, "prompts": result["workload"]["n_prompts"]} | {name: result[name] for name in OF_A_RANK}
                  for rank, result in enumerate(results)],
        "completions": completions, "rounds": rounds,
        "warmup_rounds": [merge_rounds(rows) for rows in zip(*(result["warmup_rounds"] for result in results), strict=True)],
        "workload": first["workload"] | {
            "n_prompts": len(prompts), "longest_shared_prefix": longest_shared_prefix([prompt.ids for prompt in prompts]),
            "prompt_tokens": length_summary([len(prompt.ids) for prompt in prompts]),
            "output_tokens": length_summary([len(completion["token_ids"]) for completion in completions])},
        **{f"{name}_median": found and found.median for name, found in summaries.items()},
        **{name: found and found.median for name, found in fractions.items()},
        "spread": {name: found and found.as_dict() for name, found in summaries.items()},
        "token_agreement": sum(r["token_agreement"] * len(r["completions"]) for r in results) / len(completions),
        "floor": first["floor"] | {name: mean_of_known([result["floor"][name] for result in results])
                                   for name in ("kv_bytes_per_step", "ms_per_step")},
        "prefill_floor": first["prefill_floor"] | {
            "flops": sum(result["prefill_floor"]["flops"] for result in results),
            "memory_bytes": sum(result["prefill_floor"]["memory_bytes"] for result in results),
            "ms_per_round": max(result["prefill_floor"]["ms_per_round"] for result in results)},
        "answers": {name: sum(result["answers"][name] for result in results) for name in first["answers"]},
        "fits": [{"tokens": fit["tokens"], "sequences": sum(result["fits"][n]["sequences"] for result in results)}
                 for n, fit in enumerate(first["fits"])],
        **{name: sum(result[name] for result in results)
           for name in ("steps_replayed", "steps_eager", "bandwidth_bytes_per_s", "matmul_flop_per_s")},
        **{name: max(result[name] for result in results) for name in ("compile_s", "capture_s", "peak_memory_bytes")},
        "notices": list(dict.fromkeys(notice for result in results for notice in result["notices"])),
    }
