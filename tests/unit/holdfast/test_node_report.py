"""The node agent and the supervisor use the same words."""

from __future__ import annotations

from holdfast.node_report import ACTIONS, DEGRADED, UNHEALTHY, cost_rank
from nodeagent.model import Action, Level, word


def test_the_agent_reports_the_actions_and_levels_that_the_supervisor_knows() -> None:
    assert sorted(map(word, Action)) == sorted(ACTIONS)
    assert {word(each) for each in Level if each is not Level.HEALTHY} == {DEGRADED, UNHEALTHY}


def test_an_action_of_a_newer_agent_counts_as_the_cheapest() -> None:
    assert [cost_rank(each) for each in ("sing", *ACTIONS)] == [0, *range(len(ACTIONS))]
