from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import wire
from holdfast.launcher_messages import LauncherOrder, LauncherState
from holdfast.listeners import SIGN, Listeners

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
        self.listeners = Listeners(path, self.selector, self.heard.append)
        self.listeners.open()

    def turn(self) -> None:
        """Handle what has come; something must."""
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
    loop.listeners.close()
    for key in list(loop.selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        key.fileobj.close()
    loop.selector.close()
    assert not loop.path.exists()


def test_who_comes_hears_the_newest_state_and_then_what_changes(loop: Loop) -> None:
    loop.listeners.tell(STATE)
    with loop.joined() as peer:
        for state in (STATE, STATE, NEXT):
            loop.listeners.tell(state)
        expected = wire.encode(STATE) + wire.encode(NEXT)
        assert peer.recv(len(expected) + 1, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == expected


def test_a_sign_of_life_is_an_empty_line(loop: Loop) -> None:
    with loop.joined() as peer:
        loop.listeners.beat()
        assert peer.recv(10) == SIGN == b"\n"


def test_orders_are_obeyed_however_they_are_cut_and_what_is_none_is_refused(
    loop: Loop, capsys: pytest.CaptureFixture[str]
) -> None:
    line = wire.encode(SETTLE)
    with loop.joined() as peer:
        for piece in (line[:9], line[9:] + b"{}\n" + line):
            peer.sendall(piece)
            loop.turn()
    assert loop.heard == [SETTLE, SETTLE]
    assert "refused: LauncherOrder.do: missing" in capsys.readouterr().out


def test_who_leaves_is_forgotten_and_the_next_one_is_told_all(loop: Loop) -> None:
    with loop.joined():
        loop.listeners.tell(STATE)
    loop.turn()
    loop.listeners.beat()
    with loop.joined() as peer:
        loop.listeners.tell(STATE)
        assert peer.recv(4096) == wire.encode(STATE)


def test_who_does_not_read_is_left_and_holds_nobody_up(loop: Loop) -> None:
    with loop.joined() as peer:
        while loop.listeners._peers:
            loop.listeners._send(bytes(1 << 16))
        assert peer.recv(1) == b"\0"


def test_a_line_without_an_end_is_not_collected_for_ever(loop: Loop) -> None:
    with loop.joined() as peer:
        peer.setblocking(False)
        while loop.listeners._peers:
            peer.send(bytes(1 << 16))
            loop.turn()
    assert loop.heard == []
