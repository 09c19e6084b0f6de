"""The launcher's socket sends its state to a sidecar, and accepts its orders."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.launcher import sidecar_server
from holdfast.launcher.sidecar_server import HEARTBEAT, SidecarServer
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending, LauncherOrder, LauncherState, RankState

LIMIT_S = 20.0
STATE = LauncherState(7, 1, (), (0,), 4000)
NEXT = LauncherState(7, 2, (), (0,), 4000)
SETTLE = LauncherOrder("settle", 1)


class Loop:
    """A launcher's loop around the socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.heard: list[LauncherOrder] = []
        self.server = SidecarServer(path, self.selector, self.heard.append)
        self.server.open()

    def turn(self) -> None:
        """Handle the events that have arrived. Fails if there are none."""
        found = self.selector.select(LIMIT_S)
        assert found
        for key, _ in found:
            key.data()

    @contextmanager
    def joined(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(LIMIT_S)
            peer.connect(str(self.path))
            self.turn()
            yield peer


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "launcher.sock")
    yield loop
    loop.server.close()
    for key in list(loop.selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    loop.selector.close()
    assert not loop.path.exists()


def test_a_new_connection_receives_the_newest_state_and_then_every_change(loop: Loop) -> None:
    loop.server.send_state(STATE)
    with loop.joined() as peer:
        for state in (STATE, STATE, NEXT):
            loop.server.send_state(state)
        expected = codec.encode(STATE) + codec.encode(NEXT)
        assert peer.recv(len(expected) + 1, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == expected


def test_a_sign_of_life_is_an_empty_line(loop: Loop) -> None:
    with loop.joined() as peer:
        loop.server.beat()
        assert peer.recv(10) == HEARTBEAT == b"\n"


def test_orders_are_obeyed_however_they_are_split_and_other_lines_are_refused(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    line = codec.encode(SETTLE)
    with loop.joined() as peer:
        for piece in (line[:9], line[9:] + b"{}\n" + line):
            peer.sendall(piece)
            loop.turn()
    assert loop.heard == [SETTLE, SETTLE]
    assert "refused: LauncherOrder.do: missing" in capsys.readouterr().out


def test_a_closed_connection_is_forgotten_and_the_next_one_receives_the_whole_state(loop: Loop) -> None:
    with loop.joined():
        loop.server.send_state(STATE)
    loop.turn()
    loop.server.beat()
    with loop.joined() as peer:
        loop.server.send_state(STATE)
        assert peer.recv(4096) == codec.encode(STATE)


def large(generation: int) -> LauncherState:
    """Return the state of a launcher whose 32 ranks all fail, which exceeds a socket's buffer."""
    ended = Ending(1, 1, None, False, "exception", 1, "x" * 16_000)
    ranks = tuple(RankState(n, n, 100 + n, generation, "failing", ended) for n in range(32))
    return LauncherState(7, generation, ranks, (), 4000)


def taken(loop: Loop, peer: socket.socket) -> bytes:
    """Read a little at a time until nothing more arrives, and return everything."""
    found = b""
    peer.setblocking(False)
    while True:
        try:
            found += peer.recv(50_000)
        except BlockingIOError:
            if not any(known.sending for known in loop.server._peers.values()):
                return found
            loop.turn()


def test_a_slow_reader_receives_whole_lines_and_skips_to_the_newest_one(loop: Loop) -> None:
    """It used to be disconnected within a line, and got the same line after it reconnected, endlessly."""
    with loop.joined() as peer:
        for generation in range(1, 5):
            loop.server.send_state(large(generation))  # the launcher never waits
            loop.server.beat()
        assert taken(loop, peer) == codec.encode(large(1)) + codec.encode(large(4))
        loop.server.beat()
        assert taken(loop, peer) == HEARTBEAT


def test_a_peer_that_does_not_read_blocks_nothing_and_at_most_two_lines_wait_for_it(loop: Loop) -> None:
    with loop.joined() as deaf:
        for generation in range(1, 20):
            loop.server.send_state(large(generation))
        [known] = loop.server._peers.values()
        assert len(known.sending) + len(known.waiting) <= 2 * len(codec.encode(large(10)))
        with loop.joined() as peer:
            loop.server.send_state(STATE)
            assert peer.recv(4096) == codec.encode(STATE), "another client must get the state immediately"
        assert taken(loop, deaf) == codec.encode(large(1)) + codec.encode(STATE)


def test_a_peer_that_reads_receives_the_last_state_before_the_end(loop: Loop) -> None:
    with loop.joined() as peer, ThreadPoolExecutor(1) as beside:
        loop.server.send_state(large(1))
        reading = beside.submit(peer.makefile("rb").readline)
        loop.server.close()
        assert reading.result(LIMIT_S) == codec.encode(large(1))


def test_a_peer_that_does_not_read_does_not_keep_a_launcher_from_ending(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_server, "FINAL_STATE_S", 0.01)
    with loop.joined():
        loop.server.send_state(large(1))
        loop.server.close()


def test_a_line_without_an_end_is_not_collected_indefinitely(loop: Loop) -> None:
    with loop.joined() as peer:
        peer.setblocking(False)
        while loop.server._peers:
            peer.send(bytes(1 << 16))
            loop.turn()
    assert loop.heard == []


def test_a_removed_socket_is_created_again_and_open_connections_are_kept(
    loop: Loop,
) -> None:
    loop.server.send_state(STATE)
    with loop.joined() as before:
        loop.server.send_state(STATE)
        loop.server.keep_socket()
        loop.path.unlink()
        loop.server.keep_socket()
        with loop.joined() as new:
            loop.server.send_state(NEXT)
            for peer in (before, new):
                assert codec.encode(NEXT) in peer.recv(1 << 16)


def test_while_its_folder_is_removed_the_socket_is_retried(loop: Loop) -> None:
    aside = loop.path.parent.with_name("aside")
    loop.path.parent.rename(aside)
    loop.server.keep_socket()
    aside.rename(loop.path.parent)
    loop.path.unlink()
    loop.server.keep_socket()
    with loop.joined():
        assert loop.path.exists()
