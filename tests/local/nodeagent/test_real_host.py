from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.host import sensor as host
from nodeagent.host.filesystems import FileSystems
from nodeagent.host.sensor import HostSensor
from nodeagent.model import Observation
from nodeagent.sensing import clock
from nodeagent.sysfs import sensor as sysfs
from nodeagent.sysfs.sensor import SysfsSensor
from tests.unit.nodeagent.ticking import Ticking

pytestmark = pytest.mark.local

HOST = dict.fromkeys(host.CHECKS, 5.0)
SYSFS = dict.fromkeys(sysfs.CHECKS, 5.0)
ALWAYS = {"memory_used", "files_used", "pids_used", "load", "clock_step"}
SHARES = {"memory_used", "files_used", "pids_used", "disk_used", "inodes_used"}
START_S = 10.0

# The parent waits in the kernel, in state D, until the child of a vfork is done.
STUCK = "import ctypes, time; ctypes.CDLL(None).vfork(); time.sleep(60)"


def test_the_readings_of_this_host_are_plausible() -> None:
    now = clock.begin(None, 0.0)
    sensor = HostSensor(now, HOST)
    sensor.open()
    found = sensor.read()
    left_out = {each.what for each in sensor.left_out()}
    seen = {each.check for each in found}
    assert seen >= ALWAYS
    # A container may have no disks of its own.
    assert host.CHECKS - seen - FileSystems.checks <= left_out
    for each in found:
        assert abs(each.at_s - now.now_s()) < 5.0
        assert each.check not in SHARES or 0.0 <= each.value <= 100.0
    assert _value(found, "memory_used") > 0
    assert _value(found, "load") < 100
    json.dumps(sensor.remembered())


def test_the_readings_of_this_hosts_devices_are_plausible() -> None:
    sensor = SysfsSensor(clock.begin(None, 0.0), SYSFS)
    sensor.open()
    for each in sensor.read():
        assert each.check in sysfs.CHECKS
        assert each.value >= 0 or each.check == "host_temperature_margin"
        assert each.check != "device_pcie_link" or 0 < each.value <= 1
    json.dumps(sensor.remembered())


def test_a_real_process_that_is_stuck_in_the_kernel_is_found_and_named(stuck: int) -> None:
    now = Ticking()
    sensor = HostSensor(now, {"uninterruptible": 15.0})
    assert sensor.read() == ()
    assert [each.what for each in sensor.left_out()] == ["uninterruptible"]
    now.at_s += 60
    (found,) = sensor.read()
    assert found.value >= 1
    assert f"({stuck}) for 60 s" in found.text


@pytest.fixture
def stuck() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", STUCK], start_new_session=True)
    try:
        _wait_until_stuck(process.pid)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # both at once: the parent must not continue on a used stack
        process.wait(START_S)


def _wait_until_stuck(pid: int) -> None:
    until = time.monotonic() + START_S
    # Wait until it has a child, because it may also be in state D while it starts and waits for a disk.
    task = Path(f"/proc/{pid}/task/{pid}")
    while not (task / "children").read_text() or ") D " not in (task / "stat").read_text():
        assert time.monotonic() < until, "vfork did not make it wait in the kernel"
        time.sleep(0.01)


def _value(found: tuple[Observation, ...], check: str) -> float:
    (value,) = [each.value for each in found if each.check == check]
    return value
