from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from supervisor.quarantine import release
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, NodeFinding, NodeView, PastQuarantine, PoolView, Release
from supervisor.quarantine.release import is_remedied
from supervisor.quarantine.transition import quarantined_by_operator, released_by_operator
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    asked,
    at,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    report,
    settled,
    well,
    why,
)

OUT = settled(pool(bad("a")))
NODE = node_of(OUT, "a")


def test_a_node_returns_when_it_has_been_healthy_for_long_enough() -> None:
    assert asked(at(OUT, NOW_S + 9999, recovered(NODE, 3599.0, boot_id="b2"))) == []
    [found] = asked(at(OUT, NOW_S + 9999, recovered(NODE, 3600.0, boot_id="b2")))
    assert isinstance(found, Release)
    assert "lemon score" in found.why


def test_a_reboot_that_was_not_observed_makes_the_proof_longer() -> None:
    seen = at(OUT, NOW_S + DAY_S, recovered(NODE, 2 * 3600.0))
    assert asked(seen) == []
    assert "without a sign of the remedy (reboot_node)" in why(seen, "a")
    assert len(asked(at(OUT, NOW_S + DAY_S, recovered(NODE, 4 * 3600.0)))) == 1


def test_an_agent_that_has_lost_its_state_proves_nothing_about_the_time_before() -> None:
    forgetful = recovered(NODE, 30 * DAY_S, boot_id="b2")
    assert asked(at(OUT, NOW_S + 1800, forgetful)) == []
    assert len(asked(at(OUT, NOW_S + 3600, forgetful))) == 1


def test_after_a_brief_finding_the_healthy_time_begins_again() -> None:
    flap = replace(NODE, report=report(alone(held_s=1.0)))
    assert asked(at(OUT, NOW_S + DAY_S, flap)) == []
    assert asked(at(OUT, NOW_S + DAY_S, recovered(NODE, 60.0, boot_id="b2"))) == []


def test_a_degraded_node_returns_if_others_of_its_kind_serve() -> None:
    said = report(finding(level="degraded"), clean_s=DAY_S, boot_id="b2")
    assert len(asked(at(OUT, NOW_S + DAY_S, replace(NODE, report=said)))) == 1


def test_a_blind_sensor_does_not_prove_health() -> None:
    blind = recovered(NODE, DAY_S, boot_id="b2", blind=("kmsg",), clean_needs=("kmsg",))
    assert asked(at(OUT, NOW_S + DAY_S, blind)) == []
    held = "its agent reports no fault, but kmsg cannot measure"
    assert why(at(OUT, NOW_S + 9999, blind), "a") == held
    assert why(at(OUT, NOW_S + DAY_S, blind), "a") == f"{held}; for 24 h"
    other = recovered(NODE, DAY_S, boot_id="b2", blind=("sysfs",))
    assert len(asked(at(OUT, NOW_S + DAY_S, other))) == 1, "a check without findings need not be able to see"


def test_time_in_which_a_sensor_was_blind_does_not_count_if_the_agent_counts_it() -> None:
    """The agent of an older version reports an hour of health, but was blind for most of it."""
    seen = at(OUT, NOW_S + 600.0, seeing(600.0))
    for elapsed_s, node in ((610.0, blind(610.0)), (3600.0, blind(3600.0)), (3700.0, seeing(3700.0))):
        seen = settled(at(seen, NOW_S + elapsed_s, carried(seen, node)))
        assert node_of(seen, "a").quarantine is not None
    assert why(seen, "a") == "healthy for 610 of 3600 s"
    assert settled(at(seen, NOW_S + 6600.0, carried(seen, seeing(6600.0)))) != seen
    early = at(seen, NOW_S + 6680.0, carried(seen, seeing(6680.0)))
    assert asked(early) == []
    [found] = asked(at(seen, NOW_S + 6690.0, carried(seen, seeing(6690.0))))
    assert isinstance(found, Release)
    assert found.why.startswith("healthy for 3600 s")


def test_an_agent_that_pauses_itself_is_not_paused_twice() -> None:
    seen = at(OUT, NOW_S + 100.0, blind(100.0, clean_needs=("kmsg",)))
    assert asked(seen) == []
    later = carried(seen, seeing(3600.0, clean_needs=("kmsg",)))
    assert len(asked(at(seen, NOW_S + 4000.0, later))) == 1


def test_blind_time_before_the_healthy_time_restarted_counts_no_longer() -> None:
    seen = settled(at(OUT, NOW_S + 100.0, blind(100.0)))
    restarted = settled(at(seen, NOW_S + 9100.0, carried(seen, seeing(50.0))))
    assert why(restarted, "a") == "healthy for 0 of 3600 s", "it was blind for all of this time"
    seen = settled(at(seen, NOW_S + 9100.0, carried(seen, seeing(9000.0))))
    assert node_of(seen, "a").quarantine.blind_s == 9000.0  # type: ignore[union-attr]
    again = settled(at(seen, NOW_S + 9200.0, carried(seen, seeing(30.0))))
    assert why(again, "a") == "healthy for 30 of 3600 s", "the agent was restarted"
    ill = settled(at(seen, NOW_S + 9200.0, replace(carried(seen, seeing(0.0)), report=report(alone()))))
    assert node_of(ill, "a").quarantine.blind_s == 0.0  # type: ignore[union-attr]


def test_an_avoided_node_returns_only_after_its_sensors_have_seen_it_healthy() -> None:
    careful = replace(POLICY, prefer_away=True)
    avoided = settled(pool(bad("a", alone(level="degraded"))), careful)
    unseen = recovered(node_of(avoided, "a"), DAY_S, blind=("sysfs",))
    held = settled(at(avoided, NOW_S + DAY_S, unseen), careful)
    assert "sysfs cannot measure" in why(held, "a", careful)
    seen = settled(at(held, NOW_S + DAY_S + 60.0, recovered(node_of(held, "a"), DAY_S)), careful)
    node = node_of(seen, "a")
    assert node.quarantine is None, "nothing shows that it was blind before"
    early = settled(
        at(avoided, NOW_S + 60.0, recovered(node_of(avoided, "a"), 30.0, blind=("sysfs",))), careful
    )
    later = at(early, NOW_S + 3700.0, recovered(node_of(early, "a"), 3670.0))
    assert node_of(settled(later, careful), "a").quarantine is not None


def test_a_node_whose_sensors_were_blind_does_not_return_early_to_make_room() -> None:
    """Two incidents: it must be healthy for two hours, and after one it could make room."""
    twice = replace(NODE, history=NODE.history * 2)
    one = replace(POLICY, max_share=0.025)
    sure = bad("z", finding("gpu/1 xid 79"))
    proving = recovered(twice, 4000.0, boot_id="b2")
    assert [each.node for each in asked(at(pool(twice, sure), NOW_S + 4000.0, proving), one)] == ["a"]
    unseen = at(pool(twice, sure), NOW_S + 300.0, recovered(twice, 300.0, boot_id="b2", blind=("kmsg",)))
    seen = settled(unseen, one)
    later = at(seen, NOW_S + 4000.0, recovered(node_of(seen, "a"), 4000.0, boot_id="b2"))
    assert not any(isinstance(each, Release) for each in asked(later, one))
    assert node_of(settled(later, one), "a").quarantine is not None


def seeing(clean_s: float, **given: Any) -> NodeView:
    return recovered(NODE, clean_s, boot_id="b2", **given)


def blind(clean_s: float, **given: Any) -> NodeView:
    return seeing(clean_s, blind=("kmsg",), **given)


def carried(view: PoolView, node: NodeView) -> NodeView:
    """Return the node with what the view has stored on it."""
    return replace(node, quarantine=node_of(view, node.name).quarantine)


def test_a_hold_contains_the_time_of_the_next_check() -> None:
    seen = at(OUT, NOW_S + 9999, recovered(NODE, 600.0, boot_id="b2"))
    [hold] = [each for each in decide(seen, POLICY) if isinstance(each, Hold) and each.node == "a"]
    assert 2999 <= hold.until_s - seen.now_s <= 3000, "the incident's own weight fades a little"


DEAD = finding("GPU-1 xid 64", action="replace", entity="gpu/0", device="GPU-1")
GPUS = tuple(f"GPU-{at}" for at in range(1, 9))


def to_replace(*findings: NodeFinding, devices: tuple[str, ...] = GPUS) -> NodeView:
    return node_of(settled(pool(bad("a", report=report(*(findings or (DEAD,)), devices=devices)))), "a")


def returns(node: NodeView, *devices: str, boot_id: str = "b2", later_s: float = 60 * DAY_S) -> bool:
    calm = recovered(node, later_s, boot_id=boot_id, devices=devices)
    return bool(asked(pool(calm, now_s=NOW_S + later_s)))


def test_a_gpu_that_must_be_replaced_is_not_repaired_by_a_boot_or_by_time() -> None:
    node = to_replace()
    assert node.quarantine is not None
    assert (node.quarantine.replace, node.quarantine.gpus) == (("GPU-1",), 8)
    assert not returns(node, *GPUS)
    assert not returns(node, *GPUS[1:]), "its slot is empty"
    assert not returns(node), "the driver lists no GPU"
    assert returns(node, *GPUS[1:], "GPU-9")
    assert returns(node, *GPUS[1:], "GPU-9", boot_id="b1"), "some nodes can exchange a GPU without a boot"
    seen = pool(recovered(node, DAY_S, boot_id="b2", devices=GPUS), now_s=NOW_S + DAY_S)
    [hold] = [each for each in decide(seen, POLICY) if each.node == "a"]
    assert isinstance(hold, Hold)
    assert hold.alert
    assert hold.why.startswith("GPU-1 must be replaced")


def test_an_operator_who_removes_the_taint_overrules_a_missing_replacement() -> None:
    node = released_by_operator(to_replace(), NOW_S + 60.0)
    calm = recovered(node, 600.0, devices=GPUS)
    assert asked(pool(calm, now_s=NOW_S + 660.0)) == []
    assert node.quarantine is None


def test_each_of_several_gpus_must_be_replaced() -> None:
    other = replace(DEAD, key="GPU-2 xid 64", device="GPU-2", entity="gpu/1")
    for node in (to_replace(DEAD, other), to_replace(DEAD, other, devices=GPUS[2:])):
        assert not returns(node, *GPUS[1:], "GPU-9")
        assert not returns(node, *GPUS[2:], "GPU-9")
        assert returns(node, *GPUS[2:], "GPU-9", "GPU-10")


def test_a_gpu_that_fails_while_another_is_being_replaced_must_be_replaced_too() -> None:
    node = to_replace()
    new = replace(DEAD, key="GPU-9 xid 64", device="GPU-9")
    seen = pool(replace(node, report=report(new, devices=(*GPUS[1:], "GPU-9"))), now_s=NOW_S + DAY_S)
    node = node_of(settled(seen), "a")
    assert node.quarantine is not None
    assert node.quarantine.replace == ("GPU-1", "GPU-9")
    assert not returns(node, *GPUS[1:], "GPU-9")
    assert returns(node, *GPUS[1:], "GPU-10")


def test_a_replacement_of_something_without_an_identity_is_never_seen() -> None:
    node = to_replace(replace(DEAD, device=""))
    assert not returns(node, later_s=3.9 * 3600.0)
    assert returns(node, later_s=4 * 3600.0)


def test_a_recurring_fault_whose_remedy_becomes_a_replacement_is_recorded() -> None:
    """The key of the finding is new, or its device is known only now."""
    first = node_of(settled(pool(bad("a"))), "a")
    for worse in (DEAD, replace(DEAD, key="gpu/0 xid 79", action="replace")):
        node = node_of(settled(pool(replace(first, report=report(worse, devices=GPUS)))), "a")
        assert node.quarantine is not None
        assert node.quarantine.replace == ("GPU-1",)
        assert not returns(node, *GPUS)


def test_a_boot_before_the_fault_is_not_the_remedy_of_it() -> None:
    """The node was rebooted for one fault, and has another one since, or the same one again."""
    for found in (finding("gpu/1 xid 79", held_s=70.0), finding(held_s=70.0)):
        again = replace(NODE, report=report(found, boot_id="b2"))
        node = node_of(settled(pool(again, now_s=NOW_S + DAY_S)), "a")
        assert node.quarantine is not None
        assert node.quarantine.boot_id == "b2"
        assert not is_remedied(recovered(node, 60.0, boot_id="b2"))
        assert is_remedied(recovered(node, 60.0, boot_id="b3"))
    seen_off = replace(NODE, report=report(finding(lasting=False), boot_id="b2"))
    ended = node_of(settled(pool(seen_off, now_s=NOW_S + 600.0)), "a")
    assert is_remedied(recovered(ended, 60.0, boot_id="b2")), "the agent has seen the boot end it"


def test_a_finding_about_a_gpu_that_was_already_replaced_asks_for_nothing() -> None:
    """Its finding remains for some minutes, and another fault is found meanwhile."""
    gone = replace(DEAD, lasting=False)
    now = (*GPUS[1:], "GPU-9")
    for node in (to_replace(), well("a")):
        other = replace(DEAD, key="GPU-2 xid 64", device="GPU-2", entity="gpu/1")
        seen = pool(replace(node, report=report(gone, other, devices=now)), now_s=NOW_S + DAY_S)
        node = node_of(settled(seen), "a")
        assert not returns(node, *now)
        assert returns(node, *GPUS[2:], "GPU-9", "GPU-10")
    late = pool(replace(to_replace(), report=report(DEAD, finding("x"), devices=now)), now_s=NOW_S + DAY_S)
    assert returns(node_of(settled(late), "a"), *now), "the agent has not yet noticed the replacement"


HISTORIES = st.lists(
    st.builds(
        PastQuarantine, st.floats(NOW_S - 400 * DAY_S, NOW_S + DAY_S), st.just("replace"), st.booleans()
    ),
    max_size=16,
)


def proof_s(*history: PastQuarantine) -> float:
    return release.required_health_s(NodeView("a", history=history), NOW_S, POLICY)


def test_the_first_incident_needs_the_usual_proof() -> None:
    assert proof_s() == POLICY.clean_s
    assert proof_s(PastQuarantine(NOW_S, "reset_gpu")) == POLICY.clean_s


def test_each_incident_doubles_the_proof_and_half_of_it_is_forgotten_in_two_weeks() -> None:
    first, now = PastQuarantine(NOW_S - 14 * DAY_S, "reset_gpu"), PastQuarantine(NOW_S, "reset_gpu")
    assert proof_s(now, now) == 2 * POLICY.clean_s
    assert proof_s(now, now, now) == 4 * POLICY.clean_s
    assert proof_s(first, now) == 2**0.5 * POLICY.clean_s


def test_a_quarantine_after_a_relapse_counts_as_two() -> None:
    again = PastQuarantine(NOW_S, "reset_gpu", relapse=True)
    assert proof_s(PastQuarantine(NOW_S, "reset_gpu"), again) == 4 * POLICY.clean_s


@given(HISTORIES, st.builds(PastQuarantine, st.just(NOW_S), st.just("replace"), st.booleans()))
def test_a_lemon_stays_out_longer_but_not_indefinitely(
    history: list[PastQuarantine], another: PastQuarantine
) -> None:
    before_s, after_s = proof_s(*history), proof_s(*history, another)
    assert POLICY.clean_s <= before_s <= after_s <= POLICY.max_clean_s


def test_what_an_operator_has_taken_out_returns_only_at_an_operators_word() -> None:
    node = quarantined_by_operator(well("a"), "smell", NOW_S - 2 * DAY_S)
    view = pool(node)
    assert asked(view) == []
    assert why(view, "a").startswith("an operator has taken it out")
    [hold] = [
        each for each in decide(replace(view, now_s=NOW_S + 2 * DAY_S), POLICY) if isinstance(each, Hold)
    ]
    assert hold.alert, "after three days, it is not forgotten"
    assert not release.may_be_traded(node, NOW_S, replace(POLICY, max_clean_s=30 * DAY_S))


RESET = finding("GPU-1 xid 95 reset_gpu", action="reset_gpu", sources=("nvml-events", "runs"))


def out_for(*findings: NodeFinding, **given: Any) -> NodeView:
    return node_of(settled(pool(bad("a", report=report(*findings, state_id="m1", **given)))), "a")


def held_as_forgotten(node: NodeView, later_s: float = DAY_S) -> bool:
    view = pool(node, now_s=NOW_S + later_s)
    [held] = [each for each in decide(view, POLICY) if each.node == "a"]
    if isinstance(held, Hold) and "has lost its saved state" in held.why:
        assert held.alert
        assert not release.may_be_traded(node, NOW_S + later_s, POLICY)
        return True
    assert isinstance(held, Release)
    return False


def test_a_fault_that_vanished_with_the_agents_memory_is_not_remedied() -> None:
    node = out_for(RESET)
    assert node.quarantine is not None
    assert node.quarantine.state_id == "m1"
    assert not held_as_forgotten(recovered(node, DAY_S, state_id="m1")), "the agent has seen the reset"
    assert held_as_forgotten(recovered(node, DAY_S, state_id="m2"))
    assert held_as_forgotten(recovered(node, 60 * DAY_S, state_id="m2"), 60 * DAY_S), "time is no remedy"
    assert not held_as_forgotten(recovered(node, DAY_S, state_id="m2", boot_id="b2"))
    assert released_by_operator(node, NOW_S).quarantine is None


def test_an_agent_or_a_taint_that_names_no_memory_shows_no_loss() -> None:
    assert not held_as_forgotten(recovered(out_for(RESET), DAY_S))
    older = node_of(settled(pool(bad("a", RESET))), "a")
    assert not held_as_forgotten(recovered(older, DAY_S, state_id="m2"))


def test_a_fault_without_a_remedy_may_end_in_another_memory() -> None:
    assert not held_as_forgotten(recovered(out_for(alone()), DAY_S, state_id="m2"))


def test_a_lost_replacement_is_not_made_up_by_a_boot() -> None:
    node = out_for(replace(DEAD, key="gpu/0 xid 64 replace", device=""))
    assert held_as_forgotten(recovered(node, 60 * DAY_S, state_id="m2", boot_id="b2"), 60 * DAY_S)
    known = out_for(DEAD, devices=GPUS)
    exchanged = recovered(known, DAY_S, state_id="m2", boot_id="b2", devices=(*GPUS[1:], "GPU-9"))
    assert not held_as_forgotten(exchanged), "the GPUs show it"


def test_a_fault_that_the_new_memory_has_again_ends_by_its_remedy_there() -> None:
    other = finding("GPU-2 xid 95 reset_gpu", action="reset_gpu", sources=("nvml-events", "runs"))
    node = out_for(RESET, other)
    partly = node_of(settled(pool(replace(node, report=report(RESET, state_id="m2")))), "a")
    assert held_as_forgotten(recovered(partly, DAY_S, state_id="m2")), "the other fault is still forgotten"
    wholly = node_of(settled(pool(replace(node, report=report(RESET, other, state_id="m2")))), "a")
    assert not held_as_forgotten(recovered(wholly, DAY_S, state_id="m2"))


def test_after_a_boot_only_the_faults_that_outlived_it_must_be_known_again() -> None:
    node = out_for(RESET, finding("GPU-2 xid 79 reboot_node"))
    again = report(finding("GPU-2 xid 79 reboot_node"), state_id="m2", boot_id="b2")
    node = node_of(settled(pool(replace(node, report=again))), "a")
    assert held_as_forgotten(recovered(node, DAY_S, state_id="m3", boot_id="b2"))
    assert not held_as_forgotten(recovered(node, 7 * DAY_S, state_id="m2", boot_id="b2"), 7 * DAY_S)
