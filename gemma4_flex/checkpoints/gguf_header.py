"""What a GGUF file says of itself, read without trusting it.

Every count, length, type and offset is judged by the file's own size before anything is made of it, so that whoever reads the
tensors afterwards finds them where the header says. Metadata is read here too: in one pass, where the gguf package's reader
makes an object of every element of every array.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import UnsupportedModelError

MAGIC, VERSIONS, FIXED_BYTES = b"GGUF", (2, 3), 24
STRING, ARRAY, UINT32 = 8, 9, 4
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", UINT32: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
ALIGNMENT, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_DIMS = 4
# Far above any model's (Gemma-4's metadata has 16 MB, its arrays 1.3 million elements in all): what is longer is no metadata.
MAX_HEADER, MAX_ELEMENTS, MAX_STRING, MAX_NAME = 1 << 28, 1 << 22, 1 << 24, 1 << 7


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its ggml type by name, its shape with the rows first, and where its bytes are in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata (numbers, strings and flat lists of them), its tensors by name in the file's order, and the
    offset at which the descriptions of the tensors begin."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    tensors_start: int


def scan(path: Path) -> Header:
    """The header of the GGUF file at `path`. Raises CheckpointError for a file that is not one from beginning to end, and
    UnsupportedModelError for a type of ggml's that the gguf package does not know."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < FIXED_BYTES:
                raise CheckpointError(f"{path} has {size} bytes, too few for a GGUF file: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Scan(path, data).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Scan:
    """A position in the file, and what has been read up to there."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0
        self.end = min(len(data), MAX_HEADER)
        self.elements = 0       # of all arrays
        self.kinds: dict[str, int] = {}

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is a damaged or hostile GGUF file: {what}; download it again")

    def header(self) -> Header:
        magic = self.data[:4]
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        version = self.number("I", "the version", at=4)
        if version in (v << 24 for v in (1, *VERSIONS)):
            raise CheckpointError(f"{self.path} is a big-endian GGUF file, and only little-endian ones are read: convert it")
        if version not in VERSIONS:
            raise CheckpointError(f"{self.path} is GGUF version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are read: "
                                  "convert the model again")
        num_tensors, num_keys = self.number("Q", "the counts", at=8), self.number("Q", "the counts")
        self.expect(num_keys, 13, f"{num_keys} metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.name("a metadata key")
            if key in metadata:
                raise self.wrong(f"it holds the metadata key {key!r} twice")
            metadata[key] = self.value(key)
        start = self.at
        self.expect(num_tensors, 32, f"{num_tensors} tensors")
        return Header(self.path, metadata, self.tensors(num_tensors, self.alignment(metadata)), start)

    def expect(self, count: int, least: int, what: str) -> None:
        """Raises CheckpointError unless the rest of the file can hold `count` things of at `least` so many bytes."""
        if count * least > self.end - self.at:
            raise self.wrong(f"it is said to hold {what}, and {self.end - self.at} bytes are left for them")

    def number(self, code: str, what: str, at: int | None = None) -> Any:
        self.at = self.at if at is None else at
        return self.numbers(1, code, what)[0]

    def numbers(self, count: int, code: str, what: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}")
        self.expect(count, size, what)
        self.at += count * size
        if code == "?" and self.data[self.at - count:self.at].strip(b"\0\1"):
            raise self.wrong(f"{what} holds a truth value that is neither 0 nor 1")
        return struct.unpack_from(f"<{count}{code}", self.data, self.at - count * size)

    def string(self, what: str, most: int = MAX_STRING) -> str:
        length = self.number("Q", what)
        self.expect(length, 1, f"{what} of {length} bytes")
        if length > most:
            raise self.wrong(f"it holds {what} of {length} bytes, and {most} are the most that one may have")
        self.at += length
        try:
            return self.data[self.at - length:self.at].decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not UTF-8") from None

    def name(self, what: str) -> str:
        """A string that is fit to be shown."""
        found = self.string(what, MAX_NAME)
        if not found.isprintable():
            raise self.wrong(f"{what} is {found!r:.80}, which is none")
        return found

    def value(self, key: str) -> Any:
        kind = self.kinds[key] = self.number("I", f"the type of {key}")
        if kind == STRING:
            return self.string(key)
        if kind in SCALARS:
            return self.number(SCALARS[kind], key)
        if kind != ARRAY:
            raise self.wrong(f"{key} has the type {kind}, which GGUF does not have")
        element, count = self.number("I", key), self.number("Q", key)
        if element == ARRAY:
            raise self.wrong(f"{key} is an array of arrays, which no model file holds")
        if element != STRING and element not in SCALARS:
            raise self.wrong(f"{key} is an array of the type {element}, which GGUF does not have")
        self.expect(count, 8 if element == STRING else struct.calcsize(f"<{SCALARS[element]}"), f"{key} of {count} elements")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise self.wrong(f"its metadata arrays up to {key} have {self.elements} elements, and {MAX_ELEMENTS} are the most "
                             "that they may have")
        if element == STRING:
            return self.strings(count, key)
        return list(self.numbers(count, SCALARS[element], key))

    def strings(self, count: int, key: str) -> list[str]:
        """As `string`, many times and fast: a vocabulary with its merges has three quarters of a million."""
        data, at, end = self.data, self.at, self.end
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            stop = at + 8 + (length_at(data, at)[0] if at + 8 <= end else end)
            if stop > min(end, at + 8 + MAX_STRING):
                self.at = at
                self.string(f"a string of {key}")       # says what is wrong
            found.append(data[at + 8:stop])
            at = stop
        self.at = at
        try:
            return [text.decode("utf-8") for text in found]
        except UnicodeDecodeError:
            raise self.wrong(f"a string of {key} is not UTF-8") from None

    def alignment(self, metadata: dict[str, Any]) -> int:
        if ALIGNMENT not in metadata:
            return DEFAULT_ALIGNMENT
        found = metadata[ALIGNMENT]
        if self.kinds[ALIGNMENT] != UINT32:
            raise self.wrong(f"{ALIGNMENT} is not one unsigned 32-bit number")
        if found < 8 or found & (found - 1):
            raise self.wrong(f"{ALIGNMENT} is {found}, which is no power of two from 8 on")
        return found

    def tensors(self, count: int, alignment: int) -> dict[str, TensorInfo]:
        described = list(self.descriptions(count))
        begin = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for name, kind, shape, num_bytes, offset in described:
            if name in found:
                raise self.wrong(f"it holds the tensor {name!r} twice")
            if offset % alignment:
                raise self.wrong(f"the offset {offset} of {name} is no multiple of {alignment}")
            if begin + offset + num_bytes > len(self.data):
                raise self.wrong(f"{name} ends at byte {begin + offset + num_bytes} of a file of {len(self.data)} bytes")
            found[name] = TensorInfo(name, kind, shape, begin + offset, num_bytes)
        for first, second in pairwise(sorted(found.values(), key=lambda info: info.start)):
            if first.start + first.num_bytes > second.start:
                raise self.wrong(f"{first.name} and {second.name} overlap")
        return found

    def descriptions(self, count: int) -> Iterator[tuple[str, str, tuple[int, ...], int, int]]:
        """Name, type, shape, bytes and offset of each tensor."""
        for _ in range(count):
            name = self.name("a tensor's name")
            num_dims = self.number("I", f"the dimensions of {name!r}")
            if not 1 <= num_dims <= MAX_DIMS:
                raise self.wrong(f"{name!r} has {num_dims} dimensions, and a tensor has 1 to {MAX_DIMS}")
            dims = self.numbers(num_dims, "Q", f"the dimensions of {name!r}")
            kind, offset = self.number("I", f"the type of {name!r}"), self.number("Q", f"the offset of {name!r}")
            try:
                ggml = GGMLQuantizationType(kind)
            except ValueError:
                raise UnsupportedModelError(f"{name!r} in {self.path} is of ggml's type {kind}, which this engine does not know: "
                                            "convert the model to another type, such as Q8_0") from None
            block, block_bytes = GGML_QUANT_SIZES[ggml]
            elements = 1
            for dim in dims:        # Python's own integers: nothing overflows
                elements *= dim
            if not elements or dims[0] % block:
                raise self.wrong(f"{name!r} has rows of {dims[0]} values, {elements} in all, and {ggml.name} packs {block} "
                                 "values at a time")
            if elements // block * block_bytes > len(self.data):
                raise self.wrong(f"{name!r} is said to have the dimensions {list(dims)}, more than the file can hold")
            yield name, ggml.name, tuple(reversed(dims)), elements // block * block_bytes, offset
