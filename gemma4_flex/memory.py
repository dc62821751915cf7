"""What a step takes beside weights and pools, measured by running one; and how many pages that leaves room for."""
from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemma4_flex.geometry import ModelGeometry
from gemma4_flex.page_table import PageTable
from gemma4_flex.params import EngineConfig, InvalidParameterError
from gemma4_flex.prefill import Sizes
from gemma4_flex.runner import Runner
from gemma4_flex.sizing import full_pages_in, pool_pages


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make while they live; `peak` is the most there were at once."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.peak = self.now = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self._holders: Counter[int] = Counter()      # tensors that hold a storage, by its address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not self._holders[address]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._holders[address] += 1
        weakref.finalize(tensor, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            self.now -= size


@torch.no_grad()
def step_bytes(model: nn.Module, geometry: ModelGeometry, config: EngineConfig) -> int:
    """Bytes that an engine takes beside weights and pools: those of the largest prefill and of the largest decode step, run
    uncompiled over the smallest pools (captured graphs keep theirs), and the sidecar."""
    runner = Runner(model, geometry, config, page_tables(geometry, config, dict.fromkeys(geometry.attention_types, 2)))
    tokens, batch = config.max_prefill_tokens, config.max_batch_size
    sizes = Sizes(tokens, -(-tokens // runner.width) + batch, batch)
    with runner.regions.off():
        steps = _peak(runner, lambda: runner._walk_prefill([], sizes)) + _peak(
            runner, lambda: runner._decode_step(runner.buckets[-1], runner.column_buckets[-1]))
    return steps + (runner.sidecar.num_bytes() if runner.sidecar else 0)


def _peak(runner: Runner, step: Callable[[], object]) -> int:
    """Bytes that live at most while `step` runs, beyond what lived before."""
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
        torch.cuda.reset_peak_memory_stats(runner.device)
        before = torch.cuda.memory_allocated(runner.device)
        step()
        torch.cuda.synchronize(runner.device)
        return torch.cuda.max_memory_allocated(runner.device) - before
    counter = LiveBytes(list(runner.static_tensors().values()))
    with counter:
        step()
    return counter.peak


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Bytes taken and bytes there are: of a GPU, by whomever; on a CPU, by this process."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * page, os.sysconf("SC_PHYS_PAGES") * page


def pages_for(model: nn.Module, geometry: ModelGeometry, config: EngineConfig) -> tuple[int, str]:
    """Pages of the full-attention group for `config.gpu_memory_utilization` of the device's memory, and how that came about.
    Raises InvalidParameterError where nothing is left for K/V."""
    weight = model.model.norm.weight
    step = step_bytes(model, geometry, config)
    used, total = memory_in_use(weight.device)
    budget = int(config.gpu_memory_utilization * total) - used - step
    pages = full_pages_in(geometry, config, budget, weight.element_size())
    story = (f"{config.gpu_memory_utilization:.0%} of {total / 2**30:.1f} GiB, less {used / 2**30:.1f} in use and "
             f"{step / 2**30:.2f} for a step")
    if pages < 2:
        raise InvalidParameterError(f"gpu_memory_utilization={config.gpu_memory_utilization} leaves no room for K/V: {story}. "
                                    "Raise it, or lower max_batch_size or max_prefill_tokens.")
    return pages, f"{pages} pages of {config.page_size} tokens: {story}"


def page_tables(geometry: ModelGeometry, config: EngineConfig, pages: dict[str, int]) -> dict[str, PageTable]:
    """A page table for each attention type, with so many pages."""
    windows = {kind: geometry.layers[geometry.owners(kind)[0]].window for kind in geometry.attention_types}
    return {kind: PageTable(kind, n_pages=pages[kind], page_size=config.page_size, window=window,
                            num_slots=config.max_batch_size + 1, max_seq_length=config.max_seq_length)
            for kind, window in windows.items()}


def sized_tables(geometry: ModelGeometry, config: EngineConfig) -> dict[str, PageTable]:
    """The page tables of an engine of `config`."""
    return page_tables(geometry, config, pool_pages(geometry, config, config.n_pages))
