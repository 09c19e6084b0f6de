from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from nodeagent.host import filesystems
from nodeagent.host.filesystems import FileSystems
from nodeagent.host.mounts import MAX_LOCAL
from nodeagent.model import GONE

ALL = FileSystems.checks
READ_ONLY = frozenset({"disk_read_only"})
USES = frozenset({"user_volume"})


def mounted(proc: Path, here: Path, options: str = "rw", point: str = "", extra: str = "") -> None:
    """Write a mountinfo that shows the file system of `here` as an ext4 disk."""
    device = here.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    line = f"36 35 {number} / {point or here} rw - ext4 /dev/sda1 {options}\n{extra}"
    (proc / "self/mountinfo").write_text(line)


PODS = "/var/lib/kubelet/pods"
PVC = f"{PODS}/1/volumes/kubernetes.io~csi/pvc/mount"


def disks(proc: Path, remembered: object = None, boot: str = "boot") -> FileSystems:
    """Return the checks without a sysfs, which would show the device below the test's directory."""
    kept = remembered if isinstance(remembered, dict) else {}
    return FileSystems(str(proc), None, boot, kept, sys=str(proc / "sys"))


def test_a_disk_is_reported_with_its_space_and_state(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path)
    found = {each.check: each for each in disks(tmp_path).read(ALL - USES, 0.0)}
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
    found = [(each.check, each.value) for each in disks(tmp_path).read(ALL - USES, 0.0)]
    assert found == [("disk_stuck", 0.0)]


def test_a_mount_at_a_path_that_leads_elsewhere_is_left_out_even_if_it_is_read_only(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, extra="37 35 8:99 / /gone ro - xfs /dev/x ro\n")
    seen = disks(tmp_path)
    assert "disk//gone" not in {each.entity for each in seen.read(ALL - USES, 0.0)}
    assert "No such file" in {each.what: each.why for each in seen.left_out()}["disk//gone"]


@pytest.mark.parametrize("options", ["rw", "ro"])
def test_a_file_system_that_answers_with_an_error_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    """As XFS does after its shutdown. Without a sample, the finding about an earlier hang would never end."""

    def shut_down(path: str) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    mounted(tmp_path, tmp_path, options)
    monkeypatch.setattr(os, "statvfs", shut_down)
    seen = disks(tmp_path)
    assert {each.check: each.value for each in seen.read(ALL - USES, 0.0)}["disk_stuck"] == 0.0
    assert [each.why for each in seen.left_out()] == [f"Input/output error: {tmp_path}"]


def test_corrupt_remembered_data_is_ignored(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path)
    for garbage in (
        {"writable": 5, "boot_id": "boot"},
        {"boot_id": ["boot"]},
        {"writable": [1, None], "boot_id": "boot"},
    ):
        assert disks(tmp_path, garbage).remembered()["writable"] == []
    others: list[object] = [
        {"known": 5, "own": 5, "boot_id": "boot"},
        {"known": {"a": 1}, "own": {"a": 1}, "boot_id": "boot"},
        {"writable": ["x", 5], "own": ["a"], "boot_id": "boot"},
    ]
    for other in others:
        found = disks(tmp_path, other).remembered()
        assert (found["known"], found["own"]) == ({}, {})


def test_a_mount_that_is_unreachable_or_another_file_system_is_named(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, point="/proc", extra="37 35 8:99 / /gone rw - xfs /dev/x rw\n")
    seen = disks(tmp_path)
    assert {each.check for each in seen.read(ALL - USES, 0.0)} == {"disk_read_only"}
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


def test_a_file_system_that_is_unmounted_is_gone_after_two_reads_and_also_after_a_restart(
    tmp_path: Path,
) -> None:
    extra = "37 35 8:99 / /data rw - xfs /dev/x rw\n"
    mounted(tmp_path, tmp_path, extra=extra)
    before = disks(tmp_path)
    before.read(ALL, 0.0)
    remembered = json.loads(json.dumps(before.remembered()))
    mounted(tmp_path, tmp_path)
    for each in (before, disks(tmp_path, remembered), disks(tmp_path, remembered, boot="next")):
        assert gone(each) == [], "the kernel may skip a line while mounts change"
        assert gone(each) == ["disk//data"]
        assert gone(each) == [], "it is reported once"
    mounted(tmp_path, tmp_path, extra=extra)
    assert gone(before) == []
    mounted(tmp_path, tmp_path)
    assert gone(before) == []
    mounted(tmp_path, tmp_path, extra=extra)
    assert gone(before) == [], "it was there again"
    mounted(tmp_path, tmp_path)
    assert [gone(before), gone(before)] == [[], ["disk//data"]]


def gone(seen: FileSystems) -> list[str]:
    return [each.entity for each in seen.read(ALL, 0.0) if each.check == GONE]


def test_a_mount_that_cannot_be_checked_any_more_is_not_gone(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, extra="37 35 8:99 / /data rw - xfs /dev/x rw\n")
    seen = disks(tmp_path)
    seen.read(ALL, 0.0)
    mounted(
        tmp_path, tmp_path, extra="37 35 8:99 / /data rw - xfs /dev/x rw\n38 35 0:9 / /data rw - nfs4 s rw\n"
    )
    assert [gone(seen), gone(seen)] == [[], []], "it is covered, but still mounted"
    (tmp_path / "self/mountinfo").unlink()
    assert [gone(seen), gone(seen)] == [[], []]


def test_a_mount_behind_the_end_of_what_was_read_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted(tmp_path, tmp_path, extra="37 35 8:99 / /data rw - xfs /dev/x rw\n")
    seen = disks(tmp_path)
    seen.read(ALL, 0.0)
    monkeypatch.setattr(filesystems, "MOUNTINFO_BYTES", (tmp_path / "self/mountinfo").stat().st_size - 5)
    assert [gone(seen), gone(seen)] == [[], []]


def test_a_file_system_that_is_checked_at_another_path_or_replaced_by_another_is_gone(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, extra="37 35 8:99 / /data/long rw - xfs /dev/x rw\n")
    seen = disks(tmp_path)
    seen.read(ALL, 0.0)
    both = "37 35 8:99 / /data/long rw - xfs /dev/x rw\n38 35 8:99 / /d rw - xfs /dev/x rw\n"
    mounted(tmp_path, tmp_path, extra=both)
    assert [gone(seen), gone(seen)] == [[], ["disk//data/long"]]
    mounted(tmp_path, tmp_path, extra="37 35 8:17 / /d rw - xfs /dev/y ro\n")
    assert [gone(seen), gone(seen)] == [[], ["disk//d"]]


def test_a_pods_volume_has_its_own_checks_and_its_device_is_marked(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path, point=PVC)
    seen = disks(tmp_path)
    states = {(each.check, each.entity): each.value for each in seen.read(ALL, 0.0)}
    volume = f"disk/{PVC}"  # the test has no such folder
    assert states == {("volume_read_only", volume): 0.0, ("user_volume", "disk/sda1"): 1.0}
    mounted(tmp_path, tmp_path, "ro", point=PVC)
    states = {(each.check, each.entity): each.value for each in seen.read(ALL, 0.0)}
    assert states == {("volume_read_only", f"disk/{PVC}"): 1.0, ("user_volume", "disk/sda1"): 1.0}
    restarted = disks(tmp_path, json.loads(json.dumps(seen.remembered())))
    mounted(tmp_path, tmp_path)
    for each in (seen, restarted):
        uses = [found for found in each.read(ALL, 0.0) if found.check == "user_volume"]
        assert ("disk/sda1", 0.0) in [(found.entity, found.value) for found in uses], "the node's again"


def test_every_volume_is_known_even_if_there_are_more_file_systems_than_are_checked(tmp_path: Path) -> None:
    count = 2 * MAX_LOCAL
    extra = "".join(
        f"{n} 35 8:{n} / {PODS}/{n}/volumes/kubernetes.io~csi/pvc/mount rw - ext4 /dev/sd{n} rw\n"
        for n in range(count)
    )
    mounted(tmp_path, tmp_path, extra=extra)
    seen = FileSystems(str(tmp_path), None, "boot", {}, str(tmp_path / "sys"))
    uses = {each.entity: each.value for each in seen.read(ALL, 0.0) if each.check == "user_volume"}
    assert uses == {"disk/sda": 0.0, "disk/sda1": 0.0, **{f"disk/sd{n}": 1.0 for n in range(count)}}


def test_the_space_of_a_loop_device_is_a_volumes(tmp_path: Path) -> None:
    mounted(tmp_path, tmp_path)
    path = tmp_path / "self/mountinfo"
    path.write_text(path.read_text().replace("/dev/sda1", "/dev/loop3"))
    checks = {each.check for each in disks(tmp_path).read(ALL, 0.0)}
    assert "volume_used" in checks
    assert not checks & {"disk_used", "inodes_used", "disk_read_only"}


def test_findings_from_before_volumes_had_their_own_checks_are_ended(tmp_path: Path) -> None:
    """An agent of an earlier version remembered only writable mounts, and treated a volume as a disk."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    keys = [f"{number} /dev/sda1 disk/{PVC}", "8:99 /dev/x disk//data", f"{number} /dev/sda1 disk/{tmp_path}"]
    mounted(tmp_path, tmp_path, point=PVC)
    seen = disks(tmp_path, {"boot_id": "boot", "writable": keys})
    assert gone(seen) == [f"disk/{PVC}"]
    assert set(gone(seen)) == {f"disk/{tmp_path}", "disk//data"}
    assert gone(seen) == []
