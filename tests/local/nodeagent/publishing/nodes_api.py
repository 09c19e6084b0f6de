"""An HTTPS server that receives the patches of one Node object, and answers as a test specifies.

It replaces the API server in tests that need a server that is slow, refuses requests or is unavailable. The
tests in tests/cluster/api use a real API server.
"""

from __future__ import annotations

import datetime
import http.server
import json
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supervisor.kubernetes import certificates

PATIENCE_S = 30.0
HOST = "127.0.0.1"

Patch = dict[str, Any]


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing, because agents may end while they wait for an answer."""


class NodesApi:
    """The server, what it has received, and the service account that it accepts."""

    def __init__(self, folder: Path) -> None:
        """`folder` becomes the folder of the service account."""
        self.received: list[Patch] = []
        self.heads: list[tuple[str, dict[str, str]]] = []  # path and headers of each request
        self.tries = 0
        self.answer: Callable[[], tuple[int, dict[str, str]]] = lambda: (200, {})
        self.account = folder
        self._changed = threading.Condition()
        now = datetime.datetime.now(datetime.timezone.utc)
        authority = certificates.new_authority(now)
        leaf = certificates.new_leaf(authority, ["api"], [HOST], now)
        (folder / "ca.crt").write_text(certificates.bundle([authority]))
        (folder / "token").write_text("first\n")
        chain = folder / "chain.pem"
        chain.write_bytes(leaf.chain)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(chain)
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen on the same port as before."""
        self._server = _Server((HOST, self.port), self._handler())
        self._server.socket = self._tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def words(self) -> tuple[str, ...]:
        """The options with which an agent publishes here."""
        return (
            "--publish", "--node-name", "node1", "--api-server", f"{HOST}:{self.port}",
            "--service-account", str(self.account),
        )  # fmt: skip

    def until(self, holds: Callable[[Patch], bool], after: int = 0) -> Patch:
        """Return the first patch after number `after` that satisfies `holds`."""
        give_up_s = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                for each in self.received[after:]:
                    if holds(each):
                        return each
                if not self._changed.wait(max(0.0, give_up_s - time.monotonic())):
                    raise AssertionError(json.dumps(self.received[after:], indent=1))

    def until_tried(self, count: int) -> None:
        """Return after `count` requests have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.tries >= count, PATIENCE_S), self.tries

    def _handler(api) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PATCH(self) -> None:
                patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers = api.answer()
                message = "it is refused" if status >= 400 else "fine"
                text = json.dumps({"kind": "Status", "message": message}).encode()
                with api._changed:
                    api.tries += 1
                    api.heads.append((self.path, dict(self.headers.items())))
                    if status == 200:
                        api.received.append(patch)
                    api._changed.notify_all()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(text))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None: ...

        return Handler


def statuses(patch: Patch) -> dict[str, str]:
    return {each["type"]: f"{each['status']} {each['reason']}" for each in patch["status"]["conditions"]}
