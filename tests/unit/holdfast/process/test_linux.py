"""Children are reaped and signalled, even while a debugger holds them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.launcher.workers.worker_process import WorkerProcess, reap
from holdfast.process import linux
from holdfast.protocol import rank_channel
from tests.unit.tracing import SLEEPS, held

LIMIT_S = 30.0


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def ended(pid: int) -> None:
    """Wait for the end of a process without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        assert select.select([descriptor], [], [], LIMIT_S)[0]
    finally:
        os.close(descriptor)


def test_a_child_is_collected_with_its_status_once_it_has_ended(child: subprocess.Popen[str]) -> None:
    assert linux.collected(child.pid) is None
    assert linux.status_of_dead(child.pid) is None
    child.kill()
    ended(child.pid)
    assert linux.status_of_dead(child.pid) == signal.SIGKILL
    assert linux.collected(child.pid) == signal.SIGKILL
    assert linux.collected(child.pid) is None
    assert linux.state_of(child.pid)[0] == "X"


def test_the_end_of_a_child_that_a_debugger_holds_is_returned_without_waiting(
    child: subprocess.Popen[str],
) -> None:
    """Waiting for it would block the launcher, and with it the run, until the debugger reads the status."""
    ours, theirs = rank_channel.pair()
    with ours, theirs, held(child.pid):
        process = WorkerProcess(0, ours, Path(os.devnull), pid=child.pid)
        process.kill(signal.SIGKILL)
        ended(child.pid)
        found = reap(process)
        assert (found.signal, found.code, found.ours) == (signal.SIGKILL, None, True)
        assert linux.state_of(child.pid)[0] == "Z"
    linux.collect_killed(child.pid, LIMIT_S)
    assert linux.state_of(child.pid)[0] == "X"


def test_a_child_that_does_not_end_is_waited_for_within_the_limit(child: subprocess.Popen[str]) -> None:
    linux.collect_killed(child.pid, 0.01)
    assert linux.state_of(child.pid)[0] in "RS"


_LAUNCHER = """
import subprocess, sys, time
from holdfast.launcher.workers import orphans
child = subprocess.Popen(sys.argv[1:])
print(child.pid, flush=True)
sys.stdin.readline()
orphans.kill_all()
print("ended", flush=True)
"""
_KEEPER = """
import selectors, subprocess, sys, time
from pathlib import Path
from supervisor.local.keeper.processes import ProcessTable
children = ProcessTable(Path("."), selectors.DefaultSelector(), lambda part: None)
stray = subprocess.Popen(sys.argv[1:])
print(stray.pid, flush=True)
sys.stdin.readline()
children.sweep()
children.sweep()
print("ended", flush=True)
sys.stdin.readline()
children.collect_held()
print("collected", flush=True)
"""


@contextmanager
def parent(of: str) -> Iterator[tuple[int, Callable[[], str]]]:
    """Yield the child of a process that runs `of`, and a function that continues it and gives its result."""
    words = [sys.executable, "-c", of, *SLEEPS]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as ours:
        stdin, stdout = ours.stdin, ours.stdout
        assert stdin is not None
        assert stdout is not None

        def go_on() -> str:
            stdin.write("go\n")
            stdin.flush()
            assert select.select([stdout], [], [], LIMIT_S)[0], "the process did not stop for the debugger"
            return stdout.readline().strip()

        try:
            said = {stdout.readline().strip(), stdout.readline().strip()}
            yield int((said - {"ready"}).pop()), go_on
        finally:
            ours.kill()


@pytest.mark.parametrize("of", [_LAUNCHER, _KEEPER], ids=["launcher", "keeper"])
def test_a_process_that_a_debugger_holds_does_not_keep_others_from_ending(of: str) -> None:
    with parent(of) as (pid, go_on), held(pid):
        assert go_on() == "ended"
        assert linux.state_of(pid)[0] == "Z", "the debugger has not reaped it yet"


def test_a_process_that_a_debugger_held_is_reaped_once_it_is_released() -> None:
    """The next sweep may be hours away, because it comes only when another part ends."""
    with parent(_KEEPER) as (pid, go_on):
        with held(pid):
            assert go_on() == "ended"
        assert linux.state_of(pid)[0] == "Z"
        assert go_on() == "collected"
        assert linux.state_of(pid)[0] == "X"


COUNTS = """
import signal, sys
counted = {signal.SIGRTMIN}
signal.pthread_sigmask(signal.SIG_BLOCK, counted)
print("ready", flush=True)
sys.stdin.readline()
count = 0
while signal.sigtimedwait(counted, 0):
    count += 1
print(count)
"""


@pytest.mark.parametrize("leads", [True, False])
def test_a_process_receives_a_signal_that_it_may_handle_only_once(leads: bool) -> None:
    """A second signal would interrupt a script that saves in its handler of Ctrl-C."""
    pipe, command = subprocess.PIPE, [sys.executable, "-c", COUNTS]
    with subprocess.Popen(command, text=True, start_new_session=leads, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        linux.kill_group(process.pid, signal.SIGRTMIN)
        assert process.communicate("\n", LIMIT_S)[0] == "1\n"
