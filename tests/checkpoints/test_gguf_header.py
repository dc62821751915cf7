"""Headers of GGUF files: what stands in good ones, and that no bad one is believed, loses its way, or fills the memory."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from gemma4_flex.checkpoints.gguf_header import MAX_ELEMENTS, MAX_HEADER, MAX_STRING, Header, scan
from gemma4_flex.checkpoints.skeleton import CheckpointError
from gemma4_flex.geometry import UnsupportedModelError

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
HUGE = 1 << 40


# ---- files, byte by byte ---------------------------------------------------------------------------------------------

def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value) -> bytes:
    return struct.pack("<I", kind) + (text(value) if kind == STRING else struct.pack(f"<{CODES[kind]}", value))


def array(kind: int, values, count: int | None = None) -> bytes:
    body = b"".join(text(v) if kind == STRING else struct.pack(f"<{CODES[kind]}", v) for v in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + body


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if num_dims is None else num_dims, *dims, kind, offset)


def file(keys: dict[str, bytes] | list[tuple[str, bytes]] = (), tensors: list[bytes] = (), data: int = 0, *, version: int = 3,
         magic: bytes = b"GGUF", num_keys: int | None = None, num_tensors: int | None = None, align: int = 32) -> bytes:
    pairs = list(keys.items() if isinstance(keys, dict) else keys)
    head = magic + struct.pack("<IQQ", version, len(tensors) if num_tensors is None else num_tensors,
                               len(pairs) if num_keys is None else num_keys)
    head += b"".join(text(key) + value for key, value in pairs) + b"".join(tensors)
    return head + bytes(-len(head) % align) + bytes(data)


GOOD = file({"general.architecture": scalar(STRING, "gemma4"), "a.list": array(U32, [1, 2, 3]),
             "b.words": array(STRING, ["x", "yz"])}, [tensor("one", (4, 2)), tensor("two", (32,), 8, 32)], 96)


def scanned(tmp_path: Path, content: bytes) -> Header:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return scan(path)


def refusal(tmp_path: Path, content: bytes) -> str:
    with pytest.raises(CheckpointError) as error:
        scanned(tmp_path, content)
    assert_one_sentence(str(error.value))
    return str(error.value)


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message and "m.gguf" in message and len(message) < 400 and not message.endswith(".")


# ---- good files ------------------------------------------------------------------------------------------------------

def test_every_type_of_value_is_read(tmp_path):
    values = {U8: 200, I8: -3, U16: 60_000, I16: -300, U32: 1 << 31, I32: -70_000, F32: 0.5, BOOL: True, STRING: "ein ▁ wörd",
              U64: 1 << 63, I64: -(1 << 62), F64: 1e300}
    keys = {f"scalar.{kind}": scalar(kind, value) for kind, value in values.items()}
    keys |= {f"list.{kind}": array(kind, [value, value]) for kind, value in values.items()}
    keys |= {f"empty.{kind}": array(kind, []) for kind in values}
    found = scanned(tmp_path, file(keys)).metadata
    for kind, value in values.items():
        assert found[f"scalar.{kind}"] == value and type(found[f"scalar.{kind}"]) is type(value)
        assert found[f"list.{kind}"] == [value, value] and found[f"empty.{kind}"] == []
    assert list(found) == list(keys)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_the_gguf_packages_own_files_are_read_as_it_reads_them(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma4")
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a", 7)
    writer.add_array("b", [True, False, True])
    writer.add_array("c", ["▁a", "", "\n"])
    rng = np.random.default_rng(0)
    for name, shape, kind in (("x", (3, 64), "F32"), ("y", (5, 64), "Q8_0"), ("z", (7,), "F16"), ("w", (2, 3, 32), "Q4_0")):
        values = rng.standard_normal(shape).astype(np.float32)
        ggml = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, ggml), raw_dtype=ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, theirs = scan(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    assert found.metadata["a"] == 7 and found.metadata["b"] == [True, False, True] and found.metadata["c"] == ["▁a", "", "\n"]
    assert [t.name for t in theirs.tensors] == list(found.tensors)
    for wanted in theirs.tensors:
        info = found.tensors[wanted.name]
        assert (info.type, info.start, info.num_bytes) == (wanted.tensor_type.name, wanted.data_offset, wanted.n_bytes)
        assert info.shape == tuple(int(n) for n in reversed(wanted.shape))
        assert raw[info.start:info.start + info.num_bytes] == wanted.data.tobytes()


def test_versions_two_and_three_are_read_and_a_file_may_hold_nothing(tmp_path):
    for version in (2, 3):
        found = scanned(tmp_path, file(version=version))
        assert (found.metadata, found.tensors) == ({}, {})


def test_tensors_may_lie_in_another_order_than_described_and_one_after_the_other(tmp_path):
    found = scanned(tmp_path, file({}, [tensor("b", (8,), offset=32), tensor("a", (8,))], 64)).tensors
    assert found["b"].start == found["a"].start + 32 and list(found) == ["b", "a"]


# ---- files that are none ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("content, named", [
    (b"", "has 0 bytes"), (b"GGUF", "has 4 bytes"), (GOOD[:23], "has 23 bytes"), (b"PK\3\4" + bytes(60), "no GGUF file"),
    (file(magic=b"ggml"), "begins with b'ggml'"), (file(version=1), "version 1"), (file(version=4), "version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"), (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "big-endian"),
    (b"FUGG" + bytes(40), "no GGUF file"),
], ids=lambda value: str(value)[:20])
def test_what_is_no_gguf_file_is_said_to_be_none(tmp_path, content, named):
    assert named in refusal(tmp_path, content)


def test_a_path_that_leads_nowhere_or_to_a_directory_is_named(tmp_path):
    for path in (tmp_path / "m.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            scan(path)


HOSTILE = {
    "keys beyond the file": (file(num_keys=1 << 60), "metadata keys"),
    "tensors beyond the file": (file(num_tensors=1 << 60), "tensors"),
    "key of 2^40 bytes": (file([("", b"")])[:24] + struct.pack("<Q", HUGE) + bytes(40), f"of {HUGE} bytes"),
    "string of 2^40 bytes": (file({"k": struct.pack("<IQ", STRING, HUGE)}), f"k of {HUGE} bytes"),
    "string of 2^64 bytes": (file({"k": struct.pack("<IQ", STRING, (1 << 64) - 1)}), "k of"),
    "string in an array of 2^40 bytes": (file({"k": struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)}), f"of {HUGE} bytes"),
    "array of 2^40 numbers": (file({"k": array(U8, [1], HUGE)}), f"k of {HUGE} elements"),
    "array of 2^40 strings": (file({"k": array(STRING, ["a"], HUGE)}), f"k of {HUGE} elements"),
    "array of 2^61 doubles": (file({"k": array(F64, [1.0], 1 << 61)}), "elements"),
    "array of arrays": (file({"k": struct.pack("<IIQIQ", ARRAY, ARRAY, 1, U8, 0)}), "array of arrays"),
    "deep arrays": (file({"k": struct.pack("<I", ARRAY) * 5000}), "array of arrays"),
    "unknown type": (file({"k": struct.pack("<II", 13, 0)}), "k has the type 13"),
    "array of an unknown type": (file({"k": struct.pack("<IIQ", ARRAY, 99, 0)}), "array of the type 99"),
    "key twice": (file([("k", scalar(U8, 1)), ("k", scalar(U8, 1))]), "'k' twice"),
    "truth value of 2": (file({"k": struct.pack("<IB", BOOL, 2)}), "truth value"),
    "string not UTF-8": (file({"k": struct.pack("<I", STRING) + text(b"\xff\xfe")}), "not UTF-8"),
    "string of an array not UTF-8": (file({"k": struct.pack("<IIQ", ARRAY, STRING, 1) + text(b"\xc3")}), "not UTF-8"),
    "key not UTF-8": (file([("k", scalar(U8, 1))]).replace(b"k", b"\xff"), "not UTF-8"),
    "alignment 0": (file({"general.alignment": scalar(U32, 0)}), "alignment is 0"),
    "alignment 24": (file({"general.alignment": scalar(U32, 24)}), "alignment is 24"),
    "alignment array": (file({"general.alignment": array(U32, [32])}), "alignment is not one"),
    "alignment of another type": (file({"general.alignment": scalar(STRING, "32")}), "alignment is not one"),
    "alignment beyond the file": (file({"general.alignment": scalar(U32, 1 << 31)}, [tensor("a", (8,))], 32), "ends at byte"),
    "tensor twice": (file({}, [tensor("a", (8,)), tensor("a", (8,), offset=32)], 64), "'a' twice"),
    "overlap": (file({}, [tensor("a", (16,)), tensor("b", (8,), offset=32)], 64), "a and b overlap"),
    "same place": (file({}, [tensor("a", (8,)), tensor("b", (8,))], 64), "overlap"),
    "offset beyond the file": (file({}, [tensor("a", (8,), offset=64)], 64), "ends at byte"),
    "offset 2^64 - 32": (file({}, [tensor("a", (8,), offset=(1 << 64) - 32)], 64), "ends at byte"),
    "misaligned": (file({}, [tensor("a", (8,), offset=4)], 64), "offset 4 of a"),
    "one byte short": (file({}, [tensor("a", (8,))], 31), "ends at byte"),
    "no dimension": (file({}, [tensor("a", ())], 64), "0 dimensions"),
    "five dimensions": (file({}, [tensor("a", (1,) * 5)], 64), "5 dimensions"),
    "2^31 dimensions": (file({}, [tensor("a", (1,), num_dims=1 << 31)], 64), "dimensions"),
    "dimension 0": (file({}, [tensor("a", (8, 0))], 64), "rows of 8"),
    "dimensions that overflow to little": (file({}, [tensor("a", (1 << 32, 1 << 32, 2))], 64), "more than the file"),
    "row that blocks do not fill": (file({}, [tensor("a", (33,), 8)], 64), "packs 32"),
    "name of two lines": (file({}, [tensor("a\nb", (8,))], 64), r"name is 'a\nb'"),
    "name that clears a terminal": (file({}, [tensor("a\x1b[2J", (8,))], 64), r"name is 'a\x1b[2J'"),
    "key of two lines": (file({"a\nb": scalar(U8, 1)}), r"key is 'a\nb'"),
    "long name": (file({}, [tensor("a" * 5000, (8,), num_dims=0)], 64), "name of 5000 bytes"),
    "long key": (file({"a" * 5000: struct.pack("<I", 99)}), "key of 5000 bytes"),
    "name of 2^40 bytes": (file({}, [struct.pack("<Q", HUGE) + bytes(40)], 64), f"of {HUGE} bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence_and_little_memory(tmp_path, case):
    content, named = HOSTILE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as error:
            scan(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert_one_sentence(str(error.value))
    assert named in str(error.value)


@pytest.mark.parametrize("kind", [4, 42, 12345])
def test_a_type_of_ggmls_that_is_not_known_is_no_damage(tmp_path, kind):
    """One that was given up, one that is newer than the gguf package, and one that there may be."""
    with pytest.raises(UnsupportedModelError, match=f"'a' in .* type {kind}, ") as error:
        scanned(tmp_path, file({}, [tensor("a", (32,), kind)], 64))
    assert_one_sentence(str(error.value))


@pytest.mark.parametrize("kind, count, named", [(U8, MAX_ELEMENTS + 1, "elements"), (STRING, 1, "the most that one may have")])
def test_metadata_larger_than_any_models_are_refused_though_the_file_is_as_long(tmp_path, kind, count, named):
    path = tmp_path / "m.gguf"
    head = file(num_keys=1)[:24] + text("k")
    head += struct.pack("<IIQ", ARRAY, kind, count) if kind == U8 else struct.pack("<IQ", STRING, MAX_STRING + 1)
    with path.open("wb") as out:
        out.write(head)
        out.truncate(MAX_HEADER + 100)      # a hole: takes no room on the disk
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=named):
            scan(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path):
    scanned(tmp_path, GOOD)
    for length in range(len(GOOD) - 1, -1, -1):
        if length >= len(GOOD) - 30:
            continue        # no tensor lies there: the last ends 30 bytes before the file does
        refusal(tmp_path, GOOD[:length])


# ---- any bytes at all ------------------------------------------------------------------------------------------------

@st.composite
def damaged(draw) -> bytes:
    content = bytearray(draw(st.sampled_from([GOOD, *(content for content, _ in HOSTILE.values())])))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "number", "cut", "drop", "double"]))
        if kind == "flip" and content:
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            value = draw(st.sampled_from([0, 1, 2, 8, 9, 10, 31, 32, 255, 1 << 16, 1 << 31, (1 << 32) - 1, HUGE, (1 << 64) - 1]))
            content[at:at + 8] = struct.pack("<Q", value)[:len(content[at:at + 8])]
        elif kind == "cut":
            del content[at:]
        elif kind == "drop":
            del content[at:at + draw(st.integers(1, 40))]
        elif kind == "double":
            content[at:at] = content[at:at + draw(st.integers(1, 40))]
    return bytes(content)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.one_of(damaged(), st.binary(max_size=200).map(lambda tail: GOOD[:24] + tail)))
@example(GOOD)
def test_any_bytes_are_a_header_that_holds_or_one_sentence(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        found = scan(path)
    except (CheckpointError, UnsupportedModelError) as error:
        assert_one_sentence(str(error))
    else:
        places = sorted((info.start, info.start + info.num_bytes) for info in found.tensors.values())
        assert all(0 < start <= end <= len(content) for start, end in places)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
