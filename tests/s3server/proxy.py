"""A TCP proxy that cuts or stops the connections through it after some bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 64 << 10


class Proxy:
    """Forwards connections to `port`.

    The next `faulty` connections pass only `limit_bytes` in the direction `of`, "up" or "down". After that,
    the proxy cuts the connection or, with `stops`, keeps it open but passes no more bytes.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.faulty, self.limit_bytes, self.of, self.stops = 0, 0, "up", False
        self.faults = 0
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for each in self._open:
                _cut(each)
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with self._lock:
                self._open += [client, server]
                faulty, self.faulty = self.faulty > 0, max(0, self.faulty - 1)
            for source, sink, way in ((client, server, "up"), (server, client, "down")):
                limit = self.limit_bytes if faulty and way == self.of else None
                threading.Thread(target=self._forward, args=(source, sink, limit), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if limit is not None:
                    piece, limit = piece[:limit], limit - len(piece)
                sink.sendall(piece)
                if limit is not None and limit <= 0:
                    self.faults += 1
                    if self.stops:
                        return  # both stay open
                    break
        _cut(source)
        _cut(sink)


def _cut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
