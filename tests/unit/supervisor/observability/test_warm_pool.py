from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.observability import warm_pool
from tests.unit.supervisor.job_views import launcher, member, rank, report, view

FAILED = Ending(1, 6, fail="exception", message="text")
LATER = "; a fault now requires a cold start; Holdfast retries at intervals"
NOW = "; the ranks wait for them, and the run ends if none can be created within 60 s"


@pytest.mark.parametrize(
    ("ending", "failures", "said"),
    [
        (
            Ending(0, 1, fail="exception", raised="OSError: x"),
            1,
            "a process raised OSError: x; a fault now requires",
        ),
        (Ending(0, 3), 1, "a process exited with code 3; a fault"),
        (Ending(0, None, 11), 2, ""),
        (Ending(0, None, 11), 3, "a process was killed by SIGSEGV; a fault"),
        (Ending(0, None, 9, ours=True), 3, ""),
        (Ending(0, 1), 0, ""),
    ],
)
def test_the_reason_why_no_warm_process_can_be_created_is_reported(
    ending: Ending, failures: int, said: str
) -> None:
    def unmade(**given: Any) -> str:
        state = launcher(warm_ending=ending, warm_failures=failures, **given)
        told = member("m0", report("m0", state))
        problem = warm_pool.problem_of(view(told), told)
        return "" if problem is None else problem.sentence

    assert unmade(parked=()).startswith(
        f"warm processes for member m0 cannot be created: {said}" if said else ""
    )
    assert bool(unmade(parked=())) == bool(said)
    assert unmade(parked=(0,)) == unmade(parked=(), strategy="cold") == ""
    if said:
        assert "the ranks wait for them" in unmade(parked=(), ranks=(rank(0, pid=0, state="starting"),))


def test_ranks_wait_for_the_processes_of_a_member_that_has_not_started_their_generation() -> None:
    def awaited(name: str, generation: int) -> bool:
        failed = launcher(generation=generation, warm_ending=Ending(0, 1), warm_failures=1, parked=())
        told = member(name, report(name, failed))
        problem = warm_pool.problem_of(view(told, generation=4), told)
        assert problem is not None
        return problem.awaited

    assert awaited("m0", 3)
    assert not awaited("m0", 4)
    assert not awaited("m5", 3), "it has no ranks"


def test_a_member_that_has_not_reported_has_no_problem_yet() -> None:
    new = member("m0", None)
    assert warm_pool.problem_of(view(new), new) is None


@pytest.mark.parametrize(
    ("ending", "failures", "given", "how"),
    [
        (Ending(1, 3), 1, {}, f"exited with code 3{LATER}"),
        (Ending(1, 3), 0, {}, ""),
        (Ending(1, None, 11), 2, {}, ""),
        (Ending(1, None, 11), 3, {}, f"was killed by SIGSEGV{LATER}"),
        (
            replace(FAILED, message='  File "/app/train.py", line 7, in f\nOSError: x'),
            1,
            {},
            f"raised OSError: x (train.py, line 7){LATER}",
        ),
        (Ending(1, 3), 1, {"ranks": (rank(0, pid=0, state="starting"),)}, f"exited with code 3{NOW}"),
        (Ending(1, 3), 1, {"generation": 0}, f"exited with code 3{NOW}"),
        (Ending(1, 3), 1, {"parked": (0,)}, ""),
        (Ending(1, 3), 1, {"strategy": "cold"}, ""),
        (replace(FAILED, ours=True), 9, {}, ""),
        (None, 9, {}, ""),
    ],
)
def test_the_report_names_why_no_warm_process_can_be_created(
    ending: Ending | None, failures: int, given: dict[str, Any], how: str
) -> None:
    state = launcher(**{"parked": (), "warm_ending": ending, "warm_failures": failures, **given})
    there = member("m0", report("m0", state))
    found = warm_pool.problem_of(view(there), there)
    expected = f"warm processes for member m0 cannot be created: a process {how}" if how else None
    assert (found.sentence if found is not None else None) == expected
    silent = replace(there, silent_s=2.0)
    assert warm_pool.problem_of(view(silent), silent) is None


def test_a_group_that_is_being_formed_or_restarted_needs_as_many_processes_as_ranks() -> None:
    for phase, parked, awaited in (
        ("forming", (0,), True),
        ("running", (0,), False),
        ("securing", (0,), True),
    ):
        state = launcher(parked=parked, warm_ending=Ending(1, 3), warm_failures=1)
        there = member("m0", report("m0", state))
        found = warm_pool.problem_of(view(there, phase=phase, nproc=2, placement=()), there)
        assert found is not None
        assert found.awaited is awaited, phase
    full = member("m0", report("m0", launcher(parked=(0, 1), warm_ending=Ending(1, 3), warm_failures=1)))
    assert warm_pool.problem_of(view(full, nproc=2), full) is None
