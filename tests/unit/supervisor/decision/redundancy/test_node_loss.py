from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import CheckpointReport, StateSource
from supervisor.decision import orders, resume_point
from supervisor.decision.redundancy import node_loss
from supervisor.view import reports
from supervisor.view.model import MemberView, Policy, View, VoidStep
from tests.unit.supervisor.job_views import LAUNCH, holding, launcher, member, progress, rank, report, view

CLUSTER = Policy(members=2, members_created_externally=True)


def on(node: str, name: str, rack: str = "", **told: Any) -> MemberView:
    return member(name, report(name, None, node=node, **told), rack=rack)


def group(*members: MemberView, **memory: Any) -> View:
    """Return a view in which the members whose names begin with m have ranks."""
    placement = tuple(each.name for each in members if each.name.startswith("m"))
    settled = {"world_size": len(placement), "placement": placement, "settled": True, "generation": 1}
    peers = tuple(StateSource(f"http://{name}:1", rank) for rank, name in enumerate(placement))
    return view(*members, **{**settled, "peers": peers, **memory})


def test_members_on_several_nodes_have_secured_the_last_step() -> None:
    assert node_loss.secured_step(group(on("a", "m0"), on("b", "m1")), 9) == 9


def test_members_on_one_node_have_secured_only_the_last_checkpoint() -> None:
    stored = CheckpointReport(4)
    assert node_loss.secured_step(group(on("a", "m0", durable=stored), on("a", "m1")), 9) == 4
    assert node_loss.secured_step(group(on("a", "m0"), on("a", "m1")), 9) == -1


def test_a_member_whose_backup_is_on_its_node_has_not_secured_the_last_step() -> None:
    members = (on("a", "m0"), on("a", "m1"), on("b", "m2"))
    assert node_loss.secured_step(group(*members), 9) == -1
    launch = replace(LAUNCH, backups=(2, 2, 0))
    assert node_loss.secured_step(group(*members, launch=launch), 9) == 9


def test_a_snapshot_on_a_standby_of_another_node_survives() -> None:
    copy = holding("s0", ((1, 7),), ((0, 1, 7), (1, 1, 7)), node="b")
    members = (on("a", "m0"), on("a", "m1"))
    assert node_loss.secured_step(group(*members, copy), 9) == 7
    changed_late = (VoidStep(1, 7, 0),)
    assert node_loss.secured_step(group(*members, copy, void=changed_late), 9) == -1
    incomplete = holding("s0", ((1, 7),), ((0, 1, 7),), node="b")
    assert node_loss.secured_step(group(*members, incomplete), 9) == -1
    beside = holding("s0", ((1, 7),), ((0, 1, 7), (1, 1, 7)), node="a")
    assert node_loss.secured_step(group(*members, beside), 9) == -1


# -- standbys


def test_a_standby_on_another_node_copies_the_state_of_a_group_on_one_node() -> None:
    now = group(on("a", "m0"), on("a", "m1"), on("b", "s0"))
    first, *others = node_loss.mirrored(now, CLUSTER, "s0")
    assert first == StateSource("http://m0:1", -1, 1)
    assert others == [StateSource("http://m0:1", 0), StateSource("http://m1:1", 1)]


def test_a_standby_copies_nothing_if_the_state_is_on_another_node_already() -> None:
    assert node_loss.mirrored(group(on("a", "m0"), on("b", "m1"), on("c", "s0")), CLUSTER, "s0") == ()
    assert node_loss.mirrored(group(on("a", "m0"), on("a", "s0")), CLUSTER, "s0") == ()
    alone = group(on("a", "m0"), on("b", "s0"))
    assert node_loss.mirrored(alone, CLUSTER, "s0")
    assert node_loss.mirrored(alone, Policy(), "s0") == ()
    recovering = replace(alone, memory=replace(alone.memory, settled=False))
    assert node_loss.mirrored(recovering, CLUSTER, "s0") == ()


# -- a member that was cut off and comes back after its ranks were moved


def cut_off(name: str, **given: Any) -> MemberView:
    """Return a member of generation 2 that holds states of steps 50 and 99 and reports ranks at step 99."""
    held = ((2, 50), (2, 99))
    privates = tuple((number, generation, step) for generation, step in held for number in (0, 1))
    state = launcher(rank(0, generation=2), rank(1, generation=2), generation=2)
    told = holding(name, held, privates, launcher=state, progress=(progress(0, 99), progress(1, 99))).report
    return member(name, told, **given)


def moved_group(back: MemberView, *others: MemberView) -> View:
    """Return a view of a group that resumed from step 50 as generation 3, without the member `back`."""
    given = {"generation": 3, "lineage": (Lineage(3, 50),), "lost": ("m9",), "world_size": 2}
    return group(on("b", "m0"), on("b", "m1"), *others, back, **given)


def test_its_states_count_only_up_to_the_step_that_the_group_resumed_from() -> None:
    as_another_member = cut_off("s9")  # the same pod, once its sidecar and launcher respond again
    assert resume_point.newest(moved_group(as_another_member), None).step == 50
    newer = holding("s0", ((3, 60),), ((0, 3, 60), (1, 3, 60)), node="c")
    assert resume_point.newest(moved_group(as_another_member, newer), None).step == 60
    assert node_loss.secured_step(moved_group(as_another_member), 70) == 50


def test_while_it_counts_as_lost_its_states_are_not_used_at_all() -> None:
    lost = cut_off("m9", exists=False)
    assert resume_point.newest(moved_group(replace(lost, name="s9")), None).source == "none"


def test_its_late_report_changes_neither_progress_nor_the_order_to_end_its_ranks() -> None:
    back = cut_off("s9")
    now = moved_group(back)
    assert back.report is not None
    assert reports.progress(now, back.report) == ()
    assert reports.furthest_step(now) < 99
    order = orders.order_for(now.memory, "s9", CLUSTER, None)
    assert (order.do, order.generation, order.ranks) == ("idle", 3, ())
