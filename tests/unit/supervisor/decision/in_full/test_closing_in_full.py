"""The last actions of a run in full: saves, waits with their limits, and ends with their sentences."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import CheckpointReport, HeldPrivateState, HeldSnapshot
from supervisor.decision import closing, resume_point
from supervisor.view.model import (
    UNREAD,
    Checkpoint,
    Completion,
    Done,
    End,
    InterruptedWork,
    MemberView,
    MissedWork,
    PastFault,
    PendingStart,
    Policy,
    RunAction,
    Save,
    SetAsideState,
    StorageContents,
    View,
    VoidStep,
    Wait,
)
from tests.unit.supervisor.decision.test_closing import at_the_end, on_storage
from tests.unit.supervisor.job_views import S, fault, launcher, member, progress, rank, report, view
from tests.unit.supervisor.view.test_interrupted_work import KILLED, at, group

POLICY = Policy(members=2, save_s=50.0, grace_s=5.0, member_timeout_s=5.0)
NINE = Checkpoint(9, 1, 2, "p")
CUT = (InterruptedWork(1, 9, 8, 2.0),)
AFTER_NINE = "work after a commit (rank 1 after step 9), which will be repeated"
DONE = "all ranks have finished"


def whole(found: RunAction | None) -> dict[str, Any]:
    assert found is not None
    return {"kind": type(found).__name__, **asdict(found)}


def stopped(sentence: str, *cut: InterruptedWork, back: int | None = None, code: int = 130) -> End:
    return End(code, sentence, cut=cut, back=back)


# -- a stop


def ending(
    *members: MemberView, stored: StorageContents | None = None, now_s: float = 100.0, **given: Any
) -> View:
    usual: dict[str, Any] = {"phase": "securing", "since_ns": 99 * S, "stop": "graceful"}
    return replace(view(*members, now_s=now_s, **{**usual, **given}), stored=stored or StorageContents())


OWN = member("m0", report("m0", launcher(rank(0), joins=False)))
WORKING = group((rank(0), at(0)), (rank(1, KILLED), at(1, tail_s=2.0)), (20, 15))
SECURED = replace(WORKING, memory=replace(WORKING.memory, since_ns=99 * S))
RESUMED = resume_point.newest(SECURED, 15)
SCRATCH = PendingStart(1, 0, aside=SetAsideState())


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (
            SECURED,
            Save(
                "m0",
                RESUMED,
                "stop requested: saving a checkpoint of the secured state",
                (InterruptedWork(1, 20, 19, 2.0),),
            ),
        ),
        (ending(), Wait(109 * S, "looking for checkpoints on storage")),
        (ending(stored=on_storage(NINE, looked_s=98.9)), Wait(109 * S, "looking for checkpoints on storage")),
        (
            ending(stored=on_storage(error="it is away")),
            Wait(109 * S, "looking for checkpoints on storage"),
        ),
        (
            ending(stored=on_storage(error="it is away"), now_s=109.0),
            stopped("stopped as requested, without a new checkpoint; storage: it is away"),
        ),
        (
            ending(now_s=109.0),
            stopped("stopped as requested, without a new checkpoint; storage: it does not respond"),
        ),
        (
            ending(stored=on_storage(NINE, looked_s=99.0)),
            stopped("stopped as requested; the newest checkpoint is from step 9"),
        ),
        (
            ending(stored=on_storage(NINE), end=End(7, "a bug", "text", fault("crash"))),
            End(7, "a bug; the newest checkpoint is from step 9", "text", fault("crash")),
        ),
        (ending(stored=on_storage()), stopped("stopped as requested; no member holds a state to save")),
        (ending(OWN, stored=on_storage()), stopped("stopped as requested; the script keeps its own state")),
        (
            ending(unbegun=SCRATCH, stored=on_storage()),
            stopped("stopped as requested, before the first step"),
        ),
    ],
)
def test_a_stop_after_securing_saves_or_ends_as_the_state_allows(now: View, expected: RunAction) -> None:
    assert whole(closing.save_and_end(now, ())) == whole(expected)


def test_a_stop_names_the_work_that_will_be_repeated_from_an_older_checkpoint() -> None:
    none = replace(SECURED, members=tuple(replace(each, silent_s=2.0) for each in SECURED.members))
    cuts = (InterruptedWork(1, 20, 19, 2.0),)
    for step, back in ((19, 19), (20, None)):
        now = replace(none, stored=on_storage(Checkpoint(step, 1, 2, "p")))
        again = (
            "; it precedes the interrupted work after a commit (rank 1 after step 20), which will be repeated"
        )
        why = f"stopped as requested; the newest checkpoint is from step {step}{again if back else ''}"
        assert closing.save_and_end(now, ()) == stopped(why, *cuts, back=back)
    bad = replace(none, stored=on_storage(Checkpoint(18, 1, 2, "p"), Checkpoint(9, 1, 2, "q")))
    ended = closing.save_and_end(bad, (fault("nan", 0, 12),))
    assert isinstance(ended, End)
    assert (ended.back, "the newest checkpoint is from step 9;" in ended.why) == (9, True)
    void = replace(none, stored=on_storage(Checkpoint(20, 1, 2, "p")))
    void = replace(void, memory=replace(void.memory, void=(VoidStep(1, 20, 0),)))
    ended = closing.save_and_end(void, ())
    assert isinstance(ended, End)
    assert ended.cut == (*cuts, InterruptedWork(0, 20, 19)), "the change is lost too"


# -- the last checkpoint of a stop


def holder(name: str, silent_s: float = 0.0, **given: Any) -> MemberView:
    told = report(name, launcher(), slots=(HeldSnapshot(1, 9, 8),), privates=PRIVATES, **given)
    return member(name, told, silent_s=silent_s)


PRIVATES = tuple(HeldPrivateState(number, 1, 9, True) for number in (0, 1))


def written(error: str = "", asked: int = 2, step: int = 9) -> CheckpointReport:
    return CheckpointReport(step, 1, "p", 0.1, error, asked)


def saving(
    *members: MemberView, stored: StorageContents | None = None, now_s: float = 110.0, **given: Any
) -> View:
    usual: dict[str, Any] = {"phase": "saving", "since_ns": 100 * S, "stop": "graceful", "cut": CUT}
    usual |= {"save": 2, "save_step": 9, "save_generation": 1, "save_member": "m0"}
    made = view(*(members or (holder("m0"),)), now_s=now_s, **{**usual, **given})
    return replace(made, stored=stored or StorageContents(heard=2, looked_ns=1))


LOST = holder("m0", silent_s=5.0)
CHECKING = "checking whether the checkpoint of step 9 is on storage"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (saving(), Wait(115 * S, "saving")),
        (saving(now_s=147.0), Wait(150 * S, "saving")),
        (
            saving(now_s=150.0),
            stopped("stopped without its last checkpoint: member m0 did not begin to save it for 50 s", *CUT),
        ),
        (saving(holder("m0", unmoved_s=3.0, silent_s=1.0), now_s=150.0), Wait(155 * S, "saving")),
        (
            saving(holder("m0", unmoved_s=49.0, silent_s=1.0), now_s=151.0),
            stopped("stopped without its last checkpoint: storage accepted no more data for 50 s", *CUT),
        ),
        (saving(holder("m0", durable=written(asked=1))), Wait(115 * S, "saving")),
        (
            saving(holder("m0", durable=written("disk full"))),
            stopped("stopped; the last checkpoint failed: disk full", *CUT),
        ),
        (
            saving(holder("m0", durable=written())),
            stopped("stopped; the checkpoint of step 9 was written but is no longer on storage", *CUT),
        ),
        (saving(holder("m0", durable=written()), stored=on_storage(NINE, heard=1)), Wait(150 * S, CHECKING)),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE, error="it is away")),
            Wait(150 * S, CHECKING),
        ),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE, error="it is away"), now_s=150.0),
            stopped(
                "stopped; the checkpoint of step 9 was written, but storage could not be read: it is away",
                *CUT,
            ),
        ),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE, heard=1), now_s=150.0),
            stopped(
                "stopped; the checkpoint of step 9 was written, but storage could not be read:"
                " it does not respond",
                *CUT,
            ),
        ),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE)),
            stopped("stopped as requested, with a checkpoint of step 9", *CUT),
        ),
        (
            saving(holder("m0", durable=written(step=8)), stored=on_storage(replace(NINE, step=8))),
            stopped(
                "stopped as requested, with a checkpoint of step 8; "
                f"it precedes the interrupted {AFTER_NINE}",
                *CUT,
                back=8,
            ),
        ),
        (saving(LOST), stopped("stopped without its last checkpoint: member m0 is lost", *CUT)),
        (saving(member("m2")), stopped("stopped without its last checkpoint: member m0 is lost", *CUT)),
        (
            saving(LOST, holder("m1", silent_s=3.0)),
            Wait(112 * S, "member m0 is lost: waiting for the others' reports"),
        ),
        (
            saving(LOST, holder("m1", silent_s=5.0)),
            stopped("stopped without its last checkpoint: member m0 is lost", *CUT),
        ),
        (
            saving(LOST, holder("m1"), end=End(7, "a bug")),
            Save(
                "m1",
                resume_point.newest(saving(LOST, holder("m1")), 9),
                "member m0 is lost: member m1 saves the checkpoint of step 9",
                CUT,
            ),
        ),
        (
            saving(LOST, holder("m1"), save_step=8),
            stopped("stopped without its last checkpoint: member m0 is lost", *CUT),
        ),
    ],
)
def test_a_stop_waits_for_its_last_checkpoint_within_its_limits(now: View, expected: RunAction) -> None:
    assert whole(closing.saving(now, POLICY)) == whole(expected)


# -- the last checkpoint of a run that has finished


def finished(now: View) -> View:
    return replace(now, memory=replace(now.memory, finished=True, stop="", cut=()))


def unsaved(why: str, step: int = 9) -> End:
    missing = f"no checkpoint of step {step} could be written: {why}"
    return End(0, f"{DONE}, but {missing}", warning=missing, completion=Completion(missing))


WELL = End(0, DONE, completion=Completion())
ANOTHER = resume_point.newest(saving(LOST, holder("m1")), 9)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (saving(), Wait(115 * S, "saving")),
        (saving(holder("m0", durable=written("disk full"))), unsaved("disk full; there is no other")),
        (
            saving(holder("m0", durable=written())),
            unsaved("it was written but is no longer on storage; there is no other"),
        ),
        (saving(holder("m0", durable=written()), stored=on_storage(NINE)), WELL),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE, heard=1)),
            Wait(150 * S, "checking whether the last checkpoint is on storage"),
        ),
        (
            saving(holder("m0", durable=written()), stored=on_storage(NINE, heard=1), now_s=150.0),
            unsaved("it was written, but storage does not respond; the newest is from step 9"),
        ),
        (
            saving(holder("m0", durable=written()), stored=on_storage(error="it is away"), now_s=150.0),
            unsaved("it is away"),
        ),
        (saving(now_s=150.0), unsaved("member m0 did not begin to save it for 50 s; there is no other")),
        (saving(LOST), unsaved("member m0 is lost; there is no other")),
        (
            saving(LOST, holder("m1")),
            Save("m1", ANOTHER, "member m0 is lost: member m1 saves the checkpoint of step 9", (), True),
        ),
        (saving(LOST, holder("m1"), save_step=10), unsaved("member m0 is lost; there is no other", 10)),
    ],
)
def test_a_finished_run_waits_for_its_last_checkpoint_within_its_limits(
    now: View, expected: RunAction
) -> None:
    assert whole(closing.saving(finished(now), POLICY)) == whole(expected)


LEFT = PastFault("crash", 1, "m1", 20, "exit 0", 90 * S, 3)
LEFT_NOTE = "rank 1 alone left its loop at step 20 and was restarted; all ranks must leave the loop"
MISSED = (MissedWork(0, 1, 9), MissedWork(4, 0, 7, early=True), MissedWork(6, 0, 8))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (at_the_end(9, 9, stored=on_storage(NINE)), WELL),
        (at_the_end(9, 9, stored=on_storage(replace(NINE, step=10))), WELL),
        (
            at_the_end(9, 9, stored=on_storage(NINE), history=(LEFT,)),
            End(0, f"{DONE}; {LEFT_NOTE}", completion=Completion(notes=(LEFT_NOTE,))),
        ),
        (
            at_the_end(9, 9, missed=MISSED),
            End(
                3,
                f"{DONE}; work before or after commit was cut short 3 times: rank 1 after step 9,"
                " rank 0 in step 7, rank 0 after step 8 (see holdfast explain 4)",
                completion=Completion(
                    notes=(
                        "work before or after commit was cut short 3 times: rank 1 after step 9,"
                        " rank 0 in step 7, rank 0 after step 8 (see holdfast explain 4)",
                    )
                ),
            ),
        ),
        (
            at_the_end(9, 9, missed=MISSED[:1]),
            End(
                3,
                f"{DONE}; work after commit was cut short 1 time: rank 1 after step 9 by a stop",
                completion=Completion(
                    notes=("work after commit was cut short 1 time: rank 1 after step 9 by a stop",)
                ),
            ),
        ),
        (
            at_the_end(9, 9),
            Save(
                "m0",
                resume_point.newest(at_the_end(9, 9), None),
                f"{DONE}: saving a checkpoint of the last step",
                finished=True,
            ),
        ),
        (at_the_end(9, 9, unbegun=PendingStart(1, 9, aside=SetAsideState())), WELL),
        (
            at_the_end(9, 9, stored=StorageContents(error=UNREAD, failed_ns=int(90.5 * S))),
            Wait(int(100.5 * S), "looking for checkpoints on storage"),
        ),
        (
            at_the_end(9, 9, stored=StorageContents(error=UNREAD, failed_ns=90 * S)),
            unsaved("storage: it does not respond"),
        ),
        (  # its members left after they had listed it
            at_the_end(9, 9, stored=StorageContents(error=UNREAD, failed_ns=100 * S, looked_ns=90 * S)),
            unsaved("storage: it does not respond"),
        ),
        (at_the_end(9, 9, stored=on_storage(error="it is away")), unsaved("storage: it is away")),
        (at_the_end(0, 0, phase="idle", held=0, stored=on_storage()), WELL),
        (
            at_the_end(9, 9, held=10),
            unsaved("the private state of rank 0, 1 is missing; the newest is from step 4"),
        ),
    ],
)
def test_a_run_whose_ranks_have_finished_saves_or_ends_as_its_state_allows(
    now: View, expected: RunAction
) -> None:
    assert whole(closing.finished(now, POLICY)) == whole(expected)


def test_a_silent_member_is_waited_for_only_for_a_share_of_its_timeout() -> None:
    first, second = at_the_end(9, 9).members
    for silent_s, until_s in ((2.0, 101.0), (1.5, 101.5)):
        now = replace(at_the_end(9, 9), members=(first, replace(second, silent_s=silent_s)))
        assert closing.finished(now, POLICY) == Wait(int(until_s * S), "waiting for a member to report")
    for away in ({"silent_s": 3.0}, {"exists": False}):
        now = replace(at_the_end(9, 9), members=(first, replace(second, **away)))
        assert isinstance(closing.finished(now, POLICY), End)
    standby = member("m2", silent_s=2.0)
    now = replace(at_the_end(9, 9, held=8), members=(*at_the_end(9, 9, held=8).members, standby))
    assert isinstance(closing.finished(now, POLICY), End), "it has no ranks"


def test_the_end_names_the_reason_why_a_last_state_is_not_kept() -> None:
    def why(*pages: Any, left: str = "", **given: Any) -> str:
        states = launcher(rank(0, Ending(1, 0)), rank(1, Ending(1, 0), left=left))
        told = report("m0", states, progress=pages)
        now = replace(view(member("m0", told), placement=("m0",), nproc=2, **given), stored=on_storage())
        found = closing.finished(now, POLICY)
        assert isinstance(found, End)
        return found.warning.removeprefix("no checkpoint of step 9 could be written: ")

    done, idle = (replace(progress(0, 9), phase=phase) for phase in ("done", "idle"))
    silent = "ended without a report (for example through os._exit()) or inside its loop; there is no other"
    assert why(done, replace(idle, rank=1)) == f"rank 1 {silent}"
    assert (
        why(done, replace(idle, rank=1), left="it was interrupted") == "it was interrupted; there is no other"
    )
    assert why(idle, replace(done, rank=1), left="it was interrupted") == f"rank 0 {silent}"
    assert why(done) == f"rank 1 {silent}"
    assert (
        why(done, replace(done, rank=1, step=7))
        == "the ranks ended at different steps, 7 and 9; there is no other"
    )


# -- members that stop


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (view(member("m0"), member("m1"), since_ns=90 * S), Wait(105 * S, "2 members are stopping")),
        (
            view(member("m0"), member("m1"), since_ns=90 * S, first="handled"),
            Wait(110 * S, "2 members are stopping"),
        ),
        (view(member("m0"), since_ns=85 * S), Done("1 members did not stop before the deadline")),
        (view(member("m0", exists=False)), Done("no member is left")),
        (
            view(member("m0", report("m0", launcher(), launcher_silent="it is stopped"))),
            Done("no member is left"),
        ),
    ],
)
def test_members_stop_within_their_grace(now: View, expected: RunAction) -> None:
    assert closing.stopping(now, POLICY) == expected
    assert closing.ended(now, POLICY) == Wait(160 * S, "ended")


@pytest.mark.parametrize(
    ("stop", "code", "joins", "first"),
    [
        ("interrupt", 130, False, "interrupt"),
        ("graceful", 130, False, "handled"),
        ("terminate", 130, False, ""),
        ("now", 130, False, ""),
        ("", 130, False, ""),
        ("interrupt", 1, False, ""),
        ("interrupt", 130, True, ""),
    ],
)
def test_the_first_signal_to_the_ranks_depends_on_the_stop_and_the_exit_code(
    stop: Any, code: int, joins: bool, first: str
) -> None:
    own = member("m0", report("m0", launcher(rank(0), joins=joins)))
    assert closing.first_signal(view(own, stop=stop), End(code, "")) == first


# -- the last sentence


@pytest.mark.parametrize(
    ("given", "line", "completion"),
    [
        ({"why": DONE, "incidents": 1}, f"{DONE} after 1 incident", Completion(incidents=1)),
        ({"why": DONE, "incidents": 3, "before": 3}, DONE, Completion()),
        (
            {"why": "x", "completion": Completion("no checkpoint", ("note",)), "incidents": 2},
            f"{DONE} after 2 incidents, but no checkpoint; note",
            Completion("no checkpoint", ("note",), 2),
        ),
        ({"why": "stopped", "incidents": 5, "before": 3}, "stopped (2 incidents)", None),
        ({"why": "stopped"}, "stopped", None),
        (
            {"why": "stopped", "missed": MISSED[:1], "exit_code": 130},
            "stopped; work after commit was cut short 1 time: rank 1 after step 9",
            None,
        ),
        (
            {"why": "a bug", "missed": MISSED[:1], "exit_code": 1, "end": End(1, "a bug")},
            "a bug; work after commit was cut short 1 time: rank 1 after step 9",
            None,
        ),
        ({"why": "a bug", "missed": MISSED[:1], "exit_code": 1}, "a bug", None),
        (
            {"why": DONE, "missed": MISSED[:1], "exit_code": 130},
            f"{DONE}; work after commit was cut short 1 time: rank 1 after step 9",
            Completion(notes=("work after commit was cut short 1 time: rank 1 after step 9",)),
        ),
    ],
)
def test_the_last_sentence_and_its_parts_follow_from_how_the_run_ended(
    given: dict[str, Any], line: str, completion: Completion | None
) -> None:
    memory = view(**given).memory
    assert closing.summary(memory) == line
    assert closing.completion_of(memory) == completion


def test_an_end_is_a_finish_if_the_script_ran_to_its_end() -> None:
    assert closing.is_finish(End(0, ""))
    assert closing.is_finish(End(3, "", completion=Completion()))
    assert not closing.is_finish(End(1, ""))


def test_output_that_could_not_be_written_is_named_whatever_the_code() -> None:
    lost = Ending(1, 0, fail="unflushed", message="OSError: no space")
    there = member("m0", report("m0", launcher(rank(0, lost))))
    note = "rank 0 could not write all of its output: OSError: no space"
    for ending, code in ((lost, 0), (replace(lost, code=None), 0), (replace(lost, code=7), 7)):
        now = view(replace(there, report=report("m0", launcher(rank(0, ending)))))
        expected = End(code, f"{DONE}; {note}", completion=Completion(notes=(note,)))
        assert whole(closing.end_finished(now, "")) == whole(expected)


def test_of_several_steps_at_which_ranks_ended_the_first_and_the_last_are_named() -> None:
    done = tuple(replace(progress(n, step), phase="done") for n, step in enumerate((9, 7, 8)))
    told = report("m0", launcher(*(rank(n, Ending(1, 0)) for n in range(3))), progress=done)
    now = view(member("m0", told), placement=("m0",), nproc=3, world_size=3)
    found = closing.finished(replace(now, stored=on_storage()), POLICY)
    assert isinstance(found, End)
    assert "the ranks ended at different steps, 7 and 9; " in found.why
