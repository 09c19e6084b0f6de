"""What stands ends only by its remedy, and what is milder, older or elsewhere never hides it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.evaluation import growth
from nodeagent.evaluation.bursts import MAX_BURSTS, MAX_MARKS
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.events import EndMarks, standing
from nodeagent.evaluation.evidence import LAST_SEEN
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.evaluation.samples import LATE_S
from nodeagent.kernel.nvidia_lines import parse_nvidia
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy.loading import load, shipped
from nodeagent.policy.rules import Clears
from tests.unit.nodeagent.evaluation.world import DAY_S, GPU, mark, meaning, sample, xid

REPLACE = (Level.UNHEALTHY, Action.REPLACE)
RESET = (Level.UNHEALTHY, Action.RESET_GPU)
REBOOT = (Level.UNHEALTHY, Action.REBOOT_NODE)
HEALTHY = (Level.HEALTHY, Action.NONE)
HOUR_S = 3600.0
SHIPPED = shipped()


def shown(*seen: Observation, now_s: float, made: Evaluator | None = None) -> list[HealthFinding]:
    made = made or Evaluator(shipped(), 575)
    for each in seen:
        made.add(each)
    return [each for each in made.findings(now_s) if each.level > Level.HEALTHY]


def said_by(made: Evaluator, *seen: Observation, now_s: float) -> tuple[Level, Action]:
    worst = [(each.level, each.action) for each in shown(*seen, now_s=now_s, made=made)]
    return max(worst, default=HEALTHY)


def said(*seen: Observation, now_s: float) -> tuple[Level, Action]:
    return said_by(Evaluator(shipped(), 575), *seen, now_s=now_s)


# -- recurrence


@pytest.mark.parametrize("code", [79, 140, 143, 167, 173])
def test_replace_on_repeat_ends_only_with_another_gpu(code: int) -> None:
    twice = (xid(code, 100.0), mark("boot", 200.0), xid(code, DAY_S))
    remedies = (mark("boot", DAY_S + 100), mark("gpu_reset", DAY_S + 200), mark("boot", 2 * DAY_S))
    assert said(*twice, *remedies, now_s=100 * DAY_S) == REPLACE
    [found] = shown(*twice, *remedies, now_s=100 * DAY_S)
    assert (found.lasting, found.since_s) == (True, DAY_S)
    assert "another GPU in its place" in found.clears
    for end in ("replaced", "cleared"):
        assert said(*twice, *remedies, mark(end, 3 * DAY_S), now_s=3 * DAY_S + 700) == HEALTHY


def test_a_further_fault_outside_the_window_does_not_end_what_its_recurrence_has_raised() -> None:
    seen = [xid(79, 0.0), xid(79, DAY_S), mark("boot", 2 * DAY_S), xid(79, 20 * DAY_S)]
    [found] = shown(*seen, mark("boot", 21 * DAY_S), now_s=22 * DAY_S)
    assert (found.level, found.action, found.since_s) == (*REPLACE, 0.0)


@pytest.mark.parametrize("late_s", [0.0, 100.0, 299.0, 400.0, 3000.0])
@pytest.mark.parametrize("gap_s", [3601.0, 3700.0, 3899.0, 3901.0, 5000.0, 7000.0])
def test_a_late_sign_that_breaks_a_silence_never_lowers_what_the_silence_has_shown(
    gap_s: float, late_s: float
) -> None:
    """An hour of silence makes two faults of two signs. A sign within it may still arrive."""
    signs = [gap_s - 3500.0, 3550.0, gap_s / 2]
    for broken_by in (each for each in signs if 200.0 < each < min(3600.0, gap_s - 200.0)):
        made, worst = Evaluator(SHIPPED, 575), HEALTHY
        arrivals = sorted([(0.0, 0.0), (gap_s, gap_s), (broken_by + late_s, broken_by)])
        for now_s, at_s in arrivals:
            for asked_s in (now_s, now_s + 1.0, now_s + 299.0, now_s + 301.0):
                if all(asked_s <= later or later <= now_s for later, _ in arrivals):
                    made.add(xid(79, at_s))
                    said_now = said_by(made, now_s=asked_s)
                    assert said_now >= worst
                    worst = said_now


def test_a_silence_counts_once_no_sign_within_it_can_arrive_any_more() -> None:
    made = Evaluator(SHIPPED, 575)
    assert said_by(made, xid(79, 0.0), xid(79, 3700.0), now_s=3701.0) == REBOOT
    assert made.until_s == 3700.0 + LATE_S
    assert said_by(made, now_s=3700.0 + LATE_S) == REPLACE
    assert said(xid(79, 0.0), xid(79, 3901.0), now_s=3902.0) == REPLACE, "no sign can break it any more"


def test_a_very_late_sign_breaks_a_silence_that_did_not_count_yet() -> None:
    made = Evaluator(SHIPPED, 575)
    assert said_by(made, xid(79, 0.0), xid(79, 3700.0), now_s=3750.0) == REBOOT
    assert said_by(made, xid(79, 3100.0), now_s=3751.0) == REBOOT
    assert said_by(made, now_s=DAY_S) == REBOOT


def test_what_a_first_look_reads_in_any_order_is_no_recurrence_that_was_reported() -> None:
    """The queue delivers each variant in the order of time, but one variant after the other."""
    link = "NETIR_LINK_DOWN Fatal {} 0x00000001"
    made = Evaluator(SHIPPED, 575)
    assert not shown(now_s=DAY_S, made=made)
    signs = [(at_s, "0x00200011") for at_s in (0.0, 3700.0, 7400.0, 11100.0, 14800.0)]
    signs += [(at_s + 1850.0, "0x00200091") for at_s, _ in signs[:-1]]
    in_order = shown(*(xid(149, at_s, link.format(bits)) for at_s, bits in sorted(signs)), now_s=DAY_S)
    found = shown(*(xid(149, at_s, link.format(bits)) for at_s, bits in signs), now_s=DAY_S, made=made)
    assert found == in_order


def booted(last_s: float, at_s: float) -> Observation:
    return Observation(at_s, "boot", "node", "agent", facts=((LAST_SEEN, repr(last_s)),))


@pytest.mark.parametrize("off_s", [120.0, 8 * DAY_S, 400 * DAY_S])
def test_a_wall_clock_that_is_ahead_at_a_boot_hides_no_recurrence(off_s: float) -> None:
    made, boot_s = Evaluator(shipped(), 575), 60.0 + off_s
    shown(xid(79, 0.0), booted(60.0, boot_s), now_s=boot_s + 1, made=made)
    made.forget(boot_s + HOUR_S - FORGET_S)
    [found] = shown(xid(79, boot_s + DAY_S), now_s=boot_s + DAY_S + 1, made=made)
    assert (found.level, found.action) == REPLACE
    made.add(mark("replaced", boot_s + DAY_S + 10))
    made.forget(boot_s + 40 * DAY_S - FORGET_S)
    assert not [row for row in made.dump()["events"] if row[1] == "xid"], "time while it runs counts"


@pytest.mark.parametrize("code", [64, 79, 143])
def test_a_storm_of_the_same_fault_keeps_its_recurrence(code: int) -> None:
    """The storm has more events than are stored apart, and a boot precedes it by less than a burst's gap."""
    twice = (xid(code, 0.0), mark("boot", 90.0), xid(code, 150.0))
    storm = [xid(code, 152.0 + 2 * n) for n in range(MAX_BURSTS)]
    assert said(*twice, *storm, now_s=300.0) == REPLACE
    assert said(*twice, *storm, mark("boot", 400.0), now_s=DAY_S) == REPLACE


def test_a_storm_of_another_code_brings_no_ended_finding_back() -> None:
    ended = (xid(94, 0.0), xid(79, DAY_S), xid(154, DAY_S + 1, "reset_gpu"), mark("gpu_reset", DAY_S + 60))
    storm = [xid(94, 10 * DAY_S + 2 * n) for n in range(MAX_BURSTS + 6)]
    made = Evaluator(shipped(), 575)
    assert [each.code for each in shown(*ended, *storm, now_s=10 * DAY_S + 200, made=made)] == [94]
    again = Evaluator(shipped(), 575)
    again.load(json.loads(json.dumps(made.dump())))
    assert again.findings(10 * DAY_S + 200) == made.findings(10 * DAY_S + 200)


def test_an_event_just_after_a_verdict_does_not_take_it_from_its_code() -> None:
    """The events of the other code are within a second of each other, so they are stored as one moment."""
    made = Evaluator(shipped(), 575)
    seen = (xid(48, 0.0), xid(79, 0.3), xid(154, 0.6, "reset_gpu"), xid(48, 0.9))
    shown(*seen, now_s=1.0, made=made)
    again = Evaluator(shipped(), 575)
    again.load(json.loads(json.dumps(made.dump())))
    assert again.findings(1.0) == made.findings(1.0)
    assert {(each.level, each.action) for each in again.findings(1.0)} == {RESET}


def test_the_time_between_very_many_boots_is_no_time_off() -> None:
    boots = [booted(HOUR_S * n + 590, HOUR_S * n + 600) for n in range(2 * MAX_BURSTS)]
    again_s = HOUR_S * len(boots) + 2 * DAY_S
    assert 7.2 * DAY_S < again_s < 8 * DAY_S
    assert said(xid(79, HOUR_S / 2), *boots, xid(79, again_s), now_s=again_s + 1) == REBOOT


def loop(from_s: float, count: int, up_s: float = 240.0, off_s: float = 60.0) -> list[Observation]:
    starts = [from_s + n * (up_s + off_s) for n in range(count)]
    return [booted(each + up_s, each + up_s + off_s) for each in starts]


@pytest.mark.parametrize(("fault_s", "since_s"), [(170.0, 100.0), (3000.0, 3000.0)])
def test_very_many_boots_neither_lower_nor_end_nor_rejuvenate_what_a_boot_has_shown(
    fault_s: float, since_s: float
) -> None:
    """The two faults count as two only because the node booted between them."""
    made = Evaluator(shipped(), 575)
    shown(xid(79, 100.0), booted(110.0, 120.0), xid(79, fault_s), now_s=fault_s + 1, made=made)
    for each in loop(fault_s + 60, 3 * MAX_BURSTS):
        [found] = shown(each, now_s=each.at_s + 1, made=made)
        assert (found.level, found.action, found.lasting, found.since_s) == (*REPLACE, True, since_s)
        again = Evaluator(shipped(), 575)
        again.load(json.loads(json.dumps(made.dump())))
        assert again.findings(each.at_s + 1) == made.findings(each.at_s + 1)
        made = again
    assert sum(len(row[4]) for row in made.dump()["moments"] if row[1] == "boot") <= MAX_BURSTS


def test_faults_of_very_many_boots_are_kept_apart_by_more_boots_than_there_are_bursts() -> None:
    made, at_s = Evaluator(shipped(), 575), 0.0
    shown(xid(79, 10.0), booted(20.0, 40.0), xid(79, 90.0), now_s=100.0, made=made)
    for each in loop(200.0, 3 * MAX_BURSTS):
        at_s = each.at_s + 30
        shown(each, Observation(at_s, "kernel_task_hung", "node", "kmsg"), now_s=at_s, made=made)
    assert [each.action for each in made.findings(at_s) if each.code == 79] == [Action.REPLACE]


def test_a_recurrence_that_a_boot_has_shown_stands_after_1100_boots_with_an_event_before_each() -> None:
    made, at_s = Evaluator(SHIPPED, 575), 300.0
    shown(xid(79, 100.0), booted(110.0, 120.0), xid(79, 170.0), now_s=180.0, made=made)
    for n in range(1100):
        code = (143, 95, 48, 64, 94, 140, 74, 109, 110, 119, 120)[n % 11]
        entity = f"gpu/0000:{0x60 + n // 11 % 8:02x}:00.0"
        made.add(Observation(at_s + 5, "xid", entity, "kmsg", value=float(code)))
        made.add(booted(at_s + 240, at_s + 300))
        at_s += 300
    [found] = [each for each in made.findings(at_s) if (each.code, each.entity) == (79, GPU)]
    assert (found.action, found.lasting, found.since_s) == (Action.REPLACE, True, 100.0)
    assert 120.0 in made._evidence.boots()
    assert len(made._evidence.boots()) == MAX_MARKS
    assert sum(until_s - from_s for from_s, until_s in made._evidence.off()) >= 1100 * 60.0 + 10.0


def test_the_time_off_of_boots_that_were_merged_does_not_count_as_clean() -> None:
    """Only time ends Xid 1, and most of it passes while the node is off."""
    hold_s = SHIPPED.meaning("xid", 1, "").hold_s
    seen = [xid(1, 0.0), *loop(0.0, 2 * MAX_BURSTS, up_s=2.0, off_s=hold_s)]
    assert shown(*seen, now_s=seen[-1].at_s + hold_s - 4 * MAX_BURSTS - 1)
    assert not shown(*seen, now_s=seen[-1].at_s + hold_s - 4 * MAX_BURSTS + 1)


def test_the_boots_that_an_earlier_agent_merged_are_read_as_it_read_them() -> None:
    made = Evaluator(shipped(), 575)
    boots = loop(0.0, 2 * MAX_BURSTS)
    shown(xid(79, 1.0), *boots, now_s=boots[-1].at_s, made=made)
    raw = json.loads(json.dumps(made.dump()))
    del raw["boots"]
    again = Evaluator(shipped(), 575)
    again.load(raw)
    assert not [each for each in again.findings(boots[-1].at_s) if each.code == 79]
    kept = again._evidence
    assert (len(kept.boots()), kept.boots()[-1], len(kept.off())) == (
        MAX_BURSTS, boots[-1].at_s, MAX_BURSTS - 1,
    )  # fmt: skip


@given(
    st.lists(
        st.tuples(st.sampled_from([79, 143, 95, 31, 0]), st.sampled_from([2.0, 100.0, 240.0, 4000.0])),
        min_size=MAX_BURSTS + 2, max_size=2 * MAX_BURSTS,
    ),
    st.sampled_from([5.0, 600.0, DAY_S]),
)  # fmt: skip
@settings(max_examples=60)
def test_a_limit_of_the_boots_makes_no_finding_milder_younger_or_shorter(
    lives: list[tuple[int, float]], off_s: float
) -> None:
    limited, unlimited, now_s = Evaluator(SHIPPED, 575), Evaluator(SHIPPED, 575), 1000.0
    unlimited._evidence.thin_marks = lambda *_: None  # type: ignore[method-assign]
    for code, up_s in lives:
        seen = [xid(code, now_s + up_s / 2)] if code else []
        now_s += up_s + off_s
        for made in (limited, unlimited):
            shown(*seen, booted(now_s - off_s, now_s), now_s=now_s, made=made)
        found = {each.code: each for each in limited.findings(now_s)}
        for each in unlimited.findings(now_s):
            same = found[each.code]
            assert (same.level, same.action) >= (each.level, each.action)
            assert same.since_s <= each.since_s
            assert same.lasting >= each.lasting


@pytest.mark.parametrize(("code", "action"), [(64, Action.REPLACE), (119, Action.REBOOT_NODE)])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("end", [mark("gpu_reset", 0.0), xid(154, 0.0, "none")], ids=["reset", "none"])
def test_a_recurrence_that_a_reset_has_shown_stands_however_many_resets_follow(
    code: int, action: Action, restarts: bool, end: Observation
) -> None:
    made, at_s = Evaluator(SHIPPED, 550), 1200.0
    ends = [replace(end, at_s=at_s) for at_s in (0.0, 600.0, 1200.0)]
    shown(*ends, xid(code, 300.0), xid(code, 900.0), now_s=at_s, made=made)
    for n in range(2 * MAX_BURSTS):
        at_s += 7200.0
        made.add(replace(end, at_s=at_s))
        if restarts and n % 50 == 49:
            again = Evaluator(SHIPPED, 550)
            again.load(json.loads(json.dumps(made.dump())))
            made = again
        [found] = [each for each in made.findings(at_s) if each.code == code]
        assert (found.action, found.lasting, found.since_s) == (action, True, 300.0)
    [(_, ends_kept)] = [
        (name, each)
        for event, variants in made._evidence.events.items()
        for name, each in variants.items()
        if event[1:] == (end.check, int(end.value))
    ]
    assert len(ends_kept.moments) == MAX_BURSTS


@pytest.mark.parametrize(("code", "action"), [(64, Action.REPLACE), (119, Action.REBOOT_NODE)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_recurrence_stands_however_many_single_faults_follow(
    code: int, action: Action, restarts: bool
) -> None:
    made, at_s = Evaluator(SHIPPED, 550), 1000.0
    shown(xid(code, 300.0), mark("gpu_reset", 600.0), xid(code, at_s), now_s=at_s, made=made)
    since_s = at_s
    for n in range(2 * MAX_BURSTS):
        at_s += 8 * DAY_S
        shown(xid(code, at_s), mark("gpu_reset", at_s + 60.0), now_s=at_s + DAY_S, made=made)
        if restarts and n % 50 == 49:
            again = Evaluator(SHIPPED, 550)
            again.load(json.loads(json.dumps(made.dump())))
            made = again
        [found] = [each for each in made.findings(at_s + DAY_S) if each.code == code]
        assert (found.action, found.lasting) == (action, True)
        assert found.since_s <= since_s
        since_s = found.since_s
    ends = mark("boot" if action is Action.REBOOT_NODE else "replaced", at_s + 2 * DAY_S)
    assert not shown(ends, now_s=at_s + 3 * DAY_S, made=made)


def test_a_recurrence_on_a_gpu_of_unknown_model_is_not_forgotten() -> None:
    """The driver may not answer for a broken GPU. For one model, a boot would end the first of two faults."""
    made = Evaluator(SHIPPED, 550)
    seen = (xid(64, 100.0), mark("gpu_reset", 200.0), xid(64, 1000.0), mark("boot", 1100.0))
    for now_s in (2000.0, 40 * DAY_S):
        assert said_by(made, *seen, now_s=now_s) == REPLACE
        made.forget(now_s - FORGET_S)
        assert said_by(made, now_s=now_s) == REPLACE


@given(
    st.lists(
        st.tuples(
            st.sampled_from([64, 119, 95, 31, 79, 0]), st.sampled_from([2.0, 100.0, 240.0, 1700.0, 4000.0]),
            st.sampled_from(["gpu_reset", "gpu_reset", "gpu_reset", "none"]),
        ),
        min_size=MAX_BURSTS + 2, max_size=2 * MAX_BURSTS,
    ),
)  # fmt: skip
@settings(max_examples=60)
def test_a_limit_of_the_resets_makes_no_finding_milder_younger_or_shorter(
    steps: list[tuple[int, float, str]],
) -> None:
    limited, unlimited, now_s = Evaluator(SHIPPED, 550), Evaluator(SHIPPED, 550), 1000.0
    unlimited._evidence.thin_marks = lambda *_: None  # type: ignore[method-assign]
    for code, for_s, end in steps:
        seen = [xid(code, now_s + for_s / 2)] if code else []
        now_s += for_s
        seen.append(xid(154, now_s, "none") if end == "none" else mark(end, now_s))
        for made in (limited, unlimited):
            shown(*seen, now_s=now_s, made=made)
        found = {each.code: each for each in limited.findings(now_s)}
        for each in unlimited.findings(now_s):
            same = found[each.code]
            assert (same.level, same.action) >= (each.level, each.action)
            assert same.since_s <= each.since_s
            assert same.lasting >= each.lasting


@pytest.mark.parametrize(("up_s", "off_s"), [(600.0, 120.0), (170.0, 120.0), (100.0, 120.0), (40.0, 20.0)])
def test_a_fault_after_each_short_boot_recurs(up_s: float, off_s: float) -> None:
    seen, at_s = [], 0.0
    for _ in range(3):
        seen += [xid(79, at_s + 0.8 * up_s), booted(at_s + up_s, at_s + up_s + off_s)]
        at_s += up_s + off_s
    for order in (seen, seen[::-1]):
        [found] = shown(*order, now_s=at_s + 1)
        assert (found.level, found.action, found.since_s) == (*REPLACE, 0.8 * up_s)
        assert "3 times" in found.why


def in_slot(device: str, entity: str, at_s: float) -> Observation:
    facts = (("uuid", device), ("name", "NVIDIA H100 80GB HBM3"))
    return Observation(at_s, "gpu_state", entity, "nvml-polling", facts=facts)


@pytest.mark.parametrize("up_s", [400.0, 100.0])
def test_a_fault_before_a_short_boot_is_the_new_gpus(up_s: float) -> None:
    again_s, other = 9000.0 + up_s + 60, "gpu/0000:1b:00.0"
    swapped = [in_slot("old", GPU, 0.0), in_slot("new", other, 0.1), booted(5000.0, 9000.0), xid(48, 9030.0)]
    swapped += [in_slot("old", other, 9040.0), in_slot("new", GPU, 9040.1), booted(9000.0 + up_s, again_s)]
    [found] = shown(*swapped, now_s=again_s + 1)
    assert (found.entity, found.device) == (GPU, "new")


def test_what_a_reset_has_ended_does_not_return_with_another_reset() -> None:
    made = Evaluator(SHIPPED, 575)
    shown(xid(48, 0.0), mark("gpu_reset", 10.0), now_s=11.0, made=made)
    for at_s in (180.0, 340.0, 500.0):
        shown(mark("gpu_reset", at_s), now_s=at_s, made=made)
    assert not shown(mark("gpu_reset", 660.0), now_s=660.0, made=made)


def test_a_milder_judgement_that_outlasts_a_recurrence_keeps_its_age() -> None:
    recurs = (
        "recurs_bursts=2\nrecurs_within_s=3600\nrecurs_level='unhealthy'\nrecurs_action='contact_support'"
    )
    made = Evaluator(load(f"[xid.1]\n{recurs}\n"), 575)
    shown(*(xid(1, at_s) for at_s in (0.0, 1000.0, 80000.0)), now_s=80001.0, made=made)
    for at_s in (149999.0, 150000.0):
        [found] = shown(xid(1, at_s) if at_s == 150000.0 else xid(1, 80000.0), now_s=at_s, made=made)
        assert (found.level, found.since_s) == (Level.DEGRADED, 0.0)


def test_recurrence_that_asks_for_a_reboot_ends_with_it_and_not_with_a_reset() -> None:
    seen = (xid(119, 0.0), xid(119, HOUR_S), mark("gpu_reset", 2 * HOUR_S))
    assert said(*seen, now_s=DAY_S) == REBOOT
    assert said(*seen, mark("boot", 3 * HOUR_S), now_s=DAY_S) == HEALTHY


@pytest.mark.parametrize("end", ["replaced", "cleared"])
def test_bursts_before_an_exchange_or_a_clearance_do_not_count_towards_a_recurrence(end: str) -> None:
    seen = (xid(79, 0.0), mark(end, HOUR_S), xid(79, DAY_S))
    assert said(*seen, now_s=DAY_S + 1) == REBOOT
    [found] = shown(*seen, now_s=DAY_S + 1)
    assert found.since_s == DAY_S


# -- age


def test_a_fault_that_repeats_every_few_minutes_is_as_old_as_its_first_sign() -> None:
    made = Evaluator(shipped(), 575)
    for n in range(720):
        [found] = shown(xid(119, 240.0 * n), now_s=240.0 * n + 1, made=made)
        assert (found.since_s, found.last_s) == (0.0, 240.0 * n)
    shown(mark("boot", 2 * DAY_S), now_s=2 * DAY_S + 600, made=made)
    [found] = shown(xid(119, 3 * DAY_S), now_s=3 * DAY_S, made=made)
    assert found.since_s == 3 * DAY_S, "the reboot ended the one before"


def test_the_age_counts_from_when_the_level_was_reached() -> None:
    seen = [xid(154, 0.0, "drain_p2p"), xid(154, 300.0, "reboot_node"), xid(154, 600.0, "reset_gpu")]
    [found] = shown(*seen, now_s=601.0)
    assert (found.level, found.action, found.since_s) == (*RESET, 300.0)


def test_a_finding_that_needs_a_remedy_is_lasting_although_its_worst_judgement_ends_by_itself() -> None:
    by_itself = meaning(Level.UNHEALTHY, Action.CONTACT_SUPPORT, hold_s=600.0)
    by_reset = meaning(Level.UNHEALTHY, Action.RESET_GPU, Clears.RESET)
    chains = [[((0.0, 0.0), by_itself, "a")], [((1.0, 1.0), by_reset, "b")]]
    for now_s, action in ((10.0, Action.CONTACT_SUPPORT), (601.0, Action.RESET_GPU)):
        stands, _ = standing(chains, EndMarks(), now_s)
        assert stands is not None
        assert (stands.worst.action, stands.lasting) == (action, True)
    stands, _ = standing(chains, EndMarks(resets=[2.0]), 10.0)
    assert stands is not None
    assert not stands.lasting


def test_what_stands_is_never_forgotten() -> None:
    made = Evaluator(shipped(), 575)
    shown(xid(64, 0.0), sample("row_remap_failure", 0.0, 1.0), now_s=1.0, made=made)
    for now_s in (FORGET_S + 1, 90 * DAY_S, 400 * DAY_S):
        made.forget(now_s - FORGET_S)
        assert {each.check for each in shown(now_s=now_s, made=made)} == {"xid", "row_remap_failure"}
    shown(mark("replaced", 400 * DAY_S), now_s=400 * DAY_S, made=made)
    made.forget(431 * DAY_S)
    assert not [row for row in made.dump()["events"] if row[1] == "xid"]


# -- the driver's verdict


@pytest.mark.parametrize("none_s", [98.5, 100.2, 109.0])
def test_the_verdict_none_beside_a_code_neither_lowers_nor_ends_it(none_s: float) -> None:
    assert said(xid(79, 100.0), xid(154, none_s, "none"), now_s=101.0) == REBOOT
    assert said(xid(95, 100.0), xid(154, none_s, "none"), now_s=DAY_S) == RESET


@pytest.mark.parametrize("code", [64, 79])
def test_the_drivers_milder_verdict_is_over_once_it_has_been_followed(code: int) -> None:
    seen = (xid(code, 100.0), xid(154, 100.5, "reset_gpu"))
    assert said(*seen, now_s=DAY_S) == RESET
    assert said(*seen, mark("gpu_reset", 200.0), xid(154, 201.0, "none"), now_s=900.0) == HEALTHY


def test_the_drivers_graver_verdict_needs_its_own_remedy() -> None:
    seen = (xid(48, 100.0), xid(154, 100.5, "reboot_node"), mark("gpu_reset", 200.0))
    assert said(*seen, now_s=DAY_S) == REBOOT
    assert said(*seen, mark("boot", 300.0), now_s=DAY_S) == HEALTHY
    assert said(*seen, xid(154, 300.0, "none"), now_s=DAY_S) == HEALTHY, "the driver takes it back"


@pytest.mark.parametrize("before_s", [50.0, 6.0])
@pytest.mark.parametrize("own", ["reboot_node", ""])
def test_a_repeat_is_not_lowered_by_the_drivers_verdict_on_another_code(own: str, before_s: float) -> None:
    """The burst of the repeated code covers the verdict that is about an NVLink error."""
    code, link = (95, "0x0,0x0,0x10,0x0,0x0,0x0,0x0") if own else (79, "0x0,0x0,0x10,0x0,0x0,0x0,0x0")
    first = (xid(code, 0.0), *([xid(154, 1.0, own)] if own else []))
    seen = [*first, xid(74, 100.0, link), xid(154, 101.0, "drain_p2p"), xid(code, 150.0)]
    seen += [xid(code, 100.0 - before_s)]
    assert said(*first, now_s=2.0) == REBOOT
    for order in (seen, seen[::-1], sorted(seen, key=lambda each: each.at_s)):
        [found] = [each for each in shown(*order, now_s=DAY_S) if each.code == code]
        assert (found.level, found.action, found.lasting) == (*REBOOT, True)


def test_a_verdict_of_its_own_still_lowers_a_repeated_code() -> None:
    seen = (xid(95, 0.0), xid(154, 1.0, "reboot_node"), xid(74, 100.0), xid(154, 101.0, "drain_p2p"))
    [found] = [
        each
        for each in shown(*seen, xid(95, 150.0), xid(154, 150.5, "reset_gpu"), now_s=DAY_S)
        if each.code == 95
    ]
    assert (found.level, found.action) == RESET


def test_a_later_burst_is_not_lowered_by_the_verdict_on_another_code() -> None:
    seen = (xid(74, 0.0), xid(154, 1.0, "reboot_node"), xid(74, 400.0), xid(48, 401.0))
    [found] = [each for each in shown(*seen, xid(154, 402.0, "reset_gpu"), now_s=500.0) if each.code == 74]
    assert (found.level, found.action) == REBOOT


# -- two sensors, one of which sees no details


def test_an_event_without_details_is_a_double_only_near_an_event_with_details() -> None:
    plain = [xid(149, 100.0 * n, source="nvml-events") for n in range(72)]
    detailed = xid(149, 0.0, "RLW Fatal 0x1 0x1")
    [found] = shown(detailed, *plain, mark("gpu_reset", 60.0), now_s=2 * HOUR_S)
    assert (found.lasting, found.last_s) == (True, 7100.0), "they follow the reset"
    doubles = [xid(149, 0.1, source="nvml-events"), detailed, mark("gpu_reset", 60.0)]
    assert said(*doubles, now_s=661.0) == HEALTHY


def test_the_further_lines_of_an_sxid_do_not_count_beside_the_line_that_names_its_severity() -> None:
    def seen(at_s: float, text: str) -> Observation:
        [fact] = parse_nvidia(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, {text}")
        return fact.at(at_s, "kmsg")

    first = seen(0.0, "Non-fatal, Link 27 LTSSM Fault Up")
    further = seen(0.001, "Severity 0 Engine instance 27 Sub-engine instance 00")
    [found] = shown(first, further, now_s=1.0)
    assert (found.level, found.action) == (Level.DEGRADED, Action.NONE)
    alone = seen(20.0, "Severity 0 Engine instance 27 Sub-engine instance 00")
    [found] = shown(first, further, alone, now_s=21.0)
    assert (found.level, found.action) == (Level.DEGRADED, Action.CONTACT_SUPPORT)


def test_a_line_with_details_hides_no_earlier_event_without_them() -> None:
    made = Evaluator(SHIPPED, 575)
    plain = [xid(74, 100.0 * n, source="nvml-events") for n in range(864)]
    [before] = shown(*plain, now_s=DAY_S, made=made)
    ignorable = xid(74, DAY_S, "0x40000000,0x0,0x0,0x0,0x0,0x0,0x0")
    for now_s in (DAY_S, DAY_S + 660.0):
        [found] = shown(ignorable, now_s=now_s, made=made)
        assert (found.level, found.lasting, found.since_s) == (before.level, True, 0.0)


# -- witnesses


def test_a_sensor_that_saw_an_earlier_fault_is_no_witness_of_this_one() -> None:
    before = (xid(79, 0.0, source="kmsg"), xid(79, 0.1, source="nvml-events"), mark("boot", 100.0))
    [found] = shown(*before, xid(79, 20 * DAY_S, source="kmsg"), now_s=20 * DAY_S)
    assert (found.sources, found.origins) == (("kmsg",), ("driver log",))


def test_a_sensor_without_details_that_was_a_moment_earlier_is_a_witness_too() -> None:
    details = "0x00000010" + ",0x00000000" * 6
    seen = (xid(74, 100.0, source="nvml-events"), xid(74, 100.2, details, source="kmsg"))
    assert [each.sources for each in shown(*seen, now_s=101.0)] == [("kmsg", "nvml-events")]


def test_two_sensors_that_repeat_the_drivers_log_have_one_origin() -> None:
    [found] = shown(xid(79, 0.0), xid(79, 0.1, source="nvml-events"), now_s=1.0)
    assert (found.sources, found.origins) == (("kmsg", "nvml-events"), ("driver log",))
    polled = [
        Observation(float(n), "gpu_state", GPU, source, 1.0)
        for n, source in enumerate(("nvml-polling", "nvml-events"))
    ]
    [found] = shown(*polled, now_s=2.0)
    assert (found.sources, found.origins) == (("nvml-events", "nvml-polling"), ("driver state",))
    line = Observation(0.0, "kernel_panic", "node", "kmsg")
    assert [each.origins for each in shown(line, now_s=1.0)] == [("kernel",)]


# -- errors that the driver has contained


def dbe(at_s: float, value: float) -> Observation:
    return Observation(at_s, "ecc_dbe", GPU, "nvml-polling", value)


def test_an_uncorrectable_error_that_only_the_counter_shows_lasts_until_a_reset() -> None:
    seen = [dbe(0.0, 0), dbe(10.0, 1), *(dbe(10.0 * n, 1) for n in range(2, 300))]
    [found] = shown(*seen, now_s=DAY_S)
    assert (found.check, found.level, found.action, found.since_s) == ("ecc_dbe", *RESET, 10.0)
    assert (found.lasting, found.origins) == (True, ("driver state",))
    assert said(*seen, mark("gpu_reset", 4000.0), now_s=4601.0) == HEALTHY


def test_contained_errors_on_both_sides_of_a_growth_are_not_about_it() -> None:
    """They form one burst, but neither of them is within `TOGETHER_S` of the growth."""
    seen = [dbe(0.0, 0), xid(94, 100.0), *(dbe(110.0 + 10 * n, 0) for n in range(7)), dbe(180.0, 1)]
    for later in ([], [xid(94, 260.0)]):
        found = {each.check: each for each in shown(*seen, *later, now_s=261.0)}
        assert (found["ecc_dbe"].level, found["ecc_dbe"].action) == RESET


@pytest.mark.parametrize("readings", [
    [(0.0, 0), (1.0, 4), (11.0, 4)],
    [(0.0, 0), (10.0, 1), (20.0, 1), (30.0, 3)],
    [(0.0, 2), (10.0, 2), (15.0, 5), (20.0, 5)],
])  # fmt: skip
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_counters_growth_is_the_same_in_whatever_order_its_readings_arrive(
    readings: list[tuple[float, float]], at: int
) -> None:
    policy = load(f"[checks.ecc_dbe]\nunhealthy = {{ at = {at} }}")
    seen = [dbe(*each) for each in readings]
    grows = readings[-1][1] - readings[0][1] > at
    expected = None
    for order in permutations(seen):
        for later in (100.0, DAY_S):
            found = shown(*order, now_s=later, made=Evaluator(policy, 575))
            now = [(each.level, each.action, each.since_s, each.lasting) for each in found]
            expected = now if expected is None else expected
            assert now == expected
    assert [each[:2] for each in expected or []] == ([RESET] if grows else [])


@pytest.mark.parametrize("before", [
    "unhealthy = false\ndegraded = { at = 0 }", "unhealthy = { at = 100 }", "unhealthy = { at = 1 }",
])  # fmt: skip
@pytest.mark.parametrize("is_restarted", [True, False])
def test_a_counters_growth_is_judged_by_the_present_policy_not_by_that_of_its_time(
    before: str, is_restarted: bool
) -> None:
    milder = load(f"[checks.ecc_dbe]\n{before}")
    seen = [dbe(0.0, 0), dbe(10.0, 1), *(dbe(10.0 * n, 1) for n in range(2, 150))]
    for first, then in ((milder, SHIPPED), (SHIPPED, milder)):
        made = Evaluator(first, 575)
        shown(*seen, now_s=2000.0, made=made)
        if is_restarted:
            raw = json.loads(json.dumps(made.dump()))
            made = Evaluator(then, 575)
            made.load(raw)
        else:
            made.use(then)
        throughout = shown(*seen, now_s=2000.0, made=Evaluator(then, 575))
        assert made.findings(2000.0) == tuple(throughout)
        assert [(each.level, each.since_s) for each in throughout] == (
            [(Level.UNHEALTHY, 10.0)] if then is SHIPPED else []
        )


def test_a_counter_with_many_amounts_of_growth_keeps_few_and_none_becomes_milder() -> None:
    made, value = Evaluator(SHIPPED, 575), 0.0
    for n in range(100):
        value += n * 37 % 101  # of the time between two readings, the window's share counts: at most 60
        made.add(dbe(1000.0 * n, value))
    assert len(made.dump()["grown"]) <= growth.MAX_AMOUNTS
    for at in (0, 59, 61):
        made.use(load(f"[checks.ecc_dbe]\nunhealthy = {{ at = {at} }}"))
        assert any(each.lasting for each in made.findings(99500.0)) is (at < 60)


@pytest.mark.parametrize(("code", "at_s", "level"), [
    (94, 95.0, Level.DEGRADED), (94, 125.0, Level.DEGRADED), (94, 60.0, Level.UNHEALTHY),
])  # fmt: skip
def test_an_error_that_an_xid_94_contains_is_no_worse_than_the_xid(
    code: int, at_s: float, level: Level
) -> None:
    seen = [dbe(90.0, 0), dbe(100.0, 1), xid(code, at_s)]
    [found] = [each for each in shown(*seen, now_s=126.0) if each.check == "ecc_dbe"]
    assert found.level is level
    with_another = [*seen, xid(95, 101.0)]
    [found] = [each for each in shown(*with_another, now_s=126.0) if each.check == "ecc_dbe"]
    assert found.level is Level.UNHEALTHY


def test_the_documented_override_of_xid_94_also_covers_the_counter() -> None:
    made = Evaluator(load('[xid.94]\nlevel = "healthy"'), 575)
    assert shown(dbe(90.0, 0), dbe(100.0, 1), xid(94, 100.5), now_s=101.0, made=made) == []


def test_an_operator_who_takes_the_limit_away_takes_the_finding_away() -> None:
    made = Evaluator(load("[checks.ecc_dbe]\nunhealthy = false\ndegraded = { at = 5 }"), 575)
    assert shown(dbe(90.0, 0), dbe(100.0, 1), now_s=101.0, made=made) == []


# -- the time before the first look


def test_what_a_log_says_of_the_time_before_the_first_look_counts_from_that_look() -> None:
    made = Evaluator(shipped(), 575)
    made.begin(10 * DAY_S)
    [found] = shown(xid(95, 1 * DAY_S), now_s=10 * DAY_S, made=made)
    assert (found.level, found.since_s, found.lasting) == (Level.UNHEALTHY, 10 * DAY_S, True)
    none = sample("recovery_action", 10 * DAY_S + 5, 0.0)
    [found] = shown(none, now_s=10 * DAY_S + 6, made=made)
    assert (found.level, found.action, found.lasting) == (Level.DEGRADED, Action.RESET_GPU, True)
    again = Evaluator(shipped(), 575)
    again.load(made.dump())
    again.begin(11 * DAY_S)
    assert again.findings(11 * DAY_S) == made.findings(11 * DAY_S)
    [found] = shown(xid(95, 12 * DAY_S), now_s=12 * DAY_S, made=again)
    assert (found.level, found.since_s) == (Level.UNHEALTHY, 10 * DAY_S)


@pytest.mark.parametrize("code", [79, 151, 167, 168, 169, 173])
def test_a_fault_of_this_boot_that_only_a_boot_ends_has_not_been_remedied_before_the_first_look(
    code: int,
) -> None:
    made = Evaluator(shipped(), 575)
    made.begin(DAY_S)
    fine = sample("recovery_action", DAY_S + 5, 0.0)
    [found] = shown(xid(code, HOUR_S), fine, now_s=DAY_S + 6, made=made)
    assert (found.level, found.action, found.lasting, found.since_s) == (*REBOOT, True, DAY_S)
    assert not shown(mark("boot", 2 * DAY_S), now_s=2 * DAY_S + 601, made=made)
    milder = (xid(79, HOUR_S), xid(154, HOUR_S + 1, "reset_gpu"))
    made = Evaluator(shipped(), 575)
    made.begin(DAY_S)
    found = next(each for each in shown(*milder, fine, now_s=DAY_S + 6, made=made) if each.code == 79)
    assert (found.level, found.action) == (Level.DEGRADED, Action.RESET_GPU), "a reset may have ended it"


@pytest.mark.parametrize("code", [48, 64, 79, 95, 119])
def test_after_the_loss_of_the_state_no_fault_in_the_log_is_taken_as_remedied(code: int) -> None:
    lost = Evaluator(shipped(), 575)
    lost.begin(DAY_S, knew_more=True)
    fine = sample("recovery_action", DAY_S + 5, 0.0)
    [before] = shown(xid(code, HOUR_S), fine, now_s=DAY_S + 6, made=lost)
    again = Evaluator(shipped(), 575)
    again.load(json.loads(json.dumps(lost.dump())))
    again.begin(2 * DAY_S)
    [after] = shown(now_s=30 * DAY_S, made=again)
    for found in (before, after):
        assert (found.level, found.lasting, found.since_s) == (Level.UNHEALTHY, True, DAY_S)


def test_the_drivers_word_about_a_fault_from_before_the_first_look_is_kept_as_long_as_the_fault() -> None:
    made = Evaluator(shipped(), 575)
    made.begin(10 * DAY_S)
    fine = sample("recovery_action", 10 * DAY_S + 5, 0.0)
    before = shown(xid(95, 1 * DAY_S), fine, now_s=10 * DAY_S + 6, made=made)
    for days in (5, 20, 500):
        made.forget(days * DAY_S)
        assert made.findings(days * DAY_S + FORGET_S) == tuple(before)
    assert [each.level for each in before] == [Level.DEGRADED]


def test_a_fault_of_a_check_that_cannot_be_judged_is_reported_and_the_others_are_still_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no bound")

    monkeypatch.setattr("nodeagent.evaluation.samples.sample_finding", broken)
    made = Evaluator(shipped(), 575)
    found = shown(xid(79, 0.0), sample("gpu_state", 0.0, 1.0), now_s=1.0, made=made)
    assert [(each.check, each.level) for each in found] == [("xid", Level.UNHEALTHY)]
    [problem] = made.problems.values()
    assert "evaluating gpu_state failed, so its samples were dropped: ValueError: no bound" in problem


@pytest.mark.parametrize("broken", ["samples.sample_finding", "events.event_finding"])
def test_a_check_that_cannot_be_judged_does_not_keep_the_agent_from_forgetting(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no bound")

    made = Evaluator(shipped(), 575)
    for seen in (xid(79, 0.0), sample("gpu_state", 0.0, 1.0), sample("inforom", 0.0, 1.0)):
        made.add(seen)
    made.add(Observation(0.0, "disk_used", "disk//old", "host", 1.0))
    monkeypatch.setattr(f"nodeagent.evaluation.{broken}", fail)
    made.forget(DAY_S)
    assert "disk//old" not in made.entities
    assert any("ValueError: no bound" in each for each in made.problems.values())
    assert [event[1:3] for event in made.dump()["events"]] == [["xid", 79]]


def test_a_fault_does_not_become_younger_when_its_details_arrive() -> None:
    switch = "nvswitch/0000:05:00.0"
    made = Evaluator(shipped(), 575)
    [plain] = shown(Observation(100.0, "sxid", switch, "kmsg", 20034.0), now_s=101.0, made=made)
    detailed = Observation(108.0, "sxid", switch, "kmsg", 20034.0, "fatal")
    [found] = shown(detailed, now_s=109.0, made=made)
    assert (found.lasting, found.since_s) == (True, plain.since_s)


def test_a_report_from_before_a_reset_does_not_make_the_fault_after_it_older() -> None:
    switch = "nvswitch/0000:05:00.0"
    made = Evaluator(shipped(), 575)
    made.add(Observation(100.0, "sxid", switch, "kmsg", 20034.0))
    made.add(mark("boot", 104.0))
    [found] = shown(Observation(108.0, "sxid", switch, "kmsg", 20034.0, "fatal"), now_s=109.0, made=made)
    assert found.since_s == 108.0
