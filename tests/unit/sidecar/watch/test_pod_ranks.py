"""Ranks and a launcher in another container. Here, their process ids belong to other processes or to none."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.inspection import liveness
from holdfast.protocol.progress import Phase
from sidecar.clients import LauncherClient
from sidecar.config import Config
from sidecar.watch.member_watch import MemberWatch
from sidecar.watch.progress_monitor import ProgressMonitor
from tests.sandbox import memory_directory
from tests.unit.sidecar.watch.test_progress_monitor import POLICY, Rank, seen, works
from tests.unit.supervisor.job_views import launcher, rank

NOBODY = 1 << 30  # higher than any pid that a kernel assigns


@pytest.fixture
def here() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture
def stopped() -> Iterator[int]:
    """Yield the pid of a stopped process."""
    asleep = subprocess.Popen(["sleep", "600"])
    try:
        asleep.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, asleep.pid, os.WSTOPPED)
        yield asleep.pid
    finally:
        asleep.kill()
        asleep.wait()


@pytest.mark.parametrize("sees_processes", [True, False])
def test_work_before_a_commit_counts_even_if_another_process_here_has_the_same_id(
    here: Path, stopped: int, sees_processes: bool
) -> None:
    made, pages = Rank(here), ProgressMonitor(here, 1, POLICY, sees_processes=sees_processes)
    made.page.begin(1, 0, 0, stopped, 0)
    for step in range(1, 12):
        works(made, step)
    made.page.written()
    seen(made, pages, 6)
    [found] = pages.progress(1, made.now_ns)
    assert found.early is not None
    assert (found.early.seconds > 0.2) == (not sees_processes)


@pytest.mark.parametrize("sees_processes", [True, False])
def test_a_rank_is_not_stopped_because_another_process_has_its_id(
    here: Path, stopped: int, sees_processes: bool
) -> None:
    made, pages = Rank(here), ProgressMonitor(here, 1, POLICY, sees_processes=sees_processes)
    made.page.begin(1, 0, 0, stopped, 0)
    made.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    made.page.tail_begins()
    seen(made, pages, 20)
    [found] = pages.progress(1, made.now_ns)
    assert (found.tail_s > 0.9) == (not sees_processes)


def watch(here: Path, address: str, pid: int) -> tuple[MemberWatch, LauncherClient]:
    token = here / "token"
    config = Config("m0", "n0", 1, here, here / "checkpoints", "", token, address=address)
    line = LauncherClient(here / "launcher.sock", lambda: None)
    line.state, line.heard_s = launcher(rank(0), pid=pid), 100.0
    return MemberWatch(config, line, lambda: None), line


@pytest.mark.parametrize(("address", "words"), [("", "stopped"), ("10.0.0.7", "unknown state")])
def test_a_silent_launcher_of_another_container_has_an_unknown_state(
    here: Path, stopped: int, address: str, words: str
) -> None:
    observed, _ = watch(here, address, stopped)
    observed.poll_launcher(100.0 + liveness.HELD_UP_S + 1.0, 0.0)
    assert words in observed.silent


def test_a_launcher_of_another_container_has_all_the_time_of_one_that_waits_for_a_core(here: Path) -> None:
    """Its process is not visible in this container. The sidecar must not conclude that it is gone."""
    observed, line = watch(here, "10.0.0.7", NOBODY)
    observed.poll_launcher(100.0 + liveness.HELD_UP_S - 1.0, 0.0)
    assert observed.silent == ""
    observed.poll_launcher(100.0 + liveness.HELD_UP_S + 1.0, 0.0)
    assert observed.silent
    line.heard_s = 200.0
    observed.poll_launcher(200.5, 0.0)
    assert observed.silent == ""


def test_a_launcher_out_of_reach_is_reported_after_a_few_seconds_and_until_it_is_reached(here: Path) -> None:
    observed, line = watch(here, "10.0.0.7", NOBODY)
    told: list[str] = []
    observed._changed = lambda: told.append(observed.unreachable)
    steps = (
        (0.0, ""),
        (100.0, "denied"),
        (100.0 + liveness.LIMIT_S - 0.1, "denied"),
        (100.0 + liveness.LIMIT_S, "denied"),
        (120.0, "denied"),
        (121.0, ""),
        (122.0, "refused"),  # briefly: the launcher is being replaced
        (122.0 + liveness.LIMIT_S - 0.1, "refused"),
        (128.0, ""),
    )
    for now_s, line.unreachable in steps:
        observed.poll_connection(now_s)
    assert told == ["denied", ""]


def test_a_rank_that_its_launcher_reports_as_stopped_or_ended_does_no_work(
    here: Path,
) -> None:
    """Otherwise a restart would go back to an old snapshot, to repeat work that the rank only seems to do."""
    made = Rank(here)
    made.page.begin(1, 0, 0, NOBODY, 0)
    made.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    made.page.tail_begins()
    seen_by, _ = watch(here, "10.0.0.7", 1)
    seen(made, seen_by.pages, 20)
    running = rank(0, pid=NOBODY)
    tails = []
    for each in (
        running,
        replace(running, stopped=True),
        replace(running, state="exited"),
        running,
    ):
        (found,) = seen_by.progress(launcher(each), made.now_ns)
        tails.append(found.tail_s > 0.9)
    assert tails == [True, False, False, True]


def test_a_rank_that_is_visible_here_is_judged_by_its_own_state(here: Path) -> None:
    made = Rank(here)
    made.page.begin(1, 0, 0, os.getpid(), 0)
    made.page.commit(1, 0.5, 0.5, 8, 64, 0.0, 0, -1, Phase.TAIL)
    made.page.tail_begins()
    seen_by, _ = watch(here, "", 1)
    seen(made, seen_by.pages, 20)
    (found,) = seen_by.progress(launcher(replace(rank(0, pid=os.getpid()), stopped=True)), made.now_ns)
    assert found.tail_s > 0.9
