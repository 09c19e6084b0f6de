"""A sidecar finds out which neighbours it cannot reach, and only while its ranks are held up."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from sidecar.watch import neighbour_probe
from sidecar.watch.neighbour_probe import FIRST_S, GAP_S, MISSES, PERIOD_S, STARTED_S, NeighbourProbe

ONE, OTHER = "http://10.0.0.1:7", "http://10.0.0.2:7"


class Hosts:
    """Hosts that answer, or do not."""

    def __init__(self) -> None:
        self.away: set[str] = set()
        self.unknown: set[str] = set()

    async def reaches(self, url: str) -> bool | None:
        return None if url in self.unknown else url not in self.away


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    made = Hosts()
    monkeypatch.setattr(neighbour_probe, "_reaches", made.reaches)
    return made


def poll(
    probe: NeighbourProbe,
    now_s: float,
    generation: int = 1,
    must_reach: tuple[str, ...] = (),
    must_confirm: tuple[str, ...] = (),
    *,
    late: bool,
    settled: bool,
) -> bool:
    """Poll as the sidecar does. Return whether the neighbours were probed."""
    due = probe.take_turn(generation, (ONE, OTHER), now_s, is_late=late, settled=settled)
    if due:
        asyncio.run(probe.probe((ONE, OTHER), now_s, must_reach, must_confirm))
    return due


def test_a_neighbour_counts_as_out_of_reach_after_several_failed_attempts(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    assert poll(probe, 0.0, late=False, settled=True)
    hosts.away = {OTHER}
    for number in range(MISSES):
        assert not probe.unreached
        assert poll(probe, 100.0 + number * PERIOD_S, late=True, settled=True)
    assert probe.unreached == (OTHER,)
    hosts.away = set()
    poll(probe, 200.0, late=True, settled=True)
    assert not probe.unreached


def test_while_the_group_trains_nothing_is_probed_after_the_first_success(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    assert [poll(probe, float(second), late=False, settled=True) for second in range(20)].count(True) == 1
    hosts.away = {OTHER}
    probe = NeighbourProbe()
    found = [poll(probe, float(second), late=False, settled=True) for second in range(20)]
    assert [second for second, due in enumerate(found) if due] == [0, FIRST_S]
    assert not probe.unreached


def test_a_neighbour_that_was_never_reached_is_not_reported(hosts: Hosts) -> None:
    """For example, a network policy of its pod allows only the connections of the ranks."""
    hosts.away = {ONE}
    probe = NeighbourProbe()
    for second in range(20):
        poll(probe, float(second), late=True, settled=True)
    assert not probe.unreached
    hosts.away = {ONE, OTHER}
    for second in range(20, 40):
        poll(probe, float(second), late=True, settled=True)
    assert probe.unreached == (OTHER,)
    assert probe.unreached_s == 39 - (20 + MISSES - 1), "between the attempts that have shown it"


def test_a_neighbour_that_must_be_reached_is_reported_although_it_was_never_reached(hosts: Hosts) -> None:
    hosts.away = {ONE, OTHER}
    probe = NeighbourProbe()
    for second in range(20):
        poll(probe, float(second), must_reach=(OTHER,), late=False, settled=False)
    assert probe.unreached == (OTHER,)


def test_nothing_must_be_reached_if_no_neighbour_ever_was(hosts: Hosts) -> None:
    """A network policy probably allows only the connections of the ranks."""
    hosts.away = {ONE, OTHER}
    probe = NeighbourProbe()
    for second in range(20):
        poll(probe, float(second), late=True, settled=True)
    for second in range(20, 40):
        poll(probe, float(second), 2, must_reach=(OTHER,), late=True, settled=False)
    assert not probe.unreached


def test_a_neighbour_that_reports_this_member_is_reported_although_no_neighbour_was_ever_reached(
    hosts: Hosts,
) -> None:
    """This sidecar is new, and was asked to confirm the report only after the group had started again."""
    hosts.away = {ONE, OTHER}
    probe, asked = NeighbourProbe(), (OTHER,)
    for second in range(20):
        poll(probe, float(second), late=True, settled=True)
    for second in range(20, 40):
        poll(probe, float(second), 2, must_reach=asked, must_confirm=asked, late=True, settled=False)
    assert probe.unreached == asked


@pytest.mark.parametrize("must_reach", [(OTHER,), (ONE, OTHER)])
def test_a_neighbour_must_still_be_reached_after_another_start(
    hosts: Hosts, must_reach: tuple[str, ...]
) -> None:
    """The sidecar has reached another one, or it is new, so that all its neighbours must be reached."""
    hosts.away = {OTHER} if must_reach == (OTHER,) else {ONE, OTHER}
    probe = NeighbourProbe()
    for second in range(40):
        poll(probe, float(second), 1 + second // 20, must_reach=must_reach, late=True, settled=False)
    assert probe.unreached == must_reach


def test_an_attempt_without_a_result_proves_nothing(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    poll(probe, 0.0, late=False, settled=True)
    hosts.unknown = {ONE}
    for second in range(1, 20):
        poll(probe, float(second), late=True, settled=True)
    assert not probe.unreached


def test_a_neighbour_is_not_out_of_reach_for_longer_than_attempts_show(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    poll(probe, 0.0, late=False, settled=True)
    hosts.away = {ONE}
    for second in range(10, 10 + MISSES):
        poll(probe, float(second), late=True, settled=True)
    assert probe.unreached == (ONE,)
    hosts.unknown = {ONE}
    poll(probe, 20.0 - GAP_S, late=True, settled=True)
    assert not probe.unreached


def test_attempts_that_are_far_apart_are_not_in_a_row(hosts: Hosts) -> None:
    """For example, this process was stopped in between."""
    probe = NeighbourProbe()
    poll(probe, 0.0, late=False, settled=True)
    hosts.away = {ONE}
    for number in range(MISSES + 1):
        assert poll(probe, 10.0 + number * (GAP_S + 1), late=True, settled=True)
    assert not probe.unreached


def test_a_new_generation_is_probed_once_its_ranks_should_have_joined(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    poll(probe, 0.0, late=False, settled=True)
    hosts.away = {ONE}
    found = [poll(probe, 100.0 + second, 2, late=False, settled=False) for second in range(10)]
    assert found == [second >= STARTED_S for second in range(10)]
    assert probe.unreached == (ONE,)
    poll(probe, 120.0, 3, late=False, settled=False)
    assert not probe.unreached, "it says nothing about another generation yet"


def test_results_are_forgotten_as_soon_as_the_ranks_go_on(hosts: Hosts) -> None:
    probe = NeighbourProbe()
    poll(probe, 0.0, late=False, settled=True)
    hosts.away = {ONE}
    for second in range(MISSES):
        poll(probe, 10.0 + second, late=True, settled=True)
    assert probe.unreached == (ONE,)
    poll(probe, 20.0, late=False, settled=True)
    assert not probe.unreached


@pytest.fixture
def listener() -> Iterator[int]:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        yield made.getsockname()[1]


def test_a_host_answers_even_if_nothing_listens_there_or_nobody_accepts(listener: int) -> None:
    assert asyncio.run(neighbour_probe._reaches(f"http://127.0.0.1:{listener}"))
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        port = closed.getsockname()[1]
    assert asyncio.run(neighbour_probe._reaches(f"http://127.0.0.1:{port}"))


def test_a_host_without_a_way_to_it_is_not_reached() -> None:
    assert asyncio.run(neighbour_probe._reaches("http://255.255.255.255:7")) is not True


@pytest.mark.parametrize("url", ["nonsense", "http://[::1", "http://10.0.0.1:x", "http://10.0.0.1"])
def test_an_invalid_address_proves_nothing(url: str) -> None:
    assert asyncio.run(neighbour_probe._reaches(url)) is None


@pytest.mark.parametrize(
    ("code", "answer"), [(errno.EHOSTUNREACH, False), (errno.EMFILE, None), (errno.ECONNRESET, None)]
)
def test_an_error_of_this_host_says_nothing_about_the_other(
    monkeypatch: pytest.MonkeyPatch, code: int, answer: bool | None
) -> None:
    async def fails(*_: object) -> None:
        raise OSError(code, "")

    monkeypatch.setattr(asyncio, "open_connection", fails)
    assert asyncio.run(neighbour_probe._reaches(ONE)) is answer


def test_an_attempt_during_which_this_process_was_stopped_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def hangs(*_: object) -> None:
        time.sleep(0.3)  # noqa: ASYNC251 - the process is stopped
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", hangs)
    monkeypatch.setattr(neighbour_probe, "CONNECT_S", 0.1)
    monkeypatch.setattr(neighbour_probe, "LATE_S", 0.1)
    assert asyncio.run(neighbour_probe._reaches(ONE)) is None
