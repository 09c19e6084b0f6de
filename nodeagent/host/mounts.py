"""Selects the mounts to check: each local file system once, unless a server could block access to it.

Pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import printable

MAX_LOCAL = 128
MAX_NAMED = 32  # omitted mounts listed by name; the rest are counted
MAX_POINT = 512  # characters

# Types that reside on a block device of this node. Only these are accessed: an unknown type might hang.
LOCAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "jfs", "reiserfs", "nilfs2", "vfat",
    "exfat", "ntfs3", "hfsplus",
})  # fmt: skip
# Types that store no data, or that are read-only by design.
PSEUDO = frozenset({
    "autofs", "binder", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "cramfs", "debugfs",
    "devpts", "devtmpfs", "efivarfs", "erofs", "fusectl", "fuse.lxcfs", "hugetlbfs", "iso9660", "mqueue",
    "nsfs", "overlay", "proc", "pstore", "ramfs", "resctrl", "romfs", "rootfs", "rpc_pipefs", "securityfs",
    "selinuxfs", "smackfs", "squashfs", "sysfs", "tmpfs", "tracefs", "udf",
})  # fmt: skip
# Only upgrades write to these paths, and no job needs them.
FOR_BOOT = ("/boot", "/efi")
# A subvolume of these types has its own device number, which differs from the number in mountinfo.
OWN_NUMBERS = frozenset({"btrfs", "zfs", "bcachefs"})
# Mount options that mean "not writable": ext4 since 6.15 reports `emergency_ro` after a remount by error.
READ_ONLY = frozenset({"ro", "emergency_ro", "shutdown"})

# Where kubelet mounts the volumes of pods and stages CSI devices; its root folder is configurable.
_VOLUMES = re.compile(
    r"/kubelet/(pods|plugins)/|/pods/[^/]+/(volumes|volume-subpaths)/|/plugins/kubernetes\.io/"
)
# Block devices that a file or a server provides: their faults are not faults of this node's hardware.
_BACKED = re.compile(r"/dev/(loop\d|nbd\d|rbd[\d/])")
_MAPPED = ("/dev/mapper/", "/dev/dm-")

_ESCAPE = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str  # major:minor
    root: str  # the mounted part of the file system: "/", or a folder for a bind mount or a subvolume
    point: str  # the path for system calls
    kind: str
    source: str  # for people
    read_only: bool  # whether the file system is read-only, not just this mount

    @property
    def entity(self) -> str:
        return f"disk/{printable(self.point)}"

    @property
    def is_volume(self) -> bool:
        """True for a pod's volume, and for other devices that this node cannot repair."""
        if self.point == "/":
            return False
        return bool(_VOLUMES.search(self.point) or _BACKED.match(self.source))

    @property
    def device_entity(self) -> str:
        """The entity of the block device by its path, such as `disk/dm-3`; "" for none."""
        if self.source.startswith(_MAPPED):
            return f"disk/dm-{self.device.partition(':')[2]}"
        return f"disk/{self.source.rpartition('/')[2]}" if self.source.startswith("/dev/") else ""


@dataclass(frozen=True, slots=True)
class SelectedMounts:
    """The file systems to check, and the omitted file systems that may matter."""

    local: tuple[Mount, ...]
    left_out: tuple[Omission, ...]


def parse(mountinfo: bytes) -> tuple[Mount, ...]:
    """Return the mounts in the order of the file; malformed lines are skipped."""
    return tuple(found for line in mountinfo.splitlines() if (found := _mount(line)) is not None)


def _mount(line: bytes) -> Mount | None:
    # 36 35 98:0 /root /point rw,noatime shared:1 master:2 - ext4 /dev/sda1 rw,errors=continue
    before, dash, after = line.partition(b" - ")
    left, right = before.split(b" "), after.split(b" ")
    if not dash or len(left) < 6 or len(right) < 3:
        return None
    root, point, source = unescaped(left[3]), unescaped(left[4]), printable(unescaped(right[1]))
    if not point.startswith("/") or "\0" in point:
        return None
    options = os.fsdecode(right[2]).split(",")
    read_only = not READ_ONLY.isdisjoint(options)
    return Mount(
        printable(os.fsdecode(left[2])), root, point, printable(os.fsdecode(right[0])), source, read_only
    )


def unescaped(raw: bytes) -> str:
    """Return a path of mountinfo or fstab without its escapes, such as \\040 for a blank."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), raw))


def select(mounts: Sequence[Mount]) -> SelectedMounts:
    """Return each local file system once, and the omitted mounts with reasons."""
    on_top = {each.point: each for each in mounts}  # a later mount covers an earlier one at the same path
    local: dict[str, Mount] = {}
    others: list[Omission] = []
    # Exclude the root: if it is on a server, this agent depends on that server anyway.
    remote = [f"{each.point}/" for each in on_top.values() if _may_hang(each) and each.point != "/"]
    for mount in on_top.values():
        why = _why_not(mount, remote)
        if why:
            others.append(Omission(mount.entity, why))
        elif mount.kind in LOCAL and not _for_boot(mount.point):
            before = local.get(mount.device)
            local[mount.device] = mount if before is None or _rank(mount) < _rank(before) else before
    found = sorted(local.values(), key=_rank)
    others += [Omission(each.entity, f"more than {MAX_LOCAL} file systems") for each in found[MAX_LOCAL:]]
    return SelectedMounts(tuple(found[:MAX_LOCAL]), _bounded(others))


def _why_not(mount: Mount, remote: Iterable[str]) -> str:
    if _may_hang(mount):
        return f"{mount.kind}: a network or user-space file system may block forever"
    if mount.kind not in LOCAL:
        return ""
    # Access to this path goes through the server.
    under = next((each for each in remote if mount.point.startswith(each)), None)
    if under is not None:
        return f"it is mounted below {printable(under)}, which may block forever"
    return "its path is too long" if len(mount.point) > MAX_POINT else ""


def _for_boot(point: str) -> bool:
    return any(point == each or point.startswith(f"{each}/") for each in FOR_BOOT)


def _may_hang(mount: Mount) -> bool:
    return mount.kind not in LOCAL and mount.kind not in PSEUDO


def _rank(mount: Mount) -> tuple[bool, bool, bool, int, str]:
    """Return the sort key of a mount: the node's own mounts come before volumes, and its root comes first."""
    return mount.is_volume, mount.point != "/", mount.root != "/", len(mount.point), mount.point


def _bounded(others: list[Omission]) -> tuple[Omission, ...]:
    if len(others) <= MAX_NAMED:
        return tuple(others)
    rest = len(others) - MAX_NAMED
    return (*others[:MAX_NAMED], Omission("disk", f"and {rest} more, for the same reasons"))
