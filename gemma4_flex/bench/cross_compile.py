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
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gemma4_flex.bench.pretended_gpu import GPU, move, no_gpu, pretend


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


def generate(fn: Callable, make_args: Callable[[], tuple], gpu: GPU) -> Kernel:
    """The one template kernel Inductor writes for `fn(*make_args())` on `gpu`.

    `make_args` is called under FakeTensorMode and gives every tensor `fn` reads, on the CPU.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    torch._dynamo.reset()       # a second flex call in a process would otherwise be traced with dynamic shapes
    with fake_mode, torch.no_grad(), no_gpu():
        graph_module = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="real")(*make_args())
    pretend(gpu)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    move(graph_module, fake_mode, torch.device("cuda", 0))
    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    lowering = GraphLowering(graph_module, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=True)
    with V.set_debug_handler(DebugContext()), V.set_graph_handler(lowering), V.set_fake_mode(fake_mode):
        lowering.run(*inputs)
        code = lowering.codegen()[0]
    sources = re.findall("async_compile\\.triton\\('[^']+', '''(.*?)'''", str(getattr(code, "value", code)), re.S)
    templates = [source for source in sources if "@triton_heuristics.template" in source]
    assert len(templates) == 1, f"expected one flex kernel, Inductor wrote {len(templates)}"
    return Kernel(templates[0], _options(templates[0]))


def _options(source: str) -> dict[str, int]:
    """BLOCK_M and BLOCK_N from the kernel's text, num_stages and num_warps from its decorator."""
    found = {}
    for name in ("BLOCK_M", "BLOCK_N"):
        found[name] = int(re.search(rf"{name} : tl\.constexpr = (\d+)", source)[1])
    for name in ("num_stages", "num_warps"):
        found[name] = int(re.search(rf"{name}=(\d+)", source)[1])
    return found


def compile_kernel(kernel: Kernel, target: int, **options: int) -> Compiled:
    """Compile `kernel` for compute capability `target` (90 is sm_90); `options`: num_stages, num_warps."""
    tuner = load(kernel.source)
    chosen = {name: options.get(name, kernel.options[name]) for name in ("num_stages", "num_warps")}
    return _compile(tuner, dict(tuner.configs[0].kwargs), chosen, target)


def compile_first_fitting(source: str, target: int, shared_limit: int) -> Compiled:
    """Compile a kernel of any kind with the first of Inductor's candidate configurations that fits into `shared_limit`
    bytes of shared memory and spills nothing; else the one that spills least. (On a card Inductor times all of them.)"""
    tuner = load(source)
    best = None
    for config in tuner.configs:
        options = {"num_stages": config.num_stages, "num_warps": config.num_warps}
        found = _compile(tuner, dict(config.kwargs), options, target)
        if found.shared_bytes <= shared_limit and found.spill_bytes == 0:
            return found
        if best is None or (found.shared_bytes > shared_limit, found.spill_bytes) < (
                best.shared_bytes > shared_limit, best.spill_bytes):
            best = found
    return best


def _compile(tuner, constants: dict, options: dict[str, int], target: int) -> Compiled:
    meta = tuner.triton_meta
    known = {name: value for name, value in constants.items() if name in tuner.fn.arg_names}
    signature = dict(meta["signature"]) | {name: "constexpr" for name in known}
    attributes = meta.get("configs", [{}])[0]
    source = ASTSource(fn=tuner.fn, signature=signature, constexprs=dict(meta.get("constants", {})) | known,
                       attrs=attributes if isinstance(attributes, dict) else {})
    options = options | {"enable_fp_fusion": meta["enable_fp_fusion"]} if "enable_fp_fusion" in meta else options
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        triton.knobs.compilation.always_compile = True      # a cached kernel has no log
        built = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    registers = max(map(int, re.findall(r"Used (\d+) registers", log.getvalue())))
    spills = max(map(int, re.findall(r"(\d+) bytes spill stores", log.getvalue())))
    return Compiled(built.metadata.shared, registers, spills)


def load(source: str):
    """Inductor's autotuner of a generated module: its kernel function, its meta data and its candidate configurations."""
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    triton_helpers.set_driver_to_gpu = lambda: None     # `pretend` has set one that needs no card
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generated.py"        # Triton reads a kernel's source from its file
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("generated", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return next(v for v in vars(module).values() if isinstance(v, CachingAutotuner))
