"""Findings of samples end by clean samples that cover the time, by a clear, or with their entity."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.evidence import MAX_GONE
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import GONE, NODE, Action, Level, Observation
from nodeagent.policy.loading import load, shipped
from tests.unit.nodeagent.evaluation.world import GPU, POLICY, evaluator, mark, sample, xid

SHIPPED = shipped()
PVC = "disk//var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pvc/mount"


def told(made: Evaluator, now_s: float, check: str = "") -> list[tuple[str, Level]]:
    return [(each.check, each.level) for each in made.findings(now_s) if check in ("", each.check)]


def full(at_s: float, value: float = 99.0, entity: str = PVC) -> Observation:
    return Observation(at_s, "disk_used", entity, "host", value)


def gone(at_s: float, entity: str = PVC) -> Observation:
    return Observation(at_s, GONE, entity, "host", 1.0)


def fed(*seen: Observation) -> Evaluator:
    made = Evaluator(SHIPPED)
    for each in seen:
        made.add(each)
    return made


# -- time without samples


def throttled(at_s: float, value: float) -> Observation:
    return Observation(at_s, "gpu_throttled", GPU, "nvml-polling", value)


def test_a_gap_without_samples_does_not_count_as_clean() -> None:
    made = fed(*(throttled(5.0 * n, 1.0) for n in range(20)))
    assert told(made, 95.0) == [("gpu_throttled", Level.DEGRADED)]
    made.add(throttled(95.0 + 601.0, 0.0))
    assert told(made, 696.0) == [("gpu_throttled", Level.DEGRADED)], "nobody looked for 601 s"
    for n in range(1, 118):  # clear_s is 600 s, of which the gap counts for 15 s
        made.add(throttled(696.0 + 5.0 * n, 0.0))
        assert told(made, 0.0) == ([("gpu_throttled", Level.DEGRADED)] if n < 117 else [])


def test_a_gap_does_not_count_as_clean_after_a_restart_and_after_it_was_folded() -> None:
    made = fed(*(throttled(5.0 * n, 1.0) for n in range(20)))
    at_s = 95.0
    for _ in range(4):  # restarts
        at_s += 500.0
        made.add(throttled(at_s, 0.0))
        for n in range(1, 15):
            made.add(throttled(at_s + 5.0 * n, 0.0))
        at_s += 70.0
        stored = json.loads(json.dumps(made.dump()))
        made = Evaluator(SHIPPED)
        made.load(stored)
        assert told(made, at_s) == [("gpu_throttled", Level.DEGRADED)]
    assert stored["unseen"]


def test_evidence_saved_by_an_agent_that_did_not_measure_gaps_is_loaded() -> None:
    stored = fed(full(0.0)).dump()
    del stored["unseen"]
    made = Evaluator(SHIPPED)
    made.load(json.loads(json.dumps(stored)))
    assert told(made, 1.0) == [("disk_used", Level.UNHEALTHY)]


def test_two_bad_samples_hours_apart_do_not_mean_that_the_state_has_lasted() -> None:
    made = fed(*(Observation(at_s, "nvml", "driver", "nvml-polling", 2.0) for at_s in (0.0, 7200.0)))
    assert told(made, 7200.0) == []
    for n in range(1, 4):
        made.add(Observation(7200.0 + 10.0 * n, "nvml", "driver", "nvml-polling", 2.0))
        assert told(made, 7230.0) == ([] if n < 3 else [("nvml", Level.UNHEALTHY)])


def test_two_bad_polls_hours_apart_do_not_count_as_two_in_a_row() -> None:
    def missing(*times: float) -> Evaluator:
        return fed(*(Observation(at_s, "gpu_count", NODE, "nvml-polling", 1.0) for at_s in times))

    assert told(missing(0.0, 7200.0), 7200.0) == []
    assert told(missing(0.0, 7200.0, 7210.0), 7210.0) == [("gpu_count", Level.UNHEALTHY)]


# -- bad states that alternate


@pytest.mark.parametrize(
    ("values", "level"),
    [
        ((2.0, 4.0), Level.UNHEALTHY),
        ((2.0, 1.0), Level.DEGRADED),
        ((2.0, 0.0), Level.HEALTHY),
        ((3.0, 2.0, 4.0), Level.UNHEALTHY),
    ],
)
def test_states_that_alternate_last_as_long_as_all_of_them_are_at_least_as_bad(
    values: tuple[float, ...], level: Level
) -> None:
    made = fed(
        *(
            Observation(10.0 * n, "nvml", "driver", "nvml-polling", values[n % len(values)])
            for n in range(360)
        )
    )
    assert max((each.level for each in made.findings(3600.0)), default=Level.HEALTHY) is level


# -- counters


def test_a_counter_that_restarted_has_grown_to_its_reading() -> None:
    def errors(*readings: float) -> Evaluator:
        return fed(
            *(Observation(10.0 * n, "ecc_dbe", GPU, "nvml-polling", each) for n, each in enumerate(readings))
        )

    assert told(errors(1.0, 1.0), 20.0) == []
    assert told(errors(3.0, 0.0), 20.0) == []
    assert told(errors(1.0, 0.0, 1.0), 20.0) == [("ecc_dbe", Level.UNHEALTHY)]
    assert told(errors(2.0, 1.0), 20.0) == [("ecc_dbe", Level.UNHEALTHY)], "one since the reset"


def test_growth_while_nobody_looked_is_an_average_but_a_single_grave_error_counts() -> None:
    def after(check: str, growth: float) -> list[tuple[str, Level]]:
        made = fed(*(Observation(at_s, check, GPU, "p", v) for at_s, v in ((0.0, 0.0), (36000.0, growth))))
        return told(made, 36000.0)

    assert after("pcie_replay", 201.0) == []
    assert after("pcie_replay", 201.0 * 600) == [("pcie_replay", Level.UNHEALTHY)]
    assert after("ecc_dbe", 1.0) == [("ecc_dbe", Level.UNHEALTHY)]


# -- an operator clears an entity


def test_an_operators_clear_ends_a_finding_until_the_next_bad_sample() -> None:
    made = fed(full(0.0), full(30.0))
    made.add(Observation(40.0, "cleared", PVC, "operator"))
    assert told(made, 41.0) == []
    made.add(full(60.0, 89.0))
    assert told(made, 61.0) == [], "89% is not bad, although it would not have ended the finding"
    made.add(full(90.0, 91.0))
    assert told(made, 91.0) == [("disk_used", Level.DEGRADED)]


def test_a_clear_ends_a_counters_growth_until_the_next_error() -> None:
    made = fed(*(Observation(10.0 * n, "ecc_dbe", GPU, "p", float(n > 3)) for n in range(10)))
    assert told(made, 90.0) == [("ecc_dbe", Level.UNHEALTHY)]
    made.add(mark("cleared", 95.0))
    for n in range(10, 100):
        made.add(Observation(10.0 * n, "ecc_dbe", GPU, "p", 1.0))
        assert told(made, 10.0 * n) == []
    made.add(Observation(1000.0, "ecc_dbe", GPU, "p", 2.0))
    assert told(made, 1000.0) == [("ecc_dbe", Level.UNHEALTHY)]


def test_an_error_between_a_clear_and_the_next_reading_counts() -> None:
    made = fed(*(Observation(10.0 * n, "ecc_dbe", GPU, "p", float(n > 3)) for n in range(10)))
    made.add(mark("cleared", 95.0))
    made.add(Observation(100.0, "ecc_dbe", GPU, "p", 2.0))
    assert told(made, 100.0) == [("ecc_dbe", Level.UNHEALTHY)]


def test_a_clear_that_arrives_late_ends_what_was_bad_before_it() -> None:
    seen = [throttled(5.0 * n, float(n < 20)) for n in range(100)]
    late = fed(*seen)
    assert told(late, 495.0) == [("gpu_throttled", Level.DEGRADED)]
    late.add(mark("cleared", 100.0))
    assert told(late, 495.0) == []
    before_the_last_bad_one = fed(*seen)
    before_the_last_bad_one.add(mark("cleared", 50.0))
    assert told(before_the_last_bad_one, 495.0) == [("gpu_throttled", Level.DEGRADED)]


def test_a_clear_outlives_a_restart_and_does_not_end_what_came_after_it() -> None:
    made = fed(*(full(30.0 * n) for n in range(30)))
    made.add(Observation(880.0, "cleared", PVC, "operator"))
    restored = Evaluator(SHIPPED)
    restored.load(json.loads(json.dumps(made.dump())))
    assert told(restored, 881.0) == []
    late = fed(*(full(30.0 * n) for n in range(30)))
    late.add(Observation(10.0, "cleared", PVC, "operator"))
    assert told(late, 881.0) == [("disk_used", Level.UNHEALTHY)], "bad samples came after the clear"


# -- an entity that no longer exists


def test_what_no_longer_exists_has_no_findings_about_samples() -> None:
    made = fed(full(0.0), full(30.0), full(30.0, 50.0, "disk//"))
    assert PVC in made.entities
    made.add(gone(60.0))
    assert told(made, 61.0) == []
    assert PVC not in made.entities
    assert [row[0] for row in made.dump()["series"]] == ["disk//"]
    assert made.add(full(59.0)) is False, "a sample of the old one, late"
    made.add(full(60.0, 95.0))
    assert told(made, 61.0) == [("disk_used", Level.DEGRADED)], "another one of the same name"


def test_present_entities_gpus_and_events_are_not_ended() -> None:
    lost = Observation(0.0, "gpu_state", GPU, "nvml-polling", 1.0)
    made = fed(lost, xid(79, 0.0), full(0.0))
    made.add(Observation(60.0, GONE, PVC, "host", 0.0))
    for entity in (GPU, NODE, "driver"):
        made.add(gone(60.0, entity))
    assert {check for check, _ in told(made, 61.0)} == {"gpu_state", "xid", "disk_used"}
    line = Observation(1.0, "kernel_remounted_read_only", PVC, "kmsg")
    made.add(line)
    made.add(gone(60.0))
    assert PVC in made.entities
    assert "kernel_remounted_read_only" in {check for check, _ in told(made, 61.0)}


def test_thousands_of_volumes_that_come_and_go_leave_nothing_behind() -> None:
    made = Evaluator(SHIPPED)
    for n in range(3 * MAX_GONE):
        made.add(full(2.0 * n, 99.0, f"disk//{n}"))
        made.add(gone(2.0 * n + 1, f"disk//{n}"))
    assert made.entities == {NODE}
    left = made.dump()
    assert len(left.pop("gone")) == MAX_GONE, "a late sample must not bring one back, also after a restart"
    assert left | {"gone": []} == Evaluator(SHIPPED).dump()
    assert made.add(xid(79, 0.0))


CHECKS: dict[str, tuple[float, ...]] = {
    "heat": (-1.0, 3.0, 8.0, 12.0), "errors": (0.0, 60.0, 300.0, 301.0), "verdict": (0.0, 1.0, 2.0),
}  # fmt: skip
SAMPLES = st.sampled_from(sorted(CHECKS)).flatmap(
    lambda check: st.builds(
        sample, st.just(check), st.integers(0, 29).map(lambda n: 10.0 * n), st.sampled_from(CHECKS[check])
    )
)


@given(
    st.lists(SAMPLES, max_size=40, unique_by=lambda seen: (seen.check, seen.at_s)),
    st.lists(st.integers(0, 290).map(float), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_clears_among_samples_make_no_difference_in_any_order(
    seen: list[Observation], cleared: list[float], chance: object
) -> None:
    one = [*seen, *(mark("cleared", at_s) for at_s in cleared)]
    other = [*one]
    chance.shuffle(other)  # type: ignore[attr-defined]
    assert evaluator(one).findings(300.0) == evaluator(other).findings(300.0)
    after = [each for each in seen if each.at_s > max(cleared)]
    quiet = [each for each in after if each.check != "errors"]
    now = [each for each in evaluator(one).findings(300.0) if each.check != "errors"]
    assert now == list(evaluator(quiet).findings(300.0)), "only later samples count"


@given(st.lists(st.tuples(st.sampled_from([1.0, 30.0, 300.0, 5000.0]), st.sampled_from([-1.0, 3.0, 12.0]))))
def test_a_finding_of_samples_ends_only_by_clean_samples_that_cover_its_hold_time(
    steps: list[tuple[float, float]],
) -> None:
    rule = POLICY.rules["heat"]
    made, at_s, clean_s = Evaluator(POLICY), 0.0, 0.0
    since_s: float | None = None
    for wait_s, value in steps:
        at_s += wait_s
        before = made.findings(at_s)
        made.add(sample("heat", at_s, value))
        clean_s = clean_s + min(wait_s, 3 * rule.period_s) if value > 10.0 else 0.0
        after = made.findings(at_s)
        if before and not after:
            assert clean_s >= rule.clear_s
        if before and after and before[0].level == after[0].level:
            assert after[0].since_s == since_s, "its age never falls while it is active"
        since_s = after[0].since_s if after else None


# -- volumes of pods


def test_no_state_of_a_pods_volume_makes_the_node_unhealthy() -> None:
    for check in ("volume_used", "volume_inodes_used", "volume_read_only"):
        made = fed(Observation(0.0, check, PVC, "host", 1.0 if check.endswith("only") else 100.0))
        assert told(made, 0.0) == [(check, Level.DEGRADED)]


@pytest.mark.parametrize(
    "check", ["kernel_remounted_read_only", "kernel_xfs_shutdown", "kernel_superblock_error"]
)
def test_kernel_lines_are_at_most_degraded_unless_their_device_is_the_nodes_own(check: str) -> None:
    line = Observation(10.0, check, "disk/nvme5n1", "kmsg")

    def use(at_s: float, value: float) -> Observation:
        return Observation(at_s, "user_volume", "disk/nvme5n1", "host", value)

    for made in (fed(line), fed(use(0.0, 1.0), line)):
        assert [(each.level, each.action) for each in made.findings(11.0)] == [
            (Level.DEGRADED, Action.RESTART_APP)
        ]
        made.add(use(30.0, 0.0))
        assert [(each.level, each.action) for each in made.findings(31.0)] == [
            (Level.UNHEALTHY, Action.REBOOT_NODE)
        ]


def test_a_dead_disk_remains_unhealthy_even_if_its_use_was_last_read_long_ago() -> None:
    made = fed(
        Observation(0.0, "user_volume", "disk/nvme1", "host", 0.0),
        Observation(0.0, "user_volume", "disk/nvme2", "host", 0.0),
        Observation(10.0, "kernel_nvme_disabled", "disk/nvme1", "kmsg"),
    )
    made.forget(5.0)
    assert told(made, FORGET_S + 5.0) == [("kernel_nvme_disabled", Level.UNHEALTHY)]
    made.forget(1e7)
    assert told(made, FORGET_S + 1e7) == [("kernel_nvme_disabled", Level.UNHEALTHY)]
    assert made.sampled("user_volume") == ("disk/nvme1",)


def test_an_operator_may_judge_kernel_lines_about_volumes_harder() -> None:
    made = Evaluator(load('[kernel.remounted_read_only]\nlevel = "unhealthy"\n'))
    made.add(Observation(0.0, "user_volume", "disk/nvme5n1", "host", 1.0))
    made.add(Observation(10.0, "kernel_remounted_read_only", "disk/nvme5n1", "kmsg"))
    assert told(made, 11.0) == [("kernel_remounted_read_only", Level.UNHEALTHY)]
