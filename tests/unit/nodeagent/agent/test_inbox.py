from __future__ import annotations

import threading
from itertools import accumulate
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.agent import inbox as module
from nodeagent.agent.inbox import MAX_EVENTS, MAX_EXACT, MAX_SAMPLES, Inbox, gravity
from nodeagent.evaluation.bursts import GAP_S
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import VERDICT_XID, Level, Observation
from nodeagent.policy import loading
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import GPU, POLICY, sample, xid


def test_events_come_before_samples_and_each_is_returned_once() -> None:
    inbox = Inbox(POLICY)
    assert inbox.put([sample("heat", 1.0, 5), xid(79, 2.0), xid(79, 2.5), xid(79, 2.0, source="nvml")]) == 4
    events = [xid(79, 2.0), xid(79, 2.5), xid(79, 2.0, source="nvml")]
    assert inbox.drain() == [*events, sample("heat", 1.0, 5)]
    assert inbox.drain() == []


@pytest.mark.parametrize("times", [(5.0, 4.0), (4.0, 5.0), (5.0, 4.0, 4.5), (4.5, 5.0, 4.0), (4.5, 4.0, 5.0)])
def test_an_equal_event_between_two_within_a_second_is_dropped(times: tuple[float, ...]) -> None:
    inbox = Inbox(POLICY)
    inbox.put(xid(79, at_s) for at_s in times)
    assert sorted(each.at_s for each in inbox.drain()) == [4.0, 5.0]
    inbox.put([xid(79, 4.0)])
    assert inbox.drain() == [xid(79, 4.0)]


@pytest.mark.parametrize(("count", "apart_s"), [(6, 9000.0), (40, 100.0), (3000, 0.3), (500, 500.0)])
def test_a_backlog_yields_the_same_verdict_as_its_events_one_by_one(count: int, apart_s: float) -> None:
    inbox, seen = Inbox(shipped()), [xid(46, apart_s * n) for n in range(count)]
    found = []
    inbox.put(seen)
    backlog = inbox.drain()
    for each_of in (seen, backlog, backlog[::-1]):
        evaluator = Evaluator(shipped(), 575)
        for each in each_of:
            evaluator.add(each)
        found.append(evaluator.findings(apart_s * count))
    assert found[0] == found[1] == found[2] != ()
    assert inbox.dropped == 0
    assert len(backlog) <= max(1000, count)


def test_a_long_storm_of_one_event_displaces_nothing() -> None:
    inbox = Inbox(shipped())
    inbox.put(xid(79, 2.0 * n) for n in range(3 * MAX_EVENTS))
    assert inbox.dropped == 0
    assert len(inbox.drain()) < 3 * MAX_EXACT + 3 * MAX_EVENTS * 2 / 90


@given(
    st.lists(st.sampled_from([0.4, 30.0, 100.0, 150.0, 200.0, 5000.0]), min_size=120, max_size=400),
    st.randoms(use_true_random=False),
    st.integers(0, 60),
)
@settings(max_examples=40)
def test_a_new_event_thins_as_if_all_events_were_thinned_again(
    apart: list[float], chance: Random, late: int
) -> None:
    times = list(accumulate(apart))
    for _ in range(late):
        times.insert(chance.randrange(len(times)), times.pop(chance.randrange(len(times))))
    waiting: list[Observation] = []
    for at_s in times:
        module._insert(waiting, xid(79, at_s))
        again = list(waiting)
        for n in range(len(again) - MAX_EXACT, 0, -1) if len(again) > 2 * MAX_EXACT else ():
            module._thin(again, n, GAP_S)
        assert again == waiting


def test_the_cost_of_an_event_does_not_grow_with_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    thinned, thin = [0], module._thin

    def counted(waiting: list[Observation], n: int, gap_s: float) -> None:
        thinned[0] += 1
        thin(waiting, n, gap_s)

    monkeypatch.setattr(module, "_thin", counted)
    inbox = Inbox(POLICY)
    inbox.put(xid(79, 1000.0 * n) for n in range(MAX_EVENTS))
    assert thinned[0] < 10 * MAX_EVENTS
    assert len(inbox.drain()) == MAX_EVENTS


def test_an_event_that_is_read_twice_waits_once() -> None:
    inbox = Inbox(POLICY)
    inbox.put([xid(79, 5.0), xid(79, 5.0)])
    assert inbox.drain() == [xid(79, 5.0)]


def test_an_event_that_recurs_after_a_reset_is_not_merged_with_the_one_before_it() -> None:
    """All three come within one cycle: the reset ends the fault before it, and the later one remains."""
    inbox, evaluator = Inbox(POLICY), Evaluator(POLICY)
    reset = Observation(20.0, "gpu_reset", xid(48, 0.0).entity, "test")
    inbox.put([xid(48, 10.0), reset, xid(48, 30.0)])
    for each in inbox.drain():
        evaluator.add(each)
    [found] = evaluator.findings(1e6)
    assert (found.code, found.last_s) == (48, 30.0)


def test_a_flood_of_samples_displaces_no_event() -> None:
    inbox = Inbox(POLICY)
    inbox.put([xid(79, 0.0)])
    inbox.put(sample("heat", float(n), 1) for n in range(MAX_SAMPLES + 10))
    assert inbox.dropped == 10
    assert inbox.drain()[0] == xid(79, 0.0)


def test_a_flood_of_events_is_bounded_and_counted() -> None:
    inbox = Inbox(POLICY)
    inbox.put(xid(79, float(n), variant=str(n)) for n in range(MAX_EVENTS + 7))
    assert (inbox.dropped, len(inbox.drain())) == (7, MAX_EVENTS)


@pytest.mark.parametrize("fault_at", [0, MAX_EVENTS // 2, MAX_EVENTS + 50])
@pytest.mark.parametrize(
    "kept",
    [
        xid(95, 1e6),
        xid(VERDICT_XID, 1e6, variant="gpu_reset"),
        Observation(1e6, "kernel_gpu_init_failed", GPU, "kmsg"),
        Observation(1e6, "kernel_nvme_disabled", "disk/nvme0", "kmsg"),
        Observation(1e6, "gpu_reset", GPU, "nvml-polling"),
        Observation(1e6, "cleared", GPU, "operator"),
    ],
    ids=lambda each: each.check,
)
def test_a_flood_of_harmless_events_displaces_no_fault_and_nothing_that_ends_one(
    kept: Observation, fault_at: int
) -> None:
    inbox, count = Inbox(shipped()), MAX_EVENTS + 100
    for n in range(count):
        if n == fault_at:
            inbox.put([kept])
        inbox.put([xid(13, float(n), variant=f"GPC {n}")])
    assert inbox.dropped == count + 1 - MAX_EVENTS
    found = inbox.drain()
    assert len(found) == MAX_EVENTS
    assert kept in found


def test_an_event_that_only_recurrence_or_a_model_makes_grave_is_grave() -> None:
    policy = shipped()
    assert gravity(policy, xid(13, 0.0)) is Level.HEALTHY
    for code, meaning in policy.xids.items():
        if meaning.recurs is not None and not meaning.recurs.same_variant:
            assert gravity(policy, xid(code, 0.0)) >= meaning.recurs.level
    for each in policy.models:
        assert gravity(policy, xid(each.code, 0.0)) >= each.meaning.level
    assert gravity(policy, Observation(0.0, "no_such_check", GPU, "kmsg")) is Level.HEALTHY


def test_an_operators_policy_decides_what_is_grave() -> None:
    inbox = Inbox(shipped())
    inbox.policy = loading.load('[xid.13]\nlevel = "unhealthy"\n')
    inbox.put([xid(13, 1.0)])
    inbox.put(xid(43, float(n), variant=str(n)) for n in range(MAX_EVENTS))
    assert xid(13, 1.0) in inbox.drain()


def test_a_waiting_thread_is_woken() -> None:
    inbox = Inbox(POLICY)
    threading.Timer(0.01, inbox.put, ([xid(79, 0.0)],)).start()
    inbox.wait(30.0)
    assert inbox.drain() == [xid(79, 0.0)]
    inbox.wake()
    inbox.wait(30.0)


def test_the_samples_of_a_cycle_wake_the_agent_once() -> None:
    """Each ring wakes a thread, which is most of the cost of an idle agent."""
    inbox = Inbox(POLICY)
    for cycle in range(3):
        for n in range(5):
            inbox.put([sample("heat", 10.0 * cycle + n, 1)])
        assert inbox._bell.qsize() == 1
        inbox.wait(30.0)
        inbox.put([sample("heat", 10.0 * cycle + 9, 1)])  # still of this cycle
        assert inbox._bell.qsize() == 0
        inbox.put([xid(79, float(cycle))])
        assert inbox._bell.qsize() == 1, "an event always wakes it"
        inbox.wait(30.0)
        assert len(inbox.drain()) == 7


def test_one_wait_gathers_the_samples_of_all_sensors_and_an_event_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "GATHER_S", 60.0)
    inbox = Inbox(POLICY)
    inbox.put([sample("heat", 1.0, 5)])

    def others() -> None:
        inbox.put([sample("errors", 1.0, 5)])
        inbox.put([xid(79, 2.0)])

    threading.Timer(0.01, others).start()
    inbox.wait(60.0)
    assert inbox.drain() == [xid(79, 2.0), sample("heat", 1.0, 5), sample("errors", 1.0, 5)]


def test_samples_alone_are_returned_once_they_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GATHER_S", 0.01)
    inbox = Inbox(POLICY)
    inbox.put([sample("heat", 1.0, 5)])
    inbox.wait(60.0)
    assert len(inbox.drain()) == 1
