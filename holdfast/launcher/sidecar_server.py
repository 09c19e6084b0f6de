"""The launcher's socket: sidecars receive the newest state, then every change, and send orders.

The launcher's main loop calls `beat` to send a heartbeat, an empty line, which proves that the loop is
running.

A state may be larger than the socket's buffer, and a sidecar may be slow to read. The server then sends the
rest of the line when there is room, followed by the newest state only. No send ever blocks, and no line is
truncated.
"""

from __future__ import annotations

import math
import os
import select
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.fileio import folder_rights
from holdfast.launcher.sidecar_contact import SidecarContact
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState

HEARTBEAT = b"\n"
# The time limit for sending the last state when the launcher exits. A live sidecar reads it immediately.
FINAL_STATE_S = 1.0


class OrderRefused(Exception):
    """The order must not be carried out. The message gives the reason."""


@dataclass(slots=True)
class _Peer:
    """An open connection: the incomplete line received so far, and the data still to send."""

    received: codec.LineBuffer = field(default_factory=codec.LineBuffer)
    sending: bytes | memoryview = b""  # the unsent part of a line
    waiting: bytes = b""  # the newest line, to be sent after `sending`


class SidecarServer:
    """Serves all open connections: usually one, and briefly two while a new sidecar replaces an old one."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        obey: Callable[[LauncherOrder], None],
        first_s: float = math.inf,
    ) -> None:
        """`obey` may raise `OrderRefused`; its message is printed.

        `first_s` limits the wait for the first sidecar. If it is not infinite, absences are printed as well.
        """
        self._path = path
        self._selector = selector
        self._obey = obey
        self._socket: socket.socket | None = None
        self._inode = 0  # the inode of the socket's file
        self._peers: dict[socket.socket, _Peer] = {}
        self._newest = b""  # the line of the last state sent
        self._contact = SidecarContact(first_s, time.monotonic())

    @property
    def is_connected(self) -> bool:
        """True while a sidecar is connected."""
        return bool(self._peers)

    def open(self) -> None:
        """Start accepting connections."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(folder_rights.file_mode(self._path.parent))
            listener.listen(4)
            self._inode = self._path.stat().st_ino
        except BaseException:
            listener.close()
            raise
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._socket = listener

    def keep_socket(self) -> None:
        """Recreate the socket if its file was removed, to let a new sidecar connect."""
        before = self._socket
        if before is None:
            return
        with suppress(OSError):  # for example, the directory is missing; the next call tries again
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
        """Stop accepting connections, and wait at most `FINAL_STATE_S` until the last state has been sent.

        The open connections are closed when the process exits.
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

    def send_state(self, state: LauncherState) -> None:
        """Send `state` to all connections, unless it equals the last state sent. Never waits."""
        line = codec.encode(state)
        if line != self._newest:
            self._newest = line
            self._send(line)

    def beat(self) -> None:
        """Send a heartbeat to all connections. Never waits."""
        self._send(HEARTBEAT)

    def follow_contact(self, now_s: float) -> None:
        """Print each long absence of a sidecar once, and its end."""
        if math.isinf(self._contact.limit_s):
            return
        self._contact, news = self._contact.later(self.is_connected, now_s)
        if news:
            own = f"running as user {os.geteuid()}, socket {self._path}"
            print(f"holdfast launch: {news} ({own})", flush=True)

    def is_given_up(self, now_s: float) -> bool:
        """Return True if no sidecar has connected within the limit. Call `follow_contact` first."""
        return self._contact.is_over(now_s)

    def _send(self, line: bytes) -> None:
        for peer, known in list(self._peers.items()):
            if not known.sending:
                known.sending = memoryview(line)
                self._flush(peer)
            elif line != HEARTBEAT:  # if a state is being sent, no heartbeat is needed
                known.waiting = line

    def _flush(self, peer: socket.socket) -> None:
        """Send as much as the peer accepts now. The remainder follows when its socket becomes writable."""
        known = self._peers[peer]
        try:
            while known.sending:
                known.sending = known.sending[peer.send(known.sending) :]
                if not known.sending:
                    known.sending, known.waiting = memoryview(known.waiting), b""
        except BlockingIOError:
            pass
        except OSError:  # the sidecar has disconnected, and receives the complete state when it reconnects
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
        self._newest = b""  # so that the next state counts as a change and is sent

    def _serve(self, peer: socket.socket) -> None:
        self._flush(peer)
        if peer in self._peers:
            self._receive(peer)

    def _receive(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        received = self._peers[peer].received
        if not data or received.is_overlong:
            self._drop(peer)
            return
        for line in received.split(data):
            try:
                self._obey(codec.decode(LauncherOrder, line))
            except (codec.InvalidMessage, OrderRefused) as error:
                print(f"holdfast launch: refused: {error}", flush=True)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._peers[peer]
        peer.close()
