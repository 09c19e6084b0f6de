from __future__ import annotations

import json
import mmap
import random
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from holdfast.fileio.safetensors import ALIGN_BYTES, SIZES, Entry, Layout, Malformed, map_file, parse, plan

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32, "U16": np.uint16,
    "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
tensors = st.lists(
    st.tuples(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.sampled_from(sorted(DTYPES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    unique_by=lambda item: item[0],
    max_size=8,
)


def file_of(table: object, data: bytes = b"", raw: bytes | None = None) -> bytes:
    header = json.dumps(table).encode() if raw is None else raw
    return struct.pack("<Q", len(header)) + header + data


def parsed_or_why(raw: bytes | bytearray) -> Layout | str:
    try:
        return parse(raw)
    except Malformed as error:
        return str(error)


def tensor(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@given(tensors, st.dictionaries(st.text(), st.text(), max_size=3))
def test_the_library_reads_a_planned_file(
    specs: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    layout = plan(specs, metadata)
    data = random.Random(1).randbytes(layout.data_bytes)
    found = safetensors.numpy.load(layout.header + data)

    assert layout.data_offset % ALIGN_BYTES == 0
    assert found.keys() == {name for name, _, _ in specs}
    for name, dtype, shape in specs:
        entry = layout[name]
        assert entry.begin % SIZES[dtype] == 0
        raw = data[entry.begin : entry.end]
        expected: Any = np.frombuffer(raw, DTYPES[dtype]).reshape(shape)
        assert found[name].tobytes() == expected.tobytes()
        assert found[name].dtype == expected.dtype
        assert found[name].shape == shape


@given(tensors, st.dictionaries(st.text(), st.text(), max_size=3))
def test_a_planned_file_is_parsed(
    specs: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    layout = plan(specs, metadata)
    assert parse(layout.header + bytes(layout.data_bytes)) == layout
    assert layout.total_bytes == len(layout.header) + layout.data_bytes


@given(tensors, st.dictionaries(st.text(), st.text(), min_size=1, max_size=3))
def test_a_file_written_by_the_library_is_parsed(
    specs: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> None:
    arrays: dict[str, Any] = {name: np.ones(shape, DTYPES[dtype]) for name, dtype, shape in specs}
    raw = safetensors.numpy.save(arrays, metadata)
    layout = parse(memoryview(raw))

    assert {entry.name for entry in layout.entries} == arrays.keys()
    assert layout.metadata == metadata
    for name, dtype, shape in specs:
        entry = layout[name]
        assert (entry.dtype, entry.shape) == (dtype, shape)
        begin = layout.data_offset + entry.begin
        assert raw[begin : begin + entry.end - entry.begin] == arrays[name].tobytes()


def test_dtypes_that_numpy_lacks_are_readable_by_the_library(tmp_path: Path) -> None:
    specs = [(dtype, dtype, (4,)) for dtype in SIZES]
    layout = plan(specs, {})
    (tmp_path / "all").write_bytes(layout.header + bytes(layout.data_bytes))

    with safe_open(tmp_path / "all", "numpy") as file:
        assert set(file.keys()) == set(SIZES)
        assert all(file.get_slice(dtype).get_dtype() == dtype for dtype in SIZES)


def test_wide_tensors_come_first_and_equal_ones_keep_their_order() -> None:
    layout = plan([("b", "F32", (3,)), ("c", "U8", (5,)), ("a", "F32", ()), ("d", "I64", ())], {})
    assert layout.entries == (
        Entry("d", "I64", (), 0, 8),
        Entry("b", "F32", (3,), 8, 20),
        Entry("a", "F32", (), 20, 24),
        Entry("c", "U8", (5,), 24, 29),
    )
    assert "a" in layout
    assert "x" not in layout


def test_tensors_that_fill_cache_lines_start_on_one_whatever_precedes_them() -> None:
    """An optimizer's state has this shape: a step of 4 bytes before the moments of each layer."""
    layout = plan([("s0", "F32", ()), ("m0", "F32", (4, 16)), ("s1", "F64", ()), ("m1", "BF16", (32,))], {})
    assert [entry.name for entry in layout.entries] == ["m0", "m1", "s1", "s0"]
    assert [entry.begin for entry in layout.entries] == [0, 256, 320, 328]
    assert layout.data_offset % 64 == 0


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ([("a", "F32", ()), ("a", "F32", ())], "'a' is used twice"),
        ([("__metadata__", "F32", ())], "reserved"),
        ([("a", "F31", ())], "dtype 'F31', expected F64"),
        ([("a", "F32", (-1,))], "size in its shape: -1, expected a non-negative integer"),
        ([("a", "F32", (2**62, 2))], "more than"),
    ],
)
def test_an_impossible_plan_is_refused(specs: list[tuple[str, str, tuple[int, ...]]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        plan(specs, {})


HOSTILE = {
    "the file has 0 bytes; the minimum is 8": b"",
    "the file has 7 bytes; the minimum is 8": bytes(7),
    "header length is 18446744073709551615; the limit is": b"\xff" * 8,
    "header length is 100000001; the limit is": struct.pack("<Q", 100_000_001),
    "header length is 99999999, but the file has 10": struct.pack("<Q", 99_999_999) + b"{}",
    "does not start with '{'": file_of(None, raw=b" {}"),
    "header does not start": file_of([]),
    "is not UTF-8": file_of(None, raw=b'{"\xff":1}'),
    "is not JSON": file_of(None, raw=b"{nope}"),
    "nested too deeply": file_of(None, raw=b'{"a":' + b"[" * 500_000),
    "more than 4000000 values": file_of(None, raw=b'{"a":[' + b"[]," * 2_000_001),
    "name 'a' twice": file_of(None, raw=b'{"a":{},"a":{}}'),
    "has NaN": file_of(None, raw=b'{"a":NaN}'),
    "integer of 5000 digits": file_of(None, raw=b'{"a":' + b"1" * 5000 + b"}"),
    "not valid Unicode": file_of({"\ud800": tensor()}, bytes(8)),
    "'a' is not an object": file_of({"a": [1]}),
    "exactly dtype, shape and data_offsets": file_of({"a": {**tensor(), "x": 1}}, bytes(8)),
    "dtype 'F31'": file_of({"a": tensor(dtype="F31")}, bytes(8)),
    "dtype a list": file_of({"a": tensor(dtype=[])}, bytes(8)),
    "dtype 3": file_of({"a": tensor(dtype=3)}, bytes(8)),
    "shape that is not a list": file_of({"a": tensor(shape="2")}, bytes(8)),
    "size in its shape: -2, expected a non-negative integer": file_of({"a": tensor(shape=[-2])}, bytes(8)),
    "size in its shape: True, expected a non-negative integer": file_of(
        {"a": tensor(shape=[True, 2])}, bytes(8)
    ),
    "size in its shape: 2.0, expected a non-negative integer": file_of({"a": tensor(shape=[2.0])}, bytes(8)),
    "has more than 9223372036854775807 bytes": file_of({"a": tensor(shape=[2**63] * 9)}, bytes(8)),
    "more than 9223372036854775807": file_of({"a": tensor(shape=[2**62, 2, 0])}, bytes(8)),
    "needs 12 bytes for its shape": file_of({"a": tensor(shape=[3])}, bytes(8)),
    "not two offsets": file_of({"a": tensor(offsets=[0])}, bytes(8)),
    "that are not two offsets": file_of({"a": tensor(offsets=[-8, 0])}, bytes(8)),
    "has data_offsets that are not two": file_of({"a": tensor(offsets=[False, 8])}, bytes(8)),
    "but has data_offsets for -8": file_of({"a": tensor(offsets=[8, 0])}, bytes(8)),
    "starts at 0 and overlaps data before 8": file_of({"a": tensor(), "b": tensor()}, bytes(8)),
    "starts at 4 and overlaps": file_of({"a": tensor(), "b": tensor(offsets=[4, 12])}, bytes(12)),
    "starts at 9 and leaves a hole": file_of({"a": tensor(), "b": tensor(offsets=[9, 17])}, bytes(17)),
    "tensors end at 8, but the file has 7": file_of({"a": tensor()}, bytes(7)),
    "tensors end at 8, but the file has 9": file_of({"a": tensor()}, bytes(9)),
    "tensors end at 9007199254740992": file_of({"a": tensor(shape=[2**51], offsets=[0, 2**53])}, bytes(9)),
    "__metadata__ has a value for 'k' that is not a string": file_of({"__metadata__": {"k": 1}}),
    "__metadata__ is not an object": file_of({"__metadata__": "k"}),
}


@pytest.mark.parametrize("why", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(why: str) -> None:
    with pytest.raises(Malformed, match=re.escape(why)) as caught:
        parse(HOSTILE[why])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"a": tensor(shape=[3])}, "tensor 'a' needs 12 bytes for its shape, but has data_offsets for 8"),
        ({"a": tensor(shape="2")}, "tensor 'a' has a shape that is not a list of sizes"),
        ({"a": tensor(offsets=[0])}, "tensor 'a' has data_offsets that are not two offsets"),
        ({"a": tensor(), "b": tensor()}, "tensor 'b' starts at 0 and overlaps data before 8"),
        ({"a": tensor(offsets=[1, 9])}, "tensor 'a' starts at 1 and leaves a hole after 0"),
        ({"a": [1]}, "tensor 'a' is not an object of exactly dtype, shape and data_offsets"),
        ({}, "tensors end at 0, but the file has 8 bytes of data"),
    ],
)
def test_a_refusal_names_the_tensor_and_its_defect(table: object, why: str) -> None:
    assert parsed_or_why(file_of(table, bytes(8))) == why


def test_a_file_with_damage_anywhere_is_parsed_or_refused_and_never_reaches_outside() -> None:
    layout = plan([("a", "F32", (3, 4)), ("b", "I8", (7,))], {"k": "v"})
    whole = layout.header + bytes(layout.data_bytes)
    chance = random.Random(2)
    for _ in range(2000):
        raw = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        found = parsed_or_why(raw)
        if isinstance(found, str):
            assert found.isprintable()
        else:
            assert all(entry.end <= found.data_bytes for entry in found.entries)


@given(st.binary(max_size=200))
def test_any_header_is_parsed_or_refused(header: bytes) -> None:
    found = parsed_or_why(file_of(None, raw=header))
    assert not isinstance(found, str) or found.isprintable()


def test_a_file_is_mapped_for_reading_or_writing(tmp_path: Path) -> None:
    layout = plan([("a", "U8", (3,))], {})
    path = tmp_path / "a.safetensors"
    path.write_bytes(layout.header + b"abc")

    found, mapping = map_file(path, writable=True)
    assert found == layout
    mapping[found.data_offset] = ord("x")
    mapping.close()
    found, mapping = map_file(path)
    assert isinstance(mapping, mmap.mmap)
    assert mapping[found.data_offset :] == b"xbc"
    with pytest.raises(TypeError):
        mapping[0] = 1
    mapping.close()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a pickle in a zip"])
def test_a_path_that_is_not_a_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(Malformed, match=r"model\.pt: "):
        map_file(path)
