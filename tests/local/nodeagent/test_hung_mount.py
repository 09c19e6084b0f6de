"""A file system that never answers: a FUSE mount whose server reads no request."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nodeagent.host.sensor import HostSensor
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing import clock as clocks

MNT_DETACH = 2
_LIBC = ctypes.CDLL(None, use_errno=True)
PODS = "/var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pvc/mount"
PERIODS_S = {name: 1e-3 for name, rule in shipped().rules.items() if rule.period_s}  # all are always due


@contextmanager
def unanswered(point: Path) -> Iterator[None]:
    """Mount a file system that answers no call until the end."""
    point.mkdir(parents=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    try:
        if _LIBC.mount(b"test", os.fsencode(point), b"fuse", 0, options):
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
    except BaseException:
        os.close(server)
        raise
    try:
        yield
    finally:
        os.close(server)  # every call to it now fails
        _LIBC.umount2(os.fsencode(point), MNT_DETACH)


def device_of(point: Path) -> str:
    """Return the number of the device mounted at a path, without a call to its file system."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return next(fields[2] for line in lines if (fields := line.split())[4] == str(point))


@pytest.mark.parametrize(
    ("where", "check"), [(PODS, "volume_stuck"), ("/scratch", "disk_stuck")], ids=["volume", "disk"]
)
def test_a_hung_file_system_blinds_nothing_else_and_is_reported(
    tmp_path: Path, where: str, check: str
) -> None:
    root, proc = tmp_path / "root", tmp_path / "proc"
    (root / "good").mkdir(parents=True)
    (proc / "1").mkdir(parents=True)
    for each in ("loadavg", "meminfo", "stat"):
        (proc / each).symlink_to(f"/proc/{each}")
    hung = root / where.lstrip("/")
    with unanswered(hung):
        device = (root / "good").stat().st_dev
        (proc / "1/mountinfo").write_text(
            f"36 35 {device_of(hung)} / {where} rw - ext4 /dev/sdx rw\n"
            f"37 35 {os.major(device)}:{os.minor(device)} / /good rw - ext4 /dev/sda1 rw\n"
        )
        sensor = HostSensor(clocks.begin(None, 0.0), PERIODS_S, proc=proc, root=root, sys=tmp_path / "sys")
        for _ in range(2):
            found = sensor.read()
            seen = {(each.check, each.entity): each for each in found}
            assert seen[check, f"disk/{where}"].value > 0.0
            assert ("disk_used", "disk//good") in seen
            assert ("memory_used", "node") in seen
            assert seen["disk_stuck", "disk//good"].value == 0.0
            assert f"disk/{where}" in {each.what for each in sensor.left_out()}
    until_answered(sensor, f"disk/{where}")


def until_answered(sensor: HostSensor, entity: str) -> None:
    """Return when the sensor no longer reports the file system as hung: its server has gone."""
    found: list[Observation] = [Observation(0.0, "", entity, "")]
    while any(each.entity == entity and each.check.endswith("_stuck") and each.value for each in found):
        found = list(sensor.read())
