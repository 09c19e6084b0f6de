"""The launcher's socket: whoever connects hears the newest state, then every change, and gives orders.

A sign of life, an empty line, goes out at every `beat`. It comes from the loop that obeys orders: while it is
heard, they are carried out.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from holdfast import wire
from holdfast.launcher_messages import LauncherOrder, LauncherState

SIGN = b"\n"


class Refused(Exception):
    """An order that must not be carried out; says why."""


class Listeners:
    """All ends of the socket that are open: one sidecar, or the one that died and its successor."""

    def __init__(
        self, path: Path, selector: selectors.BaseSelector, obey: Callable[[LauncherOrder], None]
    ) -> None:
        """`obey` may raise `Refused`, which is printed."""
        self._path = path
        self._selector = selector
        self._obey = obey
        self._socket: socket.socket | None = None
        self._peers: dict[socket.socket, bytes] = {}  # and what was heard of an unfinished line
        self._told = b""

    def open(self) -> None:
        """Take connections from now on."""
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        self._path.chmod(0o600)
        listener.listen(4)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._socket = listener

    def close(self) -> None:
        """Take no more connections. Those that are open end with the process."""
        if self._socket is not None:
            self._socket.close()
        self._path.unlink(missing_ok=True)

    def tell(self, state: LauncherState) -> None:
        """Send `state` to all, unless they know it."""
        line = wire.encode(state)
        if line != self._told:
            self._told = line
            self._send(line)

    def beat(self) -> None:
        self._send(SIGN)

    def _send(self, line: bytes) -> None:
        for peer in list(self._peers):
            try:
                peer.sendall(line)
            except OSError:  # gone, or it does not read: it will connect again and be told all
                self._drop(peer)

    def _accept(self, listener: socket.socket) -> None:
        peer, _ = listener.accept()
        peer.setblocking(False)
        self._peers[peer] = b""
        self._selector.register(peer, selectors.EVENT_READ, lambda: self._hear(peer))
        self._told = b""

    def _hear(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data or len(self._peers[peer]) > wire.MAX_MESSAGE_BYTES:
            self._drop(peer)
            return
        *lines, self._peers[peer] = (self._peers[peer] + data).split(b"\n")
        for line in lines:
            try:
                self._obey(wire.decode(LauncherOrder, line))
            except (wire.Malformed, Refused) as error:
                print(f"holdfast launch: refused: {error}", flush=True)

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        del self._peers[peer]
        peer.close()
