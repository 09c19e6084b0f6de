"""Which verdicts move members: the breaker, storms, flapping and dry runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.nodes.verdicts import AgentVerdicts, NodesInService, VerdictSwaps
from supervisor.quarantine import breaker
from supervisor.quarantine.model import NodePolicy, NodeView, Quarantine, Report

POLICY = NodePolicy()
BAD = "GPU 3 is lost"


class PlayedVerdicts:
    """A pool whose nodes are healthy, with the verdicts of their agents and the nodes that are out."""

    def __init__(self, count: int, policy: NodePolicy = POLICY) -> None:
        self.names = [f"n{number:02d}" for number in range(count)]
        self.policy, self.now_s = policy, 1000.0
        self.out: set[str] = set()
        self.waived: set[str] = set()
        self.silent: set[str] = set()
        self.verdicts = AgentVerdicts()
        for each in self.names:
            self.say(each, "")

    def say(
        self, name: str, said: str = BAD, rack: str = "", age_s: float = 0.0, calm_s: float = math.inf
    ) -> bool:
        expected = name in self.out | self.waived
        return self.verdicts.note(
            name, said, self.now_s, rack, is_expected=expected, age_s=age_s, calm_s=calm_s
        )

    def change_leader(self) -> None:
        """Forget all verdicts, as a new leader does."""
        self.verdicts = AgentVerdicts()

    def service(self) -> NodesInService:
        held = Quarantine(("k",), "reboot_node", ("s",), "b", 0.0)
        views = [
            NodeView(each, Report(), 0.0, quarantine=held if each in self.out else None)
            for each in self.names
        ]
        return NodesInService(
            breaker.assess(len(views), views, self.policy),
            frozenset(self.out),
            frozenset(self.waived),
            frozenset(self.silent),
        )

    def swaps(self, *, is_dry: bool = False) -> VerdictSwaps:
        return self.verdicts.swaps(self.service(), self.policy, self.now_s, is_dry=is_dry)


def test_a_verdict_moves_the_members_of_its_node_until_it_ends() -> None:
    pool = PlayedVerdicts(3)
    assert pool.swaps() == VerdictSwaps()
    assert pool.say("n00")
    for _ in range(3):
        assert pool.swaps() == VerdictSwaps(frozenset({"n00"}))
        assert not pool.say("n00", "another sentence")
        pool.now_s += 1e5
    assert pool.say("n00", "")
    assert pool.swaps() == VerdictSwaps()


def test_in_a_dry_run_nobody_moves_and_what_would_happen_is_said() -> None:
    pool = PlayedVerdicts(3)
    pool.say("n00")
    assert pool.swaps(is_dry=True) == VerdictSwaps(would={"n00": BAD})
    assert pool.swaps() == VerdictSwaps(frozenset({"n00"})), "the dry run has ended"


def test_a_verdict_that_flaps_moves_members_once_per_hold_time() -> None:
    pool = PlayedVerdicts(3)
    moved = 0
    for _ in range(100):
        pool.say("n00")
        found = pool.swaps()
        moved += "n00" in found.moving
        assert "n00" in found.moving or "its members have moved already" in found.held["n00"]
        pool.now_s += 10.0
        pool.say("n00", "")
        pool.swaps()
        pool.now_s += POLICY.cooldown_s / 20 - 10.0
    assert moved == 5


def test_a_verdict_that_flapped_and_then_stays_moves_members_when_the_hold_time_is_over() -> None:
    pool = PlayedVerdicts(3)
    for said in (BAD, "", BAD):
        pool.say("n00", said)
        found = pool.swaps()
    assert found.moving == frozenset()
    pool.now_s += POLICY.cooldown_s
    assert pool.swaps().moving == {"n00"}


def test_the_breaker_holds_the_second_node_of_a_small_pool() -> None:
    pool = PlayedVerdicts(5)
    pool.say("n00")
    assert pool.swaps().moving == {"n00"}
    pool.now_s += POLICY.storm_window_s
    pool.say("n01")
    found = pool.swaps()
    assert found.moving == {"n00"}
    assert "no other node may be taken out: 0 of 5 nodes are out; at most 1 may be" in found.held["n01"]
    assert "the members of 1 more are moving" in found.held["n01"]


def test_a_node_that_is_tainted_after_its_members_moved_counts_once() -> None:
    pool = PlayedVerdicts(20)
    for name in ("n00", "n01"):
        pool.say(name)
        assert name in pool.swaps().moving
        pool.out.add(name)
    assert pool.swaps().moving == {"n00", "n01"}, "the nodes are out: nothing more is taken away"
    pool.say("n02")
    assert "2 of 20 nodes are out; at most 2 may be" in pool.swaps().held["n02"]


def test_most_nodes_bad_at_once_move_nobody() -> None:
    pool = PlayedVerdicts(3)
    pool.say("n00")
    pool.say("n01")
    found = pool.swaps()
    assert found.moving == frozenset()
    assert {*found.held} == {"n00", "n01"}
    assert "a storm: the agents of 2 of 3 nodes report faults" in found.held["n00"]


def test_a_storm_stops_a_move_that_was_allowed_before_it_could_be_seen() -> None:
    pool = PlayedVerdicts(3)
    pool.say("n00")
    assert pool.swaps().moving == {"n00"}
    pool.say("n01")
    assert pool.swaps().moving == frozenset()
    pool.say("n01", "")
    assert "a storm has not been over for long enough" in pool.swaps().held["n00"]
    pool.now_s += POLICY.cooldown_s
    assert pool.swaps().moving == {"n00"}


def test_many_nodes_within_a_window_are_a_storm_even_if_they_recover() -> None:
    pool = PlayedVerdicts(100)
    for name in pool.names[: POLICY.storm_nodes]:
        pool.say(name)
        pool.say(name, "")
        pool.now_s += 60.0
    pool.swaps()
    pool.say("n50")
    assert "a storm: the agents of 6 of 100 nodes" in pool.swaps().held["n50"]


def test_a_storm_of_one_rack_holds_its_nodes_only() -> None:
    pool = PlayedVerdicts(100)
    for name in pool.names[: POLICY.rack_nodes]:
        pool.say(name, BAD, "r1")
    pool.say("n90", BAD, "r2")
    found = pool.swaps()
    assert found.moving == {"n90"}
    assert all("3 nodes of rack r1" in each for each in found.held.values())


def flap(pool: PlayedVerdicts, names: list[str], rack: str = "") -> VerdictSwaps:
    """Let the verdicts of these nodes turn bad, and end a minute later. Return the swaps in between."""
    for name in names:
        pool.say(name, BAD, rack)
    found = pool.swaps()
    pool.now_s += 60.0
    for name in names:
        pool.say(name, "", rack)
    pool.swaps()
    return found


@pytest.mark.parametrize(
    ("count", "flapping", "rack"), [(3, 1, ""), (100, POLICY.storm_nodes, ""), (100, POLICY.rack_nodes, "r1")]
)
def test_nodes_that_flap_hold_a_node_that_has_been_bad_all_along_for_one_cool_down(
    count: int, flapping: int, rack: str
) -> None:
    pool = PlayedVerdicts(count)
    begun_s, last = pool.now_s, pool.names[-1]
    pool.say(last, BAD, rack)
    while pool.now_s < begun_s + POLICY.cooldown_s:
        found = flap(pool, pool.names[:flapping], rack)
        assert found.moving == frozenset()
        assert "a storm" in found.held[last]
        pool.now_s += 60.0
    for _ in range(10):
        assert flap(pool, pool.names[:flapping], rack).moving == {last}
        pool.now_s += 60.0


@pytest.mark.parametrize("count", [3, 100])
def test_nodes_that_turned_bad_together_wait_until_the_others_calm_down_and_then_raise_an_alert(
    count: int,
) -> None:
    pool = PlayedVerdicts(count)
    together = POLICY.storm_nodes if count > 10 else 2
    begun_s, bad = pool.now_s, frozenset(pool.names[:together])
    for name in bad:
        pool.say(name)
    while pool.now_s < begun_s + POLICY.alert_s:
        found = flap(pool, pool.names[together : 2 * together])
        assert found.moving == frozenset()
        assert found.alerts == frozenset()
    found = pool.swaps()
    assert found.held.keys() == found.alerts == bad


def test_a_storm_that_is_too_large_to_consist_of_flapping_nodes_holds_every_node() -> None:
    pool = PlayedVerdicts(100)
    pool.say("n99")
    for _ in range(20):
        found = flap(pool, pool.names[: 2 * POLICY.storm_nodes])
        pool.now_s += 60.0
    assert "a storm" in found.held["n99"]


def test_a_node_that_the_breaker_holds_raises_an_alert_in_the_end() -> None:
    pool = PlayedVerdicts(20)
    pool.out = {"n00", "n01"}
    pool.say("n02")
    assert pool.swaps().alerts == frozenset()
    pool.now_s += POLICY.alert_s
    assert pool.swaps().alerts == {"n02"}


def test_a_node_that_flaps_for_long_enough_raises_an_alert_although_its_members_move() -> None:
    pool, alerts = PlayedVerdicts(20), list[float]()
    begun_s = pool.now_s
    while pool.now_s < begun_s + POLICY.alert_s + 3600.0:
        for said, lasts_s in ((BAD, 290.0), ("", 91.0)):
            pool.say("n02", said)
            if "n02" in pool.swaps().alerts:
                alerts.append(pool.now_s - begun_s)
            pool.now_s += lasts_s
    assert POLICY.alert_s <= min(alerts) < POLICY.alert_s + 400.0
    pool.now_s += POLICY.cooldown_s + 1.0
    pool.say("n02")
    pool.swaps()
    pool.say("n02", "")
    pool.say("n02")
    assert pool.swaps().alerts == frozenset(), "it was well for long enough"


def test_nodes_that_are_out_already_are_no_storm_for_a_new_leader() -> None:
    pool = PlayedVerdicts(100)
    pool.out = {*pool.names[:8]}
    for name in pool.out:
        pool.say(name)
    pool.say("n50")
    assert "n50" in pool.swaps().moving


def take_over(
    pool: PlayedVerdicts, ages_s: list[float], rack: str = "", calm_s: Sequence[float] = ()
) -> None:
    """Let a new leader find the bad verdicts of the first nodes, of these ages, and the last ones calm."""
    pool.change_leader()
    ages = [*ages_s, *[math.inf] * (len(pool.names) - len(ages_s) - len(calm_s)), *calm_s]
    for number, (name, age_s) in enumerate(zip(pool.names, ages, strict=True)):
        if number < len(ages_s):
            pool.say(name, BAD, rack, age_s)
        else:
            pool.say(name, "", rack, calm_s=age_s)


@pytest.mark.parametrize(
    ("count", "bad", "rack"), [(100, POLICY.storm_nodes, ""), (100, POLICY.rack_nodes, "r1"), (3, 2, "")]
)
@pytest.mark.parametrize("at_s", [60.0, 240.0, POLICY.storm_window_s + 60.0, POLICY.cooldown_s])
def test_a_storm_lasts_as_long_under_a_new_leader_although_one_of_its_nodes_has_recovered(
    count: int, bad: int, rack: str, at_s: float
) -> None:
    """The new leader takes over `at_s` after the storm, and one node recovers 30 s before that."""
    pool = PlayedVerdicts(count)
    for name in pool.names[:bad]:
        pool.say(name, BAD, rack)
    assert "a storm" in pool.swaps().held["n00"]
    take_over(pool, [at_s] * (bad - 1), rack, [30.0])
    while pool.now_s < 1000.0 - at_s + POLICY.cooldown_s:
        assert "a storm" in pool.swaps().held["n00"]
        pool.now_s += 10.0
    pool.now_s = 1000.0 + POLICY.memory_s
    assert pool.swaps().moving


def test_nodes_that_recovered_one_by_one_are_no_storm_for_a_new_leader() -> None:
    pool = PlayedVerdicts(100)
    take_over(pool, [10.0], calm_s=[30.0 + each * POLICY.storm_window_s / 3 for each in range(7)])
    assert pool.swaps().moving == {"n00"}


def test_nodes_that_recovered_while_others_were_not_bad_yet_are_no_storm_of_most_nodes() -> None:
    pool = PlayedVerdicts(3)
    take_over(pool, [10.0], calm_s=[30.0])
    assert pool.swaps().moving == {"n00"}


def test_a_node_that_recovered_while_it_was_out_is_no_sign_of_a_storm() -> None:
    pool = PlayedVerdicts(3)
    pool.out = {"n02"}
    take_over(pool, [60.0], calm_s=[30.0])
    pool.out = set()
    assert pool.swaps().moving == {"n00"}


@pytest.mark.parametrize("rack", ["", "r1"])
def test_verdicts_of_an_hour_ago_are_no_storm_for_a_new_leader(rack: str) -> None:
    pool = PlayedVerdicts(100)
    take_over(pool, [3600.0] * POLICY.storm_nodes, rack)
    pool.say("n90", BAD, rack)
    pool.waived = {*pool.names[: POLICY.storm_nodes]}
    assert pool.swaps() == VerdictSwaps(frozenset({"n90"}))


@pytest.mark.parametrize(
    "age_s", [POLICY.storm_window_s - 1.0, 0.0, -3600.0], ids=["recent", "now", "in the future"]
)
def test_verdicts_within_the_window_are_a_storm_for_a_new_leader_too(age_s: float) -> None:
    pool = PlayedVerdicts(100)
    take_over(pool, [age_s] * POLICY.storm_nodes)
    assert "a storm: the agents of 5 of 100 nodes" in pool.swaps().held["n00"]


@pytest.mark.parametrize(("rack", "count"), [("", POLICY.storm_nodes), ("r1", POLICY.rack_nodes)])
def test_a_storm_that_is_not_over_for_long_enough_outlasts_a_change_of_the_leader(
    rack: str, count: int
) -> None:
    """Otherwise, a change of the leader would move the members of nodes that a storm has turned bad."""
    pool = PlayedVerdicts(100)
    old_s, over_s = POLICY.storm_window_s + 60.0, POLICY.storm_window_s + POLICY.cooldown_s
    take_over(pool, [old_s] * count, rack)
    pool.waived = {*pool.names[1:count]}
    assert "a storm has not been over for long enough" in pool.swaps().held["n00"]
    pool.now_s += over_s - old_s
    assert pool.swaps().moving == {"n00"}


def test_old_verdicts_that_came_one_by_one_are_no_storm_for_a_new_leader() -> None:
    pool = PlayedVerdicts(100)
    take_over(
        pool,
        [POLICY.storm_window_s * each / (POLICY.rack_nodes - 1) for each in range(POLICY.rack_nodes)],
        "r1",
    )
    pool.waived = {*pool.names[1 : POLICY.rack_nodes]}
    assert pool.swaps().moving == {"n00"}


def test_nobody_moves_from_a_node_that_an_operator_has_released_until_there_is_another_fault() -> None:
    pool = PlayedVerdicts(3)
    pool.say("n00")
    assert pool.swaps().moving == {"n00"}
    pool.waived = {"n00"}
    assert pool.swaps() == VerdictSwaps(), "the operator knows"
    pool.waived = set()
    assert pool.swaps().moving == {"n00"}


def test_a_node_that_an_operator_has_released_does_not_count_among_the_bad_nodes() -> None:
    pool = PlayedVerdicts(3)
    pool.waived = {"n00"}
    pool.say("n00")
    pool.say("n01")
    assert pool.swaps() == VerdictSwaps(frozenset({"n01"}))
    take_over(pool, [90.0], calm_s=[60.0])
    assert pool.swaps() == VerdictSwaps()


def test_flapping_verdicts_of_nodes_that_an_operator_has_released_are_no_storm() -> None:
    pool = PlayedVerdicts(100)
    pool.waived = {*pool.names[: POLICY.storm_nodes]}
    flap(pool, pool.names[: POLICY.storm_nodes])
    pool.say("n99")
    assert pool.swaps().moving == {"n99"}


@pytest.mark.parametrize(("rack", "count"), [("", POLICY.storm_nodes), ("r1", POLICY.rack_nodes)])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_new_fault_of_many_nodes_that_an_operator_has_released_is_a_storm(
    rack: str, count: int, is_silent: bool
) -> None:
    pool = PlayedVerdicts(100)
    names = pool.names[:count]
    pool.waived = {*names}
    for each in names:
        pool.say(each, BAD, rack)
    pool.now_s += 1e5
    assert pool.swaps() == VerdictSwaps()
    if is_silent:
        pool.waived, pool.silent = set(), {*names}
        assert not pool.swaps().moving
        pool.silent = set()
    pool.waived = set()
    for each in names:
        pool.say(each, "a new fault", rack)
    found = pool.swaps()
    assert not found.moving
    assert all("a storm: the agents of" in found.held[each] for each in names)
    assert not found.alerts


def test_a_node_that_recovers_while_it_is_released_is_no_sign_of_a_storm() -> None:
    pool = PlayedVerdicts(100)
    pool.waived = {*pool.names[: POLICY.storm_nodes]}
    flap(pool, pool.names[: POLICY.storm_nodes])
    pool.swaps()
    for each in pool.names[: POLICY.storm_nodes]:
        pool.say(each, "")
    pool.waived = set()
    pool.say("n99")
    assert pool.swaps().moving == {"n99"}


def test_a_node_without_an_agent_is_forgotten() -> None:
    pool = PlayedVerdicts(3)
    pool.say("n00")
    pool.swaps()
    assert pool.verdicts.note("n00", None, pool.now_s)
    assert pool.swaps() == VerdictSwaps()
    assert not pool.verdicts.note("n00", None, pool.now_s)


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 39), st.booleans(), st.floats(0.0, 2000.0)), max_size=60),
)
def test_never_more_nodes_move_than_the_breaker_has_room_for(
    count: int, turns: list[tuple[int, bool, float]]
) -> None:
    pool = PlayedVerdicts(count)
    turned = dict.fromkeys(pool.names, 0)  # how often each verdict has changed
    moved: dict[str, tuple[int, float]] = {}  # in which turn of its verdict, and when
    for number, is_bad, pause_s in turns:
        name = pool.names[number % count]
        turned[name] += pool.say(name, BAD if is_bad else "")
        moving = pool.swaps().moving
        assert len(moving) <= pool.service().breaker.room
        for each in moving:
            turn, at_s = moved.get(each, (turned[each], pool.now_s))
            assert turn == turned[each] or pool.now_s >= at_s + POLICY.cooldown_s
            if turn != turned[each] or each not in moved:
                moved[each] = turned[each], pool.now_s
        pool.now_s += pause_s


@pytest.mark.parametrize("count", [1, 2])
def test_the_last_serving_node_is_never_given_up(count: int) -> None:
    pool = PlayedVerdicts(count)
    for name in pool.names:
        pool.say(name)
        found = pool.swaps()
    assert found.moving == frozenset()


def test_the_verdict_of_a_silent_agent_is_held_and_is_no_sign_of_a_storm() -> None:
    pool = PlayedVerdicts(4)
    pool.silent = {"n00", "n01"}
    for name in ("n00", "n01", "n02"):
        pool.say(name)
    found = pool.swaps()
    assert found.moving == {"n02"}
    assert found.held["n00"] == f"{BAD}; its members stay: its agent has not been heard within 120 s"
    pool.silent = {"n00"}
    assert pool.swaps() == VerdictSwaps(frozenset({"n02"}), pool.swaps().held), "the breaker is full"


def test_a_dry_run_moves_nobody_and_so_starts_no_cooldown() -> None:
    pool = PlayedVerdicts(10)
    pool.say("n00")
    assert pool.swaps(is_dry=True).would == {"n00": BAD}
    pool.say("n00", "")
    pool.swaps()
    pool.now_s += 20.0
    pool.say("n00")
    assert pool.swaps() == VerdictSwaps(frozenset({"n00"}))
