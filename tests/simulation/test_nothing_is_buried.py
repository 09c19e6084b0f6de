"""A sure fault is never buried: the node is taken out, or an operator is alerted, within a stated time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine import breaker
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PastQuarantine,
    PoolView,
    Quarantine,
    Report,
    Waiver,
)
from tests.unit.supervisor.node_views import DAY_S, NOW_S, node_of, settled, well

STEP_S = 1800.0
SIZES = st.one_of(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.just(1000))
POLICIES = st.builds(
    NodePolicy,
    max_share=st.sampled_from([0.0, 0.1, 0.3]),
    min_out=st.integers(0, 2),
    min_serving=st.integers(0, 3),
    storm_nodes=st.sampled_from([2, 5]),
    rack_nodes=st.sampled_from([2, 3]),
    cohort_nodes=st.sampled_from([2, 8]),
    prefer_away=st.booleans(),
)
KINDS = (
    ("well",) * 4 + ("flapping",) * 3 + ("sure", "doubted", "cordoned", "gone", "silent", "proving", "blind")
)
VERSIONS = ("1.0",) * 6 + ("0.9", "1.1", "")


def sure_fault(held_s: float, signature: str = "xid 79") -> NodeFinding:
    """Return a finding of two independent origins that only a reboot ends."""
    return NodeFinding(
        f"GPU-1 {signature}", "unhealthy", "reboot_node", held_s, ("kmsg", "nvml-polling"), "", True,
        "gpu/0", signature, ("driver log", "driver state"), "GPU-1",
    )  # fmt: skip


def neighbour(name: str, chance: random.Random, now_s: float) -> NodeView:
    """Return a node in any condition, which may be the worst one for its neighbours."""
    kind, rack = chance.choice(KINDS), chance.choice(("r1", "r1", "r2", ""))
    version = chance.choice(VERSIONS)
    calm = Report((), 9 * DAY_S, 9 * DAY_S, boot_id="b1", agent=version, devices=("GPU-1",))
    node = well(name, rack=rack, report=calm)
    if kind in ("flapping", "doubted", "sure"):
        held_s = chance.uniform(0, {"flapping": 900.0, "doubted": 3 * DAY_S, "sure": 5 * DAY_S}[kind])
        found = sure_fault(held_s, chance.choice(("xid 79", "xid 95")))
        if kind != "sure":
            found = replace(found, lasting=False, origins=("sysfs",), entity="port/0")
        return replace(node, report=replace(calm, findings=(found,), clean_s=0.0, quiet_s=0.0))
    held = Quarantine(("x",), "reboot_node", ("kmsg",), "b0", now_s - chance.uniform(0, 9 * DAY_S))
    history = (PastQuarantine(now_s - DAY_S, "reboot_node"),) * chance.randint(1, 8)
    return {
        "well": replace(node, report=replace(calm, calmed_s=chance.choice((60.0, math.inf)))),
        "cordoned": replace(node, cordoned=True),
        "gone": replace(node, ready=False, silent_s=chance.uniform(0, 30 * DAY_S)),
        "silent": replace(node, silent_s=chance.uniform(0, 30 * DAY_S)),
        "proving": replace(
            node, quarantine=held, history=history, report=replace(calm, clean_s=chance.uniform(0, DAY_S))
        ),
        "blind": replace(node, quarantine=held, report=replace(calm, blind=("kmsg",))),
    }[kind]


def with_faulty(size: int, held_s: float, seed: int, now_s: float = NOW_S) -> PoolView:
    """Return a pool in which the node "x" has had a sure fault for `held_s`."""
    chance = random.Random(seed)
    calm = Report((sure_fault(held_s - 10.0),), boot_id="b1", agent=chance.choice(VERSIONS))
    faulty = well("x", report=calm, rack="r1")
    fine = well("w", report=Report((), 9 * DAY_S, 9 * DAY_S, boot_id="b1", agent="1.0"))
    most = min(size - 1, 40)
    others = [neighbour(f"n{at}", chance, now_s) for at in range(most)]
    return PoolView(
        now_s, (faulty, *others, *(replace(fine, name=f"w{at}") for at in range(size - 1 - most)))
    )


def assert_ends_or_alerts(pool: PoolView, policy: NodePolicy) -> None:
    for each in decide(pool, policy):
        assert not isinstance(each, Hold) or each.alert or each.until_s < math.inf, each


def is_out_or_alert(pool: PoolView, name: str, policy: NodePolicy) -> bool:
    alerts = {each.node for each in decide(pool, policy) if isinstance(each, Hold) and each.alert}
    return breaker.is_out(node_of(pool, name)) or name in alerts


@given(POLICIES, SIZES, st.floats(0, 60 * DAY_S), st.integers(0, 2**32))
def test_every_hold_has_an_end_or_is_an_alert(
    policy: NodePolicy, size: int, held_s: float, seed: int
) -> None:
    seen = with_faulty(size, held_s, seed)
    assert_ends_or_alerts(seen, policy)
    assert_ends_or_alerts(settled(seen, policy), policy)


@given(POLICIES, SIZES, st.floats(0, 60 * DAY_S), st.integers(0, 2**32))
def test_a_sure_fault_is_out_or_an_alert_once_it_is_old_enough(
    policy: NodePolicy, size: int, more_s: float, seed: int
) -> None:
    seen = settled(with_faulty(size, policy.alert_s + more_s, seed), policy)
    assert is_out_or_alert(seen, "x", policy), decide(seen, policy)


@given(POLICIES, SIZES, st.integers(0, 2**32))
def test_neighbours_that_change_all_the_time_do_not_bury_a_sure_fault(
    policy: NodePolicy, size: int, seed: int
) -> None:
    """Each half an hour, every neighbour is in another condition, which renews storms without end."""
    held_s, pool = 0.0, with_faulty(size, 0.0, seed)
    while held_s <= policy.alert_s:
        held_s += STEP_S
        new = with_faulty(size, held_s, seed + int(held_s), NOW_S + held_s)
        old = {node.name: node for node in pool.nodes}
        kept = [
            replace(
                node, quarantine=old[node.name].quarantine or node.quarantine, waiver=old[node.name].waiver
            )
            for node in new.nodes
        ]
        pool = settled(replace(new, nodes=tuple(kept)), policy)
        assert_ends_or_alerts(pool, policy)
    assert is_out_or_alert(pool, "x", policy), decide(pool, policy)


@given(SIZES, st.integers(0, 2**32))
def test_a_waiver_ends_so_a_sure_fault_is_out_or_an_alert_after_it(size: int, seed: int) -> None:
    policy = NodePolicy()
    seen = with_faulty(size, 30 * DAY_S, seed)
    released = replace(node_of(seen, "x"), waiver=Waiver(("GPU-1 xid 79",), NOW_S - policy.waiver_s))
    seen = settled(replace(seen, nodes=(released, *seen.nodes[1:])), policy)
    assert is_out_or_alert(seen, "x", policy)


@given(st.integers(2, 20), st.integers(0, 2), st.floats(1810.0, DAY_S))
def test_a_single_sure_fault_of_a_calm_pool_is_taken_out_and_drained(
    size: int, cordoned: int, held_s: float
) -> None:
    """Nodes that someone has cordoned do not matter, as long as one node serves."""
    gone = min(cordoned, size - 2)
    fine = with_faulty(size, held_s, 0)
    others = [well(f"n{at}", cordoned=at < gone) for at in range(size - 1)]
    seen = settled(replace(fine, nodes=(fine.nodes[0], *others)))
    held = node_of(seen, "x").quarantine
    assert held is not None
    assert held.drain_at_s == NOW_S
