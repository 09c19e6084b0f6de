"""Binds the agent's addresses, if necessary alongside a process that no longer answers on them.

A process that cannot be ended (see `agent.claim`) also keeps its port. The agent permits another process of
the same user to listen on the port too (SO_REUSEPORT), but the kernel would then spread the connections over
both. A one-instruction filter directs them all to the new socket. While a healthy agent of the same user or
of root answers on the port, the address is in use. Any other process that holds the port must not prevent an
agent from starting: see `retrying`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import time
from contextlib import ExitStack, suppress

from holdfast.process.network import SERVER_BACKLOG

ANSWER_S = 5.0  # a living agent answers within milliseconds
_SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN = 0x06  # the instruction BPF_RET | BPF_K: its constant is the number of the socket in the group
_MOST_STALE = 7  # sockets of processes that have not ended
_TRIALS = 8  # connections that must all reach the socket
_TRIAL_S = 0.2
_MAX_ANSWER = 4096  # bytes
_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENS = "0A"


class HeldByOther(OSError):
    """The address is in use, but by no healthy agent of this user or of root."""


def listen(host: str, port: int, answer_s: float = ANSWER_S, *, asks: bool = True) -> list[socket.socket]:
    """Return listening sockets on all addresses of `host`.

    Args:
        asks: False to raise HeldByOther for any address in use, without asking the process that holds it.

    Raises:
        HeldByOther: An address is in use, and a later call may succeed.
        OSError: An address is in use by a healthy agent, or is not local.
    """
    # As bytes, because Python would load tables for international names (0.2 MB) to encode text.
    found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                sockets.append(opened.enter_context(_bound(family, address)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                answer = _answer(family, address, answer_s) if asks else b""
                if answer is not None:
                    if _is_agents(answer) and _owners(port) <= {0, os.geteuid()}:
                        raise
                    raise HeldByOther(*error.args) from None
                sockets.append(opened.enter_context(_taken_over(family, address)))
        opened.pop_all()
    return sockets


def _bound(family: int, address: tuple[object, ...], *, beside: bool = False) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if beside:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        # The option is set only after an exclusive bind, so it lets a successor share this process's port,
        # but does not let this process share another's.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.listen(SERVER_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _answer(family: int, address: tuple[object, ...], answer_s: float) -> bytes | None:
    """Return what the process on an address answers to a probe; None if it does not answer in time."""
    until, found = time.monotonic() + answer_s, b""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as asking:
            asking.settimeout(answer_s)
            asking.connect(address)
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
            while len(found) < _MAX_ANSWER and (left_s := until - time.monotonic()) > 0:
                asking.settimeout(left_s)
                part = asking.recv(_MAX_ANSWER)
                if not part:
                    break
                found += part
    except TimeoutError:
        return found or None
    except OSError:
        pass  # it closes the connection, or does not listen
    return found


def _is_agents(answer: bytes) -> bool:
    """Return True if an answer to the probe is that of a healthy agent."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and body == b"ok\n"


def _owners(port: int) -> set[int]:
    """Return the users whose processes listen on a port, at any address; none if that cannot be read.

    Any user can answer like an agent.
    """
    found: set[int] = set()
    for table in _TABLES:
        with suppress(OSError, ValueError, IndexError), open(table, encoding="ascii") as rows:
            next(rows, "")
            for fields in map(str.split, rows):
                if fields[3] != _LISTENS:
                    break  # sockets that listen come first
                if int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[7]))
    return found


def _taken_over(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a listener on an address whose process does not answer. Raises HeldByOther."""
    try:
        return _bound_beside(family, address)
    except OSError as error:
        raise HeldByOther(*error.args) from None


def _bound_beside(family: int, address: tuple[object, ...]) -> socket.socket:
    """Return a listener that receives all connections to an address that others also listen on."""
    listener = _bound(family, address, beside=True)
    try:
        for number in range(1, _MOST_STALE + 1):
            _direct(listener, number)
            if _receives_all(listener):
                listener.settimeout(None)
                return listener
    except OSError:
        listener.close()
        raise
    listener.close()
    raise OSError(errno.EADDRINUSE, "in use by processes that neither answer nor end")


def _direct(listener: socket.socket, number: int) -> None:
    """Direct new connections to socket `number` of the group, counted in the order of binding."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, number))
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, filter_)


def _receives_all(listener: socket.socket) -> bool:
    listener.settimeout(_TRIAL_S)
    for _ in range(_TRIALS):
        try:
            with socket.create_connection(listener.getsockname()[:2], _TRIAL_S):
                listener.accept()[0].close()
        except OSError:
            return False
    return True
