"""Without a replacement for a lost member, the group goes on smaller, and grows back between two steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.decision.membership import joining, resizing
from supervisor.view.model import Policy, Secure, Start, Warn
from tests.simulation.cluster.member import Content
from tests.simulation.cluster.scripts import actions
from tests.simulation.cluster.world import World

STEPS, STEP_MS = 160, 400  # longer than the waits and hold times
THREE = Policy(members=3, min_members=2, checkpoint_every_s=4.0, max_restarts=1000)
AT_MS, NEVER_MS = 5000, 10**9
HOLD_MS = int(joining.HOLD_S * 1000)


def world(policy: Policy = THREE, *, steps: int = STEPS, resizes: bool = True, **given: object) -> World:
    return World(policy, steps, STEP_MS, resizes=resizes, **given)  # type: ignore[arg-type]


def lose(name: str, *, back_ms: int) -> partial[None]:
    """Lose a member whose replacement is ready after `back_ms`."""
    return partial(_lose, name=name, back_ms=back_ms)


def _lose(world: World, *, name: str, back_ms: int) -> None:
    world.boot_ms = back_ms
    if name in world.exists:
        world.remove(name)


def is_whole(ended: World) -> bool:
    return ended.ended is not None and ended.ended.exit_code == 0 and ended.final == Content(ended.steps)


def groups(ended: World) -> list[tuple[str, tuple[str, ...], int | None]]:
    """Return the cause, the placement and the number of lost steps of each start but the first."""
    found = [(a, after) for _, a, after in ended.journal if isinstance(a, Start)][1:]
    return [
        (
            action.cause.kind if action.cause else "",
            action.placement,
            after.incident.lost if after.incident else None,
        )
        for action, after in found
    ]


def test_a_group_goes_on_smaller_and_grows_back_without_losing_a_step() -> None:
    ended = world().at(AT_MS, lose("m1", back_ms=20_000)).run(200.0)
    assert is_whole(ended)
    smaller, whole = groups(ended)
    assert smaller[:2] == ("member_lost", ("m0", "m2"))
    assert smaller[2] in (0, 1)
    assert whole == ("growth", ("m0", "m2", "m3"), 0)
    assert [past.kind for past in ended.memory.history] == ["member_lost"], "growing is not a fault"
    assert (ended.memory.world_size, ended.memory.reduced_by, ended.memory.full_members) == (3, 0, 3)


def test_each_rank_goes_on_with_the_private_state_that_its_member_had() -> None:
    ended = world().at(AT_MS, lose("m1", back_ms=20_000)).run(200.0)
    first, second, third = (ended.group.launches[generation] for generation in (1, 2, 3))
    assert (first.world_size, second.world_size, third.world_size) == (3, 2, 3)
    assert (first.states_of, second.states_of, third.states_of) == ((), (0, 2), (0, 1, -1))
    assert second.restore is not None
    assert third.restore is not None
    assert (second.restore.world_size, third.restore.world_size) == (3, 2)


def test_a_replacement_that_is_soon_ready_makes_no_smaller_group() -> None:
    ended = world().at(AT_MS, lose("m1", back_ms=2000)).run(200.0)
    assert is_whole(ended)
    assert [placement for _, placement, _ in groups(ended)] == [("m0", "m3", "m2")]


def test_a_replacement_that_has_connected_is_awaited_longer() -> None:
    slow = int(resizing.CONNECTED_S * 1000) - 2000
    ended = world().at(AT_MS, lose("m1", back_ms=slow)).run(200.0)
    assert [placement for _, placement, _ in groups(ended)] == [("m0", "m3", "m2")]


def test_by_default_the_group_waits() -> None:
    ended = world(replace(THREE, min_members=0)).at(AT_MS, lose("m1", back_ms=30_000)).run(200.0)
    assert is_whole(ended)
    assert [placement for _, placement, _ in groups(ended)] == [("m0", "m3", "m2")]


def test_a_script_that_cannot_go_on_with_fewer_ranks_waits_and_the_user_is_told_once() -> None:
    made = world(resizes=False).at(AT_MS, lose("m1", back_ms=30_000)).at(45_000, lose("m2", back_ms=500))
    ended = made.run(200.0)
    assert is_whole(ended)
    assert {len(placement) for _, placement, _ in groups(ended)} == {3}
    [warning] = [each for each in actions(ended, Warn) if each.place == "--min-members"]
    assert "--min-members 2 has no effect" in warning.why


def test_a_second_loss_beyond_the_least_size_is_awaited() -> None:
    made = world().at(AT_MS, lose("m1", back_ms=25_000)).at(22_000, lose("m2", back_ms=25_000))
    ended = made.run(200.0)
    assert is_whole(ended)
    assert next(len(placement) for _, placement, _ in groups(ended)) == 2
    assert {len(placement) for _, placement, _ in groups(ended)} <= {2, 3}


def test_a_smaller_group_restarts_after_a_fault_without_waiting() -> None:
    made = world(cues={(1, 50): ("kill", 1)}).at(AT_MS, lose("m1", back_ms=NEVER_MS))
    ended = made.run(200.0)
    assert is_whole(ended)
    assert [placement for _, placement, _ in groups(ended)] == [("m0", "m2"), ("m0", "m2")]
    secured, started = [
        view.now_ns
        for view, action, _ in ended.journal
        if isinstance(action, Secure | Start) and view.memory.generation == 2
    ]
    assert started - secured < resizing.SHRINK_S * 1e9


def test_a_checkpoint_of_a_smaller_group_resumes_in_a_full_one() -> None:
    """All members of the smaller group are lost at once, and the whole group returns."""

    def all_lost(now: World) -> None:
        now.boot_ms = 500
        for name in ("m0", "m2"):
            now.remove(name)

    ended = world().at(AT_MS, lose("m1", back_ms=NEVER_MS)).at(40_000, all_lost).run(300.0)
    assert is_whole(ended)


def test_a_member_that_comes_and_goes_resizes_the_group_less_and_less_often() -> None:
    def gone_again(now: World) -> None:
        newest = max(now.exists, key=lambda name: int(name[1:]))
        if newest in now.memory.placement and len(now.memory.placement) == 3:
            _lose(now, name=newest, back_ms=11_000)
        now.after(1000, partial(gone_again, now))

    ended = world(steps=600).at(AT_MS, gone_again).run(600.0)
    assert is_whole(ended)
    grown = [
        view.now_ns
        for view, a, _ in ended.journal
        if isinstance(a, Start) and a.cause and a.cause.kind == "growth"
    ]
    shrunk = [view.now_ns for view, a, _ in ended.journal if isinstance(a, Start) and len(a.placement) == 2]
    waits_s = [(at - max(each for each in shrunk if each < at)) / 1e9 for at in grown]
    assert len(waits_s) >= 3
    for number, wait_s in enumerate(waits_s):
        assert wait_s >= min(joining.MAX_HOLD_S, joining.HOLD_S * 2**number)


def test_the_supervisor_may_die_at_any_point_of_a_change_of_size() -> None:
    whole = world(steps=100).at(AT_MS, lose("m1", back_ms=12_000)).run(200.0)
    starts = [n for n, (_, action, _) in enumerate(whole.journal) if isinstance(action, Start)]
    for start in starts[1:]:
        first, last = whole.decided[start - 1] - 2, whole.decided[start + 1] + 2
        for point in range(first, last, 2):
            made = world(steps=100, kills=frozenset({point})).at(AT_MS, lose("m1", back_ms=12_000))
            ended = made.run(300.0)
            assert is_whole(ended), point
            assert [len(placement) for _, placement, _ in groups(ended)] in ([2, 3], [3]), point
            assert all(lost == 0 for cause, _, lost in groups(ended) if cause == "growth"), point


def test_a_restart_does_not_shorten_the_time_until_a_member_joins() -> None:
    """A rank fails when the replacement is ready, but the smaller group has hardly trained."""
    made = world(cues={(1, 16): ("kill", 1)}).at(AT_MS, lose("m1", back_ms=10_500))
    ended = made.run(200.0)
    assert is_whole(ended)
    starts = [(view.now_ns, a) for view, a, _ in ended.journal if isinstance(a, Start)][1:]
    assert [len(a.placement) for _, a in starts] == [2, 2, 3]
    assert starts[1][1].cause is not None
    assert starts[1][1].cause.kind == "crash"
    assert starts[2][0] - starts[1][0] >= joining.HOLD_S * 1e9, "it waits from the last start on"


BROKEN = ("raise", "leave", "crash", "kill", "hang", "lose")  # what happens on the node of a joiner


def with_broken_joiners(what: str, **given: object) -> World:
    """Return a group whose lost member is only ever replaced by members on broken nodes."""
    policy = replace(THREE, max_restarts=2)  # so joiners would soon use up the restarts
    made = world(policy, broken={f"m{number}": what for number in range(3, 99)}, **given)  # type: ignore[arg-type]
    return made.at(AT_MS, lose("m1", back_ms=20_000))


@pytest.mark.parametrize("what", BROKEN)
def test_a_joiner_that_fails_at_once_never_ends_the_smaller_group(what: str) -> None:
    ended = with_broken_joiners(what, steps=300).run(400.0)
    assert is_whole(ended)
    assert [past.kind for past in ended.memory.history] == ["member_lost"], "only the first loss counts"
    assert [placement for _, placement, _ in groups(ended) if len(placement) == 2] == [("m0", "m2")] * (
        (len(groups(ended)) + 1) // 2
    ), "each joiner is left out after its first failure"
    assert len(groups(ended)) >= 5
    assert all(lost == 0 for _, _, lost in groups(ended)[1:])


@pytest.mark.parametrize("what", BROKEN)
def test_each_joiner_that_fails_doubles_the_time_until_the_next_one(what: str) -> None:
    ended = with_broken_joiners(what, steps=300).run(400.0)
    starts = [(view.now_ns, len(a.placement)) for view, a, _ in ended.journal if isinstance(a, Start)][1:]
    waits_s = [(after - before) / 1e9 for (before, _), (after, size) in pairwise(starts) if size == 3]
    assert len(waits_s) >= 2
    for number, wait_s in enumerate(waits_s):
        assert wait_s >= joining.HOLD_S * 2**number


@pytest.mark.parametrize("what", ["raise", "hang"])
def test_the_supervisor_may_die_at_any_point_while_a_joiner_fails(what: str) -> None:
    whole = with_broken_joiners(what, steps=140).run(300.0)
    starts = [n for n, (_, action, _) in enumerate(whole.journal) if isinstance(action, Start)]
    first, last = whole.decided[starts[2] - 1] - 2, whole.decided[starts[3] + 1] + 2
    for point in range(first, last, 3):
        ended = with_broken_joiners(what, steps=140, kills=frozenset({point})).run(300.0)
        assert is_whole(ended), point
        assert {len(placement) for _, placement, _ in groups(ended)[:3]} == {2, 3}, point


def full_disk(now: World, is_full: bool) -> None:
    now.disk_full = is_full


@pytest.mark.parametrize(
    ("full_ms", "free_ms", "kill_ms"),
    [
        (20_000, 33_000, 33_000),
        (4000, 12_000, 12_000),
        (4000, 14_100, 14_000),
        (4900, 9600, 9500),
        (5500, 9600, 9500),
        (14_000, 30_000, 17_000),
        (24_500, 50_000, 30_000),
    ],
)
def test_whoever_takes_over_knows_how_many_ranks_saved_the_state(
    full_ms: int, free_ms: int, kill_ms: int
) -> None:
    made = world().at(AT_MS, lose("m1", back_ms=20_000)).at(full_ms, partial(full_disk, is_full=True))
    made.at(kill_ms, World.kill_supervisor).at(free_ms, partial(full_disk, is_full=False))
    ended = made.run(300.0)
    assert is_whole(ended)
    checked = 0
    for _, action, after in ended.journal:
        restore = after.launch.restore if isinstance(action, Start) and after.launch is not None else None
        if restore is not None and after.launch is not None and restore.generation in ended.group.launches:
            told = restore.world_size or after.launch.world_size
            assert told == ended.group.launches[restore.generation].world_size
            checked += 1
    assert checked
    assert ended.memory.world_size == 3


def test_a_group_is_not_resized_before_decisions_can_be_recorded() -> None:
    made = world().at(AT_MS, lose("m1", back_ms=15_000)).at(4000, partial(full_disk, is_full=True))
    ended = made.at(60_000, partial(full_disk, is_full=False)).run(300.0)
    assert is_whole(ended)
    assert [placement for _, placement, _ in groups(ended)] == [("m0", "m3", "m2")]
    made = world(steps=300).at(AT_MS, lose("m1", back_ms=20_000)).at(17_000, partial(full_disk, is_full=True))
    ended = made.at(60_000, partial(full_disk, is_full=False)).run(300.0)
    assert is_whole(ended)
    grown = [view.now_ns for view, a, _ in ended.journal if isinstance(a, Start) and len(a.placement) == 3]
    assert len(grown) == 2
    assert grown[1] >= 60e9, "it grows once the disk has room"


@st.composite
def disturbed(draw: st.DrawFn) -> World:
    """Draw a group that loses members at random times, whose replacements need a random time."""
    members = draw(st.integers(2, 4))
    least = draw(st.integers(1, members))
    policy = replace(
        THREE,
        members=members,
        min_members=least if least < members else 0,
        standby=draw(st.integers(0, 1)),
        nproc=draw(st.integers(1, 2)),
    )
    made = world(
        policy,
        steps=80,
        snapshot_every=draw(st.sampled_from([0, 1, 3])),
        kills=frozenset(draw(st.sets(st.integers(1, 1500), max_size=2))),
    )
    for _ in range(draw(st.integers(1, 4))):
        name = f"m{draw(st.integers(0, members + 2))}"
        back_ms = draw(st.sampled_from([300, 6000, 14_000, 25_000]))
        made.at(draw(st.integers(600, 50_000)), lose(name, back_ms=back_ms))
    for _ in range(draw(st.integers(0, 2))):
        rank, step = draw(st.integers(0, members - 1)), draw(st.integers(1, 79))
        made.cues[rank, step] = (draw(st.sampled_from(["kill", "raise", "lose", "sidecar"])), 1)
    return made


@settings(max_examples=60, deadline=None)
@given(disturbed())
def test_whatever_is_lost_the_group_is_never_too_small_and_growing_loses_no_step(world: World) -> None:
    """The world asserts at every start that the group is neither too small nor too large."""
    ended = world.run(3000.0)
    assert ended.ended is not None
    if ended.ended.exit_code:
        assert "no state is left to resume from" in ended.ended.why
    else:
        assert is_whole(ended)
    assert set(ended.closed) == set(range(1, ended.memory.incidents + 1))
    sizes = [len(placement) for _, placement, _ in groups(ended)]
    for before, (cause, placement, lost) in zip([world.policy.members, *sizes], groups(ended), strict=False):
        if cause == "growth":
            assert not lost
            assert len(placement) >= before, "it stopped to grow, and shrank"
