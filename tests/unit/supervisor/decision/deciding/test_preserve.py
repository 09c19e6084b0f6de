"""The secured state is saved while the group lacks a member, where a replacement may take long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.member_messages import MemberOrder
from supervisor.decision import orders, state_sources, transition
from supervisor.decision.decide import decide
from supervisor.view.model import (
    Checkpoint,
    JobState,
    Policy,
    Preserve,
    Replace,
    RunAction,
    StorageContents,
    View,
    Wait,
)
from tests.unit.supervisor.decision.deciding.test_whole_actions import (
    GONE,
    forming,
    here,
    incident,
    ready,
    securing,
    whole,
)
from tests.unit.supervisor.job_views import S, fault

ON_CLUSTER = Policy(members=2, members_created_externally=True)
WHY = "saving a checkpoint of step 9 while the group lacks a member"


def without_m1(**given: Any) -> View:
    """Return a view where m0 has secured step 9 and m1 is gone."""
    return securing(here(0), GONE, **given)


def stored(step: int) -> StorageContents:
    return StorageContents(looked_ns=1, checkpoints=(Checkpoint(step, 1, 2, f"/c/{step}"),))


def after(view: View) -> JobState:
    return transition.after(view, decide(view, ON_CLUSTER), ON_CLUSTER)


def order(memory: JobState, name: str) -> MemberOrder:
    return orders.order_for(memory, name, ON_CLUSTER, None)


def test_the_state_is_saved_before_the_lost_member_is_replaced() -> None:
    view = without_m1()
    assert decide(view, ON_CLUSTER) == Preserve("m0", whole(9, "m0"), WHY)
    next_view = replace(view, memory=after(view))
    assert decide(next_view, ON_CLUSTER) == Replace("m1", "member m1 is lost and no standby is left")


def test_a_request_to_save_is_made_once() -> None:
    view = without_m1(lost=("m1",))
    next_view = replace(view, memory=after(view))
    assert decide(next_view, ON_CLUSTER) == Wait(105 * S, "waiting for m1, or for a replacement")


def test_only_the_holder_gets_the_request_and_only_in_this_incident() -> None:
    memory = after(without_m1(save=4))
    asked = order(memory, "m0")
    assert (asked.do, asked.save, asked.save_step, asked.save_generation) == ("secure", 5, 9, 1)
    private = [each for each in whole(9, "m0").sources if each.rank >= 0]
    assert state_sources.of_each_rank(asked.sources) == state_sources.of_each_rank((*private, *memory.peers))
    assert order(memory, "m1").save == 0
    assert memory.incident is not None
    later = replace(memory, incident=replace(incident(fault("crash")), number=2))
    assert order(later, "m0").save == 0


def test_the_group_still_waits_for_its_member_from_the_same_time() -> None:
    view = without_m1()
    assert (after(view).since_ns, after(view).phase) == (view.memory.since_ns, "securing")


def test_another_holder_saves_if_the_first_one_is_lost() -> None:
    three = replace(ON_CLUSTER, members=3)
    view = securing(here(0), here(1), lost=("m2",), placement=("m0", "m1", "m2"), world_size=3)
    held = replace(view, memory=replace(view.memory, world_size=2))  # the two states here are the only ones
    first = transition.after(held, decide(held, three), three)
    assert first.save_member == "m0"
    left = tuple(each if each.name == "m1" else replace(each, exists=False) for each in held.members)
    action = decide(replace(held, memory=replace(first, lost=("m0", "m2")), members=left), three)
    # m1 alone has both private states, so the state is complete without m0.
    assert isinstance(action, Preserve)
    assert action.member == "m1"


@pytest.mark.parametrize(
    ("view", "policy"),
    [
        (without_m1(), replace(ON_CLUSTER, members_created_externally=False)),
        (without_m1(), replace(ON_CLUSTER, checkpoint_every_s=0.0)),
        (without_m1(stored=stored(9)), ON_CLUSTER),
        (securing(here(0), here(1)), ON_CLUSTER),
        (securing(here(0), GONE, ready(2)), ON_CLUSTER),
        (securing(here(0, slots=()), GONE), ON_CLUSTER),
    ],
    ids=[
        "not wanted",
        "no checkpoints",
        "on storage already",
        "all are there",
        "a standby is there",
        "no state",
    ],
)
def test_a_save_that_would_not_help_is_not_requested(view: View, policy: Policy) -> None:
    action: RunAction = decide(view, policy)
    assert not isinstance(action, Preserve)


def test_an_older_checkpoint_does_not_prevent_the_request() -> None:
    assert isinstance(decide(without_m1(stored=stored(5)), ON_CLUSTER), Preserve)


@pytest.mark.parametrize("days", [0.1, 30.0])
def test_a_group_waits_for_a_pending_pod_without_a_limit(days: float) -> None:
    view = without_m1(lost=("m1",), since_s=100.0 - days * 86_400, stored=stored(9))
    action = decide(view, ON_CLUSTER)
    assert isinstance(action, Wait)
    assert action.until_ns > view.now_ns
    first = decide(forming(ready(0), since_ns=int((100.0 - days * 86_400) * S)), ON_CLUSTER)
    assert isinstance(first, Wait)
    assert first.why == "1 of 2 members are ready"


def test_every_lost_member_is_replaced_once_however_many_there_are() -> None:
    names = tuple(f"m{number}" for number in range(270))
    gone = tuple(replace(GONE, name=name) for name in names[1:])
    view = securing(here(0), *gone, placement=names, world_size=270)
    policy = replace(ON_CLUSTER, members=270, checkpoint_every_s=0.0)
    for _ in names[1:]:
        action = decide(view, policy)
        assert isinstance(action, Replace)
        view = replace(view, memory=transition.after(view, action, policy))
    assert view.memory.lost == names[1:]
    assert isinstance(decide(view, policy), Wait)


def test_lost_members_are_forgotten_once_they_are_gone() -> None:
    memory = without_m1(lost=tuple(f"old{number}" for number in range(transition.LOST))).memory
    view = replace(without_m1(), memory=memory)
    action = Replace("m1", "")
    after_it = transition.after(view, action, ON_CLUSTER)
    assert len(after_it.lost) == transition.LOST
    assert after_it.lost[-1] == "m1"
