"""Probes distinguish a host that lost its power from everything that lives."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from supervisor.cluster import host_probe
from supervisor.cluster.host_probe import (
    HostAnswer,
    HostProbes,
    HostRecord,
    ProbedMember,
    lost_nodes,
    meaning,
    probe,
)
from supervisor.controller.limits.report_memory import MemoryHolder
from supervisor.controller.member_server import MemberConnection

ANSWERED, NONE, UNKNOWN = HostAnswer.ANSWERED, HostAnswer.NONE, HostAnswer.UNKNOWN
S = 1_000_000_000


# -- one probe, of real sockets


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as found:
        yield found


async def test_a_host_that_refuses_the_connection_answers(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    monkeypatch.setattr(host_probe, "PORT", listener.getsockname()[1])
    assert await probe("127.0.0.1") is ANSWERED
    listener.close()
    assert await probe("127.0.0.1") is ANSWERED


async def test_a_host_that_drops_the_packets_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    """The kernel drops packets for a port whose queue of connections is full."""
    monkeypatch.setattr(host_probe, "PORT", listener.getsockname()[1])
    monkeypatch.setattr(host_probe, "PROBE_S", 0.2)
    with socket.create_connection(listener.getsockname()):
        assert await probe("127.0.0.1") is NONE


async def test_an_answer_counts_even_if_the_event_loop_was_late_to_see_it(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket
) -> None:
    """A blocked loop must not turn answers into evidence against all hosts that were being probed."""
    monkeypatch.setattr(host_probe, "PORT", listener.getsockname()[1])
    monkeypatch.setattr(host_probe, "PROBE_S", 0.01)
    probing = asyncio.create_task(probe("127.0.0.1"))
    await asyncio.sleep(0)  # the probe has begun
    time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop beyond the limit of the probe
    assert await probing is ANSWERED


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (0, ANSWERED),
        (errno.ECONNREFUSED, ANSWERED),
        (errno.ECONNRESET, ANSWERED),
        (errno.EHOSTUNREACH, NONE),
        (errno.ENETUNREACH, NONE),  # a router drops the route to the pods of a node that is gone
        (errno.ETIMEDOUT, NONE),
        (errno.EACCES, UNKNOWN),
        (errno.EADDRNOTAVAIL, UNKNOWN),
    ],
)
def test_each_error_of_a_connection_has_a_meaning(code: int, answer: HostAnswer) -> None:
    assert meaning(code) is answer


@pytest.mark.parametrize("address", ["", "gpt-0", "127.0.0.1.5", "10.0.0.1/24"])
async def test_what_is_not_an_address_is_not_probed(address: str) -> None:
    assert await probe(address) is UNKNOWN


# -- what probes show


@pytest.mark.parametrize(
    ("answers", "unanswered_since"),
    [
        ([NONE, NONE, NONE], 1),  # a NetworkPolicy, perhaps
        ([ANSWERED], 0),
        ([ANSWERED, NONE], 2),
        ([ANSWERED, NONE, NONE], 2),
        ([ANSWERED, NONE, ANSWERED], 0),
        ([ANSWERED, NONE, ANSWERED, NONE], 4),
        ([ANSWERED, NONE, UNKNOWN], 0),
        ([ANSWERED, UNKNOWN, NONE], 3),
        ([NONE, ANSWERED, NONE], 3),
        ([UNKNOWN, NONE], 2),
    ],
)
def test_a_host_lacks_an_answer_since_the_first_of_its_last_probes_that_all_failed(
    answers: list[HostAnswer], unanswered_since: int
) -> None:
    record = HostRecord("10.0.0.1")
    for number, answer in enumerate(answers, 1):
        record = record.after(answer, number, 60.0)
    assert record.unanswered_ns == unanswered_since
    assert record.has_answered is (ANSWERED in answers)
    assert (record.due_ns, record.asked_ns) == (len(answers) + 60 * S, len(answers))


@pytest.mark.parametrize(
    ("found", "lost"),
    [
        ({}, set()),
        ({"a": [True]}, set()),  # it is the only node, so the supervisor may be cut off
        ({"a": [True], "b": [False]}, {"a"}),
        ({"a": [True, True], "b": [False]}, {"a"}),
        ({"a": [True, False], "b": [False]}, set()),  # only one pod of the node is away
        ({"a": [True], "b": [True], "c": [False]}, set()),
        ({"a": [True], "b": [True], "c": [False], "d": [False]}, {"a", "b"}),
    ],
)
def test_most_nodes_without_an_answer_show_a_fault_of_the_supervisors_network(
    found: dict[str, list[bool]], lost: set[str]
) -> None:
    assert lost_nodes((node, each) for node, all_of in found.items() for each in all_of) == lost


# -- all members


@dataclass
class Hosts:
    """Members in simulated time, and what their hosts answer."""

    count: int
    now_ns: int = 100 * S
    lost: set[str] = field(default_factory=set)  # addresses that no longer answer
    refused: set[str] = field(default_factory=set)  # addresses whose probes a NetworkPolicy drops
    per_node: int = 1
    asked: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [self._member(number) for number in range(self.count)]
        self.probes = HostProbes(lambda: self.members, self._ask, lambda: self.now_ns)

    def _member(self, number: int) -> ProbedMember:
        name = f"m{number}"
        line = MemberConnection(name, MemoryHolder("", lambda: None), connected=True, first_ns=1)
        place = f"10.0.{number // 250}.{number % 250}", f"n{number // self.per_node}"
        return ProbedMember(name, *place, self, line, lambda: self.changes.append(name))

    async def _ask(self, address: str) -> HostAnswer:
        self.asked.append(address)
        return NONE if address in self.lost | self.refused else ANSWERED

    async def after(self, seconds: float, speaking: bool = True) -> None:
        """Let time pass, in which the members report whose hosts are not lost."""
        end_ns = self.now_ns + int(seconds * S)
        while self.now_ns < end_ns:
            for member in self.members:
                if member.address not in self.lost and speaking:
                    member.line.heard_ns = self.now_ns
                    member.line.unanswered_ns = 0
            wait_s = self.probes.probe_due()
            await asyncio.gather(*self.probes._silent.values(), *self.probes._usual.values())
            await asyncio.sleep(0)  # for the callbacks of the tasks
            self.now_ns += int(wait_s * S)

    def unanswered_s(self, number: int) -> float:
        since_ns = self.members[number].line.unanswered_ns
        return (self.now_ns - since_ns) / S if since_ns else 0.0


async def known(count: int, per_node: int = 1) -> Hosts:
    """Return members each of which has answered once."""
    hosts = Hosts(count, per_node=per_node)
    await hosts.after(1.0 + count * host_probe.QUIET_TICK_S / host_probe.MOST_USUAL)
    assert sorted(hosts.asked) == sorted(each.address for each in hosts.members)
    hosts.asked.clear()
    return hosts


async def test_the_job_is_told_once_that_a_host_has_fallen_silent() -> None:
    hosts = await known(3)
    hosts.lost = {"10.0.0.1"}
    await hosts.after(5.0)
    assert hosts.changes == ["m1"]
    assert 3.0 < hosts.unanswered_s(1) < 4.5
    assert hosts.unanswered_s(0) == hosts.unanswered_s(2) == 0.0
    hosts.lost.clear()
    await hosts.after(1.0)
    assert hosts.unanswered_s(1) == 0.0


async def test_a_stopped_sidecar_is_silent_and_its_host_answers() -> None:
    hosts = await known(2)
    silent = hosts.members.pop()
    hosts.probes = HostProbes(lambda: [*hosts.members, silent], hosts._ask, lambda: hosts.now_ns)
    await hosts.after(20.0)
    assert silent.line.unanswered_ns == 0
    assert hosts.changes == []
    assert 15 <= hosts.asked.count(silent.address) <= 21  # about once a second, not in each round


async def test_a_host_that_never_answered_is_not_judged() -> None:
    hosts = Hosts(3)
    hosts.refused = {"10.0.0.1"}
    await hosts.after(1.0)
    hosts.lost = {"10.0.0.1"}
    await hosts.after(20.0)
    assert hosts.changes == []


@pytest.mark.parametrize("siblings", [0, 1, 3])
async def test_a_new_leader_judges_a_member_that_never_connected_by_its_siblings(siblings: int) -> None:
    """Its node was lost together with the previous leader. Without siblings, it may be a NetworkPolicy."""
    hosts = Hosts(1 + siblings)
    hosts.members[0].line.first_ns = 0
    hosts.members[0].line.heard_ns = hosts.now_ns + 30 * S  # see `pod_server.COME_S`
    hosts.lost = {"10.0.0.0"}
    await hosts.after(5.0)
    assert hosts.changes == ["m0"] * bool(siblings)
    assert (hosts.unanswered_s(0) > 3.0) is bool(siblings)


async def test_pods_of_other_jobs_and_of_the_same_node_say_nothing_about_a_member_that_never_connected() -> (
    None
):
    hosts = Hosts(4, per_node=2)
    hosts.members[0].line.first_ns = 0
    for number in (2, 3):
        hosts.members[number] = hosts.members[number]._replace(group=object())
    hosts.lost = {"10.0.0.0"}
    await hosts.after(5.0)
    assert hosts.changes == []


async def unanswered_after(hosts: Hosts, seconds: float) -> list[float]:
    await hosts.after(seconds)
    return [round(hosts.unanswered_s(number)) for number in range(hosts.count)]


def new_leader(hosts: Hosts) -> None:
    """Let no member have connected to this leader yet."""
    for member in hosts.members:
        member.line.first_ns, member.line.heard_ns = 0, hosts.now_ns + 30 * S


async def test_a_member_on_the_node_of_the_previous_leader_lacks_an_answer_for_as_long_as_the_leader() -> (
    None
):
    """But only after a probe of its own has failed: the leader's pod may have ended, and not its node."""
    hosts = Hosts(4, per_node=2)
    new_leader(hosts)
    hosts.probes.suspect("n0", 10.0)
    hosts.lost = {"10.0.0.0", "10.0.0.1"}
    hosts.probes.probe_due()
    assert [hosts.unanswered_s(number) for number in range(4)] == [0.0] * 4
    assert await unanswered_after(hosts, 1.0) == [11, 11, 0, 0]


async def test_a_member_that_answers_is_not_lost_with_the_previous_leader() -> None:
    hosts = Hosts(4, per_node=2)
    new_leader(hosts)
    hosts.probes.suspect("n0", 10.0)
    assert await unanswered_after(hosts, 1.0) == [0, 0, 0, 0]
    hosts.lost = {"10.0.0.0", "10.0.0.1"}
    assert max(await unanswered_after(hosts, 3.0)) <= 3, "this loss is a new one"


async def test_the_silence_of_the_previous_leader_is_forgotten_after_a_while() -> None:
    hosts = Hosts(4, per_node=2)
    hosts.probes.suspect("n0", 10.0)
    hosts.now_ns += int(host_probe.SUSPECTED_S * S)
    new_leader(hosts)
    hosts.lost = {"10.0.0.0", "10.0.0.1"}
    assert max(await unanswered_after(hosts, 1.0)) <= 1


async def test_a_supervisor_that_is_cut_off_concludes_nothing() -> None:
    hosts = await known(4)
    hosts.lost = {each.address for each in hosts.members}
    await hosts.after(20.0)
    assert hosts.changes == []
    assert [hosts.unanswered_s(number) for number in range(4)] == [0.0] * 4


async def test_a_pod_with_a_new_address_begins_again() -> None:
    hosts = await known(2)
    hosts.lost = {"10.0.0.1"}
    await hosts.after(4.0)
    assert hosts.unanswered_s(1) > 0
    old = hosts.members[1]
    hosts.members[1] = old._replace(address="10.9.9.9")
    hosts.refused = {"10.9.9.9"}
    await hosts.after(4.0, speaking=False)
    assert hosts.unanswered_s(1) == 0.0


async def test_after_this_process_was_stopped_the_evidence_is_gathered_anew() -> None:
    hosts = await known(2)
    hosts.lost = {"10.0.0.1"}
    await hosts.after(4.0)
    hosts.probes.forget_failures()
    hosts.probes.probe_due()
    assert hosts.unanswered_s(1) == 0.0
    await hosts.after(2.0)
    assert 0.0 < hosts.unanswered_s(1) <= 2.0


async def test_two_thousand_members_cost_little_and_are_probed_at_different_times() -> None:
    hosts = await known(2000, per_node=8)
    began_s = time.process_time()
    await hosts.after(120.0)
    took_s = time.process_time() - began_s
    assert 2000 * 1.5 < len(hosts.asked) < 2000 * 3
    assert took_s < 12.0, took_s  # of 120 s; it takes about 1 s
