"""The evaluator keeps bounded evidence, and orders its findings."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf

import pytest

from nodeagent.evaluation import quotas
from nodeagent.evaluation.evaluator import Evaluator, verdicts
from nodeagent.model import Action, HealthFinding, HealthVerdict, Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import (
    GPU,
    POLICY,
    REBOOT,
    RESET,
    evaluator,
    mark,
    meaning,
    sample,
    standing,
    xid,
)


def heat(entity: str, at_s: float, text: str = "", source: str = "polling") -> Observation:
    return Observation(at_s, "heat", entity, source, 4.0, text=text)


def test_an_observation_is_added_if_it_is_new_and_the_policy_has_its_check() -> None:
    made = Evaluator(POLICY)
    assert made.add(sample("heat", 1000.0, 4.0)) is True
    assert made.add(sample("heat", 1000.0, 4.0)) is False
    assert made.add(sample("heat", 600.0, 4.0)) is False, "the sample is too old"
    assert made.add(sample("unheard_of", 1000.0, 4.0)) is False
    assert made.add(xid(79, 1000.0)) is True
    assert made.add(xid(79, 1000.0)) is False
    assert made.add(xid(79, 1.0)) is True
    assert made.add(mark("boot", 1000.0)) is True
    assert made.add(Observation(1.0, "sxid", "switch/0", "kmsg", 5.0)) is True
    assert made.entities == {"node", GPU, "switch/0"}


def test_beyond_the_limit_a_series_without_a_finding_makes_room_and_a_loss_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MAX_SERIES", 2)
    made = Evaluator(POLICY)

    def disks() -> list[str]:
        return [entity for entity, *_ in made.dump()["series"]]

    def is_added(entity: str, at_s: float, value: float = 0.0) -> bool:
        return made.add(Observation(at_s, "verdict", entity, "polling", value))

    assert [is_added("disk/a", 1.0), is_added("disk/b", 2.0, 1.0)] == [True, True]
    assert is_added("disk/c", 2000.0), "a is gone"
    assert (disks(), made.dropped) == (["disk/b", "disk/c"], 0)
    assert is_added("disk/d", 2001.0, 1.0), "c may still be there"
    assert (disks(), made.dropped) == (["disk/b", "disk/d"], 1)
    assert not is_added("disk/e", 2002.0), "b and d stand"
    assert (disks(), made.dropped) == (["disk/b", "disk/d"], 2)
    assert "disk/c" not in made.entities
    others = [is_added(entity, 3000.0, 1.0) for entity in (GPU, "node", "net/eth0")]
    assert others == [True, True, True], "each kind has its own limit"
    assert made.dropped == 2


def test_beyond_the_limit_the_event_that_ended_longest_ago_makes_room_and_none_that_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MAX_OWN", 3)
    monkeypatch.setattr(quotas, "MAX_EVENTS", 1)
    made = evaluator([xid(79, 0.0), xid(13, 100.0), mark("gpu_reset", 50.0)])
    assert [each.code for each in made.findings(101.0)] == [79, 13]
    assert made.until_s == 700.0
    assert made.add(xid(48, 800.0))
    assert [each.code for each in made.findings(801.0)] == [79, 48]
    assert made.until_s == inf, "the end of the dropped one is no longer awaited"
    assert [each[1:3] for each in made.dump()["events"]] == [["xid", 79], ["gpu_reset", 0], ["xid", 48]]
    assert (made.add(xid(64, 900.0)), made.dropped) == (False, 1), "all others stand, or end what stands"
    assert made.add(Observation(900.0, "xid", "nfs/a", "kmsg", 79.0)), "each kind has its own limit"


def test_a_flood_of_other_events_never_takes_the_place_of_a_gpus_fault() -> None:
    made = evaluator([xid(79, 0.0)])
    for n in range(quotas.MAX_EVENTS + 50):
        made.add(Observation(float(n), "xid", f"nfs/{n}", "kmsg", 13.0))
    assert made.add(Observation(9.0, "xid", "gpu/0000:4b:00.0", "kmsg", 79.0))
    unhealthy = {each.entity for each in made.findings(1e6) if each.level is Level.UNHEALTHY}
    assert unhealthy == {GPU, "gpu/0000:4b:00.0"}


def test_a_dropped_variant_is_the_mildest_and_one_of_the_same_meaning_takes_over_its_bursts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "MAX_VARIANTS", 2)
    made = evaluator([xid(13, 1.0, "b"), xid(13, 500.0, "a"), xid(13, 1000.0, "c")])
    assert [event[3] for event in made.dump()["events"]] == ["a", "c"], "its recurrence is counted by variant"
    made = evaluator([xid(79, 1.0, "b"), xid(79, 500.0, "a"), xid(79, 1000.0, "c")])
    assert [event[3] for event in made.dump()["events"]] == ["a", "c"]
    assert [each.since_s for each in made.findings(1001.0)] == [1.0]
    severe, harmless = "0x00000010", "0x00000001"
    rest = ",0x00000000" * 6
    made = Evaluator(shipped(), 575)
    for n, register in enumerate((severe, harmless, "0x00800000")):
        made.add(xid(74, 1000.0 * n, register + rest))
    assert made.findings(3000.0)[0].level is Level.UNHEALTHY, "the severe one is the oldest"


def test_findings_are_the_same_tuple_until_the_evidence_or_the_time_changes_them() -> None:
    made = Evaluator(POLICY, 575)
    assert (made.until_s, made.findings(1.0), made.until_s) == (inf, (), inf)
    made.add(xid(13, 100.0))
    first = made.findings(101.0)
    assert [each.code for each in first] == [13]
    assert made.until_s == 700.0
    assert made.findings(101.0) is made.findings(699.0) is first
    assert made.findings(700.0) == ()
    assert made.until_s == inf
    assert made.findings(101.0) == first, "at an earlier time the finding has not ended"
    made.add(xid(13, 650.0))
    assert [each.last_s for each in made.findings(701.0)] == [650.0]
    assert made.until_s == 1250.0


def test_evidence_added_after_a_query_changes_the_next_answer() -> None:
    made = evaluator([xid(79, 100.0), sample("verdict", 100.0, 1)])
    assert [each.check for each in made.findings(101.0)] == ["xid", "verdict"]
    made.add(mark("boot", 200.0))
    assert [each.check for each in made.findings(800.0)] == ["verdict"]
    made.add(sample("verdict", 900.0, 0))
    assert made.findings(901.0) == ()
    made.add(xid(79, 1000.0))
    assert [each.since_s for each in made.findings(1001.0)] == [1000.0]
    made.load(evaluator([xid(46, 1000.0)]).dump())
    assert [each.code for each in made.findings(1001.0)] == [79, 46]


def test_another_driver_branch_changes_the_codes_that_its_verdicts_concern() -> None:
    made = evaluator([xid(48, 10.0), xid(154, 10.5, "reboot_node")], branch=550)

    def of_48() -> tuple[Level, Action]:
        [found] = [each for each in made.findings(11.0) if each.code == 48]
        return found.level, found.action

    assert (made.branch, of_48()) == (550, RESET)
    made.branch = 575
    assert (made.branch, of_48()) == (575, REBOOT)


def test_findings_are_ordered_by_level_action_entity_check_and_code() -> None:
    made = Evaluator(replace(POLICY, sxids={7: meaning(*RESET)}), 575)
    for seen in (
        xid(13, 1.0),
        xid(95, 1.0),
        xid(79, 1.0),
        xid(64, 1.0),
        xid(48, 1.0),
        Observation(1.0, "xid", "gpu/0", "kmsg", 48.0),
        Observation(1.0, "sxid", GPU, "kmsg", 7.0),
        sample("verdict", 1.0, 1),
        xid(46, 1.0),
    ):
        made.add(seen)
    assert [(each.level, each.action, each.entity, each.check, each.code) for each in made.findings(2.0)] == [
        (Level.UNHEALTHY, Action.REPLACE, GPU, "xid", 64),
        (Level.UNHEALTHY, Action.REBOOT_NODE, GPU, "xid", 79),
        (Level.UNHEALTHY, Action.RESET_GPU, "gpu/0", "xid", 48),
        (Level.UNHEALTHY, Action.RESET_GPU, GPU, "sxid", 7),
        (Level.UNHEALTHY, Action.RESET_GPU, GPU, "verdict", None),
        (Level.UNHEALTHY, Action.RESET_GPU, GPU, "xid", 46),
        (Level.UNHEALTHY, Action.RESET_GPU, GPU, "xid", 48),
        (Level.DEGRADED, Action.NONE, GPU, "xid", 95),
        (Level.HEALTHY, Action.RESTART_APP, GPU, "xid", 13),
    ]


def test_the_marks_that_end_findings_are_not_findings_themselves() -> None:
    marks = [mark(name, 200.0) for name in ("gpu_reset", "boot", "replaced", "cleared")]
    assert standing(marks, 150.0) == ()


def test_a_finding_has_the_text_of_the_newest_sample_and_the_sources_of_all() -> None:
    made = Evaluator(POLICY)
    made.add(heat(GPU, 0.0, "first", "a"))
    made.add(heat(GPU, 20.0, "newest", "c"))
    made.add(heat(GPU, 10.0, "late", "b"))
    [found] = made.findings(21.0)
    assert (found.evidence, found.sources) == (("newest",), ("a", "b", "c"))


def test_evidence_from_the_given_time_on_is_kept_and_earlier_evidence_is_forgotten() -> None:
    seen = [xid(48, 99.0), xid(79, 99.0), xid(13, 50.0, "a"), xid(13, 1000.0, "b"), mark("cleared", 99.5)]
    made = evaluator([*seen, xid(48, 100.0)])
    for entity, at_s in (("old", 99.0), ("same", 100.0), ("new", 101.0)):
        made.add(Observation(at_s, "heat", entity, "polling", 1000.0))
    made.forget(100.0)
    kept = made.dump()
    assert [series[0] for series in kept["series"]] == ["same", "new"]
    assert "old" not in made.entities
    assert [(event[1], event[2], event[3]) for event in kept["events"]] == [
        ("xid", 48, ""), ("xid", 13, "a"), ("xid", 13, "b"), ("cleared", 0, ""),
    ], "the oldest of 13 is within its time, and without the clearance 48 would be older"  # fmt: skip
    made.forget(2000.0)
    assert [(event[1], event[2]) for event in made.dump()["events"]] == [("xid", 48), ("cleared", 0)]


def test_the_newest_verdict_none_ends_a_finding() -> None:
    seen = [xid(154, 500.0, "none"), xid(48, 1000.0), xid(154, 5000.0, "none")]
    assert [each.code for each in standing(seen, 5599.0)] == [48, 154]
    assert [each.code for each in standing(seen, 5600.0)] == []


def test_all_evidence_is_stored_as_json_and_restored_unchanged() -> None:
    made = Evaluator(POLICY, 575)
    for seen in (
        heat(GPU, 0.0, "as read", "b"),
        heat(GPU, 10.0, "as read", "a"),
        heat(GPU, 20.0, "as read", "b"),
        xid(13, 1.0, "GPC 1", text="a line"),
        xid(13, 2.0, "GPC 2"),
        mark("boot", 0.5),
    ):
        made.add(seen)
    stored = json.loads(json.dumps(made.dump()))
    no_level = [False, 0.0, None]
    assert stored == {
        "series": [
            [GPU, "heat", [-280.0, [no_level, no_level], [[0.0, 4.0], [10.0, 4.0], [20.0, 4.0]]], ["a", "b"],
             "as read"],
        ],
        "events": [
            [GPU, "xid", 13, "GPC 1", [[[1.0, 1.0]], [[1.0, "a line"]], ["kmsg"]]],
            [GPU, "xid", 13, "GPC 2", [[[2.0, 2.0]], [], ["kmsg"]]],
            ["node", "boot", 0, "", [[[0.5, 0.5]], [], ["test"]]],
        ],
        "grown": [],
        "heard": [
            [GPU, "heat", None, "", [["a", 10.0], ["b", 20.0]]],
            [GPU, "xid", 13, "GPC 1", [["kmsg", 1.0]]],
            [GPU, "xid", 13, "GPC 2", [["kmsg", 2.0]]],
            ["node", "boot", 0, "", [["test", 0.5]]],
        ],
        "unseen": [],
        "shown": [],
        "inherited": [],
        "recurring": [],
        "moments": [],
        "company": [],
        "boots": [],
        "marks": [],
        "ended": [],
        "gone": [],
        "devices": [],
        "models": [],
        "branch": 575,
        "first_look_s": None,
        "knew_more": False,
    }  # fmt: skip
    restored = Evaluator(POLICY, 575)
    restored.load(stored)
    assert restored.dump() == stored
    assert restored.entities == made.entities == {"node", GPU}
    assert restored.findings(21.0) == made.findings(21.0)
    assert made.findings(21.0)[0].evidence == ("as read",)


def test_stored_series_of_checks_that_the_policy_no_longer_has_are_omitted() -> None:
    stored = evaluator([sample("heat", 1.0, 4.0), sample("errors", 1.0, 4.0), xid(48, 1.0)]).dump()
    fewer = Evaluator(replace(POLICY, rules={"errors": POLICY.rules["errors"]}))
    fewer.load(stored)
    assert [series[1] for series in fewer.dump()["series"]] == ["errors"]
    assert [each.code for each in fewer.findings(2.0)] == [48]


def test_undecided_checks_are_listed_by_entity_and_check_with_their_reasons() -> None:
    made = Evaluator(POLICY)
    for seen in (
        Observation(10.0, "heat", "gpu/1", "polling", 4.0),
        Observation(10.0, "errors", "gpu/1", "polling", 4.0),
        Observation(10.0, "heat", "gpu/0", "polling", 4.0),
        Observation(9.0, "heat", "gpu/2", "polling", 4.0),
        Observation(10.0, "heat", "gpu/3", "polling", 40.0),
    ):
        made.add(seen)
    why = "margin: 4 °C (a fault in 3 of 4 samples, one every 10 s)"
    assert list(made.undecided(10.0)) == [
        ("gpu/0", "heat", why),
        ("gpu/1", "errors", "errors: one reading of a counter does not show its growth"),
        ("gpu/1", "heat", why),
    ]


def finding(entity: str, level: Level, action: Action) -> HealthFinding:
    return HealthFinding(entity, "c", None, level, action, 0.0, 0.0, "", (), "", ())


def test_a_verdict_has_the_worst_level_and_the_costliest_action_at_that_level() -> None:
    replaced = finding("b", Level.DEGRADED, Action.REPLACE)
    reset = finding("b", Level.UNHEALTHY, Action.RESET_GPU)
    rebooted = finding("b", Level.UNHEALTHY, Action.REBOOT_NODE)
    app = finding("d", Level.HEALTHY, Action.RESTART_APP)
    assert verdicts([replaced, reset, rebooted, app], ["c", "b", "a"]) == (
        HealthVerdict("a", Level.HEALTHY, Action.NONE, ()),
        HealthVerdict("b", Level.UNHEALTHY, Action.REBOOT_NODE, (replaced, reset, rebooted)),
        HealthVerdict("c", Level.HEALTHY, Action.NONE, ()),
        HealthVerdict("d", Level.HEALTHY, Action.RESTART_APP, (app,)),
    )
    made = evaluator([xid(79, 1.0)])
    assert made.verdicts(2.0) == verdicts(made.findings(2.0), [GPU, "node"])


def test_an_entity_is_forgotten_with_its_last_evidence() -> None:
    made = Evaluator(POLICY)
    made.add(heat("disk//old", 1000.0))
    made.add(heat("disk//new", 2000.0))
    made.add(xid(79, 2000.0))
    made.forget(1500.0)
    assert made.entities == {"node", "disk//new", GPU}
    assert [each.entity for each in made.verdicts(2000.0)] == sorted(made.entities)
