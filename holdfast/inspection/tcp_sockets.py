"""List the TCP connections of this network namespace through the kernel's socket monitoring, sock_diag(7).

Unlike /proc/net/tcp, it shows how many bytes each end has received in total, and how many of its bytes the
peer has acknowledged. If all counts are the same in two readings, no byte was sent or received in between.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

ESTABLISHED, LISTEN = 1, 10  # TCP_*: include/net/tcp_states.h
_TIME_WAIT = 6
_SOCK_DIAG = 4  # NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR: the tables changed during the dump, and something may be missing
_ERROR, _DONE = 2, 3  # NLMSG_*
_INFO = 2  # INET_DIAG_INFO: struct tcp_info
_HEADER = struct.Struct("=IHHII")  # nlmsghdr
_WANTED = struct.Struct("=BBBBI48x")  # inet_diag_req_v2: family, protocol, extensions, -, states, socket
_QUEUES = struct.Struct("=IIII")  # of inet_diag_msg: rqueue, wqueue, uid, inode
_QUEUES_AT, _ATTRIBUTES_AT = 56, 72
_BYTES = struct.Struct("=QQ")  # of tcp_info: bytes_acked, bytes_received
_BYTES_AT = 120
_ATTRIBUTE = struct.Struct("=HH")  # length, kind
_PART_BYTES = 1 << 16
# The limit on the number of messages in one answer. A rank has about a hundred connections, and reading many
# more would take too long.
_MAX_PARTS = 256
_ANSWER_S = 1.0  # the time limit for an answer; the kernel normally answers within the requesting call


@dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection.

    Addresses look like "127.0.0.1:80". IPv4 addresses also have this form if the socket is an IPv6 socket.
    """

    inode: int  # the inode of its socket
    state: int
    local: str
    remote: str
    # The number of bytes that its process has not read yet. For a listener, this is the number of connections
    # that its process has not accepted yet.
    unread: int
    unsent: int  # the number of bytes that its process has written and its peer has not acknowledged
    received: int  # the total number of bytes received so far
    acknowledged: int  # the total number of bytes that the peer has acknowledged so far

    @property
    def on_one_host(self) -> bool:
        """True if both ends have the same address, which means that no other machine is involved."""
        return self.local.rpartition(":")[0] == self.remote.rpartition(":")[0]


def connections() -> dict[int, Connection]:
    """Return the endpoints of all connections, by the inodes of their sockets.

    Raises `OSError` if the kernel does not list them.
    """
    found: dict[int, Connection] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        found |= {each.inode: each for each in parse(_asked(family))}
    return found


def _asked(family: int) -> Iterator[bytes]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as line:
        line.settimeout(_ANSWER_S)
        wanted = _WANTED.pack(family, socket.IPPROTO_TCP, 1 << _INFO - 1, 0, 0xFFFFFFFF & ~(1 << _TIME_WAIT))
        header = _HEADER.pack(_HEADER.size + len(wanted), _BY_FAMILY, _REQUEST_DUMP, 1, 0)
        line.sendto(header + wanted, (0, 0))
        for _ in range(_MAX_PARTS):
            part = line.recv(_PART_BYTES)
            yield part


def parse(parts: Iterable[bytes]) -> Iterator[Connection]:
    """Yield the ends of connections that an answer lists. Raises `OSError` if the answer is incomplete."""
    for part in parts:
        at = 0
        while at + _HEADER.size <= len(part):
            length, kind, flags, _, _ = _HEADER.unpack_from(part, at)
            if kind == _DONE and not flags & _INTERRUPTED:
                return
            if kind != _BY_FAMILY or flags & _INTERRUPTED or not _HEADER.size < length <= len(part) - at:
                raise OSError("the kernel does not list the connections")
            message = part[at + _HEADER.size : at + length]
            if len(message) < _ATTRIBUTES_AT:
                raise OSError("the kernel reports a connection in an unexpected format")
            if _QUEUES.unpack_from(message, _QUEUES_AT)[-1]:  # otherwise no process has the socket open
                yield _connection(message)
            at += (length + 3) & ~3
    raise OSError("the kernel's list of connections is incomplete")


def _connection(message: bytes) -> Connection:
    family, state = message[0], message[1]
    local_port, remote_port = struct.unpack_from("!HH", message, 4)
    unread, unsent, _, inode = _QUEUES.unpack_from(message, _QUEUES_AT)
    information = _attribute(message, _INFO)
    if len(information) < _BYTES_AT + _BYTES.size:
        raise OSError("the kernel does not count the bytes of a connection")
    acknowledged, received = _BYTES.unpack_from(information, _BYTES_AT)
    size = 4 if family == socket.AF_INET else 16
    return Connection(
        inode,
        state,
        f"{_address(message[8 : 8 + size])}:{local_port}",
        f"{_address(message[24 : 24 + size])}:{remote_port}",
        unread,
        unsent,
        received,
        acknowledged,
    )


def _address(raw: bytes) -> str:
    found = ip_address(raw)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _attribute(message: bytes, wanted: int) -> bytes:
    at = _ATTRIBUTES_AT
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return b""
        if kind == wanted:
            return message[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return b""
