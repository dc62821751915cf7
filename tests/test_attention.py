"""Every path to attention over pages is softmax(scale q k^T) v, wherever the pages lie; the scale is 1 unless given."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex import attention
from gemma4_flex.attention import PagedBackend, flex_obstacle, gather_plan, grouped_sdpa, paged_sdpa
from tests.engines import SMALL
from tests.pools import Filled, decode_rows, filled_group, prefill_rows, random_queries, written_out

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TOLERANCE = 1e-5
BACKENDS = ["flex", "sdpa", "gathered sdpa"]
WINDOWED, FULL = {"window": 4, "head_dim": 16, "n_pages": 17}, {"head_dim": 32, "n_pages": 41}
# the engine tests' pools, so that flex kernels are compiled once for both
ENGINE_SHAPE = {"page_size": 4, "num_slots": 5, "max_seq_length": SMALL["max_seq_length"]}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():       # as the engine runs: kernels are compiled anew with autograd on
        yield


@pytest.fixture
def uncompiled(monkeypatch):
    """flex_attention's plain form, for shapes that are not worth C++ compiling."""
    monkeypatch.setattr(attention, "_compiled_flex", lambda: attention._flex)


def attend(name: str, filled: Filled, rows, q, *scale: float):
    backend = PagedBackend(name.removeprefix("gathered "), filled.group, {"decode": None, "prefill": None})
    backend.on_cpu = not name.startswith("gathered")      # on a CPU, sdpa takes prefill rows one by one
    return backend.attend(q, filled.group.keys[0], filled.group.values[0], rows, backend.plan(rows), 0, {}, *scale)


def error(name: str, filled: Filled, rows, heads: int = 4, *, scale: float | None = None, wanted: float = 1.0) -> float:
    """Largest difference from attention of the scale `wanted` written out in float64."""
    q = random_queries(rows, heads=heads, head_dim=filled.keys[next(iter(filled.keys))].shape[2])
    given = () if scale is None else (scale,)
    return (attend(name, filled, rows, q, *given).double() - written_out(q.double() * wanted, filled, rows)).abs().max().item()


# ---- the same number on every path --------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", [WINDOWED, FULL], ids=["sliding-16", "full-32"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_and_prefill_are_attention_written_out(backend, shape):
    lengths = {3: 7, 1: 13, 4: 1, 2: 20} if "window" not in shape else {3: 7, 1: 13, 4: 1, 2: 12}
    filled = filled_group(lengths, **shape, **ENGINE_SHAPE)
    last = {slot: n - 1 for slot, n in lengths.items()}
    assert error(backend, filled, decode_rows(last)) < TOLERANCE
    assert error(backend, filled, decode_rows({1: 12})) < TOLERANCE      # a smaller batch after a larger one
    spans = [(3, 0, 7), (1, 5, 8), (4, 0, 1), (2, 10, 2), (1, 0, 5)]
    assert error(backend, filled, prefill_rows(spans, width=32)) < TOLERANCE


@pytest.mark.parametrize("shape", [{"head_dim": 16}, {"head_dim": 32}, {"head_dim": 16, "window": 5, "page_size": 2},
                                   {"head_dim": 32, "window": 9, "page_size": 8},
                                   {"head_dim": 16, "kv_heads": 2, "heads": 6, "window": 3}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_head_size_window_and_group_is_attention_written_out(backend, shape, uncompiled):
    filled = filled_group({2: 19, 5: 3, 1: 9}, **shape)
    heads = shape.get("heads", 4)
    assert error(backend, filled, decode_rows({1: 8, 2: 18, 5: 2}), heads) < TOLERANCE
    assert error(backend, filled, prefill_rows([(2, 12, 7), (5, 0, 3)], width=8), heads) < TOLERANCE


@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scale_is_the_callers_and_one_over_root_head_dim_is_not_one(backend, head_dim, uncompiled):
    filled, scale = filled_group({2: 19}, head_dim=head_dim), head_dim**-0.5
    for rows in (decode_rows({2: 18}), prefill_rows([(2, 12, 7)], width=8)):
        assert error(backend, filled, rows, scale=scale, wanted=scale) < TOLERANCE
        assert error(backend, filled, rows, scale=scale) > 100 * TOLERANCE
        assert error(backend, filled, rows, wanted=scale) > 100 * TOLERANCE


@pytest.mark.parametrize("page_size", [64, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_around_a_block_are_exact_also_in_a_pool_with_fewer_pages_than_a_table_has_columns(backend, page_size):
    lengths = {1: 1, 2: 127, 3: 128, 4: 129, 5: 130}
    filled = filled_group(lengths, head_dim=32, page_size=page_size, n_pages=12, max_seq_length=2048)
    assert filled.group.columns > filled.group.num_pages
    assert error(backend, filled, decode_rows({slot: n - 1 for slot, n in lengths.items()})) < TOLERANCE


def test_bf16_keeps_scores_and_softmax_in_fp32():
    filled = filled_group({1: 60}, head_dim=32, dtype=torch.bfloat16)
    rows = decode_rows({1: 59})
    q = random_queries(rows, head_dim=32).bfloat16()
    exact = written_out(q, filled, rows)
    assert (attend("sdpa", filled, rows, q).double() - exact).abs().max() < 2**-7 * exact.abs().max()


# ---- what must not matter -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("backend", BACKENDS)
def test_where_pages_lie_changes_no_bit(backend):
    results = []
    for page_seed in (1, 2, 3):
        filled = filled_group({2: 30, 1: 14}, page_seed=page_seed, **FULL, **ENGINE_SHAPE)
        rows = decode_rows({2: 29, 1: 13, 0: 0, 3: 0})
        q = random_queries(rows, head_dim=32)
        results.append(attend(backend, filled, rows, q)[:2])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_which_slots_hold_the_sequences_changes_no_bit(backend):
    results = []
    for slots in ((1, 2, 3, 4), (3, 1, 4, 2)):
        lengths = dict(zip(slots, (30, 14, 5, 22)))
        filled = filled_group(lengths, **FULL, **ENGINE_SHAPE)
        rows = decode_rows({slot: n - 1 for slot, n in lengths.items()})
        results.append(attend(backend, filled, rows, random_queries(rows, head_dim=32)))
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rows_neighbours_change_no_bit(backend):
    filled = filled_group({1: 30, 2: 14, 3: 5, 4: 22}, **FULL, **ENGINE_SHAPE)
    q = random_queries(decode_rows({1: 29, 2: 13, 3: 4, 4: 21}), head_dim=32)
    together = attend(backend, filled, decode_rows({1: 29, 2: 13, 3: 4, 4: 21}), q)
    beside_padding = attend(backend, filled, decode_rows({1: 29, 0: 0, 3: 0, 4: 0}), q)
    assert torch.equal(together[0], beside_padding[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_past_a_rows_count_see_nothing_and_spoil_nothing(backend):
    """Rows are 32 wide and the window 4: most places of a short row have an empty window."""
    filled = filled_group({1: 6, 2: 13}, **WINDOWED, **ENGINE_SHAPE)
    rows = prefill_rows([(1, 5, 1), (2, 8, 5), (0, 0, 1), (0, 0, 1), (0, 0, 1)], width=32)
    q = random_queries(rows)
    out = attend(backend, filled, rows, q)
    assert out.isfinite().all()
    alone = attend(backend, filled, prefill_rows([(1, 5, 1)] + [(0, 0, 1)] * 4, width=32), q[[0, 6, 7, 8, 6]])
    assert torch.equal(out[0], alone[0])


def test_fewer_columns_gather_fewer_pages_and_change_nothing():
    filled = filled_group({1: 9, 2: 5}, head_dim=32)
    rows = decode_rows({1: 8, 2: 4})
    near = rows._replace(columns=torch.arange(3))
    q = random_queries(rows, head_dim=32)[:, :, None]
    all_columns, in_reach = (gather_plan(filled.group, r) for r in (rows, near))
    assert all_columns.pool_rows.shape == (2, 128)
    assert in_reach.pool_rows.shape == (2, 12)
    far_and_near = [paged_sdpa(q, filled.group.keys[0], filled.group.values[0], plan) for plan in (all_columns, in_reach)]
    assert torch.allclose(*far_and_near, atol=1e-6)


def test_folded_heads_are_torchs_grouped_heads():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((6, 3), (2, 5), (2, 5)))
    seen = torch.rand(2, 1, 3, 5, generator=generator) > 0.3
    seen[..., 0] = True
    grouped = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=1.0, enable_gqa=True)
    assert torch.allclose(grouped_sdpa(q, k, v, seen), grouped, atol=1e-6)


# ---- where flex cannot run ----------------------------------------------------------------------------------------

def test_a_machine_without_a_cpp_compiler_is_told_what_to_install(monkeypatch):
    from torch._inductor import cpp_builder

    def none():
        raise RuntimeError("no compiler")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert "install g++" in flex_obstacle("cpu")
    assert flex_obstacle("cuda") is None


def test_a_machine_with_a_cpp_compiler_has_no_obstacle():
    assert flex_obstacle("cpu") is None
