"""A captured step replays on what its buffers hold now, and a step that cannot be captured says why."""

from __future__ import annotations

import pytest
import torch

from gemma4_flex.step_graph import CaptureError, NoHostReads, StepGraph

MASK = torch.tensor([True, False, True])


def buffers() -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([1.0, 2.0, 3.0]), "w": torch.tensor([2.0, 2.0, 2.0]), "out": torch.zeros(3)}


def capture(fn, static) -> StepGraph:
    return StepGraph.capture(fn, static)


def test_a_replay_computes_on_what_the_buffers_hold_now():
    b = buffers()
    graph = capture(lambda: b["x"] * b["w"], b)
    b["x"].copy_(torch.tensor([10.0, 20.0, 30.0]))
    assert graph.replay().tolist() == [20, 40, 60]
    b["w"].fill_(1)
    assert graph.replay().tolist() == [10, 20, 30]


def test_a_replay_writes_into_buffers_in_place():
    b = buffers()

    def step():
        b["out"].index_copy_(0, torch.tensor([2, 0, 1]), b["x"])
        return b["out"].sum()
    graph = capture(step, b)
    b["x"].fill_(5)
    assert graph.replay().item() == 15
    assert b["out"].tolist() == [5, 5, 5]


def test_a_python_number_is_frozen_as_a_cuda_graph_would_freeze_it():
    b, factor = buffers(), [2]
    graph = capture(lambda: b["x"] * factor[0], b)
    factor[0] = 100
    assert graph.replay().tolist() == [2, 4, 6]


def test_a_function_with_default_arguments_can_be_captured():
    b = buffers()
    graph = capture(lambda n=3: b["x"] + n, b)
    assert graph.replay().tolist() == [4, 5, 6]


HOST_READS = {
    "item": lambda x: x.sum().item(),
    "float()": lambda x: float(x[0]),
    "a branch on a value": lambda x: x if x[0] > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
    "where with one argument": lambda x: torch.where(x > 0),
    "reading by a bool mask": lambda x: x[MASK],
    "writing by a bool mask": lambda x: x.clone().index_put_((MASK,), torch.tensor([1.0, 2.0])),
    "masked_select": lambda x: x.masked_select(MASK),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "equal": lambda x: torch.equal(x, x + 1),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave by a tensor": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("read", HOST_READS.values(), ids=HOST_READS.keys())
def test_a_step_that_reads_the_device_on_the_host_cannot_be_captured(read):
    b = buffers()
    with pytest.raises(CaptureError, match=r"reads a device value|bool mask"):
        capture(lambda: read(b["x"] + 0), b)


ON_THE_DEVICE = {
    "where": lambda x: torch.where(x > 1, x, 0),
    "index by ids": lambda x: x[torch.tensor([0, 2])],
    "one value by a mask": lambda x: x.clone().index_put_((MASK,), torch.tensor(0.0)),
    "scatter": lambda x: x.scatter(0, torch.tensor([1]), -torch.inf),
    "max": lambda x: x.max(dim=0),
    "isfinite": lambda x: torch.isfinite(x).all(),
}


@pytest.mark.parametrize("op", ON_THE_DEVICE.values(), ids=ON_THE_DEVICE.keys())
def test_what_stays_on_the_device_passes_the_check(op):
    with NoHostReads():
        op(buffers()["x"] + 0)


def test_a_step_that_cannot_be_traced_is_a_capture_error_with_its_cause():
    runs = []

    def step():     # passes the check, and breaks when it is traced
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("second time")
        return torch.zeros(1)
    with pytest.raises(CaptureError, match="cannot be traced: second time"):
        capture(step, buffers())


def test_a_tensor_that_moved_is_named():
    b = {"x": torch.ones(3), "w": torch.nn.Parameter(torch.ones(3), requires_grad=False)}
    graph = capture(lambda: b["x"] * b["w"], b)
    b["w"].mul_(3)
    assert graph.moved() == []
    assert graph.replay().tolist() == [3, 3, 3]
    b["w"].data = torch.ones(3)
    assert graph.moved() == ["w"]


def test_a_capture_keeps_no_autograd_graph():
    weight = torch.nn.Parameter(torch.ones(3))
    graph = capture(lambda: weight * 2, {"w": weight})
    assert not graph.replay().requires_grad
