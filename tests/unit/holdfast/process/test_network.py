"""The port for a rendezvous is one that no other connection is likely to take."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.process import network


def kernels_range(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "range").write_text(text)
    monkeypatch.setattr(network, "_RANGE", folder / "range")


def test_a_port_is_outside_the_range_of_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    held = [network.listen("127.0.0.1") for _ in range(20)]
    numbers = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    assert len(set(numbers)) == 20
    assert not [number for number in numbers if low <= number <= high]


def test_a_port_that_was_closed_can_be_bound_again_at_once() -> None:
    held = network.listen("127.0.0.1")
    address = held.getsockname()
    with socket.create_connection(address):
        held.close()
    with socket.create_server(address):
        pass


@pytest.mark.parametrize("text", ["1024 65535", "15000\t31999"])
def test_if_every_port_is_in_that_range_any_port_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    kernels_range(monkeypatch, tmp_path, text)
    held = network.listen("127.0.0.1")
    assert held.getsockname()[1] > 0
    held.close()


@pytest.mark.parametrize("text", ["", "a b", "1 2 3"])
def test_an_unreadable_range_is_the_kernels_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    kernels_range(monkeypatch, tmp_path, text)
    with network.listen("127.0.0.1") as held:
        assert network.LOW <= held.getsockname()[1] < network.HIGH


def test_an_address_that_this_machine_does_not_have_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        network.listen("192.0.2.1")


@pytest.mark.parametrize(
    ("authorization", "known"),
    [
        ("Bearer secret", True),
        ("Bearer secre", False),
        ("Bearer secret ", False),
        ("bearer secret", False),
        ("secret", False),
        ("", False),
        ("Bearer \udcff", False),
        ("Bearer s\N{LATIN SMALL LETTER E WITH ACUTE}cret", False),
    ],
)
def test_only_a_header_with_the_whole_token_is_accepted(authorization: str, known: bool) -> None:
    assert network.has_token(authorization, "secret") == known


@pytest.mark.parametrize(("after_s", "idle_s", "interval_s"), [(5.0, 2, 1), (10.0, 5, 2), (1.0, 1, 1)])
def test_a_connection_to_a_host_that_answers_nothing_ends(
    after_s: float, idle_s: int, interval_s: int
) -> None:
    with socket.socket() as made:
        network.end_if_unreachable(made, after_s)
        tcp = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = [made.getsockopt(socket.IPPROTO_TCP, each) for each in tcp]
        assert found == [after_s * 1000, idle_s, interval_s, 2]
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_connection_that_is_not_tcp_is_left_alone() -> None:
    one, other = socket.socketpair()
    with one, other:
        network.end_if_unreachable(one, 5.0)
