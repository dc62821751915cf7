"""Regions of a step, compiled: traced once, every tensor an input, so that one compile serves all layers of a kind.

A region is a function of nested tuples of tensors. It is traced on fake tensors to a graph of tensor operations; tensors
it reaches without having been given them (tables, the head) become inputs of the graph too, so that a write in place is
seen by the next call. Inductor compiles the graph, and keeps the compiled code on disk for the next process.

How much is one region is data, by device (PLANS). On a GPU each kind of layer is one, with sizes fixed: a captured graph
replays the kernels, so that the calls between them cost nothing. On a CPU the calls are the cost, and compiling a size
takes a C++ compiler half a minute: there all layers are one region, and sizes are symbols.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

RECOMPILE_LIMIT = 512     # of Dynamo: one kernel a static shape, buckets x layer types, far below this


@dataclass(frozen=True)
class CompilePlan:
    """How a device's steps are compiled. scope: "layer", a region a kind of layer, or "step", all layers and the head in one.
    options: of torch._inductor.config. symbolic: sizes are symbols, and one compile serves every batch and context; otherwise
    each size is compiled of its own."""
    scope: str
    symbolic: bool
    options: Mapping[str, object] = field(default_factory=dict)


PLANS = {
    "cpu": CompilePlan("step", symbolic=True, options={"size_asserts": False}),      # 280 of them cost a tenth of a small step
    # seen in results/kernel_steps.md: one kernel for the norms of q, k and v; bf16 rounded wherever it is written so; and
    # matmuls as models/matmul.py writes them
    "cuda": CompilePlan("layer", symbolic=False, options={
        "combo_kernels": True, "emulate_precision_casts": True, "triton.native_matmul": True}),
}


def missing_compiler(device_type: str) -> str | None:
    """What stands in the way of compiling for a device on this machine, in a few words, or None."""
    if device_type == "cuda":
        return None
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
        get_cpp_compiler()
    except Exception as error:
        return f"no C++ compiler ({type(error).__name__})"
    return None


def compile_obstacle(device_type: str) -> str | None:
    """Why nothing can be compiled on this machine, and what to do, or None."""
    missing = missing_compiler(device_type)
    return missing and f"{missing}: steps run uncompiled; install g++ (Debian: apt-get install g++) for more speed"


class _Place(NamedTuple):
    """A tensor's place among a region's inputs."""
    index: int


class Compiled(NamedTuple):
    """A compiled region: `run` takes its tensors as a list and gives its own as a list, for `form` and `spec` to arrange.
    `sizes` are those of the tensors it takes, numbers and the names of symbols."""
    run: Callable[[list[Tensor]], list[Tensor]]
    form: list
    spec: pytree.TreeSpec
    sizes: list[tuple[int | str, ...]]

    def check(self, given: list[Tensor]) -> None:
        """Compiled code trusts its inputs' sizes: here is where a wrong one shows."""
        values: dict[str, int] = {}
        for n, (tensor, sizes) in enumerate(zip(given, self.sizes, strict=True)):
            for have, size in zip(tensor.shape, sizes, strict=True):
                wanted = values.setdefault(size, have) if isinstance(size, str) else size
                assert have == wanted, f"input {n} of a compiled region is {tuple(tensor.shape)} and was compiled as {sizes}"


class Regions:
    """Calls regions: as they are, or compiled by a plan. `compile_s` is what compiling took so far."""

    def __init__(self, plan: CompilePlan | None = None):
        self.plan = plan
        self.compile_s = 0.0
        self._compiled: dict[tuple, Compiled] = {}
        self._inside = False         # a region called inside one that is being traced is part of it
        self._calls: list | None = None

    @property
    def scope(self) -> str | None:
        return self.plan and self.plan.scope

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, regions run as they are."""
        inside, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = inside

    def __call__(self, key: tuple, fn: Callable, *args):
        """`fn(*args)`. `key` says what `fn` depends on beside its tensors: calls with one key share the compiled code."""
        if self.plan is None or self._inside:
            return fn(*args)
        leaves, spec = pytree.tree_flatten(args)
        places: dict[int, _Place] = {}
        given, form = [], []      # each tensor once, however often it is given; and where it goes
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if id(leaf) not in places:
                    places[id(leaf)] = _Place(len(given))
                    given.append(leaf)
                leaf = places[id(leaf)]
            form.append(leaf)
        form = tuple(form)
        full_key = (key, form) if self.plan.symbolic else (key, form, tuple((t.shape, t.stride()) for t in given))
        compiled = self._compiled.get(full_key)
        if compiled is None:
            start = time.perf_counter()
            compiled = self._compiled[full_key] = self._compile(fn, form, spec, given)
            self.compile_s += time.perf_counter() - start
        compiled.check(given)
        found = compiled.run(given)
        if self._calls is not None:
            self._calls.append((compiled.run, given, found))
        return _arranged(found, compiled)

    def record(self, fn: Callable[[], object]) -> Callable[[], object]:
        """Run `fn`, which makes its result of nothing but regions and tensors that stay where they are, and give a function
        that runs it again: the calls of its regions one after the other, without the Python between them. Regions of single
        layers are not for this: there `fn` is given back."""
        if self.scope != "step":      # there are views between regions
            return fn
        assert self._calls is None
        self._calls = []
        try:
            result = fn()
            calls = self._calls
        finally:
            self._calls = None
        # where each tensor comes from: an earlier call, or it stays where it is
        source: dict[int, tuple[int, int] | Tensor] = {}
        program, made_storages = [], set()
        for n, (run, given, found) in enumerate(calls):
            assert all(id(t) in source or t.untyped_storage().data_ptr() not in made_storages for t in given), \
                "something is made of a region's result outside of regions: a replay would not make it again"
            program.append((run, [source.setdefault(id(tensor), tensor) for tensor in given]))
            for i, tensor in enumerate(found):
                if id(tensor) not in source:
                    made_storages.add(tensor.untyped_storage().data_ptr())
                source.setdefault(id(tensor), (n, i))
        leaves, spec = pytree.tree_flatten(result)
        results = [source.get(id(leaf), leaf) for leaf in leaves]

        def replay() -> object:
            made: list[list[Tensor]] = []
            for run, given in program:
                made.append(run([made[a[0]][a[1]] if type(a) is tuple else a for a in given]))
            return pytree.tree_unflatten([made[a[0]][a[1]] if type(a) is tuple else a for a in results], spec)
        return replay

    def _compile(self, fn: Callable, form: tuple, spec: pytree.TreeSpec, tensors: list[Tensor]) -> Compiled:
        out_spec, out_form = None, None

        def flat(*given: Tensor) -> list[Tensor]:
            nonlocal out_spec, out_form
            args = pytree.tree_unflatten([given[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in form], spec)
            outputs, out_spec = pytree.tree_flatten(fn(*args))
            found = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
            places = iter(range(len(found)))
            out_form = [_Place(next(places)) if isinstance(leaf, Tensor) else leaf for leaf in outputs]
            return found
        with self.off():
            graph, more = trace(flat, tensors, symbolic=self.plan.symbolic)
        from torch._inductor import config
        from torch._inductor.standalone_compile import standalone_compile
        in_bf16 = any(t.dtype == torch.bfloat16 for t in tensors)
        with config.patch(dict(self.plan.options)), _tf32() if in_bf16 else nullcontext():
            fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
            for node in graph.graph.output_node().args[0]:
                node.meta["example_value"] = node.meta["val"]      # where "from_graph" looks for the graph's sizes
            artifact = standalone_compile(graph, fakes, dynamic_shapes="from_graph", options={})
        sizes = [tuple(_size(size) for size in fake.shape) for fake in fakes[: len(tensors)]]
        return Compiled(lambda given: artifact(*given, *more), out_form, out_spec, sizes)


def _size(size: int | torch.SymInt) -> int | str:
    """A number, or the name of the symbol it may be any value of."""
    if isinstance(size, int):
        return size
    number = size.node.maybe_as_int()
    return str(size.node.expr) if number is None else number


@contextmanager
def _tf32() -> Iterator[None]:
    """Inside, Inductor may write fp32 matmuls in tf32: in a bf16 step only those of bf16 operands, which are exact in it, are
    its to write."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _arranged(tensors: Sequence[Tensor], compiled: Compiled) -> object:
    """What a region returns, of the tensors its compiled code gave."""
    leaves = [tensors[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in compiled.form]
    return pytree.tree_unflatten(leaves, compiled.spec)


def trace(fn: Callable, tensors: list[Tensor], *, symbolic: bool) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The graph of `fn(*tensors)`, a flat list of outputs, and the further tensors it takes: those that `fn` found by
    itself. With `symbolic`, sizes of `tensors` that nothing pins are symbols, apart from sizes of 1."""
    # without a shape environment Inductor keeps nothing on disk; static_shapes is for the tensors that `fn` finds by itself
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(duck_shape=False), static_shapes=True)
    # a source of its own, or two inputs may be given the same symbols
    fakes = [mode.from_tensor(t, static_shapes=not symbolic, source=ConstantSource(f"input_{n}")) for n, t in enumerate(tensors)]
    # flex_attention goes through Dynamo, which would make symbols of the sizes it sees change
    with mode, torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=RECOMPILE_LIMIT,
                                          accumulated_recompile_limit=RECOMPILE_LIMIT):
        graph = make_fx(fn, tracing_mode="real", _allow_non_fake_inputs=True)(*fakes)
    return graph, _lift(graph, mode)


def _lift(graph: torch.fx.GraphModule, mode: FakeTensorMode) -> list[Tensor]:
    """Turn the tensors that a graph holds as attributes into inputs behind its own, and give them in that order."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    last, lifted, tensors, names = inputs[-1], {}, [], set()
    for node in [n for n in graph.graph.nodes if n.op == "get_attr"]:
        value = getattr(graph, node.target, None)
        if not isinstance(value, Tensor):          # a graph inside: a mask_mod of flex_attention
            continue
        if id(value) not in lifted:
            with graph.graph.inserting_after(last):
                last = lifted[id(value)] = graph.graph.placeholder(f"held_{len(tensors)}")
            last.meta["val"] = mode.from_tensor(value)
            tensors.append(value)
        node.replace_all_uses_with(lifted[id(value)])
        graph.graph.erase_node(node)
        names.add(node.target)
    for name in names:      # the graph is copied when it is compiled: weights must not be in it
        delattr(graph, name)
    graph.graph.lint()
    graph.recompile()
    return tensors
