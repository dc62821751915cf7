"""Make torch believe in a GPU that is not there, so that Inductor plans and writes kernels for it.

It leans on private parts of torch (seen working on torch 2.13.0) and patches torch.cuda for the rest of the process, so
run it in a process of its own. Triton need not be installed to plan kernels; to write flex kernels it must be.
"""
from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch._inductor.scheduler  # before `pretend` replaces the has_triton it binds
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


@dataclass(frozen=True)
class GPU:
    """A card as Inductor asks for it. `shared_limit`: bytes of shared memory one block may opt in to."""
    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_limit: int

    @property
    def target(self) -> int:
        return self.capability[0] * 10 + self.capability[1]

    def properties(self) -> types.SimpleNamespace:
        """What torch.cuda.get_device_properties would say, as far as Inductor reads it."""
        major, minor = self.capability
        return types.SimpleNamespace(
            name=self.name, major=major, minor=minor, multi_processor_count=self.num_sms, total_memory=80 * 2**30,
            max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32, regs_per_multiprocessor=65_536,
            shared_memory_per_block=49_152, shared_memory_per_block_optin=self.shared_limit,
            shared_memory_per_multiprocessor=self.shared_limit + 1024, L2_cache_size=50 * 2**20, gcnArchName="",
            clock_rate=1_980_000, memory_clock_rate=3_201_000, memory_bus_width=6144, is_integrated=0, is_multi_gpu_board=0,
            pci_bus_id=0, uuid="")


# name, compute capability, multiprocessors, bytes of shared memory a block may opt in to (CUDA C++ Programming Guide,
# table "Technical Specifications per Compute Capability")
GPUS = {
    "sm_80": GPU("A100", (8, 0), 108, 166_912),
    "sm_90": GPU("H100, H200", (9, 0), 132, 232_448),
    "sm_100": GPU("B200", (10, 0), 148, 232_448),
}


def pretend(gpu: GPU) -> None:
    """Make torch and, where it is installed, Triton believe that `gpu` is there; may be called again for another one."""
    import torch._dynamo.device_interface as device_interface
    import torch.utils._triton
    properties = gpu.properties()
    cuda, interface = torch.cuda, device_interface.CudaInterface
    answers = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_properties": properties,
               "get_device_capability": gpu.capability, "_lazy_init": None, "synchronize": None, "set_device": None,
               "set_rng_state": None, "get_rng_state": torch.empty(16, dtype=torch.uint8), "_exchange_device": 0,
               "_maybe_exchange_device": 0}
    for name, answer in answers.items():
        setattr(cuda, name, _says(answer))
    inductor = [module for name, module in list(sys.modules.items()) if name.startswith("torch._inductor")]
    for module in (torch.utils._triton, *inductor):
        for name in ("has_triton", "has_triton_package"):
            if hasattr(module, name):
                setattr(module, name, _says(True))
    interface.Worker.get_device_properties = interface.get_device_properties = staticmethod(_says(properties))
    interface.Worker.current_device = staticmethod(_says(0))
    interface.get_compute_capability = staticmethod(_says(gpu.target))
    interface.is_available = interface.is_triton_capable = staticmethod(_says(True))
    interface.raise_if_triton_unavailable = staticmethod(_says(None))
    if importlib.util.find_spec("triton") is not None:
        _pretend_driver(gpu)


def _pretend_driver(gpu: GPU) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=_says(GPUTarget("cuda", gpu.target, 32)), get_current_device=_says(0), get_current_stream=_says(0),
        set_current_device=_says(None), get_active_torch_device=_says(torch.device("cuda", 0)), is_active=_says(True)))


def _says(answer: object) -> Callable:
    return lambda *args, **kwargs: answer


@contextlib.contextmanager
def no_gpu() -> Iterator[None]:
    """Tracing happens on the CPU; a card pretended earlier must not be asked for anything."""
    saved = torch.cuda.is_available
    torch.cuda.is_available = _says(False)
    try:
        yield
    finally:
        torch.cuda.is_available = saved


def move(graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode, device: torch.device) -> None:
    """Point every fake value and every device argument of a traced graph, and of the graphs inside it, at `device`."""
    def moved(value: object) -> object:
        if isinstance(value, FakeTensor):
            meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(fake_mode, meta, device)
        return device if isinstance(value, torch.device) else value
    for module in graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for key in ("val", "example_value"):
                    if key in node.meta:
                        node.meta[key] = pytree.tree_map(moved, node.meta[key])
                node.args = pytree.tree_map(moved, node.args)
                node.kwargs = pytree.tree_map(moved, node.kwargs)
