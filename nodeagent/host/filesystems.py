"""Checks of the local file systems: space, inodes, whether one has become read-only, and whether it answers.

Pods' volumes have their own checks, because what happens to them is not the node's fault. A file system that
is no longer mounted is reported as gone, which ends the findings about it. `block_devices` determines which
devices are the node's own, for the kernel lines about them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nodeagent.host.block_devices import USE, NodeDevices
from nodeagent.host.bounded_calls import BoundedCalls
from nodeagent.host.mounts import OWN_NUMBERS, Mount, SelectedMounts, parse, select, unescaped
from nodeagent.model import GONE
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import SYSFS, try_read
from nodeagent.sensing.sweep import Reading

WRITABLE, READ_ONLY = 0.0, 1.0
SPACE, INODES, STATE, STUCK = "disk_used", "inodes_used", "disk_read_only", "disk_stuck"
OF_VOLUMES = {
    SPACE: "volume_used", INODES: "volume_inodes_used", STATE: "volume_read_only", STUCK: "volume_stuck",
}  # fmt: skip
MAX_REMEMBERED = 512
T = TypeVar("T")
MOUNTINFO_BYTES = 4 << 20  # a node with thousands of pods has about a megabyte
FSTAB_BYTES = 1 << 20
FSTAB = "fstab"  # the key of the call that reads it


def disk_used(blocks: int, free: int, available: int) -> float | None:
    """Return the used percentage of the space available to users; None if the file system has no size.

    Space reserved for root counts as neither used nor free: at 100%, users other than root cannot write.
    """
    used = blocks - free
    usable = used + available
    return _percent(used, usable) if used >= 0 and usable > 0 else None


def inodes_used(inodes: int, free: int) -> float | None:
    """Return the percentage used; None if inodes are created on demand (btrfs, vfat: both counts are 0)."""
    return _percent(inodes - free, inodes) if 0 <= free <= inodes and inodes > 0 else None


def _percent(part: int, whole: int) -> float:
    return min(100.0, 100.0 * part / whole)  # rounding of very large numbers may exceed 100


def fstab_writable(fstab: bytes) -> frozenset[str]:
    """Return the mount points that fstab mounts writable at boot."""
    found = set()
    for line in fstab.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[0].startswith(b"#"):
            continue
        options = fields[3].split(b",")
        if b"ro" not in options and b"noauto" not in options:
            found.add(unescaped(fields[1]))
    return frozenset(found)


def mount_key(mount: Mount) -> str:
    """Return a key that identifies a file system, even among several at the same mount point."""
    return f"{mount.device} {mount.source} {mount.entity}"


def read_only_state(mount: Mount, writable: Iterable[str], wanted: frozenset[str]) -> float | None:
    """Return the check's state; None if the mount was read-only from the start, as may be intended.

    Args:
        mount: The file system now.
        writable: Keys of the file systems that were writable during this boot.
        wanted: Mount points that fstab mounts writable.
    """
    if not mount.read_only:
        return WRITABLE
    return READ_ONLY if mount.point in wanted or mount_key(mount) in writable else None


def check_of(check: str, mount: Mount) -> str:
    """Return the name of a check for this mount: a pod's volume has its own checks."""
    return OF_VOLUMES.get(check, check) if mount.is_volume else check


class FileSystems:
    """Checks this process's own mounts or, with `root`, the host's mounts, which are visible below `root`."""

    checks = frozenset({*OF_VOLUMES, *OF_VOLUMES.values(), USE})

    def __init__(
        self,
        proc: str,
        root: str | None,
        boot_id: str,
        remembered: Mapping[str, Any],
        sys: str = str(SYSFS),
    ) -> None:
        """`remembered` is an earlier result of `remembered()`, possibly from another boot or corrupt."""
        self._mountinfo = f"{proc}/self/mountinfo" if root is None else f"{proc}/1/mountinfo"
        self._root = (root or "").rstrip("/")
        self._boot_id = boot_id
        self._writable = _writable(remembered, boot_id)
        self._known = KnownMounts(remembered)
        self._devices = NodeDevices(sys, proc, boot_id, remembered)
        self._calls = BoundedCalls[Answer]()
        self._left_out: dict[str, Omission] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        raw = try_read(self._mountinfo, MOUNTINFO_BYTES)
        if raw is None:
            self._left_out = {"disk": Omission("disk", f"{self._mountinfo} cannot be read")}
            return ()
        whole = raw[: raw.rfind(b"\n") + 1]  # drop a last line that the limit has cut off
        mounts = parse(whole)
        found = select(mounts)
        self._left_out = {each.what: each for each in found.left_out}
        readings = []
        if len(raw) < MOUNTINFO_BYTES:
            readings += self._known.ended(mounts, found.local)
        self._known.add(found.local)
        readings += self._devices.uses(mounts)
        answers = self._calls.run(self._questions(found.local))
        for mount in found.local:
            readings += self._answered(mount, answers.get(mount_key(mount)))
        wanted = answers.get(FSTAB)
        readings += self._states(found, wanted if isinstance(wanted, frozenset) else frozenset())
        return [each for each in readings if each.check == GONE or each.check in due]

    def left_out(self) -> tuple[Omission, ...]:
        return tuple(self._left_out.values())

    def remembered(self) -> dict[str, Any]:
        """Return the state that must outlive the process, as JSON."""
        return {
            "boot_id": self._boot_id,
            "writable": list(self._writable),
            "known": self._known.remembered(),
            "own": self._devices.remembered(),
        }

    def _questions(self, local: Iterable[Mount]) -> dict[str, Callable[[], Answer]]:
        """Return the calls that may hang: one for each file system, and fstab if it is needed.

        A read-only file system can hang like any other, even an ext4 image on a loop device, whose file may
        be on a server. `select` has left out the types of plain images (squashfs, iso9660).
        """
        found: dict[str, Callable[[], Answer]] = {}
        for mount in local:
            found[mount_key(mount)] = partial(_measured, self._root + mount.point, mount)
            if mount.read_only and mount_key(mount) not in self._writable:
                found[FSTAB] = partial(_wanted, f"{self._root}/etc/fstab")
        return found

    def _answered(self, mount: Mount, answer: Answer | None) -> Iterator[Reading]:
        if isinstance(answer, Failure):
            self._left_out[mount.entity] = Omission(mount.entity, answer.why)
            if answer.of_the_file_system:
                yield Reading(check_of(STUCK, mount), mount.entity, 0.0)
        elif isinstance(answer, os.statvfs_result):
            yield Reading(check_of(STUCK, mount), mount.entity, 0.0)
            if not mount.read_only:  # otherwise it may be full by design: an image
                yield from _percentages(mount, answer)
        else:
            why = "it does not answer, or too many other file systems do not"
            self._left_out[mount.entity] = Omission(mount.entity, why, is_open=True)
        if (hung_s := self._calls.hung_s(mount_key(mount))) is not None:
            text = f"{mount.kind} on {mount.source}: a call has not returned"
            yield Reading(check_of(STUCK, mount), mount.entity, round(hung_s, 3), text)

    def _states(self, found: SelectedMounts, wanted: frozenset[str]) -> Iterator[Reading]:
        for mount in found.local:
            state = read_only_state(mount, self._writable, wanted)
            if state is not None:
                text = f"{mount.kind} on {mount.source}"
                yield Reading(check_of(STATE, mount), mount.entity, state, text)
            if state == WRITABLE:
                _renew(self._writable, mount_key(mount), None)


class KnownMounts:
    """The file systems that have been checked, until they are gone."""

    def __init__(self, remembered: Mapping[str, Any]) -> None:
        known = remembered.get("known")
        self._entities: dict[str, str] = {}  # by key, the newest last
        self._missing: set[str] = set()  # keys that were missing at the last read
        # Before volumes had separate checks, the agent remembered only the keys of writable mounts.
        self._from_earlier_version = not isinstance(known, dict)
        if isinstance(known, dict):
            self._entities = {key: each for key, each in known.items() if isinstance(each, str)}
        else:
            keys = remembered.get("writable")
            for key in keys if isinstance(keys, list) else ():
                if isinstance(key, str) and " disk/" in key:
                    self._entities[key] = f"disk/{key.rpartition(' disk/')[2]}"

    def ended(self, mounts: Iterable[Mount], local: Iterable[Mount]) -> list[Reading]:
        """Return a reading for each file system that is gone, or that is now checked at another path.

        The kernel may skip a line of mountinfo while mounts change, so a mount counts as gone only after two
        reads in a row without it.
        """
        checked = {mount_key(each): each for each in local}
        devices = {each.device for each in checked.values()}
        present = {mount_key(each) for each in mounts}
        missing = {
            key
            for key in self._entities
            if key not in checked and (key not in present or key.partition(" ")[0] in devices)
        }
        ended = missing & self._missing
        if self._from_earlier_version:
            self._from_earlier_version = False
            ended |= {key for key in self._entities if key in checked and checked[key].is_volume}
        self._missing = missing - ended
        return [Reading(GONE, self._entities.pop(key), 1.0, "it is not mounted") for key in sorted(ended)]

    def add(self, local: Iterable[Mount]) -> None:
        for each in local:
            _renew(self._entities, mount_key(each), each.entity)

    def remembered(self) -> dict[str, str]:
        """Return the state that must outlive the process, as JSON."""
        return dict(self._entities)


def _renew(held: dict[str, T], key: str, value: T) -> None:
    """Put `key` last, and drop the oldest keys beyond `MAX_REMEMBERED`."""
    held.pop(key, None)
    held[key] = value
    while len(held) > MAX_REMEMBERED:
        del held[next(iter(held))]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the size of a file system is not known."""

    why: str
    of_the_file_system: bool  # it has answered with an error; False if the path may not lead to it


# The size of a file system or why it is not known, or the mount points that fstab mounts writable.
Answer = os.statvfs_result | Failure | frozenset[str]
# Errors of a path. Any other, such as EIO after a shutdown, shows that the file system does not hang.
_OF_PATHS = frozenset({
    errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
})  # fmt: skip


def _measured(path: str, mount: Mount) -> Answer:
    try:
        if mount.kind not in OWN_NUMBERS and _device(Path(path).stat().st_dev) != mount.device:
            why = f"{path} is not this file system: covered, or not propagated into this container"
            return Failure(why, of_the_file_system=False)
        return os.statvfs(path)
    except OSError as error:
        return Failure(f"{error.strerror}: {path}", error.errno not in _OF_PATHS)


def _percentages(mount: Mount, found: os.statvfs_result) -> Iterator[Reading]:
    values = {
        SPACE: disk_used(found.f_blocks, found.f_bfree, found.f_bavail),
        INODES: inodes_used(found.f_files, found.f_ffree),
    }
    for check, value in values.items():
        if value is not None:
            yield Reading(check_of(check, mount), mount.entity, round(value, 3))


def _wanted(path: str) -> Answer:
    return fstab_writable(try_read(path, FSTAB_BYTES) or b"")


def _device(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def _writable(remembered: Mapping[str, Any], boot_id: str) -> dict[str, None]:
    """Return the keys of this boot. After a reboot, an operator may have made a file system read-only."""
    keys = remembered.get("writable")
    if remembered.get("boot_id") != boot_id or not isinstance(keys, list):
        return {}
    return {key: None for key in keys[:MAX_REMEMBERED] if isinstance(key, str)}
