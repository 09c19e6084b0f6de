"""Store checkpoints in object storage.

```text
PREFIX/step-00000042/manifest.json                         completes the checkpoint; a conditional write;
                                                           empty if the checkpoint was removed
PREFIX/step-00000042/e3-g7-9f2c61d0/FILE/00000 ...         the files, in a folder that only this writer uses
PREFIX/conditional-put                                     tests whether the storage obeys conditions
```

A writer creates the manifest only if there is none. It replaces an existing manifest only after finding that
exact version unusable. Therefore, if several writers save the same step, only one publishes it, and no writer
overwrites a manifest that it has not read.

To remove a checkpoint, a member replaces its manifest with an empty one, under the same condition, and then
deletes its folder, which no other checkpoint uses. It does not delete the manifest, because that request
cannot have a condition: a member that is stopped just before the request would later delete what another
writer has published under the same name. Writers replace an empty manifest like an unusable one. An empty
manifest is deleted much later, when no group can save its step any longer.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import MANIFEST, Foreign, StoredCheckpoint
from holdfast.checkpoint.manifest import (
    MAX_BYTES,
    REPLICATED,
    InvalidCheckpoint,
    Manifest,
    NewerFormat,
    ObjectLayout,
    is_state_name,
    unpack,
)
from holdfast.checkpoint.object_location import ObjectLocation
from holdfast.checkpoint.retention import Leftover, NewestCheckpoint, is_abandoned, is_settled
from holdfast.checkpoint.sharing import (
    TOKEN,
    TOKEN_BYTES,
    CheckedRead,
    SharedFile,
    SharedPiece,
    ShareHelpers,
    ShareRefused,
    StagingPlace,
    is_token,
    new_token,
)
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry
from sidecar.storage import transfers
from sidecar.storage.object_client import ObjectClient, ObjectStoreError, ObjectVersion, StoredObject

log = logging.getLogger(__name__)

MOST = 1_000_000  # objects that one writer may write for a checkpoint; more are refused
PROBE = "conditional-put"
NO_VERSION = ObjectVersion('"none"', "0")  # no object has this version
# The pauses between attempts to write the manifest. Retrying is cheaper than uploading the checkpoint again.
PUBLISH_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
_FOLDER = re.compile(r"e(\d{1,19})-g\d{1,19}-[0-9a-f]{16}")

Objects = dict[str, StoredObject]  # the objects of one checkpoint, by their key relative to the checkpoint


class ObjectStorage:
    """Reads and writes the checkpoints at `location`. Thread-safe.

    `local` is the directory for local copies of the files that ranks read.
    """

    def __init__(self, location: ObjectLocation, connect: Callable[[], ObjectClient], local: Path) -> None:
        """`connect` is called at each use of storage until it succeeds.

        Each use therefore reports a wrong configuration as an error, and the process keeps running.
        """
        self._location, self._connect, self._local = location, connect, local
        self._connected: ObjectClient | None = None
        self._manifests: dict[tuple[str, ObjectVersion], bytes] = {}  # the manifests in the last listing
        self._reading = threading.Lock()  # held while `_manifests` is changed
        self._obeys_conditions = False
        self._proven: tuple[str, str] = ("", "")  # key and content of the last token that was found
        self._copying = threading.Lock()

    def __str__(self) -> str:
        return str(self._location)

    @property
    def _client(self) -> ObjectClient:
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    # -- reading

    def each_checkpoint(self) -> Iterator[tuple[Path, StoredCheckpoint | InvalidCheckpoint]]:
        found = self._listing()
        kept = {(name, objects[MANIFEST].version) for name, objects in found.items() if MANIFEST in objects}
        with self._reading:
            self._manifests = {key: raw for key, raw in self._manifests.items() if key in kept}
        steps = [(step, name) for name in found if (step := catalog.step_in(name)) is not None]
        for _, name in sorted(steps, key=lambda each: (-each[0], each[1])):
            if not _is_published(found[name]):
                continue  # not published yet, left by a dead writer, or removed
            described = self._load_or_defect(name, found[name])
            if isinstance(described, InvalidCheckpoint):  # it may have been replaced or removed since
                again = self._listing(name).get(name, {})
                if not _is_published(again):
                    continue
                described = self._load_or_defect(name, again)
            yield Path(name), described

    def load(self, name: str) -> StoredCheckpoint:
        return self._described(name, self._listing(name).get(name, {}))

    def content_fault(self, found: StoredCheckpoint) -> str | None:
        for entry in found.files:
            fault = transfers.content_fault(self._client, self._key(found.path.name), entry, found.objects)
            if fault is not None:
                return fault
        return None

    def _listing(self, name: str = "") -> dict[str, Objects]:
        """Return the objects of the checkpoint `name`, or of all checkpoints, grouped by checkpoint.

        Raises `ObjectStoreError` if one folder of a checkpoint has more than `MOST`. The total is not
        limited, because a job keeps several checkpoints, and leftovers of interrupted uploads can be removed
        only if they can be listed.
        """
        found: dict[str, Objects] = defaultdict(dict)
        counts: Counter[tuple[str, str]] = Counter()
        skip = len(self._location.prefix) + 1
        for each in self._client.objects(self._key(name)):
            checkpoint, _, key = each.key[skip:].partition("/")
            if not key or catalog.step_in(checkpoint) is None:
                continue
            folder = checkpoint, key.rpartition("/")[0].partition("/")[0]
            counts[folder] += 1
            if counts[folder] > MOST:
                raise ObjectStoreError(f"{self._location}: more than {MOST} objects in {'/'.join(folder)}")
            found[checkpoint][key] = each
        return found

    def _described(self, name: str, objects: Objects) -> StoredCheckpoint:
        def fault(manifest: Manifest, entry: FileEntry) -> str | None:
            return _size_fault(objects, manifest.objects, entry)

        def read() -> bytes:
            raw = self._manifest(name, objects)
            catalog.check_own(raw, lambda: any(map(_is_own, objects)))
            return raw

        return catalog.described(Path(name), read, fault)

    def _manifest(self, name: str, objects: Objects) -> bytes:
        stored = objects.get(MANIFEST)
        if stored is None:
            raise InvalidCheckpoint("is missing")
        if not stored.bytes:
            raise InvalidCheckpoint("is empty: the checkpoint was removed")
        known = self._manifests.get((name, stored.version))
        if known is not None:
            return known
        if stored.bytes > MAX_BYTES:
            raise InvalidCheckpoint(f"has more than {MAX_BYTES} bytes")
        raw = self._client.read(f"{self._key(name)}/{MANIFEST}", MAX_BYTES)
        if raw is None:
            raise InvalidCheckpoint("is missing")  # it was removed after it was listed
        if stored.version != ObjectVersion(None, None):
            with self._reading:
                self._manifests[name, stored.version] = raw
        return raw

    def _key(self, name: str = "") -> str:
        return f"{self._location.prefix}/{name}" if name else self._location.prefix

    # -- local copies

    def local_copy(
        self, found: StoredCheckpoint, names: Iterable[str], moved: Callable[[], object]
    ) -> tuple[Path, str | None]:
        wanted = set(names)
        entries = [entry for entry in found.files if entry.name in wanted]
        directory = self._local / found.path.name
        with self._copying:
            self._forget_copies(found.path.name)
            directory.mkdir(parents=True, exist_ok=True)
            self._check_local_room(directory, entries)
            for entry in entries:
                fault = transfers.download(
                    self._client,
                    self._key(found.path.name),
                    entry,
                    found.objects,
                    directory / entry.name,
                    moved,
                )
                if fault is not None:
                    return directory, fault
        lacking = wanted - {entry.name for entry in entries}
        return directory, f"{min(lacking)} is missing" if lacking else None

    def forget_copies(self, but: str = "") -> None:
        with self._copying:
            self._forget_copies(but)

    def _forget_copies(self, but: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            for path in tuple(self._local.iterdir()):
                if path.name != but and catalog.step_in(path.name) is not None:
                    shutil.rmtree(path)

    def _check_local_room(self, directory: Path, entries: Iterable[FileEntry]) -> None:
        there = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        missing = max(0, sum(entry.bytes for entry in entries) - there)
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        if missing > free:
            raise OSError(
                errno.ENOSPC,
                f"{missing:,} bytes are needed to copy the checkpoint here, but the volume has {free:,} free",
                str(self._local),
            )

    # -- writing

    def prepare(self) -> None:
        """Raise `OSError` if the storage ignores write conditions.

        Without conditions, two writers could overwrite each other's manifests. All members create the same
        probe object. Once it exists, this check costs two requests.
        """
        if self._obeys_conditions:
            return
        key = self._key(PROBE)
        created_again = self._client.create(key, b"") and self._client.create(key, b"")
        if not created_again and not self._client.replace(key, b"", NO_VERSION):
            self._obeys_conditions = True
            return
        ignored = "If-None-Match" if created_again else "If-Match"
        raise ObjectStoreError(
            f"{self._location}: the storage ignores {ignored}, so checkpoints in it would not be safe"
        )

    def check_room(self, files: Mapping[str, Path | bytes]) -> None:
        """Do nothing, because a bucket does not report free space."""

    def acknowledge(self, name: str) -> Path:
        return Path(name)

    @contextmanager
    def staged(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        epoch: int,
        generation: int,
        moved: Callable[[], object],
        helpers: ShareHelpers | None = None,
    ) -> Iterator[StagedObjects]:
        largest = max((_size(source) for source in files.values()), default=0)
        folder = f"e{epoch}-g{generation}-{secrets.token_hex(8)}"
        layout = ObjectLayout(folder, transfers.part_bytes(largest))
        staged = StagedObjects(self._client, self._key(name), Path(name), layout)
        try:
            rest, found = dict(files), dict[str, FileEntry]()
            shared = files.get(REPLICATED)
            if helpers is not None and isinstance(shared, Path):
                del rest[REPLICATED]
                found[REPLICATED] = self._shared(name, shared, layout, moved, helpers)
            found |= {
                each.name: each
                for each in transfers.upload(self._client, self._key(name), rest, layout, moved)
            }
            staged.entries = tuple(found[each] for each in files)
            yield staged
        finally:
            if not staged.may_be_published:
                self._discard(f"{self._key(name)}/{folder}")

    def _shared(
        self,
        name: str,
        source: Path,
        layout: ObjectLayout,
        moved: Callable[[], object],
        helpers: ShareHelpers,
    ) -> FileEntry:
        """Write a file together with the helpers.

        If a helper's request arrives late, it writes the same content again.
        """
        base, token = self._key(name), new_token()
        key = f"{base}/{layout.folder}/{TOKEN}"
        work = SharedFile(source, layout.part_bytes, moved)
        self._client.write(key, token.encode())
        try:
            with helpers.helping(StagingPlace(layout.folder, token, layout.part_bytes), work):
                transfers.upload_rest(self._client, base, REPLICATED, source, layout, work, moved)
        finally:
            with contextlib.suppress(ObjectStoreError):  # it is removed with the folder
                self._client.delete([key])
        return work.entry(REPLICATED)

    def write_piece(
        self, name: str, place: StagingPlace, size: int, piece: SharedPiece, read: CheckedRead
    ) -> None:
        step = place.part_bytes
        whole = CHUNK_BYTES <= step <= transfers.LARGEST and step % CHUNK_BYTES == 0
        if not whole or piece.begin % step or piece.end != min(piece.begin + step, size):
            raise ShareRefused("the piece is not one of the file's objects")
        if _FOLDER.fullmatch(place.folder) is None:
            raise ShareRefused("the folder is not named like a writer's folder")
        base = self._key(name)
        self._check_token(f"{base}/{place.folder}/{TOKEN}", place.token)
        key = transfers.part_key(base, REPLICATED, place.folder, piece.begin // step)
        self._client.write(key, bytes(read(piece.begin, piece.end)))

    def _check_token(self, key: str, token: str) -> None:
        """Raise `ShareRefused` unless this is the storage that the writer uses."""
        if self._proven == (key, token):
            return
        found = self._client.read(key, TOKEN_BYTES)
        if found is None or not is_token(found, token):
            raise ShareRefused("this member does not see the writer's folder")
        self._proven = key, token

    def _discard(self, folder: str) -> None:
        """Delete a folder that no writer can still publish. On failure, leave it to `remove_leftovers`."""
        try:
            self._client.delete([each.key for each in self._client.objects(folder, MOST)])
        except ObjectStoreError as error:
            log.warning("objects not removed", extra={"error": str(error)})

    # -- deleting

    def remove(self, path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> bool:
        """Remove the checkpoint unless its manifest has changed: empty the manifest, then delete its files.

        If this is interrupted, or the response is lost, `remove_leftovers` deletes the files later.
        """
        name = path.name
        key = f"{self._key(name)}/{MANIFEST}"
        version = self._client.version(key)  # before the manifest is compared, so that no change is missed
        objects = self._listing(name).get(name, {})
        found = self._load_or_defect(name, objects)
        if version is None or isinstance(found, NewerFormat | Foreign) or not catalog.is_same(found, what):
            return False
        manifest = self._read(name, objects)
        if not self._client.replace(key, b"", version):
            return False
        self._client.delete([each.key for key, each in objects.items() if _is_of(key, manifest)])
        return True

    def _load_or_defect(self, name: str, objects: Objects) -> StoredCheckpoint | InvalidCheckpoint:
        try:
            return self._described(name, objects)
        except InvalidCheckpoint as error:
            return error

    def _read(self, name: str, objects: Objects) -> Manifest | None:
        try:
            return unpack(self._manifest(name, objects))
        except InvalidCheckpoint:
            return None

    def remove_leftovers(self, epoch: int) -> None:
        found = {
            name: objects for name, objects in self._listing().items() if catalog.step_in(name) is not None
        }
        manifests = {name: self._read(name, each) for name, each in found.items() if _is_published(each)}
        newest = NewestCheckpoint(
            max((each.epoch for each in manifests.values() if each is not None), default=0),
            max((found[name][MANIFEST].written_s for name in manifests), default=0.0),
        )
        for name, objects in found.items():
            if name in manifests and manifests[name] is None:
                continue  # the manifest is unreadable, so any of the folders may be in use
            used = _folder(manifests.get(name))
            for folder, written_s in _folders(objects).items():
                match = _FOLDER.fullmatch(folder)
                if match is None or folder == used:
                    continue
                if is_abandoned(Leftover(int(match[1]), written_s), epoch, newest):
                    log.info("leftover removed", extra={"checkpoint": name, "folder": folder})
                    self._discard(f"{self._key(name)}/{folder}")
        oldest_step = min(map(_step, manifests), default=0)
        settled = [
            objects[MANIFEST].key
            for name, objects in found.items()
            if name not in manifests
            and objects.keys() == {MANIFEST}
            and _step(name) < oldest_step
            and is_settled(objects[MANIFEST].written_s, epoch, newest)
        ]
        self._client.delete(settled)


class StagedObjects:
    """The objects of a checkpoint that has not been published, because its manifest does not exist yet."""

    def __init__(self, client: ObjectClient, base: str, path: Path, layout: ObjectLayout) -> None:
        self._client, self._base, self.path = client, base, path
        self.entries: tuple[FileEntry, ...] = ()
        self.objects: ObjectLayout | None = layout
        self._layout = layout
        self._manifest = b""
        self._occupied: ObjectVersion | None = None  # the version of the manifest that existed already
        self.may_be_published = False

    def seal(self, manifest: bytes) -> None:
        """Set the manifest to publish. Raises `OSError` if an object is missing."""
        self._manifest = manifest
        self._check_objects()

    def _check_objects(self) -> None:
        """Raise `OSError` if an object is missing.

        Another member removes the objects of a writer that it considers dead. They are checked again once the
        checkpoint is published, because this process may have been stopped for an hour before that.
        """
        folder = f"{self._base}/{self._layout.folder}"
        there = {each.key[len(self._base) + 1 :]: each for each in self._client.objects(folder, MOST)}
        for entry in self.entries:
            fault = _size_fault(there, self._layout, entry)
            if fault is not None:
                raise OSError(errno.EIO, f"{fault}: another member has removed or replaced the object")

    def publish(self) -> bool:
        key = f"{self._base}/{MANIFEST}"
        if self._attempt(lambda: self._client.create(key, self._manifest)):
            self._check_objects()
            return True
        self._occupied = self._client.version(key)
        return False

    def replace(self) -> bool:
        version = self._occupied
        if version is None:
            return False  # the other manifest was removed before its version could be read
        key = f"{self._base}/{MANIFEST}"
        if not self._attempt(lambda: self._client.replace(key, self._manifest, version)):
            return False
        self._check_objects()
        return True

    def _attempt(self, put: Callable[[], bool]) -> bool:
        """Return whether this writer's manifest is published, perhaps by an attempt whose response was lost.

        Raises `ObjectStoreError` if the outcome remains unknown. The objects are then kept, because they may
        belong to a published checkpoint.
        """
        for pause_s in (*PUBLISH_PAUSES_S, 0.0):
            uncertain, self.may_be_published = self.may_be_published, True
            try:
                self.may_be_published = put() or self._is_ours()
            except ObjectStoreError as error:
                # This refusal does not show whether an earlier attempt, whose response was lost, succeeded.
                self.may_be_published = uncertain or error.is_transient
                if not error.is_transient or not pause_s:
                    raise
                time.sleep(pause_s)
            else:
                return self.may_be_published
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _is_ours(self) -> bool:
        return self._client.read(f"{self._base}/{MANIFEST}", MAX_BYTES) == self._manifest


def _size_fault(
    objects: Mapping[str, StoredObject], layout: ObjectLayout | None, entry: FileEntry
) -> str | None:
    for key, begin, end in transfers.parts("", entry.name, entry.bytes, layout):
        stored = objects.get(key[1:])
        if stored is None:
            return f"{entry.name} is missing from byte {begin}" if begin else f"{entry.name} is missing"
        if stored.bytes != end - begin:
            return f"{entry.name} has {stored.bytes} bytes from byte {begin}, but {end - begin} were written"
    return None


def _is_published(objects: Objects) -> bool:
    return MANIFEST in objects and objects[MANIFEST].bytes > 0


def _step(name: str) -> int:
    step = catalog.step_in(name)
    assert step is not None
    return step


def _folder(manifest: Manifest | None) -> str:
    """Return the folder in a manifest; "" if there is no manifest or it does not contain one."""
    return manifest.objects.folder if manifest is not None and manifest.objects is not None else ""


def _folders(objects: Objects) -> dict[str, float]:
    """Return when storage accepted the newest object of each folder."""
    found: dict[str, float] = {}
    for key, each in objects.items():
        folder, separator, _ = key.partition("/")
        if separator:
            found[folder] = max(each.written_s, found.get(folder, 0.0))
    return found


def _is_of(key: str, manifest: Manifest | None) -> bool:
    """Return whether `key` is a file of this manifest's checkpoint. `manifest` is None if it is damaged."""
    if manifest is not None and manifest.objects is not None:
        return key.startswith(f"{manifest.objects.folder}/")
    return is_state_name(key) or (manifest is not None and key in {each.name for each in manifest.files})


def _is_own(key: str) -> bool:
    """Return whether `key` has the form of the keys that Holdfast gives to the files of a checkpoint."""
    return is_state_name(key) or _FOLDER.fullmatch(key.partition("/")[0]) is not None


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size
