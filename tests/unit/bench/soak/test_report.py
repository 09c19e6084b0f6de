from __future__ import annotations

from typing import Any

import pytest

from bench.soak import report
from bench.soak.faults import InjectedFault
from bench.soak.growth import Growth


def incident(lost: int = 0) -> dict[str, Any]:
    return {"kind": "crash", "rank": 1, "detected_s": 0.01, "recovered_s": 0.2, "lost_steps": lost}


def fault(kind: str = "kill", outcome: str = "recovered", **more: Any) -> InjectedFault:
    incidents = [] if outcome == "costless" else [incident()]
    return InjectedFault(
        kind, 1, 100, 1.5, outcome=outcome, **{"named": True, "incidents": incidents, **more}
    )


def growth(what: str, more: float, readings: int = 40) -> Growth:
    return Growth(what, readings, 1000, 50e6, 50e6 + more, 5, 5, more)


FOUND = {"exit_code": 0, "left_behind": [], "digests": {"0": "a"}, "reference": {"0": "a"}, "status": {}}


def missed(
    found: dict[str, Any], done: list[InjectedFault], *grown: Growth, quiet: bool = False
) -> list[str]:
    judged = report.verdicts(found, done, grown, quiet=quiet)
    return [each.target for each in judged if each.met is False]


def test_a_good_soak_meets_every_target() -> None:
    costless = fault("sidecar", "costless", named=None)
    assert missed(FOUND, [fault(), costless], growth("keeper", 0.0)) == []


@pytest.mark.parametrize(
    ("found", "done", "target"),
    [
        ({**FOUND, "exit_code": 1}, [fault()], "the run finished"),
        ({**FOUND, "left_behind": ["python"]}, [fault()], "no process and no memory left"),
        ({**FOUND, "digests": {"0": "b"}}, [fault()], "weights, optimizer, random states match"),
        ({**FOUND, "digests": None, "reference": None}, [fault()], "weights, optimizer, random states match"),
        (FOUND, [fault(outcome="stuck")], "every fault recovered from"),
        (FOUND, [fault(outcome="unnoticed")], "every fault recovered from"),
        (FOUND, [fault(named=False)], "every incident names the right rank"),
        (FOUND, [fault("supervisor", named=None)], "no incident for a sidecar or supervisor"),
    ],
)
def test_each_target_can_be_missed(found: dict[str, Any], done: list[InjectedFault], target: str) -> None:
    assert missed(found, done) == [target]


def test_a_nan_may_cost_more_than_a_step_because_it_spoils_the_state() -> None:
    assert missed(FOUND, [fault("nan", incidents=[incident(9)])]) == []
    assert len(missed(FOUND, [fault("kill", incidents=[incident(9)])])) == 1


def test_a_fault_forestalled_by_the_end_of_the_run_is_not_judged() -> None:
    assert missed(FOUND, [fault(outcome="over"), fault(outcome="refused")]) == []


def test_a_young_process_is_not_judged_for_growth_but_an_old_one_is() -> None:
    grown = growth("sidecar", 40e6, readings=10)
    assert missed(FOUND, [], growth("keeper", 0.0), grown) == []
    assert missed(FOUND, [], growth("keeper", 40e6)) == ["nothing grows"]


def test_the_run_directory_may_grow_only_while_faults_are_injected() -> None:
    logs = growth("run directory", 40e6)
    assert missed(FOUND, [], logs, growth("keeper", 0.0)) == []
    assert missed(FOUND, [], logs, quiet=True) == ["nothing grows"]


def test_one_line_describes_a_fault_and_its_outcome() -> None:
    line = report.fault_line(fault(second="sidecar", second_after_s=0.2, named=False))
    assert "kill of rank 1 + sidecar after 0.20 s" in line
    assert "crash noticed 10 ms recovered 0.200 s lost 0" in line
    assert line.endswith("WRONG RANK")


def test_the_tables_have_a_row_for_each_kind() -> None:
    text = "\n".join(report.lines(FOUND, [fault(), fault(), fault("nan")], [growth("keeper", 0.0)]))
    assert next(line for line in text.splitlines() if line.startswith("kill")).split()[1:3] == ["2", "2"]
    assert "keeper" in text
