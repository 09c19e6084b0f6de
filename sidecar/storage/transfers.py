"""Transfer the files of a checkpoint to and from object storage, several parts at a time.

Each part of a file is a separate object. Multipart uploads are not used, because a process that is killed can
leave one behind. It would stay in the bucket, billed but not listed, and the library could neither find nor
abort it. Separate objects show up in listings, so what an interrupted upload leaves behind can be deleted.
They are also read and verified one by one, so an interrupted download resumes with the missing parts.
"""

from __future__ import annotations

import errno
import functools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from holdfast.checkpoint.manifest import ObjectLayout
from holdfast.checkpoint.sharing import SharedFile, SharedPiece
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry, stretch_crc
from sidecar.storage.object_client import ObjectClient, ObjectStoreError

PARTS = 4  # how many parts are transferred at a time; each is held in memory
FEW = 1000  # if a file would have more parts, its parts become larger than a chunk
LARGEST = 2 * CHUNK_BYTES  # limits the content in memory to 64 MiB, or twice that while it is copied
TRIES = 3  # attempts to read each part, in addition to the library's retries of each request

Part = tuple[str, int, int]  # key, first byte, end


def part_bytes(largest_file: int) -> int:
    """Return the size of the parts for files of at most `largest_file` bytes: a multiple of a chunk."""
    chunks = -(-largest_file // (FEW * CHUNK_BYTES))
    return min(max(chunks, 1) * CHUNK_BYTES, LARGEST)


def parts(base: str, name: str, size: int, layout: ObjectLayout | None) -> list[Part]:
    """Return the objects of a file of the checkpoint at `base`. Without a layout, the file is one object."""
    if layout is None:
        return [(f"{base}/{name}", 0, size)]
    step = layout.part_bytes
    return [
        (part_key(base, name, layout.folder, number), begin, min(begin + step, size))
        for number, begin in enumerate(range(0, max(size, 1), step))
    ]


def part_key(base: str, name: str, folder: str, number: int) -> str:
    """Return the key of an object of a file."""
    return f"{base}/{folder}/{name}/{number:05d}"


def _reads(base: str, entry: FileEntry, layout: ObjectLayout | None) -> list[Part]:
    """Return the parts of a file to read: its objects, or, if it is one object, ranges of chunks."""
    if layout is not None or not entry.bytes:
        return parts(base, entry.name, entry.bytes, layout)
    step = entry.chunk_bytes * max(1, CHUNK_BYTES // entry.chunk_bytes)
    begins = range(0, entry.bytes, step)
    return [(f"{base}/{entry.name}", begin, min(begin + step, entry.bytes)) for begin in begins]


def upload(
    client: ObjectClient,
    base: str,
    files: Mapping[str, Path | bytes],
    layout: ObjectLayout,
    moved: Callable[[], object],
) -> tuple[FileEntry, ...]:
    """Write all files; return their sizes and checksums. `moved` is called after each part, on any thread.

    If this raises `OSError`, no transfer is still in progress, and some parts may be on storage.
    """
    crcs: dict[str, list[int]] = {name: [] for name in files}
    sizes = {
        name: len(source) if isinstance(source, bytes) else source.stat().st_size
        for name, source in files.items()
    }

    def write(key: str, content: bytes) -> None:
        client.write(key, content)
        moved()

    def writes() -> Iterator[Callable[[], None]]:
        for name, source in files.items():
            found = parts(base, name, sizes[name], layout)
            for (key, begin, end), content in zip(found, _pieces(source, found), strict=True):
                if len(content) != end - begin:
                    raise OSError(errno.EIO, f"{name} changed its size during the copy")
                crcs[name] += _crcs(content)
                yield lambda key=key, content=content: write(key, content)  # type: ignore[misc]

    _at_once(writes())
    return tuple(FileEntry(name, sizes[name], CHUNK_BYTES, tuple(crcs[name])) for name in files)


def upload_rest(
    client: ObjectClient,
    base: str,
    name: str,
    source: Path,
    layout: ObjectLayout,
    work: SharedFile,
    moved: Callable[[], object],
) -> None:
    """Write the parts of a file that no peer writes; return when all are on storage. Raises `OSError`."""

    def write(piece: SharedPiece) -> tuple[int, ...]:
        key = part_key(base, name, layout.folder, piece.begin // layout.part_bytes)
        (content,) = _pieces(source, [(key, piece.begin, piece.end)])
        if len(content) != piece.end - piece.begin:
            raise OSError(errno.EIO, f"{name} changed its size during the copy")
        crcs = tuple(_crcs(content))
        client.write(key, content)
        moved()
        return crcs

    work.write_rest(write, PARTS)


def download(
    client: ObjectClient,
    base: str,
    entry: FileEntry,
    layout: ObjectLayout | None,
    target: Path,
    moved: Callable[[], object],
) -> str | None:
    """Download the file `entry` to `target`. Return what is wrong with it on storage; None if it is intact.

    Parts that an interrupted download has left, even in an earlier process, are verified instead of being
    read again. Raises `OSError` if storage or the disk fails.
    """
    partial = target.with_name(f".{target.name}.partial")
    found = _reads(base, entry, layout)
    if target.exists():
        with open(target, "rb", buffering=0) as file:
            if _size(file.fileno()) == entry.bytes and not _missing(file.fileno(), entry, found):
                return None
        os.replace(target, partial)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        begun = _size(descriptor) == entry.bytes
        _allocate(descriptor, entry.bytes)
        faults: list[str] = []

        def fetch(part: Part) -> None:
            use = functools.partial(_put, descriptor, part[1])
            fault = _checked(client, entry, part, layout is None, use)
            if fault is not None:
                faults.append(fault)
            moved()

        missing = _missing(descriptor, entry, found) if begun else found
        _at_once((lambda part=part: fetch(part)) for part in missing)  # type: ignore[misc]
    finally:
        os.close(descriptor)
    if faults:
        partial.unlink()
        return faults[0]
    os.replace(partial, target)
    return None


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _allocate(descriptor: int, size: int) -> None:
    """Reserve disk space for the whole file. Raises `OSError`."""
    os.ftruncate(descriptor, size)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def content_fault(
    client: ObjectClient, base: str, entry: FileEntry, layout: ObjectLayout | None
) -> str | None:
    """Read a whole file; return what is wrong with it, or None. Raises `OSError` if storage fails."""
    faults: list[str] = []

    def check(part: Part) -> None:
        fault = _checked(client, entry, part, layout is None, lambda _: None)
        if fault is not None:
            faults.append(fault)

    found = _reads(base, entry, layout)
    _at_once((lambda part=part: check(part)) for part in found)  # type: ignore[misc]
    return faults[0] if faults else None


def _checked(
    client: ObjectClient, entry: FileEntry, part: Part, is_range: bool, use: Callable[[bytes], object]
) -> str | None:
    """Read a part and call `use` with it. If it is missing or damaged, return the defect instead.

    If `is_range`, the part is a range of a larger object. Otherwise, it is a separate object.
    """
    key, begin, end = part
    fault = None
    for attempt in range(TRIES):
        try:
            if is_range and begin < end:
                content = client.read_range(key, begin, end)
            else:
                content = client.read(key, max(end - begin, 1))
        except ObjectStoreError as error:
            if not error.is_transient or attempt + 1 == TRIES:
                raise
            continue
        if content is None:
            return f"{entry.name} is missing from byte {begin}" if begin else f"{entry.name} is missing"
        if len(content) != end - begin:
            return f"{entry.name} has {len(content)} bytes from byte {begin}, but {end - begin} were written"
        fault = _fault(entry, begin, content)
        if fault is None:
            use(content)
            return None
    return fault


def _fault(entry: FileEntry, begin: int, content: bytes) -> str | None:
    """Return the defect of a part; None if its checksums are correct.

    A part consists of whole chunks, because `unpack` accepts no other layout.
    """
    size = entry.chunk_bytes
    with memoryview(content) as view:
        for number, at in enumerate(range(0, len(content), size), begin // size):
            if zlib.crc32(view[at : at + size]) != entry.crc32[number]:
                end = begin + min(at + size, len(content))
                return f"{entry.name} is damaged: checksum differs in bytes {begin + at} to {end - 1}"
    return None


def _missing(descriptor: int, entry: FileEntry, found: list[Part]) -> list[Part]:
    """Return the parts whose content is not in the local file."""
    size = entry.chunk_bytes

    def is_there(begin: int, end: int) -> bool:
        return all(
            stretch_crc(descriptor, at, min(at + size, end)) == entry.crc32[at // size]
            for at in range(begin, end, size)
        )

    return [part for part in found if not is_there(part[1], part[2])]


def _put(descriptor: int, at: int, content: bytes) -> None:
    with memoryview(content) as view:
        done = 0
        while done < len(view):
            done += os.pwrite(descriptor, view[done:], at + done)


def _pieces(source: Path | bytes, found: list[Part]) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from (source[begin:end] for _, begin, end in found)
        return
    with open(source, "rb", buffering=0) as file:
        for _, begin, end in found:
            pieces: list[bytes] = []
            while begin < end and (piece := os.pread(file.fileno(), end - begin, begin)):
                pieces.append(piece)
                begin += len(piece)
            yield pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _crcs(content: bytes) -> list[int]:
    with memoryview(content) as view:
        return [zlib.crc32(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES)]


def _at_once(work: Iterable[Callable[[], None]]) -> None:
    """Do each piece of `work`, `PARTS` at a time. Raise the first error, and begin no piece after it."""
    with ThreadPoolExecutor(PARTS, "holdfast-objects") as pool:
        running: set[Future[None]] = set()
        for each in work:
            if len(running) == PARTS:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    one.result()
            running.add(pool.submit(each))
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                one.result()
