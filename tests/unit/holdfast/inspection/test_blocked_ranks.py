"""Processes that wait like ranks in a collective of gloo, and what prevents one from being at rest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.inspection import blocked_ranks, process_stats
from holdfast.inspection.blocked_ranks import CollectiveWait
from holdfast.inspection.python_stacks import Frame, Thread
from holdfast.inspection.tcp_sockets import Connection
from holdfast.process import linux

# A rank: its main thread waits for a lock, a loop for sockets. argv: the port of its peer.
RANK = """
import ctypes, os, select, signal, socket, sys, threading, time
libc = ctypes.CDLL(None)
loop, tried = select.epoll(), []
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
loop.register(line, select.EPOLLIN | select.EPOLLET)
listener = socket.create_server(("127.0.0.1", 0))
loop.register(listener, select.EPOLLIN | select.EPOLLET)
def poll():
    libc.prctl(15, b"gloo_tcp_loop", 0, 0, 0)  # PR_SET_NAME
    while True:
        loop.poll(0.01)
def beside(work, name="helper", *args):
    def named():
        libc.prctl(15, name.encode(), 0, 0, 0)
        work(*args)
    threading.Thread(target=named, daemon=True).start()
threading.Thread(target=poll, daemon=True).start()
{more}
print(listener.getsockname()[1], flush=True)
threading.Event().wait()
"""
LIMITED = "beside(threading.Event().wait, 'helper', {seconds})"
MORE = {
    "at rest": "",
    "a helper that waits for work": "beside(threading.Event().wait)",
    "a helper that waits for long": LIMITED.format(seconds=5000),
    "a helper that waits for a while": LIMITED.format(seconds=30),
    "the store": "beside(time.sleep, 'pt_tcpstore_uv', 600)",
    "sleeps": "beside(time.sleep, 'helper', 600)",
    "polls": "beside(select.poll().poll)",
    "hears": "beside(line.dup().recv, 'helper', 1)",
    "reads": "beside(os.read, 'helper', os.pipe()[0], 1)",
    "works": "beside(exec, 'helper', 'while True: pass')",
    "a child": "beside(os.waitpid, 'helper', os.spawnlp(os.P_NOWAIT, 'cat', 'cat'), 0)",
    "a device": "import pty; pty.openpty()",
    "a signal": "signal.signal(signal.SIGALRM, print)",
    "another socket": "tried += socket.socketpair(); loop.register(tried[0], select.EPOLLIN)",
    "no connection": "loop.unregister(line)",
}
FREEZERS = (  # the freezer files of cgroups of versions 1 and 2
    (Path("/sys/fs/cgroup/freezer"), "freezer.state", ("FROZEN", "THAWED")),
    (Path("/sys/fs/cgroup"), "cgroup.freeze", ("1", "0")),
)
AT = "torch/distributed/distributed_c10d.py"


class Peer:
    """The other end of the rank's connection, and a process that connects to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.process: subprocess.Popen[bytes] | None = None

    def rank(self, more: str) -> int:
        port = str(self.listener.getsockname()[1])
        script = RANK.replace("{more}", more)
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self.line, _ = self.listener.accept()
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        return self.process.pid

    def end(self) -> None:
        if self.process is not None:
            linux.kill_group(self.process.pid)
            self.process.communicate()
            self.line.close()
        self.listener.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.end()


def threads(pid: int, function: str = "barrier", file: str = AT) -> tuple[Thread, ...]:
    return (Thread(pid, "MainThread", False, (Frame(function, file, file, 7),)),)


def settled(pid: int, stirs: str, *more: Thread, ours: frozenset[int] = frozenset()) -> CollectiveWait:
    """Return the result once the rank has begun to wait: that it is at rest, or the reason why not."""
    while True:
        found = blocked_ranks.of(pid, (*threads(pid), *more), ours)
        if found.stirs.startswith(stirs) if stirs else not found.stirs:
            return found


@pytest.mark.parametrize(
    ("more", "least_s", "most_s"),
    [
        ("at rest", blocked_ranks.FOREVER_S, blocked_ranks.FOREVER_S),
        ("a helper that waits for work", blocked_ranks.FOREVER_S, blocked_ranks.FOREVER_S),
        ("the store", blocked_ranks.FOREVER_S, blocked_ranks.FOREVER_S),
        ("a helper that waits for long", 4000.0, 5000.0),
        ("a helper that waits for a while", 0.0, 30.0),
    ],
)
def test_a_rank_is_at_rest_until_one_of_its_waits_reaches_its_time_limit(
    peer: Peer, more: str, least_s: float, most_s: float
) -> None:
    pid = peer.rank(MORE[more])
    found = settled(pid, "")
    assert least_s <= found.seconds <= most_s
    assert found.mark == settled(pid, "").mark, "its event loop always runs but does nothing"
    here, there = (f"127.0.0.1:{each.getsockname()[1]}" for each in (peer.line, peer.listener))
    assert here == there
    far = f"127.0.0.1:{peer.line.getpeername()[1]}"
    mine = Connection(1, 1, here, far, 0, 0, 0, 0)
    assert found.ends ^ blocked_ranks.sum_of(blocked_ranks._host(pid), [mine]) == 0


@pytest.mark.parametrize(
    ("more", "stirs"),
    [
        ("sleeps", "thread helper waits in: sleep"),
        ("polls", "thread helper waits in: poll"),
        ("hears", "thread helper waits in: network"),
        ("reads", "thread helper waits in: poll"),
        ("works", "thread helper runs"),
        ("a child", "thread helper waits in: child"),
        ("a device", "it has opened /dev/ptmx"),
        ("a signal", "it handles a signal that could end a wait"),
        ("another socket", "a gloo loop waits for a socket that is not TCP"),
        ("no connection", "its collectives have 0 connections"),
    ],
)
def test_a_rank_that_something_may_wake_is_not_at_rest(peer: Peer, more: str, stirs: str) -> None:
    found = settled(peer.rank(MORE[more]), stirs)
    assert (found.seconds, found.mark, found.ends) == (0.0, 0, 0)


def test_a_rank_with_an_unread_message_is_not_at_rest(peer: Peer) -> None:
    pid = peer.rank("beside(lambda: [line.recv(1), threading.Event().wait()])")
    settled(pid, "thread helper waits in: network")
    peer.line.sendall(b"x")
    assert settled(pid, "").mark
    peer.line.sendall(b"x")
    settled(pid, "bytes are in flight between 127.0.0.1")


def test_a_rank_with_an_unsent_message_is_not_at_rest(peer: Peer) -> None:
    fill = """
line.setblocking(False)
try:
    while True:
        line.send(b'x' * 65536)
except BlockingIOError:
    pass
"""
    settled(peer.rank(fill), "bytes are in flight between 127.0.0.1")


@pytest.fixture
def freezer() -> Iterator[tuple[Path, str, str]]:
    """Yield a cgroup and the texts that freeze and thaw it. Skip if this machine does not let us make one."""
    for root, file, words in FREEZERS:
        folder = root / f"holdfast-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        yield folder / file, *words
        folder.rmdir()
        return
    pytest.skip("no cgroup that freezes processes can be made here")


def test_a_frozen_rank_is_not_at_rest_because_it_may_have_been_woken_before(
    freezer: tuple[Path, str, str], peer: Peer
) -> None:
    control, freeze, thaw = freezer
    pid = peer.rank("")
    settled(pid, "")
    (control.parent / "cgroup.procs").write_text(str(pid))
    control.write_text(freeze)
    try:
        settled(pid, "thread python ")
    finally:
        control.write_text(thaw)
        (control.parent.parent / "cgroup.procs").write_text(str(pid))
    settled(pid, "")


def test_the_mark_changes_once_the_rank_has_moved(peer: Peer) -> None:
    """A message wakes one of its threads, which then waits in the same place again."""
    turn = "threading.Semaphore(0)"
    reads = "beside(lambda: [turn.release() for _ in iter(lambda: os.read(0, 1), b'')], 'pt_tcpstore')"
    pid = peer.rank(f"turn = {turn}; beside(lambda: [turn.acquire() for _ in iter(int, 1)]); {reads}")
    assert peer.process is not None
    assert peer.process.stdin is not None
    first = settled(pid, "")
    assert first.mark == settled(pid, "").mark
    peer.process.stdin.write(b"x")
    peer.process.stdin.flush()
    while settled(pid, "").mark == first.mark:
        pass


def test_both_ends_of_a_connection_cancel_out_in_the_sum_unless_they_are_on_two_hosts() -> None:
    here = Connection(1, 1, "a:1", "a:2", 0, 0, 0, 0)
    there = Connection(2, 1, "a:2", "a:1", 0, 0, 0, 0)
    other = replace(here, remote="a:3")
    assert blocked_ranks.sum_of("h", [here]) == blocked_ranks.sum_of("h", [there])
    assert blocked_ranks.sum_of("h", [here, there]) == 0
    assert blocked_ranks.sum_of("h", [here, other]) != blocked_ranks.sum_of("h", [there])
    assert blocked_ranks.sum_of("h", [here]) != blocked_ranks.sum_of("i", [there])


def test_a_rank_to_which_a_peer_connects_is_not_at_rest(peer: Peer) -> None:
    pid = peer.rank("")
    settled(pid, "")
    with socket.create_connection(("127.0.0.1", peer.port)):
        settled(pid, "a process is connecting to it")


def test_a_rank_whose_peer_closes_a_connection_is_not_at_rest(peer: Peer) -> None:
    pid = peer.rank("")
    settled(pid, "")
    peer.line.shutdown(socket.SHUT_RDWR)
    settled(pid, "the connection between 127.0.0.1")


def test_holdfasts_threads_and_tqdms_monitor_may_run_if_they_wait(peer: Peer) -> None:
    pid = peer.rank("beside(threading.Event().wait, 'helper', 30); beside(time.sleep, 'other', 600)")
    numbers: dict[str, int] = {}
    while not {"helper", "other"} <= set(numbers):
        numbers = {name: tid for tid, name in process_stats.threads(pid).items()}
    monitor = Thread(numbers["helper"], "Thread-1", False, (Frame("run", "tqdm/_monitor.py", "m", 1),))
    settled(pid, "thread other waits in: sleep", monitor)
    settled(pid, "a thread of Holdfast or tqdm is running", monitor, ours=frozenset({numbers["other"]}))
    waiting = settled(pid, "thread other", ours=frozenset({numbers["helper"]}))
    assert not waiting.seconds


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (f"all_reduce ({AT}:2806)", True),
        ("_engine_run_backward (torch/autograd/graph.py:979)", True),
        (
            "DistributedDataParallel._distributed_broadcast_coalesced (torch/nn/parallel/distributed.py:9)",
            True,
        ),
        (f"new_group ({AT}:5000)", False),  # outsiders may connect here
        (f"_store_based_barrier ({AT}:900)", False),
        (f"monitored_barrier ({AT}:5400)", False),  # the script handles its time limit
        ("rpc_sync (torch/distributed/rpc/api.py:1)", False),
        ("barrier (mine.py:1)", False),
        ("receive (holdfast/training/protection/private_exchange.py:90)", False),
        ("synchronize (torch/cuda/streams.py:231)", False),
        ("", False),
    ],
)
def test_only_collectives_of_gloo_count(at: str, expected: bool) -> None:
    assert blocked_ranks.in_collective(at) is expected


def test_a_process_that_is_gone_or_has_no_stacks_is_not_known_to_be_at_rest() -> None:
    gone = 1 << 30
    assert blocked_ranks.of(gone, threads(gone), frozenset()).stirs == "it has 0 threads"
    assert blocked_ranks.of(gone, (), frozenset()).stirs == "its stack is not known"
    elsewhere = blocked_ranks.of(os.getpid(), threads(os.getpid(), "forward", "net.py"), frozenset())
    assert elsewhere.stirs == "its main thread is not in a gloo collective"
