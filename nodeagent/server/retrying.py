"""Starts a server, and tries again while another process holds its address.

Any user of the host can take the port while the agent is down. The agent watches the node and publishes its
health nevertheless, and reports the problem.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from nodeagent.server.http_api import STOP_S, AddressTaken, CannotListen, HttpServer

RETRY_S = 10.0  # a try takes less than a millisecond


class RetryingServer:
    """A server that may begin to listen later."""

    def __init__(
        self,
        option: str,
        server: HttpServer,
        note: Callable[[Mapping[str, Any]], None],
        retry_s: float = RETRY_S,
    ) -> None:
        """Take the server.

        Args:
            option: The option of the command line that gives the address.
            note: Writes to the log when the server begins to listen late.
        """
        self.problem = ""  # why the server does not listen now
        self._option, self._server, self._note, self._retry_s = option, server, note, retry_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._retry, name=f"retry{option}", daemon=True)

    @property
    def address(self) -> str:
        """Return where the server listens; "" if it does not listen yet."""
        return "" if self.problem else self._server.address

    def start(self) -> None:
        """Start the server, now or when the other process has left its address. Raises CannotListen."""
        try:
            self._server.start()
        except AddressTaken as error:
            self._take_problem(error)
            self._thread.start()

    def stop(self) -> None:
        """Stop listening and trying."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        self._server.stop()

    def _take_problem(self, error: CannotListen) -> None:
        retries = f"the agent runs without it, and tries again every {self._retry_s:g} s"
        self.problem = f"{self._option} {error}; {retries}"

    def _retry(self) -> None:
        while not self._stopping.wait(self._retry_s):
            try:
                self._server.start(asks=False)
            except CannotListen as error:
                self._take_problem(error)
                continue
            self.problem = ""
            self._note({"event": "listening", self._option.strip("-").replace("-", "_"): self.address})
            return
