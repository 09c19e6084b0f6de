"""A file system that never answers: a FUSE mount whose server reads no request."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest

from nodeagent.host.sensor import HostSensor
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing import clock as clocks
from tests.local.nodeagent.serving import PATIENCE_S

MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
PODS = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pvc/mount"
PERIODS_S = {name: 1e-3 for name, rule in shipped().rules.items() if rule.period_s}  # all are always due


@contextmanager
def unanswered(point: Path) -> Iterator[FileIO]:
    """Mount a file system that answers no call until the end, or until the yielded server is closed."""
    point.mkdir(parents=True)
    try:
        server = FileIO("/dev/fuse", "r+")
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    options = f"fd={server.fileno()},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    try:
        if _LIBC.mount(b"test", os.fsencode(point), b"fuse", 0, options):
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
    except BaseException:
        server.close()
        raise
    try:
        yield server
    finally:
        server.close()  # every call to it now fails
        _LIBC.umount2(os.fsencode(point), MNT_DETACH)


def device_of(point: Path) -> str:
    """Return the number of the device mounted at a path, without a call to its file system."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return next(fields[2] for line in lines if (fields := line.split())[4] == str(point))


@pytest.mark.parametrize("mode", ["rw", "ro"])
@pytest.mark.parametrize(
    ("where", "check"), [(PODS, "volume_stuck"), ("/scratch", "disk_stuck")], ids=["volume", "disk"]
)
def test_a_hung_file_system_blinds_nothing_else_and_is_reported(
    tmp_path: Path, where: str, check: str, mode: str
) -> None:
    sensor = host_below(tmp_path)
    hung = tmp_path / "root" / where.lstrip("/")
    with unanswered(hung):
        show_mounts(tmp_path, device_of(hung), where, mode)
        for _ in range(2):
            found = sensor.read()
            seen = {(each.check, each.entity): each for each in found}
            assert seen[check, f"disk/{where}"].value > 0.0
            assert ("disk_used", "disk//good") in seen
            assert ("memory_used", "node") in seen
            assert seen["disk_stuck", "disk//good"].value == 0.0
            assert f"disk/{where}" in {each.what for each in sensor.left_out()}
    until_answered(sensor, f"disk/{where}")


def test_a_hang_ends_although_the_kernel_has_remounted_the_file_system_read_only(tmp_path: Path) -> None:
    sensor = host_below(tmp_path)
    hung = tmp_path / "root/scratch"
    with unanswered(hung) as server:
        device = device_of(hung)
        show_mounts(tmp_path, device, "/scratch", "rw")
        list(sensor.read())
        show_mounts(tmp_path, device, "/scratch", "ro")
        values = {(each.check, each.entity): each.value for each in sensor.read()}
        assert values["disk_read_only", "disk//scratch"] == 1.0
        assert values["disk_stuck", "disk//scratch"] > 0.0
        server.close()  # it stays mounted, and answers each call with an error, as a disk that was given up
        give_up_at = time.monotonic() + PATIENCE_S
        while values.get(("disk_stuck", "disk//scratch")) != 0.0:
            assert time.monotonic() < give_up_at, "the finding would never end"
            values |= {(each.check, each.entity): each.value for each in sensor.read()}


def host_below(folder: Path) -> HostSensor:
    """Return a sensor of a host whose files are below `folder`."""
    (folder / "root/good").mkdir(parents=True)
    (folder / "proc/1").mkdir(parents=True)
    for each in ("loadavg", "meminfo", "stat"):
        (folder / "proc" / each).symlink_to(f"/proc/{each}")
    return HostSensor(
        clocks.begin(None, 0.0), PERIODS_S,
        proc=folder / "proc", root=folder / "root", sys=folder / "sys",
    )  # fmt: skip


def show_mounts(folder: Path, device: str, where: str, mode: str) -> None:
    """Show the host a file system of this device and mode, and one that answers."""
    (folder / "proc/1/mountinfo").write_text(
        f"36 35 {device} / {where} rw - ext4 /dev/sdx {mode}\n"
        f"37 35 {number_of(folder / 'root/good')} / /good rw - ext4 /dev/sda1 rw\n"
    )


def number_of(path: Path) -> str:
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def until_answered(sensor: HostSensor, entity: str) -> None:
    """Return when the sensor no longer reports the file system as hung: its server has gone."""
    found: list[Observation] = [Observation(0.0, "", entity, "")]
    while any(each.entity == entity and each.check.endswith("_stuck") and each.value for each in found):
        found = list(sensor.read())
