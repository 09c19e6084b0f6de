from __future__ import annotations

from pathlib import Path

from nodeagent.host.stuck_threads import ThreadWalk
from tests.unit.nodeagent.host.procs import Procs


def asleep(walk: ThreadWalk) -> list[tuple[int, int]]:
    return [key for key, _ in walk.asleep()]


def test_processes_and_threads_in_uninterruptible_sleep_are_found(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D")
    procs.thread(20, threads=3)
    procs.thread(20, 21, state="D")
    procs.thread(20, 22, state="R")
    (tmp_path / "²").mkdir()
    assert asleep(ThreadWalk(str(tmp_path))) == [(10, 10), (20, 21)]


def test_threads_beyond_the_limit_of_one_call_are_visited_in_the_next_ones(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 20):
        procs.thread(pid, state="D")
    walk = ThreadWalk(str(tmp_path), processes=3)
    seen: list[tuple[int, int]] = []
    for _ in range(4):
        found = asleep(walk)
        assert len(found) <= 3
        seen += found
    assert set(seen) == {(pid, pid) for pid in range(10, 20)}


def test_many_threads_are_visited_in_turn_including_those_of_one_process(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    stuck = {(pid, pid * 100 + n) for pid in (10, 20) for n in range(7)}
    for pid in (10, 20):
        procs.thread(pid, threads=8)
    for pid, tid in stuck:
        procs.thread(pid, tid, state="D")
    walk = ThreadWalk(str(tmp_path), threads=3)
    looks = [asleep(walk) for _ in range(5)]
    assert all(len(each) <= 3 for each in looks)
    assert {key for each in looks for key in each} == stuck


def test_processes_that_end_during_the_walk_are_skipped(tmp_path: Path) -> None:
    Procs(tmp_path)
    (tmp_path / "30/task").mkdir(parents=True)
    (tmp_path / "31").mkdir()
    (tmp_path / "31/stat").write_bytes(b"\xff\0 garbage")
    assert asleep(ThreadWalk(str(tmp_path))) == []
    assert asleep(ThreadWalk(str(tmp_path / "nowhere"))) == []
