"""The launcher's socket: whoever connects hears the newest state, then every change, and gives orders.

A sign of life, an empty line, goes out at every `beat`. It comes from the loop that obeys orders: while it is
heard, they are carried out.

A state may be larger than a socket's buffer, and a sidecar may be slow to read. Then the rest of the line is
sent when there is room, and behind it only the newest state waits: nobody is waited for, and no line is torn.
"""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState

HEARTBEAT = b"\n"
FINAL_STATE_S = (
    1.0  # for the last state to be taken, at the end of a launcher: a sidecar that lives reads at once
)


class OrderRefused(Exception):
    """An order that must not be carried out; says why."""


@dataclass(slots=True)
class _Peer:
    """What has come of an unfinished line, and what is still to be sent."""

    heard: bytes = b""
    sending: bytes | memoryview = b""  # what is left of a line
    waiting: bytes = b""  # the newest line, to be sent behind it


class SidecarServer:
    """All ends of the socket that are open: one sidecar, or the one that died and its successor."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, obey: Callable[[LauncherOrder], None]
    ) -> None:
        """`obey` may raise `Refused`, which is printed."""
        self._path = path
        self._selector = selector
        self._obey = obey
        self._socket: socket.socket | None = None
        self._inode = 0  # at the path, while the socket is there
        self._peers: dict[socket.socket, _Peer] = {}
        self._told = b""

    def open(self) -> None:
        """Take connections from now on."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)
            listener.listen(4)
            self._inode = self._path.stat().st_ino
        except BaseException:
            listener.close()
            raise
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._socket = listener

    def stay(self) -> None:
        """See to it that a new sidecar finds the socket, though somebody may have removed it."""
        before = self._socket
        if before is None:
            return
        with suppress(OSError):  # such as no folder: tried again the next time
            if self._is_found():
                return
            self.open()
            self._selector.unregister(before)
            before.close()

    def _is_found(self) -> bool:
        try:
            return self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Take no more connections, and see to it that the last state is taken, for `LAST_S` at most.

        Those that are open end with the process.
        """
        if self._socket is not None:
            self._socket.close()
        self._path.unlink(missing_ok=True)
        give_up_at = time.monotonic() + FINAL_STATE_S
        while left := [peer for peer, known in self._peers.items() if known.sending]:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                return
            poller = select.poll()
            for peer in left:
                poller.register(peer, select.POLLOUT)
            poller.poll(left_s * 1e3)
            for peer in left:
                self._flush(peer)

    def tell(self, state: LauncherState) -> None:
        """Send `state` to all, unless they know it. Never waits."""
        line = codec.encode(state)
        if line != self._told:
            self._told = line
            self._send(line)

    def beat(self) -> None:
        self._send(HEARTBEAT)

    def _send(self, line: bytes) -> None:
        for peer, known in list(self._peers.items()):
            if not known.sending:
                known.sending = memoryview(line)
                self._flush(peer)
            elif line != HEARTBEAT:  # one that reads hears the state, which is a sign as well
                known.waiting = line

    def _flush(self, peer: socket.socket) -> None:
        """Send what the peer takes now; the rest when it can be written to."""
        known = self._peers[peer]
        try:
            while known.sending:
                known.sending = known.sending[peer.send(known.sending) :]
                if not known.sending:
                    known.sending, known.waiting = memoryview(known.waiting), b""
        except BlockingIOError:
            pass
        except OSError:  # gone: it will connect again and be told all
            self._drop(peer)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if known.sending else 0)
        key = self._selector.get_key(peer)
        if key.events != events:
            self._selector.modify(peer, events, key.data)

    def _accept(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        peer.setblocking(False)
        self._peers[peer] = _Peer()
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._serve(peer))
        self._told = b""

    def _serve(self, peer: socket.socket) -> None:
        self._flush(peer)
        if peer in self._peers:
            self._hear(peer)

    def _hear(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        known = self._peers[peer]
        if not data or len(known.heard) > codec.MAX_MESSAGE_BYTES:
            self._drop(peer)
            return
        *lines, known.heard = (known.heard + data).split(b"\n")
        for line in lines:
            try:
                self._obey(codec.decode(LauncherOrder, line))
            except (codec.InvalidMessage, OrderRefused) as error:
                print(f"holdfast launch: refused: {error}", flush=True)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._peers[peer]
        peer.close()
