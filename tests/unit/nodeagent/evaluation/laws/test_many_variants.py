"""More variants of an event than are kept: the fault keeps its level, its action and its age."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from nodeagent.evaluation import quotas
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.quotas import MAX_VARIANTS
from nodeagent.model import Action, HealthFinding, Level, Observation
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
        made.add(xid(149, 4000.0 * n, LINKS[0]))
    raised = the_fault(made, 4 * 4000.0)
    assert (raised.level, raised.action) == SUPPORT
    for n in range(200):
        made.add(xid(149, 16100.0 + n, LINKS[1 + n % (len(LINKS) - 1)]))
    found = the_fault(restored(made), 16400.0)
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


def after(*seen: Observation, now_s: float) -> list[tuple[Level, Action, bool]]:
    made = Evaluator(POLICY, 575)
    for each in seen:
        made.add(each)
    return [(each.level, each.action, each.lasting) for each in made.findings(now_s) if each.code == 149]


def test_a_fault_of_another_link_soon_after_a_remedy_keeps_the_action_until_the_next_remedy() -> None:
    words = (xid(154, 1.0, "reboot_node"), xid(154, 61.0, "none"))
    seen = (xid(149, 0.0, LINKS[0]), *words, xid(149, 62.0, LINKS[1]))
    assert after(*seen, now_s=62.0) == [(Level.UNHEALTHY, Action.REBOOT_NODE, True)]
    assert after(*seen, now_s=DAY_S) == [(Level.UNHEALTHY, Action.REBOOT_NODE, True)]
    for remedy in (mark("boot", 1000.0), xid(154, 1000.0, "none")):
        assert after(*seen, remedy, now_s=1599.0) == [(Level.UNHEALTHY, Action.REBOOT_NODE, False)]
        assert not after(*seen, remedy, now_s=1600.0)


def test_a_fault_of_another_link_after_the_quiet_time_is_judged_by_itself() -> None:
    seen = (xid(149, 0.0, LINKS[0]), xid(154, 1.0, "reboot_node"), mark("boot", 61.0))
    assert after(*seen, xid(149, 661.0, LINKS[1]), now_s=661.0) == [(Level.UNHEALTHY, Action.RESET_GPU, True)]
    assert after(*seen, xid(149, 660.0, LINKS[1]), now_s=DAY_S) == [
        (Level.UNHEALTHY, Action.REBOOT_NODE, True)
    ]


def test_an_error_of_another_link_that_needs_no_action_does_not_prolong_a_fault() -> None:
    seen = (xid(149, 0.0, LINKS[0]), mark("gpu_reset", 60.0))
    errors = [xid(149, 60.0 + 300.0 * n, BER[n]) for n in range(4)]
    assert POLICY.meaning("xid", 149, BER[0], 575).level is Level.HEALTHY
    assert after(*seen, *errors, now_s=659.0) == [(Level.UNHEALTHY, Action.RESET_GPU, False)]
    assert after(*seen, *errors, now_s=660.0) in ([], [(Level.HEALTHY, Action.NONE, False)])


# Two that count their recurrence by variant: one lasts until a remedy, the other until time has passed.
DOWN = [f"NETIR_LINK_EVT Fatal {0b000001 << 20 | 0b0010001 | n << 11:#010x} {n:#010x}" for n in range(24)]
BER = [f"NETIR_BER_EVENT Nonfatal {0b0010011 | n << 11:#010x} 0x00000000" for n in range(24)]


def judged(made: Evaluator, now_s: float) -> tuple[Level, Action, float]:
    """Return what orders the findings about Xid 149: the graver is greater, and of equal ones the older."""
    for found in made.findings(now_s):
        if found.code == 149:
            return found.level, found.action, -found.since_s
    return Level.HEALTHY, Action.NONE, 0.0


def test_two_links_that_have_recurred_keep_what_that_means_when_one_makes_room() -> None:
    made = Evaluator(POLICY, 580)
    for at_s, n in ((0.0, 0), (4000.0, 0), (2000.0, 1), (6000.0, 1)):
        made.add(xid(149, at_s, DOWN[n]))
    assert judged(made, 6100.0)[:2] == SUPPORT
    for n in range(2, len(DOWN)):
        made.add(xid(149, 6100.0 + n, DOWN[n]))
        assert judged(restored(made), 6100.0 + n) == (*SUPPORT, 0.0)
    made.add(mark("gpu_reset", 6500.0))
    assert not restored(made).findings(6500.0 + 600.0), "its remedy ends it"


def test_what_recurs_until_time_has_passed_still_does_when_it_makes_room() -> None:
    made = Evaluator(POLICY, 580)
    for n in range(10):
        made.add(xid(149, 160.0 * n, BER[n % 2]))
    before = judged(made, 2000.0)
    assert before[0] is Level.DEGRADED
    for n in range(2, len(BER)):
        made.add(xid(149, 2000.0 + n, BER[n]))
    assert judged(made, 2100.0) == before
    assert made.dropped > 0, "another burst of the variant that made room would no longer count as its own"
    assert not [each for each in made.findings(2100.0 + 2 * DAY_S) if each.code == 149]


def evidence(seed: int) -> Iterator[Observation]:
    drawn, at_s = random.Random(seed), 0.0
    apart_s, links = drawn.choice([60.0, 400.0, 2000.0, 8000.0]), drawn.choice([(DOWN,), (BER,), (DOWN, BER)])
    for n in range(50):
        at_s += drawn.expovariate(1 / apart_s)
        kind = drawn.random()
        if kind < 0.8:
            variants = drawn.choice(links)
            among = drawn.choice([2, 4, 7]) if n > 20 else 4  # first some recur, then others come
            yield xid(149, at_s, variants[drawn.randrange(among)])
        elif kind < 0.85:
            yield xid(149, at_s)
        elif kind < 0.9:
            yield xid(154, at_s, drawn.choice(["none", "reset_gpu", "node_reboot", "drain_p2p"]))
        elif kind < 0.97:
            yield mark(drawn.choice(["gpu_reset", "gpu_reset", "cleared", "replaced"]), at_s)
        else:
            yield mark("boot", at_s)


def with_at_most(limit: int, made: Evaluator, seen: Observation, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(quotas, "MAX_VARIANTS", limit)
    made.add(seen)


@pytest.mark.parametrize("seed", range(120, 147))
def test_a_variant_that_makes_room_never_makes_the_judgement_milder_now_or_later(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, made_room = Evaluator(POLICY, 580), 0
    for seen in evidence(seed):
        every = Evaluator(POLICY, 580)
        every.load(json.loads(json.dumps(few.dump())))
        with_at_most(4, few, seen, monkeypatch)
        with_at_most(10**9, every, seen, monkeypatch)
        made_room += len(every.dump()["events"]) > len(few.dump()["events"])
        for later_s in (0.0, 300.0, 700.0, 4000.0, DAY_S / 2, DAY_S + 1.0):
            assert judged(few, seen.at_s + later_s) >= judged(every, seen.at_s + later_s)
    assert made_room


@pytest.mark.parametrize("seed", range(12))
def test_as_long_as_no_loss_is_counted_the_judgement_is_no_milder_than_without_a_limit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, every = Evaluator(POLICY, 580), Evaluator(POLICY, 580)
    for seen in evidence(seed):
        with_at_most(4, few, seen, monkeypatch)
        with_at_most(10**9, every, seen, monkeypatch)
        if few.dropped:
            return
        assert judged(few, seen.at_s) >= judged(every, seen.at_s)
    pytest.fail("nothing made room")
