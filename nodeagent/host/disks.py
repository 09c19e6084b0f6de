"""Looks at the local file systems: space, inodes, and whether one has become read-only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodeagent.host import read_only, space
from nodeagent.host.mounts import OWN_NUMBERS, Chosen, Mount, chosen, parse
from nodeagent.reading import LeftOut, Reading, content

MOUNTINFO_BYTES = 4 << 20  # a node with thousands of pods has one of about a megabyte
FSTAB_BYTES = 1 << 20


class Disks:
    """Sees its own mounts or, with `root`, those of the host that is mounted there."""

    checks = frozenset({"disk_used", "inodes_used", "disk_read_only"})

    def __init__(self, proc: str, root: str | None, boot_id: str, remembered: Mapping[str, Any]) -> None:
        """`remembered` is what `remembered()` gave, perhaps of another boot, perhaps garbage."""
        self._mountinfo = f"{proc}/self/mountinfo" if root is None else f"{proc}/1/mountinfo"
        self._root = (root or "").rstrip("/")
        self._boot_id = boot_id
        self._writable = _writable(remembered, boot_id)
        self._left_out: dict[str, LeftOut] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        raw = content(self._mountinfo, MOUNTINFO_BYTES)
        if raw is None:
            self._left_out = {"disk": LeftOut("disk", f"{self._mountinfo} cannot be read")}
            return ()
        found = chosen(parse(raw[: raw.rfind(b"\n") + 1]))  # whole lines, should it be longer than that
        self._left_out = {each.what: each for each in found.left_out}
        readings = []
        if due & {"disk_used", "inodes_used"}:
            # One that is read-only may be full by design: an image, the root of a container's system.
            mounts = [each for each in found.local if not each.read_only]
            readings += [each for mount in mounts for each in self._used(mount) if each.check in due]
        if "disk_read_only" in due:
            readings += self._states(found)
        return readings

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(self._left_out.values())

    def remembered(self) -> dict[str, Any]:
        """Return what must outlive the process. JSON."""
        return {"boot_id": self._boot_id, "writable": list(self._writable)}

    def _used(self, mount: Mount) -> Iterator[Reading]:
        path = self._root + mount.point
        try:
            if mount.kind not in OWN_NUMBERS and _device(Path(path).stat().st_dev) != mount.device:
                self._left_out[mount.entity] = LeftOut(
                    mount.entity,
                    f"{path} is not this file system: covered, or not propagated into this container",
                )
                return
            found = os.statvfs(path)
        except OSError as error:
            self._left_out[mount.entity] = LeftOut(mount.entity, f"{error.strerror}: {path}")
            return
        values = {
            "disk_used": space.disk_used(found.f_blocks, found.f_bfree, found.f_bavail),
            "inodes_used": space.inodes_used(found.f_files, found.f_ffree),
        }
        for check, value in values.items():
            if value is not None:
                yield Reading(check, mount.entity, round(value, 3))

    def _states(self, found: Chosen) -> Iterator[Reading]:
        wanted = read_only.wanted_writable(content(f"{self._root}/etc/fstab", FSTAB_BYTES) or b"")
        for mount in found.local:
            state = read_only.state(mount, self._writable, wanted)
            if state is not None:
                yield Reading("disk_read_only", mount.entity, state, f"{mount.kind} on {mount.source}")
            if state == read_only.WRITABLE:
                self._remember(read_only.key(mount))

    def _remember(self, key: str) -> None:
        self._writable.pop(key, None)
        self._writable[key] = None  # the newest last
        while len(self._writable) > read_only.MAX_REMEMBERED:
            del self._writable[next(iter(self._writable))]


def _device(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"


def _writable(remembered: Mapping[str, Any], boot_id: str) -> dict[str, None]:
    """Return the keys of this boot. After another one, an operator may have wanted what is read-only now."""
    keys = remembered.get("writable")
    if remembered.get("boot_id") != boot_id or not isinstance(keys, list):
        return {}
    return {key: None for key in keys[: read_only.MAX_REMEMBERED] if isinstance(key, str)}
