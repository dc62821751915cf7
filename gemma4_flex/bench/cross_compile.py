"""Generate and compile the Triton kernel of a flex_attention call for a GPU this machine does not have.

The call is traced on fake CPU tensors (nothing is allocated, so pools of any size are fine), the graph is pointed at a
CUDA device, Inductor writes its Triton template for it, and Triton compiles that for a named architecture. Compiling
tells shared memory, registers and spills: whether a kernel can start on a card, not whether it is fast or right.

It leans on private parts of torch (seen working on torch 2.13.0 with triton 3.7.1) and patches torch.cuda for the rest
of the process, so run it in a process of its own: scripts/kernel_report.py.
"""
from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._inductor.scheduler  # before `pretend` replaces the has_triton it binds
import torch.utils._pytree as pytree
import triton
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


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


@dataclass(frozen=True)
class Kernel:
    """A generated template kernel: its source and the options Inductor gave it (BLOCK_M, BLOCK_N, num_stages, num_warps)."""
    source: str
    options: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a kernel: shared memory a block, registers a thread, bytes spilled a thread."""
    shared_bytes: int
    registers: int
    spill_bytes: int


def pretend(gpu: GPU) -> None:
    """Make torch and Triton believe that `gpu` is there; may be called again for another one."""
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
    triton.runtime.driver.set_active(types.SimpleNamespace(
        get_current_target=_says(GPUTarget("cuda", gpu.target, 32)), get_current_device=_says(0), get_current_stream=_says(0),
        set_current_device=_says(None), get_active_torch_device=_says(torch.device("cuda", 0)), is_active=_says(True)))


def _says(answer: object) -> Callable:
    return lambda *args, **kwargs: answer


def generate(fn: Callable, make_args: Callable[[], tuple], gpu: GPU) -> Kernel:
    """The one template kernel Inductor writes for `fn(*make_args())` on `gpu`.

    `make_args` is called under FakeTensorMode and gives every tensor `fn` reads, on the CPU.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    torch._dynamo.reset()       # a second flex call in a process would otherwise be traced with dynamic shapes
    with fake_mode, torch.no_grad(), _no_gpu():
        graph_module = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="real")(*make_args())
    pretend(gpu)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    _move(graph_module, fake_mode, torch.device("cuda", 0))
    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    lowering = GraphLowering(graph_module, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=True)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(fake_mode):
        lowering.run(*inputs)
        code = lowering.codegen()[0]
    sources = re.findall("async_compile\\.triton\\('[^']+', '''(.*?)'''", str(getattr(code, "value", code)), re.S)
    templates = [source for source in sources if "@triton_heuristics.template" in source]
    assert len(templates) == 1, f"expected one flex kernel, Inductor wrote {len(templates)}"
    return Kernel(templates[0], _options(templates[0]))


@contextlib.contextmanager
def _no_gpu() -> Iterator[None]:
    """Tracing happens on the CPU; a card pretended earlier must not be asked for anything."""
    saved = torch.cuda.is_available
    torch.cuda.is_available = _says(False)
    try:
        yield
    finally:
        torch.cuda.is_available = saved


def _options(source: str) -> dict[str, int]:
    """BLOCK_M and BLOCK_N from the kernel's text, num_stages and num_warps from its decorator."""
    found = {}
    for name in ("BLOCK_M", "BLOCK_N"):
        found[name] = int(re.search(rf"{name} : tl\.constexpr = (\d+)", source)[1])
    for name in ("num_stages", "num_warps"):
        found[name] = int(re.search(rf"{name}=(\d+)", source)[1])
    return found


def _move(graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode, device: torch.device) -> None:
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


def compile_kernel(kernel: Kernel, target: int, **options: int) -> Compiled:
    """Compile `kernel` for compute capability `target` (90 is sm_90); `options`: num_stages, num_warps."""
    function, meta = _load(kernel.source)
    signature = meta["triton_meta"]
    attributes = signature.get("configs", [{}])[0]
    source = ASTSource(fn=function, signature=dict(signature["signature"]), constexprs=dict(signature.get("constants", {})),
                       attrs=attributes if isinstance(attributes, dict) else {})
    chosen = {name: options.get(name, kernel.options[name]) for name in ("num_stages", "num_warps")}
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True      # a cached kernel has no log
        built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=chosen)
    registers = max(map(int, re.findall(r"Used (\d+) registers", log.getvalue())))
    spills = max(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue())))
    return Compiled(built.metadata.shared, registers, spills)


def _load(source: str) -> tuple[triton.runtime.JITFunction, dict]:
    """The kernel function of a generated module and what Inductor's decorator would have been told."""
    import torch._inductor.runtime.triton_heuristics as heuristics
    meta: dict = {}

    def template(*args: object, **kwargs: object) -> Callable:
        meta.update(kwargs)
        return lambda function: function
    saved = heuristics.template
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generated.py"        # Triton reads a kernel's source from its file
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        heuristics.template = template
        try:
            spec.loader.exec_module(module)
        finally:
            heuristics.template = saved
    return next(v for v in vars(module).values()
                if isinstance(v, triton.runtime.JITFunction) and v.__name__.startswith("triton_")), meta
