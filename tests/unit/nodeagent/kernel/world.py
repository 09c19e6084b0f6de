"""A kernel log in a socket. One read returns one record, as with /dev/kmsg."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from nodeagent.kernel.kmsg import KmsgCursor, KmsgSensor
from nodeagent.kernel.line_reader import LinePatterns
from nodeagent.model import Observation
from nodeagent.policy import kernel_lines
from nodeagent.sensing.clock import Anchor, Clock

BOOT = "5a7c1e5e-9d0e-4b57-a0a5-0b1f8c5d2a11"
CLOCK = Clock(Anchor(BOOT, 1000.0))
TABLE = Path(kernel_lines.__file__).with_suffix(".toml").read_text()
LINES = LinePatterns(kernel_lines.load_lines(TABLE))
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
NOTHING = "eth0: renamed from veth123abc"

COMPROMISED = "poll_health:801:(pid 0): device's health compromised - reached miss count"
IMPORTANT = [  # each for a different fault
    *(f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, GPU has fallen off the bus." for bus in range(8)),
    *(f"nvidia-nvswitch{n}: SXid (PCI:0000:0{n}:00.0): 20034, Fatal, Link 04 Fault" for n in range(4)),
    *(f"EXT4-fs (nvme{n}n1p1): Remounting filesystem read-only" for n in range(4)),
    *(f"mlx5_core 0000:{bus:02x}:00.0: {COMPROMISED}" for bus in range(4)),
]


def raw(seq: int, text: str = NOTHING, *, facility: int = 0, at_s: float | None = None) -> bytes:
    """Return a record as the kernel writes it."""
    escaped = text.replace("\\", "\\x5c").replace("\n", "\\x0a")
    stamp_us = int((seq * 0.001 if at_s is None else at_s) * 1e6)
    return f"{facility * 8 + 4},{seq},{stamp_us},-;{escaped}\n".encode()


class Log:
    """The log that a sensor reads. It can lose records."""

    def __init__(self) -> None:
        self.mine, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs.setblocking(False)
        self.failing: list[int] = []  # errors of the next reads

    def write(self, *records: bytes) -> None:
        for each in records:
            self.mine.send(each)

    def open(self) -> int:
        return os.dup(self.theirs.fileno())

    def read(self, fd: int, size: int) -> bytes:
        if self.failing:
            number = self.failing.pop(0)
            raise OSError(number, os.strerror(number))
        return os.read(fd, size)

    def end(self) -> None:
        self.mine.close()
        self.theirs.close()


class Script:
    """A log that is a list of records, because no descriptor could hold so many."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self._records = iter(records)
        self.left = True

    def read(self, fd: int, size: int) -> bytes:
        record = next(self._records, None)
        if record is None:
            self.left = False
            raise BlockingIOError(errno.EAGAIN, "")
        return record


def sensor(
    log: Log | Script,
    cursor: KmsgCursor | None = None,
    *,
    trust_user_lines: bool = False,
    clock: Clock = CLOCK,
) -> KmsgSensor:
    opener: Callable[[], int] = log.open if isinstance(log, Log) else lambda: os.open(os.devnull, os.O_RDONLY)
    made = KmsgSensor(clock, LINES, cursor, trust_user_lines=trust_user_lines, opener=opener, reader=log.read)
    made.open()
    return made


def events(found: Iterable[Observation]) -> list[Observation]:
    """Return the observations without the readings of the counter of lost records."""
    return [each for each in found if each.check != "observations_dropped"]


def lost(found: Iterable[Observation]) -> list[float]:
    return [each.value for each in found if each.check == "observations_dropped"]
