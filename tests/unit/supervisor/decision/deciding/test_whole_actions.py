"""The next action in full: its kind, content, deadline and reason."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import BadNumber, Ending, StartTimes
from holdfast.protocol.member_messages import (
    HeldPrivateState,
    HeldSnapshot,
    StateSource,
)
from supervisor.decision.decide import decide
from supervisor.view import faults
from supervisor.view.model import (
    UNREAD,
    Checkpoint,
    End,
    Fault,
    Learn,
    LearnedStall,
    MemberView,
    OpenIncident,
    PastWarning,
    Policy,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    Settle,
    StallWatch,
    Start,
    StorageContents,
    View,
    Wait,
    Warn,
)
from tests.unit.supervisor.hangs.test_detection import SLEEPS, WAITS, seen, there
from tests.unit.supervisor.job_views import (
    S,
    fault,
    holding,
    launcher,
    member,
    progress,
    rank,
    report,
    view,
)

POLICY = Policy(members=2)
STATES = ((0, 1, 9), (1, 1, 9))
CRASH = fault("crash", 1, 9)
DEAF = "its launcher has sent no heartbeat for 5 s"


def here(number: int, **given: Any) -> MemberView:
    """Return a member that holds the state of step 9 and has secured it. `more` overrides its report."""
    seen = {
        name: given.pop(name)
        for name in ("silent_s", "connected", "exists", "heard_ns", "well_ns", "back_ns")
        if name in given
    }
    held = holding(f"m{number}", ((1, 9),), STATES, launcher=launcher(rank(number)), secured_for=1)
    assert held.report is not None
    told = replace(held.report, progress=(progress(number, 9, 9),))
    return replace(held, report=replace(told, **given), **seen)


def incident(*found: Fault) -> OpenIncident:
    return OpenIncident(1, 1, 90 * S, 91 * S, 0.0, found)


def forming(*members: MemberView, **given: Any) -> View:
    stored = given.pop("stored", StorageContents(looked_ns=1))
    made = view(
        *members, **{"phase": "forming", "placement": (), "generation": 0, "since_ns": 90 * S, **given}
    )
    return replace(made, stored=stored)


def securing(*members: MemberView, since_s: float = 99.0, **given: Any) -> View:
    stored = given.pop("stored", StorageContents(looked_ns=1))
    usual: dict[str, Any] = {"phase": "securing", "since_ns": int(since_s * S), "incidents": 1}
    return replace(view(*members, **{**usual, "incident": incident(CRASH), **given}), stored=stored)


def running(*members: MemberView, **given: Any) -> View:
    return view(*members, **{"settled": True, **given})


def ready(number: int, **given: Any) -> MemberView:
    state = launcher(generation=0, **given)
    return member(f"m{number}", report(f"m{number}", state))


def source(name: str, number: int = -1, step: int = 9) -> StateSource:
    return StateSource(f"http://{name}:1", number, 1, step)


def whole(step: int, *names: str) -> ResumePoint:
    sources = tuple(source(name, number, step) for number in (-1, 0, 1) for name in names)
    return ResumePoint(step, 1, "slot", "", sources, names)


def resumed(cause: Fault | None, measure: str, **given: Any) -> Start:
    made = Start(
        *(("m0", "m1"), whole(9, "m0", "m1"), (), "m0", 4000, cause, "restart", ()),
        why=f"{cause.detail if cause else 'all members are ready'}: {measure}",
        measure=measure,
    )
    return replace(made, **given)


def unprepared(signature: str) -> Fault:
    return fault("restore", -1, 9, signature=signature, detail="m0 cannot prepare it")


NEWER = member("m0", report("m0", launcher(rank(0, generation=3), generation=3)))
LOST_TRACK = Fault(
    *("lost_track", -1, "", -1, 100 * S, "lost track"),
    "the members run generation 3, but the journal ends with generation 1",
)
UNEXPLAINED = "the journal does not contain the reason why generation 1 was stopped"
STANDBY = member("m2", report("m2", launcher(generation=0)))
KILLED = Fault(*("crash", 1, "m1", 9, 98 * S, "signal 9", "rank 1 was killed by SIGKILL"), signal=9)
BAD = Fault(
    *("nan", 1, "m1", 9, 98 * S, "nan at step 9", "rank 1 computed a loss of nan at step 9"), value="nan"
)
MARKS = [StartTimes(first_step_ns=97 * S), StartTimes(first_step_ns=96 * S)]
STEPPED = [here(n, launcher=launcher(rank(n, marks=each))) for n, each in enumerate(MARKS)]
AWAY = {"silent_s": 2.0, "well_ns": 98 * S}
OLD_STATE: dict[str, Any] = {
    "slots": (HeldSnapshot(1, 5, 8),),
    "privates": tuple(HeldPrivateState(number, 1, 5, True) for number in (0, 1)),
}
FAILED = "no member became ready in place of m1"
VERIFIED = Checkpoint(7, 1, 2, "/s/step-7-1", verified=True)
GONE = here(1, exists=False)
GONE_FAULT = Fault(
    *("member_lost", 1, "m1", 9, 100 * S, "member m1"),
    "member m1 with rank 1 is lost: its processes are gone",
)
WARMLESS = replace(launcher(), warm_ending=Ending(1, 7), warm_failures=3, warm_tries=3)
WARMLESS_POOL = replace(WARMLESS, parked=(), generation=0)
STARTS = rank(1, state="starting", pid=0)
PROCESSES = "in place, from the snapshot of step 9"


ACTIONS: dict[str, tuple[View, RunAction]] = {
    # any phase
    "members run an unknown generation, and not all have reported": (
        view(NEWER, member("m1", silent_s=0.5)),
        Wait(101_500_000_001, "the members run an unknown generation"),
    ),
    "a pod that has nothing to report delays an unknown generation no longer than on one machine": (
        view(NEWER, member("m1", silent_s=-28.0, awaited_s=2.0)),
        Secure((LOST_TRACK,), True, LOST_TRACK.detail),
    ),
    "members run an unknown generation": (
        view(NEWER, member("m1", silent_s=2.0), member("m3", exists=False)),
        Secure((LOST_TRACK,), True, LOST_TRACK.detail),
    ),
    "a standby is lost": (
        running(here(0), here(1), replace(STANDBY, silent_s=5.0)),
        Replace("m2", "member m2 is lost and is being replaced"),
    ),
    "a standby's launcher does not answer": (
        running(here(0), here(1), member("m2", report("m2", launcher(), launcher_silent=DEAF))),
        Replace("m2", f"member m2 is lost: {DEAF}"),
    ),
    "the first standby has been given up": (
        running(here(0), here(1), replace(STANDBY, silent_s=5.0), lost=("m2",)),
        Wait(105 * S),
    ),
    # forming
    "no member is there": (forming(since_ns=0), Wait(600 * S, "0 of 2 members are ready")),
    "one member is ready": (
        forming(ready(0), member("m1", silent_s=30.0)),
        Wait(105 * S, "1 of 2 members are ready"),
    ),
    "members did not become ready": (
        forming(ready(0), since_ns=-500 * S),
        End(1, "only 1 of 2 members became ready"),
    ),
    "a stop before the start": (
        forming(ready(0), ready(1), stop="graceful"),
        End(130, "stopped before the first step"),
    ),
    "all pods have ended before the start": (
        forming(ready(0), end=End(2, "pod w-0 ended with exit code 2")),
        End(2, "pod w-0 ended with exit code 2"),
    ),
    "the first start waits for storage": (
        forming(ready(0), ready(1), stored=StorageContents(error="it is away", failed_ns=95 * S)),
        Wait(155 * S, "storage cannot be read: it is away"),
    ),
    "the first start cannot read storage": (
        forming(ready(0), ready(1), since_ns=0, stored=StorageContents(error=UNREAD, failed_ns=40 * S)),
        End(2, "storage could not be read for 60 s: it does not respond"),
    ),
    "the first start verifies its checkpoint": (
        forming(ready(0), ready(1), stored=StorageContents((replace(VERIFIED, verified=False),))),
        Wait(690 * S, "verifying the checkpoint of step 7"),
    ),
    "the first start": (
        forming(ready(0), ready(1)),
        Start(
            *(("m0", "m1"), ResumePoint(0, 0, "none"), (), "m0", 4000, None, "start", ()),
            why="all members are ready: start from the beginning, because nothing has been saved yet",
            measure="start from the beginning, because nothing has been saved yet",
        ),
    ),
    "the first start from a checkpoint": (
        forming(ready(0), ready(1), stored=StorageContents((VERIFIED,))),
        Start(
            *(("m0", "m1"), ResumePoint(7, 1, "checkpoint", "/s/step-7-1"), (), "m0", 4000),
            *(None, "start", ()),
            why="all members are ready: start from the checkpoint of step 7",
            measure="start from the checkpoint of step 7",
        ),
    ),
    # running
    "nothing happens": (running(here(0), here(1)), Wait(105 * S)),
    "nothing happens in a group of silent members": (
        running(here(0, silent_s=4.5), here(1, silent_s=1.0)),
        Wait(int(100.5 * S)),
    ),
    "a rank was killed": (
        running(here(0), here(1, launcher=launcher(rank(1, Ending(98 * S, None, 9))))),
        Secure((KILLED,), True, KILLED.detail),
    ),
    "a bad number was computed": (
        running(here(0), here(1, launcher=launcher(rank(1, flag=BadNumber("nan", 9, "nan", -1, 98 * S))))),
        Secure((BAD,), False, BAD.detail),
    ),
    "all ranks have done a step": (
        view(*STEPPED),
        Settle(97 * S, "generation 1 has completed its first step"),
    ),
    "one rank has done a step": (view(STEPPED[0], here(1), since_ns=95 * S), Wait(105 * S)),
    "a first step is awaited": (view(here(0), here(1), since_ns=91 * S), Wait(101 * S)),
    "a stop is requested": (
        running(here(0), here(1), stop="graceful"),
        Secure((), True, "stop requested: securing the state first"),
    ),
    "a stall has ended": (
        replace(
            running(here(0), here(1), learned=(LearnedStall("sleep", 20.0), LearnedStall("a lock", 9.0))),
            watch=StallWatch(1, passed=(LearnedStall("sleep", 20.0), LearnedStall("a lock", 31.5))),
        ),
        Learn((LearnedStall("a lock", 31.5),), "a lock: no step for 31.5 s, and no restart was needed"),
    ),
    "a file of the script has changed": (
        running(
            here(0, launcher=launcher(rank(0), changed=("a.py has changed", "b.py has changed"))), here(1)
        ),
        Warn("a.py has changed", "a.py has changed"),
    ),
    "no process can be created for a run that has not worked": (
        view(here(0), here(1, launcher=replace(WARMLESS, ranks=(STARTS,)))),
        End(7, "the script failed 3 times before it joined"),
    ),
    "no process can be created for a run that has worked": (
        running(here(0), here(1, launcher=replace(WARMLESS, ranks=(STARTS,))), since_ns=0),
        Secure(
            *((), True, "the script failed 3 times before it joined"),
            End(7, "the script failed 3 times before it joined"),
        ),
    ),
    # securing
    "the state is being secured": (
        securing(here(0, secured_for=0), here(1), since_s=98.5),
        Wait(int(100.5 * S), "securing on m0"),
    ),
    "the states are being secured after a takeover": (
        securing(here(0, secured_for=0, heard_ns=int(99.5 * S)), here(1, secured_for=0)),
        Wait(int(101.5 * S), "securing on m0, m1"),
    ),
    "the state is being secured by a member whose sidecar was away": (
        securing(here(0, secured_for=0, back_ns=int(99.5 * S)), here(1), since_s=90.0),
        Wait(int(101.5 * S), "securing on m0"),
    ),
    "the sidecar of a member fails again and again": (
        securing(here(0, secured_for=0, back_ns=int(99.5 * S)), here(1), since_s=39.0),
        Wait(int(101.0 * S), "securing on m0"),
    ),
    "a standby has not reported its state": (
        securing(here(0), here(1), replace(here(2, secured_for=0), heard_ns=100 * S), since_s=98.5),
        Wait(int(100.5 * S), "securing on m2"),
    ),
    "a member has not reported": (
        securing(here(0), member("m1", silent_s=3.0), since_s=90.0),
        Wait(102 * S, "waiting for the report of m1"),
    ),
    "the state is secured": (
        securing(here(0), here(1)),
        resumed(CRASH, f"restart the processes {PROCESSES}"),
    ),
    "the fault is not known": (
        securing(here(0), here(1), incident=None),
        Secure((replace(LOST_TRACK, detail=UNEXPLAINED),), True, UNEXPLAINED),
    ),
    "only victims are known": (
        securing(here(0), here(1), since_s=99.75, incident=incident(fault("victim", 1, 9))),
        Wait(int(100.05 * S), "only victims so far: waiting for the cause"),
    ),
    "doubtful bad input is a victim too": (
        securing(here(0), here(1), since_s=99.75, incident=incident(fault("bad_input", 1, 9, doubtful=True))),
        Wait(int(100.05 * S), "only victims so far: waiting for the cause"),
    ),
    "no cause was found": (
        securing(here(0), here(1), incident=incident(fault("victim", 1, 9))),
        resumed(fault("victim", 1, 9), f"restart the processes {PROCESSES}"),
    ),
    "a member is gone": (
        securing(here(0), GONE),
        Replace("m1", "member m1 is lost and no standby is left"),
    ),
    "a member is gone and was given up": (
        securing(here(0), GONE, lost=("m1",)),
        Wait(105 * S, "waiting for m1, or for a replacement"),
    ),
    "a member is gone and a new one is not ready": (
        securing(here(0), GONE, member("m2", silent_s=599.5), lost=("m1",)),
        Wait(int(100.5 * S), "waiting for m1, or for a replacement"),
    ),
    "a member is gone and no other became ready": (
        securing(here(0), GONE, lost=("m1",), since_s=-501.0),
        Save(
            "m0",
            whole(9, "m0"),
            f"{FAILED}: saving a checkpoint of the secured state",
            end=End(1, FAILED, cause=GONE_FAULT),
        ),
    ),
    "a member is gone and no process can be created": (
        securing(GONE, here(0), member("m2", report("m2", WARMLESS_POOL, secured_for=1)), lost=("m1",)),
        End(7, "the script failed 3 times before it joined"),
    ),
    "a launcher has not reported": (
        securing(here(0), here(1, launcher=None)),
        Wait(105 * S, "waiting for the launcher of m1 to report to its sidecar"),
    ),
    "a member may come back": (
        securing(here(0), here(1, **AWAY), since_s=97.0),
        Wait(103 * S, "waiting for m1, or for a replacement"),
    ),
    "a standby takes the place of the member that is gone": (
        securing(here(0), GONE, ready(2), since_s=90.0),
        resumed(
            GONE_FAULT,
            "restart the processes on m2, from the snapshot of step 9",
            placement=("m0", "m2"),
            remedy="swap",
            resume=whole(9, "m0"),
        ),
    ),
    "a restore failed": (
        securing(here(0), here(1), since_s=99.5, incident=incident(unprepared("restore of slot 1/9"))),
        Wait(int(100.5 * S), "m0 cannot prepare it: retrying soon"),
    ),
    "a restore had no room": (
        securing(here(0), here(1), since_s=96.0, incident=incident(unprepared(faults.VOLUME))),
        Wait(101 * S, "m0 cannot prepare it: retrying soon"),
    ),
    "a newer state may come back": (
        securing(here(0, **OLD_STATE), here(1, slots=(), **AWAY), ready(2), since_s=97.0),
        Wait(103 * S, "step 5 is old, and m1 may have a newer state"),
    ),
    "nothing is left unless a member comes back": (
        securing(
            here(0, slots=(), privates=(), progress=()),
            here(1, slots=(), privates=(), progress=(), **AWAY),
            ready(2),
            since_s=97.0,
            held=5,
        ),
        Wait(103 * S, "step 0 is old, and m1 may have a newer state"),
    ),
    "a newer state may be on storage": (
        securing(
            here(0, **OLD_STATE),
            here(1, slots=(), privates=()),
            stored=StorageContents(error="it is away", failed_ns=98 * S),
        ),
        Wait(104 * S, "step 5 is old, and storage may have a newer state"),
    ),
    "the state may be on storage": (
        securing(
            here(0, slots=()),
            here(1, slots=()),
            since_s=80.0,
            saved=5,
            stored=StorageContents(error="it is away", failed_ns=90 * S),
        ),
        Wait(150 * S, "storage cannot be read: it is away"),
    ),
    "storage was away for too long": (
        securing(
            here(0, slots=()),
            here(1, slots=()),
            since_s=30.0,
            saved=5,
            stored=StorageContents(error="it is away", failed_ns=40 * S),
        ),
        End(1, "storage could not be read for 60 s: it is away"),
    ),
}


@pytest.mark.parametrize("name", ACTIONS)
def test_each_situation_has_exactly_its_action(name: str) -> None:
    now, expected = ACTIONS[name]
    action = decide(now, POLICY)
    assert type(action) is type(expected)
    assert asdict(action) == asdict(expected)


def test_a_job_without_storage_does_not_wait_for_it_nor_end_because_of_it() -> None:
    """What its pods list is their own volume."""
    policy = replace(POLICY, has_storage=False)
    away = StorageContents(error="it is away", failed_ns=0)
    for since_ns in (0, 99 * S):
        action = decide(forming(ready(0), ready(1), since_ns=since_ns, stored=away), policy)
        assert isinstance(action, Start)


# -- a group without progress


def stalled(now_s: float = 100.0, policy: Policy = POLICY, **given: Any) -> RunAction:
    """Return the action while rank 0 has been sleeping since 98 s and rank 1 waits for it."""
    now = seen(there(0, SLEEPS), there(1, WAITS), now_s=now_s, **given)
    watch = replace(now.watch, ranks=tuple(replace(each, since_ns=98 * S) for each in now.watch.ranks))
    return decide(replace(now, watch=watch), policy)


SLEPT = "rank 0 has been in evaluate (train.py:42) (sleeping) since step 5"
WARNED = (
    f"{SLEPT}: no step for 30 s while rank 1 waits; Holdfast restarts it at 60 s. If this is intended, use"
    ' `with state.pause("eval", limit_s=...)` or a larger --stall-limit'
)
STALL = Fault(
    *("hang", 0, "m0", 5, 98 * S, "stall at evaluate (train.py)"),
    f"{SLEPT}; the limit is 60 s",
    place="evaluate (train.py)",
    work="sleep",
)


def test_a_stall_is_inspected_again_when_due_then_reported_once_and_then_acted_on() -> None:
    """Each member counts as lost after 5 s without a report."""
    place = "evaluate (train.py)"
    warned: dict[str, Any] = {"warned": (PastWarning(place, "before"),)}
    assert stalled() == Wait(int(102.6 * S) + 1), "once missing inspections are no longer awaited"
    assert stalled(103.0) == Wait(108 * S)
    assert stalled(127.0) == Wait(128 * S)
    assert stalled(128.0) == Warn(place, WARNED)
    assert stalled(128.0, **warned) == Wait(133 * S)
    assert stalled(156.0, **warned) == Wait(158 * S)
    assert stalled(158.0, **warned) == Secure((STALL,), True, STALL.detail)
    assert stalled(157.5) == Warn(place, WARNED.replace("30 s", "60 s"))
    patient = replace(POLICY, member_timeout_s=500.0)
    assert stalled(129.0, patient, **warned) == Wait(158 * S)
    settled = seen(there(0, SLEEPS, first_step=True), there(1, WAITS))
    assert decide(settled, patient) == Wait(int(102.6 * S) + 1)


def test_a_group_without_anything_due_is_inspected_again_a_second_later() -> None:
    """The only rank was reported and inspected long ago."""
    now = seen(there(0, SLEEPS, late_s=100.0), placement=("m0",), world_size=1)
    warned = (PastWarning("evaluate (train.py)", "before"),)
    now = replace(now, memory=replace(now.memory, warned=warned))
    assert decide(now, replace(POLICY, members=1)) == Wait(101 * S)


def test_as_many_changed_files_are_reported_as_are_remembered() -> None:
    changed = here(0, launcher=launcher(rank(0), changed=("z.py has changed",)))
    for count, action in ((23, Warn("z.py has changed", "z.py has changed")), (24, Wait(105 * S))):
        warned = tuple(PastWarning(f"{n}.py has changed", "") for n in range(count))
        assert decide(running(changed, here(1), warned=warned), POLICY) == action
