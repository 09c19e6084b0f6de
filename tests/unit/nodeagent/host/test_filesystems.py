from __future__ import annotations

import json
import os
from pathlib import Path

from nodeagent.host.filesystems import FileSystems

ALL = FileSystems.checks
READ_ONLY = frozenset({"disk_read_only"})


def mounted(proc: Path, here: Path, options: str = "rw", point: str = "", extra: str = "") -> None:
    """Write a mountinfo that shows the file system of `here` as an ext4 disk."""
    device = here.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    line = f"36 35 {number} / {point or here} rw - ext4 /dev/sda1 {options}\n{extra}"
    (proc / "self/mountinfo").write_text(line)


def disks(proc: Path, remembered: object = None, boot: str = "boot") -> FileSystems:
    return FileSystems(str(proc), None, boot, remembered if isinstance(remembered, dict) else {})


def test_a_disk_is_reported_with_its_space_and_state(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path)
    found = {each.check: each for each in disks(tmp_path).read(ALL, 0.0)}
    assert {each.entity for each in found.values()} == {f"disk/{tmp_path}"}
    assert 0.0 <= found["disk_used"].value <= 100.0
    assert found["disk_read_only"].value == 0.0


def test_a_disk_that_becomes_read_only_is_reported_after_a_restart_but_not_after_a_boot(
    tmp_path: Path,
) -> None:
    mounted(tmp_path, tmp_path)
    before = disks(tmp_path)
    before.read(READ_ONLY, 0.0)
    mounted(tmp_path, tmp_path, "ro")
    remembered = json.loads(json.dumps(before.remembered()))
    for each in (before, disks(tmp_path, remembered)):
        assert [found.value for found in each.read(READ_ONLY, 5.0)] == [1.0]
    assert list(disks(tmp_path, remembered, boot="next").read(READ_ONLY, 5.0)) == []


def test_the_fill_level_of_a_read_only_image_does_not_count(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, "ro")
    assert list(disks(tmp_path).read(ALL, 0.0)) == []


def test_corrupt_remembered_data_is_ignored(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path)
    for garbage in (
        {"writable": 5, "boot_id": "boot"},
        {"boot_id": ["boot"]},
        {"writable": [1, None], "boot_id": "boot"},
    ):
        assert disks(tmp_path, garbage).remembered() == {"boot_id": "boot", "writable": []}


def test_a_mount_that_is_unreachable_or_another_file_system_is_named(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, point="/proc", extra="37 35 8:99 / /gone rw - xfs /dev/x rw\n")
    seen = disks(tmp_path)
    assert {each.check for each in seen.read(ALL, 0.0)} == {"disk_read_only"}
    why = {each.what: each.why for each in seen.left_out()}
    assert "not this file system" in why["disk//proc"]
    assert "No such file" in why["disk//gone"]


def test_without_mountinfo_the_whole_check_is_omitted(tmp_path: Path) -> None:
    seen = disks(tmp_path)
    assert list(seen.read(ALL, 0.0)) == []
    assert [each.what for each in seen.left_out()] == ["disk"]


def test_in_a_container_the_mounts_of_process_1_are_read_below_the_hosts_mount_point(
    tmp_path: Path,
) -> None:
    (tmp_path / "host/data").mkdir(parents=True)
    (tmp_path / "host/etc").mkdir()
    (tmp_path / "host/etc/fstab").write_text("UUID=1 /broken ext4 defaults 0 0\n")
    mounted(tmp_path, tmp_path, point="/data", extra="37 35 8:99 / /broken rw - xfs /dev/x ro\n")
    (tmp_path / "1").symlink_to("self")
    seen = FileSystems(str(tmp_path), str(tmp_path / "host"), "boot", {})
    values = {(each.check, each.entity): each.value for each in seen.read(ALL, 0.0)}
    assert ("disk_used", "disk//data") in values
    assert values["disk_read_only", "disk//broken"] == 1.0
