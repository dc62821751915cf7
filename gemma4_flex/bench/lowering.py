"""What Inductor makes of a function on a GPU that is not here: the list of kernels it launches, in order.

The function is traced on fake CPU tensors, taken through the same stages as under torch.compile (functionalised,
decomposed, writes put back in place), pointed at a CUDA device and scheduled; with Triton at hand, every kernel's source
is written too. Nothing is allocated and nothing runs.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._inductor import compile_fx, config, dependencies, ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from gemma4_flex.bench.pretended_gpu import GPU, move, no_gpu, pretend

KINDS = ("matmul", "flex", "reduction", "pointwise", "other")
CUDA = torch.device("cuda", 0)
# what a kernel is for, told by the operations it came from
PURPOSES = {"flex_attention": "attention", "embedding": "embed", "mm": "matmul", "bmm": "matmul", "addmm": "matmul", "mean": "norm",
            "neg": "rope", "cos": "cos/sin", "index_put": "write", "index_put_": "write", "index_copy": "write",
            "gelu": "gelu", "tanh": "softcap", "floor_divide": "pages", "copy_": "copy", "max": "argmax", "argmax": "argmax",
            "gather": "ban", "scatter": "ban", "isfinite": "finite"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `num_bytes`: what it must move at least: each element it touches, once. `source`: the module that
    Inductor wrote for it; None for a library's kernel and where no source was asked for."""
    kind: str
    name: str
    num_bytes: int
    source: str | None = None


def lower(fn: Callable[[], object], fake_mode: FakeTensorMode, gpu: GPU, *, options: dict | None = None, write: bool = False,
          keys_in_view: Mapping[int, int] | None = None) -> list[Launch]:
    """Launches of `fn()` on `gpu`. Every tensor `fn` reads was made under `fake_mode`, on the CPU.

    options: Inductor's, as torch.compile takes them. write: give each launch its source (needs Triton). keys_in_view: by
    head size, the keys that one row of queries sees in a flex_attention call: block lists, not the pools' size, decide that.
    """
    torch._dynamo.reset()       # a second flex call in a process would otherwise be traced with dynamic shapes
    with config.patch({"fx_graph_cache": False, **(options or {})}):
        graph_module = _functional(_trace(fn, fake_mode), fake_mode)
        pretend(gpu)
        move(graph_module, fake_mode, CUDA)
        inputs = _inputs(graph_module)
        graph = GraphLowering(graph_module, example_inputs=inputs, shape_env=fake_mode.shape_env, is_inference=True)
        with (torch.no_grad(), V.set_debug_handler(DebugContext()), V.set_fake_mode(fake_mode), V.set_graph_handler(graph),
              V.set_extern_kernel_nodes([])):
            graph.run(*inputs)
            written = _write(graph) if write else _plan(graph)
            return [Launch(_kind(node), _name(node), _num_bytes(node, graph, keys_in_view or {}) // len(sources), source)
                    for node, sources in written for source in sources]


def _trace(fn: Callable[[], object], fake_mode: FakeTensorMode) -> torch.fx.GraphModule:
    """`fn` as a graph whose inputs are all the tensors it reads."""
    def flat() -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(fn()) if isinstance(leaf, Tensor)]
    with fake_mode, torch.no_grad(), no_gpu():
        graph_module = make_fx(flat, tracing_mode="real")()
    graph_module.graph.eliminate_dead_code()
    inputs: dict[int, torch.fx.Node] = {}
    for node in list(graph_module.graph.nodes):
        if node.op != "get_attr":
            continue
        value = graph_module.get_submodule(node.target.rpartition(".")[0]).__getattr__(node.target.rpartition(".")[2]) \
            if "." in node.target else getattr(graph_module, node.target)
        if not isinstance(value, Tensor):
            continue                                    # a graph inside the graph: flex_attention's mask
        if id(value) not in inputs:
            with graph_module.graph.inserting_before(next(iter(graph_module.graph.nodes))):
                inputs[id(value)] = graph_module.graph.placeholder(f"input_{len(inputs)}")
            inputs[id(value)].meta["val"] = value.data if isinstance(value, nn.Parameter) else value
        node.replace_all_uses_with(inputs[id(value)])
        graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


class _Captured(Exception):
    """Carries the graph out of compile_fx, which would go on to compile it."""


def _functional(graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode) -> torch.fx.GraphModule:
    """The graph as it reaches Inductor's code generator: decomposed and functional, mutations of inputs at the end or put
    back in place."""
    found = []

    def capture(inner: torch.fx.GraphModule, example_inputs: list, **kwargs: object) -> None:
        found.append(inner)
        raise _Captured
    with fake_mode, torch.no_grad(), no_gpu():
        try:
            compile_fx.compile_fx(graph_module, _inputs(graph_module), inner_compile=capture)
        except Exception:
            if not found:
                raise
    with torch.no_grad(), V.set_debug_handler(DebugContext()), V.set_fake_mode(fake_mode), no_gpu():
        compile_fx.view_to_reshape(found[0])
        compile_fx._recursive_record_original_output_strides(found[0])
        compile_fx._recursive_post_grad_passes(found[0], is_inference=True)
    return found[0]


def _inputs(graph_module: torch.fx.GraphModule) -> list:
    return [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]


# ---- one scheduled node ---------------------------------------------------------------------------------------------


def _launches(node: BaseSchedulerNode) -> bool:
    """Whether a node of the schedule is a kernel, and not an alias, a view or one of several outputs."""
    if isinstance(node, NopKernelSchedulerNode):
        return False
    return not (isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, ir.MultiOutput))


def _name(node: BaseSchedulerNode) -> str:
    if isinstance(node, ExternKernelSchedulerNode):
        called = str(getattr(node.node, "op_overload", None) or node.node.python_kernel_name)
        return "matmul" if re.search(r"\b\w*mm\b|matmul", called) else called
    origins = {origin.meta.get("original_aten") or origin.target for part in node.get_nodes() if part.node is not None
               for origin in part.node.get_origins() if origin.op == "call_function"}
    names = {getattr(origin, "__name__", str(origin)).split(".")[0] for origin in origins}
    purposes = dict.fromkeys(purpose for name, purpose in PURPOSES.items() if name in names)
    if _is_matmul(node):
        return "matmul + gelu" if "gelu" in purposes else "matmul"
    if "attention" in purposes:
        return "attention" if node.is_template() else "attention, after" if _reads_flex(node) else "block lists"
    return " + ".join(purposes) or " ".join(sorted(names))


def _reads_flex(node: BaseSchedulerNode) -> bool:
    """Whether a kernel joins the parts of a split flex_attention: it has what the kernel itself came from as an origin."""
    return any(origin.target is torch.ops.higher_order.flex_attention for part in node.get_nodes() if part.node is not None
               for origin in part.node.get_origins())


def _kind(node: BaseSchedulerNode) -> str:
    if isinstance(node, ExternKernelSchedulerNode):
        name = _name(node)
        return "flex" if "flex" in name else "matmul" if name == "matmul" else "other"
    if node.is_template() and "attention" in _name(node):
        return "flex"
    if _is_matmul(node):
        return "matmul"
    return "reduction" if any(part.is_reduction() for part in node.get_nodes()) else "pointwise"


def _is_matmul(node: BaseSchedulerNode) -> bool:
    """Whether a kernel of Inductor's is a matrix product."""
    return not node.is_template() and any(part.is_native_matmul() or _is_gemv(part) for part in node.get_nodes())


def _is_gemv(part: BaseSchedulerNode) -> bool:
    """A matrix times one vector, written as a reduction: it reads a different weight for each of many sums, and one vector
    for all of them."""
    if not part.is_reduction():
        return False
    outer, inner = (_product(sizes) for sizes in part.get_ranges())
    reads = [dep for dep in part.read_writes.reads if isinstance(dep, dependencies.MemoryDep) and not dep.is_indirect()]
    weights = [dep for dep in reads if dep.get_numel() == outer * inner and dep.name in V.graph.graph_inputs]
    return outer > 1 and len(weights) == 1 and any(dep.get_numel() == inner for dep in reads) and _is_one_row(reads, outer)


def _is_one_row(reads: list, outer: int) -> bool:
    return all(dep.get_numel() != outer for dep in reads)


def _num_bytes(node: BaseSchedulerNode, graph: GraphLowering, keys_in_view: Mapping[int, int]) -> int:
    """Bytes of what a kernel reads and writes, each element once; what lives only inside it is free."""
    if isinstance(node, ExternKernelSchedulerNode) and _kind(node) == "matmul":
        outputs = getattr(node.node, "outputs", None) or [node.node]        # an operator of our own has outputs apart
        return sum(_product(tensor.get_size()) * tensor.get_dtype().itemsize for tensor in (*node.node.inputs, *outputs))
    is_flex = _kind(node) == "flex"
    parts, real_name = node.get_nodes(), graph.scheduler.mutation_real_name
    pools = {tensor.get_name(): tensor for part in parts for tensor in part.node.inputs[1:3]} if is_flex else {}
    inside = {name for name in node.get_buffer_names() if not _used_elsewhere(graph.scheduler.name_to_buf[name], parts)}
    touched: dict[str, dict[object, int]] = {}     # by buffer, and there by which of its elements
    for part in parts:
        for dep in (*part.read_writes.reads, *part.read_writes.writes):
            name = real_name.get(dep.name, dep.name)
            if dep.name in inside or name in pools or isinstance(dep, dependencies.WeakDep):
                continue                                # a pool is counted by what is in view
            if isinstance(dep, dependencies.StarDep) and not (part.is_template() or part.is_extern()):
                continue                                # a buffer written in place: its write is counted
            num_bytes, place = _buffer_bytes(dep.name, graph), None
            if isinstance(dep, dependencies.MemoryDep):
                elements = _product(dep.size if dep.is_indirect() else [dep.get_numel()])
                num_bytes, place = min(num_bytes, elements * graph.get_dtype(dep.name).itemsize), dep.normalize().index
            touched.setdefault(name, {})[place] = num_bytes
    total = sum(min(sum(places.values()), _buffer_bytes(name, graph)) for name, places in touched.items())
    for pool in pools.values():
        rows, (_, kv_heads, _, head_dim) = int(parts[0].node.inputs[0].get_size()[0]), map(int, pool.get_size())
        total += rows * kv_heads * keys_in_view.get(head_dim, 0) * head_dim * pool.get_dtype().itemsize
    return total


def _product(sizes: Iterable) -> int:
    total = 1
    for size in sizes:
        total *= int(size)
    return total


def _used_elsewhere(buffer, parts: list[BaseSchedulerNode]) -> bool:
    return any(user.node not in parts for user in buffer.users)


def _buffer_bytes(name: str, graph: GraphLowering) -> int:
    try:
        buffer = graph.get_buffer(name)
        return _product(buffer.get_size()) * buffer.get_dtype().itemsize
    except (AttributeError, NotImplementedError, RuntimeError):     # a buffer without a layout: it only orders kernels
        return 0


# ---- the schedule ---------------------------------------------------------------------------------------------------


def _plan(graph: GraphLowering) -> list[tuple[BaseSchedulerNode, list[None]]]:
    """The scheduled kernels, each counted once, none written."""
    graph.init_wrapper_code()
    graph._update_scheduler()
    return [(node, [None]) for node in graph.scheduler.nodes if _launches(node)]


def _write(graph: GraphLowering) -> list[tuple[BaseSchedulerNode, list[str | None]]]:
    """The scheduled kernels with the sources Inductor wrote for them: one, several where it had planned to join kernels and
    then could not, or [None] for a library's."""
    called: dict[int, list[str]] = {}
    generate_call = PythonWrapperCodegen.generate_kernel_call

    def note(wrapper: PythonWrapperCodegen, kernel_name: str, *args: object, **kwargs: object) -> None:
        called.setdefault(id(graph.scheduler.current_node), []).append(kernel_name)
        generate_call(wrapper, kernel_name, *args, **kwargs)
    PythonWrapperCodegen.generate_kernel_call = note
    try:
        code = str(graph.codegen()[0].value)
    finally:
        PythonWrapperCodegen.generate_kernel_call = generate_call
    sources = dict(re.findall(r"async_compile\.triton\('([^']+)', '''(.*?)'''", code, re.S))
    return [(node, [sources[name] for name in called[id(node)]] if id(node) in called else [None])
            for node in graph.scheduler.nodes if _launches(node)]
