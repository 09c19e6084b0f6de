from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from aiohttp import web

from nodeagent import serving
from nodeagent.serving import CannotListen, Server


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def made(port: int = 0) -> Server:
    app = web.Application()
    app.router.add_get("/", hello)
    return Server(app, "127.0.0.1", port)


@pytest.fixture
def server() -> Iterator[Server]:
    found = made()
    found.start()
    yield found
    found.stop()


def asked(connection: socket.socket, headers: str = "") -> bytes:
    connection.settimeout(10)
    connection.sendall(f"GET / HTTP/1.1\r\nHost: here\r\n{headers}\r\n".encode())
    return connection.recv(1000)


def test_so_many_connections_and_no_more(server: Server) -> None:
    def one() -> socket.socket:
        return opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))

    with ExitStack() as opened:
        held = [one() for _ in range(serving.MAX_CONNECTIONS)]
        assert all(b"200 OK" in asked(each) for each in held)
        too_many = one()
        assert too_many.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert too_many.recv(1) == b""
        assert b"200 OK" in asked(held[0], "Connection: close\r\n")
        assert held[0].recv(1) == b""
        assert b"200 OK" in asked(one())


def test_an_address_that_is_taken_is_named(server: Server) -> None:
    with pytest.raises(CannotListen, match=f"127.0.0.1:{server.port}: .*in use"):
        made(server.port).start()
