"""What was reported with an event decides what it means, however many such events there are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.evaluation.bursts import MAX_BURSTS, EventBursts
from nodeagent.evaluation.company import MAX_GROUPS, accompany, note
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.loading import load, shipped
from tests.unit.nodeagent.evaluation.world import GPU, mark, xid

POLICY = shipped()
FAULT_S = 1e6
MANY = 2 * MAX_BURSTS + 4
HARMLESS = "SAW_MVB Fatal 0x00000001 0x00000020"  # a report about NVLink 5 that the table calls healthy


def dbe(at_s: float, value: float) -> Observation:
    return Observation(at_s, "ecc_dbe", GPU, "nvml-polling", value)


def restarted(made: Evaluator) -> Evaluator:
    again = Evaluator(made.policy)
    again.load(json.loads(json.dumps(made.dump())))
    return again


def found_by(made: Evaluator, check: str, code: int | None, at_s: float) -> HealthFinding | None:
    return next((each for each in made.findings(at_s) if (each.check, each.code) == (check, code)), None)


# -- an ECC error that the driver has contained


class Counter:
    """The errors of a GPU: each raises the counter, and an Xid 94 reports the contained ones."""

    def __init__(self, made: Evaluator) -> None:
        self.made, self.count = made, 0.0
        made.add(dbe(FAULT_S - 100.0, 0.0))

    def err(self, at_s: float, *, contained: bool, xid_first: bool = True) -> None:
        self.count += 1
        seen = [dbe(at_s, self.count)]
        if contained:
            seen.insert(0 if xid_first else 1, xid(94, at_s + (-4.0 if xid_first else 4.0)))
        for each in seen:
            self.made.add(each)


@pytest.mark.parametrize("gap_s", [20.0, 100.0, 150.0, 600.0, 3600.0])
@pytest.mark.parametrize("xid_first", [True, False])
def test_contained_errors_never_take_a_good_gpu_out_however_many_there_are(
    gap_s: float, xid_first: bool
) -> None:
    made = Evaluator(POLICY, 550)
    counter = Counter(made)
    for n in range(MANY):
        counter.err(FAULT_S + n * gap_s, contained=True, xid_first=xid_first)
        if n % 40 == 39:
            counter.made = restarted(counter.made)
        found = found_by(counter.made, "ecc_dbe", None, FAULT_S + n * gap_s + 5.0)
        assert found is not None
        assert (found.level, found.since_s) == (Level.DEGRADED, FAULT_S)


@pytest.mark.parametrize("gap_s", [20.0, 150.0, 600.0])
def test_contained_errors_neither_end_nor_rejuvenate_an_uncontained_one(gap_s: float) -> None:
    counter = Counter(Evaluator(POLICY, 550))
    counter.err(FAULT_S - 45.0, contained=True)
    counter.err(FAULT_S, contained=False)
    for n in range(MANY):
        at_s = FAULT_S + 45.0 + n * gap_s
        counter.err(at_s, contained=True)
        if n % 40 == 39:
            counter.made = restarted(counter.made)
        found = found_by(counter.made, "ecc_dbe", None, at_s + 5.0)
        assert found is not None
        assert (found.level, found.lasting, found.since_s) == (Level.UNHEALTHY, True, FAULT_S)
    counter.made.add(mark("gpu_reset", at_s + 60.0))
    assert found_by(counter.made, "ecc_dbe", None, at_s + 661.0) is None


KINDS = ["94 first", "94 late", "alone", "94 and 95"]
ERRORS = st.tuples(st.sampled_from([70.0, 240.0, 7200.0]), st.sampled_from([*KINDS[:2] * 20, *KINDS]))


@given(st.lists(ERRORS, min_size=1, max_size=3 * MAX_BURSTS))
@settings(max_examples=60, deadline=None)
def test_an_error_is_a_fault_from_its_time_unless_an_xid_94_alone_was_with_it(
    errors: list[tuple[float, str]],
) -> None:
    counter, at_s = Counter(Evaluator(POLICY, 550)), FAULT_S
    expected: tuple[Level, float] | None = None
    for gap_s, kind in errors:
        at_s += gap_s
        counter.err(at_s, contained="94" in kind, xid_first="late" not in kind)
        if "95" in kind:
            counter.made.add(xid(95, at_s + 1.0))
        if kind in KINDS[2:] and (expected is None or expected[0] is Level.DEGRADED):
            expected = Level.UNHEALTHY, at_s
        expected = expected or (Level.DEGRADED, at_s)
        found = found_by(counter.made, "ecc_dbe", None, at_s + 5.0)
        assert found is not None
        assert (found.level, found.since_s) == expected


def test_what_contains_an_error_is_the_same_in_whatever_order_it_is_reported() -> None:
    seen = [dbe(0.0, 0), xid(94, 80.0), dbe(100.0, 1), dbe(160.0, 2), xid(94, 185.0), xid(95, 195.0)]
    expected = None
    for order in permutations(seen):
        made = Evaluator(POLICY, 550)
        for each in order:
            made.add(each)
        expected = expected or made.findings(200.0)
        assert made.findings(200.0) == expected
    assert {each.check for each in expected or ()} == {"ecc_dbe", "xid"}


def test_a_state_that_does_not_say_what_was_contained_is_judged_as_its_times_show() -> None:
    """An earlier agent stored the growth in bursts. Where it is unclear, the growth counts as uncontained."""
    for apart_s, level in ((0.0, Level.DEGRADED), (100.0, Level.UNHEALTHY)):
        counter = Counter(Evaluator(POLICY, 550))
        counter.err(FAULT_S, contained=True)
        counter.err(FAULT_S + apart_s + 1.0, contained=not apart_s)
        raw = json.loads(json.dumps(counter.made.dump()))
        del raw["company"]
        again = Evaluator(POLICY, 550)
        again.load(raw)
        found = found_by(again, "ecc_dbe", None, FAULT_S + 200.0)
        assert found is not None
        assert found.level is level


# -- an event that NVML reports without details


def plain_and_details(
    check: str, entity: str, code: int, variant: str
) -> Callable[[float, bool], Observation]:
    def seen(at_s: float, detailed: bool) -> Observation:
        source = "kmsg" if detailed else "nvml-events"
        return Observation(at_s, check, entity, source, float(code), variant if detailed else "")

    return seen


@pytest.mark.parametrize(("entity", "check", "code", "variant"), [
    (GPU, "xid", 144, HARMLESS), ("nvswitch/0000:05:00.0", "sxid", 11012, "non-fatal"),
])  # fmt: skip
@pytest.mark.parametrize("gap_s", [40.0, 400.0])
def test_an_event_without_details_counts_however_many_events_with_details_follow(
    entity: str, check: str, code: int, variant: str, gap_s: float
) -> None:
    seen = plain_and_details(check, entity, code, variant)
    made = Evaluator(POLICY, 600)
    for each in (seen(FAULT_S - 30, True), seen(FAULT_S, False)):
        made.add(each)
    before = None
    for n in range(MANY):
        at_s = FAULT_S + 30.0 + n * gap_s
        made.add(seen(at_s, True))
        if n % 40 == 39:
            made = restarted(made)
        found = found_by(made, check, code, at_s) if at_s < FAULT_S + 86000.0 else before
        assert found is not None
        before = before or found
        assert (found.level, found.action, found.lasting) == (before.level, before.action, before.lasting)
    assert before is not None
    assert before.level is Level.DEGRADED


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize("gap_s", [11.0, 400.0])
def test_doubles_of_events_with_details_are_no_events_however_many_there_are(
    plain_first: bool, gap_s: float
) -> None:
    seen = plain_and_details("xid", GPU, 144, HARMLESS)
    made = Evaluator(POLICY, 600)
    for n in range(MANY):
        at_s = FAULT_S + n * gap_s
        for detailed in (False, True) if plain_first else (True, False):
            made.add(seen(at_s + 0.1 * detailed, detailed))
        if n % 40 == 39:
            made = restarted(made)
        found = found_by(made, "xid", 144, at_s + 1.0)
        assert found is not None
        assert (found.level, found.sources) == (Level.HEALTHY, ("kmsg", "nvml-events"))
    for n in range(MANY - 20, MANY):  # a restarted agent may read them again
        for detailed in (True, False):
            made.add(seen(FAULT_S + n * gap_s + 0.1 * detailed, detailed))
    again = found_by(made, "xid", 144, FAULT_S + MANY * gap_s)
    assert again is None or again.level is Level.HEALTHY


# -- a verdict of the driver on codes that the operator has overridden


def pairs(code: int, from_s: float, gap_s: float) -> Iterator[tuple[Observation, Observation]]:
    for n in range(MANY):
        at_s = from_s + n * gap_s
        yield xid(code, at_s), xid(154, at_s + 1.0, "reset_gpu")


@pytest.mark.parametrize("own", [31, 0])
@pytest.mark.parametrize("gap_s", [100.0, 3600.0])
def test_a_verdict_on_an_overridden_code_neither_replaces_nor_ends_an_earlier_one(
    own: int, gap_s: float
) -> None:
    made = Evaluator(load('[xid.94]\nlevel = "healthy"'), 575)
    for each in [xid(own, FAULT_S)] * bool(own) + [xid(154, FAULT_S + 1.0, "reset_gpu")]:
        made.add(each)
    for n, (code, verdict) in enumerate(pairs(94, FAULT_S + 100.0, gap_s)):
        for each in (verdict, code) if n % 2 else (code, verdict):
            made.add(each)
        if n % 40 == 39:
            made = restarted(made)
        found = found_by(made, "xid", 154, verdict.at_s)
        assert found is not None
        assert (found.level, found.action, found.since_s) == (
            Level.UNHEALTHY, Action.RESET_GPU, FAULT_S + 1.0,
        )  # fmt: skip
        assert found.lasting


@pytest.mark.parametrize("gap_s", [100.0, 3600.0])
def test_verdicts_on_overridden_codes_are_no_demand_however_many_there_are(gap_s: float) -> None:
    made = Evaluator(load('[xid.94]\nlevel = "healthy"'), 575)
    for n, each in enumerate(pairs(94, FAULT_S, gap_s)):
        for seen in each:
            made.add(seen)
        made.add(xid(31, each[1].at_s + 50.0))  # an application's fault, without a verdict
        made = restarted(made) if n % 40 == 39 else made
        assert found_by(made, "xid", 154, each[1].at_s) is None
    made.use(POLICY)
    assert found_by(made, "xid", 154, each[1].at_s) is not None


# -- the groups


Arrival = tuple[float, int]  # an event (0), or a code that was reported


@given(
    st.lists(st.tuples(st.integers(0, 60).map(float), st.sampled_from([0, 0, 48, 94])), max_size=25),
    st.randoms(),
)
def test_the_groups_are_the_same_in_any_order(arrivals: list[Arrival], order: object) -> None:
    def groups(steps: list[Arrival]) -> dict[tuple[int, ...], list[tuple[float, float]]]:
        company: dict[tuple[int, ...], list[tuple[float, float]]] = {}
        codes: list[Arrival] = []
        for at_s, code in steps:
            if code:
                codes.append((at_s, code))
                accompany(company, code, at_s - 5.0, at_s + 5.0)
            else:
                note(company, at_s, {other for when_s, other in codes if abs(when_s - at_s) <= 5.0})
        return company

    mixed = list(arrivals)
    order.shuffle(mixed)  # type: ignore[attr-defined]
    assert groups(mixed) == groups(arrivals)


def test_the_groups_and_their_times_are_bounded_and_nothing_excuses_what_exceeds_them() -> None:
    company: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for n in range(1000):
        note(company, 100.0 * n, {n + 1})
    assert len(company) <= MAX_GROUPS + 1
    assert all(len(times) <= MAX_BURSTS for times in company.values())
    assert company[()][-1][1] == 99900.0
    assert EventBursts([(0.0, 0.0)]).company is None
