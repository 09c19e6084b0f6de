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
    assert look(stuck, 15.0)["gpu_process_stuck"].value == 1
    assert stuck.left_out() == ()


def test_a_stuck_thread_that_shows_nothing_is_named_and_not_taken_for_one_outside_of_the_driver(
    tmp_path: Path,
) -> None:
    procs = Procs(tmp_path)
    procs.thread(10, state="D")
    stuck = StuckThreads(str(tmp_path))
    assert look(stuck, 0.0)["gpu_process_stuck"].value == 0, "it is not stuck yet"
    assert set(look(stuck, 15.0)) == {"uninterruptible"}
    [left_out] = stuck.left_out()
    assert f"{tmp_path}/10/task/10/stack" in left_out.why
    procs.thread(11, state="D", stack=IN_DRIVER)
    look(stuck, 30.0)
    assert look(stuck, 45.0)["gpu_process_stuck"].value == 1, "one is certain"
    assert stuck.left_out() == ()
