"""The launcher's end of the socket between sidecar and launcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

LIMIT_S = 20.0


class Launcher:
    """Sends a test's messages, and collects the messages that it receives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.came: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, str(self.path))
        try:
            yield
        finally:
            server.close()
            while not self.came.empty():
                self.came.get_nowait().close()
            self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.came.put_nowait(writer)
        while line := await reader.readline():
            self.heard.put_nowait(line)
        writer.close()
