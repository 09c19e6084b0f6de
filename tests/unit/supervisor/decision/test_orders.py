from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import RankStart
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import DrillOrder, MemberOrder, StateSource
from supervisor.decision.orders import BUSY_S, may_create_members, order_for
from supervisor.fault_kinds import FAULT_KINDS, FaultName
from supervisor.view.model import InterruptedWork, OpenIncident, Policy, VoidStep
from tests.unit.supervisor.job_views import LAUNCH, fault, memory

NOW_NS = 100_000_000_000
POLICY = Policy(members=2, standby=1, nproc=2, checkpoint_every_s=9.0, keep=4, grace_s=6.0)


def order(member: str, **given: Any) -> MemberOrder:
    return order_for(memory(nproc=2, world_size=4, **given), member, POLICY, None)


def test_each_member_receives_its_own_ranks() -> None:
    assert order("m0").ranks == (RankStart(0, 0), RankStart(1, 1))
    assert order("m1").ranks == (RankStart(2, 0), RankStart(3, 1))
    told = order("m1", generation=3, settled=True)
    assert (told.do, told.generation, told.launch, told.settled) == ("run", 3, LAUNCH, True)
    assert (told.checkpoint_every_s, told.keep) == (9.0, 4)


@pytest.mark.parametrize(
    "phase", ["forming", "running", "looking", "securing", "saving", "stopping", "ended"]
)
@pytest.mark.parametrize("member", ["m0", "m2"])
def test_deletable_checkpoints_are_listed_in_every_order(phase: str, member: str) -> None:
    told = order(member, phase=phase, lineage=(Lineage(2, 9),))
    assert (told.keep, told.lineage) == (4, (Lineage(2, 9),))


def test_every_order_contains_the_last_proof_of_equality_or_that_there_is_none() -> None:
    assert order("m0", equal=(40, 60)).proven == 60
    assert order("m0").proven == 0, "they will be compared"
    alone = order_for(memory(nproc=2, world_size=2, placement=("m0",)), "m0", POLICY, None)
    assert alone.proven == -1


def test_members_without_ranks_stay_warm() -> None:
    assert order("m2").do == "idle"
    assert order("m0", phase="forming").do == "idle"


@pytest.mark.parametrize("phase", ["securing", "saving"])
def test_standbys_list_what_they_hold_but_secure_nothing(phase: str) -> None:
    told = order("m2", phase=phase)
    assert (told.do, told.just_in_time) == ("secure", False)


@pytest.mark.parametrize("kind", sorted(FAULT_KINDS))
def test_survivors_are_frozen_and_copy_their_state_unless_it_is_bad(kind: FaultName) -> None:
    incident = OpenIncident(1, 1, 0, 0, 0.0, (fault("crash"), fault(kind)))
    given = order("m0", phase="securing", incident=incident)
    is_bad = kind in ("nan", "inf", "loss_jump", "diverged")
    assert (given.just_in_time, given.copy) == (True, not is_bad)


def test_without_a_fault_the_state_is_good() -> None:
    given = order("m0", phase="securing", incident=None)
    assert (given.just_in_time, given.copy) == (True, True)


def test_hung_ranks_are_named_to_those_that_secure_unless_all_ranks_hang() -> None:
    hung = OpenIncident(1, 1, 0, 0, 0.0, (fault("hang", 1),))
    assert order("m0", phase="securing", incident=hung).suspects == (1,)
    assert order("m0", phase="securing", incident=None).suspects == ()
    older = replace(hung, generation=0)
    assert order("m0", phase="securing", incident=older).suspects == ()
    crashed = replace(hung, faults=(fault("crash", 1),))
    assert order("m0", phase="securing", incident=crashed).suspects == ()
    alone = memory(world_size=1, nproc=1, placement=("m0",), phase="securing", incident=hung)
    assert order_for(alone, "m0", POLICY, None).suspects == ()


def test_one_member_saves() -> None:
    given: dict[str, Any] = {"phase": "saving", "save": 3, "save_step": 9, "save_generation": 2}
    sources = (StateSource("u", 0, 2, 9),)
    told = order("m1", save_member="m1", sources=sources, **given)
    assert (told.do, told.save, told.save_step, told.save_generation) == ("secure", 3, 9, 2)
    assert told.sources == sources
    assert order("m0", save_member="m1", **given).save == 0


def test_a_holder_without_ranks_saves() -> None:
    """Its ranks may have moved to a standby before the group made another snapshot."""
    given: dict[str, Any] = {"save": 3, "save_step": 9, "save_generation": 2, "save_member": "m7"}
    sources = (StateSource("u", 0, 2, 9),)
    told = order("m7", phase="saving", sources=sources, **given)
    assert (told.do, told.save, told.save_step, told.save_generation) == ("secure", 3, 9, 2)
    assert (told.sources, told.just_in_time) == (sources, False)
    for phase in ("securing", "running", "stopping"):
        assert order("m7", phase=phase, **given).save == 0, phase
    assert order("m8", phase="saving", **given).save == 0
    waiting = OpenIncident(1, 1, 0, 0, 0.0, (fault("crash"),), preserved=3)
    assert order("m7", phase="securing", incident=waiting, **given).save == 3


def test_a_state_secured_in_a_recovery_is_saved_once_the_group_trains_again() -> None:
    given: dict[str, Any] = {"save": 3, "save_step": 9, "save_member": "m1"}
    assert order("m1", settled=False, **given).save == 0
    assert order("m1", settled=True, **given).save == 3
    assert order("m0", settled=True, **given).save == 0


def test_ranks_are_inspected_while_one_is_late() -> None:
    found = order_for(memory(), "m0", POLICY, None, inspection_id=1)
    assert (found.do, found.generation, found.look) == ("run", 1, 1)
    assert order("m0").look == 0
    assert order_for(memory(phase="securing"), "m0", POLICY, None, inspection_id=1).look == 0


@pytest.mark.parametrize(
    ("given", "grace_s", "ending_only"),
    [
        ({"exit_code": 0}, 6.0, False),
        ({"exit_code": 130}, 6.0, False),
        ({"exit_code": 3}, 6.0, True),
        ({"exit_code": 0, "stop": "now"}, 0.0, False),
        ({"exit_code": 1, "stop": "now"}, 0.0, True),
    ],
)
def test_an_end_for_a_fault_gives_a_grace_only_to_ranks_that_are_already_ending(
    given: dict[str, Any], grace_s: float, ending_only: bool
) -> None:
    told = order("m2", phase="stopping", **given)
    assert (told.do, told.grace_s, told.ending_only) == ("stop", grace_s, ending_only)


def test_the_orders_of_a_large_group_cost_little_more_with_neighbours() -> None:
    """A group has one peer per rank, so a pass over all peers for each order would take seconds."""
    count, nproc = 500, 8
    large = memory(
        placement=tuple(f"m{number}" for number in range(count)),
        world_size=count * nproc,
        nproc=nproc,
        peers=tuple(StateSource(f"http://m{each // nproc}:1", each) for each in range(count * nproc)),
        launch=LAUNCH,
    )

    def took_s(policy: Policy) -> float:
        began_s = time.process_time()
        orders = [order_for(large, name, policy, None) for name in large.placement]
        neighbours = ("http://m1:1", f"http://m{count - 1}:1") if policy.members_created_externally else ()
        assert orders[0].neighbours == neighbours
        return time.process_time() - began_s

    on_one_machine, on_a_cluster = (Policy(members_created_externally=each) for each in (False, True))
    assert min(took_s(on_a_cluster) for _ in range(3)) < 5 * min(took_s(on_one_machine) for _ in range(3))


def test_a_drill_is_passed_on() -> None:
    drill = DrillOrder(1, "kill", 0)
    for name in ("m0", "m2"):
        assert order_for(memory(), name, POLICY, drill).drill == drill


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"phase": "forming", "placement": ()}, True),
        ({"settled": True}, True),
        ({"settled": False, "since_ns": NOW_NS - int(BUSY_S * 1e9) + 1}, False),
        ({"settled": False, "since_ns": NOW_NS - int(BUSY_S * 1e9)}, True),
        ({"phase": "securing"}, False),
        ({"phase": "securing", "lost": ("m1",)}, True),
    ],
)
def test_members_are_created_when_needed_or_when_the_group_has_time(
    given: dict[str, Any], wanted: bool
) -> None:
    assert may_create_members(memory(**given), NOW_NS) == wanted


SOURCE, PEER = StateSource("http://a:1", -1, 1, 5), StateSource("http://b:1", 0)
KEPT: dict[str, Any] = {"keep": 4, "lineage": (Lineage(1, 2),), "proven": 40, "void": (8, 9)}
DRILL = DrillOrder(1, "kill", 3)
SAVES: dict[str, Any] = {"save": 7, "save_step": 5, "save_generation": 2}


@pytest.mark.parametrize(
    ("member", "given", "expected"),
    [
        ("m0", {"phase": "stopping"}, MemberOrder("stop", 3, grace_s=6.0, ending_only=True)),
        (
            *("m0", {"phase": "ended", "exit_code": 0, "first": "handled"}),
            MemberOrder("stop", 3, grace_s=6.0, first="handled"),
        ),
        ("m0", {"phase": "stopping", "exit_code": 130, "stop": "now"}, MemberOrder("stop", 3, exit_code=130)),
        (
            *("m0", {"phase": "stopping", "exit_code": 7, "stop": "graceful"}),
            MemberOrder("stop", 3, grace_s=6.0, ending_only=True, exit_code=7),
        ),
        ("m2", {}, MemberOrder("idle", 3, just_in_time=False, drill=DRILL)),
        ("m0", {"phase": "forming"}, MemberOrder("idle", 3, just_in_time=False, drill=DRILL)),
        ("m2", {"phase": "saving"}, MemberOrder("secure", 3, just_in_time=False, drill=DRILL)),
        (
            *("m0", {"phase": "securing"}),
            MemberOrder("secure", 3, save_step=5, save_generation=2),
        ),
        (
            *("m1", {"phase": "saving", "finished": True}),
            MemberOrder("secure", 3, just_in_time=False, sources=(PEER,), **SAVES),
        ),
        ("m0", {"phase": "saving"}, MemberOrder("secure", 3, save_step=5, save_generation=2)),
        (
            *("m0", {}),
            MemberOrder(
                *("run", 3, LAUNCH, (RankStart(0, 0), RankStart(1, 1)), (SOURCE, PEER)),
                checkpoint_every_s=9.0,
                drill=DRILL,
                look=44,
                **{**SAVES, "save": 0},
            ),
        ),
        (
            *("m1", {"settled": True}),
            MemberOrder(
                *("run", 3, LAUNCH, (RankStart(2, 0), RankStart(3, 1)), (SOURCE, PEER)),
                settled=True,
                checkpoint_every_s=9.0,
                drill=DRILL,
                look=44,
                **SAVES,
            ),
        ),
    ],
)
def test_every_field_of_each_order_has_its_expected_value(
    member: str, given: dict[str, Any], expected: MemberOrder
) -> None:
    usual: dict[str, Any] = {
        "generation": 3,
        "sources": (SOURCE,),
        "peers": (PEER,),
        "save_member": "m1",
        **SAVES,
    }
    void = (VoidStep(3, 9, 0), VoidStep(3, 8, 0), VoidStep(2, 7, 0))
    usual |= {"lineage": (Lineage(1, 2),), "equal": (30, 40), "void": void}
    state = memory(nproc=2, world_size=4, **{**usual, **given})
    assert order_for(state, member, POLICY, DRILL, 44) == replace(expected, **KEPT)


def test_the_lineage_of_a_last_checkpoint_is_the_one_valid_after_it_is_written() -> None:
    def lineage(phase: str = "saving", step: int = 5, **given: Any) -> tuple[Lineage, ...]:
        cut = (InterruptedWork(0, 9, 4), InterruptedWork(1, 9, 5))
        return order("m0", phase=phase, save_step=step, cut=cut, lineage=(Lineage(1, 2),), **given).lineage

    assert lineage() == (Lineage(1, 2), Lineage(2, 5))
    assert lineage(generation=3, seen=6) == (Lineage(1, 2), Lineage(7, 5))
    assert lineage(step=6) == (Lineage(1, 2),)
    assert lineage("securing") == (Lineage(1, 2),)


def test_ranks_that_hang_are_suspects_unless_all_do() -> None:
    def suspects(*numbers: int, generation: int = 1) -> tuple[int, ...]:
        found = (*(fault("hang", n) for n in numbers), fault("crash", 3))
        opened = OpenIncident(1, generation, 0, 0, 0.0, found)
        return order("m0", phase="securing", incident=opened).suspects

    assert suspects(2, 1) == (1, 2)
    assert suspects(2, 1, generation=0) == ()
    assert suspects(0, 1, 2) == (0, 1, 2)
    assert suspects(0, 1, 2, 3) == ()
