"""A process is forked only if it has a single thread."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

THREADS = """
import os, threading
{first}
from holdfast.process import fork_server as forking
print(len(os.listdir("/proc/self/task")), forking.forkable())
os._exit(0)
"""


def threads_and_forkable(first: str) -> list[str]:
    """Return how many threads a process has after `first`, and whether it may be forked."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", THREADS.format(first=first)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()


def test_threads_that_end_before_a_fork_do_not_prevent_a_zygote_from_forking() -> None:
    """The only rank of a member has OpenBLAS's threads; its warm processes once took seconds each."""
    assert threads_and_forkable("import numpy") == ["2", "True"]


def test_a_thread_that_remains_prevents_a_zygote_from_forking() -> None:
    assert threads_and_forkable("threading.Thread(target=threading.Event().wait).start()") == ["2", "False"]


TWICE = """
import os, sys, time
from holdfast.process import fork_server as forking
from holdfast.process import linux as osproc

osproc.adopt_orphans()
us = os.getpid()
middle = os.fork()
if middle == 0:  # the process that forks twice is a child of this one, like a zygote
    if forking.fork_twice(us if sys.argv[1] == "ours" else 1):
        os._exit(42)
    os._exit(0)
os.waitpid(middle, 0)
print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
"""

ORDERED = """
import os, socket
from holdfast.protocol import rank_channel as channel
from holdfast.process import fork_server as forking
from holdfast.process import linux as osproc
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder

osproc.adopt_orphans()
us = os.getpid()
ours, theirs = channel.pair()
template = os.fork()
if template == 0:
    ours.close()
    for order, line, log, more in forking.forks(theirs, "part", us):
        os.write(log, order.argv[0].encode())
        channel.send(line, WorkerMessage(str(len(more)), os.getpid()))
        os._exit(0)
    os._exit(0)
theirs.close()
print(channel.receive(ours, WorkerMessage)[0].what)
for order in (WorkerOrder("other"), WorkerOrder("part", argv=("a",)), WorkerOrder("part", argv=("b",))):
    line, far = channel.pair()
    read, write = os.pipe()
    with far:
        channel.send(ours, order, (far.fileno(), write, read))
    os.close(write)
    if order.do == "part":
        born = channel.receive(line, WorkerMessage)[0]
        print(os.read(read, 9).decode(), born.what)
        os.waitpid(born.pid, 0)
ours.close()
print(os.waitstatus_to_exitcode(os.waitpid(template, 0)[1]))
"""


@pytest.mark.parametrize(("whose", "code"), [("ours", "42"), ("another's", "1")])
def test_a_grandchild_continues_only_if_the_right_process_has_adopted_it(whose: str, code: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWICE, whose], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split() == [code]


def test_orders_are_carried_out_in_forks_with_their_descriptors_until_the_socket_closes() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ORDERED], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split() == ["ready", "a", "1", "b", "1", "0"]
