"""The ends of warm processes and zygotes are recorded, and they are replaced after pauses."""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.launcher.workers import warm_pool
from holdfast.launcher.workers.process_watch import ProcessWatch
from holdfast.launcher.workers.warm_pool import MemberSettings, WarmPool
from holdfast.launcher.workers.zygote_handle import Zygote
from holdfast.protocol.launcher_messages import Ending
from holdfast.worker import nested_scripts
from holdfast.worker.program import Program
from holdfast.worker.script_source import ProgramSources


@pytest.mark.parametrize(
    ("status", "printed", "code", "message"),
    [
        (5 << 8, "", 5, "PROCESS exited with code 5 and printed nothing"),
        (5 << 8, "Traceback\nImportError: no\n", 5, "Traceback\nImportError: no\nPROCESS exited with code 5"),
        (11, "about to\n", None, "about to\nPROCESS was killed by SIGSEGV"),
        (0, "done\n", 1, "done\nPROCESS exited with code 0"),
        (None, "", 1, "PROCESS closed its connection and printed nothing"),
    ],
)
def test_the_ending_of_a_lost_zygote_contains_its_status_and_output(
    status: int | None, printed: str, code: int | None, message: str
) -> None:
    ended = warm_pool.zygote_ending(status, printed, 7)
    assert (ended.code, ended.signal) == (code, None if code else 11)
    what = message.replace("PROCESS", "the process that imports the script's modules")
    assert ended.message == what


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("printed", ["", "its usage\n", f"BadInput: {nested_scripts.LAUNCHED_INDIRECTLY}\n"])
def test_a_process_whose_join_was_refused_counts_as_failed(code: int, printed: str) -> None:
    ended = warm_pool.unjoined_ending(Ending(7, code), printed, refused=True)
    assert (ended.code, ended.fail, ended.is_good) == (2, "bad_input", False)
    assert ended.message.startswith(printed)
    assert ended.message.count(nested_scripts.LAUNCHED_INDIRECTLY) == 1


@pytest.mark.parametrize(
    ("ending", "refused"), [(Ending(7, 0), False), (Ending(7, 1), False), (Ending(7, signal=9), True)]
)
def test_the_output_of_a_process_that_had_not_joined_replaces_its_message(
    ending: Ending, refused: bool
) -> None:
    assert warm_pool.unjoined_ending(ending, "its usage\n", refused=refused) == replace(
        ending, message="its usage\n"
    )
    told = replace(ending, message="Traceback")
    assert warm_pool.unjoined_ending(told, "", refused=refused) == told


@pytest.mark.parametrize(
    ("code", "status"), [("import os; os._exit(5)", 5 << 8), ("import os; os.abort()", 6)]
)
def test_a_zygote_whose_connection_closes_first_is_lost_with_its_own_status(code: str, status: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),))
    assert ours.recv(1) == b""
    assert Zygote(child.pid, ours).lost() == status
    child.returncode = 0  # the process has been reaped


def test_a_zygote_that_only_closes_its_connection_is_killed() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert Zygote(child.pid, ours).lost() is None
    child.returncode = 0


class Tried(WarmPool):
    """A pool that records requests for processes instead of starting them."""

    def _make(self, local_rank: int) -> None:
        asked.append(local_rank)


asked: list[int] = []


@pytest.fixture
def tried() -> Iterator[tuple[Tried, list[tuple[float, Callable[[], None]]]]]:
    """Yield a pool that starts no process, and the list of the pauses that it requests."""
    settings = MemberSettings(Path("/nowhere"), Path("/nowhere"), "m0", 1, Path("/nowhere"), 0)
    sources = ProgramSources(Program("script", "python", (), "train.py", (), ()))
    pauses: list[tuple[float, Callable[[], None]]] = []
    selector = selectors.DefaultSelector()
    watch = ProcessWatch(selector, on_message=lambda *_: None, on_end=lambda _: None)
    made = Tried(
        sources, settings, selector, watch, after=lambda seconds, call: pauses.append((seconds, call))
    )
    asked.clear()
    yield made, pauses
    made.selector.close()


FAILED = Ending(0, 1, fail="exception", message="FileNotFoundError: data.pt")


def test_failing_warm_processes_are_retried_without_end_at_growing_pauses(
    tried: tuple[Tried, list[tuple[float, Callable[[], None]]]],
) -> None:
    warm, pauses = tried
    for _ in range(2):
        warm.failed(FAILED)
    assert (asked, pauses) == ([0, 0], []), "the first attempts follow each other without a pause"
    for number in range(10):
        warm.failed(FAILED)
        warm.failed(FAILED)  # a process of another local rank: one pause is enough
        warm.fill()
        assert len(asked) == 2 + number, "no process is started during a pause"
        pauses[-1][1]()
        assert len(asked) == 3 + number
    assert [seconds for seconds, _ in pauses] == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert (warm.failures, warm.tries) == (22, 22)


def test_a_zygote_that_the_pool_ends_at_its_close_does_not_hide_why_the_script_failed(
    tried: tuple[Tried, list[tuple[float, Callable[[], None]]]],
) -> None:
    warm, _ = tried
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    warm.zygote = Zygote(child.pid, ours)
    warm.selector.register(ours, selectors.EVENT_READ, warm._on_zygote)
    warm.failed(FAILED)
    warm.close()
    theirs.close()  # as the kernel does at the end of the process
    ((key, _),) = warm.selector.select()
    key.data()
    assert (warm.last_ending, warm.failures) == (FAILED, 1)
    assert not warm.is_zygote(child.pid)
    child.returncode = 0  # the pool has reaped it


def test_a_slow_attempt_is_followed_by_a_longer_pause_unless_ranks_wait(
    tried: tuple[Tried, list[tuple[float, Callable[[], None]]]],
) -> None:
    warm, pauses = tried
    for _ in range(warm_pool.MAX_FAILURES):
        warm.failed(FAILED, took_s=100.0)
    assert [seconds for seconds, _ in pauses] == [400.0]
    pauses[-1][1]()
    warm.failed(FAILED, took_s=3600.0)
    assert pauses[-1][0] == warm_pool.LONGEST_PAUSE_AFTER_TRY_S
    warm.retry_at_once()
    warm.failed(FAILED, took_s=300.0)
    assert pauses[-1][0] == 1.0


def test_of_consecutive_failures_only_the_first_leave_a_log(
    tried: tuple[Tried, list[tuple[float, Callable[[], None]]]], tmp_path: Path
) -> None:
    warm, _ = tried
    for number in range(warm_pool.MAX_LOGS + 5):
        log = tmp_path / str(number)
        log.touch()
        warm.failed(FAILED, log)
    assert len(list(tmp_path.iterdir())) == warm_pool.MAX_LOGS
    warm.failed(FAILED, tmp_path / "not there")


def test_a_process_that_ranks_wait_for_is_tried_immediately(
    tried: tuple[Tried, list[tuple[float, Callable[[], None]]]],
) -> None:
    warm, pauses = tried
    for _ in range(4):
        warm.failed(FAILED)
        if pauses:
            pauses[-1][1]()
    warm.failed(FAILED)
    asked.clear()
    warm.retry_at_once()
    warm.fill()
    assert asked == [0]
    warm.failed(FAILED)
    assert (warm.tries, pauses[-1][0]) == (1, 1.0), "the pauses start again from the shortest"
    asked.clear()
    pauses[-2][1]()
    assert asked == [], "that pause had ended before"
    warm.close()
    pauses[-1][1]()
    assert asked == []
