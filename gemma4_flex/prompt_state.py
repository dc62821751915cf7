"""A prompt's K/V in a file: computed once, taken up again in another process over the same weights.

Only layers that own K/V have any. Whole pages are kept: all of the full-attention layers', and of the sliding ones those
that a query behind the prompt sees. Loading puts them into the prefix cache, where a prompt that begins alike finds them; they
give way like any others when pages run short, and are computed anew then.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gemma4_flex.kv_cache import KVGroup
from gemma4_flex.page_table import PageTable
from gemma4_flex.prefix import Chain, root_key
from gemma4_flex.runner import Runner

FORMAT = "gemma4-flex prompt state 1"


class PromptStateError(ValueError):
    """A prompt state that cannot be saved or taken up; the message says what to do."""


class Kept(NamedTuple):
    """Pages of one attention type that a state holds: logical pages start, start + 1, ... and their keys."""
    start: int
    keys: list[bytes]


def _kept(table: PageTable, ids: Seq[int], epoch: int) -> Kept:
    """What is kept of a prompt: from the first page on that the last place where its pages can be taken up still sees."""
    size = table.page_size
    cut = len(ids) // size * size
    start = 0 if table.window is None else max(0, cut - size - table.window + 1) // size
    return Kept(start, Chain(root_key("epoch", epoch), size).keys(list(ids), cut)[start:])


def _pages_of(group: KVGroup, pool: Tensor) -> Tensor:
    """A pool as [K, pages, page size, D]."""
    return pool.view(pool.shape[1], group.num_pages, group.page_size, pool.shape[3])


def save(path: str | os.PathLike, ids: Seq[int], runner: Runner, epoch: int, weights: str) -> None:
    """Write the state of prompt `ids`, just computed with the prefix cache on, by weights of the fingerprint `weights`.
    Raises PromptStateError where its pages are gone already, or the file cannot be written."""
    path, tensors, starts = _path(path), {}, {}
    for kind, table in runner.tables.items():
        kept, group = _kept(table, ids, epoch), runner.cache.groups[kind]
        pages = [table.page_of(key) for key in kept.keys]
        if not pages or None in pages:
            raise PromptStateError(f"the prompt of {len(ids)} tokens has no whole page of {table.page_size} tokens, or the pools "
                                   "are too small to keep its pages: lower page_size, or raise n_pages.")
        starts[kind] = kept.start
        for name, pools in (("keys", group.keys), ("values", group.values)):
            tensors |= {f"{name}.{layer}": _pages_of(group, pool)[:, pages].cpu().contiguous() for layer, pool in pools.items()}
    told = {"format": FORMAT, "ids": json.dumps(list(ids)), "page_size": str(runner.config.page_size), "weights": weights,
            "starts": json.dumps(starts)}
    whole = path.with_name(path.name + ".part")
    try:
        save_file(tensors, whole, metadata=told)
        os.replace(whole, path)
    except (OSError, SafetensorError) as error:
        whole.unlink(missing_ok=True)
        raise PromptStateError(f"cannot write {path} ({error}): name a file in an existing, writable directory.") from error


def _path(path: str | os.PathLike) -> Path:
    if not isinstance(path, (str, os.PathLike)) or not Path(path).name:
        raise PromptStateError(f"{path!r} names no file: give the path of one.")
    return Path(path)


def load(path: str | os.PathLike, runner: Runner, epoch: int, weights: str) -> list[int]:
    """Put the state in `path` into the prefix cache; the prompt's token ids. Raises PromptStateError for a file that is none or
    was made by other weights, another page size or dtype, and where the pools have no room; nothing has changed then."""
    path = _path(path)
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            if told.get("format") != FORMAT:
                raise PromptStateError(f"{path} is no saved prompt state of this version: save the prompt again.")
            if told["weights"] != weights:
                raise PromptStateError(f"{path} was saved from other weights, or under another adapter: save the prompt again.")
            if int(told["page_size"]) != runner.config.page_size:
                raise PromptStateError(f"{path} was saved in pages of {told['page_size']} tokens and this engine's have "
                                       f"{runner.config.page_size}: give page_size={told['page_size']}.")
            ids, starts = json.loads(told["ids"]), json.loads(told["starts"])
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise PromptStateError(f"cannot read {path} ({error}): name a file that save_prompt wrote.") from error
    plan = {}
    for kind, table in runner.tables.items():
        kept, group = _kept(table, ids, epoch), runner.cache.groups[kind]
        missing = [n for n, key in enumerate(kept.keys) if table.page_of(key) is None]
        if starts.get(kind) != kept.start:
            raise PromptStateError(f"{path} was saved from a model of another shape: save the prompt again.")
        if len(missing) > table.num_free:
            raise PromptStateError(f"{path} needs {len(missing)} {kind} pages and {table.num_free} are free: raise n_pages, or "
                                   "load it when fewer requests run.")
        for layer in group.keys:
            wanted = (group.keys[layer].shape[1], len(kept.keys), group.page_size, group.keys[layer].shape[3])
            for name in (f"keys.{layer}", f"values.{layer}"):
                if name not in tensors or tensors[name].shape != wanted or tensors[name].dtype != runner.dtype:
                    raise PromptStateError(f"{path} holds no {name} of shape {list(wanted)} in {runner.dtype}: save the "
                                           "prompt again.")
        plan[kind] = kept, missing
    for kind, (kept, missing) in plan.items():
        group = runner.cache.groups[kind]
        pages = runner.tables[kind].install([kept.keys[n] for n in missing])
        if missing:
            for name, pools in (("keys", group.keys), ("values", group.values)):
                for layer, pool in pools.items():
                    with torch.no_grad():
                        _pages_of(group, pool)[:, pages] = tensors[f"{name}.{layer}"][:, missing].to(pool.device)
    return ids
