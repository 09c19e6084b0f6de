"""Binds the agent's addresses, if necessary alongside a process that no longer answers on them.

A process that cannot be ended (see `agent.claim`) also keeps its port. The agent permits another process of
the same user to listen on the port too (SO_REUSEPORT), but the kernel would then spread the connections over
both. A one-instruction filter directs them all to the new socket. If a process on the port still answers, the
address is treated as in use.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from contextlib import ExitStack

from holdfast.process.network import SERVER_BACKLOG

ANSWER_S = 5.0  # a living agent answers within milliseconds
_SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN = 0x06  # the instruction BPF_RET | BPF_K: its constant is the number of the socket in the group
_MOST_STALE = 7  # sockets of processes that have not ended
_TRIALS = 8  # connections that must all reach the socket
_TRIAL_S = 0.2


def listen(host: str, port: int, answer_s: float = ANSWER_S) -> list[socket.socket]:
    """Return listening sockets on all addresses of `host`. Raises OSError if one is in use or not local."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                sockets.append(opened.enter_context(_bound(family, address)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or _answers(family, address, answer_s):
                    raise
                sockets.append(opened.enter_context(_bound_beside(family, address)))
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


def _answers(family: int, address: tuple[object, ...], answer_s: float) -> bool:
    """Return True if the process on an address sends anything, or closes the connection, after a request."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as asking:
            asking.settimeout(answer_s)
            asking.connect(address)
            asking.sendall(b"GET /healthz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
            asking.recv(1)
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


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
