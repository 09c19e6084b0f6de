"""The safetensors file format: plan the layout of a new file, and parse an untrusted file."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from holdfast.fileio.strict_json import RejectedJson, brief, loads

SIZES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8, "I64": 8, "U64": 8, "C64": 8,
        "F32": 4, "I32": 4, "U32": 4,
        "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
        "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
        "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    }
)  # fmt: skip
ALIGN_BYTES = 64  # a cache line, to align SIMD copies
MAX_HEADER_BYTES = 100_000_000  # the largest header that the safetensors library accepts
MAX_VALUES = 4_000_000  # enough for 400,000 tensors, with about ten values each
MAX_BYTES = 2**63 - 1  # the largest file offset
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


class Malformed(ValueError):
    """The bytes are not a safetensors file. The message is one line that states the defect."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The location of one tensor: `begin` and `end` are byte offsets within the data area."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a file and their offsets.

    `header` is everything before the data, including the header's length.
    """

    entries: tuple[Entry, ...]  # ordered by offset
    metadata: Mapping[str, str]
    header: bytes
    data_bytes: int
    _by_name: Mapping[str, Entry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.entries})

    @property
    def data_offset(self) -> int:
        """The number of bytes before the data area."""
        return len(self.header)

    @property
    def total_bytes(self) -> int:
        """The size of the whole file."""
        return len(self.header) + self.data_bytes

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Return the layout of a file with `tensors` (name, dtype, shape); its data area is 64-byte aligned.

    Tensors that fill whole cache lines come first, and each of them starts on a cache line. Within each
    group, wide dtypes come before narrow ones, which aligns every tensor to its element size. Otherwise the
    given order is kept. There are no holes.

    Raises:
        ValueError: A name is used twice or reserved, a dtype is unknown, or a size is negative.
    """
    entries: list[Entry] = []
    offset = 0
    sized = [(*each, _tensor_bytes(*each)) for each in tensors]
    for name, dtype, shape, size in sorted(
        sized, key=lambda each: (each[3] % ALIGN_BYTES > 0, -SIZES[each[1]])
    ):
        entries.append(Entry(name, dtype, tuple(shape), offset, offset + size))
        offset += size
    table: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        if entry.name in table or entry.name == METADATA:
            raise ValueError(f"tensor name {brief(entry.name)} is used twice or reserved")
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.begin, entry.end),
        }
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(text)} bytes; the limit is {MAX_HEADER_BYTES}")
    header = _LENGTH.pack(len(text)) + text
    return Layout(tuple(entries), MappingProxyType(dict(metadata)), header, offset)


def parse(buffer: bytes | bytearray | memoryview | mmap.mmap) -> Layout:
    """Return the layout of the file in `buffer`, which must contain only that file.

    Only the header is copied. The bytes may be hostile: time and memory are bounded for any input.

    Raises:
        Malformed: The bytes are not a safetensors file.
    """
    size = len(buffer)
    if size < _LENGTH.size:
        raise Malformed(f"the file has {size} bytes; the minimum is {_LENGTH.size}")
    (length,) = _LENGTH.unpack(buffer[: _LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise Malformed(f"header length is {length}; the limit is {MAX_HEADER_BYTES}")
    if length > size - _LENGTH.size:
        raise Malformed(f"header length is {length}, but the file has {size} bytes")
    header = bytes(buffer[: _LENGTH.size + length])
    if header[_LENGTH.size : _LENGTH.size + 1] != b"{":
        raise Malformed("header does not start with '{'")
    try:
        table = loads(header[_LENGTH.size :], max_values=MAX_VALUES)
    except RejectedJson as error:
        raise Malformed(f"header {error}") from None
    if not isinstance(table, dict):
        raise Malformed("header is not an object")
    metadata = _metadata(table.pop(METADATA, {}))
    entries = sorted(
        (_entry(name, value) for name, value in table.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    data_bytes = size - len(header)
    _check_cover(entries, data_bytes)
    return Layout(tuple(entries), MappingProxyType(metadata), header, data_bytes)


def map_file(path: Path | str, writable: bool = False) -> tuple[Layout, mmap.mmap]:
    """Return the layout of the file at `path` and a mapping of the whole file.

    The caller must close the mapping and ensure that the file does not shrink while it is in use.

    Raises:
        Malformed: The file is not a safetensors file; the message starts with the path.
        OSError: The file cannot be opened or mapped.
    """
    with open(path, "r+b" if writable else "rb") as file:
        if file.seek(0, 2) == 0:
            raise Malformed(f"{path}: the file is empty")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        mapping = mmap.mmap(file.fileno(), 0, access=access)
    try:
        return parse(mapping), mapping
    except Malformed as error:
        mapping.close()
        raise Malformed(f"{path}: {error}") from None


def _tensor_bytes(name: str, dtype: object, shape: object) -> int:
    """Return the size of a tensor in bytes. Raises Malformed unless dtype and shape are valid."""
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise Malformed(f"tensor {brief(name)} has dtype {brief(dtype)}, expected {', '.join(SIZES)}")
    if not isinstance(shape, list | tuple):
        raise Malformed(f"tensor {brief(name)} has a shape that is not a list of sizes")
    total = SIZES[dtype]
    for size in shape:
        if type(size) is not int or size < 0:
            raise Malformed(
                f"tensor {brief(name)} has an invalid size in its shape: {brief(size)}, expected a"
                " non-negative integer"
            )
        total *= size
        if total > MAX_BYTES:  # checked in the loop, because a long shape must not produce a huge integer
            raise Malformed(f"tensor {brief(name)} has more than {MAX_BYTES} bytes")
    return total


def _entry(name: str, value: object) -> Entry:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise Malformed(f"tensor name {brief(name)} is not valid Unicode") from None
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"tensor {brief(name)} is not an object of exactly dtype, shape and data_offsets")
    size = _tensor_bytes(name, value["dtype"], value["shape"])
    offsets = value["data_offsets"]
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int or offset < 0 for offset in offsets)
    ):
        raise Malformed(f"tensor {brief(name)} has data_offsets that are not two offsets")
    begin, end = offsets
    if end - begin != size:
        raise Malformed(
            f"tensor {brief(name)} needs {size} bytes for its shape, but has data_offsets for {end - begin}"
        )
    return Entry(name, value["dtype"], tuple(value["shape"]), begin, end)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Malformed(f"{METADATA} is not an object of strings")
    for key, text in value.items():
        if not isinstance(text, str):
            raise Malformed(f"{METADATA} has a value for {brief(key)} that is not a string")
    return value


def _check_cover(entries: list[Entry], data_bytes: int) -> None:
    """Raise Malformed unless the entries, in order of offset, cover the data without holes or overlaps."""
    covered = 0
    for entry in entries:
        if entry.begin != covered:
            fault = "overlaps data before" if entry.begin < covered else "leaves a hole after"
            raise Malformed(f"tensor {brief(entry.name)} starts at {entry.begin} and {fault} {covered}")
        covered = entry.end
    if covered != data_bytes:
        raise Malformed(f"tensors end at {covered}, but the file has {data_bytes} bytes of data")
