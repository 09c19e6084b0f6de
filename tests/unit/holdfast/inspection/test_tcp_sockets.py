"""The kernel's list of connections is read, and malformed answers are refused."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from holdfast.inspection import tcp_sockets
from holdfast.inspection.tcp_sockets import Connection


@contextlib.contextmanager
def pair(family: int, address: str, to: str = "") -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connect two sockets: one listens at `address`, and the other connects to `to`."""
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        with socket.create_connection((to or address, listener.getsockname()[1])) as one:
            other, _ = listener.accept()
            with other:
                yield one, other


def end(of: socket.socket) -> Connection:
    return tcp_sockets.connections()[os.fstat(of.fileno()).st_ino]


@pytest.mark.parametrize(
    ("family", "address", "to", "host"),
    [
        (socket.AF_INET, "127.0.0.1", "", "127.0.0.1"),
        (socket.AF_INET6, "::1", "", "::1"),
        (socket.AF_INET6, "::ffff:127.0.0.1", "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_two_ends_of_a_connection_are_matched_to_each_other(
    family: int, address: str, to: str, host: str
) -> None:
    with pair(family, address, to) as (one, other):
        here, there = end(one), end(other)
        assert (here.local, here.remote) == (there.remote, there.local)
        assert here.local == f"{host}:{one.getsockname()[1]}"
        assert (here.state, there.state) == (tcp_sockets.ESTABLISHED, tcp_sockets.ESTABLISHED)
        assert here.on_one_host


def test_bytes_are_pending_until_read_and_counted_permanently() -> None:
    with pair(socket.AF_INET, "127.0.0.1") as (one, other):
        before, before_there = end(one), end(other)
        one.sendall(b"x" * 1000)
        assert end(other).unread == 1000
        assert other.recv(2000) == b"x" * 1000
        here, there = end(one), end(other)
        assert (here.unsent, there.unread) == (0, 0)
        assert there.received == before_there.received + 1000
        assert here.acknowledged == before.acknowledged + 1000


def test_bytes_without_room_at_the_other_end_are_in_transit() -> None:
    with pair(socket.AF_INET, "127.0.0.1") as (one, _):
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(b"x" * 65536)
        assert end(one).unsent > 0


def test_a_listener_shows_how_many_connections_wait_for_it() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(4)
        assert (end(listener).state, end(listener).unread) == (tcp_sockets.LISTEN, 0)
        with socket.create_connection(listener.getsockname()):
            assert end(listener).unread == 1


def test_two_addresses_are_not_assumed_to_be_one_host() -> None:
    apart = Connection(1, 1, "10.0.0.1:80", "10.0.0.2:80", 0, 0, 0, 0)
    assert not apart.on_one_host


def message(kind: int, body: bytes, flags: int = 0) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


CLOSED = struct.pack("=BBBB", socket.AF_INET, 5, 0, 0) + bytes(68)  # no process has it open any more
BARE = CLOSED[:68] + struct.pack("=I", 9)  # an entry with an inode but without byte counts
COUNTED = BARE + struct.pack("=HH", 140, 2) + bytes(120) + struct.pack("=QQ", 5, 7)
DONE = message(3, bytes(4))


def test_an_answer_may_arrive_in_parts() -> None:
    parts = [message(20, COUNTED) + message(20, CLOSED), message(20, COUNTED), DONE]
    found = list(tcp_sockets.parse(parts))
    assert [(each.acknowledged, each.received) for each in found] == [(5, 7)] * 2


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([], id="nothing"),
        pytest.param([message(20, COUNTED)], id="no end"),
        pytest.param([message(2, bytes(20))], id="an error: the kernel has no such service"),
        pytest.param([message(20, BARE), DONE], id="bytes are not counted"),
        pytest.param([message(20, b"short"), DONE], id="another form"),
        pytest.param([message(20, BARE + bytes(8)), DONE], id="an attribute without a length"),
        pytest.param([message(20, COUNTED)[:40], DONE], id="cut off"),
        pytest.param([message(20, COUNTED), message(3, bytes(4), flags=0x10)], id="changed meanwhile"),
    ],
)
def test_an_incomplete_answer_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(OSError, match="the kernel"):
        list(tcp_sockets.parse(parts))
