"""More variants of an event than are kept: the fault keeps its level, its action and its age."""

from __future__ import annotations

import json

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.quotas import MAX_VARIANTS
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import Recurs
from tests.unit.nodeagent.evaluation.world import DAY_S, mark, xid

POLICY = shipped()
# Xid 149 with the bits of `intrInfo` that do not matter: each is a variant, and all mean the same.
LINKS = [f"NETIR_LINK_DOWN Fatal {0x00200011 + (n << 7):#010x} 0x00000001" for n in range(24)]
SUPPORT = (Level.UNHEALTHY, Action.CONTACT_SUPPORT)


def restored(made: Evaluator) -> Evaluator:
    again = Evaluator(POLICY)
    again.load(json.loads(json.dumps(made.dump())))
    return again


def the_fault(made: Evaluator, now_s: float) -> HealthFinding:
    [found] = made.findings(now_s)
    assert found.code == 149
    return found


def test_the_variants_here_are_more_than_are_kept_and_count_their_recurrence_apart() -> None:
    assert len(LINKS) > MAX_VARIANTS
    [recurs] = {POLICY.meaning("xid", 149, each, 575).recurs for each in LINKS}
    assert recurs == Recurs(5, DAY_S, *SUPPORT, same_variant=True)


@pytest.mark.parametrize("branch", [575, None])
@pytest.mark.parametrize("restart_every", [1000, 7])
def test_an_unhealthy_fault_whose_variants_rotate_is_as_old_as_its_first_sign(
    branch: int | None, restart_every: int
) -> None:
    made = Evaluator(POLICY, branch)
    for n in range(120):
        made.add(xid(149, 15.0 * n, LINKS[n % len(LINKS)]))
        if n % restart_every == restart_every - 1:
            made = restored(made)
        found = the_fault(made, 15.0 * n)
        assert (found.level, found.action, found.since_s) == (Level.UNHEALTHY, Action.RESET_GPU, 0.0)
    made.add(mark("gpu_reset", 1800.0))
    assert not restored(made).findings(1800.0 + 600.0), "its remedy ends it, also what was inherited"


def test_what_no_longer_counts_towards_a_recurrence_is_counted_as_lost() -> None:
    made = Evaluator(POLICY, 575)
    for n, each in enumerate(LINKS):
        made.add(xid(149, float(n), each))
        assert made.dropped == max(0, n + 1 - MAX_VARIANTS)
    later = Evaluator(POLICY, 575)
    for n, each in enumerate(LINKS):
        later.add(xid(149, 2 * DAY_S * n, each))
    assert later.dropped == 0, "each is older than the window of the recurrence"


def test_what_a_recurrence_has_raised_is_not_lowered_by_variants_that_make_room() -> None:
    made = Evaluator(POLICY, 575)
    for n in range(5):
        made.add(xid(149, 3700.0 * n, LINKS[0]))
    raised = the_fault(made, 4 * 3700.0)
    assert (raised.level, raised.action) == SUPPORT
    for n in range(200):
        made.add(xid(149, 15000.0 + n, LINKS[1 + n % (len(LINKS) - 1)]))
    found = the_fault(restored(made), 15300.0)
    assert (found.level, found.action, found.since_s) == (*SUPPORT, 0.0)
    assert len({row[3] for row in made.dump()["events"]}) == MAX_VARIANTS


def test_an_agent_that_does_not_know_what_was_inherited_reads_the_rest() -> None:
    made = Evaluator(POLICY, 575)
    for n, each in enumerate(LINKS):
        made.add(xid(149, float(n), each))
    raw = made.dump()
    assert raw.pop("inherited")
    earlier = Evaluator(POLICY, 575)
    earlier.load(raw)
    assert the_fault(earlier, 30.0).level is Level.UNHEALTHY
