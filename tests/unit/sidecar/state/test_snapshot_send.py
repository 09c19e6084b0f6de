"""Snapshot transfers within one host are not paced by congestion control."""

from __future__ import annotations

import socket

from sidecar.state import snapshot_send

ROOM = 16  # the maximum length of a congestion control's name


def congestion_of(line: socket.socket) -> bytes:
    return line.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, ROOM).rstrip(b"\0")


def accepted(listener: socket.socket) -> bytes:
    """Return the congestion control of a connection to `listener`, on the side that sends snapshots."""
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        line, _ = listener.accept()
        with line:
            return congestion_of(line)


def test_transfers_to_a_peer_of_the_same_host_are_not_paced() -> None:
    with snapshot_send.listener("127.0.0.1") as listener:
        assert accepted(listener) == b"reno"


def test_transfers_to_another_host_use_the_systems_congestion_control() -> None:
    with socket.create_server(("127.0.0.1", 0)) as plain, snapshot_send.listener("0.0.0.0") as listener:
        assert accepted(listener) == accepted(plain)
