from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from sidecar.state import memory_limits
from sidecar.state.memory_limits import CgroupLimit
from sidecar.state.peers import PeerClient
from sidecar.state.restore import Restorer
from tests.unit.sidecar.memory import holdings, member, private, snapshot

SIZE = 5 << 20


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


def test_memory_of_snapshots_and_private_states_is_counted_separately(here: Path) -> None:
    snapshot(here, 1, 1, size=SIZE)
    private(here, 0, 1, 1)
    found = memory_limits.measure(here, SIZE)
    assert SIZE <= found.slots_bytes < SIZE + 100_000
    assert 0 < found.private_bytes < SIZE
    assert found.state_bytes == SIZE
    assert min(found.free_bytes, found.available_bytes) > 0
    assert found.volume


def test_a_missing_directory_refuses_nothing(tmp_path: Path) -> None:
    found = memory_limits.measure(tmp_path / "away", 1)
    assert (found.volume, found.slots_bytes, found.private_bytes) == ("", 0, 0)
    assert found.free_bytes > 1 << 60


@pytest.mark.parametrize(("left", "limit"), [(1 << 20, 1 << 30), (1 << 61, 0), (None, 0)])
def test_the_free_memory_of_a_container_is_limited_by_its_cgroup(
    here: Path, monkeypatch: pytest.MonkeyPatch, left: int | None, limit: int
) -> None:
    allowed = None if left is None else CgroupLimit(left, 1 << 30)
    monkeypatch.setattr("sidecar.state.memory_limits.CgroupLimits.tightest", lambda _: allowed)
    meminfo = here / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {1 << 30} kB\nSwapFree:  0 kB\n")
    monkeypatch.setattr("sidecar.state.memory_limits._MEMINFO", str(meminfo))
    found = memory_limits.measure(here, SIZE)
    assert found.limit_bytes == limit
    assert (found.available_bytes == left) == bool(limit)


async def test_a_standby_reserves_memory_for_a_snapshot_that_it_may_fetch(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.snapshot.arena.BACKED_BYTES", 1 << 20)
    preparer = Restorer(holdings(here), PeerClient(holdings(here), lambda: "token"), DirectoryStorage(here))
    await preparer.preallocate(SIZE, lambda: True)
    assert memory_limits.measure(here, 0).slots_bytes >= SIZE
    assert holdings(here).slots() == ()
    snapshot(here, 1, 1, size=SIZE - 4096)  # any other size takes the slot as well
    assert len(holdings(here).slots()) == 1


async def test_memory_is_reserved_only_as_long_as_it_is_wanted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.snapshot.arena.BACKED_BYTES", 1 << 20)
    answers = iter([True, True, False])
    preparer = Restorer(holdings(here), PeerClient(holdings(here), lambda: "token"), DirectoryStorage(here))
    await preparer.preallocate(SIZE, lambda: next(answers))
    assert memory_limits.measure(here, 0).slots_bytes < SIZE


async def test_a_slot_with_a_snapshot_is_not_touched(here: Path) -> None:
    records = [snapshot(here, 1, step, size=1000) for step in (1, 2)]
    preparer = Restorer(holdings(here), PeerClient(holdings(here), lambda: "token"), DirectoryStorage(here))
    await preparer.preallocate(SIZE, lambda: True)
    assert {slot.step for slot in holdings(here).slots()} == {record.step for record in records}


def test_a_gauge_measures_again_only_after_a_while_or_for_a_new_state(tmp_path: Path) -> None:
    """A measurement takes too long for the dozen reports of a recovery."""
    now_s = 5.0
    gauge = memory_limits.MemoryGauge(tmp_path, lambda: now_s)
    first = gauge.read(SIZE)
    now_s += memory_limits.INTERVAL_S * 0.9
    assert gauge.read(SIZE) is first
    assert gauge.read(SIZE + 1).state_bytes == SIZE + 1
    now_s += memory_limits.INTERVAL_S * 0.9
    again = gauge.read(SIZE + 1)
    now_s += memory_limits.INTERVAL_S
    assert gauge.read(SIZE + 1, calm=True) is again, "the ranks train, and nothing depends on it"
    assert gauge.read(SIZE + 1) is not again
    again = gauge.read(SIZE + 1, calm=True)
    now_s += memory_limits.CALM_S
    assert gauge.read(SIZE + 1, calm=True) is not again


def test_a_gauge_notices_a_limit_that_its_cgroup_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 5.0
    (tmp_path / "membership").write_text("0::/\n")
    monkeypatch.setattr(
        "sidecar.state.memory_limits.CgroupLimits.__init__.__defaults__",
        (tmp_path / "membership", tmp_path),
    )
    for name, content in (("max", "max"), ("current", "5"), ("stat", "")):
        (tmp_path / f"memory.{name}").write_text(content)
    gauge = memory_limits.MemoryGauge(tmp_path, lambda: now_s)
    assert gauge.read(SIZE).limit_bytes == 0
    (tmp_path / "memory.max").write_text("1000")
    now_s += memory_limits.SEARCH_S
    assert gauge.read(SIZE).limit_bytes == 1000
    (tmp_path / "memory.max").write_text("900")
    now_s += memory_limits.INTERVAL_S
    assert gauge.read(SIZE).limit_bytes == 900, "a known limit is read each time"
