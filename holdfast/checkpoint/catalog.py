"""List the checkpoints in a directory, verify them, and report why a checkpoint is invalid.

A directory without a valid manifest is not a checkpoint. The file `latest` is never read.

A training script may save into the same directory, under the same names. A writer gives a checkpoint its
final name only once it contains the manifest, and a removal begins by renaming the manifest. So if a
directory has content, but neither the manifest nor the renamed manifest, Holdfast did not write it, or it has
been damaged. It is listed as `Foreign`, and is never replaced or deleted.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.manifest import (
    MAX_BYTES,
    InvalidCheckpoint,
    Manifest,
    NewerFormat,
    ObjectLayout,
    is_state_name,
    unpack,
)
from holdfast.fileio.checksum import FileEntry, file_crcs
from holdfast.protocol.lineage import Lineage

MANIFEST = "manifest.json"
LATEST = "latest"  # written for people and scripts; Holdfast never reads it
REMOVED = ".removed"  # the name of the manifest while the rest of its checkpoint is being removed
FOREIGN = "not written by Holdfast, or damaged"  # the beginning of the message of `Foreign`
_ASIDE = ".old"  # the suffix of a checkpoint while it is being replaced
_NAME = re.compile(r"step-(\d{8,19})(\.old(-[0-9a-f]{16})?)?")


class Unreadable(InvalidCheckpoint):
    """Storage failed, so the checkpoint may or may not be valid."""


class Foreign(InvalidCheckpoint):
    """Something has the name of a checkpoint, but nothing shows that Holdfast wrote it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{FOREIGN}: {why}")


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint that has a valid manifest and files of the right sizes."""

    path: Path
    step: int
    generation: int
    world_size: int
    created: float  # seconds since the epoch
    files: tuple[FileEntry, ...]
    meta: Mapping[str, object]
    bytes: int
    lineage: tuple[Lineage, ...] = ()  # the run's lineage when the checkpoint was written
    epoch: int = 0  # the epoch of the supervisor that ordered the checkpoint
    objects: ObjectLayout | None = None  # None in a directory


def load(path: Path | str, at: Path | None = None) -> StoredCheckpoint:
    """Return the checkpoint in the directory `path`, without verifying the content of its files.

    If `at` is given, the directory is accessed through that path instead.

    Raises:
        NewerFormat: A later version of holdfast wrote the checkpoint.
        Unreadable: Storage failed.
        Foreign: Something else has the name of the checkpoint.
        InvalidCheckpoint: The directory is not a valid checkpoint. The message gives the reason in one line.
    """
    path = Path(path)
    folder = at or path

    def read() -> bytes:
        raw = _read_manifest(folder / MANIFEST)
        check_own(raw, lambda: any(map(is_state_name, _names(folder))))
        return raw

    try:
        return described(path, read, lambda _, entry: _size_fault(folder, entry))
    except (Unreadable, NewerFormat, Foreign):
        raise
    except InvalidCheckpoint:
        names = _names(folder)
        if not names or MANIFEST in names or REMOVED in names:
            raise
        raise Foreign(f"{MANIFEST} is missing") from None


def described(
    path: Path, read: Callable[[], bytes], fault: Callable[[Manifest, FileEntry], str | None]
) -> StoredCheckpoint:
    """Return the checkpoint at `path`, using its storage's functions to access it.

    `read` returns the bytes of the manifest. If it fails, it raises `InvalidCheckpoint` with a message that
    continues "manifest.json ...". `fault` returns a description of what is wrong with a file, or None.

    Raises the same errors as `load`.
    """
    try:
        manifest = unpack(read())
    except Unreadable as error:
        raise Unreadable(f"{MANIFEST} {error}") from None
    except Foreign:
        raise
    except NewerFormat as error:
        raise NewerFormat(f"{MANIFEST} {error}") from None
    except InvalidCheckpoint as error:
        raise InvalidCheckpoint(f"{MANIFEST} {error}") from None
    step = step_in(path.name)
    if step is not None and step != manifest.step:
        raise InvalidCheckpoint(f"{MANIFEST} has step {manifest.step}")
    for entry in manifest.files:
        wrong = fault(manifest, entry)
        if wrong is not None:
            raise InvalidCheckpoint(wrong)
    return StoredCheckpoint(
        path,
        manifest.step,
        manifest.generation,
        manifest.world_size,
        manifest.created,
        manifest.files,
        manifest.meta,
        sum(entry.bytes for entry in manifest.files),
        manifest.lineage,
        manifest.epoch,
        manifest.objects,
    )


def check_own(manifest: bytes, has_own_files: Callable[[], bool]) -> None:
    """Raise `Foreign` if the manifest is invalid and none of Holdfast's files is beside it."""
    try:
        unpack(manifest)
    except NewerFormat:
        pass
    except InvalidCheckpoint as error:
        if not has_own_files():
            raise Foreign(f"{MANIFEST} {error}") from None


def load_or_defect(path: Path, at: Path | None = None) -> StoredCheckpoint | InvalidCheckpoint:
    """Return what `load` returns, or the `InvalidCheckpoint` that it raises."""
    try:
        return load(path, at)
    except InvalidCheckpoint as error:
        return error


def is_same(one: StoredCheckpoint | InvalidCheckpoint, other: StoredCheckpoint | InvalidCheckpoint) -> bool:
    """Return whether `one` and `other` are the same checkpoint or have the same defect."""
    if isinstance(one, StoredCheckpoint) or isinstance(other, StoredCheckpoint):
        return one == other
    return type(one) is type(other) and str(one) == str(other)


def occupied(path: Path | str) -> FileExistsError:
    """Return the error for a writer that finds something else under the name of its checkpoint."""
    return FileExistsError(
        f"{path} exists, and Holdfast has not written all of it, so it is not replaced. Give Holdfast a"
        " directory for its checkpoints that the training script does not save to, or move this one away"
    )


def is_removed(path: Path) -> bool:
    """Return whether the checkpoint in the directory `path` has been removed or is being removed."""
    try:
        names = names_in(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not names or (REMOVED in names and MANIFEST not in names)


def names_in(folder: Path) -> frozenset[str]:
    """Return the names of all entries in a directory. Raises OSError."""
    return frozenset(each.name for each in folder.iterdir())


def own_names(folder: Path) -> frozenset[str]:
    """Return the names of Holdfast's own files in a checkpoint's directory. All others are the script's.

    Raises OSError.
    """
    own = {MANIFEST, REMOVED}
    for name in (MANIFEST, REMOVED):
        with suppress(InvalidCheckpoint):
            own |= {entry.name for entry in unpack(_read_manifest(folder / name)).files}
    return frozenset(name for name in names_in(folder) if name in own or is_state_name(name))


def name_of(step: int) -> str:
    """Return the name of the checkpoint of `step`."""
    return f"step-{step:08d}"


def step_in(name: str) -> int | None:
    """Return the step in a checkpoint's name; None if `name` is not the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None else None


def name_aside(name: str) -> str:
    """Return another name for the checkpoint `name` that readers recognise and no other writer uses."""
    return f"{name}{_ASIDE}-{secrets.token_hex(8)}"


def is_aside(name: str) -> bool:
    """Return whether a checkpoint has this name only while it is being replaced."""
    return _ASIDE in name


def is_own_name(name: str) -> bool:
    """Return whether only `name_aside` can return `name`. Even an empty directory is then Holdfast's."""
    match = _NAME.fullmatch(name)
    return match is not None and match[3] is not None


def verify(found: StoredCheckpoint) -> str | None:
    """Read the whole checkpoint; return None if it is intact, otherwise describe the defect in one line.

    If storage fails, this returns the error as the description instead of raising it.
    """
    try:
        return content_fault(found)
    except Unreadable as error:
        return str(error)


def content_fault(found: StoredCheckpoint) -> str | None:
    """Verify like `verify`, but raise `Unreadable` if storage fails, because the content may be intact."""
    for entry in found.files:
        fault = _size_fault(found.path, entry) or _content_fault(found.path, entry)
        if fault is not None:
            return fault
    return None


def each_checkpoint(root: Path) -> Iterator[tuple[Path, StoredCheckpoint | InvalidCheckpoint]]:
    """Yield each directory named like a checkpoint, newest first, with its checkpoint or its defect.

    Skips the remains of checkpoints that are being removed.
    """
    try:
        names = [path.name for path in root.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return
    steps = [(int(match[1]), name) for name in names if (match := _NAME.fullmatch(name))]
    steps.sort(key=lambda item: (-item[0], item[1]))
    for _, name in steps:
        found = load_or_defect(root / name)
        if isinstance(found, StoredCheckpoint) or not is_removed(root / name):
            yield root / name, found


def _open_regular(path: Path) -> int:
    """Open a regular file and return its descriptor, without blocking.

    Raises OSError, including when `path` is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return descriptor


def _read_bounded(path: Path, limit_bytes: int) -> bytes:
    with open(_open_regular(path), "rb") as file:
        raw = file.read(limit_bytes + 1)
    if len(raw) > limit_bytes:
        raise InvalidCheckpoint(f"has more than {limit_bytes} bytes")
    return raw


def _names(folder: Path) -> frozenset[str]:
    try:
        return names_in(folder)
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise Unreadable(f"cannot be listed: {error.strerror}") from None


def _read_manifest(path: Path) -> bytes:
    try:
        return _read_bounded(path, MAX_BYTES)
    except FileNotFoundError:
        raise InvalidCheckpoint("is missing") from None
    except NotADirectoryError:
        raise Foreign("it is not a directory") from None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None


def _size_fault(path: Path, entry: FileEntry) -> str | None:
    try:
        status = (path / entry.name).lstat()
    except FileNotFoundError:
        return f"{entry.name} is missing"
    except OSError as error:
        raise Unreadable(f"{entry.name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        return f"{entry.name} is not a plain file"
    if status.st_size != entry.bytes:
        return f"{entry.name} has {status.st_size} bytes, but {entry.bytes} were written"
    return None


def _content_fault(path: Path, entry: FileEntry) -> str | None:
    try:
        descriptor = _open_regular(path / entry.name)
        try:
            crcs = file_crcs(descriptor, entry.bytes, entry.chunk_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unreadable(f"{entry.name} cannot be read: {error.strerror}") from None
    for number, (crc, expected) in enumerate(zip(crcs, entry.crc32, strict=True)):
        if crc != expected:
            begin = number * entry.chunk_bytes
            end = min(begin + entry.chunk_bytes, entry.bytes)
            return f"{entry.name} is damaged: checksum differs in bytes {begin} to {end - 1}"
    return None
