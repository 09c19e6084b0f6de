"""When a group goes on with fewer members, when it grows, and which private states its ranks start from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Restore, StartTimes
from supervisor.cluster.supervision import held_state
from supervisor.cluster.supervision.held_state import Instant
from supervisor.decision import orders
from supervisor.decision.membership import joining, placement, resizing
from supervisor.view.model import GroupSize, MemberView, Policy, View
from tests.unit.supervisor.job_views import LAUNCH, S, holding, launcher, member, memory, rank, report, view

POLICY = Policy(members=3, min_members=2)
THREE: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "world_size": 3, "resizable": True}
TWO: dict[str, Any] = {"placement": ("m0", "m2"), "world_size": 2, "reduced_by": 1, "resizable": True}
AFTER = (GroupSize(2, 2, (0, 2), 50 * S),)


def warm(name: str, **given: Any) -> MemberView:
    return member(name, report(name, launcher()), **given)


def stopped(*members: MemberView, since_s: float = 100.0, now_s: float = 100.0, **given: Any) -> View:
    return view(*members, phase="securing", since_ns=int(since_s * S), now_s=now_s, **{**THREE, **given})


def waits_s(seen: View, policy: Policy = POLICY) -> float | None:
    at_ns = resizing.shrinks_at_ns(seen, policy, placement.choose_members(seen, policy))
    return None if at_ns is None else (at_ns - seen.memory.since_ns) / S


def test_a_group_waits_for_a_replacement_before_it_goes_on_smaller() -> None:
    left = (warm("m0"), warm("m2"))
    assert waits_s(stopped(*left)) == resizing.SHRINK_S
    assert waits_s(stopped(*left, member("m3"))) == resizing.SHRINK_S, "it has not connected"
    cold = member("m3", report("m3", launcher(parked=())))
    assert waits_s(stopped(*left, cold)) == resizing.CONNECTED_S
    assert waits_s(stopped(*left, replace(cold, exists=False))) == resizing.SHRINK_S


def test_a_smaller_group_whose_members_are_all_there_does_not_wait() -> None:
    assert waits_s(stopped(warm("m0"), warm("m2"), **TWO)) == 0


@pytest.mark.parametrize(
    ("policy", "given", "left"),
    [
        (replace(POLICY, min_members=0), {}, ("m0", "m2")),
        (replace(POLICY, min_members=3), {}, ("m0", "m2")),
        (POLICY, {"resizable": False}, ("m0", "m2")),
        (POLICY, {}, ("m2",)),
        (replace(POLICY, min_members=1), {}, ()),
    ],
    ids=["off", "all", "the script cannot", "too few", "none"],
)
def test_a_group_may_not_become_too_small(policy: Policy, given: Any, left: tuple[str, ...]) -> None:
    seen = stopped(*map(warm, left), now_s=1000.0, **given)
    assert waits_s(seen, policy) is None
    assert not resizing.is_enough(seen, policy, placement.choose_members(seen, policy))


def test_members_are_enough_once_the_time_is_over() -> None:
    chosen = ("m0", "m2")
    for now_s, enough in ((102.9, False), (103.0, True)):
        assert resizing.is_enough(stopped(*map(warm, chosen), now_s=now_s), POLICY, chosen) == enough


def test_a_member_joins_at_the_end_of_the_group() -> None:
    seen = view(warm("m0"), warm("m2"), warm("m3"), **TWO)
    assert placement.choose_members(seen, POLICY) == ("m0", "m2", "m3")
    assert placement.kept_positions(seen, POLICY) == (0, 1, -1)
    whole = view(warm("m0"), warm("m1"), warm("m2"), warm("m3"), **THREE)
    assert placement.choose_members(whole, POLICY) == ("m0", "m1", "m2")


def grown(*, now_s: float, **given: Any) -> bool:
    members = [holding(name, ((1, 5),), ()) for name in ("m0", "m2")]
    seen = view(*members, warm("m3"), now_s=now_s, **{**TWO, "settled": True, "sizes": AFTER, **given})
    return bool(resizing.due_growth(seen, POLICY))


def test_a_smaller_group_grows_after_it_has_trained_for_a_while() -> None:
    at_s = 50 + joining.HOLD_S
    assert not grown(now_s=at_s - 0.1, started_ns=50 * S)
    assert grown(now_s=at_s, started_ns=50 * S)
    assert not grown(now_s=at_s, started_ns=50 * S, settled=False)
    assert not grown(now_s=at_s, started_ns=50 * S, placement=("m0", "m2", "m3"), world_size=3, reduced_by=0)


def test_each_further_loss_within_an_hour_doubles_the_time() -> None:
    sizes: tuple[GroupSize, ...] = ()
    found = []
    for number in range(9):
        at_ns = (4000 + number) * S
        sizes = (*sizes, GroupSize(2 * number, 2, (0, 1), at_ns))
        seen = memory(**{**TWO, "sizes": sizes, "started_ns": at_ns})
        found.append((joining.grows_at_ns(seen) - at_ns) / S)
        sizes = (*sizes, GroupSize(2 * number + 1, 3, (0, 1, -1), at_ns))
    assert found == [10, 20, 40, 80, 160, 320, 640, 640, 640]
    later = memory(**{**TWO, "sizes": sizes, "started_ns": 9000 * S})
    assert (joining.grows_at_ns(later) - later.started_ns) / S == joining.HOLD_S


def test_the_ranks_of_a_smaller_group_start_from_the_states_of_their_own_members() -> None:
    seen = stopped(warm("m0"), warm("m2"))
    assert resizing.states_of(seen, POLICY, saved_by=1, saved_size=3) == (0, 2)
    [size] = resizing.sizes_after(seen, POLICY, 2)
    assert (size.generation, size.members, size.carried) == (2, 2, (0, 2))


def test_an_unchanged_group_keeps_its_states() -> None:
    seen = stopped(warm("m0"), warm("m1"), warm("m3"), member("m2", exists=False))
    assert resizing.states_of(seen, POLICY, saved_by=1, saved_size=3) == ()
    assert resizing.sizes_after(seen, POLICY, 2) == ()


def test_a_state_from_before_a_change_is_found_through_all_changes_since_then() -> None:
    seen = stopped(warm("m2"), warm("m3"), **{**TWO, "sizes": AFTER, "placement": ("m2", "m3")})
    assert resizing.states_of(seen, POLICY, saved_by=1, saved_size=3) == (0, 2)
    assert resizing.states_of(seen, POLICY, saved_by=2, saved_size=2) == ()
    whole = stopped(*map(warm, ("m0", "m2", "m3")), **{**TWO, "sizes": AFTER})
    assert resizing.states_of(whole, POLICY, saved_by=1, saved_size=3) == (0, 2, -1)


def test_a_checkpoint_of_a_smaller_run_leaves_the_last_members_without_a_state() -> None:
    seen = view(warm("m0"), warm("m1"), warm("m2"), **{**THREE, "placement": (), "phase": "forming"})
    assert resizing.states_of(seen, POLICY, saved_by=7, saved_size=2) == (0, 1, -1)
    assert resizing.states_of(seen, POLICY, saved_by=7, saved_size=3) == ()


def test_a_new_member_starts_from_the_states_of_another_one() -> None:
    launch = replace(
        LAUNCH, world_size=6, nproc=2, restore=Restore(5, 1, "slot", world_size=4), states_of=(1, 0, -1)
    )
    held = memory(placement=("m0", "m1", "m2"), world_size=6, nproc=2, launch=launch)
    policy = replace(POLICY, nproc=2)
    starts = [each for name in held.placement for each in orders.order_for(held, name, policy, None).ranks]
    assert [(each.rank, each.source, each.is_shared) for each in starts] == [
        (0, 2, False),
        (1, 3, False),
        (2, 0, False),
        (3, 1, False),
        (4, 0, True),
        (5, 1, True),
    ]


@pytest.mark.parametrize("fixed_by", ["", "the script has a reason"])
def test_the_user_is_told_why_the_group_cannot_become_smaller(fixed_by: str) -> None:
    marks = StartTimes(resizes=False, fixed_by=fixed_by)
    ranks = [member(f"m{n}", report(f"m{n}", launcher(rank(n, marks=marks)))) for n in range(3)]
    seen = view(*ranks, **{**THREE, "resizable": False, "settled": True})
    assert not resizing.can_resize(seen)
    why = resizing.why_not(seen, POLICY)
    assert why.startswith("--min-members 2 has no effect")
    assert why.endswith(fixed_by or "the script does not call holdfast.join() and session.protect()")
    assert resizing.why_not(seen, replace(POLICY, min_members=0)) == ""


def test_the_script_can_go_on_if_all_ranks_say_so() -> None:
    marks = StartTimes(resizes=True)
    ranks = [member(f"m{n}", report(f"m{n}", launcher(rank(n, marks=marks)))) for n in range(3)]
    seen = view(*ranks, **{**THREE, "resizable": False, "settled": True})
    assert resizing.can_resize(seen)
    assert not resizing.can_resize(replace(seen, members=seen.members[:2]))
    assert resizing.why_not(view(*ranks, **THREE, settled=True), POLICY) == ""


def test_the_sizes_survive_in_a_supervision_in_the_times_of_the_next_host() -> None:
    held = memory(**TWO, sizes=AFTER)
    found = held_state.decode(
        held_state.encode(held, None, Instant(60 * S, 5.0, "a")), Instant(80 * S, 5.0, "b")
    ).memory
    assert found.sizes == (replace(AFTER[0], at_ns=70 * S),)
    assert (found.reduced_by, found.resizable, found.full_members) == (1, True, 3)
