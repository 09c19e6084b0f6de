from __future__ import annotations

from pathlib import Path

from nodeagent.host.stuck_threads import StuckThreads, ThreadWalk
from nodeagent.sensing.sweep import Reading
from tests.unit.nodeagent.host.procs import INIT, Procs

IN_DRIVER = "[<0>] uvm_ioctl+0x1f/0x30 [nvidia_uvm]\n"


def look(stuck: StuckThreads, now_s: float) -> dict[str, Reading]:
    return {each.check: each for each in stuck.read(StuckThreads.checks, now_s)}


def test_a_process_stuck_in_the_driver_is_counted_and_named(tmp_path: Path) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, threads=2, name="train")
    procs.thread(10, 11, state="D", stack=IN_DRIVER, wchan="uvm_lock", name="train")
    stuck = StuckThreads(str(tmp_path))
    values = [{check: each.value for check, each in look(stuck, 15.0 * n).items()} for n in range(5)]
    assert [each["gpu_process_stuck"] for each in values] == [0, 1, 1, 1, 1]
    assert [each["uninterruptible"] for each in values] == [0, 0, 0, 0, 1]
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
    values = [look(stuck, 30.0 * n)["uninterruptible"].value for n in range(4)]
    assert values == [0, 0, 1, 1]


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
    assert [each.what for each in stuck.left_out()] == ["gpu_process_stuck"]
