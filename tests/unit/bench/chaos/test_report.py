from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from bench.chaos import report
from bench.chaos.chaos_schedule import PlannedFault
from bench.chaos.report import ChaosOutcome, JobResult, StruckFault
from bench.harness.results import plain

DIGESTS = {"0": {"all": "a"}, "1": {"all": "b"}}


def incident(lost: int | None = 0, took_s: float | None = 0.5, kind: str = "crash") -> dict[str, Any]:
    return {"id": "i-0001", "kind": kind, "rank": 1, "recovered_s": took_s, "lost_steps": lost}


def struck(kind: str = "kill", *incidents: dict[str, Any], **more: Any) -> StruckFault:
    planned = PlannedFault(1, kind, "pytorch", 1, 0.5, 0.0, more.pop("second", ""))
    given = {"outcome": "recovered", "calm_after_s": 4.0, **more}
    return StruckFault(planned, 10.0, incidents={"pytorch": list(incidents)} if incidents else {}, **given)


def job(name: str = "pytorch", **more: Any) -> JobResult:
    return JobResult(name, **{"succeeded": True, "digests": DIGESTS, "checkpoints": 3, **more})


COUNTERS = "no failure in the owner's counters, except a Job's pods on nodes that lost their power"


def outcome(*faults: StruckFault, jobs: tuple[JobResult, ...] = (job(),), **more: Any) -> ChaosOutcome:
    return ChaosOutcome(list(faults), list(jobs), **{"reference": DIGESTS, **more})


def missed(found: ChaosOutcome) -> list[str]:
    return [each.target for each in report.verdicts(found) if each.met is False]


def test_a_good_run_meets_every_target() -> None:
    judged = report.verdicts(outcome(struck("kill", incident()), struck("leader-kill")))
    assert [each.met for each in judged] == [True] * len(judged)


@pytest.mark.parametrize(
    ("found", "target"),
    [
        (outcome(problem="not back"), "the run was not ended early"),
        (outcome(struck(outcome="stuck")), "all jobs recovered from every fault in time"),
        (outcome(struck(outcome="refused")), "every fault could be injected"),
        (outcome(jobs=(job(succeeded=False),)), "every job ended Succeeded"),
        (outcome(jobs=(job(failures=1),)), COUNTERS),
        (outcome(struck("node-kill", counted=("indexed",)), jobs=(job(failures=1),)), COUNTERS),
        (outcome(struck("node-kill", counted=("pytorch",)), jobs=(job(failures=2),)), COUNTERS),
        (outcome(jobs=(job(torn=["step-00000042: a file is missing"]),)), "no torn checkpoint"),
        (outcome(left_behind=["pod gpt-0"]), "nothing left behind"),
        (outcome(tainted=["node2"]), "no healthy node was tainted"),
        (
            outcome(struck("kill", incident(2))),
            "no fault that leaves the state intact costs more than one step",
        ),
    ],
)
def test_each_target_can_be_missed(found: ChaosOutcome, target: str) -> None:
    assert missed(found) == [target]


def test_a_job_may_count_its_pod_on_a_node_that_lost_its_power() -> None:
    assert not missed(outcome(struck("node-kill", counted=("pytorch",)), jobs=(job(failures=1),)))


@pytest.mark.parametrize("digests", [None, {"0": {"all": "a"}, "1": {"all": "x"}}, {"0": {"all": "a"}}])
def test_the_states_of_all_ranks_must_equal_those_of_the_undisturbed_run(digests: object) -> None:
    [target] = missed(outcome(jobs=(job(), job("indexed", digests=digests))))
    assert target.startswith("weights")
    assert missed(outcome(jobs=(job(digests=None),), reference=None)) == [target]


def test_a_nan_and_two_faults_at_once_may_cost_more_than_a_step() -> None:
    assert (
        missed(outcome(struck("nan", incident(9)), struck("kill", incident(2), second="leader-kill"))) == []
    )


def test_a_fault_that_was_withheld_is_not_judged() -> None:
    assert missed(outcome(struck(outcome="withheld"), struck(outcome="over"))) == []


def test_a_run_without_jobs_leaves_their_targets_open() -> None:
    judged = report.verdicts(outcome(jobs=(), problem="interrupted"))
    assert [each.met for each in judged if each.met is not None] == [False, True, True]


def test_the_time_without_training_is_that_of_the_job_that_waited_longest() -> None:
    found = struck("node-kill")
    found.incidents = {
        "a": [incident(0, 1.0), incident(1, 2.0)],
        "b": [incident(0, 2.5)],
        "c": [incident(None, None)],
    }
    assert (found.untrained_s, found.lost) == (3.0, 1)
    assert (struck().untrained_s, struck().lost) == (0.0, 0)


def test_one_line_says_what_happened() -> None:
    line = report.fault_line(struck("node-kill", incident(1, 3.25, "member_lost"), node="node2"))
    assert "node-kill (rank 1 of pytorch) on node2: recovered after 4.0 s" in line
    assert "pytorch: member_lost of rank 1, 3.250 s, lost 1" in line
    assert report.fault_line(struck(outcome="withheld", detail="why")).endswith("withheld (why)")


def test_the_report_names_the_seed_each_kind_each_job_and_what_was_left_out() -> None:
    found = outcome(struck("kill", incident()), struck("kill"), left_out=("left out: node-cut",), problem="p")
    text = "\n".join(report.report_lines(found, 7))
    assert "seed 7; 2 faults" in text
    assert "left out: node-cut" in text
    assert next(line for line in text.splitlines() if line.startswith("kill ")).split()[1:3] == ["2", "2"]
    assert "pytorch: succeeded; 3 checkpoints verified" in text
    assert text.endswith("ended early: p")


def test_the_outcome_can_be_stored_as_json() -> None:
    found = plain(asdict(outcome(struck("kill", incident()))))
    assert json.loads(json.dumps(found))["faults"][0]["planned"]["kind"] == "kill"
