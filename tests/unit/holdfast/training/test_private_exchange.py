from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import PeerLost
from holdfast.training.protection.private_exchange import (
    MAX_UNIDENTIFIED,
    PrivateStateRing,
    ReceivedState,
    _accept,
    _Incoming,
    backup_and_sources,
)


@given(st.integers(2, 8), st.integers(1, 8))
def test_every_state_has_a_second_copy_on_another_member(members: int, nproc: int) -> None:
    world_size = members * nproc
    sides = [PrivateStateRing(rank, world_size, nproc) for rank in range(world_size)]
    assert [sides[side.to].sources for side in sides] == [(rank,) for rank in range(world_size)]
    for rank, side in enumerate(sides):
        assert side.to // nproc != rank // nproc


def test_one_member_can_keep_the_states_of_several() -> None:
    backups = (2, 2, 0)  # members 0 and 1 share a node
    found = [backup_and_sources(rank, 6, 2, backups) for rank in range(6)]
    assert [to for to, _ in found] == [4, 5, 4, 5, 0, 1]
    assert [sources for _, sources in found] == [(4,), (5,), (), (), (0, 2), (1, 3)]


Ring = tuple[PrivateStateRing, socket.socket, socket.socket]


@pytest.fixture
def ring() -> Iterator[Ring]:
    """Yield a rank, and the other ends of its connections for sending and receiving."""
    side, (ours, theirs), (fed, feeding) = PrivateStateRing(0, 2, 1), socket.socketpair(), socket.socketpair()
    side._out, side._incoming = ours, (_Incoming(1, fed),)
    for each in (ours, fed):
        each.setblocking(False)
    yield side, theirs, feeding
    for each in (ours, theirs, fed, feeding):
        each.close()


def message(step: int, blob: bytes, late: int = 0) -> bytes:
    return struct.pack("<qqq", step, len(blob), late) + blob


@pytest.mark.parametrize("size", [0, 1, 10_890, 64 << 10, (64 << 10) - 24, 200_000, 3_000_000])
def test_a_state_of_any_size_arrives_whole_and_so_does_the_next(ring: Ring, size: int) -> None:
    side, theirs, feeding = ring
    blobs = {step: os.urandom(size) for step in (7, 8, 9)}
    stream = b"".join(message(step, blob, step % 2) for step, blob in blobs.items())
    peer = threading.Thread(target=feeding.sendall, args=(stream,))
    drain = threading.Thread(target=lambda: received(theirs, 3 * (24 + size), sent))
    sent: list[bytes] = []
    for each in (peer, drain):
        each.start()
    for step, blob in blobs.items():
        side.send(step, blob, late=step == 8)
        assert side.receive() == (ReceivedState(1, blob, step % 2 == 1),)
    for each in (peer, drain):
        each.join()
    assert b"".join(sent) == b"".join(message(s, b, s == 8) for s, b in blobs.items())


def received(end: socket.socket, count: int, into: list[bytes]) -> None:
    while count > 0 and (piece := end.recv(1 << 16)):
        into.append(piece)
        count -= len(piece)


def test_a_state_that_arrives_byte_by_byte_is_distinguished_from_the_next_one(ring: Ring) -> None:
    side, _, feeding = ring
    stream = message(1, b"first") + message(2, b"second")
    taken: list[bytes] = []
    for at in range(len(stream)):
        feeding.sendall(stream[at : at + 1])
        [incoming] = side._incoming
        assert incoming.pull()
        if (found := incoming.take(len(taken) + 1, side._on_again)) is not None:
            taken.append(found.blob)
    assert taken == [b"first", b"second"]


AGAIN = 2


@pytest.mark.parametrize("size", [0, 5, (64 << 10) - 24, 200_000])
@pytest.mark.parametrize("secured", [False, True])
def test_a_state_that_is_sent_again_is_received_with_the_next_one_or_when_securing(
    ring: Ring, size: int, secured: bool
) -> None:
    side, theirs, feeding = ring
    came: list[tuple[int, bytes]] = []
    side._on_again = lambda _source, step, blob: came.append((step, blob))
    side.send(7, b"mine", late=True)
    feeding.sendall(message(7, b"early", late=1))
    assert side.receive() == (ReceivedState(1, b"early", late=True),)
    last = os.urandom(size)
    peer = threading.Thread(target=feeding.sendall, args=(message(7, last, AGAIN) + message(8, b"next"),))
    peer.start()
    if secured:
        while not came:
            side.receive_again()
        assert came == [(7, last)]
        side.receive_again()
    side.send_again(7, b"ours")
    side.send(8, b"mine", late=False)
    assert side.receive() == (ReceivedState(1, b"next", late=False),)
    peer.join()
    assert came == [(7, last)]
    sent: list[bytes] = []
    expected = message(7, b"mine", 1) + message(7, b"ours", AGAIN) + message(8, b"mine")
    received(theirs, len(expected), sent)
    assert b"".join(sent) == expected


def test_data_that_cannot_be_sent_at_once_is_sent_in_order(ring: Ring) -> None:
    side, theirs, feeding = ring
    large, sent = os.urandom(3_000_000), list[bytes]()
    feeding.sendall(message(2, b"theirs"))
    side.send(1, b"first", late=True)
    side.send_again(1, large)
    side.send(2, b"second", late=False)
    expected = message(1, b"first", 1) + message(1, large, AGAIN) + message(2, b"second")
    drain = threading.Thread(target=lambda: received(theirs, len(expected), sent))
    drain.start()
    assert side.receive() == (ReceivedState(1, b"theirs", late=False),)
    drain.join()
    assert b"".join(sent) == expected


def test_sending_again_to_a_peer_that_is_gone_is_not_an_error(ring: Ring) -> None:
    side, theirs, feeding = ring
    theirs.close()
    feeding.close()
    side.send_again(1, b"ours")
    side.receive_again()
    with pytest.raises(PeerLost):
        side.send(2, b"mine", late=False)


def test_a_repeated_state_of_a_future_step_is_a_lost_peer(ring: Ring) -> None:
    side, _, feeding = ring
    side.send(1, b"mine", late=False)
    feeding.sendall(message(2, b"", AGAIN))
    with pytest.raises(PeerLost):
        side.receive()


def test_an_announced_state_takes_no_memory_before_it_arrives(ring: Ring) -> None:
    side, _, feeding = ring
    [incoming] = side._incoming
    feeding.sendall(struct.pack("<qqq", 1, 1 << 30, 0) + bytes(100_000))
    while incoming.pull():
        assert incoming.take(1, side._on_again) is None
    assert len(incoming._room) < 1 << 20


@pytest.mark.parametrize(
    "wrong", [message(2, b""), struct.pack("<qqq", 1, -1, 0), struct.pack("<qqq", 1, 1 << 40, 0)]
)
def test_a_message_that_is_not_of_this_step_is_a_lost_peer(ring: Ring, wrong: bytes) -> None:
    side, _, feeding = ring
    side.send(1, b"mine", late=False)
    feeding.sendall(wrong)
    with pytest.raises(PeerLost):
        side.receive()


def test_the_loss_of_a_peer_is_reported(ring: Ring) -> None:
    side, theirs, feeding = ring
    feeding.close()
    side.send(1, b"mine", late=False)
    with pytest.raises(PeerLost, match="closed by peer"):
        side.receive()
    theirs.close()
    with pytest.raises(PeerLost, match="rank 1"):
        side.send(2, b"mine", late=False)


SECRET = b"0123456789abcdef"
OTHER = b"0123456789ABCDEF"


def test_unknown_connections_delay_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as opened:

        def come(said: bytes = b"") -> socket.socket:
            found = opened.enter_context(socket.create_connection(listener.getsockname(), 30))
            found.sendall(said)
            return found

        come(b"fedcba9876543210")
        silent = [come(SECRET[:7] if n % 2 else b"") for n in range(MAX_UNIDENTIFIED - 2)]
        peer = come(SECRET[:3])
        threading.Timer(0.05, peer.sendall, (SECRET[3:],)).start()
        other = come(OTHER)
        found = _accept(listener, (SECRET, OTHER), time.monotonic() + 30.0)
        for each in found:
            opened.enter_context(each)
        assert [each.getpeername() for each in found] == [peer.getsockname(), other.getsockname()]
        for each in silent:
            assert each.recv(1) == b"", "the connections must be closed"


def test_a_peer_that_does_not_connect_is_waited_for_until_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TimeoutError):
        _accept(listener, (SECRET,), time.monotonic() + 0.05)
