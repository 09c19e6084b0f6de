"""A policy changes while findings are active: the agent keeps running, and a level without a bound ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nodeagent.evaluation import samples
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, HealthFinding, Level, Observation
from nodeagent.policy import loading
from nodeagent.policy.rules import Rule, RuleKind
from tests.unit.nodeagent.evaluation.world import GPU, POLICY, sample, xid

SHIPPED = loading.shipped()
FOLDED_S = 400.0  # longer than samples may be late, so the level is in the folded part of the saved evidence


A100 = "NVIDIA A100-SXM4-80GB"


def of_model(name: str, at_s: float, mig: str = "", slot: str = GPU) -> Observation:
    facts = (("name", name), *((("mig", mig),) if mig else ()))
    return Observation(at_s, "gpu_state", slot, "nvml-polling", 0.0, facts=facts)


def sampled_rules() -> list[Rule]:
    return [each for each in SHIPPED.rules.values() if each.kind is not RuleKind.EVENT]


def weakened(rule: Rule) -> Iterator[Rule]:
    """Yield the rule without each of its bounds, and without all of them."""
    if rule.kind is RuleKind.STATE:
        healthy = {
            value: replace(state, level=Level.HEALTHY, action=Action.NONE)
            for value, state in rule.states.items()
        }
        for value, state in healthy.items():
            yield replace(rule, states={**rule.states, value: state})
        yield replace(rule, states=healthy)
        return
    for changed in ({"degraded": None}, {"unhealthy": None}, {"degraded": None, "unhealthy": None}):
        yield replace(rule, **changed)  # type: ignore[arg-type]


def bad_samples(rule: Rule, until_s: float) -> Iterator[Observation]:
    """Yield samples of the worst value, from one bound's time before 0 until `until_s`."""
    every_s = rule.period_s or 10.0
    bounds = [each for each in (rule.degraded, rule.unhealthy) if each]
    worst = max(rule.states, key=lambda v: (rule.states[v].level, rule.states[v].for_s), default=0)
    count = int(until_s / every_s) + 1
    for n in range(-max(150, int(300 / every_s)), count):
        if rule.kind is RuleKind.STATE:
            value = float(worst)
        elif rule.kind is RuleKind.RATE:
            value = (n + 1000.0) * 10 * max(each.at + 1 for each in bounds)
        else:
            value = (min if rule.below else max)(each.at for each in bounds)
        yield Observation(1e6 + n * every_s, rule.check, GPU, "test", value)


def standing(rule: Rule) -> tuple[Evaluator, float]:
    made, at_s = Evaluator(SHIPPED), 0.0
    for each in bad_samples(rule, FOLDED_S + 10 * rule.period_s):
        made.add(each)
        at_s = each.at_s
    return made, at_s


def has(rule: Rule, level: Level) -> bool:
    if rule.kind is RuleKind.STATE:
        return level in {each.level for each in rule.states.values()}
    return rule.unhealthy is not None or (level is Level.DEGRADED and rule.degraded is not None)


@pytest.mark.parametrize("rule", sampled_rules(), ids=lambda rule: rule.check)
def test_a_saved_finding_whose_bound_was_removed_ends_and_the_others_remain(rule: Rule) -> None:
    made, at_s = standing(rule)
    before = made.findings(at_s)
    if not any(has(rule, level) for level in (Level.DEGRADED, Level.UNHEALTHY)):
        assert not before
        return
    assert len(before) == 1, "every rule's worst samples must reach a level"
    saved = json.loads(json.dumps(made.dump()))
    for other in weakened(rule):
        changed = replace(SHIPPED, rules={**SHIPPED.rules, rule.check: other})
        restarted = Evaluator(changed)
        restarted.load(saved)
        restarted.add(xid(79, at_s))
        after = restarted.findings(at_s)
        assert [each.code for each in after if each.check == "xid"] == [79]
        left = [each for each in after if each.check == rule.check]
        assert len(left) <= 1
        assert all(has(other, each.level) for each in left)
        if has(other, before[0].level) and rule.kind is not RuleKind.STATE:
            assert [each.level for each in left] == [before[0].level]
        assert not restarted.problems
        made.use(changed)  # the same change without a restart
        assert [each for each in made.findings(at_s) if each.check == rule.check] == left
        made.use(SHIPPED)
        made = Evaluator(SHIPPED)
        made.load(saved)


DISK_LINE = "[checks.{}]\nunhealthy = false\n"


@pytest.mark.parametrize(
    "check", [each.check for each in sampled_rules() if each.degraded and each.unhealthy]
)
def test_the_documented_line_that_removes_a_bound_leaves_the_finding_degraded(check: str) -> None:
    made, at_s = standing(SHIPPED.rules[check])
    assert [each.level for each in made.findings(at_s)] == [Level.UNHEALTHY]
    restarted = Evaluator(loading.load(DISK_LINE.format(check)))
    restarted.load(json.loads(json.dumps(made.dump())))
    assert [each.level for each in restarted.findings(at_s)] == [Level.DEGRADED]


def test_a_bug_about_one_entity_is_a_problem_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    right = samples.sample_finding

    def wrong(entity: str, *rest: object) -> HealthFinding | None:
        if entity == "disk//bad":
            raise ZeroDivisionError("a bug of ours")
        return right(entity, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(samples, "sample_finding", wrong)
    made = Evaluator(SHIPPED)
    for entity in ("disk//bad", "disk//data"):
        made.add(Observation(0.0, "disk_used", entity, "host", 99.0))
    made.add(xid(79, 0.0))
    assert {each.entity for each in made.findings(1.0)} == {GPU, "disk//data"}
    (problem,) = made.problems.values()
    assert "disk//bad: evaluating disk_used failed" in problem
    assert "ZeroDivisionError: a bug of ours" in problem
    assert len(made.findings(2.0)) == 2
    assert list(made.undecided(1.0)) == [("disk//bad", "disk_used", problem)], (
        "`check` must not call it healthy"
    )
    assert made.add(Observation(30.0, "disk_used", "disk//bad", "host", 10.0))


def test_a_bug_about_one_code_or_while_a_sample_is_added_is_a_problem_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong:
        """Meanings with a hole."""

        def get(self, code: int, other: object) -> object:
            if code == 48:
                raise ZeroDivisionError("a bug of ours")
            return POLICY.xids.get(code, other)

    made = Evaluator(replace(POLICY, xids=Wrong()), 400)  # type: ignore[arg-type]
    made.add(xid(48, 0.0))
    made.add(xid(79, 0.0))
    assert [each.code for each in made.findings(1.0)] == [79]
    assert "its events are not evaluated" in made.problems[GPU, "xid"]
    assert any(row[2] == 48 for row in made.dump()["events"]), "its evidence remains for a repaired agent"

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(samples.SampleSeries, "fold", broken)
    assert made.add(sample("heat", 5.0, 1.0)) is False
    assert "its samples were dropped" in made.problems[GPU, "heat"]
    assert [each.code for each in made.findings(6.0)] == [79]


def test_a_check_that_a_policy_does_not_have_is_dropped_when_the_policy_changes() -> None:
    made = Evaluator(POLICY)
    made.add(sample("verdict", 0.0, 1.0))
    assert made.findings(0.0)
    rules = {name: rule for name, rule in POLICY.rules.items() if name != "verdict"}
    made.use(replace(POLICY, rules=rules))
    assert not made.findings(0.0)


def test_the_model_of_a_gpu_decides_what_a_code_means_as_soon_as_it_is_known() -> None:
    made = Evaluator(SHIPPED, 500)
    made.add(xid(95, 0.0))
    assert [each.action for each in made.findings(1.0)] == [Action.RESET_GPU]
    made.add(of_model(A100, 0.5))
    assert [each.action for each in made.findings(1.0)] == [Action.REBOOT_NODE]
    made.use(loading.load('[xid.95]\naction = "replace"\n'))
    assert [each.action for each in made.findings(1.0)] == [Action.REPLACE]
    made.use(SHIPPED)
    made.add(of_model("NVIDIA H100 80GB HBM3", 0.7))
    assert [each.action for each in made.findings(1.0)] == [Action.RESET_GPU]


@pytest.mark.parametrize(
    ("mode", "action"),
    [
        ("on", Action.RESET_GPU),
        ("on, off pending", Action.RESET_GPU),
        ("off, on pending", Action.REBOOT_NODE),
        ("", Action.REBOOT_NODE),
    ],
)
def test_the_current_mig_mode_of_an_a100_decides_whether_a_reset_is_enough(mode: str, action: Action) -> None:
    made = Evaluator(SHIPPED, 500)
    made.add(xid(95, 0.0))
    made.add(of_model(A100, 0.5))
    assert [each.action for each in made.findings(1.0)] == [Action.REBOOT_NODE]
    made.add(of_model(A100, 0.7, mode))
    assert [each.action for each in made.findings(1.0)] == [action]
