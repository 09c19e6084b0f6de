"""The bursts of one event are merged, bounded and stored. The driver's newest verdict counts."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.evaluation.bursts import (
    GAP_S,
    MAX_BURSTS,
    MAX_MARKS,
    Burst,
    EventBursts,
    TimeOff,
    thinned_marks,
    union_bursts,
)
from nodeagent.evaluation.events import driver_verdict, sends_verdict
from nodeagent.model import Action, Level
from tests.unit.nodeagent.evaluation.world import POLICY, REBOOT, RESET, meaning, xid


@pytest.mark.parametrize(
    ("spans", "new", "expected"),
    [
        ([], (5, 5), [(5, 5)]),
        ([(0, 10)], (190, 190), [(0, 190)]),
        ([(0, 10)], (190.5, 191), [(0, 10), (190.5, 191)]),
        ([(0, 10)], (3, 4), [(0, 10)]),
        ([(200, 210)], (20, 20), [(20, 210)]),
        ([(200, 210)], (19, 19), [(19, 19), (200, 210)]),
        ([(0, 0), (300, 300)], (150, 150), [(0, 300)]),
        ([(0, 500)], (100, 100), [(0, 500)]),
        ([(0, 500), (700, 700)], (600, 600), [(0, 700)]),
    ],
)
def test_bursts_within_three_minutes_of_each_other_are_one(
    spans: list[Burst], new: Burst, expected: list[Burst]
) -> None:
    assert GAP_S == 180
    assert union_bursts([spans, [new]]) == union_bursts([[new], spans]) == expected


@pytest.mark.parametrize(
    ("off", "expected"),
    [
        ([], 900),
        ([(100, 200), (1000, 1100)], 900),  # both are outside
        ([(950, 990)], 860),
        ([(100, 950)], 50),  # it had run for 50 s since the boot
        ([(800, 840), (845, 920)], 785),  # the first is in the window because of the second
        ([(990, 2000)], 890),
    ],
)
def test_the_time_while_the_node_was_off_extends_a_window(off: list[Burst], expected: float) -> None:
    assert TimeOff(off).window_start_s(900, 1000) == expected


PERIODS = st.lists(st.integers(0, 60), max_size=12, unique=True).map(
    lambda times: [(float(a), float(b)) for a, b in zip(*[iter(sorted(times))] * 2, strict=False)]
)


@given(PERIODS, st.integers(-5, 60), st.integers(1, 20))
def test_a_window_and_a_hold_time_are_as_long_as_the_node_ran(
    off: list[Burst], at_s: int, for_s: int
) -> None:
    start_s, end_s = TimeOff(off).window_start_s(at_s - for_s, at_s), TimeOff(off).held_until_s(at_s, for_s)
    assert ran(off, start_s, at_s) == for_s
    assert ran(off, at_s, end_s) == for_s
    assert all(not last_s < start_s < boot_s for last_s, boot_s in off), "a window starts while it runs"
    assert all(not last_s < end_s <= boot_s for last_s, boot_s in off), "a hold time ends while it runs"


def ran(off: list[Burst], from_s: float, until_s: float) -> float:
    """Return how long a node ran in a period."""
    return until_s - from_s - sum(max(0.0, min(until_s, b) - max(from_s, a)) for a, b in off)


def test_the_oldest_bursts_become_one_so_that_the_first_event_stays_known() -> None:
    many: list[Burst] = [(1000.0 * n, 1000.0 * n) for n in range(MAX_BURSTS)]
    assert union_bursts([many, [(-1000.0, -1000.0)]]) == [(-1000.0, 0.0), *many[1:]]
    assert union_bursts([many, [(1e6, 1e6)]]) == [(0.0, 1000.0), *many[2:], (1e6, 1e6)]
    assert union_bursts([]) == union_bursts([[], []]) == []


def test_boots_that_separate_no_two_events_of_a_kind_are_merged_before_those_that_do() -> None:
    boots = [(100.0 * n - 10, 100.0 * n) for n in range(1, MAX_MARKS + 4)]
    signs_s = [100.0 * n + 50 for n in range(MAX_MARKS + 4)]  # one in each life
    pairs = [(50.0, 150.0), (150.0, 450.0), (350.0, 450.0)]  # the boots at 100 and at 400 do
    thinned = thinned_marks(boots, signs_s, lambda _: pairs)
    assert thinned == [(90.0, 100.0), (190.0, 400.0), (490.0, 600.0), *boots[6:]]
    assert len(thinned) == MAX_MARKS
    oldest = thinned_marks(boots, signs_s, lambda _: pairwise(signs_s))  # all boots do
    assert oldest == [(360.0, 400.0), *boots[4:]]


def test_adding_an_event_keeps_the_newest_texts_and_returns_whether_anything_has_changed() -> None:
    made = EventBursts()
    assert made.add(xid(79, 10.0, text="one", source="nvml")) is True
    assert made.add(xid(79, 10.0, text="one", source="nvml")) is False
    assert made.add(xid(79, 10.0, source="kmsg")) is True, "another source"
    assert made.add(xid(79, 10.0, text="two", source="kmsg")) is True, "another text"
    assert made.add(xid(79, 12.0, text="one", source="kmsg")) is True, "the text is newer"
    assert made.add(xid(79, 11.5, text="one", source="kmsg")) is True, "it is another moment"
    assert made.add(xid(79, 11.7, text="one", source="kmsg")) is False, "an older one changes nothing"
    assert made == EventBursts(
        [(10.0, 12.0)],
        [(10.0, "two"), (12.0, "one")],
        {"kmsg": 12.0, "nvml": 10.0},
        moments=[(10.0, 10.0), (11.5, 12.0)],
    )
    assert made.add(xid(79, 300.0, text="three", source="a")) is True
    assert made.add(xid(79, 301.0, text="four", source="b")) is True
    assert made.add(xid(79, 301.0, text="four", source="z")) is False, "four sources are kept"
    assert made == EventBursts(
        [(10.0, 12.0), (300.0, 301.0)],
        [(12.0, "one"), (300.0, "three"), (301.0, "four")],
        {"a": 300.0, "b": 301.0, "kmsg": 12.0, "nvml": 10.0},
        moments=[(10.0, 10.0), (11.5, 12.0), (300.0, 301.0)],
    )


def test_bursts_are_stored_as_plain_json_and_restored_unchanged() -> None:
    heard = {"kmsg": 500.0, "nvml": 2.0}
    made = EventBursts([(1.0, 2.0), (500.0, 500.0)], [(1.0, "one"), (500.0, "two")], heard)
    stored = [[[1.0, 2.0], [500.0, 500.0]], [[1.0, "one"], [500.0, "two"]], ["kmsg", "nvml"]]
    assert made.dump() == stored
    assert json.loads(json.dumps(made.dump())) == stored
    assert EventBursts.load(stored, list(heard.items())) == made
    assert EventBursts.load(stored).heard == {"kmsg": 500.0, "nvml": 500.0}, "an older agent stored no times"


def test_stored_bursts_are_bounded_and_converted_when_they_are_read() -> None:
    made = EventBursts.load([[["1", 2]] * 100, [["3", 4]] * 10, [5, "b", "c", "d", "e"]])
    assert made == EventBursts([(1.0, 2.0)] * MAX_BURSTS, [(3.0, "4")] * 3, dict.fromkeys("5bcd", 2.0))
    with pytest.raises(ValueError, match="an event without bursts"):
        EventBursts.load([[], [], []])
    with pytest.raises(ValueError, match="not enough values to unpack"):
        EventBursts.load([[], []])
    with pytest.raises(ValueError, match="could not convert string to float: 'x'"):
        EventBursts.load([[["x", 2]], [], []])


@pytest.mark.parametrize(
    ("first_s", "last_s", "taken"),
    [
        (90, 97.9, False),
        (90, 98, True),
        (100, 105, True),
        (120, 130, True),
        (120.1, 130, False),
    ],
)
def test_a_verdict_concerns_a_burst_from_two_seconds_before_it_to_ten_seconds_after(
    first_s: float, last_s: float, taken: bool
) -> None:
    verdicts = {"reset_gpu": EventBursts([(first_s, last_s)])}
    found = driver_verdict((100, 110), verdicts, POLICY, meaning(Level.DEGRADED, Action.NONE))
    assert (found and (found.meaning.level, found.meaning.action)) == (RESET if taken else None)


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({}, None),
        ({"": [(100, 100)]}, None),
        ({"": [(100, 100)], "reset_gpu": [(100, 100)]}, RESET),
        ({"reset_gpu": [(101, 101)], "reboot_node": [(100, 100)]}, RESET),
        ({"reset_gpu": [(100, 100)], "reboot_node": [(101, 101)]}, REBOOT),
        ({"reset_gpu": [(101, 101)], "reboot_node": [(101, 101)]}, REBOOT),
        ({"reset_gpu": [(101, 300)], "reboot_node": [(110, 110)]}, REBOOT),
        ({"reset_gpu": [(0, 0), (500, 500)], "reboot_node": [(100, 100), (500, 500)]}, REBOOT),
        ({"none": [(101, 101)], "reboot_node": [(100, 100)]}, REBOOT),
        ({"none": [(101, 101)]}, None),
        ({"reset_gpu": [(99, 99)]}, None),
        ({"reset_gpu": [(99, 100)]}, RESET),
        ({"reboot_node": [(99, 99)]}, REBOOT),
    ],
)
def test_the_newest_verdict_counts_but_none_does_not_and_an_earlier_one_only_if_it_raises(
    verdicts: dict[str, list[Burst]], expected: tuple[Level, Action] | None
) -> None:
    made = {name: EventBursts(spans) for name, spans in verdicts.items()}
    found = driver_verdict((100, 100), made, POLICY, meaning(*RESET))
    assert (found and (found.meaning.level, found.meaning.action)) == expected


@pytest.mark.parametrize(
    ("since", "branch", "sends"),
    [(565, 565, True), (565, 564, False), (565, None, True), (None, 900, False), (None, None, False)],
)
def test_a_driver_sends_verdicts_from_the_branch_that_the_table_names(
    since: int | None, branch: int | None, sends: bool
) -> None:
    assert sends_verdict(meaning(*RESET, since=since), branch) is sends
