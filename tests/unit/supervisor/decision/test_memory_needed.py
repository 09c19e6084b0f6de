from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Launch, Restore
from holdfast.protocol.member_messages import MemoryUse
from supervisor.decision import memory_needed
from supervisor.decision.decide import decide
from supervisor.decision.memory_needed import Volume
from supervisor.view.model import End, MemberView, PastFault, Policy, View
from tests.unit.supervisor.job_views import LAUNCH, launcher, member, progress, rank, report, view

GB = 1_000_000_000
POLICY = Policy(members=2, standby=1)


def at(name: str, number: int | None, step: int = 3, **given: Any) -> MemberView:
    """Return a member of one host, with a state of 2 GB unless told otherwise."""
    told = replace(MemoryUse("host:1", 2 * GB, 4 * GB, 1000, 10 * GB, 10 * GB), **given)
    ranks = () if number is None else (rank(number),)
    steps = () if number is None else (progress(number, step),)
    return member(name, report(name, launcher(*ranks), room=told, progress=steps))


def seen(*members: MemberView, **given: Any) -> View:
    return view(*members, **given)


def test_two_snapshots_for_each_member_and_one_for_a_standby_are_needed() -> None:
    [found] = memory_needed.volumes(
        seen(at("m0", 0), at("m1", 1), at("m2", None, state_bytes=0, slots_bytes=0))
    )
    assert found.needed_bytes == (4 + 4 + 2) * GB + 3000
    assert found.used_bytes == 8 * GB + 3000
    assert found.available_bytes == 18 * GB + 3000
    assert found.fits


def test_members_of_other_hosts_have_separate_memory() -> None:
    first, second = memory_needed.volumes(seen(at("m0", 0), at("m1", 1, volume="other:1", free_bytes=1)))
    assert (first.members, second.members) == (("m0",), ("m1",))
    assert second.fits, "both of its snapshots are there already"


@pytest.mark.parametrize("short", ["free_bytes", "available_bytes"])
def test_a_run_that_has_just_started_is_refused_with_numbers_and_advice(short: str) -> None:
    members = [at(f"m{n}", n, slots_bytes=GB, **{short: 4 * GB}) for n in range(2)]
    action = decide(seen(*members), POLICY)
    assert isinstance(action, End)
    assert action.exit_code == 2
    assert "a state of 2.00 GB takes 8.00 GB" in action.why
    assert "2 snapshots for each of 2 members" in action.why
    assert "but only 6.00 GB is available" in action.why
    assert "--shm-size" in action.why


def test_a_cgroup_limit_is_named_if_it_prevents_the_run_from_fitting() -> None:
    members = [
        at(f"m{n}", n, slots_bytes=GB, free_bytes=9 * GB, available_bytes=2 * GB, limit_bytes=5 * GB)
        for n in range(2)
    ]
    found = memory_needed.reason_to_refuse(seen(*members))
    assert found is not None
    assert "4.00 GB is available under the memory limit of 5.00 GB of its cgroup" in found.why
    assert "a higher memory limit" in found.why
    volume = [at(f"m{n}", n, slots_bytes=GB, free_bytes=1, limit_bytes=5 * GB) for n in range(2)]
    found = memory_needed.reason_to_refuse(seen(*volume))
    assert found is not None
    assert ("cgroup" in found.why, "--shm-size" in found.why) == (False, True), "only the volume is too small"


def test_a_run_with_something_to_lose_is_never_refused() -> None:
    late = [at(f"m{n}", n, step=memory_needed.EARLY_STEPS + 1, slots_bytes=0, free_bytes=1) for n in range(2)]
    assert memory_needed.reason_to_refuse(seen(*late)) is None
    early = [at(f"m{n}", n, slots_bytes=0, free_bytes=1) for n in range(2)]
    assert memory_needed.reason_to_refuse(seen(*early)) is not None
    past = PastFault("crash", 1, "m1", 2, "killed", 0, 1)
    assert memory_needed.reason_to_refuse(seen(*early, history=(past,))) is None


def test_unknown_sizes_refuse_nothing() -> None:
    assert memory_needed.volumes(seen(at("m0", 0, state_bytes=0), at("m1", 1, state_bytes=0))) == ()
    nobody = member("m0", report("m0", launcher(rank(0))))
    assert memory_needed.reason_to_refuse(seen(nobody, member("m1"))) is None
    assert memory_needed.as_status(seen(nobody)) is None


def test_status_shows_the_volume_that_has_the_least_to_spare() -> None:
    found = memory_needed.as_status(seen(at("m0", 0), at("m1", 1, volume="other:1", free_bytes=5)))
    assert found is not None
    assert found["members"] == ["m1"]
    assert found["available_bytes"] == 4 * GB + 1000 + 5
    assert found["needed_bytes"] <= found["available_bytes"]


def test_the_figures_of_each_volume_are_exact() -> None:
    members = (
        at("m0", 0, slots_bytes=5 * GB),
        at("m1", 1, private_bytes=7, free_bytes=9 * GB, limit_bytes=4),
        at("m2", None, state_bytes=0, slots_bytes=GB),
        at(
            "m3",
            3,
            volume="a:1",
            state_bytes=GB,
            slots_bytes=0,
            free_bytes=3 * GB,
            available_bytes=2 * GB,
            limit_bytes=9,
        ),
        at("m4", 4, volume=""),
        replace(at("m5", 5), connected=False),
        replace(at("m6", 6), exists=False),
    )
    first, second = memory_needed.volumes(seen(*members, placement=("m0", "m1", "m3", "m4")))
    assert first == Volume("a:1", ("m3",), 4 * GB + 1000, 1000, 2 * GB + 1000, 2 * GB, 9)
    used = 10 * GB + 2007
    assert second == Volume(
        "host:1", ("m0", "m1", "m2"), (5 + 4 + 2) * GB + 2007, used, used + 9 * GB, 2 * GB
    )
    assert [replace(second, available_bytes=second.needed_bytes - n).fits for n in (0, 1)] == [True, False]
    assert memory_needed.as_status(seen(*members, placement=("m0", "m1", "m3", "m4"))) == {
        "state_bytes": 2 * GB,
        "needed_bytes": 4 * GB + 1000,
        "available_bytes": 2 * GB + 1000,
        "used_bytes": 1000,
        "members": ["m3"],
    }


SMALL: dict[str, Any] = {"state_bytes": 400_000_000, "slots_bytes": 0, "private_bytes": 0}
IN_ALL = "not enough memory: a state of 400.0 MB takes"


@pytest.mark.parametrize(
    ("room", "standby", "says"),
    [
        (
            {"free_bytes": 999_999_999},
            False,
            f"{IN_ALL} 1.60 GB in shared memory (2 snapshots for each of 2 members),"
            " but only 1000.0 MB is available; use fewer members or standbys on this host, or give it more"
            " room in /dev/shm (docker run --shm-size) and memory",
        ),
        (
            {"available_bytes": 10**9, "limit_bytes": 2 * 10**9},
            True,
            f"{IN_ALL} 2.00 GB in shared memory (2 snapshots for each of 2 members and"
            " 1 for each of 1 standbys), but only 1.00 GB is available under the memory limit of 2.00 GB of"
            " its cgroup; use fewer members or standbys on this host, or give it a higher memory limit",
        ),
    ],
)
def test_the_refusal_of_a_run_states_the_needed_and_the_free_memory(
    room: dict[str, int], standby: bool, says: str
) -> None:
    members = [at(f"m{n}", n, **SMALL, **room) for n in range(2)]
    members += [at("m2", None, **SMALL, **room)] * standby
    assert memory_needed.reason_to_refuse(seen(*members)) == End(2, says)


def test_the_first_steps_are_counted_from_where_the_run_began() -> None:
    def refused(step: int, launch: Launch | None = LAUNCH) -> bool:
        members = [at(f"m{n}", n, step=step, slots_bytes=0, free_bytes=1) for n in range(2)]
        return memory_needed.reason_to_refuse(seen(*members, launch=launch)) is not None

    assert [refused(step) for step in (64, 65)] == [True, False]
    assert [refused(step, None) for step in (64, 65)] == [True, False]
    resumed = replace(LAUNCH, restore=Restore(100, 1, "slot"))
    assert [refused(step, resumed) for step in (164, 165)] == [True, False]
