from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from nodeagent.host import stuck_threads
from nodeagent.host.stuck_threads import ThreadKey, ThreadWalk
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


def test_every_thread_is_visited_on_a_node_with_more_processes_than_one_call_visits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, users = range(1, 2501), range(10_000, 1_510_000, 5_000)
    tasks = {f"/P/{pid}/task": list(range(pid, pid + 64)) for pid in users}
    tasks["/P"] = [*kernel, *users]
    monkeypatch.setattr(stuck_threads, "list_names", lambda folder: [str(each) for each in tasks[folder]])
    visited: dict[ThreadKey, list[int]] = {}

    class Recorded(ThreadWalk):
        def raw_stat(self, key: ThreadKey) -> bytes:
            visited.setdefault(key, []).append(self.calls)
            return f"{key[1]} (x) S {'0 ' * 16}{1 if key[0] in kernel else 64} 0 1".encode()

    walk = Recorded("/P")
    for _ in range(100):
        walk.asleep()
    assert len(visited) == 2500 + 300 * 64
    gaps = [later - before for calls in visited.values() for before, later in pairwise([0, *calls, 100])]
    assert max(gaps) <= 22, "22 calls visit as many threads as there are"
    per_call = Counter(call for calls in visited.values() for call in calls)
    assert max(per_call.values()) <= 3000


def test_threads_that_start_later_do_not_delay_the_others(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in (10, 20):
        procs.thread(pid, threads=4)
        for tid in range(pid + 1, pid + 4):
            procs.thread(pid, tid, state="D")
    walk = ThreadWalk(str(tmp_path), processes=2, threads=2)
    seen: set[tuple[int, int]] = set()
    for n in range(12):
        seen.update(asleep(walk))
        for pid in range(100 + 2 * n, 102 + 2 * n):  # as many as one call visits
            procs.thread(pid, threads=3)
            procs.thread(pid, pid + 1000)
            procs.thread(pid, pid + 2000)
    assert seen >= {(10, 11), (10, 12), (10, 13), (20, 21), (20, 22), (20, 23)}


def test_the_walk_says_since_which_call_it_has_visited_every_thread(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in (10, 20, 30):
        procs.thread(pid, threads=3)
        procs.thread(pid, pid + 1)
        procs.thread(pid, pid + 2)
    small = ThreadWalk(str(tmp_path))
    since = [small.asleep() or small.covered_from for _ in range(3)]
    assert since == [1, 2, 3]
    large = ThreadWalk(str(tmp_path), processes=2, threads=4)
    since = [large.asleep() or large.covered_from for _ in range(7)]
    # processes in calls 1 and 2, 3 and 4, ...; their further threads in calls 2 and 3, 4 and 5, ...
    assert since == [0, 0, 1, 1, 3, 3, 5]


def test_a_list_that_cannot_be_read_whole_covers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    procs = Procs(tmp_path)
    walk = ThreadWalk(str(tmp_path / "nowhere"))
    assert (walk.asleep(), walk.covered_from) == ([], 0)
    for pid in range(10, 20):
        procs.thread(pid)
    walk = ThreadWalk(str(tmp_path))
    monkeypatch.setattr(stuck_threads, "MAX_NAMES", len(list(tmp_path.iterdir())))
    assert (walk.asleep(), walk.covered_from) == ([], 0), "there may be more names"
    monkeypatch.undo()
    assert (walk.asleep(), walk.covered_from) == ([], 2)


def test_processes_that_end_during_the_walk_are_skipped(tmp_path: Path) -> None:
    Procs(tmp_path)
    (tmp_path / "30/task").mkdir(parents=True)
    (tmp_path / "31").mkdir()
    (tmp_path / "31/stat").write_bytes(b"\xff\0 garbage")
    assert asleep(ThreadWalk(str(tmp_path))) == []
    assert asleep(ThreadWalk(str(tmp_path / "nowhere"))) == []
