"""A leader whose clock may be wrong does nothing that only the time justifies."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    Drain,
    Forget,
    Hold,
    NodeView,
    PastQuarantine,
    PoolView,
    Quarantine,
    Refresh,
    Release,
    Taint,
    Waiver,
)
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    applied,
    asked,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    settled,
    well,
)

DOUBT = "the clocks differ"
OFF_S = st.sampled_from([-60 * DAY_S, -3600.0, -200.0, 200.0, 3600.0, 60 * DAY_S])
OLD = alone(held_s=1e5)
WAIVED = bad("a", OLD, waiver=Waiver((OLD.key,), NOW_S - 3600.0, "b1"), released_at_s=NOW_S - 3600.0)
LEMON = replace(
    recovered(well("a"), 7200.0, boot_id="b2"),
    quarantine=Quarantine(("g xid 79 reboot_node",), "reboot_node", ("kmsg",), "b1", NOW_S - 7300.0),
    history=tuple(PastQuarantine(NOW_S - days * DAY_S, "reboot_node", days < 3) for days in (5, 4, 3, 2, 1)),
)


def doubted(node: NodeView, off_s: float) -> PoolView:
    return replace(pool(node, now_s=NOW_S + off_s), clock_doubt=DOUBT)


@given(OFF_S, st.sampled_from([WAIVED, LEMON]))
def test_a_wrong_clock_changes_nothing_that_the_right_one_could_not_restore(
    off_s: float, node: NodeView
) -> None:
    after = settled(doubted(node, off_s))
    assert node_of(after, "a") == node
    right = settled(replace(after, now_s=NOW_S + 60.0, clock_doubt=""))
    assert node_of(right, "a") == node_of(settled(pool(node, now_s=NOW_S + 60.0)), "a")


def test_what_is_held_for_a_doubtful_clock_is_an_alert() -> None:
    for node, kind in ((WAIVED, Taint), (LEMON, Release)):
        view = doubted(node, 60 * DAY_S)
        assert isinstance(asked(replace(view, clock_doubt=""))[0], kind)
        [hold] = [each for each in decide(view, POLICY) if each.node == "a"]
        assert isinstance(hold, Hold)
        assert hold.alert
        assert DOUBT in hold.why
    over = well("b", waiver=Waiver(("x",), NOW_S - DAY_S, "b1"))
    assert isinstance(asked(pool(over))[0], Forget)
    assert asked(doubted(over, 0.0)) == []


def test_a_doubtful_clock_delays_neither_a_taint_nor_a_drain() -> None:
    fresh = bad("a", finding(), waiver=Waiver((OLD.key,), NOW_S - 3600.0, "b1"))
    first = doubted(fresh, 60 * DAY_S)
    [taint] = asked(first)
    assert isinstance(taint, Taint)
    [drain] = asked(applied(first, [taint]))
    assert isinstance(drain, Drain)


def test_a_stored_time_is_corrected_only_by_a_clock_that_has_been_compared() -> None:
    later = well("a", released_at_s=NOW_S + DAY_S)
    assert isinstance(asked(pool(later))[0], Refresh)
    assert asked(doubted(later, 0.0)) == []
    assert asked(replace(pool(later), is_clock_checked=False)) == []
