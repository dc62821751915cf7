"""Writing a GGUF file: metadata and tensors, as a stream, and a file that is whole or not there.

The file grows beside its final place under another name and takes that place at the end, so that nobody finds half of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.ggml_blocks import TYPES
from gemma4_flex.ggml_quantize import QUANTIZED, quantize

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
WRITABLE = (*PLAIN, *QUANTIZED)
SLICE = 1 << 22         # values turned into bytes at a time


class Outgoing(NamedTuple):
    """A tensor to write: what it is called in the file, its type and shape there, and a function that fetches its values."""

    name: str
    type: str
    shape: tuple[int, ...]
    values: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        count = torch.Size(self.shape).numel()
        if self.type in PLAIN:
            return count * PLAIN[self.type].itemsize
        return count // TYPES[self.type].values * TYPES[self.type].num_bytes


def write_file(path: Path, metadata: dict[str, Any], tensors: Iterable[Outgoing], *, overwrite: bool) -> None:
    """Writes a GGUF file. Metadata are texts, truth values, whole numbers (as 32 bits), floats (as 32 bits) and lists of these.

    Raises CheckpointError where `path` exists, unless it may be overwritten, or a tensor's values do not fit its type; OSError
    where it cannot be written. Nothing is left behind then.
    """
    tensors = list(tensors)
    with _replacing(path, overwrite=overwrite) as unfinished:
        writer = gguf.GGUFWriter(unfinished, metadata["general.architecture"])
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes,
                                   raw_dtype=gguf.GGMLQuantizationType[tensor.type])
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            [file] = writer.fout
            writer.write_padding(file, file.tell())
            for tensor in tensors:
                for piece in _pieces(tensor):
                    file.write(memoryview(piece.numpy()))
                writer.write_padding(file, tensor.num_bytes)
        finally:
            writer.close()


@contextmanager
def _replacing(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path to write to, beside `path`, which takes its place where all goes well and is removed where it does not."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory: name the file to write in it")
    if path.exists() and not overwrite:
        raise CheckpointError(f"{path} exists: name another file, or say that it may be overwritten (--overwrite)")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if key == "general.architecture":
        return                              # the writer has it already
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}
    add[type(value)](key, value)


@torch.no_grad()
def _pieces(tensor: Outgoing) -> Iterator[Tensor]:
    """The bytes of a tensor, some rows at a time."""
    values = tensor.values()
    assert tuple(values.shape) == tensor.shape
    rows = values.unsqueeze(0) if values.ndim == 1 else values
    for piece in rows.split(max(1, SLICE // rows.shape[1])):
        yield _encoded(tensor, piece.cpu())


def _encoded(tensor: Outgoing, rows: Tensor) -> Tensor:
    try:
        if tensor.type not in PLAIN:
            return quantize(rows, tensor.type)
        held = rows.to(PLAIN[tensor.type]).contiguous()
        if not held.isfinite().all():
            raise ValueError(f"it holds values that are not finite, or too large for {tensor.type}")
    except ValueError as error:
        raise CheckpointError(f"{tensor.name} cannot be written as {tensor.type}: {error}") from None
    return held.view(torch.uint8)
