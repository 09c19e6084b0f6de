"""The sentences for users about a group without progress, and about inspections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending, RankInspection, StartTimes
from supervisor.hangs import certain_hangs, detection, evidence, group_reports, sentences
from supervisor.hangs.verdict import UNBEGUN, StallVerdict
from supervisor.view import reports
from supervisor.view.model import LateRank, MemberView, StallWatch, View
from tests.unit.supervisor.hangs.test_detection import POLICY, SLEEPS, STOPPED, WAITS, WORKS, seen, there
from tests.unit.supervisor.hangs.test_evidence import DEVICE, LOCKED, PLAIN, REDUCING
from tests.unit.supervisor.job_views import S, launcher, member, progress, rank, report, view

HERE = "evaluate (train.py:42)"
THREE: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "world_size": 3}


def late(*numbers: int, role: str = "waits") -> StallWatch:
    return StallWatch(1, tuple(LateRank(n, 5, "forward", 60 * S, role=role) for n in numbers))


# -- warnings

INTENDED = ' If this is intended, use `with state.pause("eval", limit_s=...)` or a larger --stall-limit'
LIMITED = "no step for 40 s{}; Holdfast restarts it at 60 s."


@pytest.mark.parametrize(
    ("found", "ranks", "warning"),
    [
        (
            StallVerdict("why", 0, limit_s=60.0),
            (0, 1, 2),
            f"why: {LIMITED.format(' while rank 1 waits')}{INTENDED}",
        ),
        (
            StallVerdict("why", 1, limit_s=60.4),
            (0, 1),
            f"why: {LIMITED.format(' while rank 0 waits')}{INTENDED}",
        ),
        (StallVerdict("why", 0, limit_s=60.0), (0,), f"why: {LIMITED.format('')}{INTENDED}"),
        (StallVerdict("why", -1, limit_s=60.0), (0, 1), f"why: {LIMITED.format('')}{INTENDED}"),
        (StallVerdict("why", limit_s=0.0), (0,), f"why: {LIMITED.format('').replace('60', '0')}{INTENDED}"),
        (
            StallVerdict("why", 0),
            (0,),
            "why, so it is left alone: no step for 40 s. --hang-floor TIME would restart it",
        ),
        (
            StallVerdict("why", 0, UNBEGUN),
            (0,),
            "why: no step of a torch.optim optimizer for 40 s. Holdfast sees no other progress of a script"
            " that does not join, and leaves it alone",
        ),
        (
            StallVerdict("why", 0, UNBEGUN, limit_s=600.0),
            (0, 1),
            "why: no step of a torch.optim optimizer for 40 s; Holdfast restarts it at 600 s"
            " (--first-step-timeout) unless it shows signs of work. If the script does no such steps, or"
            " waits long before the first, use a larger --first-step-timeout",
        ),
    ],
)
def test_each_warning_has_exactly_its_text(found: StallVerdict, ranks: tuple[int, ...], warning: str) -> None:
    assert sentences.warning(replace(view(), watch=late(*ranks)), found) == warning


# -- verdicts without a fault


def its_own(number: int, inspection: RankInspection, step_ns: int = 0) -> MemberView:
    """Return the member of a rank of a script that does not join."""
    state = launcher(rank(number, marks=StartTimes(first_step_ns=step_ns)), joins=False)
    page = replace(progress(number, 0, -1), phase="joining")
    return there(number, inspection, phase="joining", stalled=False, launcher=state, progress=(page,))


OTHER = there(0, WAITS)
STARTS = replace(OTHER, report=replace(OTHER.report or report("m0", None), progress=(progress(0, 5, -1),)))
UNTIL = "which may take until --first-step-timeout (600 s)"
PAUSE = "until the limit of the pause (limit_s, or --pause-timeout)"
RAISED = Ending(1, 1, fail="exception", failed_ns=7, unwinding=True, step=5)


def held(number: int, **given: Any) -> MemberView:
    return there(number, SLEEPS, stalled=False, **given)


def raised() -> View:
    """Return two ranks. One is late, and an exception may be about to end the other."""
    return seen(
        OTHER,
        there(1, SLEEPS, stalled=True, ending=RAISED, launcher=launcher(rank(1, RAISED, state="failing"))),
    )


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            seen(OTHER, held(1)),
            StallVerdict(f"rank 1 is in the forward phase of its own step, in {HERE}, and is not late yet"),
        ),
        (
            seen(OTHER, held(1, first_step=True)),
            StallVerdict(f"rank 1 is in its first step, in {HERE}, {UNTIL}"),
        ),
        (
            seen(OTHER, held(1, phase="joining")),
            StallVerdict(f"rank 1 is joining the group, in {HERE}, {UNTIL}"),
        ),
        (
            seen(OTHER, held(1, phase="restoring")),
            StallVerdict(f"rank 1 is restoring its state, in {HERE}, {UNTIL}"),
        ),
        (
            seen(OTHER, there(1, None, stalled=False)),
            StallVerdict("rank 1 is in the forward phase of its own step, and is not late yet"),
        ),
        (
            seen(OTHER, there(1, None, stalled=False, phase="tail")),
            StallVerdict("rank 1 is in the tail phase of its own step, and is not late yet"),
        ),
        (
            seen(OTHER, member("m1", report("m1", launcher(rank(1, state="starting"))))),
            StallVerdict(f"rank 1 is starting, {UNTIL}"),
        ),
        (
            seen(STARTS, its_own(1, SLEEPS)),
            StallVerdict(f"rank 1 has completed no optimizer step yet, in {HERE}, {UNTIL}"),
        ),
        (
            seen(STARTS, its_own(1, SLEEPS, 7)),
            StallVerdict(f"rank 1 is joining the group, in {HERE}, {UNTIL}"),
        ),
        (
            seen(OTHER, held(1, phase="eval")),
            StallVerdict(f"rank 1 is in an evaluation that the script declared, in {HERE}, {PAUSE}", 1),
        ),
        (
            seen(OTHER, held(1, phase="checkpoint")),
            StallVerdict(
                f"rank 1 is in a checkpoint of its own that the script declared, in {HERE}, {PAUSE}", 1
            ),
        ),
        (
            seen(OTHER, there(1, None, phase="paused", stalled=False)),
            StallVerdict(f"rank 1 is in a pause that the script declared, {PAUSE}", 1),
        ),
        (seen(OTHER, held(1, phase="snapshot")), StallVerdict("rank 1 is copying its state for Holdfast", 1)),
        (
            seen(
                there(0, WAITS, phase="eval", stalled=False),
                held(1, phase="paused"),
                there(2, WAITS),
                **THREE,
            ),
            StallVerdict(f"rank 1 is in a pause that the script declared, in {HERE}, {PAUSE}", 1),
        ),
        (
            seen(there(0, WAITS, phase="eval", stalled=False), there(1, WAITS)),
            StallVerdict(
                f"rank 0 is in an evaluation that the script declared, in <module> (train.py:9), {PAUSE}", 0
            ),
        ),
        (
            seen(OTHER, there(1, None, phase="starting")),
            StallVerdict("a process that was released as a rank has not begun to run yet"),
        ),
        (seen(there(0, None), there(1, SLEEPS)), StallVerdict("rank 0 is being inspected")),
        (seen(there(0, SLEEPS), there(1, None)), StallVerdict("rank 1 is being inspected")),
        (
            seen(OTHER, there(1, replace(PLAIN, traced=True))),
            StallVerdict("a debugger is attached to rank 1", 1),
        ),
        (
            seen(there(0, replace(PLAIN, traced=True)), there(1, replace(PLAIN, process_state="t"))),
            StallVerdict("a debugger is attached to rank 0", 0),
        ),
        (
            seen(OTHER, there(1, SLEEPS), member("m2"), **THREE),
            StallVerdict("member m2 has not reported yet what its ranks are doing"),
        ),
        (
            raised(),
            StallVerdict(
                "rank 1 may be running the `finally` blocks of an exception that is about to end it", 1
            ),
        ),
    ],
)
def test_a_wait_names_why_nothing_is_done_yet(now: View, expected: StallVerdict) -> None:
    assert detection.judge(now, POLICY) == expected


def test_missing_inspections_are_awaited_until_each_could_have_been_made() -> None:
    now = seen(there(0, None, at_s=3.0), there(1, SLEEPS))
    until_ns = 98 * S + int((3.0 + POLICY.look_s) * S)
    assert detection.deadline_ns(now, POLICY) == until_ns + 1
    before = detection.judge(replace(now, now_ns=until_ns - 1), POLICY)
    assert before == StallVerdict("rank 0 is being inspected")
    after = detection.judge(replace(now, now_ns=until_ns), POLICY)
    assert after is not None
    assert after.limit_s == 60.0


def test_an_exception_may_end_its_rank_for_a_bounded_time_and_a_stopped_rank_is_not_excused() -> None:
    now, why = raised(), "rank 1 may be running the `finally` blocks of an exception that is about to end it"
    bound_ns = int((POLICY.unwind_s + detection.EXCEPTION_S) * S)
    for after_ns, pending in ((bound_ns - 1, True), (bound_ns, False)):
        found = detection.judge(replace(now, now_ns=now.now_ns + after_ns), POLICY)
        assert found is not None
        assert (found.why == why) is pending
    stopped = replace(now, members=(there(0, STOPPED), now.members[1]))
    stopped = seen(*stopped.members)
    assert stopped.watch.hints
    found = detection.judge(stopped, POLICY)
    assert found is not None
    assert found.why == "rank 0 hangs: it is stopped (state T)"


def test_nothing_is_judged_about_another_generation_or_without_a_late_rank() -> None:
    now = seen(there(0, SLEEPS), there(1, WAITS))
    assert detection.judge(now, POLICY) is not None
    assert detection.judge(replace(now, watch=replace(now.watch, generation=2)), POLICY) is None
    assert detection.judge(replace(now, watch=StallWatch(1)), POLICY) is None


# -- where ranks are


@pytest.mark.parametrize(
    ("role", "work", "inspection", "says"),
    [
        ("works", "computing", PLAIN, f"in {HERE} (computing)"),
        ("busy", "computing", PLAIN, f"in {HERE} (computing)"),
        ("idle", "sleep", PLAIN, f"in {HERE} (sleeping)"),
        ("idle", "a lock", PLAIN, f"in {HERE} (waiting for a lock, which may still be released)"),
        ("waits", "a collective", PLAIN, f"in {HERE} (waiting for a collective)"),
        ("idle", "unknown", PLAIN, f"in {HERE}"),
        ("gone", "", PLAIN, f"in {HERE}"),
        ("idle", "sleep", replace(PLAIN, where="", at="sleep (x.py:1)"), "in sleep (x.py:1) (sleeping)"),
        ("idle", "sleep", None, "in forward (sleeping)"),
    ],
)
def test_the_description_of_a_late_rank_names_its_place(
    role: str, work: str, inspection: RankInspection | None, says: str
) -> None:
    now = seen(there(0, WAITS), there(1, inspection))
    assert sentences.describe_late_rank(now, LateRank(1, 5, "forward", 7, role, work)) == says


def test_the_description_of_a_standstill_names_what_delays_the_group() -> None:
    now = seen(there(0, SLEEPS), there(1, WAITS))
    named = now.watch.ranks[0]
    slept = f"rank 0 has been in {HERE} (sleeping) since step 5"
    alike = "ranks 0, 1 make no progress after step 5, and no evidence singles one out"
    assert sentences.describe_standstill(now, named, False) == slept
    assert sentences.describe_standstill(now, named, True) == alike
    assert sentences.describe_standstill(now, replace(named, rank=-1), False) == alike
    scattered = "all ranks wait for each other in collectives at different places: "
    apart = seen(there(0, WAITS), there(1, replace(WAITS, where="", at="")))
    places = "rank 0 in <module> (train.py:9), rank 1 in an unknown place"
    assert sentences.describe_standstill(apart, named, True) == scattered + places
    for count, more in ((4, ""), (5, " and 1 more")):
        inspections = (there(n, replace(WAITS, where=f"f (a.py:{n})")) for n in range(count))
        names = tuple(f"m{n}" for n in range(count))
        many = seen(*inspections, placement=names, world_size=count)
        listed = ", ".join(f"rank {n} in f (a.py:{n})" for n in range(4))
        assert sentences.describe_standstill(many, named, True) == f"{scattered}{listed}{more}"


def test_the_label_of_a_pause_is_that_of_the_rank_in_its_present_phase() -> None:
    pages = (
        replace(progress(0, 5), phase="eval", label="first"),
        replace(progress(1, 5), phase="eval", label="b"),
    )
    now = view(member("m0", report("m0", launcher(rank(0), rank(1)), progress=pages)))
    assert [group_reports.pause_label(now, n, "eval") for n in (0, 1, 2)] == ["first", "b", ""]
    assert group_reports.pause_label(now, 1, "forward") == ""
    assert sentences.name_activity(now, 1, "eval") == "b"
    assert sentences.name_activity(now, 2, "tail") == "after commit"


# -- what the members report


def test_phases_and_inspections_are_those_of_the_groups_running_ranks() -> None:
    inspections = (replace(PLAIN, rank=1, step=5), replace(PLAIN, rank=2, step=-1, where=""))
    told = report(
        *("m0", launcher(rank(0), rank(1), rank(2), rank(3, Ending(1, 0)))),
        progress=(progress(0, 5), replace(progress(1, 5), phase="eval")),
        looks=inspections,
        looked_for=1,
    )
    now = view(member("m0", told), placement=("m0",), nproc=5, world_size=5)
    assert group_reports.phases(now) == {0: "forward", 1: "eval", 2: "", 4: ""}
    assert reports.all_inspections(now) == inspections
    found = group_reports.state(now, 2)
    assert found == rank(2)
    assert group_reports.state(now, 9) is None
    assert group_reports.position(now, LateRank(1, 5, "eval", 7)) == HERE
    assert group_reports.position(now, LateRank(2, 5, "eval", 7)) == PLAIN.at
    assert group_reports.position(now, LateRank(0, 5, "eval", 7)) == ""
    assert group_reports.place(now, LateRank(1, 5, "eval", 7)) == "evaluate (train.py)"


@pytest.mark.parametrize(
    ("first", "second", "inspected"),
    [
        (5, 5, True),
        (5, -1, True),
        (4, 5, False),
        (None, 5, False),
    ],
)
def test_all_ranks_count_as_inspected_if_each_was_at_its_present_step(
    first: int | None, second: int, inspected: bool
) -> None:
    inspections = [None if step is None else replace(WAITS, step=step) for step in (first, second)]
    now = seen(there(0, inspections[0]), there(1, inspections[1]))
    assert group_reports.are_all_inspected(now) is inspected
    ended = seen(there(0, None, ending=Ending(1, 0)), there(1, WAITS))
    assert group_reports.are_all_inspected(ended), "only live ranks count"


def test_a_rank_waits_for_others_if_an_inspection_at_its_present_step_showed_it() -> None:
    now = seen(there(0, WAITS), there(1, replace(WAITS, step=4)), there(2, SLEEPS), **THREE)
    assert [group_reports.waits_for_others(now, n) for n in range(3)] == [True, False, False]
    traced = seen(there(0, replace(PLAIN, traced=True), ending=Ending(1, 0)), there(1, WAITS))
    assert group_reports.traced_rank(traced) is None, "its process is gone"
    assert certain_hangs.abandoned(traced) is None


# -- inspections


BUSY = replace(PLAIN, cpu_s=0.02, window_s=0.25)


@pytest.mark.parametrize(
    ("inspection", "role", "work", "moves"),
    [
        (replace(BUSY, cpu_s=0.0125), evidence.IDLE, evidence.UNKNOWN, False),
        (BUSY, evidence.BUSY, evidence.COMPUTES, False),
        (replace(BUSY, window_s=0.0), evidence.IDLE, evidence.UNKNOWN, False),
        (replace(PLAIN, process_state="Z"), evidence.GONE, "", False),
        (replace(PLAIN, process_state="T (stopped)"), evidence.STOPPED, "", False),
        (replace(PLAIN, stack=REDUCING), evidence.WAITS, evidence.COLLECTIVE, False),
        (replace(BUSY, stack=REDUCING), evidence.WAITS, evidence.COLLECTIVE, True),
        (replace(PLAIN, stack=REDUCING, io_bytes=1), evidence.WAITS, evidence.COLLECTIVE, True),
        (replace(PLAIN, children=1, moved=True), evidence.WORKS, evidence.CHILDREN, True),
        (replace(PLAIN, io_bytes=1, moved=True), evidence.WORKS, evidence.COMPUTES, True),
        (replace(PLAIN, io_bytes=1), evidence.WORKS, evidence.BYTES, True),
        (LOCKED, evidence.LOCKED, evidence.LOCK, False),
        (replace(LOCKED, process_state="S (sleeping)"), evidence.LOCKED, evidence.LOCK, False),
        (replace(PLAIN, process_state="D (disk)"), evidence.IDLE, evidence.FILE, False),
        (replace(PLAIN, calls=("lock", "network")), evidence.IDLE, evidence.NETWORK, False),
        (replace(PLAIN, calls=("sleep", "network")), evidence.IDLE, evidence.SLEEP, False),
        (replace(PLAIN, calls=("lock for a time",)), evidence.IDLE, evidence.LOCK, False),
        (replace(PLAIN, calls=("other",)), evidence.IDLE, evidence.UNKNOWN, False),
    ],
)
def test_each_inspection_has_exactly_these_findings(
    inspection: RankInspection, role: str, work: str, moves: bool
) -> None:
    assert evidence.findings(inspection) == evidence.Findings(role, work, moves)


@pytest.mark.parametrize(
    ("inspection", "works", "apart"),
    [
        (replace(PLAIN, calls=("run",)), False, True),
        (replace(PLAIN, calls=("other",)), False, False),
        (replace(PLAIN, calls=("other",), process_state="R"), False, True),
        (replace(PLAIN, calls=("sleep", "lock")), False, True),
        (replace(PLAIN, calls=("lock", "sleep")), False, False),
        (replace(PLAIN, calls=("file",), io_bytes=1), True, True),
        (replace(PLAIN, calls=("file",)), False, False),
        (replace(PLAIN, calls=()), False, False),
        (replace(BUSY, calls=("run",)), True, True),
        (replace(WORKS, calls=("run",)), True, True),
        (replace(PLAIN, calls=("run",), children=1), True, True),
        (replace(BUSY, calls=("run",), stack=DEVICE), False, False),
        (replace(PLAIN, calls=("sleep",), stack="no stack"), False, False),
        (replace(LOCKED, calls=("lock",)), False, False),
        (replace(PLAIN, calls=("run",), process_state="T"), False, False),
    ],
)
def test_an_inspection_shows_work_or_a_wait_for_no_other_rank(
    inspection: RankInspection, works: bool, apart: bool
) -> None:
    alone = replace(inspection, meets_unseen=False)
    assert (evidence.shows_work(alone), evidence.waits_for_no_rank(alone)) == (works, apart)
    assert not evidence.waits_for_no_rank(inspection), "it may communicate with the others unseen"


@pytest.mark.parametrize(
    ("inspection", "line"),
    [
        (replace(PLAIN, where="", window_s=0.0), "rank 0: step 5, state S, 0.00 s of CPU"),
        (
            replace(PLAIN, rank=3, cpu_s=0.126, io_bytes=1, children=1, traced=True, calls=("lock", "poll")),
            "rank 3: step 5, state S, 0.13 s of CPU in 0.20 s, 1 bytes read and written,"
            f" 1 child processes at work, a debugger is attached, its main thread waits in: lock, in {HERE}",
        ),
        (
            replace(WAITS, rests_s=9.0, stirs="thread x runs"),
            "rank 0: step 5, state S, 0.00 s of CPU in 0.20 s, in <module> (train.py:9),"
            " at rest until its peers send something",
        ),
        (
            replace(WAITS, stirs="thread x runs"),
            "rank 0: step 5, state S, 0.00 s of CPU in 0.20 s, in <module> (train.py:9),"
            " not known to be at rest: thread x runs",
        ),
        (
            replace(PLAIN, stirs="thread x runs"),
            f"rank 0: step 5, state S, 0.00 s of CPU in 0.20 s, in {HERE}",
        ),
    ],
)
def test_an_inspection_is_described_in_one_line(inspection: RankInspection, line: str) -> None:
    assert evidence.describe(inspection) == line
