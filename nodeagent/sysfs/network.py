"""Check physical network interfaces: which have gone down, and how often their carrier changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import exists, list_names, parse_number, parse_text, try_read
from nodeagent.sensing.sweep import CachedList, Reading

MAX_INTERFACES = 256
MAX_REMEMBERED = 512
UP, DOWN = 0.0, 1.0
IFF_UP = 0x1  # linux/if.h: administratively up

_FLAGS = re.compile(r"0x[0-9a-f]{1,8}")


def interface_state(operstate: str, flags: int, was_up: bool) -> float | None:
    """Return the check's state; None for an interface that has never been up. Pure.

    An interface that an operator has taken down counts as up. Drivers that do not know the state report
    `unknown`.
    """
    if operstate == "up":
        return UP
    if not was_up:
        return None
    return DOWN if flags & IFF_UP and operstate in ("down", "lowerlayerdown") else UP


class NetworkInterfaces:
    """Checks the interfaces of the network namespace that the sysfs belongs to."""

    checks = frozenset({"net_carrier", "net_down"})

    def __init__(self, root: str, remembered: object) -> None:
        self._base = f"{root}/class/net"
        self._listing = CachedList(lambda: physical_interfaces(self._base))
        self._were_up = _remembered(remembered)

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        for name in self._listing.at(now_s):
            entity = f"net/{name}"
            if "net_carrier" in due:
                changes = parse_number(try_read(f"{self._base}/{name}/carrier_changes"))
                if changes is not None:
                    yield Reading("net_carrier", entity, float(changes))
            if "net_down" in due:
                yield from self._state(name, entity)

    def left_out(self) -> tuple[Omission, ...]:
        """Return nothing: a node without such interfaces does not miss any check."""
        return ()

    def remembered(self) -> list[Any]:
        """Return the interfaces that were up, as JSON."""
        return list(self._were_up)

    def forget(self, entity: str) -> None:
        """Forget that an interface was up; all of them if `entity` is empty."""
        self._were_up = {each: None for each in self._were_up if entity and f"net/{each}" != entity}

    def _state(self, name: str, entity: str) -> Iterator[Reading]:
        operstate = parse_text(try_read(f"{self._base}/{name}/operstate"))
        flags = parse_text(try_read(f"{self._base}/{name}/flags")) or ""
        if operstate is None or not _FLAGS.fullmatch(flags):
            return
        found = interface_state(operstate, int(flags, 16), name in self._were_up)
        if found is not None:
            yield Reading("net_down", entity, found, f"operstate {operstate}, flags {flags}")
        if operstate == "up" and name not in self._were_up:
            self._were_up = dict.fromkeys([*self._were_up, name][-MAX_REMEMBERED:])


def physical_interfaces(base: str) -> tuple[str, ...]:
    """Return the present interfaces that belong to a device, except virtual functions."""
    found = (
        name
        for name in list_names(base)
        if exists(f"{base}/{name}/device") and not exists(f"{base}/{name}/device/physfn")
    )
    return tuple(found)[:MAX_INTERFACES]


def _remembered(raw: object) -> dict[str, None]:
    found = raw[-MAX_REMEMBERED:] if isinstance(raw, list) else []
    return {each: None for each in found if isinstance(each, str)}
