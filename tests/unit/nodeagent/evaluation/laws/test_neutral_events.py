"""Whatever happens on a node, except a remedy, a recurrence's finding gets neither milder nor younger."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import NODE, HealthFinding, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S, GPU, mark, xid

SHIPPED = shipped()
OTHER = "gpu/0000:1b:00.0"
INVENTORY = (("uuid", "a"), ("name", "NVIDIA H100 80GB HBM3"), ("mig", "off"))
PAUSES_S = (0.5, 20.0, 200.0, 700.0, 4000.0, DAY_S, 8 * DAY_S, 31 * DAY_S)
NEUTRAL: dict[str, Callable[[float, int], Observation]] = {
    "again": lambda at_s, code: xid(code, at_s),
    "milder": lambda at_s, _: xid(31, at_s),
    "details": lambda at_s, _: xid(149, at_s, f"RLW Fatal 0x{int(at_s) % 40:x} 0x1"),
    "other GPU": lambda at_s, _: Observation(at_s, "xid", OTHER, "kmsg", 79.0),
    "line": lambda at_s, _: Observation(at_s, "kernel_oom", NODE, "kmsg"),
    "sighting": lambda at_s, _: Observation(at_s, "gpu_state", GPU, "nvml-polling", facts=INVENTORY),
    "reset": lambda at_s, _: mark("gpu_reset", at_s),
    "no action": lambda at_s, _: xid(154, at_s, "none"),
    "boot": lambda at_s, _: mark("boot", at_s),
}
STEPS = (*NEUTRAL, "forget", "restart")


def of(made: Evaluator, code: int, now_s: float) -> HealthFinding:
    [found] = [each for each in made.findings(now_s) if (each.entity, each.code) == (GPU, code)]
    return found


def stepped(made: Evaluator, step: str, code: int, at_s: float) -> Evaluator:
    if step == "forget":
        made.forget(at_s - FORGET_S)
    elif step == "restart":
        again = Evaluator(SHIPPED, made.branch)
        again.load(json.loads(json.dumps(made.dump())))
        return again
    else:
        made.add(NEUTRAL[step](at_s, code))
    return made


@pytest.mark.parametrize("code", [64, 119, 140])
@pytest.mark.parametrize("sighted", [False, True])
@given(
    st.sampled_from([None, 550, 575]),
    # most steps of a history are of few kinds, so that the limits of these kinds are reached
    st.lists(st.sampled_from(STEPS), min_size=1, max_size=4).flatmap(
        lambda kinds: st.lists(
            st.tuples(st.sampled_from([*kinds * 4, *STEPS]), st.sampled_from(PAUSES_S)), max_size=150
        )
    ),
)
@settings(max_examples=40)
def test_a_recurrence_gets_neither_milder_nor_younger_without_its_remedy(
    code: int, sighted: bool, branch: int | None, steps: list[tuple[str, float]]
) -> None:
    made, now_s = Evaluator(SHIPPED, branch), 1000.0
    if sighted:
        made.add(NEUTRAL["sighting"](0.0, code))
    for each in (xid(code, 100.0), mark("gpu_reset", 200.0), xid(code, now_s)):
        made.add(each)
    before = of(made, code, now_s)
    for step, pause_s in steps:
        now_s += pause_s
        if (step, code) == ("boot", 119) or (step == "sighting" and not sighted):
            continue  # a reboot is the remedy of Xid 119
        made = stepped(made, step, code, now_s)
        found = of(made, code, now_s)
        assert (found.level, found.action) >= (before.level, before.action)
        assert found.since_s <= before.since_s
        before = found
