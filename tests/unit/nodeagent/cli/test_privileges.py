from __future__ import annotations

from nodeagent.cli import privileges
from nodeagent.host import sensor as host
from nodeagent.sysfs import sensor as sysfs

KINDS = {"file", "group", "capability", "device", "namespace"}


def test_every_need_is_complete() -> None:
    for need in privileges.NEEDS:
        assert need.kind in KINDS
        assert all((need.what, need.how, need.lost))


def test_what_a_sensor_of_files_may_lose_is_a_check_of_its_own() -> None:
    for sensor, checks in (("host", host.CHECKS), ("sysfs", sysfs.CHECKS)):
        needs = [need for need in privileges.NEEDS if need.sensor == sensor]
        assert needs
        assert {each for need in needs for each in need.checks} <= checks
