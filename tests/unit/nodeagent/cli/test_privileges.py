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
        assert privileges.of(sensor)
        assert {each for need in privileges.of(sensor) for each in need.checks} <= checks


def test_the_needs_of_a_check_are_found_by_its_name() -> None:
    assert {need.kind for need in privileges.losing("gpu_process_stuck")} == {"namespace", "capability"}
    assert privileges.losing("memory_used") == ()
