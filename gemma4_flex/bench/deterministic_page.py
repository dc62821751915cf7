"""What `bench.deterministic` found, as tables. Needs no torch."""
from __future__ import annotations

from collections.abc import Callable

from gemma4_flex.bench.table import Table, spread


def proved(record: dict) -> bool:
    """Whether every request of deterministic mode had the same bits in every arrangement."""
    return all(found["same_tokens"] == found["same_logprobs"] == found["requests"]
               for found in record["proof"]["deterministic"].values())


def told(record: dict, form: Callable[[Table], str]) -> str:
    """The proof and the cost, each table in `form`."""
    def counts(found: dict) -> list[str]:
        largest = found["largest_difference"]
        return [f"{found[key]} of {found['requests']}" for key in ("same_tokens", "same_logprobs")] + [
            "" if largest is None else f"{largest:.1e}" if largest else "0"]
    proof = [[how, *counts(on), *counts(record["proof"]["off"][how])] for how, on in record["proof"]["deterministic"].items()]
    cost = []
    for job, c in record["cost"].items():
        for figure, says, digits in (("prefill_tps", "prefill, tok/s", 0), ("decode_tps", "decode, tok/s", 0),
                                     ("wall_s", "whole job, s", 3)):
            cost.append([job, says, *(spread(c[mode][figure], digits) for mode in ("deterministic", "off")),
                         spread(c["deterministic_over_off"][figure], 2)])
    return "\n\n".join((
        form(Table(["against alone", "deterministic: same tokens", "same log-probabilities", "largest difference",
                    "off: same tokens", "same log-probabilities", "largest difference"], proof)),
        form(Table(["job", "", "deterministic", "off", "deterministic / off"], cost))))
