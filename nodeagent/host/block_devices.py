"""Finds the block devices that are the node's own, as opposed to those that hold users' volumes.

A kernel line names a device, and often this device is not mounted: a volume that shut down while it was being
mounted, a volume that a pod uses as a block device, or the controller of an NVMe volume. So a device counts
as the node's own only if the node uses it: the device is mounted outside the pods' folders or used for swap,
or another such device depends on it. The kernel's tree shows these dependencies: the disk of a partition, the
members of an array, the disks below LVM, encryption or multipath, the other disks of a btrfs, and the paths
and the controller of an NVMe device.

A device remains the node's own until the next boot, or until another device has its name, because after an
I/O error the mount or even the device may disappear.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nodeagent.host.mounts import LOCAL, Mount, unescaped
from nodeagent.sensing.small_files import list_names, parse_text, try_read
from nodeagent.sensing.sweep import Reading

OF_NODE, OF_VOLUME = 0.0, 1.0  # the states of `user_volume`
USE = "user_volume"
MAX_DEVICES = 512  # the most devices remembered, and the most volumes reported
SWAPS_BYTES = 1 << 16
NO_DEVICE = "0:"  # the major number of file systems without a block device of their own

# What can be derived from a name, because sysfs no longer lists a device that the kernel has given up on.
_PARTITION = re.compile(r"((?:sd|vd|xvd|hd)[a-z]+)\d+|((?:nvme\d+n|mmcblk|md|nbd|pmem)\d+)p\d+")
_NAMESPACE = re.compile(r"(nvme\d+)n\d+")
_PATH = re.compile(r"nvme(\d+)c(\d+)n(\d+)")  # a path of a namespace: subsystem, controller, id
_CONTROLLER = re.compile(r"nvme\d+")


class BlockTree:
    """The kernel's tree of block devices, as one sysfs shows it at each call."""

    def __init__(self, sys: str) -> None:
        self._sys = sys

    def name_of(self, number: str) -> str:
        """Return the name of the device with a number such as `8:1`; "" if there is none."""
        return _link(f"{self._sys}/dev/block/{number}").rpartition("/")[2]

    def name_of_mapped(self, mapped: str) -> str:
        """Return the name, such as `dm-3`, of the device `/dev/mapper/MAPPED`; "" if there is none."""
        for each in list_names(f"{self._sys}/class/block"):
            if parse_text(try_read(f"{self._sys}/class/block/{each}/dm/name")) == mapped:
                return each
        return ""

    def identity(self, name: str) -> str:
        """Return an identifier that tells this device from a later one with the same name; "" if none."""
        for kind in ("block", "nvme"):
            try:
                return str(Path(f"{self._sys}/class/{kind}/{name}").stat().st_ino)
            except OSError:
                continue
        return ""

    def with_all_below(self, names: Iterable[str]) -> dict[str, None]:
        """Return the devices and all devices that they depend on, in a stable order."""
        listed = list_names(f"{self._sys}/class/block")
        pools = [
            list_names(f"{self._sys}/fs/btrfs/{each}/devices") for each in list_names(f"{self._sys}/fs/btrfs")
        ]
        found: dict[str, None] = {}
        left = list(names)
        while left:
            name = left.pop(0)
            if name not in found:
                found[name] = None
                left += self._below(name, listed)
                left += [each for pool in pools if name in pool for each in pool]
        return found

    def _below(self, name: str, listed: Iterable[str]) -> list[str]:
        """Return the devices that a device depends on directly."""
        where = _link(f"{self._sys}/class/block/{name}")
        if not where:
            return below_by_name(name)
        parent = where.split("/")[-2] if "/" in where else ""
        found = list_names(f"{self._sys}/class/block/{name}/slaves")
        if parent in listed or _CONTROLLER.fullmatch(parent):
            found.append(parent)
        return [*found, *_paths(name, listed)]


def below_by_name(name: str) -> list[str]:
    """Return the disk of a partition or the controller of an NVMe device, derived from the name. Pure."""
    if (path := _PATH.fullmatch(name)) is not None:
        return [f"nvme{path[2]}"]
    found = _PARTITION.fullmatch(name) or _NAMESPACE.fullmatch(name)
    return [] if found is None else [next(each for each in found.groups() if each)]


def _paths(name: str, listed: Iterable[str]) -> list[str]:
    """Return the paths of an NVMe namespace, or the controller of a path."""
    if _PATH.fullmatch(name) is not None:
        return below_by_name(name)
    paths = ((each, _PATH.fullmatch(each)) for each in listed)
    return [each for each, path in paths if path is not None and name == f"nvme{path[1]}n{path[3]}"]


class NodeDevices:
    """Determines which block devices are the node's own, and remembers them until the next boot."""

    def __init__(self, sys: str, proc: str, boot_id: str, remembered: Mapping[str, Any]) -> None:
        """`remembered` is an earlier result of `remembered()`, possibly from another boot or corrupt."""
        self._tree = BlockTree(sys)
        self._swaps = f"{proc}/swaps"
        own = remembered.get("own") if remembered.get("boot_id") == boot_id else None
        pairs = own.items() if isinstance(own, dict) else ()
        self._own = {name: each for name, each in pairs if isinstance(each, str)}  # the identity, by name

    def uses(self, mounts: Iterable[Mount]) -> Iterator[Reading]:
        """Yield the use of each device that is or was the node's own, or that backs a volume."""
        names = dict(self._mounted(mounts))
        nodes = [each for each, is_volume in names.items() if not is_volume]
        volumes = [each for each, is_volume in names.items() if is_volume]
        own = self._tree.with_all_below([*nodes, *self._swapped()])
        lost = self._lost(own, volumes)
        for name in own:
            identity = self._tree.identity(name) or self._own.get(name, "")
            self._own.pop(name, None)  # the newest are last
            self._own[name] = identity
        every = {**own, **self._own}
        yield from (Reading(USE, _entity(name), OF_NODE) for name in every)
        others = dict.fromkeys((*lost, *volumes[:MAX_DEVICES]))
        yield from (Reading(USE, _entity(name), OF_VOLUME) for name in others if name not in every)
        while len(self._own) > MAX_DEVICES:
            del self._own[next(iter(self._own))]

    def remembered(self) -> dict[str, str]:
        """Return the node's own devices as JSON: the name and the `identity` of each."""
        return dict(self._own)

    def _mounted(self, mounts: Iterable[Mount]) -> Iterator[tuple[str, bool]]:
        """Yield the mounts' devices, and whether each holds only volumes of pods; volumes first."""
        is_volume: dict[tuple[str, str], bool] = {}
        for each in mounts:
            if each.kind in LOCAL or not each.device.startswith(NO_DEVICE):
                key = each.device, each.device_entity.removeprefix("disk/")
                is_volume[key] = each.is_volume and is_volume.get(key, True)
        # If two mounts share a device, the node's own use is decisive, so it comes last.
        for (number, source), volume in sorted(is_volume.items(), key=lambda item: not item[1]):
            if name := self._tree.name_of(number) or source:
                yield name, volume

    def _swapped(self) -> Iterator[str]:
        for line in (try_read(self._swaps, SWAPS_BYTES) or b"").splitlines():
            path = unescaped(line.split()[0]) if line.split() else ""
            if path.startswith("/dev/"):
                name = path.rpartition("/")[2]
                mapped = self._tree.name_of_mapped(name) if path.startswith("/dev/mapper/") else ""
                yield mapped or name

    def _lost(self, own: Mapping[str, None], volumes: Iterable[str]) -> list[str]:
        """Forget and return the names that now belong to another device."""
        lost = []
        for name in [each for each in self._own if each not in own]:
            before, now = self._own[name], self._tree.identity(name)
            if (now and now != before) or (not before and name in volumes):
                del self._own[name]
                lost.append(name)
        return lost


def _entity(name: str) -> str:
    return f"disk/{name.replace('!', '/')}"  # a name in sysfs cannot contain a slash, but kernel lines do


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
