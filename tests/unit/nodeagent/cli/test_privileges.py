from __future__ import annotations

from nodeagent.cli import privileges
from nodeagent.host import sensor as host
from nodeagent.sysfs import sensor as sysfs

KINDS = {"file", "group", "capability", "device", "namespace"}


def test_every_need_is_completely_described() -> None:
    for need in privileges.NEEDS:
        assert need.kind in KINDS
        assert all((need.what, need.how, need.lost))


def test_each_loss_of_the_host_or_sysfs_sensor_names_a_check_of_that_sensor() -> None:
    for sensor, checks in (("host", host.CHECKS), ("sysfs", sysfs.CHECKS)):
        needs = [need for need in privileges.NEEDS if need.sensor == sensor]
        assert needs
        assert {each for need in needs for each in need.checks} <= checks
