"""A stand-in for the supervisor's API, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# From a request (method, path, Authorization, body) to the answer (status, content).
# None: close the connection without an answer.
Answer = Callable[[str, str, str, Any], "tuple[int, bytes] | None"]


@contextmanager
def api(answer: Answer) -> Iterator[str]:
    """Serve `answer`; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            said = answer(self.command, self.path, self.headers["Authorization"], body)
            if said is None:
                self.close_connection = True
                return
            self.send_response(said[0])
            self.send_header("Content-Length", str(len(said[1])))
            self.end_headers()
            self.wfile.write(said[1])

        def log_message(self, *_: Any) -> None:
            """Log nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
