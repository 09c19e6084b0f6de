"""Copy each rank's private state to another member before every optimizer step.

`PrivateStateRing` is for groups of several members. Rank r sends its private state to rank r + N, where N is
the number of ranks per member, so the copy is always on another member. If that member is on the same node,
or in the same rack while there are others, the supervisor chooses another member (`Launch.backups`), which
may then keep the states of several members. The optimizer's first write waits for the messages from all ranks
whose states this rank keeps. So if a rank dies, either its private state is in two places, or the
receiving rank still has the replicated state of the previous step.

Private state sent right after the last forward pass travels during the backward pass, so it arrives no later
than the gradients. `holdfast.training.protection.private_backup` decides when a rank may send that early. The
exchange uses its own connections, because gloo's sends and receives wake threads that compete with the ranks
for cores. With one core per rank, gloo takes 1 ms per step; these connections take 0.05 ms.

`LocalPrivateState` is for groups of one member, where the stores of all ranks are in the memory of the same
machine. A second copy is not needed, because the stores outlive their ranks and no copy could outlive the
member. But the order of events is the same: the optimizer's first write waits until the previous rank has
stored its state of the step. By then, that rank has nearly always stored its state, so the check needs to
read only 64 bytes.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import PeerLost
from holdfast.snapshot.private_store import MAX_CAPACITY_BYTES, PrivateReader

# At most this many open connections may not have sent the secret yet. If there are more, the oldest is
# closed.
MAX_UNIDENTIFIED = 16
LIMIT_S = 86_400.0  # wait this long for a live peer; if the group is broken, the launcher ends its ranks
_HEADER = struct.Struct("<qqq")  # step, number of bytes that follow, kind
# Kinds of messages. _LATE: the state may still change. _AGAIN: the final state after a _LATE one.
_FINAL, _LATE, _AGAIN = 0, 1, 2
_RANK = struct.Struct("<q")
_ADDRESS = struct.Struct("<46sH16s")  # host, port, secret
_PIECE_BYTES = 64 << 10  # most states are smaller than this
_POLL_S = 50e-6  # the interval between two checks of another rank's store


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """The private state of the rank `source`. If it is `late`, it may still change."""

    source: int
    blob: bytes
    late: bool


class PrivateStateRing:
    """One rank's end of the ring. All ranks must make the same exchanges in the same order."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        nproc: int,
        limit_s: float = LIMIT_S,
        on_again: Callable[[int, int, bytes], None] = lambda _source, _step, _blob: None,
        backups: tuple[int, ...] = (),
    ) -> None:
        """Set up the ring.

        `on_again` receives the source, the step and the blob of each `send_again`. For `backups`, see
        `Launch.backups`.
        """
        self._limit_s = limit_s
        self._on_again = on_again
        self._lock = threading.Lock()  # guards the receiving side
        self._rank = rank
        self._world_size = world_size
        self.to, self.sources = backup_and_sources(rank, world_size, nproc, backups)
        self._out: socket.socket | None = None
        self._incoming: tuple[_Incoming, ...] = ()
        self._rest = memoryview(b"")
        self._step = -1

    def connect(self, towards: str) -> None:
        """Form the ring, using the network interface that leads to the host `towards`. Collective.

        Later calls do nothing. Raises `PeerLost` if a peer does not connect, and any exception of torch's
        backend.
        """
        if self._out is not None:
            return
        host, secret = _address_towards(towards), os.urandom(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        deadline = time.monotonic() + self._limit_s
        try:
            with socket.create_server((host, 0), family=family) as listener:
                listener.settimeout(self._limit_s)
                own = _ADDRESS.pack(host.encode(), listener.getsockname()[1], secret)
                raw, port, peer_secret = _ADDRESS.unpack(_gather(own, self._world_size)[self.to])
                self._out = socket.create_connection((raw.rstrip(b"\0").decode(), port), self._limit_s)
                self._out.sendall(peer_secret + _RANK.pack(self._rank))
                expected = tuple(secret + _RANK.pack(source) for source in self.sources)
                accepted = _accept(listener, expected, deadline)
        except OSError as error:
            others = " or from rank ".join(map(str, self.sources))
            raise PeerLost(
                f"no connection to rank {self.to}{f' or from rank {others}' if others else ''}: {error}"
            ) from error
        self._incoming = tuple(_Incoming(*each) for each in zip(self.sources, accepted, strict=True))
        for each in (self._out, *accepted):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.setblocking(False)

    def send(self, step: int, blob: bytes, late: bool) -> None:
        """Start sending `blob`, without waiting. `receive` must be called next. Raises `PeerLost`."""
        self._step = step
        self._give(_HEADER.pack(step, len(blob), _LATE if late else _FINAL), blob)

    def send_again(self, step: int, blob: bytes) -> None:
        """Start sending the final state of a step whose blob was sent as late. This never waits.

        If the peer is lost, this does not raise an exception, but the next `send` raises `PeerLost`.
        """
        with suppress(PeerLost):
            self._give(_HEADER.pack(step, len(blob), _AGAIN), blob)

    def receive_again(self) -> None:
        """Receive the messages of the peers' `send_again` calls that have arrived.

        Any thread may call this. It never waits, and never raises an exception.
        """
        with self._lock:
            for each in self._incoming:
                with suppress(PeerLost, OSError, ValueError):
                    each.receive_again(self._step, self._on_again)

    def _give(self, header: bytes, blob: bytes) -> None:
        if self._rest:
            self._rest = memoryview(b"".join((self._rest, header, blob)))
            return
        sent = self._send(header, blob)
        if sent < len(header) + len(blob):
            self._rest = memoryview(header + blob)[sent:]

    def receive(self) -> tuple[ReceivedState, ...]:
        """Return the private states of all `sources`.

        This waits until all of them have arrived and this rank's own blob has been sent. Raises `PeerLost`.
        """
        deadline = time.monotonic() + self._limit_s
        found: dict[int, ReceivedState] = {}
        with self._lock:
            self._take(found)
        while len(found) < len(self._incoming) or self._rest:
            with self._lock:
                moved = self._push()
                if not moved:
                    moved = any(each.pull() for each in self._incoming if each.source not in found)
                self._take(found)
            if not moved:
                self._wait(deadline, found)
        return tuple(found.values())

    def _take(self, found: dict[int, ReceivedState]) -> None:
        """Add the states of this step that have arrived completely to `found`."""
        for each in self._incoming:
            if each.source not in found and (state := each.take(self._step, self._on_again)) is not None:
                found[each.source] = state

    def _push(self) -> bool:
        """Send as much as possible without waiting; return True if something was sent."""
        if not self._rest:
            return False
        sent = self._send(self._rest)
        self._rest = self._rest[sent:]
        return sent > 0

    def _send(self, *parts: bytes | memoryview) -> int:
        """Send as much as possible without waiting; return the number of bytes sent. Raises `PeerLost`."""
        assert self._out is not None
        try:
            return self._out.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PeerLost(f"rank {self.to}: {error}") from error

    def _wait(self, deadline: float, found: Mapping[int, ReceivedState]) -> None:
        assert self._out is not None
        left_s = deadline - time.monotonic()
        poller = select.poll()
        for each in self._incoming:
            if each.source not in found:
                poller.register(each.connection, select.POLLIN)
        if self._rest:
            poller.register(self._out, select.POLLOUT)
        if left_s <= 0 or not poller.poll(left_s * 1e3):
            silent = [each.source for each in self._incoming if each.source not in found]
            ranks = " or ".join(map(str, (*silent, self.to)))
            raise PeerLost(f"rank {ranks}: silent for {self._limit_s:.0f} s")


class _Incoming:
    """The connection from the rank `source`, and what has arrived on it."""

    def __init__(self, source: int, connection: socket.socket) -> None:
        self.source, self.connection = source, connection
        self._room = memoryview(bytearray(_PIECE_BYTES))
        self._begun = 0  # the number of received bytes in `_room`

    def pull(self) -> bool:
        """Receive what has arrived, without waiting; return True if something has. Raises `PeerLost`."""
        try:
            count = self.connection.recv_into(self._room[self._begun :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLost(f"rank {self.source}: {error}") from error
        if not count:
            raise PeerLost(f"rank {self.source}: connection closed by peer")
        self._begun += count
        return True

    def take(self, step: int, on_again: Callable[[int, int, bytes], None]) -> ReceivedState | None:
        """Remove the state of `step` from the received bytes and return it; None if it is incomplete.

        The states before it that were sent again are passed to `on_again`. Raises `PeerLost`.
        """
        while (found := self._message(step, on_again)) is not None:
            blob, kind = found
            if kind != _AGAIN:
                return ReceivedState(self.source, blob, kind == _LATE)
        return None

    def receive_again(self, step: int, on_again: Callable[[int, int, bytes], None]) -> None:
        """Pass the states that were sent again and have arrived to `on_again`. Raises `PeerLost`."""
        while True:
            moved = self.pull()
            if self._begun >= _HEADER.size and _HEADER.unpack_from(self._room)[2] != _AGAIN:
                return
            if self._message(step, on_again) is None and not moved:
                return

    def _message(self, now: int, on_again: Callable[[int, int, bytes], None]) -> tuple[bytes, int] | None:
        """Remove a message from the received bytes; return its blob and kind, or None if it is incomplete."""
        room, begun = self._room, self._begun
        if begun < _HEADER.size:
            return None
        step, length, kind = _HEADER.unpack_from(room)
        due = 0 <= step <= now if kind == _AGAIN else step == now
        if not due or not 0 <= length <= MAX_CAPACITY_BYTES:
            raise PeerLost(
                f"rank {self.source} sent the state of step {step} ({length} bytes), expected step {now}"
            )
        end = _HEADER.size + length
        if begun < end:
            if begun == len(room):  # grow gradually, because the header may announce bytes that never arrive
                self._room = memoryview(bytearray(min(end, 2 * begun) + _PIECE_BYTES))
                self._room[:begun] = room
            return None
        blob = bytes(room[_HEADER.size : end])
        room[: begun - end] = bytes(room[end:begun])  # keep what has arrived of the next message
        self._begun = begun - end
        if kind == _AGAIN:
            on_again(self.source, step, blob)
        return blob, kind


def backup_and_sources(
    rank: int, world_size: int, nproc: int, backups: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """Return the rank that keeps the private state of `rank`, and the ranks whose states `rank` keeps.

    For `backups`, see `Launch.backups`.
    """
    block, local = divmod(rank, nproc)
    if not backups:
        return (rank + nproc) % world_size, ((rank - nproc) % world_size,)
    kept = (other * nproc + local for other, backup in enumerate(backups) if backup == block)
    return backups[block] * nproc + local, tuple(kept)


def _address_towards(towards: str) -> str:
    """Return this machine's address on the route to the host `towards`, without sending anything."""
    family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _gather(own: bytes, world_size: int) -> list[bytes]:
    """Return, by rank, the bytes that each rank has passed as `own`. Collective."""
    import torch
    import torch.distributed as dist

    given = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    found = [torch.empty_like(given) for _ in range(world_size)]
    dist.all_gather(found, given)
    return [bytes(each.tolist()) for each in found]


def _accept(listener: socket.socket, secrets: tuple[bytes, ...], deadline: float) -> list[socket.socket]:
    """For each secret, in order, return the first connection that sends it. Close all others.

    The secrets are distinct and of equal length. The function does not wait for other connections. Raises
    TimeoutError if a secret has not been sent by the deadline.
    """
    received: dict[socket.socket, bytes] = {}  # the bytes from each connection; oldest first
    known: dict[bytes, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while len(known) < len(secrets) and time.monotonic() < deadline:
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    if key.fileobj is listener:
                        accepted = _accept_one(listener)
                        received[accepted] = b""
                        selector.register(accepted, selectors.EVENT_READ)
                        continue
                    found = [each for each in received if each is key.fileobj]
                    for connection in found:  # empty if it has just been closed
                        missing = len(secrets[0]) - len(received[connection])
                        received[connection] += _receive_some(connection, missing)
                        if received[connection] in secrets and received[connection] not in known:
                            selector.unregister(connection)
                            known[received.pop(connection)] = connection
                for stranger in _to_be_closed(received, [each for each in secrets if each not in known]):
                    del received[stranger]
                    selector.unregister(stranger)
                    stranger.close()
        finally:
            for each in received:
                each.close()
            if len(known) < len(secrets):
                for each in known.values():
                    each.close()
    if len(known) < len(secrets):
        raise TimeoutError("no peer connected in time")
    return [known[each] for each in secrets]


def _accept_one(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.setblocking(False)
    return connection


def _receive_some(connection: socket.socket, most: int) -> bytes:
    """Return the next bytes of a connection, at most `most`; empty if none have arrived.

    If the connection has ended, return more than `most` bytes, which makes the caller close it.
    """
    try:
        return connection.recv(most) or bytes(most + 1)
    except BlockingIOError:
        return b""
    except OSError:
        return bytes(most + 1)


def _to_be_closed(received: Mapping[socket.socket, bytes], secrets: Sequence[bytes]) -> list[socket.socket]:
    """Return the connections that must be closed, while the `secrets` are still expected.

    These are the connections that sent wrong bytes. If there are too many other connections, the result also
    includes the oldest of them.
    """
    wrong = [
        each for each, sent in received.items() if not any(secret.startswith(sent) for secret in secrets)
    ]
    slow = [each for each in received if each not in wrong]
    # Each expected rank may also have connected, and be about to send its secret.
    return wrong + slow[: max(0, len(slow) - MAX_UNIDENTIFIED - len(secrets) + 1)]


class LocalPrivateState:
    """One rank's end of the exchange in a group of one member.

    Nothing is sent. This rank only waits until rank `source` has put its state into its own store, the file
    `path`.
    """

    def __init__(self, path: Path, source: int, generation: int, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.source = source
        self._store = PrivateReader(path)
        self._generation = generation
        self._step = -1

    def connect(self, _towards: str) -> None:
        """Do nothing, because no connection is needed."""

    def send(self, step: int, _blob: bytes, _late: bool) -> None:
        """Record the step, but send nothing, because the other rank reads this rank's store.

        `receive` must be called next.
        """
        self._step = step

    def send_again(self, _step: int, _blob: bytes) -> None:
        """Do nothing, because the other rank reads this rank's store."""

    def receive_again(self) -> None:
        """Do nothing, because nothing is sent."""

    def receive(self) -> tuple[ReceivedState, ...]:
        """Wait until `source` has stored its state of this or a later step. Raises `PeerLost`.

        Returns no states, because nothing is sent.
        """
        deadline = 0.0
        while self._store.stored(self._generation, self._step) is None:
            deadline = deadline or time.monotonic() + self._limit_s
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"rank {self.source} stored no private state of step {self._step}"
                    f" within {self._limit_s:.0f} s"
                )
            time.sleep(_POLL_S)
        return ()
