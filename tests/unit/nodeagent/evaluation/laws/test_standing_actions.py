"""The action of a finding about a state stands as long as the finding, for each state of the policy."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import HealthFinding, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import Rule, RuleKind
from tests.unit.nodeagent.evaluation.world import GPU

POLICY = shipped()
CLEAN, UNKNOWN = 0.0, 99.0
BAD = [
    (rule, value)
    for rule in POLICY.rules.values()
    if rule.kind is RuleKind.STATE
    for value, state in rule.states.items()
    if state.level > Level.HEALTHY
]


def period_s(rule: Rule) -> float:
    return rule.period_s or 30.0


class Watched:
    """An agent that samples one check, and what it says of it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.now_s = 1000.0
        self.made = Evaluator(POLICY, 575)

    def sample(self, value: float, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.now_s <= until_s:  # not at all for a negative time
            self.made.add(Observation(self.now_s, self.rule.check, GPU, "nvml-polling", value))
            self.now_s += period_s(self.rule)

    def restart(self) -> None:
        raw = json.loads(json.dumps(self.made.dump()))
        self.made = Evaluator(POLICY, 575)
        self.made.load(raw)

    @property
    def found(self) -> HealthFinding | None:
        return next(iter(self.made.findings(self.now_s)), None)


def asked(found: HealthFinding | None) -> tuple[object, ...]:
    return () if found is None else (found.level, found.action, found.since_s)


def test_every_bad_state_has_a_clean_value_and_none_has_the_unknown_one() -> None:
    assert not [rule.check for rule, _ in BAD if int(UNKNOWN) in rule.states]
    assert all(rule.states[int(CLEAN)].level is Level.HEALTHY for rule, _ in BAD)


@pytest.mark.parametrize(("rule", "value"), BAD, ids=[f"{rule.check}-{value}" for rule, value in BAD])
@given(
    st.lists(
        st.tuples(st.sampled_from([UNKNOWN, CLEAN]), st.sampled_from([0.0, 120.0, 400.0, 3600.0])),
        max_size=4,
    ),
    st.booleans(),
)
@settings(max_examples=8)
@example([(UNKNOWN, 3600.0)], True)
@example([(CLEAN, 560.0)], False)
@example([(UNKNOWN, 3600.0), (CLEAN, 0.0), (UNKNOWN, 3600.0)], True)
def test_the_level_the_action_and_the_age_of_a_state_stand_until_clean_samples_end_them(
    rule: Rule, value: int, after: list[tuple[float, float]], restarts: bool
) -> None:
    watched = Watched(rule)
    watched.sample(float(value), rule.states[value].for_s)
    before = asked(watched.found)
    assert before[:2] == (rule.states[value].level, rule.states[value].action)
    for said, for_s in after:
        if said == CLEAN:  # too few clean samples to end it: the time counts from the last bad one
            for_s = min(for_s, rule.clear_s - period_s(rule) - 1.0)
        watched.sample(said, for_s)
        if restarts:
            watched.restart()
        assert asked(watched.found) == before
        watched.sample(UNKNOWN, 0.0)
    watched.sample(CLEAN, rule.clear_s + period_s(rule))
    assert watched.found is None
