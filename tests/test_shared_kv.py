"""The sidecar holds what the owner's pages hold, for owners that are read, and reads like them."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex.attention import gather_plan, paged_sdpa
from gemma4_flex.checkpoints.published import published_geometry
from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.shared_kv import Sidecar
from tests.pools import decode_rows, filled_group, prefill_rows, random_queries
from tests.tiny import FULL, SLIDING, tiny_config

TINY = ModelGeometry.from_config(tiny_config())
MAX_SEQ, PAGE = 40, 4
OWNER = {SLIDING: 2, FULL: 3}       # what layers 4 and 5 read


def sidecar_like(filled, kind: str) -> Sidecar:
    """A sidecar with the group's sequences in it, position by position, and garbage elsewhere."""
    sidecar = Sidecar(TINY, 9, MAX_SEQ, PAGE, torch.float32, "cpu")
    for buffer in sidecar.tensors().values():
        buffer.fill_(1e4)
    for slot, keys in filled.keys.items():
        positions = torch.arange(len(keys))
        sidecar.write(sidecar.buffers(OWNER[kind]), keys, filled.values[slot], torch.full_like(positions, slot), positions)
    return sidecar


@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_it_reads_what_the_owners_pages_say(kind):
    head_dim, window = {SLIDING: (16, 4), FULL: (32, None)}[kind]
    filled = filled_group({1: 1, 7: 39, 3: 12}, window=window, head_dim=head_dim, max_seq_length=MAX_SEQ)
    sidecar = sidecar_like(filled, kind)
    for rows in (decode_rows({1: 0, 7: 38, 3: 11}), prefill_rows([(7, 30, 9), (3, 0, 12), (1, 0, 1)], width=16)):
        q = random_queries(rows, head_dim=head_dim)
        paged = rows.join(paged_sdpa(rows.split(q), filled.group.keys[0], filled.group.values[0], gather_plan(filled.group, rows)))
        read = sidecar.attend(q, sidecar.buffers(OWNER[kind]), rows, sidecar.plan(kind, rows))
        assert torch.allclose(read, paged, atol=1e-6)


def test_only_owners_that_shared_layers_read_have_buffers():
    sidecar = Sidecar(TINY, 5, MAX_SEQ, PAGE, torch.float32, "meta")
    assert {i: tuple(b.shape) for i, b in sidecar.keys.items()} == {2: (5, 1, MAX_SEQ, 16), 3: (5, 1, MAX_SEQ, 32)}
    assert sidecar.values.keys() == sidecar.keys.keys()
    assert sidecar.num_bytes() == 2 * 5 * MAX_SEQ * (16 + 32) * 4


@pytest.mark.parametrize(("name", "owners"), [("E2B", [13, 14]), ("E4B", [22, 23])])
def test_shipped_models_have_two_read_owners(name, owners):
    sidecar = Sidecar(published_geometry(name), 2, 16, 16, torch.bfloat16, "meta")
    assert sorted(sidecar.keys) == owners
    assert sidecar.windows == {SLIDING: 512, FULL: None}


def test_a_model_that_shares_nothing_has_an_empty_sidecar():
    alone = ModelGeometry.from_config(tiny_config(num_kv_shared_layers=0))
    assert Sidecar(alone, 5, MAX_SEQ, PAGE, torch.float32, "cpu").num_bytes() == 0


def test_an_owner_nobody_reads_has_nothing_to_write_to():
    sidecar = Sidecar(TINY, 5, MAX_SEQ, PAGE, torch.float32, "cpu")
    assert [sidecar.buffers(owner) is None for owner in range(4)] == [True, True, False, False]


def test_buffers_hold_whole_pages():
    sidecar = Sidecar(TINY, 2, 38, PAGE, torch.float32, "meta")
    assert sidecar.max_seq_length == 40
    assert {b.shape[2] for b in sidecar.tensors().values()} == {40}


def test_fewer_columns_read_fewer_positions_and_change_nothing():
    filled = filled_group({1: 9, 2: 5}, head_dim=32, max_seq_length=MAX_SEQ)
    sidecar = sidecar_like(filled, FULL)
    rows = decode_rows({1: 8, 2: 4})
    near = rows._replace(columns=torch.arange(3))
    q = random_queries(rows, head_dim=32)
    plans = [sidecar.plan(FULL, r) for r in (rows, near)]
    assert [plan.pool_rows.shape for plan in plans] == [(2, MAX_SEQ), (2, 12)]
    assert torch.allclose(*(sidecar.attend(q, sidecar.buffers(3), r, plan) for r, plan in zip((rows, near), plans)), atol=1e-6)


def test_a_write_reaches_its_slot_and_position_alone():
    sidecar = Sidecar(TINY, 5, MAX_SEQ, PAGE, torch.float32, "cpu")
    keys, values = torch.full((1, 1, 16), 3.0), torch.full((1, 1, 16), 5.0)
    sidecar.write(sidecar.buffers(2), keys, values, torch.tensor([4]), torch.tensor([7]))
    assert (sidecar.keys[2][4, 0, 7] == 3).all()
    assert (sidecar.values[2][4, 0, 7] == 5).all()
    assert sum(b.count_nonzero().item() for b in sidecar.tensors().values()) == 2 * 16


def test_scrubbing_zeroes_one_slot():
    sidecar = Sidecar(TINY, 3, MAX_SEQ, PAGE, torch.float32, "cpu")
    for buffer in sidecar.tensors().values():
        buffer.fill_(float("nan"))
    sidecar.scrub(1)
    for buffer in sidecar.tensors().values():
        assert not buffer[1].any()
        assert buffer[[0, 2]].isnan().all()


@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_pages_taken_over_are_loaded_where_they_would_have_been_written(kind):
    head_dim, window = {SLIDING: (16, 4), FULL: (32, None)}[kind]
    filled = filled_group({1: 10, 3: 6}, window=window, head_dim=head_dim, max_seq_length=MAX_SEQ)
    group, owner = filled.group, OWNER[kind]
    group.keys, group.values = {owner: group.keys[0]}, {owner: group.values[0]}
    filled.table.publish(1, [b"0", b"1", b"2"])
    filled.table.adopt(2, [b"0", b"1", b"2"], 9)
    group.apply(filled.table.drain_changes())
    group.copy_pages(filled.table.drain_copies())
    sidecar = Sidecar(TINY, 9, MAX_SEQ, PAGE, torch.float32, "cpu")
    for buffer in sidecar.tensors().values():
        buffer.fill_(7)
    assert filled.table.drain_adopted() == [2]
    sidecar.load(kind, 2, filled.table.held(2), group)
    start = 0 if window is None else PAGE      # a query at 9 sees 6 to 9
    for buffers, written in ((sidecar.keys, filled.keys), (sidecar.values, filled.values)):
        assert torch.equal(buffers[owner][2, :, start:9], written[1][start:9].transpose(0, 1))
        assert (buffers[owner][[0, 1, 3]] == 7).all() and (buffers[owner][2, :, :start] == 7).all()
        assert all((buffer == 7).all() for other, buffer in buffers.items() if other != owner)


def test_nothing_is_loaded_where_no_shared_layer_reads_or_nothing_is_held():
    alone = ModelGeometry.from_config(tiny_config(num_kv_shared_layers=0))
    filled = filled_group({1: 4})
    Sidecar(alone, 5, MAX_SEQ, PAGE, torch.float32, "cpu").load(FULL, 1, filled.table.held(1), filled.group)
    Sidecar(TINY, 5, MAX_SEQ, PAGE, torch.float32, "cpu").load(FULL, 1, [], filled.group)
