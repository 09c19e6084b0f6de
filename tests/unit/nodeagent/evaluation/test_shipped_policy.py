"""The shipped policy is tested at its thresholds."""

from __future__ import annotations

from collections.abc import Iterable

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import GPU

POLICY = shipped()


def told(check: str, values: Iterable[float], every_s: float) -> tuple[Level, Action]:
    """Return the finding after samples of `check`, one every `every_s` seconds."""
    made = Evaluator(POLICY)
    at_s = 0.0
    for value in values:
        at_s += every_s
        made.add(Observation(at_s, check, GPU, "test", value))
    found = [each for each in made.findings(at_s) if each.check == check]
    return (found[0].level, found[0].action) if found else (Level.HEALTHY, Action.NONE)


def test_clocks_that_are_reduced_briefly_are_reported_and_for_most_of_the_time_take_out_the_node() -> None:
    def cut(so_many: int, of: int) -> list[float]:
        return [float((n + 1) * so_many // of - n * so_many // of) for n in range(of)]

    assert told("gpu_throttled", cut(12, 60), 5.0)[0] is Level.HEALTHY
    assert told("gpu_throttled", cut(13, 60), 5.0) == (Level.DEGRADED, Action.NONE)
    assert told("gpu_throttled", cut(72, 120), 5.0) == (Level.DEGRADED, Action.NONE)
    assert told("gpu_throttled", cut(73, 120), 5.0) == (Level.UNHEALTHY, Action.CONTACT_SUPPORT)


def test_corrected_errors_clear_when_their_rate_is_half_the_limit() -> None:
    def after(rate: float) -> Level:
        counts, burst = [0.0, 101.0], 101.0
        counts += [burst + rate * (n + 1) for n in range(11)]
        return told("ecc_sbe", counts, 60.0)[0]

    assert told("ecc_sbe", [0.0, 100.0], 60.0)[0] is Level.HEALTHY
    assert told("ecc_sbe", [0.0, 101.0], 60.0)[0] is Level.DEGRADED
    assert after(51.0) is Level.DEGRADED
    assert after(50.0) is Level.HEALTHY
