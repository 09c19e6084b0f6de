"""The table of rules: their order in each phase, and that it agrees with the table of transitions."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from holdfast import exit_codes
from supervisor.decision.decide import RULES, DecisionRule, decide
from supervisor.decision.transition import TRANSITIONS
from supervisor.view.model import PHASES, Dismiss, End, JobPhase, Look, Policy, Wait
from tests.unit.supervisor.job_views import view

POLICY = Policy(members=2)
OLDER = {Look, Dismiss}  # only in journals of older versions
RUNNING = [
    "stop_at_once",
    "follow_unknown_generation",
    "secure_after_faults",
    "replace_cut_off_member",
    "act_on_stall",
    "warn_of_changed_file",
    "end_without_processes",
    "refuse_state_without_room",
    "settle",
    "finish",
    "secure_before_stop",
    "swap_departing_members",
    "grow_group",
    "warn_of_fixed_size",
    "learn_from_stall",
    "await_first_step",
    "replace_lost_standby",
    "await_next_event",
]
ORDER = {
    "forming": [
        "stop_at_once",
        "follow_unknown_generation",
        "stop_before_the_start",
        "end_without_members",
        "end_script_that_cannot_start",
        "replace_lost_standby",
        "refuse_to_start_over",
        "await_first_members",
        "await_first_state",
        "start_first_generation",
    ],
    "running": RUNNING,
    "looking": RUNNING,
    "securing": [
        "stop_at_once",
        "follow_unknown_generation",
        "await_secured_state",
        "await_unheard_members",
        "await_unheard_standbys",
        "await_unfinished_work",
        "finish_without_fault",
        "save_without_fault",
        "restart_unexplained",
        "await_cause",
        "end_where_no_restart_helps",
        "save_after_fault",
        "preserve",
        "await_members",
        "await_standby_for_swap",
        "pause_before_retry",
        "await_newer_state",
        "await_stored_state",
        "start_next_generation",
    ],
    "saving": ["finish_at_once", "stop_at_once", "save"],
    "stopping": ["await_members_exit"],
    "ended": ["await_nothing"],
}


def results(rule: DecisionRule) -> set[Any]:
    """Return the types that a rule may return."""
    hint = get_type_hints(rule)["return"]
    return set(get_args(hint)) if get_origin(hint) is UnionType else {hint}


def test_each_phase_has_its_rules_in_the_order_of_their_urgency() -> None:
    assert {phase: [rule.__name__ for rule in rules] for phase, rules in RULES.items()} == ORDER


@pytest.mark.parametrize("phase", PHASES)
def test_the_rules_of_a_phase_have_exactly_the_actions_allowed_in_it(phase: JobPhase) -> None:
    actions = set().union(*map(results, RULES[phase])) - {NoneType, Wait}
    assert actions == set(TRANSITIONS[phase]) - OLDER


@pytest.mark.parametrize("phase", PHASES)
def test_only_the_last_rule_of_a_phase_always_has_an_action(phase: JobPhase) -> None:
    *others, last = RULES[phase]
    assert all(NoneType in results(rule) for rule in others)
    assert NoneType not in results(last)


@pytest.mark.parametrize("phase", ["forming", "running", "looking", "securing", "saving"])
def test_nothing_is_more_urgent_than_a_second_request_to_stop(phase: JobPhase) -> None:
    action = decide(view(phase=phase, stop="now"), POLICY)
    assert action == End(exit_codes.INTERRUPTED, "stopped immediately, as requested")


@pytest.mark.parametrize("phase", ["stopping", "ended"])
def test_a_second_request_to_stop_changes_nothing_once_the_end_is_decided(phase: JobPhase) -> None:
    assert decide(view(phase=phase, stop="now"), POLICY) == decide(view(phase=phase, stop=""), POLICY)


def test_a_second_request_to_stop_ends_a_finished_run_as_finished() -> None:
    action = decide(view(phase="saving", stop="now", finished=True), POLICY)
    assert action == End(0, "all ranks have finished")
