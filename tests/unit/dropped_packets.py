"""Make a socket behave as if all packets to it were dropped."""

from __future__ import annotations

import ctypes
import socket
import struct

SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes


def drop_all(connection: socket.socket) -> None:
    """Let the kernel drop all packets to `connection`, so that it answers none of them from now on."""
    program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
    described = struct.pack("HL", 1, ctypes.addressof(program))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, described)
