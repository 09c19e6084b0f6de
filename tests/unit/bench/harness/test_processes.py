from __future__ import annotations

import os
import time

from bench.harness.processes import Process, below, cpu_s, find_process, parts, read_stat
from holdfast import launch_commands
from holdfast.launcher import cli
from holdfast.process import title


def process(pid: int, parent: int, *argv: str, name: str = "python") -> Process:
    return Process(pid, parent, "S", argv, name, 0, 0)


TREE = {
    each.pid: each
    for each in (
        process(1, 0, "init"),
        process(10, 1, "python", "parts.py", "supervisor", "run"),
        process(11, 10, "python", "parts.py", "supervisor", "serve", "dir"),
        process(12, 10, "python", "parts.py", "sidecar"),
        process(13, 10, "python", "-c", f"from {cli.__name__} import main"),
        process(14, 13, "python", "-c", "boot"),
        process(15, 13, "python", "-c", "boot"),
        process(16, 14, "worker"),
        process(17, 12, "py-spy"),
        process(20, 1, "bash"),
    )
}


def test_descendants_come_after_their_parents() -> None:
    found = [each.pid for each in below(10, TREE)]
    assert set(found) == {11, 12, 13, 14, 15, 16, 17}
    assert found.index(13) < found.index(14) < found.index(16)


def test_each_process_of_a_run_is_classified_by_parent_and_command_line() -> None:
    assert parts(10, TREE, [14]) == {
        10: "keeper",
        11: "supervisor",
        12: "sidecar",
        13: "launcher",
        14: "rank",
        15: "warm",
        16: "other",
        17: "other",
    }


def test_launchers_are_recognized_by_the_command_line_that_a_run_uses() -> None:
    assert f"from {cli.__name__} import main" in launch_commands.START


def test_forked_processes_are_recognized_by_their_titles() -> None:
    forked = [
        process(30, 10, f"holdfast: {title.MEMBERS_FORK_SERVER}"),
        process(31, 10, "holdfast: launcher m0"),
        process(32, 31, "holdfast: warm process 0"),
        process(33, 31, "holdfast: rank 1 train.py"),
        process(34, 33, "holdfast: rank 1 train.py"),
        process(35, 10, f"holdfast: {title.PARTS_FORK_SERVER}"),
        process(36, 10, "holdfast: supervisor"),
        process(37, 10, "holdfast: sidecar m0"),
    ]
    found = parts(10, {**TREE, **{each.pid: each for each in forked}}, [33])
    assert [found[each.pid] for each in forked] == [
        *("template", "launcher", "warm", "rank", "other"),
        *("parts", "supervisor", "sidecar"),
    ]


def test_a_name_with_spaces_and_brackets_does_not_shift_the_fields() -> None:
    tail = "S 7 " + " ".join(str(at) for at in range(5, 53))
    name, state, parent, rss_bytes = read_stat(f"42 (a) b (c)) {tail}")
    assert (name, state, parent) == ("a) b (c)", "S", 7)
    assert rss_bytes == 24 * os.sysconf("SC_PAGE_SIZE")


def test_a_process_that_is_gone_is_not_found() -> None:
    mine = find_process(os.getpid())
    assert mine is not None
    assert mine.parent == os.getppid()
    assert mine.descriptors > 2
    assert find_process(2**22 + 1) is None


def test_cpu_time_of_this_process_grows_while_it_works() -> None:
    before, began_s = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began_s < 0.05:  # the kernel accounts CPU time at its ticks
        sum(range(10_000))
    assert cpu_s(os.getpid()) > before
    assert cpu_s(2**22 + 1) == 0.0
