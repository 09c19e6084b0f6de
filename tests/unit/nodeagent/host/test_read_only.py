from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host import filesystems
from nodeagent.host.mounts import Mount

DISK = Mount("8:1", "/", "/data", "ext4", "/dev/sda1", read_only=True)
NOBODY: frozenset[str] = frozenset()


def test_a_file_system_that_was_writable_and_is_read_only_is_reported() -> None:
    assert filesystems.read_only_state(DISK, (filesystems.mount_key(DISK),), NOBODY) == filesystems.READ_ONLY
    assert filesystems.read_only_state(replace(DISK, read_only=False), (), NOBODY) == filesystems.WRITABLE


def test_a_file_system_that_fstab_mounts_writable_is_reported_even_if_never_seen_writable() -> None:
    assert filesystems.read_only_state(DISK, (), frozenset({"/data"})) == filesystems.READ_ONLY


def test_a_file_system_that_was_read_only_from_the_start_has_no_state() -> None:
    assert filesystems.read_only_state(DISK, (), NOBODY) is None


def test_another_disk_at_the_same_path_is_not_the_one_that_was_writable() -> None:
    other = replace(DISK, device="8:17", source="/dev/sdb1")
    assert filesystems.read_only_state(other, (filesystems.mount_key(DISK),), NOBODY) is None


def test_only_writable_entries_mounted_at_boot_are_expected_to_be_writable() -> None:
    fstab = b"""
        # /dev/sdz1 /no ext4 defaults 0 0
        UUID=1 / ext4 errors=remount-ro 0 1
        UUID=2 /with\\040blank ext4 defaults 0 2
        UUID=3 /image ext4 ro,nodev 0 2
        UUID=4 /stick vfat noauto,rw 0 0
        broken
    """
    assert filesystems.fstab_writable(fstab) == {"/", "/with blank"}


@given(st.binary(max_size=200))
def test_no_fstab_raises_an_exception(raw: bytes) -> None:
    assert all(isinstance(each, str) for each in filesystems.fstab_writable(raw))
