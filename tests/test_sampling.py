"""Drawing: greedy by the largest logit; otherwise transformers' processors in their order, and draws a seed alone decides."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as hf

from gemma4_flex.draws import DrawTable, Features, together
from gemma4_flex.params import SamplingParams
from gemma4_flex.sampling import NON_FINITE, allowed, alternatives, draw, gumbel, keep_top, philox, tempered
from gemma4_flex.sequence import Sequence

INF, NAN = float("inf"), float("nan")
VOCAB = 40


# ---- greedy ---------------------------------------------------------------------------------------------------------

def drawn(rows, ban=None, banned=None, dtype=torch.float32) -> list[int]:
    logits = torch.tensor(rows, dtype=dtype)
    ban = torch.tensor(ban or [False] * len(rows))
    return draw(logits, ban, torch.tensor(banned or [[0, 0]] * len(rows)), torch.zeros(len(rows), dtype=torch.long))[0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype):
    assert drawn([[1, 3, 3, 2], [5, 5, 5, 5], [0, 1, 2, 30]], dtype=dtype) == [1, 0, 3]


def test_a_bf16_tie_is_a_tie_though_fp32_values_would_differ():
    assert drawn([[29.99, 30.0]], dtype=torch.bfloat16) == [0]
    assert drawn([[29.99, 30.0]]) == [1]


def test_only_rows_with_a_ban_lose_their_banned_ids():
    rows = [[1, 9, 8, 7]] * 4
    assert drawn(rows, [True, True, False, True], [[1, 1], [1, 2], [1, 2], [3, 3]]) == [2, 3, 1, 1]


def test_a_banned_id_is_not_drawn_even_where_all_others_are_lower():
    assert drawn([[-30, 30]], [True], [[1, 1]]) == [0]


@pytest.mark.parametrize("broken", [[NAN, 1.0], [1.0, NAN], [INF, 0.0], [-INF, -INF]])
def test_a_row_that_broke_is_marked_and_its_neighbours_are_drawn(broken):
    assert drawn([[0, 1], broken, [1, 0]]) == [1, NON_FINITE, 0]


def test_a_nan_under_a_ban_elsewhere_still_marks_the_row():
    assert drawn([[NAN, 1, 2]], [True], [[2, 2]]) == [NON_FINITE]


# ---- the rows of requests -------------------------------------------------------------------------------------------

class Rows:
    """Rows of a table, one a request: `params` are SamplingParams fields; prompts and outputs are the same for all."""

    def __init__(self, *params: dict, prompt=(3, 5, 7), output=(5, 9, 9), vocab: int = VOCAB):
        self.table = DrawTable(len(params) + 1, vocab, "cpu")
        self.sequences = []
        for n, fields in enumerate(params, start=1):
            sample = fields.pop("sample", 0)
            p = SamplingParams(**({"seed": 11} | fields)).with_defaults({"do_sample": True})
            s = Sequence(n, list(prompt), p, stop_ids=frozenset(), max_seq_length=999, sample=sample)
            s.slot, s.output_ids = n, list(output)
            self.sequences.append(s)
        self.features = self.table.assign(self.sequences, 1)
        self.slots = torch.arange(1, len(params) + 1)
        self.draws = self.table.rows(self.slots, self.features)
        self.no_ban = torch.zeros(len(params), dtype=torch.bool), torch.full((len(params), 1), -1)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """What is drawn from, [B, V]."""
        scores = allowed(logits.float(), *self.no_ban, self.draws, self.features)
        return tempered(scores, self.draws, self.features).log_softmax(-1) if self.features.random else scores.log_softmax(-1)

    def draw(self, logits: torch.Tensor, position: int = 9) -> torch.Tensor:
        return draw(logits, *self.no_ban, torch.full_like(self.slots, position), self.draws, self.features)[0]


def hf_distribution(logits: torch.Tensor, prompt=(3, 5, 7), output=(5, 9, 9), **fields) -> torch.Tensor:
    """The same by transformers' processors, in the order of its `_get_logits_processor`; penalties that it lacks by their
    definition. logits [V]."""
    scores = logits.float()[None].clone()
    ids = torch.tensor([[*prompt, *output]])
    if fields.get("logit_bias"):
        scores = hf.SequenceBiasLogitsProcessor([[[i], float(b)] for i, b in fields["logit_bias"].items()])(ids, scores)
    if fields.get("repetition_penalty", 1.0) != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"])(ids, scores)
    for token in set(output):
        scores[0, token] -= fields.get("presence_penalty", 0.0) + fields.get("frequency_penalty", 0.0) * output.count(token)
    if fields.get("banned_token_ids"):
        scores = hf.SuppressTokensLogitsProcessor(list(fields["banned_token_ids"]), device="cpu")(ids, scores)
    if fields.get("allowed_token_ids"):
        scores = hf.PrefixConstrainedLogitsProcessor(lambda batch, so_far: list(fields["allowed_token_ids"]), 1)(ids, scores)
    scores = hf.TemperatureLogitsWarper(float(fields.get("temperature", 1.0)))(ids, scores)
    if fields.get("top_k"):
        scores = hf.TopKLogitsWarper(fields["top_k"])(ids, scores)
    if fields.get("top_p", 1.0) < 1:
        scores = hf.TopPLogitsWarper(fields["top_p"])(ids, scores)
    if fields.get("min_p"):
        scores = hf.MinPLogitsWarper(fields["min_p"])(ids, scores)
    return scores[0].log_softmax(-1)


ASKED = [
    {}, {"temperature": 0.3}, {"temperature": 2.0}, {"top_k": 1}, {"top_k": 7}, {"top_k": 400}, {"top_p": 0.53}, {"top_p": 0.97},
    {"top_p": 1e-6}, {"min_p": 0.2}, {"min_p": 1.0}, {"repetition_penalty": 1.5}, {"repetition_penalty": 0.6},
    {"presence_penalty": 0.8}, {"frequency_penalty": -0.7}, {"logit_bias": {1: 4.0, 30: -2.5, 5: 0.5}},
    {"banned_token_ids": (0, 4, 39)}, {"allowed_token_ids": (2, 5, 9, 31)}, {"allowed_token_ids": (2, 5, 9), "top_k": 2},
    {"temperature": 0.7, "top_k": 5}, {"top_k": 6, "top_p": 0.63}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "temperature": 1.4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": {9: 3.0, 7: -1.0},
     "banned_token_ids": (8,), "temperature": 0.9, "top_k": 12, "top_p": 0.8},
]
KINDS = {"smooth": lambda g: 4 * torch.randn(VOCAB, generator=g),
         "bf16": lambda g: (8 + torch.randn(VOCAB, generator=g)).bfloat16(),
         "whole": lambda g: torch.randint(-3, 4, (VOCAB,), generator=g).float(), "flat": lambda g: torch.zeros(VOCAB)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_distribution_is_that_of_transformers_processors(asked, kind):
    for seed in range(5):
        logits = KINDS[kind](torch.Generator().manual_seed(seed))
        wanted = hf_distribution(logits, **asked)
        found = Rows(dict(asked)).distribution(logits[None])[0]
        if kind != "smooth":      # which of equals transformers' unstable sort keeps is chance; how many is not
            found, wanted = found.sort().values, wanted.sort().values
        assert torch.equal(found.isinf(), wanted.isinf()), (found.exp(), wanted.exp())
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [8, 16, VOCAB])
def test_sorting_fewer_logits_keeps_the_same(width):
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    top_k, top_p = torch.tensor([1, 3, 8, 5, 2, 8]), torch.tensor([1.0, 0.5, 0.9, 0.99, 0.2, 1.0])
    assert torch.equal(keep_top(logits, top_k, top_p, width), keep_top(logits, top_k, top_p, VOCAB))


@pytest.mark.parametrize("top_p", [0.3, 0.5, 1e-6])
def test_top_p_after_top_k_is_a_share_of_what_is_left_and_never_of_nothing(top_p):      # B99
    logits = torch.log(torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3]))[None]
    p = Rows({"top_k": 2, "top_p": top_p}, vocab=5, prompt=[1], output=[]).distribution(logits).exp()
    assert p.sum().item() == pytest.approx(1) and (p > 0).sum() == 1 and p.argmax() == 4      # .3 of .55 is more than a half
    equals = Rows({"top_k": 2, "top_p": top_p}, vocab=5, prompt=[1], output=[]).distribution(torch.zeros(1, 5)).exp()
    assert equals.sum().item() == pytest.approx(1) and (equals > 0).sum() >= 1


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_neighbours_change_nothing_of_a_row(asked):      # B100: what others ask for is neutral here, bit for bit
    logits = 4 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    alone = Rows(dict(asked))
    others = [dict(other) for other in ASKED] + [{"temperature": 0.0}]
    beside = Rows(dict(asked), *others)
    a, b = alone.distribution(logits), beside.distribution(logits.expand(len(others) + 1, -1))[:1]
    assert torch.equal(a.isinf(), b.isinf())
    torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert [alone.draw(logits, p)[0] for p in range(40)] == [
        beside.draw(logits.expand(len(others) + 1, -1), p)[0] for p in range(40)]


# ---- draws ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("counter, key, words", [      # known answers of the authors' Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_gives_its_authors_known_answers(counter, key, words):
    found = philox(tuple(torch.tensor([n]) for n in counter), tuple(torch.tensor([n]) for n in key))
    assert tuple(word.item() for word in found) == words


def test_draws_follow_their_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -1.0, 2.5, -30.0, 0.5]])
    asked = {"temperature": 0.8, "top_k": 6, "top_p": 0.95}
    wanted = hf_distribution(logits[0], prompt=[1], output=[], **asked).exp()
    rows = Rows(*[dict(asked) for _ in range(500)], vocab=8, prompt=[1], output=[])
    counts = sum(torch.bincount(rows_of(rows, logits, position), minlength=8) for position in range(40)).double()
    n = counts.sum()
    assert n == 20_000 and counts[wanted == 0].sum() == 0
    kept = wanted > 0
    chi_squared = ((counts[kept] - n * wanted[kept]) ** 2 / (n * wanted[kept])).sum()
    assert chi_squared < 25, chi_squared      # five kept ids at most: 1 in 10,000 at 4 degrees of freedom is 23.5


def rows_of(rows: Rows, logits: torch.Tensor, position: int) -> torch.Tensor:
    """One draw a row, each row with a seed of its own."""
    draws = rows.draws._replace(seed_low=torch.arange(len(rows.slots)))
    return draw(logits.expand(len(rows.slots), -1), *rows.no_ban, torch.full_like(rows.slots, position), draws, rows.features)[0]


def test_noise_is_gumbel_and_finite():
    noise = gumbel(torch.arange(64), torch.zeros(64, dtype=torch.long), torch.zeros(64, dtype=torch.long),
                   torch.arange(64), 4096)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01) and noise.var().item() == pytest.approx(1.6449, abs=0.02)
    assert (noise > 10).float().mean().item() == pytest.approx(4.54e-5, rel=0.5)      # the tail is there, which wins
    assert len(noise.unique()) > 0.99 * noise.numel()


@pytest.mark.parametrize("change", [{"seed": 12}, {"seed": 11 + (1 << 40)}, {"sample": 1}])
def test_another_seed_or_sample_draws_otherwise_and_the_same_one_the_same(change):
    logits = torch.zeros(1, VOCAB)

    def tokens(**fields) -> list[int]:
        rows = Rows(fields)
        return [rows.draw(logits, position).item() for position in range(64)]
    first, other = tokens(), tokens(**change)
    assert first == tokens() and first != other
    assert sum(a == b for a, b in zip(first, other)) < 12      # 64 / 40 by chance
    assert len(set(first)) > 20, "positions differ too"


def test_temperature_0_is_greedy_beside_rows_that_are_not():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = Rows({"temperature": 0.0}, {"temperature": 5.0})
    found = [rows.draw(logits.expand(2, -1), position).tolist() for position in range(30)]
    assert {token for token, _ in found} == {logits.argmax().item()} and len({token for _, token in found}) > 5


def test_the_coldest_temperature_is_finite_and_takes_the_largest():
    rows = Rows({"temperature": 1e-30, "logprobs": 0})
    logits = 30 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    ids, logprobs = draw(logits, *rows.no_ban, torch.tensor([4]), rows.draws, rows.features)
    assert ids.item() == logits.argmax() and logprobs[0, 1] == 0


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"top_k": 5}, {"temperature": 0.0, "repetition_penalty": 1.5}])
def test_a_row_that_broke_is_marked_however_it_draws(fields):
    rows = Rows(dict(fields), dict(fields))
    logits = torch.randn(2, VOCAB)
    logits[1, 5] = NAN
    assert [token == NON_FINITE for token in rows.draw(logits).tolist()] == [False, True]


# ---- log-probabilities ----------------------------------------------------------------------------------------------

def test_raw_ones_are_of_the_logits_and_processed_ones_of_what_was_drawn_from():      # B92
    asked = {"temperature": 0.7, "top_k": 5, "logprobs": 3, "repetition_penalty": 1.4}
    logits = 3 * torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2)).bfloat16()
    rows = Rows(dict(asked), {"temperature": 0.0, "logprobs": 0})
    for position in range(20):
        ids, logprobs = draw(logits, *rows.no_ban, torch.full_like(rows.slots, position), rows.draws, rows.features)
        wanted = hf_distribution(logits[0], temperature=0.7, top_k=5, repetition_penalty=1.4)
        assert wanted.exp().sum().item() == pytest.approx(1) and (wanted > -INF).sum() == 5
        raw = logits.float().log_softmax(-1)
        torch.testing.assert_close(logprobs[:, 0], raw.gather(1, ids[:, None])[:, 0], atol=1e-5, rtol=0)
        torch.testing.assert_close(logprobs[0, 1], wanted[ids[0]], atol=1e-5, rtol=0)
        assert logprobs[1, 1] == 0, "a greedy draw could be no other"
    found, values = alternatives(logits, 3)
    best = logits.float().log_softmax(-1).topk(3)
    assert torch.equal(values.argsort(descending=True), torch.arange(3).expand(2, -1))
    torch.testing.assert_close(values, best.values, atol=1e-5, rtol=0)
    assert torch.equal(logits.gather(1, found).float(), logits.float().gather(1, best.indices))


def test_logits_are_left_as_they_were():
    rows = Rows({"top_k": 3, "repetition_penalty": 2.0, "logprobs": 2})
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    draw(logits, torch.tensor([True]), torch.tensor([[1, 1]]), torch.tensor([3]), rows.draws, rows.features)
    assert torch.equal(logits, before)


# ---- compiled -------------------------------------------------------------------------------------------------------

def test_compiled_draws_are_the_uncompiled_ones():
    from gemma4_flex.compiled import PLANS, Regions, compile_obstacle
    if compile_obstacle("cpu"):
        pytest.skip("no C++ compiler")
    regions = Regions(PLANS["cpu"])
    fields = [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
              {"temperature": 0.0, "banned_token_ids": (3,)}, {"top_p": 0.5, "logprobs": 2}]
    rows = Rows(*fields)
    assert rows.features == Features(True, True, VOCAB, True, 8) == together([rows.features])
    for seed in range(8):
        logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(seed, seed + 4)
        args = (logits, *rows.no_ban, positions, rows.draws)
        wanted_ids, wanted = draw(*args, rows.features)
        ids, logprobs = regions(("draw",), lambda *given: draw(*given, rows.features), *args)
        assert torch.equal(ids, wanted_ids)
        torch.testing.assert_close(logprobs, wanted, atol=1e-5, rtol=0)
