"""Checks physical network interfaces: which have gone down, and how often their carrier changes."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import exists, list_names, parse_number, parse_text, try_read
from nodeagent.sensing.sweep import CachedList, Reading
from nodeagent.sysfs.departures import Hardware, KnownHardware, works_elsewhere

# Read at a time. If there are more, half of them are read every time, and all others in turn.
MAX_INTERFACES = 256
MAX_REMEMBERED = 512
UP, DOWN = 0.0, 1.0
IFF_UP = 0x1  # linux/if.h: administratively up

_FLAGS = re.compile(r"0x[0-9a-f]{1,8}")


@dataclass(frozen=True, slots=True)
class NetInterface:
    """One physical interface."""

    name: str
    key: str  # its device, and which of the device's ports it is; "" if that cannot be read
    home: str  # see `departures.Hardware`
    has_rdma: bool = False  # InfiniBand or RoCE: training may depend on it

    @property
    def entity(self) -> str:
        return f"net/{self.name}"


def interface_state(operstate: str, flags: int, was_up: bool) -> float:
    """Return the check's state. Pure.

    An interface that has never been up, or that an operator has taken down, counts as up, because it is in
    its intended state. After an operator has had it forgotten, this also ends its finding. Drivers that do
    not know the state report `unknown`.
    """
    return DOWN if was_up and flags & IFF_UP and operstate in ("down", "lowerlayerdown") else UP


class NetworkInterfaces:
    """Checks the interfaces of the network namespace that the sysfs belongs to."""

    checks = frozenset({"net_carrier", "net_down"})

    def __init__(self, root: str, remembered: object, known: object = None) -> None:
        """Take what `remembered` and `known.remembered` returned before a restart."""
        self.known = KnownHardware(known)
        self._base = f"{root}/class/net"
        self._listing = CachedList(lambda: physical_interfaces(self._base))
        self._last: dict[str, str] = {}  # by check: the last interface that was read in turn
        self._read: set[str] = set()  # the listed interfaces that have been read
        self._unread = 0  # how many of the listed interfaces have not
        self._were_up = _remembered(remembered)

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        listed = self._listing.at(now_s)
        readings: list[Reading] = []
        if "net_down" in due:
            found = self._in_turn("net_down", listed)
            self._read &= {each.name for each in listed}
            self._read |= {each.name for each in found}
            self._unread = len(listed) - len(self._read)
            readings += self._states(found, listed)
        for each in self._in_turn("net_carrier", listed) if "net_carrier" in due else ():
            changes = parse_number(try_read(f"{self._base}/{each.name}/carrier_changes"))
            if changes is not None:
                readings.append(Reading("net_carrier", each.entity, float(changes)))
        return readings

    def _in_turn(self, check: str, listed: Sequence[NetInterface]) -> Sequence[NetInterface]:
        """Return the interfaces to read now for a check.

        If there are too many, those of RDMA adapters and those that have been up are preferred.
        """
        if len(listed) <= MAX_INTERFACES:
            return listed
        ordered = sorted(listed, key=lambda each: (not each.has_rdma, each.name not in self._were_up))
        always, others = ordered[: MAX_INTERFACES // 2], ordered[MAX_INTERFACES // 2 :]
        others.sort(key=lambda each: each.name)
        at = bisect_right(others, self._last.get(check, ""), key=lambda each: each.name)
        turn = [*others[at:], *others[:at]][: MAX_INTERFACES - len(always)]
        self._last[check] = turn[-1].name
        return [*always, *turn]

    def left_out(self) -> tuple[Omission, ...]:
        """Return how many interfaces have not been read yet; without interfaces, no check is left out."""
        if not self._unread:
            return ()
        why = f"{self._unread} interfaces have not been read yet: {MAX_INTERFACES} are read at a time"
        return (Omission("net_down", why, is_open=True),)

    def remembered(self) -> list[Any]:
        """Return the interfaces that were up, as JSON."""
        return list(self._were_up)

    def forget(self, entity: str) -> None:
        """Forget that an interface was up; if `entity` is empty, do so for all interfaces.

        An interface that is no longer listed is then reported as gone.
        """
        self.known.forget(entity)
        self._were_up = {each: None for each in self._were_up if entity and f"net/{each}" != entity}

    def _states(self, found: Sequence[NetInterface], listed: Sequence[NetInterface]) -> list[Reading]:
        present = {each.entity: Hardware(each.key, each.home, None) for each in listed}
        states: list[Reading] = []
        for each in found:
            operstate = parse_text(try_read(f"{self._base}/{each.name}/operstate"))
            flags = parse_text(try_read(f"{self._base}/{each.name}/flags")) or ""
            if operstate is None or not _FLAGS.fullmatch(flags):
                continue
            state = interface_state(operstate, int(flags, 16), each.name in self._were_up)
            states.append(Reading("net_down", each.entity, state, f"operstate {operstate}, flags {flags}"))
            is_up = operstate == "up"
            present[each.entity] = Hardware(each.key, each.home, state == DOWN, is_up)
            if is_up and each.name not in self._were_up:
                self._were_up = self._with(each.name)
        return [*self._gone(present), *states]

    def _with(self, name: str) -> dict[str, None]:
        """Return the names that were up, and another one. Those that are down are dropped last."""
        names = [*self._were_up, name]
        if len(names) > MAX_REMEMBERED:
            names.remove(next((each for each in names if not self.known.is_down(f"net/{each}")), names[0]))
        return dict.fromkeys(names)

    def _gone(self, present: Mapping[str, Hardware]) -> list[Reading]:
        return self.known.gone(
            present, self._listing.listed_s, lambda old: works_elsewhere(old, present.values(), exists)
        )


def physical_interfaces(base: str) -> tuple[NetInterface, ...]:
    """Return the present interfaces that belong to a device, except virtual functions."""
    return tuple(
        _interface(base, name)
        for name in list_names(base)
        if exists(f"{base}/{name}/device") and not exists(f"{base}/{name}/device/physfn")
    )


def _interface(base: str, name: str) -> NetInterface:
    device = os.path.realpath(f"{base}/{name}/device")
    number, port = (parse_text(try_read(f"{base}/{name}/{each}")) for each in ("dev_port", "phys_port_name"))
    key = f"{device} {number} {port or ''}" if number else ""
    return NetInterface(name, key, f"{device}/net", exists(f"{device}/infiniband"))


def _remembered(raw: object) -> dict[str, None]:
    found = raw[-MAX_REMEMBERED:] if isinstance(raw, list) else []
    return {each: None for each in found if isinstance(each, str)}
