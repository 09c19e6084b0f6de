"""A standby replaces the one member that its peers do not reach; nobody else is moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending, RankInspection
from holdfast.protocol.member_messages import StateSource
from supervisor.decision import orders, transition, unreachable_members
from supervisor.decision.decide import decide
from supervisor.decision.membership import cut_off_members, placement
from supervisor.view.model import (
    Departure,
    JobState,
    MemberView,
    OpenIncident,
    PastFault,
    PastWarning,
    Policy,
    Secure,
    Settle,
    Start,
    View,
    Wait,
    Warn,
)
from tests.unit.supervisor.job_views import LAUNCH, S, launcher, member, progress, rank, report, view

POLICY = Policy(members=4, standby=1, members_created_externally=True)
NOW_S = 1000.0


def here(number: int, *unreached: int, **given: Any) -> MemberView:
    """Return a member whose sidecar does not reach others, for long enough unless `for_s` says otherwise."""
    for_s, generation = given.pop("for_s", cut_off_members.CONFIRM_S), given.pop("generation", 1)
    said = report(
        f"m{number}",
        launcher(rank(number), generation=generation),
        progress=(progress(number, 9),),
        unreached=tuple(f"http://m{other}:1" for other in unreached),
        unreached_s=for_s if unreached else 0.0,
    )
    return member(f"m{number}", said, **{"stepped_ns": int((NOW_S - 20.0) * S), **given})


def standby(number: int = 9, **given: Any) -> MemberView:
    return member(f"m{number}", report(f"m{number}", launcher(parked=(1,))), **given)


def group(*there: MemberView, count: int = 4, **given: Any) -> View:
    names = tuple(f"m{number}" for number in range(count))
    peers = tuple(StateSource(f"http://m{number}:1", number) for number in range(count))
    given = {"placement": names, "world_size": count, "peers": peers, "settled": True, **given}
    return view(*there, now_s=NOW_S, phase="running", **given)


CUT_OFF = (here(0), here(1, 2), here(2, 1, 3), here(3, 2))  # m2 is; each member has two neighbours


def cut_off_before(position: int, **given: Any) -> PastFault:
    made = PastFault("member_lost", position, "old", 9, unreachable_members.SIGNATURE, 900 * S, 1)
    return replace(made, **given)


def named(number: int, *unreached: int, since_s: float, **given: Any) -> MemberView:
    """Return a member whose reports have named the same neighbours for a while, as if for no time at all."""
    since_ns = tuple((f"http://m{other}:1", int((NOW_S - since_s) * S)) for other in unreached)
    return here(number, *unreached, for_s=0.0, unreached_ns=since_ns, **given)


def test_a_duration_that_does_not_grow_is_not_believed() -> None:
    other, long_ns = (here(0), here(1, 2), here(2, 1, 3)), int((NOW_S - 60.0) * S)
    for since_s in (cut_off_members.UNCONFIRMED_S, cut_off_members.UNCONFIRMED_S - 0.1):
        seen = group(*other, named(3, 2, since_s=since_s, stepped_ns=long_ns), standby())
        assert isinstance(decide(seen, POLICY), Secure) == (since_s >= cut_off_members.UNCONFIRMED_S)
    seen = group(*other, named(3, 2, since_s=50.0, stepped_ns=int((NOW_S - 20.0) * S)), standby())
    assert not isinstance(decide(seen, POLICY), Secure), "its ranks have completed a step since then"
    seen = group(*other, named(3, 2, since_s=50.0, stepped_ns=0), standby(), since_ns=int((NOW_S - 20.0) * S))
    assert not isinstance(decide(seen, POLICY), Secure), "the generation is new"


def test_the_time_of_a_named_neighbour_counts_from_the_first_report_in_a_row() -> None:
    found: tuple[tuple[str, int], ...] = ()
    heard_ns = 0
    for at_s, unreached in ((10, ("a",)), (12, ("a", "b")), (14, ("b",)), (15, ("a", "b")), (21, ("b",))):
        found = unreachable_members.named_since(found, unreached, heard_ns, at_s * S)
        heard_ns = at_s * S
        if at_s == 15:
            assert found == (("a", 15 * S), ("b", 12 * S))
    assert found == (("b", 21 * S),), "the member was silent"


def test_the_member_that_is_in_all_pairs_is_replaced() -> None:
    seen = group(*CUT_OFF, standby())
    action = decide(seen, POLICY)
    assert isinstance(action, Secure)
    (found,) = action.faults
    assert (found.kind, found.member, found.rank) == ("member_lost", "m2", 2)
    assert found.detail == "member m2 with rank 2 is cut off: it and m1, m3 do not reach each other"
    incident = OpenIncident(1, 1, 990 * S, 991 * S, 0.0, action.faults)
    stopped = replace(seen, memory=replace(seen.memory, phase="securing", incident=incident))
    assert placement.choose_members(stopped, POLICY) == ("m0", "m1", "m9", "m3")
    assert placement.choose_members(replace(stopped, members=CUT_OFF), POLICY) == ("m0", "m1", "m2", "m3")


@pytest.mark.parametrize("first", [1, 2, 3])
def test_one_side_alone_decides_nothing_whoever_reports_first(first: int) -> None:
    there = tuple(each if number == first else here(number) for number, each in enumerate(CUT_OFF))
    seen = group(*there, standby())
    assert cut_off_members.due(seen, POLICY) is None
    assert cut_off_members.warning(seen, POLICY) is None


UNCONFIRMED_S = cut_off_members.UNCONFIRMED_S


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_user_is_warned_about_a_report_that_is_not_confirmed_for_a_long_time(number: int) -> None:
    unreached = {1: (2,), 2: (1, 3), 3: (2,)}[number]
    there = [here(0), here(1), here(2), here(3)]
    there[number] = here(number, *unreached, for_s=UNCONFIRMED_S)
    action = decide(group(*there, standby()), POLICY)
    assert isinstance(action, Warn)
    assert f"m{number} does not reach m{unreached[0]}, so the group completes no step" in action.why
    assert action.why.endswith(f"m{unreached[0]} does not confirm this")


def test_a_report_that_is_not_confirmed_does_not_hide_a_member_that_is_cut_off() -> None:
    peers = tuple(StateSource(f"http://m{number}:1", number) for number in range(6))
    for for_s, is_due in ((UNCONFIRMED_S - 1, False), (UNCONFIRMED_S, True)):
        there = (*CUT_OFF, here(4, 5, for_s=for_s), here(5), standby())
        found = cut_off_members.due(group(*there, count=6, peers=peers), replace(POLICY, members=6))
        assert (found is not None and found.member == "m2") == is_due


def test_a_group_that_has_not_completed_a_step_gets_more_time() -> None:
    """Ranks that compile or load do not need the network, so it may fail for some seconds."""
    for for_s, is_due in ((cut_off_members.FIRST_STEP_S - 1, False), (cut_off_members.FIRST_STEP_S, True)):
        there = (here(0), here(1, 2, for_s=for_s), here(2, 1, 3, for_s=for_s), here(3, 2, for_s=for_s))
        seen = group(*there, standby(), settled=False)
        assert (cut_off_members.due(seen, POLICY) is not None) == is_due


@pytest.mark.parametrize("leaving", [0, 2, 3])
def test_the_standby_goes_to_the_member_that_is_cut_off_even_if_a_member_is_about_to_end(
    leaving: int,
) -> None:
    drained = Departure("its node is being drained", ends_ns=int((NOW_S + 60) * S))
    there = [replace(each, departure=drained) if n == leaving else each for n, each in enumerate(CUT_OFF)]
    seen = group(*there, standby())
    action = decide(seen, POLICY)
    assert isinstance(action, Secure)
    assert [each.member for each in action.faults] == ["m2"]
    incident = OpenIncident(1, 1, 990 * S, 991 * S, 0.0, action.faults)
    stopped = replace(seen, memory=replace(seen.memory, phase="securing", incident=incident))
    assert placement.choose_members(stopped, POLICY) == ("m0", "m1", "m9", "m3")


@pytest.mark.parametrize("youngest", [1, 2, 3])
def test_all_reports_must_have_lasted(youngest: int) -> None:
    for_s = cut_off_members.CONFIRM_S - 1
    unreached = {1: (2,), 2: (1, 3), 3: (2,)}[youngest]
    there = list(CUT_OFF)
    there[youngest] = here(youngest, *unreached, for_s=for_s)
    assert cut_off_members.due(group(*there, standby()), POLICY) is None


@pytest.mark.parametrize(
    ("there", "blamed"),
    [
        ((here(0, 1), here(1, 0), here(2), here(3)), "m1"),
        ((here(0, 3), here(1), here(2), here(3, 0)), "m3"),
        ((here(0, 1, 3), here(1, 0), here(2), here(3, 0)), "m0"),
        ((here(0), here(1, 2), here(2, 1), here(3)), "m2"),
    ],
)
def test_the_member_without_rank_0_goes_if_only_one_pair_is_apart(
    there: tuple[MemberView, ...], blamed: str
) -> None:
    found = cut_off_members.due(group(*there, standby()), POLICY)
    assert found is not None
    assert found.member == blamed


@pytest.mark.parametrize(
    "seen",
    [
        group(here(0), here(1), here(2), here(3), standby()),
        group(*(replace(each, stepped_ns=int((NOW_S - 2.0) * S)) for each in CUT_OFF), standby()),
        group(here(0), here(1, 2), replace(CUT_OFF[2], silent_s=2.0), here(3, 2), standby()),
        group(replace(here(0), silent_s=2.0), *CUT_OFF[1:], standby()),
        group(*CUT_OFF[:3], here(3, 2, generation=0), standby()),
        group(here(0), here(1, 7), here(2), here(3), standby()),
        group(*CUT_OFF, standby(), peers=()),
        group(here(0, 1, 2, 3), here(1), here(2), here(3), standby()),
    ],
    ids=[
        "all reach each other",
        "the group completes steps",
        "the supervisor does not hear it either, so this may be a lost host",
        "another member may know more",
        "a report is about an earlier generation",
        "the address is not of this group",
        "no addresses are known",
        "a member lies, or has a fault of its own",
    ],
)
def test_otherwise_nobody_is_moved(seen: View) -> None:
    assert cut_off_members.due(seen, POLICY) is None
    assert cut_off_members.warning(seen, POLICY) is None


def test_on_one_machine_nobody_is_cut_off() -> None:
    seen = group(*CUT_OFF, standby())
    assert cut_off_members.due(seen, replace(POLICY, members_created_externally=False)) is None


OFTEN = tuple(cut_off_before(1) for _ in range(unreachable_members.MOST_SWAPS))


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (group(*CUT_OFF), "no standby is ready"),
        (group(*CUT_OFF, standby(connected=False)), "no standby is ready"),
        (group(here(0, 1), here(1, 0), here(2, 3), here(3, 2), standby()), "no single member explains this"),
        (group(*CUT_OFF, standby(), history=OFTEN), "3 replacements within an hour have not helped"),
    ],
)
def test_if_no_standby_helps_the_user_is_warned_once(seen: View, why: str) -> None:
    assert cut_off_members.due(seen, POLICY) is None
    action = decide(seen, POLICY)
    assert isinstance(action, Warn)
    assert action.why.endswith(f"Check the network between their nodes: {why}")
    known = replace(seen.memory, warned=(PastWarning(action.place, action.why),))
    assert not isinstance(decide(replace(seen, memory=known), POLICY), Warn | Secure)


def test_swaps_of_an_earlier_hour_do_not_count() -> None:
    long_ago = tuple(replace(each, at_ns=int((NOW_S - 3601) * S)) for each in OFTEN)
    assert cut_off_members.due(group(*CUT_OFF, standby(), history=long_ago), POLICY) is not None


def test_the_replaced_member_gets_no_ranks_before_others() -> None:
    history = (cut_off_before(2, member="m2"),)
    names = ("m0", "m1", "m9", "m3")
    there = (here(0), here(1), standby(2), standby(8), standby())
    lost = group(*there, placement=names, history=history)
    assert unreachable_members.were_cut_off(lost.memory) == {"m2"}
    assert placement.choose_members(lost, POLICY) == ("m0", "m1", "m9", "m8")
    leaves = Departure("its peers did not reach it", may_stay=True)
    unfit = (here(0), here(1), standby(2, departure=leaves), standby())
    only = group(*unfit, placement=names, history=history)
    assert placement.choose_members(only, POLICY) == ("m0", "m1", "m9", "m2"), "better than none"
    again = group(*there, placement=("m0", "m1", "m2", "m3"), history=history)
    assert not unreachable_members.were_cut_off(again.memory)


# -- a pair of which the wrong member may have been replaced

TWO = replace(POLICY, members=2)
PAIR = (here(0, 1), here(1, 0))
SWAPPED = cut_off_before(1, member="m1", peers=("m0",))  # by the standby m9
FIRST_STEP_S = cut_off_members.FIRST_STEP_S


def at_nine(*unreached: int, **given: Any) -> MemberView:
    """Return m9, which has taken the place of m1."""
    found = here(9, *unreached, **given)
    assert found.report is not None
    assert found.report.launcher is not None
    return replace(found, report=replace(found.report, launcher=launcher(rank(1))))


def after_swap(*others: MemberView, history: tuple[PastFault, ...] = (SWAPPED,), **given: Any) -> View:
    """Return a group of m0 and m9 that does not complete its first step, because they are apart, too."""
    peers = (StateSource("http://m0:1", 0), StateSource("http://m9:1", 1))
    there = (here(0, 9, for_s=FIRST_STEP_S), at_nine(0, for_s=FIRST_STEP_S), *others)
    given = {"started_ns": int((NOW_S - 60.0) * S), "settled": False, "peers": peers, **given}
    return group(*there, count=2, placement=("m0", "m9"), history=history, **given)


def secured(seen: View, policy: Policy) -> View:
    """Return the view after the group has been secured."""
    action = decide(seen, policy)
    assert isinstance(action, Secure)
    memory = transition.after(seen, action, policy)
    ready = tuple(
        each
        if each.report is None
        else replace(
            each, report=replace(each.report, secured_for=memory.generation, unreached=(), unreached_s=0.0)
        )
        for each in seen.members
    )
    return replace(seen, memory=memory, members=ready, now_ns=seen.now_ns + S)


def restart(seen: View, policy: Policy) -> JobState:
    """Return the job's state after the group has been secured and has started again."""
    stopped = secured(seen, policy)
    begun = decide(stopped, policy)
    assert isinstance(begun, Start)
    return transition.after(stopped, begun, policy)


def passed_on(memory: JobState) -> JobState:
    """Return the job's state as a new leader reads it."""
    return codec.decode(JobState, codec.encode(memory))


def test_if_the_standby_is_cut_off_from_the_member_that_stayed_that_one_is_replaced() -> None:
    policy = replace(TWO, has_storage=False)
    memory = passed_on(restart(group(*PAIR, standby(), count=2), policy))
    assert memory.placement == ("m0", "m9")
    seen = after_swap(standby(8))
    seen = replace(seen, memory=replace(seen.memory, history=memory.history))
    found = cut_off_members.due(seen, policy)
    assert found is not None
    assert (found.member, found.rank, found.peers) == ("m0", 0, ("m9",))
    incident = OpenIncident(2, 1, 990 * S, 991 * S, 0.0, (found,))
    stopped = replace(seen, memory=replace(seen.memory, phase="securing", incident=incident))
    assert placement.choose_members(stopped, policy) == ("m8", "m9")


def test_without_that_evidence_the_member_without_rank_0_is_replaced() -> None:
    for history in (
        (),
        (replace(SWAPPED, peers=()),),
        (replace(SWAPPED, peers=("m0", "m2")),),
        (replace(SWAPPED, at_ns=int((NOW_S - 3601) * S)),),
        (replace(SWAPPED, peers=("gone",)),),
    ):
        found = cut_off_members.due(after_swap(standby(8), history=history), TWO)
        assert found is not None
        assert found.member == "m9"


def test_a_correction_is_allowed_whatever_the_number_of_earlier_replacements() -> None:
    seen = after_swap(standby(8), history=(*OFTEN, SWAPPED))
    found = cut_off_members.due(seen, TWO)
    assert found is not None
    assert found.member == "m0"
    without = decide(after_swap(history=(*OFTEN, SWAPPED)), TWO)
    assert isinstance(without, Warn)
    assert without.why.endswith("no standby is ready")


def test_a_correction_is_not_corrected_without_limit() -> None:
    corrected = (cut_off_before(0, member="m7", peers=("m1",)), SWAPPED)  # m1 had stayed when m7 was replaced
    assert cut_off_members.due(after_swap(standby(8), history=(*OFTEN, *corrected)), TWO) is None
    assert cut_off_members.due(after_swap(standby(8), history=corrected), TWO) is not None


def test_only_after_such_a_swap_members_must_reach_neighbours_that_they_have_never_reached() -> None:
    def must_reach(seen: View, name: str) -> tuple[str, ...]:
        return orders.order_for(seen.memory, name, TWO, None).must_reach

    seen = after_swap(launch=LAUNCH)
    assert must_reach(seen, "m0") == ("http://m9:1",)
    assert must_reach(seen, "m9") == ("http://m0:1",)
    assert must_reach(replace(seen, memory=passed_on(seen.memory)), "m0") == ("http://m9:1",)
    for other in (after_swap(launch=LAUNCH, settled=True), after_swap(launch=LAUNCH, history=())):
        assert not must_reach(other, "m0")
        assert not must_reach(other, "m9")


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("missing", [-1, 1])
def test_if_a_half_is_missing_the_member_that_more_reports_name_is_replaced(cut: int, missing: int) -> None:
    beside = {(cut - 1) % 4, (cut + 1) % 4}
    there = [here(n, *({cut} if n in beside else ()), for_s=UNCONFIRMED_S) for n in range(4)]
    there[cut] = here(cut, *beside, for_s=UNCONFIRMED_S)
    lacks = (cut + missing) % 4
    there[lacks] = here(lacks)
    found = cut_off_members.due(group(*there, standby()), POLICY)
    assert found is not None
    assert found.member == f"m{cut}"


@pytest.mark.parametrize("new", ["heard_ns", "back_ns"])
def test_a_half_that_is_missing_because_a_connection_is_new_is_waited_for(new: str) -> None:
    for since_s, for_s, is_due in ((39.0, 80.0, False), (40.0, 80.0, True), (1.0, 120.0, True)):
        lacks = here(0, **{new: int((NOW_S - since_s) * S)})
        there = (lacks, here(1, 0, 2, for_s=for_s), here(2, 1, for_s=for_s), here(3))
        seen = group(*there, standby())
        assert (cut_off_members.due(seen, POLICY) is not None) == is_due
        assert cut_off_members.warning(group(*there), POLICY) is None or is_due


BACK_NS = int((NOW_S - UNCONFIRMED_S) * S)
BEFORE_NS = BACK_NS - 5 * S  # when the group completed its last step


@pytest.mark.parametrize(
    ("for_s", "count", "given", "is_due"),
    [
        (UNCONFIRMED_S, 3, {"back_ns": BACK_NS}, True),
        (UNCONFIRMED_S, 5, {"heard_ns": BACK_NS}, True),
        (UNCONFIRMED_S - 1, 5, {"back_ns": BACK_NS}, False),
        (UNCONFIRMED_S, 5, {"back_ns": BACK_NS + S}, False),
        (UNCONFIRMED_S, 5, {"back_ns": BEFORE_NS}, False),
        (UNCONFIRMED_S, 2, {"back_ns": BACK_NS}, False),
    ],
    ids=["three", "five", "not for long", "it may still confirm", "it is not new", "one neighbour alone"],
)
def test_a_new_sidecar_need_not_confirm_what_both_neighbours_report(
    for_s: float, count: int, given: dict[str, Any], is_due: bool
) -> None:
    there = [here(n, *((1,) if n in (0, 2) else ()), for_s=for_s, stepped_ns=BEFORE_NS) for n in range(count)]
    there[1] = here(1, stepped_ns=BEFORE_NS, **given)
    found = cut_off_members.due(group(*there, standby(), count=count), replace(POLICY, members=count))
    assert (found is not None and found.member == "m1") == is_due


@pytest.mark.parametrize("phase", ["eval", "paused"])
def test_a_pause_that_the_script_declared_is_not_interrupted_before_its_limit(phase: str) -> None:
    def pausing(left_s: float, **given: Any) -> View:
        first = here(0)
        assert first.report is not None
        at = replace(progress(0, 9), phase=phase, pause_left_s=left_s)
        state = launcher(rank(0, **given))
        first = replace(first, report=replace(first.report, progress=(at,), launcher=state))
        return group(first, *CUT_OFF[1:], standby())

    assert cut_off_members.due(pausing(1200.0), POLICY) is None
    assert not isinstance(decide(pausing(1200.0), POLICY), Secure | Warn)
    for over in (pausing(0.0), pausing(1200.0, state="exited")):
        found = cut_off_members.due(over, POLICY)
        assert found is not None
        assert found.member == "m2"


def test_a_rank_under_a_debugger_is_not_interrupted_either() -> None:
    first = here(0)
    assert first.report is not None
    look = RankInspection(0, 9, 3, 0, "t", 0.0, "", number=1, traced=True)
    told = replace(first.report, looks=(look,), looked_for=1, look=1)
    seen = group(replace(first, report=told), *CUT_OFF[1:], standby())
    assert cut_off_members.due(seen, POLICY) is None


def test_a_step_clears_the_member_that_stayed() -> None:
    """It reaches the standby, so only the member that was replaced can have been at fault."""
    memory = after_swap().memory
    assert unreachable_members.suspect(memory, int(NOW_S * S)) == "m0"
    settled = transition.after(replace(after_swap(), memory=memory), Settle(1, ""), TWO)
    assert unreachable_members.suspect(settled, int(NOW_S * S)) == ""
    assert [each.signature for each in settled.history] == [unreachable_members.SIGNATURE]
    other = replace(memory, history=(VICTIM,))
    assert transition.after(replace(after_swap(), memory=other), Settle(1, ""), TWO).history is other.history


def test_a_swap_without_a_standby_is_waited_for_and_does_not_count() -> None:
    policy = replace(POLICY, has_storage=False)
    seen = group(*CUT_OFF, standby(), launch=LAUNCH)
    stopped = secured(seen, policy)
    away = replace(stopped, members=(*stopped.members[:-1], standby(connected=False)))
    action = decide(away, policy)
    assert isinstance(action, Wait)
    assert action.until_ns == stopped.memory.since_ns + int(cut_off_members.STANDBY_S * S)
    swap = decide(stopped, policy)
    assert isinstance(swap, Start)
    assert swap.placement == ("m0", "m1", "m9", "m3")
    over = replace(away, now_ns=action.until_ns)
    begun = decide(over, policy)
    assert isinstance(begun, Start)
    assert begun.placement == ("m0", "m1", "m2", "m3")
    memory = transition.after(over, begun, policy)
    assert [each.signature for each in memory.history] == [unreachable_members.KEPT]
    assert unreachable_members.suspect(memory, over.now_ns) == ""
    assert not unreachable_members.were_cut_off(memory)


# -- members that are new in the group


def test_a_member_that_does_not_confirm_a_report_is_asked_to_reach_the_one_that_reports_it() -> None:
    two, stepped_ns = replace(POLICY, members=2), int((NOW_S - 60.0) * S)
    seen = group(
        here(0, 1, for_s=45.0, stepped_ns=stepped_ns), here(1, stepped_ns=stepped_ns), standby(), count=2
    )
    found = decide(seen, two)
    assert isinstance(found, Warn), "one report alone moves nobody"
    assert must_reach(seen.memory, "m1", two) == set()
    memory = asked(seen, two)
    assert must_reach(memory, "m1", two) == {"m0"}
    assert must_reach(memory, "m0", two) == set()
    assert orders.order_for(memory, "m1", two, None).must_confirm == ("http://m0:1",)
    assert orders.order_for(memory, "m0", two, None).must_confirm == ()
    assert passed_on(memory) == memory
    warnings = tuple(
        PastWarning(f"peers of m7: {number}", "t") for number in range(cut_off_members.MOST_WARNINGS)
    )
    warned = replace(seen, memory=replace(seen.memory, warned=warnings))
    assert not isinstance(decide(warned, two), Warn)
    assert must_reach(asked(warned, two), "m1", two) == {"m0"}, "the number of warnings does not matter"


def asked(seen: View, policy: Policy) -> JobState:
    return cut_off_members.with_unconfirmed_reports(seen, policy)


def test_so_it_is_until_the_group_completes_a_step_or_one_of_the_two_loses_its_ranks() -> None:
    two = replace(POLICY, members=2)
    seen = group(here(0, 1, for_s=45.0), here(1), standby(), count=2)
    memory = asked(seen, two)
    assert memory.asked
    same = group(here(0), here(1), standby(), count=2, asked=memory.asked)
    assert asked(same, two) is same.memory, "the report has ended, but no step has been completed"
    again = replace(same, memory=replace(same.memory, generation=same.memory.generation + 1))
    assert asked(again, two).asked == memory.asked, "the group has started again"
    stepped = replace(same, memory=replace(same.memory, reached=memory.asked[0].step + 1))
    assert not asked(stepped, two).asked
    swapped = replace(same, memory=replace(same.memory, placement=("m0", "m9")))
    assert not asked(swapped, two).asked
    settled = replace(view(phase="running").memory, asked=memory.asked)
    assert not transition.after(replace(view(), memory=settled), Settle(1, ""), two).asked


def must_reach(memory: JobState, name: str, policy: Policy = POLICY) -> set[str]:
    """Return the members that a member must reach according to its order."""
    urls = orders.order_for(memory, name, policy, None).must_reach
    return {url.removeprefix("http://").removesuffix(":1") for url in urls}


def test_a_member_and_its_new_neighbours_must_reach_each_other_until_the_group_completes_a_step() -> None:
    memory = restart(group(*CUT_OFF, standby(), launch=LAUNCH), replace(POLICY, has_storage=False))
    assert memory.untried == ("m9",)
    memory = passed_on(memory)
    wanted: dict[str, set[str]] = {"m0": set(), "m1": {"m9"}, "m9": {"m1", "m3"}, "m3": {"m9"}}
    assert {name: must_reach(memory, name) for name in memory.placement} == wanted
    settled = transition.after(view(phase="running"), Settle(1, ""), POLICY)
    assert settled.untried == ()
    assert not any(must_reach(replace(memory, settled=True), name) for name in memory.placement)


def test_a_member_stays_new_until_the_group_completes_a_step() -> None:
    seen = group(*CUT_OFF, standby(), untried=("m1", "m2"))
    memory = restart(seen, replace(POLICY, has_storage=False))
    assert memory.untried == ("m1", "m9")
    local = replace(POLICY, members_created_externally=False, has_storage=False)
    crashed = without_peers(group(here(0), here(1), here(2), here(3), standby()), "exception")
    assert restart(crashed, local).untried == ()


@pytest.mark.parametrize("new", [0, 1])
def test_of_a_pair_the_member_that_is_new_goes(new: int) -> None:
    seen = group(here(0, 1), here(1, 0), standby(), count=2, untried=(f"m{new}",))
    found = cut_off_members.due(seen, TWO)
    assert found is not None
    assert found.member == f"m{new}"


def test_a_member_that_failed_on_joining_gets_no_ranks_before_others() -> None:
    names = ("m0", "m1", "m2")
    there = (here(0), here(1), standby(4), standby(5))
    seen = group(*there, count=4, placement=names, dropped=("m4",))
    assert placement.choose_members(seen, replace(POLICY, members=3)) == ("m0", "m1", "m5")


def test_a_member_that_has_just_joined_leaves_without_a_standby() -> None:
    policy = replace(POLICY, min_members=3)
    for joined, leaves in ((("m2",), True), (("m3",), False), ((), False)):
        seen = group(*CUT_OFF, settled=False, resizable=True, joined=joined)
        assert (cut_off_members.due(with_age(seen, FIRST_STEP_S), policy) is not None) == leaves


def with_age(seen: View, for_s: float) -> View:
    """Return `seen` with reports that have lasted for `for_s`."""
    there = tuple(
        replace(each, report=replace(each.report, unreached_s=for_s if each.report.unreached else 0.0))
        for each in seen.members
        if each.report is not None
    )
    return replace(seen, members=there)


# -- ranks that fail because they cannot connect

VICTIM = PastFault("victim", 0, "m0", 9, "distributed 1", 990 * S, 1)
EVIDENCE_S = cut_off_members.EVIDENCE_S


def without_peers(seen: View, kind: str = "distributed", **given: Any) -> View:
    """Return `seen` with a rank of m0 that has failed, in a group that has not completed a step again."""
    first = seen.members[0]
    assert first.report is not None
    ending = Ending(int(NOW_S * S), 1, None, False, kind, 0, "Connection closed by peer")
    state = launcher(rank(0, ending))
    failed = replace(first, report=replace(first.report, launcher=state))
    given = {"settled": False, "history": (VICTIM,), "since_ns": int((NOW_S - 1) * S), **given}
    return replace(seen, memory=replace(seen.memory, **given), members=(failed, *seen.members[1:]))


ALL_REACHED = group(here(0), here(1), here(2), here(3), standby())


def test_ranks_that_lose_their_peers_again_are_restarted_only_after_the_sidecars_could_report() -> None:
    seen = without_peers(ALL_REACHED)
    action = decide(seen, POLICY)
    assert isinstance(action, Wait)
    assert action.until_ns <= seen.memory.since_ns + int(EVIDENCE_S * S)
    later = replace(seen, now_ns=seen.memory.since_ns + int(EVIDENCE_S * S))
    action = decide(later, POLICY)
    assert isinstance(action, Secure)
    assert [each.kind for each in action.faults] == ["victim"]


@pytest.mark.parametrize(
    "seen",
    [
        without_peers(ALL_REACHED, "exception"),
        without_peers(ALL_REACHED, history=()),
        without_peers(ALL_REACHED, history=(replace(VICTIM, step=8),)),
        without_peers(ALL_REACHED, history=(replace(VICTIM, kind="crash"),)),
        without_peers(ALL_REACHED, settled=True),
        without_peers(ALL_REACHED, stop="graceful"),
        without_peers(replace(ALL_REACHED, members=(*ALL_REACHED.members[:3], here(3, silent_s=2.0)))),
    ],
    ids=[
        "an exception of the script",
        "the first time",
        "the group has completed steps in between",
        "after another fault",
        "the generation has completed a step",
        "the user stops the run",
        "a member may be lost",
    ],
)
def test_otherwise_they_are_restarted_at_once(seen: View) -> None:
    assert isinstance(decide(seen, POLICY), Secure)
    assert not cut_off_members.held_until_ns(seen, POLICY)


def test_on_one_machine_they_are_restarted_at_once() -> None:
    assert isinstance(decide(without_peers(ALL_REACHED), replace(POLICY, members=4, standby=0)), Wait)
    local = replace(POLICY, members_created_externally=False)
    assert isinstance(decide(without_peers(ALL_REACHED), local), Secure)


def test_a_member_that_is_cut_off_is_replaced_as_soon_as_ranks_have_failed() -> None:
    """Ranks that have failed neither load nor compile."""
    for seen in (group(*CUT_OFF, standby()), group(*CUT_OFF, standby(), history=())):
        action = decide(without_peers(seen), POLICY)
        assert isinstance(action, Secure)
        assert [each.member for each in action.faults] == ["m2"]
    late = without_peers(group(*CUT_OFF, standby()), since_ns=0, history=())
    assert [each.member for each in getattr(decide(late, POLICY), "faults", ())] == ["m2"]


def test_without_a_standby_the_group_is_not_restarted_while_a_member_is_cut_off() -> None:
    seen = without_peers(group(*CUT_OFF))
    action = decide(seen, POLICY)
    assert isinstance(action, Warn)
    assert action.why.endswith("no standby is ready")
    since_ns = seen.memory.since_ns
    known = replace(seen.memory, warned=(PastWarning(action.place, action.why),))
    for after_s, is_held in ((EVIDENCE_S + 1, True), (cut_off_members.HELD_S, False)):
        later = replace(seen, memory=known, now_ns=since_ns + int(after_s * S))
        assert isinstance(decide(later, POLICY), Wait if is_held else Secure)
