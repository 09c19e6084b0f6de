from __future__ import annotations

import random

from bench.quarantine.joined import faults
from bench.quarantine.joined.events import Events
from bench.quarantine.joined.guesses import HOUR_S, Guesses
from bench.quarantine.joined.node import JoinedNode
from bench.quarantine.joined.repairs import Repairs
from bench.quarantine.simulated_pool import Pool
from nodeagent.nvml.gpu_roster import LOST
from supervisor.quarantine.model import NodePolicy


def world(guesses: Guesses) -> tuple[Pool, JoinedNode, Events, Repairs, faults.NodeFault]:
    """Return a pool of one node with a memory error that only a new GPU, or nothing but a reset, ends."""
    policy = NodePolicy()
    node = JoinedNode("a", "r1", 0.0, False, policy)
    pool = Pool([node], policy, 0)
    events = Events(pool, [node], guesses, 0, 0.0)
    repairs = Repairs(events)
    fault = faults.make(faults.KINDS["gpu_hbm3"], node.machine, random.Random(0), guesses)
    events.again(node, fault)
    return pool, node, events, repairs, fault


def test_a_hidden_fault_whose_time_comes_while_the_node_is_down_shows_itself_after_the_boot() -> None:
    pool, node, events, repairs, fault = world(Guesses(worn=1.0, returns_s=60.0))
    repairs.remedied(node, "reset_gpu", [fault.slot])
    assert fault.is_dormant
    events.lose(node, 5 * HOUR_S)
    pool.run(4 * HOUR_S)
    assert fault.is_dormant
    pool.run(6 * HOUR_S)
    assert fault.shows > 1


def test_an_operators_command_ends_a_false_line_but_not_a_false_reading() -> None:
    pool, node, events, _, fault = world(Guesses(worn=0.0, answer_s=1.0, recurs=0.0))
    events.truth.ended(node, fault)
    logged, misread = node.machine.gpus[fault.slot], node.machine.gpus[fault.slot - 1]
    misread.state = LOST
    node.false = {logged.entity: "a false line", misread.entity: "a false reading"}
    events.look(node)
    pool.run(60.0)
    assert set(node.false) <= set(node.unhealthy())
    pool.alerted(node)
    pool.run(120.0)
    assert pool.tally.counts["cleared_by_operators"] == 1
    assert node.false == {misread.entity: "a false reading"}
    assert misread.entity in node.unhealthy()


def test_an_operator_clears_a_gpu_after_a_reset_that_the_agent_could_not_see() -> None:
    pool, node, _, _, fault = world(Guesses(worn=0.0, answer_s=1.0, recurs=0.0, unseen=1.0))
    fault.has_verdict = False  # the end of a verdict would show the reset to the agent
    pool.run(10.0)
    assert fault.entity in node.unhealthy()
    pool.alerted(node)
    pool.run(400.0)
    assert pool.tally.counts["unseen_resets"] == 1
    assert fault not in node.faults
    assert node.unhealthy() == ()


def test_an_operator_ends_the_work_before_a_reset_and_lets_it_begin_again_after_it() -> None:
    pool, node, _, _, fault = world(Guesses(worn=0.0, answer_s=1.0, recurs=0.0))
    pool.alerted(node)
    pool.run(30.0)
    assert pool.tally.counts["repaired_after_an_alert"] == 1
    assert fault in node.faults
    assert not node.standing.busy
    pool.run(HOUR_S)
    assert fault not in node.faults
    assert node.standing.busy
