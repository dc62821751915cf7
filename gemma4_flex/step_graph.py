"""Capture a step once, replay it.

On CUDA a step becomes a `torch.cuda.CUDAGraph`. On a CPU the same function is traced once to a graph of tensor
operations and replayed: whatever a CUDA graph would freeze (Python numbers, branches, rebound tensors) is frozen there
too, and shows in tests. A step may not ask the device for a value; one that does cannot be captured, and says where.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex.compiled import Regions

# operations whose result, or whose result's shape, the host has to wait for
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
              "unique_consecutive", "repeat_interleave.Tensor", "item", "equal.default", "is_nonzero", "bincount")


class CaptureError(RuntimeError):
    """A step that cannot be captured; the message says why."""


class NoHostReads(TorchDispatchMode):
    """Raises CaptureError at any operation that reads a device value on the host. A custom operator is one operation:
    what runs inside it is not looked at."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__ if isinstance(func, torch._ops.OpOverload) else str(func)
        if any(name.startswith(f"{op}.") or name == op for op in HOST_READS):
            raise CaptureError(f"the step reads a device value on the host: aten.{name}. "
                               "Compute it on the device, or hand it to the step in a static buffer.")
        if name.startswith(("index.Tensor", "index_put", "_index_put_impl_")) and _by_mask(*args[:3]):
            raise CaptureError("the step indexes by a bool mask: the result's shape depends on device values. "
                               "Use torch.where.")
        return func(*args, **(kwargs or {}))


def _by_mask(x: Tensor, indices: list[Tensor | None], values: Tensor | None = None) -> bool:
    """Whether `x[indices]`, read or written, has to count a mask's entries; one value for all is a plain masked fill."""
    return any(i is not None and i.dtype == torch.bool for i in indices) and (values is None or values.numel() != 1)


class StepGraph:
    """A captured step: `StepGraph.capture(fn)` runs `fn` on its static buffers, `replay()` runs it again.

    `fn` takes no arguments: it reads and writes tensors that stay where they are. What it returned at capture is what
    `replay()` returns, holding the new values.
    """

    def __init__(self, replay: Callable[[], object], watched: dict[str, tuple[Tensor, int]]):
        self._replay = replay
        self._watched = watched

    @classmethod
    def capture(cls, fn: Callable[[], object], static: dict[str, Tensor], *, pool=None, regions: Regions | None = None,
                ) -> StepGraph:
        """Capture `fn`; `static` names every tensor it reads through its storage (weights, pools, buffers).

        `pool` is a CUDA graph memory pool to share between captures. `regions` are the compiled regions that `fn` runs
        (compiled.py), if it does: on a CPU their calls are what is replayed. Raises CaptureError when `fn` reads a device
        value on the host or cannot be traced.
        """
        device = next(iter(static.values())).device
        watched = {name: (tensor, tensor.data_ptr()) for name, tensor in static.items()}
        with torch.no_grad():
            if device.type == "cuda":
                return cls(cls._record_cuda(fn, pool), watched)
            return cls(cls._trace(fn) if regions is None else regions.record(fn), watched)

    @staticmethod
    def _record_cuda(fn: Callable[[], object], pool) -> Callable[[], object]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):       # warm up off the default stream: compiles and allocates what is lazy
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool):
                outputs = fn()
        except RuntimeError as error:
            raise CaptureError(f"CUDA could not capture the step: {error}") from error

        def replay() -> object:
            graph.replay()
            return outputs
        return replay

    @staticmethod
    def _trace(fn: Callable[[], object]) -> Callable[[], object]:
        with NoHostReads():
            fn()
        try:
            return make_fx(lambda: fn(), tracing_mode="fake", _allow_non_fake_inputs=True)()   # fn may have defaults
        except Exception as error:
            raise CaptureError(f"the step cannot be traced: {error}") from error

    def replay(self) -> object:
        """Run the captured step on what its static tensors hold now."""
        with torch.no_grad():
            return self._replay()

    def moved(self) -> list[str]:
        """Names of static tensors that are no longer where they were captured: the graph would read the old storage."""
        return [name for name, (tensor, address) in self._watched.items() if tensor.data_ptr() != address]
