"""What one more log line costs after hundreds of boots with faults between them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from nodeagent.evaluation.bursts import MAX_BURSTS, TimeOff
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.evidence import Event
from nodeagent.evaluation.judging import Judge
from nodeagent.model import NODE, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import xid

APART_S = 600.0
CODES = (79, 48, 119, 94, 31, 13, 63, 74)
LINE = "kernel_oom"


def looping(boots: int) -> tuple[Evaluator, float]:
    """Return an evaluator that has seen boots with a fault after each, and the time after them."""
    made = Evaluator(shipped(), 575)
    for number in range(boots):
        at_s = number * APART_S
        made.add(Observation(at_s, "boot", NODE, "agent", facts=(("last_s", repr(at_s - 60.0)),)))
        made.add(xid(CODES[number % len(CODES)], at_s + 100.0))
    made.findings(boots * APART_S)
    return made, boots * APART_S


def line(at_s: float) -> Observation:
    return Observation(at_s, LINE, NODE, "kmsg", text=f"at {at_s}")


def test_a_line_about_the_node_causes_no_evaluation_of_other_events(monkeypatch: pytest.MonkeyPatch) -> None:
    made, now_s = looping(40)
    judged: list[Event] = []
    judge = Judge.judge_event

    def judge_event(self: Judge, event: Event, *args: Any) -> object:
        judged.append(event)
        return judge(self, event, *args)

    monkeypatch.setattr(Judge, "judge_event", judge_event)
    made.add(line(now_s + 1.0))
    assert LINE in {each.check for each in made.findings(now_s + 1.0)}
    assert judged == [(NODE, LINE, 0)]


@pytest.mark.parametrize("boots", [256, 1024])
@pytest.mark.parametrize("seen", [xid(CODES[0], 0.0), line(0.0)], ids=["xid", "node"])
def test_the_work_for_one_line_is_proportional_to_the_bursts_of_its_event(
    monkeypatch: pytest.MonkeyPatch, boots: int, seen: Observation
) -> None:
    made, now_s = looping(boots)
    asked = Counter[str]()

    def count(name: str) -> None:
        method = getattr(TimeOff, name)

        def counted(self: TimeOff, *args: float) -> float:
            asked[name] += 1
            found: float = method(self, *args)
            return found

        monkeypatch.setattr(TimeOff, name, counted)

    count("window_start_s")
    count("held_until_s")
    made.add(Observation(now_s + 1.0, seen.check, seen.entity, "kmsg", seen.value))
    made.findings(now_s + 1.0)
    assert asked.total() <= 16 * MAX_BURSTS
