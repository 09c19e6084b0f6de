"""The node of the leading supervisor and of a member is lost: the next leader orders a recovery within 5 s.

The two supervisors are simulated first. The time at which the second one leads, and what it then knows, are
given to a simulated job.
"""

from __future__ import annotations

from functools import cache

import pytest

from sidecar import clients
from supervisor.cluster import host_probe
from supervisor.view.model import Policy, Secure, Start
from tests.simulation.cluster.member import Content
from tests.simulation.cluster.scripts import actions, remedies
from tests.simulation.cluster.world import BEGIN_NS, World
from tests.unit.supervisor.kubernetes.leaders.silent_hosts import Pair
from tests.unit.supervisor.kubernetes.simulated_time import simulated

POLICY = Policy(members=3, standby=1, member_timeout_s=30.0, members_created_externally=True)
STEPS = 1500  # a minute
CUT_MS = 10_000
ORDERED_S = 5.0
ADOPTED_S = 0.3  # from the Lease until the job is taken over: some 15 requests to the API server
REPORT_S = 0.5  # members report this often
EYEBALLS_S = 0.25  # the time after which a sidecar's connection attempt also tries the second address
# the latest time at which a healthy member asks the other supervisor, if DNS was on the lost node
CONNECTS_S = clients.SILENT_S + REPORT_S + clients.RESOLVE_S + EYEBALLS_S
PROBED_S = host_probe.PROBE_S + 2 * host_probe.FIRST_TICK_S


@cache
def takeover(cut_ms: int, phase_ms: int) -> tuple[float, float]:
    """Return when the second supervisor leads, and since when the first one's host is known to be silent.

    Both are times after the cut. The cut follows a renewal of the lease by any part of its interval, and the
    second supervisor reads the lease `phase_ms` after a renewal.
    """
    found: list[tuple[float, float]] = []

    @simulated
    async def cut() -> None:
        pair = Pair()
        await pair.begin(phase_ms / 1000)
        await pair.passes(cut_ms / 1000)
        pair.first.cut_off()
        led_s = await pair.until_second_leads(10.0)
        assert pair.second.term is not None
        found.append((led_s, led_s - pair.second.term.silent_for_s))

    cut()
    return found[0]


def cut_leaders_node(world: World, led_s: float, silent_s: float, lost: list[str]) -> None:
    """Lose the leader, and the member of rank 1 with it."""
    now_ns, network = world.now_ns, world.network
    name = world.memory.placement[1]
    lost.append(name)
    taken_over_s = led_s + ADOPTED_S
    for other in world.members:
        network.late_ms[other] = int(max(0.0, CONNECTS_S - taken_over_s) * 1000)
    world.supervisor_ms = int(taken_over_s * 1000)
    world.kill_supervisor()
    world.members[name].lose()

    def note_silence() -> None:
        network.unanswered[name] = now_ns + int(silent_s * 1e9)
        world.look()

    world.after((taken_over_s + PROBED_S) * 1000, note_silence)


@pytest.mark.parametrize("cut_ms", range(0, 1000, 90))
@pytest.mark.parametrize("phase_ms", [10, 250, 490])
def test_a_member_that_is_lost_with_the_leader_is_replaced_within_five_seconds(
    cut_ms: int, phase_ms: int
) -> None:
    led_s, silent_s = takeover(cut_ms, phase_ms)
    lost: list[str] = []
    world = World(POLICY, STEPS, peers_hang=True)
    world.at(CUT_MS + cut_ms, lambda world: cut_leaders_node(world, led_s, silent_s, lost)).run()
    (secured,) = actions(world, Secure)
    assert [(each.kind, each.member) for each in secured.faults] == [("member_lost", lost[0])]
    ordered_ns = next(view.now_ns for view, action, _ in world.journal if action is secured)
    assert (ordered_ns - BEGIN_NS) / 1e9 - (CUT_MS + cut_ms) / 1000 <= ORDERED_S
    ((kind, remedy, _),) = remedies(world)
    assert (kind, remedy) == ("member_lost", "swap")
    assert world.final == Content(STEPS)


@pytest.mark.parametrize("cut_ms", [0, 500])
def test_a_member_that_is_only_late_to_reach_the_next_leader_trains_on(cut_ms: int) -> None:
    """The leader's pod ended without its node, so the member answers probes."""
    led_s, _ = takeover(cut_ms, 10)

    def lose(world: World) -> None:
        for name in world.members:
            world.network.late_ms[name] = 5_000
        world.supervisor_ms = int((led_s + ADOPTED_S) * 1000)
        world.kill_supervisor()

    world = World(POLICY, STEPS, peers_hang=True).at(CUT_MS, lose).run()
    assert remedies(world) == []
    assert len(actions(world, Start)) == 1
