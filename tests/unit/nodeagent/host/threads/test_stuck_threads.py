from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.host import stuck_threads
from nodeagent.host.stuck_threads import (
    EARLY,
    MAX_STACKS,
    MAX_SUSPECTS,
    UNVISITED,
    StuckThreads,
    ThreadKey,
    ThreadStat,
    ThreadWalk,
)
from nodeagent.model import NODE, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.sweep import Reading
from tests.unit.nodeagent.host.procs import INIT, Procs

IN_NFS = "[<0>] rpc_wait_bit_killable+0x1/0x2 [sunrpc]\n"
IN_DRIVER = "[<0>] uvm_ioctl+0x1f/0x30 [nvidia_uvm]\n"


def look(stuck: StuckThreads, now_s: float) -> dict[str, Reading]:
    return {each.check: each for each in stuck.read(StuckThreads.checks, now_s)}


def counts(stuck: StuckThreads, now_s: float) -> dict[str, float]:
    return {check: each.value for check, each in look(stuck, now_s).items()}


def omitted(stuck: StuckThreads) -> dict[str, str]:
    return {each.what: each.why for each in stuck.left_out()}


def test_a_process_stuck_in_the_driver_is_counted_and_named(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, threads=2, name="train")
    procs.thread(10, 11, state="D", stack=IN_DRIVER, wchan="uvm_lock", name="train")
    stuck = StuckThreads(str(tmp_path))
    values = [counts(stuck, 15.0 * n) for n in range(5)]
    assert [each.get("gpu_process_stuck") for each in values] == [None, 1, 1, 1, 1]
    assert [each.get("uninterruptible") for each in values] == [None, None, None, None, 1]
    assert look(stuck, 75.0)["gpu_process_stuck"].text == "train (11) for 75 s in uvm_lock"
    assert stuck.left_out() == ()


def test_a_process_that_was_stuck_and_continues_is_no_longer_counted(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    assert look(stuck, 60.0)["uninterruptible"].value == 1
    procs.thread(10, state="D", stack=IN_DRIVER, switches=6)
    assert {each.value for each in look(stuck, 120.0).values()} == {0}
    procs.thread(10, state="S", stack="")
    assert {each.value for each in look(stuck, 180.0).values()} == {0}


def test_a_suspect_is_read_in_every_call_even_if_the_walk_has_moved_on(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(11, 20):
        procs.thread(pid)
    procs.thread(10, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path), ThreadWalk(str(tmp_path), processes=3))
    values = [counts(stuck, 30.0 * n).get("uninterruptible") for n in range(4)]
    assert values == [None, None, 1, 1]


def test_a_process_that_waits_for_storage_is_not_stuck_in_the_driver(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D", stack="[<0>] nfs_wait+0x1/0x2 [nfs]\n")
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    found = look(stuck, 90.0)
    assert (found["uninterruptible"].value, found["gpu_process_stuck"].value) == (1, 0)


def test_without_the_privilege_the_check_reports_that_and_claims_nothing(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(INIT, wchan="0")
    procs.thread(10, state="D")
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    found = look(stuck, 90.0)
    assert set(found) == {"uninterruptible"}
    assert found["uninterruptible"].value == 1
    [left_out] = stuck.left_out()
    assert left_out.what == "gpu_process_stuck"


def test_what_the_kernel_does_not_show_is_named_without_a_guess_at_the_reason(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(INIT, wchan="0")
    path = tmp_path / "1/task/1"

    def why() -> str:
        stuck = StuckThreads(str(tmp_path))
        look(stuck, 0.0)
        [left_out] = stuck.left_out()
        assert "CAP_" not in left_out.why, "the process may have the capability"
        return left_out.why

    assert why().endswith(f": {path}/stack: No such file or directory; {path}/wchan contains only 0")
    (path / "wchan").unlink()
    (path / "stack").mkdir()
    assert why().endswith(f": {path}/stack: Is a directory; {path}/wchan: No such file or directory")
    (path / "stack").rmdir()
    (path / "stack").write_bytes(b"")
    assert why().endswith(f": {path}/stack is empty; {path}/wchan: No such file or directory")


def test_a_host_that_protects_only_its_first_process_is_checked(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(INIT, wchan="0")
    procs.thread(2, name="kthreadd", wchan="kthreadd")
    procs.thread(10, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    assert look(stuck, 60.0)["gpu_process_stuck"].value == 1
    assert stuck.left_out() == ()


def test_a_stuck_thread_that_shows_nothing_is_named_and_not_taken_for_one_outside_of_the_driver(
    tmp_path: Path,
) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D")
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    assert set(look(stuck, 60.0)) == {"uninterruptible"}
    assert f"{tmp_path}/10/task/10/stack" in omitted(stuck)["gpu_process_stuck"]
    procs.thread(11, state="D", stack=IN_DRIVER)
    look(stuck, 75.0)
    assert look(stuck, 90.0)["gpu_process_stuck"].value == 1, "one is certain"
    assert stuck.left_out() == ()


def test_a_stuck_thread_that_shows_where_it_waits_later_is_examined_again(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 10 + MAX_STACKS + 1):
        procs.thread(pid, state="D")
    stuck = StuckThreads(str(tmp_path))
    assert [counts(stuck, 60.0 * n).get("gpu_process_stuck") for n in range(4)] == [None] * 4
    for pid in range(10, 10 + MAX_STACKS + 1):
        procs.thread(pid, state="D", stack=IN_DRIVER)
    values = [counts(stuck, 240.0 + 60.0 * n)["gpu_process_stuck"] for n in range(2)]
    assert values == [MAX_STACKS, MAX_STACKS + 1]


def test_a_thread_stuck_in_the_driver_is_found_among_many_that_wait_for_storage(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 10 + 3 * MAX_STACKS):
        procs.thread(pid, state="D", stack=IN_NFS)
    procs.thread(9999, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    values = []
    for n in range(6):
        values.append(counts(stuck, 15.0 * n).get("gpu_process_stuck"))
        assert ("gpu_process_stuck" in omitted(stuck)) == (values[-1] is None)
    assert values == [None, None, None, None, 1, 1], "nothing is reported before all have been examined"
    procs.thread(9999)
    assert counts(stuck, 90.0)["gpu_process_stuck"] == 0
    assert stuck.left_out() == ()


def test_where_a_stuck_thread_waits_is_read_once_until_it_runs_again(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    look(stuck, 0.0)
    assert counts(stuck, 15.0)["gpu_process_stuck"] == 1
    procs.thread(10, state="D", stack=IN_NFS)
    assert counts(stuck, 30.0)["gpu_process_stuck"] == 1, "it has not run: the file is not read again"
    procs.thread(10, state="D", stack=IN_NFS, switches=6)
    assert [counts(stuck, at_s)["gpu_process_stuck"] for at_s in (45.0, 60.0)] == [0, 0]


def test_nothing_counts_as_clean_before_all_threads_have_been_visited(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 18):
        procs.thread(pid)
    stuck = StuckThreads(str(tmp_path), ThreadWalk(str(tmp_path), processes=3))
    for n in range(2):
        assert look(stuck, 15.0 * n) == {}
        assert set(omitted(stuck).values()) == {UNVISITED}
    assert counts(stuck, 30.0) == {"uninterruptible": 0, "gpu_process_stuck": 0}
    assert stuck.left_out() == ()
    procs.thread(10, state="D", stack=IN_NFS)
    values = [counts(stuck, 45.0 + 15.0 * n)["uninterruptible"] for n in range(5)]
    assert values == [0, 0, 0, 0, 1], "later, a thread may only just have fallen asleep"


def test_a_thread_asleep_at_the_first_look_may_be_stuck_already(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D", stack=IN_NFS)
    stuck = StuckThreads(str(tmp_path))
    assert look(stuck, 0.0) == {}
    assert omitted(stuck) == {
        "uninterruptible": EARLY.format(60, 1),
        "gpu_process_stuck": EARLY.format(10, 1),
    }
    assert counts(stuck, 15.0) == {"gpu_process_stuck": 0}
    procs.thread(10, state="D", stack=IN_NFS, switches=6)
    assert counts(stuck, 30.0) == {"uninterruptible": 0, "gpu_process_stuck": 0}, "it was only busy"


def test_a_restarted_agent_does_not_end_the_finding_of_a_process_that_is_still_stuck(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 10 + 2 * MAX_STACKS):
        procs.thread(pid, state="D", stack=IN_NFS)
    procs.thread(9999, state="D", stack=IN_DRIVER)
    evaluator = Evaluator(shipped())
    for start_s in (1e9, 1e9 + 300):
        stuck = StuckThreads(str(tmp_path))
        for now_s in (start_s + 15 * n for n in range(20)):
            for each in look(stuck, now_s).values():
                evaluator.add(Observation(now_s, each.check, NODE, "host", each.value))
            found = {each.check for each in evaluator.findings(now_s)}
            assert found == {"uninterruptible", "gpu_process_stuck"} or now_s < 1e9 + 180


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stuck_threads, "MAX_SUSPECTS", 4)
    monkeypatch.setattr(stuck_threads, "MAX_STACKS", 2)


@pytest.mark.usefixtures("few")
def test_if_more_threads_hang_than_are_watched_they_are_watched_in_turn(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    for pid in range(10, 20):
        procs.thread(pid, state="D", stack=IN_NFS)
    procs.thread(9999, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    values = []
    for n in range(40):
        values.append(counts(stuck, 15.0 * n).get("gpu_process_stuck"))
        assert (values[-1] is None) == ("gpu_process_stuck" in omitted(stuck))
    assert values[0] is None
    assert values[20:] == [1] * 20, "it is found, and stays among those watched"
    procs.thread(9999)
    assert "gpu_process_stuck" not in look(stuck, 600.0)
    for pid in range(10, 20):
        procs.thread(pid)
    assert counts(stuck, 615.0) == {"uninterruptible": 0, "gpu_process_stuck": 0}


@pytest.mark.usefixtures("few")
def test_threads_that_are_frozen_or_busy_with_a_disk_do_not_displace_a_stuck_one(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(9999, state="D", stack=IN_DRIVER)
    stuck = StuckThreads(str(tmp_path))
    values = []
    for n in range(20):
        for pid in range(10, 20):
            procs.thread(pid, state="D", wchan="__refrigerator")
        for pid in range(20, 30):
            procs.thread(pid, state="D", stack="[<0>] io_schedule+0x1/0x2\n", switches=n)
        values.append(counts(stuck, 15.0 * n).get("gpu_process_stuck"))
    assert values[-10:] == [1] * 10


def test_the_number_of_threads_that_are_watched_is_bounded(tmp_path: Path) -> None:
    class Crowd(ThreadWalk):
        def asleep(self) -> list[tuple[ThreadKey, ThreadStat]]:
            return [((pid, pid), ThreadStat("x", "D", 0, 100)) for pid in range(10, 10 + 2 * MAX_SUSPECTS)]

    stuck = StuckThreads(str(tmp_path), Crowd(str(tmp_path)))
    procs = Procs(tmp_path)
    for pid in range(10, 10 + 2 * MAX_SUSPECTS):
        procs.thread(pid, state="D", stack=IN_NFS)
    look(stuck, 0.0)
    assert counts(stuck, 60.0) == {"uninterruptible": MAX_SUSPECTS}
    assert set(omitted(stuck)) == {"gpu_process_stuck"}
