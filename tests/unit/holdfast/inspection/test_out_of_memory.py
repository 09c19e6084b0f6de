"""Kills that the kernel made because a cgroup was out of memory are recognized."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.inspection.out_of_memory import OutOfMemoryKills
from holdfast.protocol.launcher_messages import OUT_OF_MEMORY, Ending

KILLED = Ending(1, None, 9, False, "", 0, "the end of its log")


@dataclass(frozen=True)
class Groups:
    """A cgroup mount in a folder, as the kernel lays it out."""

    root: Path
    version: int
    where: str  # the cgroup file of the process

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        line = f"0::/{self.where}" if self.version == 2 else f"12:cpu,cpuacct:/\n4:memory:/{self.where}\n0::/"
        self.membership.write_text(f"{line}\n")
        self.kills(0)

    @property
    def folder(self) -> Path:
        return self.root / "mount" / ("" if self.version == 2 else "memory") / self.where

    @property
    def membership(self) -> Path:
        return self.root / "cgroup"

    def kills(self, count: int) -> None:
        if self.version == 2:
            text = f"low 0\noom 9\noom_kill {count}\noom_group_kill 0\n"
            (self.folder / "memory.events").write_text(text)
        else:
            text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
            (self.folder / "memory.oom_control").write_text(text)

    def limit(self, limit: object) -> None:
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        (self.folder / name).write_text(f"{limit}\n")

    def open(self) -> OutOfMemoryKills:
        return OutOfMemoryKills(self.membership, self.root / "mount")


@pytest.fixture(params=[(1, "kubepods/pod7/a"), (1, ""), (2, "kubepods/pod7/a"), (2, "")], ids=str)
def groups(request: pytest.FixtureRequest, tmp_path: Path) -> Groups:
    version, where = request.param
    return Groups(tmp_path, version, where)


def test_a_kill_at_the_limit_is_reported_with_the_limit(groups: Groups) -> None:
    groups.limit(3 << 30)
    group = groups.open()
    groups.kills(1)
    found = group.take_reason(KILLED)
    assert found.message.startswith(f"{OUT_OF_MEMORY}: the kernel killed it at the memory limit of 3.0 GiB")
    assert found.message.endswith("the end of its log")
    assert found.out_of_memory


def test_a_small_limit_is_named_exactly(groups: Groups) -> None:
    groups.limit(150 << 20)
    group = groups.open()
    groups.kills(1)
    assert "at the memory limit of 150 MiB of its cgroup" in group.take_reason(KILLED).message


def test_a_group_without_a_limit_is_reported_without_one(groups: Groups) -> None:
    groups.limit("max" if groups.version == 2 else "9223372036854771712")
    group = groups.open()
    groups.kills(2)
    assert "memory limit of its cgroup" in group.take_reason(KILLED).message


def test_each_kill_explains_one_ending(groups: Groups) -> None:
    groups.kills(5)
    group = groups.open()
    assert group.take_reason(KILLED) == KILLED, "earlier kills do not count"
    groups.kills(6)
    assert group.take_reason(KILLED) != KILLED
    assert group.take_reason(KILLED) == KILLED


@pytest.mark.parametrize(
    "ended",
    [
        Ending(1, 1, None, False, "exception", 1, "a worker of it was killed"),
        Ending(1, None, 9, True, "", 0, ""),
    ],
    ids=["ended by itself", "ended by Holdfast"],
)
def test_any_other_ending_is_unchanged(groups: Groups, ended: Ending) -> None:
    group = groups.open()
    groups.kills(1)
    assert group.take_reason(ended) == ended
    assert group.take_reason(KILLED) == KILLED, "the kernel killed another process"


def test_without_cgroups_no_cause_is_claimed(tmp_path: Path) -> None:
    assert OutOfMemoryKills(tmp_path / "none", tmp_path).take_reason(KILLED) == KILLED
    (tmp_path / "odd").write_text("nonsense\n1:memory\n0::/gone\n")
    assert OutOfMemoryKills(tmp_path / "odd", tmp_path).take_reason(KILLED) == KILLED
