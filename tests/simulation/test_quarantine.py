"""The node decision under any reports, with actions carried out, refused or interrupted in any order."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine import breaker, evidence, waivers
from supervisor.quarantine.model import (
    NO_NEW_WORK,
    Drain,
    Forget,
    NodeFinding,
    NodePolicy,
    NodeView,
    PastQuarantine,
    PoolView,
    QuarantineAction,
    Refresh,
    Release,
    Report,
    Taint,
    Waiver,
)
from supervisor.quarantine.transition import released_by_operator
from tests.unit.supervisor.node_views import DAY_S, NOW_S, applied, asked, node_of

POLICIES = st.builds(
    NodePolicy,
    max_share=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    min_out=st.integers(0, 2),
    min_serving=st.integers(0, 6),
    storm_nodes=st.sampled_from([2, 5, 100]),
    rack_nodes=st.sampled_from([2, 3, 100]),
    cohort_share=st.sampled_from([0.25, 1.0]),
    prefer_away=st.booleans(),
)
AGES_S = st.sampled_from([0.0, 59.0, 61.0, 299.0, 301.0, 1700.0, 2000.0, 3 * DAY_S])
FINDINGS = st.builds(
    NodeFinding,
    st.sampled_from(["gpu/0 xid 79", "gpu/0 xid 48", "port/0 down"]),
    st.sampled_from(["degraded", "unhealthy", "unhealthy"]),
    st.sampled_from(["none", "reset_gpu", "reboot_node", "replace", "contact_support"]),
    AGES_S,
    st.sampled_from([("kmsg",), ("kmsg", "nvml_events"), ()]),
    st.sampled_from(["", "", "driver", "operator"]),
    st.booleans(),
    entity=st.sampled_from(["", "gpu/0", "gpu/1", "node"]),
    signature=st.sampled_from(["", "xid 79"]),
    origins=st.sampled_from([(), ("driver log",), ("driver state",), ("driver log", "run")]),
    device=st.sampled_from(["", "G1", "G2"]),
    sign_s=st.one_of(st.none(), AGES_S),
    reported_remedy=st.sampled_from(["", "", "reset_gpu", "reboot_node", "replace"]),
    recent_s=st.sampled_from([0.0, 400.0, 2000.0]),
)
CLEAN_S = st.sampled_from([0.0, 100.0, 3599.0, 3601.0, 20_000.0, 8 * DAY_S])


@st.composite
def reports(draw: st.DrawFn) -> Report:
    findings = tuple(draw(st.lists(FINDINGS, max_size=2, unique_by=lambda each: each.key)))
    is_bad = any(each.level == "unhealthy" for each in findings)
    clean_s = 0.0 if is_bad else draw(CLEAN_S)
    calmed_s = draw(st.sampled_from([clean_s, float("inf")]))
    quiet_s = 0.0 if findings else clean_s
    blind = draw(st.sampled_from([(), (), ("kmsg",)]))
    version = draw(st.sampled_from(["1", "1", "1", "2"]))
    gpus = draw(st.sampled_from([(), ("G1", "G2"), ("G2", "G3")]))
    return Report(
        findings, clean_s, quiet_s, calmed_s, draw(st.sampled_from("ab")), version, blind, gpus,
        state_id=draw(st.sampled_from(["", "S1", "S1", "S2"])),
        left_out=draw(st.sampled_from([0, 0, 3])),
        unsteady_s=draw(st.sampled_from([0.0, 0.0, 9000.0])),
    )  # fmt: skip


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[int, NodeView]]:
    """Draw nodes in any condition, without taints of the supervisor."""
    return draw(
        st.lists(
            st.tuples(
                st.integers(0, 11),
                st.builds(
                    NodeView,
                    st.just(""),
                    st.one_of(reports(), reports(), reports(), st.none()),
                    st.sampled_from([5.0, 5.0, 5.0, 119.0, 121.0]),
                    st.sampled_from(["", "r1", "r2"]),
                    cordoned=st.sampled_from([False, False, False, True]),
                    ready=st.sampled_from([True, True, True, False]),
                    busy=st.booleans(),
                ),
            ),
            min_size=1,
            max_size=12,
        )
    )


def changed(pool: PoolView, changes: list[tuple[int, NodeView]], later_s: float, frees: bool) -> PoolView:
    nodes = list(pool.nodes)
    for at, new in changes:
        old = nodes[at % len(nodes)]
        nodes[at % len(nodes)] = replace(
            new,
            name=old.name,
            quarantine=old.quarantine,
            waiver=old.waiver,
            history=old.history,
            released_at_s=old.released_at_s,
        )
    if frees:
        nodes[0] = released_by_operator(nodes[0], pool.now_s)
    return PoolView(pool.now_s + later_s, tuple(nodes))


def fresh_pool() -> PoolView:
    well = Report((), 9 * DAY_S, 9 * DAY_S, boot_id="a", agent="1")
    return PoolView(NOW_S, tuple(NodeView(f"n{at:02d}", well, 5.0, busy=True) for at in range(12)))


HISTORIES = st.lists(
    st.tuples(changes(), st.sampled_from([0.0, 60.0, 3600.0, 2 * DAY_S, -DAY_S]), st.booleans()),
    min_size=1,
    max_size=6,
)


def check(pool: PoolView, actions: list[QuarantineAction], policy: NodePolicy) -> None:
    """Assert the rules that hold for any actions."""
    assert len({each.node for each in actions}) == len(actions), "a node got more than one action"
    after = applied(pool, actions, policy)
    taken = [each for each in actions if isinstance(each, Taint) and each.effect == NO_NEW_WORK]
    new = [each for each in taken if not breaker.is_out(node_of(pool, each.node))]
    if new:
        stands = breaker.assess(len(after.nodes), after.nodes, policy)
        by_others = sum(1 for n in after.nodes if breaker.is_out(n) and not breaker.is_tainted(n))
        assert stands.out <= max(by_others + policy.min_out, int(policy.max_share * len(pool.nodes)))
        assert stands.total - stands.out - stands.unknown >= policy.min_serving
    for each in actions:
        node = node_of(pool, each.node)
        if isinstance(each, Refresh):
            assert breaker.is_out(node_of(after, each.node)) == breaker.is_out(node)
            continue
        assert not breaker.is_unknown(node, policy), "acts on an unknown node"
        assert node.report is not None
        bad = evidence.unhealthy(node.report)
        if isinstance(each, Taint) and node.quarantine is None:
            assert not node.cordoned, "takes a node that an operator has cordoned"
            assert waivers.not_waived(node, bad or node.report.findings, pool.now_s, policy), (
                "overrules an operator"
            )
        if isinstance(each, Drain):
            assert node.busy
            assert not node.cordoned
            weighed = evidence.weigh(node, bad, pool.now_s)
            assert any(evidence.is_corroborated(one) and one.lasting for one in weighed)
        if isinstance(each, (Release, Forget)):
            assert not bad
    assert [n.cordoned for n in after.nodes] == [n.cordoned for n in pool.nodes]


def to_the_end(pool: PoolView, policy: NodePolicy, chance: random.Random | None = None) -> PoolView:
    """Act until no action is left. Carry out all, or some in any order, as if the rest were refused."""
    for _ in range(100):
        actions = asked(pool, policy)
        check(pool, actions, policy)
        if not actions:
            return pool
        if chance is not None:
            chance.shuffle(actions)
            actions = actions[: chance.randint(1, len(actions))]
        pool = applied(pool, actions, policy)
    raise AssertionError(f"decides without end: {actions}")


@given(POLICIES, HISTORIES)
def test_for_any_reports_no_rule_is_broken_and_the_actions_end(
    policy: NodePolicy, history: list[tuple[list[tuple[int, NodeView]], float, bool]]
) -> None:
    pool = fresh_pool()
    for change, later_s, frees in history:
        pool = to_the_end(changed(pool, change, later_s, frees), policy)
        assert asked(pool, policy) == []


@given(POLICIES, HISTORIES, st.integers(0, 2**32))
def test_actions_carried_out_piecewise_in_any_order_lead_to_the_same_pool(
    policy: NodePolicy, history: list[tuple[list[tuple[int, NodeView]], float, bool]], seed: int
) -> None:
    pool, chance = fresh_pool(), random.Random(seed)
    for change, later_s, frees in history:
        pool = changed(pool, change, later_s, frees)
        whole, piecewise = to_the_end(pool, policy), to_the_end(pool, policy, chance)
        assert whole == piecewise
        pool = whole


def test_a_node_that_fails_repeatedly_stays_out_longer_each_time_and_always_returns() -> None:
    """A node becomes unhealthy a day after each release, for a year."""
    policy, ill = (
        NodePolicy(),
        NodeFinding("gpu/0 xid 79", "unhealthy", "reset_gpu", 90.0, ("kmsg", "nvml"), "", True),
    )
    pool, stays_s, now_s = fresh_pool(), [], NOW_S
    while now_s < NOW_S + 365 * DAY_S:
        node = node_of(pool, "n00")
        pool = to_the_end(_with(pool, now_s, replace(node, report=Report((ill,), agent="1"))), policy)
        out_s, node = now_s, node_of(pool, "n00")
        while node.quarantine is not None:
            now_s += 900.0
            calm = Report((), now_s - out_s, now_s - out_s, now_s - out_s, agent="1")
            pool = to_the_end(_with(pool, now_s, replace(node, report=calm)), policy)
            node = node_of(pool, "n00")
        stays_s.append(now_s - out_s)
        now_s += DAY_S + 1
    assert stays_s[0] == policy.clean_s
    assert stays_s[:6] == sorted(stays_s[:6])
    assert 8 * policy.clean_s < max(stays_s) <= policy.max_clean_s
    assert len(node.history) == 16


def _with(pool: PoolView, now_s: float, node: NodeView) -> PoolView:
    return PoolView(now_s, tuple(node if each.name == node.name else each for each in pool.nodes))


def test_the_history_of_a_healthy_node_causes_no_action() -> None:
    pool = fresh_pool()
    pool = _with(pool, NOW_S, replace(pool.nodes[0], history=(PastQuarantine(NOW_S - 60, "replace"),) * 16))
    pool = _with(pool, NOW_S, replace(pool.nodes[1], waiver=Waiver(("gpu/0 xid 79",), NOW_S)))
    assert [each.node for each in asked(pool)] == ["n01"]
