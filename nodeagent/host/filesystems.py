"""Checks of the local file systems: space, inodes, and whether one has become read-only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodeagent.host.mounts import OWN_NUMBERS, Mount, SelectedMounts, parse, select, unescaped
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import try_read
from nodeagent.sensing.sweep import Reading

WRITABLE, READ_ONLY = 0.0, 1.0
MAX_REMEMBERED = 512
MOUNTINFO_BYTES = 4 << 20  # a node with thousands of pods has about a megabyte
FSTAB_BYTES = 1 << 20


def disk_used(blocks: int, free: int, available: int) -> float | None:
    """Return the used percentage of the space available to users; None if the file system has no size.

    Space reserved for root counts as neither used nor free: at 100% other users cannot write.
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
    """Return a key that identifies a file system, and differs for another one at the same mount point."""
    return f"{mount.device} {mount.source} {mount.entity}"


def read_only_state(mount: Mount, writable: Iterable[str], wanted: frozenset[str]) -> float | None:
    """Return the check's state; None if it was read-only from the start, which may be intended.

    Args:
        mount: The file system now.
        writable: Keys of the file systems that were writable during this boot.
        wanted: Mount points that fstab mounts writable.
    """
    if not mount.read_only:
        return WRITABLE
    return READ_ONLY if mount.point in wanted or mount_key(mount) in writable else None


class FileSystems:
    """Checks this process's own mounts or, with `root`, the host's mounts, which are visible below `root`."""

    checks = frozenset({"disk_used", "inodes_used", "disk_read_only"})

    def __init__(self, proc: str, root: str | None, boot_id: str, remembered: Mapping[str, Any]) -> None:
        """`remembered` is an earlier result of `remembered()`, possibly from another boot or corrupt."""
        self._mountinfo = f"{proc}/self/mountinfo" if root is None else f"{proc}/1/mountinfo"
        self._root = (root or "").rstrip("/")
        self._boot_id = boot_id
        self._writable = _writable(remembered, boot_id)
        self._left_out: dict[str, Omission] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        raw = try_read(self._mountinfo, MOUNTINFO_BYTES)
        if raw is None:
            self._left_out = {"disk": Omission("disk", f"{self._mountinfo} cannot be read")}
            return ()
        whole = raw[: raw.rfind(b"\n") + 1]  # drop a last line that the limit has cut off
        found = select(parse(whole))
        self._left_out = {each.what: each for each in found.left_out}
        readings = []
        if due & {"disk_used", "inodes_used"}:
            # A read-only file system may be full by design: an image, or the root of a container.
            mounts = [each for each in found.local if not each.read_only]
            readings += [each for mount in mounts for each in self._used(mount) if each.check in due]
        if "disk_read_only" in due:
            readings += self._states(found)
        return readings

    def left_out(self) -> tuple[Omission, ...]:
        return tuple(self._left_out.values())

    def remembered(self) -> dict[str, Any]:
        """Return the state that must outlive the process, as JSON."""
        return {"boot_id": self._boot_id, "writable": list(self._writable)}

    def _used(self, mount: Mount) -> Iterator[Reading]:
        path = self._root + mount.point
        try:
            if mount.kind not in OWN_NUMBERS and _device(Path(path).stat().st_dev) != mount.device:
                self._left_out[mount.entity] = Omission(
                    mount.entity,
                    f"{path} is not this file system: covered, or not propagated into this container",
                )
                return
            found = os.statvfs(path)
        except OSError as error:
            self._left_out[mount.entity] = Omission(mount.entity, f"{error.strerror}: {path}")
            return
        values = {
            "disk_used": disk_used(found.f_blocks, found.f_bfree, found.f_bavail),
            "inodes_used": inodes_used(found.f_files, found.f_ffree),
        }
        for check, value in values.items():
            if value is not None:
                yield Reading(check, mount.entity, round(value, 3))

    def _states(self, found: SelectedMounts) -> Iterator[Reading]:
        wanted = fstab_writable(try_read(f"{self._root}/etc/fstab", FSTAB_BYTES) or b"")
        for mount in found.local:
            state = read_only_state(mount, self._writable, wanted)
            if state is not None:
                yield Reading("disk_read_only", mount.entity, state, f"{mount.kind} on {mount.source}")
            if state == WRITABLE:
                self._remember(mount_key(mount))

    def _remember(self, key: str) -> None:
        self._writable.pop(key, None)
        self._writable[key] = None  # the newest last
        while len(self._writable) > MAX_REMEMBERED:
            del self._writable[next(iter(self._writable))]


def _device(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def _writable(remembered: Mapping[str, Any], boot_id: str) -> dict[str, None]:
    """Return the keys of this boot. After a reboot, an operator may have made a file system read-only."""
    keys = remembered.get("writable")
    if remembered.get("boot_id") != boot_id or not isinstance(keys, list):
        return {}
    return {key: None for key in keys[:MAX_REMEMBERED] if isinstance(key, str)}
