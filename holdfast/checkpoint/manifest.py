"""Encode and decode the manifest of a checkpoint. Decoding is safe even if the bytes are damaged or hostile.

A manifest is one line of JSON. Its last member is the CRC32 of all preceding bytes, so damage is detected
before the JSON is parsed.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.fileio.checksum import FileEntry
from holdfast.fileio.strict_json import RejectedJson, brief, loads
from holdfast.protocol.lineage import MOST, Lineage

FORMAT = 1
REPLICATED = "replicated.safetensors"  # the file with the state that all ranks share
MAX_BYTES = 64 << 20
MAX_VALUES = 4_000_000
MIN_CHUNK_BYTES = 4096
MAX_CHUNK_BYTES = 64 << 20
MAX_PART_BYTES = 64 << 20
MAX_NUMBER = 2**63 - 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
NAME_RULE = "letters, digits, '.', '_' and '-', no leading '.'"
_PRIVATE = re.compile(r"rank-\d{5,19}\.bin")  # see `private_name`
_TAIL = re.compile(rb',"crc32":(\d{1,10})\}\n?')
_TAIL_BYTES = 24


class InvalidCheckpoint(ValueError):
    """The bytes are not a valid manifest. The message is one line that continues "manifest.json ..."."""


class NewerFormat(InvalidCheckpoint):
    """The manifest has a format that only a later version of holdfast can read."""


@dataclass(frozen=True, slots=True)
class ObjectLayout:
    """Describes how object storage divides the files of a checkpoint into objects.

    A file is stored as the objects `folder`/FILE/00000, 00001 and so on. Each object has `part_bytes` bytes,
    but the last one may be shorter. An empty file is stored as one empty object.
    """

    folder: str
    part_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. `created` is in seconds since the epoch.

    `lineage` is the run's lineage when the checkpoint was written. From it, readers can tell which other
    checkpoints are void.
    """

    generation: int
    step: int
    world_size: int
    created: float
    files: tuple[FileEntry, ...]
    meta: Mapping[str, object]
    lineage: tuple[Lineage, ...] = ()
    epoch: int = 0  # the epoch of the supervisor that ordered the checkpoint
    objects: ObjectLayout | None = None  # None: each file is stored whole, beside the manifest


def private_name(rank: int) -> str:
    """Return the name of the file that contains a rank's private state."""
    return f"rank-{rank:05d}.bin"


def is_state_name(name: str) -> bool:
    """Return whether Holdfast uses this name for a file of a checkpoint."""
    return name == REPLICATED or _PRIVATE.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Return whether a checkpoint may contain a file of this name.

    Paths, names with a leading dot and the manifest's own name are not allowed.
    """
    return _NAME.fullmatch(name) is not None and name != "manifest.json"


def pack(manifest: Manifest) -> bytes:
    """Return the bytes of `manifest`.

    Raises:
        ValueError: `meta` is not JSON, or `unpack` would refuse the manifest.
    """
    body: dict[str, object] = {
        "format": FORMAT,
        "generation": manifest.generation,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "created": manifest.created,
        "files": {
            entry.name: {
                "bytes": entry.bytes,
                "chunk_bytes": entry.chunk_bytes,
                "crc32": entry.crc32,
            }
            for entry in manifest.files
        },
        "meta": manifest.meta,
    }
    if manifest.lineage:
        body["lineage"] = [[each.generation, each.step] for each in manifest.lineage]
    if manifest.epoch:
        body["epoch"] = manifest.epoch
    if manifest.objects is not None:
        body["objects"] = {"folder": manifest.objects.folder, "part_bytes": manifest.objects.part_bytes}
    try:
        text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"meta of a checkpoint is not JSON: {error}") from None
    head = text[:-1]
    raw = head + b',"crc32":%d}\n' % zlib.crc32(head)
    unpack(raw)  # refuse to write a manifest that could not be read back
    return raw


def unpack(raw: bytes) -> Manifest:
    """Return the manifest encoded in `raw`.

    Raises:
        NewerFormat: The manifest is intact, but its format is newer.
        InvalidCheckpoint: The data is damaged, incomplete, or not a manifest.
    """
    body = _checked(raw)
    version = body.get("format")
    if type(version) is int and version > FORMAT:
        raise NewerFormat(f"has format {version}, but this holdfast reads only up to {FORMAT}: update it")
    if version != FORMAT or type(version) is not int:
        raise InvalidCheckpoint(f"has format {brief(version)}, expected {FORMAT}")
    files, meta, created = body.get("files"), body.get("meta"), body.get("created")
    if not isinstance(files, dict) or not isinstance(meta, dict):
        raise InvalidCheckpoint("has files or meta that is not an object")
    if not isinstance(created, int | float) or not math.isfinite(created):
        raise InvalidCheckpoint(f"has created {brief(created)}, expected seconds since the epoch")
    entries = tuple(_file(name, value) for name, value in files.items())
    return Manifest(
        _number(body, "generation"),
        _number(body, "step"),
        _number(body, "world_size", low=1),
        float(created),
        entries,
        meta,
        _lineage(body.get("lineage", [])),
        _number(body, "epoch") if "epoch" in body else 0,
        _objects(body["objects"], entries) if "objects" in body else None,
    )


def _objects(value: object, files: tuple[FileEntry, ...]) -> ObjectLayout:
    """Return the layout that `value` describes.

    A part must consist of whole chunks. A file then has at most as many parts as checksums, so a hostile
    manifest cannot announce an unlimited number of parts.
    """
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"has objects {brief(value)}, expected an object")
    folder = value.get("folder")
    if not isinstance(folder, str) or not is_file_name(folder):
        raise InvalidCheckpoint(f"has the folder {brief(folder)}, expected {NAME_RULE}")
    part_bytes = _number(value, "part_bytes", MIN_CHUNK_BYTES, MAX_PART_BYTES)
    for entry in files:
        if part_bytes % entry.chunk_bytes:
            raise InvalidCheckpoint(
                f"has part_bytes {part_bytes}, expected a multiple of the chunk size {entry.chunk_bytes}"
            )
    return ObjectLayout(folder, part_bytes)


def _lineage(value: object) -> tuple[Lineage, ...]:
    """Return the lineage in a manifest; it is empty if the manifest is from an early version."""
    if not isinstance(value, list) or len(value) > MOST:
        raise InvalidCheckpoint(f"has lineage {brief(value)}, expected a list of at most {MOST}")
    for each in value:
        whole = isinstance(each, list) and len(each) == 2
        if not whole or any(type(number) is not int or not 0 <= number <= MAX_NUMBER for number in each):
            raise InvalidCheckpoint(f"has {brief(each)} in its lineage, expected a generation and a step")
    return tuple(Lineage(generation, step) for generation, step in value)


def _checked(raw: bytes) -> dict[str, object]:
    if len(raw) > MAX_BYTES:
        raise InvalidCheckpoint(f"has more than {MAX_BYTES} bytes")
    at = raw.rfind(b',"crc32":', max(0, len(raw) - _TAIL_BYTES))
    tail = _TAIL.fullmatch(raw, max(at, 0))
    if at < 0 or tail is None:
        raise InvalidCheckpoint("is truncated or damaged: it does not end with its checksum")
    head = raw[:at]
    if zlib.crc32(head) != int(tail[1]):
        raise InvalidCheckpoint("is damaged: its checksum does not match")
    try:
        body = loads(head + b"}", max_values=MAX_VALUES)
    except RejectedJson as error:
        raise InvalidCheckpoint(str(error)) from None
    if not isinstance(body, dict):
        raise InvalidCheckpoint("is not an object")
    return body


def _number(body: Mapping[str, object], key: str, low: int = 0, high: int = MAX_NUMBER) -> int:
    value = body.get(key)
    if type(value) is not int or not low <= value <= high:
        raise InvalidCheckpoint(f"has {key} {brief(value)}, expected {low} to {high}")
    return value


def _file(name: str, value: object) -> FileEntry:
    if not is_file_name(name):
        raise InvalidCheckpoint(f"has the file name {brief(name)}, expected {NAME_RULE}")
    if not isinstance(value, dict):
        raise InvalidCheckpoint(f"has a file {name} that is not an object")
    size = _number(value, "bytes")
    chunk_bytes = _number(value, "chunk_bytes", MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    crcs = value.get("crc32")
    if not isinstance(crcs, list) or len(crcs) != -(-size // chunk_bytes):
        raise InvalidCheckpoint(f"has a file {name} without one checksum for each chunk")
    if any(type(crc) is not int or not 0 <= crc < 2**32 for crc in crcs):
        raise InvalidCheckpoint(f"has a file {name} with a checksum that is not a 32-bit number")
    return FileEntry(name, size, chunk_bytes, tuple(crcs))
