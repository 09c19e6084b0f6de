"""A job has as many standbys as requested, none beside a member with ranks, and none after its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cluster.pods import PodMember
from supervisor.cluster.standbys.plan import END_S, PLACE_S, StandbyPlan, plan
from supervisor.cluster.standbys.pod_copy import standby_name


def owners(number: int, node: str = "", **state: bool) -> PodMember:
    return _pod(f"gpt-{number}", node or f"n{number}", **state)


def standby(number: int, node: str = "", **state: bool) -> PodMember:
    return _pod(standby_name("gpt", "u", number), node or f"s{number}", is_standby=True, **state)


def _pod(name: str, node: str, **state: bool) -> PodMember:
    given = {"is_running": not state.get("has_ended"), **state}
    return PodMember(f"uid-{name}", name, f"{name}.uid", node, "c", **given)  # type: ignore[arg-type]


def planned(
    pods: Iterable[PodMember], standbys: int = 1, active: tuple[str, ...] = ("gpt-0", "gpt-1")
) -> tuple[tuple[int, ...], list[str]]:
    """Return the numbers to create and the names to delete, for a job of two members that trains."""
    placement = [f"{name}.uid" for name in active]
    found = plan(tuple(pods), placement, 2, standbys, may_create=True, over_s=None)
    return found.create, [pod.name for pod, _ in found.delete]


GROUP = (owners(0), owners(1))


@pytest.mark.parametrize(
    ("pods", "standbys", "create", "delete"),
    [
        (GROUP, 0, (), []),
        (GROUP, 1, (1,), []),
        (GROUP, 3, (1, 2, 3), []),
        ((*GROUP, standby(1)), 1, (), []),
        ((*GROUP, standby(2)), 2, (1,), []),
        ((*GROUP, owners(2)), 1, (), []),  # the owner has more pods than the job needs
        ((*GROUP, owners(2), standby(1)), 1, (), ["gpt-standby-1"]),
        ((*GROUP, standby(1), standby(2)), 1, (), ["gpt-standby-2"]),
        ((*GROUP, standby(1, is_running=False), standby(2)), 1, (), ["gpt-standby-1"]),
        ((*GROUP, standby(1, is_leaving=True)), 1, (2,), []),  # its name is still taken
        ((*GROUP, standby(1, has_ended=True)), 1, (2,), ["gpt-standby-1"]),
        ((*GROUP, standby(1, node="n1")), 1, (2,), ["gpt-standby-1"]),  # beside a member with ranks
        ((owners(0), owners(1, is_leaving=True)), 1, (1,), []),  # the owner replaces its own pod
    ],
)
def test_a_job_that_trains_keeps_the_requested_number(
    pods: tuple[PodMember, ...], standbys: int, create: tuple[int, ...], delete: list[str]
) -> None:
    assert planned(pods, standbys) == (create, delete)


def test_the_pod_that_the_owner_creates_for_a_lost_one_is_the_next_standby() -> None:
    """The standby that took over the ranks counts, so no third pod is created and none is deleted."""
    took_over = standby(1)
    active = ("gpt-0", took_over.name)
    lost = owners(1, node="gone", is_running=False)
    assert planned((owners(0), lost, took_over), active=active) == ((), [])
    successor = _pod("gpt-1b", "n3")
    assert planned((owners(0), successor, took_over), active=active) == ((), [])


@pytest.mark.parametrize(
    ("waited_s", "create", "delete"), [(PLACE_S - 1, (), []), (PLACE_S, (2,), ["gpt-standby-1"])]
)
def test_a_standby_that_is_not_scheduled_soon_is_deleted(
    waited_s: float, create: tuple[int, ...], delete: list[str]
) -> None:
    waits = replace(standby(1, is_running=False), node="")
    placement = ["gpt-0.uid", "gpt-1.uid"]
    unplaced = {waits.uid: waited_s}
    found = plan((*GROUP, waits), placement, 2, 1, may_create=True, over_s=None, unplaced_s=unplaced)
    assert (found.create, [pod.name for pod, _ in found.delete]) == (create, delete)


def test_nothing_is_created_while_the_job_does_not_train() -> None:
    assert plan(GROUP, ["gpt-0.uid"], 2, 1, may_create=False, over_s=None) == StandbyPlan()


@pytest.mark.parametrize(
    ("there", "over_s", "is_deleted"),
    [
        (standby(1), 0.0, False),  # it ends with the job's exit code, as ordered
        (standby(1), END_S, True),
        (standby(1, is_running=False), 0.0, True),
        (standby(1, has_ended=True), 0.0, True),
        (standby(1, is_leaving=True), END_S, False),
    ],
)
def test_an_idle_standby_goes_when_the_job_has_ended(
    there: PodMember, over_s: float, is_deleted: bool
) -> None:
    found = plan((*GROUP, there), ["gpt-0.uid", "gpt-1.uid"], 2, 1, may_create=False, over_s=over_s)
    assert [pod for pod, _ in found.delete] == ([there] if is_deleted else [])
    assert found.create == ()


@pytest.mark.parametrize(
    ("took_over", "over_s", "is_deleted"),
    [
        (standby(1), 0.0, False),
        (standby(1, is_running=False), 0.0, False),  # its sidecar has not ended yet
        (standby(1, has_ended=True), END_S, False),
        (standby(1, is_running=False), END_S, True),  # its node is lost
        (standby(1), END_S, True),
    ],
)
def test_a_standby_that_trained_until_the_end_is_kept_with_its_log_once_it_has_ended(
    took_over: PodMember, over_s: float, is_deleted: bool
) -> None:
    placement = ["gpt-0.uid", took_over.member]
    found = plan((owners(0), took_over), placement, 2, 1, may_create=False, over_s=over_s)
    assert [pod for pod, _ in found.delete] == ([took_over] if is_deleted else [])


_STATE = st.sampled_from(({}, {"is_leaving": True}, {"has_ended": True}, {"is_running": False}))


@given(
    st.lists(st.tuples(st.integers(0, 3), _STATE), max_size=4),
    st.lists(st.tuples(st.integers(0, 4), _STATE), max_size=5),
    st.integers(0, 3),
)
def test_the_plan_is_reached_and_then_asks_for_nothing(
    owned: list[tuple[int, dict[str, bool]]], ours: list[tuple[int, dict[str, bool]]], standbys: int
) -> None:
    """A new standby is never beside a member with ranks, because its pod excludes their nodes."""
    pods = [owners(number, f"n{node}", **state) for number, (node, state) in enumerate(owned)]
    pods += [standby(number, f"n{node}", **state) for number, (node, state) in enumerate(ours, 1)]
    for _ in range(8):
        found = plan(pods, ["gpt-0.uid", "gpt-1.uid"], 2, standbys, may_create=True, over_s=None)
        deleted = {pod.uid for pod, _ in found.delete}
        assert all(pod.is_standby and pod.member not in ("gpt-0.uid", "gpt-1.uid") for pod, _ in found.delete)
        assert not {standby_name("gpt", "u", number) for number in found.create} & {pod.name for pod in pods}
        if not deleted and not found.create:
            break
        pods = [pod for pod in pods if pod.uid not in deleted]
        pods += [standby(number, f"free{number}") for number in found.create]
    else:
        raise AssertionError("the plan does not converge")


@pytest.mark.parametrize(
    ("kept_out", "initializes", "trains", "goes"),
    [
        ("gpt-0", True, False, True),
        ("", True, False, False),
        ("gpt-0", False, False, False),  # its image is being pulled, or it takes the ranks when it is ready
        ("gpt-0", True, True, False),  # the owner's pod would only be the next standby
    ],
)
def test_a_standby_that_does_not_start_is_not_in_the_way_of_the_owners_new_pod(
    kept_out: str, initializes: bool, trains: bool, goes: bool
) -> None:
    """In a PyTorchJob, the copy of a worker waits in its init container for the master."""
    master = replace(owners(0, is_running=False), node="")
    pods = (master, owners(1), standby(1, is_running=False, is_initializing=initializes))
    placement = ("gpt-0.old", "gpt-1.uid")
    found = plan(pods, placement, 2, 1, may_create=trains, over_s=None, kept_out=kept_out)
    assert [(each.name, why) for each, why in found.delete] == (
        [("gpt-standby-1", "its init containers do not end, and pod gpt-0 finds no node")] if goes else []
    )
