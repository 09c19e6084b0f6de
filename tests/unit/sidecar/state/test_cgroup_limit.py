from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.state.memory_limits import CgroupLimit, CgroupLimits

GB = 1_000_000_000
NO_LIMIT = (1 << 63) - 4096  # as version 1 writes it


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    return tmp_path / "mount"


def belongs(mount: Path, *lines: str) -> Path:
    path = mount.parent / "membership"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def first(folder: Path, limit: object, used: int, stat: str = "") -> None:
    """Create the files of a cgroup of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def second(folder: Path, limit: object, used: int, stat: str = "") -> None:
    """Create the files of a cgroup of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_cached_file_pages_count_as_free_and_tmpfs_does_not(mount: Path) -> None:
    stat = f"anon 5\nfile {3 * GB}\nshmem {GB}\ninactive_file {GB}\nactive_file 7\nslab_reclaimable 3\n"
    second(mount / "pod" / "one", 8 * GB, 5 * GB, stat)
    assert CgroupLimits(belongs(mount, "0::/pod/one"), mount).tightest() == CgroupLimit(4 * GB + 10, 8 * GB)
    told = f"inactive_file 1\ntotal_inactive_file {GB}\ntotal_active_file 7\ntotal_shmem {GB}\n"
    first(mount / "memory" / "docker" / "x", 4 * GB, 3 * GB, told)
    member = belongs(mount, "5:cpu,cpuacct:/", "4:memory:/docker/x", "0::/")
    assert CgroupLimits(member, mount).tightest() == CgroupLimit(2 * GB + 7, 4 * GB)


def test_the_tightest_of_all_ancestor_groups_counts(mount: Path) -> None:
    second(mount / "pods" / "a" / "own", "max", 1)
    second(mount / "pods" / "a", 6 * GB, 5 * GB)
    second(mount / "pods", 99 * GB, 7 * GB)
    assert CgroupLimits(belongs(mount, "0::/pods/a/own"), mount).tightest() == CgroupLimit(GB, 6 * GB)


def test_a_container_sees_its_own_group_at_the_root(mount: Path) -> None:
    second(mount, 2 * GB, GB)
    assert CgroupLimits(belongs(mount, "0::/"), mount).tightest() == CgroupLimit(GB, 2 * GB)
    first(mount / "memory", GB, GB // 2)
    member = belongs(mount, "4:memory:/docker/4f5", "0::/")
    assert CgroupLimits(member, mount).tightest() == CgroupLimit(GB // 2, GB)


def test_a_hybrid_mount_has_version_2_in_a_subfolder(mount: Path) -> None:
    second(mount / "unified" / "one", 2 * GB, GB)
    assert CgroupLimits(belongs(mount, "0::/one"), mount).tightest() == CgroupLimit(GB, 2 * GB)


def test_a_group_beyond_its_limit_has_no_free_memory(mount: Path) -> None:
    second(mount, GB, 2 * GB)
    assert CgroupLimits(belongs(mount, "0::/"), mount).tightest() == CgroupLimit(0, GB)


def test_without_a_readable_limit_there_is_none(mount: Path) -> None:
    assert CgroupLimits(mount / "none", mount).tightest() is None
    first(mount / "memory", NO_LIMIT, 5)
    second(mount, "max", 5)
    member = belongs(mount, "4:memory:/", "0::/", "damaged", "0::/../other", "")
    assert CgroupLimits(member, mount).tightest() is None
    (mount / "memory" / "memory.limit_in_bytes").write_bytes(b"\xff\xfe")
    assert CgroupLimits(member, mount).tightest() is None
