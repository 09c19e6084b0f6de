"""The real /dev/kmsg: a written line is read back, and is trusted only if a test requests it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.kernel.kmsg import KmsgSensor
from nodeagent.model import Observation
from nodeagent.sensing.clock import begin
from tests.unit.nodeagent.kernel.world import LINES, events

pytestmark = [pytest.mark.local, pytest.mark.timeout(30)]

KMSG = Path("/dev/kmsg")
BOUND_S = 5.0
CLOCK = begin(None, 0.0)


@pytest.fixture
def writer() -> Iterator[int]:
    try:
        os.close(os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK))
        fd = os.open(KMSG, os.O_WRONLY)
    except OSError as error:
        pytest.skip(f"/dev/kmsg may not be read and written here: {error.strerror}")
    yield fd
    os.close(fd)


def made(*, trusting: bool) -> KmsgSensor:
    sensor = KmsgSensor(CLOCK, LINES, trust_user_lines=trusting)
    sensor.open()
    return sensor


def until(sensor: KmsgSensor, text: str) -> list[Observation]:
    found: list[Observation] = []
    deadline_s = time.monotonic() + BOUND_S
    while not any(text in each.text for each in found) and time.monotonic() < deadline_s:
        found += events(sensor.read())
    return [each for each in found if text in each.text]


def test_a_line_makes_the_round_trip_through_the_kernel(writer: int) -> None:
    sensor = made(trusting=True)
    mark = f"holdfast-{os.getpid()}-{time.monotonic_ns()}"
    before_s = CLOCK.now_s()
    os.write(writer, f"<3>NVRM: Xid (PCI:0000:3b:00): 43, pid=1, name={mark}, Ch 00000008\n".encode())
    [found] = until(sensor, mark)
    assert (found.check, found.entity, found.value) == ("xid", "gpu/0000:3b:00.0", 43)
    assert dict(found.facts)["name"] == mark
    assert found.at_s == pytest.approx(before_s, abs=1.0)
    again = KmsgSensor(CLOCK, LINES, sensor.cursor, trust_user_lines=True)
    again.open()
    assert not any(mark in each.text for each in again.read())
    sensor.close()
    again.close()


def test_a_line_that_a_program_writes_is_not_trusted(writer: int) -> None:
    sensor, trusting = made(trusting=False), made(trusting=True)
    mark = f"holdfast-{os.getpid()}-{time.monotonic_ns()}"
    os.write(writer, f"<3>NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name={mark}\n".encode())
    assert len(until(trusting, mark)) == 1
    assert trusting.cursor is not None
    while sensor.cursor is None or sensor.cursor.seq < trusting.cursor.seq:
        assert not any(mark in each.text for each in sensor.read())
    sensor.close()
    trusting.close()
