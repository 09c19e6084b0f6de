"""The data loader workers of a rank end with it when it fails."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.launcher.workers import worker_process
from holdfast.launcher.workers.worker_process import WorkerProcess
from holdfast.process import linux
from holdfast.protocol import rank_channel

SCRIPT = """
import os, signal, sys
worker = os.fork()
if worker == 0:
    while True:
        signal.pause()
print(worker, flush=True)
sys.stdin.readline()
os._exit(int(sys.argv[1]))
"""


@dataclass
class Rank:
    child: subprocess.Popen[str]
    worker: int
    pidfd: int  # the pid of the worker

    def reaped(self, folder: Path) -> None:
        """Reap the rank as its launcher does."""
        ours, theirs = rank_channel.pair()
        os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)
        worker_process.reap(WorkerProcess(0, ours, folder / "log", self.child.pid))
        for each in (ours, theirs):
            each.close()

    def worker_ends(self) -> bool:
        poll = select.poll()  # not select(): a process of many tests may have descriptors beyond 1023
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(10_000))

    def worker_lives(self) -> bool:
        return linux.state_of(self.worker)[0] not in "ZX"


def start(code: int) -> Rank:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    return Rank(child, worker, os.pidfd_open(worker))


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    found: list[Rank] = []
    yield found
    for rank in found:
        linux.kill_group(rank.child.pid)
        for pipe in (rank.child.stdin, rank.child.stdout):
            assert pipe is not None
            pipe.close()
        rank.child.returncode = 0  # `reap` has collected it
        os.close(rank.pidfd)


@pytest.mark.parametrize("how", ["killed", "failed"])
def test_the_workers_of_a_failed_rank_end_with_it(ranks: list[Rank], tmp_path: Path, how: str) -> None:
    rank = start(1)
    ranks.append(rank)
    if how == "killed":
        rank.child.send_signal(signal.SIGKILL)
    else:
        assert rank.child.stdin is not None
        rank.child.stdin.close()
    rank.reaped(tmp_path)
    assert rank.worker_ends()


def test_processes_left_by_a_rank_that_exited_with_0_are_not_touched(
    ranks: list[Rank], tmp_path: Path
) -> None:
    rank = start(0)
    ranks.append(rank)
    assert rank.child.stdin is not None
    rank.child.stdin.close()
    rank.reaped(tmp_path)
    assert rank.worker_lives()
