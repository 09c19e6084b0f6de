from __future__ import annotations

from collections.abc import Callable

from bench.quarantine.joined.agent import NodeAgent
from bench.quarantine.joined.faults import XID_TEXTS
from bench.quarantine.joined.machine import NVME, SimulatedMachine
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.nvml.gpu_roster import LOST, OK, RESET_REQUIRED
from nodeagent.policy.loading import shipped

Event = tuple[float, Callable[[NodeAgent, float], None]]
Told = tuple[tuple[object, ...], ...]  # of each unhealthy finding: entity, check and more
LEEWAY_S = 0.5


def _set_port(down: bool, grows: int = 0) -> Callable[[NodeAgent, float], None]:
    def change(agent: NodeAgent, _at_s: float) -> None:
        port = agent.machine.ports[0]
        port.down, port.downed = down, port.downed + grows

    return change


def _set_gpu(name: str, value: float) -> Callable[[NodeAgent, float], None]:
    return lambda agent, _at_s: setattr(agent.machine.gpus[0], name, value)


def _xid(code: int) -> Callable[[NodeAgent, float], None]:
    return lambda agent, at_s: agent.log(at_s, f"NVRM: Xid (PCI:0000:1b:00): {code}, {XID_TEXTS[code]}")


def _restart(agent: NodeAgent, at_s: float) -> None:
    agent.stop(at_s)
    agent.start(at_s + 1.0)


def history(
    machine: SimulatedMachine, events: list[Event], until_s: float, whole: bool
) -> list[tuple[float, Told]]:
    """Return each change of the unhealthy findings, with its time."""
    agent = NodeAgent(machine, shipped(), whole)
    agent.start(0.0)
    found: list[tuple[float, Told]] = []
    waiting = list(events)
    while (at_s := min(agent.wake_s, waiting[0][0] if waiting else until_s)) < until_s:
        while waiting and waiting[0][0] <= at_s:
            waiting.pop(0)[1](agent, at_s)
        agent.look(at_s)
        told = tuple(
            (each.entity, each.check, each.action, each.lasting, each.origins) for each in agent.findings()
        )
        if told != (found[-1][1] if found else ()):
            found.append((at_s, told))
    return found


class OnlyPorts(SimulatedMachine):
    def readings(self) -> dict[tuple[str, str], float]:
        return {
            place: value for place, value in super().readings().items() if place[0] == self.ports[0].entity
        }


def assert_same(machine: Callable[[str], SimulatedMachine], events: list[Event], until_s: float) -> None:
    thin = history(machine("n"), events, until_s, whole=False)
    whole = history(machine("n"), events, until_s, whole=True)
    assert [told for _, told in thin] == [told for _, told in whole]
    assert all(abs(a - b) < LEEWAY_S for (a, _), (b, _) in zip(thin, whole, strict=True))
    assert len(whole) > 1, "nothing has happened"


def test_the_readings_that_are_left_out_make_no_difference_to_the_findings() -> None:
    events: list[Event] = [
        (600.0, lambda agent, _: setattr(agent.machine, "disk_used", 99.0)),
        (703.0, lambda agent, _: setattr(agent.machine, "disk_used", 40.0)),
        (1211.0, _set_gpu("margin", -1.0)),
        (1502.0, _set_gpu("margin", 40.0)),
        (1803.0, _xid(48)),
        (1804.0, _set_gpu("uncorrected", 1)),
        (2000.0, _restart),
        (2403.0, _set_gpu("uncorrected", 0)),
        (3304.0, _set_gpu("state", LOST)),
        (3600.0, _set_gpu("state", OK)),
    ]
    assert_same(SimulatedMachine, events, 4200.0)


def test_a_counter_whose_growth_leaves_its_window_is_read_in_time() -> None:
    flaps: list[Event] = []
    for at_s in (600.0, 1300.0, 4007.0):
        flaps += [(at_s, _set_port(True, 1)), (at_s + 20.0, _set_port(False))]
    assert_same(OnlyPorts, flaps, 13_000.0)


class OneGpu(SimulatedMachine):
    def readings(self) -> dict[tuple[str, str], float]:
        return self.gpus[0].readings()


def test_a_state_that_outlives_a_reset_or_an_operators_command_is_read_again() -> None:
    events: list[Event] = [
        (303.0, _set_gpu("sram_exceeded", True)),
        (1500.0, _set_gpu("state", RESET_REQUIRED)),
        (1530.0, _set_gpu("state", OK)),
        (3003.0, lambda agent, at_s: agent.clear(agent.machine.gpus[0].entity, at_s)),
    ]
    assert_same(OneGpu, events, 4000.0)


def test_a_disk_is_still_the_nodes_own_after_two_quiet_months() -> None:
    machine, failed_s = SimulatedMachine("n"), 2.5 * FORGET_S
    lost = "nvme nvme1: Disabling device after reset failure: -19"
    found = history(
        machine, [(failed_s, lambda agent, at_s: agent.log(at_s, lost))], 3 * FORGET_S, whole=False
    )
    assert [[each[:2] for each in told] for _, told in found] == [[(NVME, "kernel_nvme_disabled")]]


def test_an_agent_reads_after_a_restart_what_the_kernel_logged_meanwhile() -> None:
    agent = NodeAgent(SimulatedMachine("n"), shipped())
    agent.start(0.0)
    agent.stop(100.0)
    _xid(79)(agent, 110.0)
    agent.start(130.0)
    assert [each.code for each in agent.findings()] == [79]
    agent.stop(200.0)
    agent.machine.boot(500.0)
    agent.start(500.0)
    agent.look(500.0 + 601.0)
    assert agent.findings() == (), "the boot has ended it"


def test_a_reset_that_the_agent_does_not_see_ends_nothing() -> None:
    agent = NodeAgent(SimulatedMachine("n"), shipped())
    agent.start(0.0)
    _xid(119)(agent, 100.0)
    agent.look(100.0)
    agent.stop(200.0)
    assert agent.machine.begin_reset(0)
    agent.machine.end_reset(0)
    agent.start(300.0)
    agent.look(5000.0)
    assert [each.lasting for each in agent.findings()] == [True]
