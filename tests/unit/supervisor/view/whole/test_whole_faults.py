"""Each fault in full, as it is written to the journal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.launcher_messages import BadNumber, Ending, RankState, Restore
from holdfast.protocol.member_messages import HeldChecksum, MemberReport
from supervisor.view import endings, faults, replica_divergence, uneven_steps, unknown_generation
from supervisor.view.model import Fault, OpenIncident, PastFault, Policy, View
from tests.unit.supervisor.job_views import (
    LAUNCH,
    S,
    launcher,
    member,
    progress,
    rank,
    report,
    view,
)

POLICY = Policy(members=2, nproc=2)
PAIRS: dict[str, Any] = {"nproc": 2, "world_size": 4}
WELL = member(
    "m0",
    report("m0", launcher(rank(0), rank(1)), progress=(progress(0, 7), progress(1, 6))),
)
STATE = Restore(8, 1, "slot")


def found(*ranks: RankState, policy: Policy = POLICY, joins: bool = True, **given: Any) -> tuple[Fault, ...]:
    """Return the faults of member m1 with these states of ranks 2 and 3, which are at steps 5 and 6."""
    told = report("m1", launcher(*ranks, joins=joins), progress=(progress(2, 5, -1), progress(3, 6, -1)))
    told = replace(told, **{name: given.pop(name) for name in tuple(given) if name in REPORTED})
    first = WELL if joins else replace(WELL, report=report("m0", launcher(rank(0), rank(1), joins=False)))
    seen = view(first, member("m1", told, **{n: given.pop(n) for n in tuple(given) if n in SEEN}))
    return faults.find_faults(replace(seen, memory=replace(seen.memory, **{**PAIRS, **given})), policy)


REPORTED = {"launcher", "launcher_silent", "prepare_error", "prepare_generation", "prepare_occupied"}
REPORTED |= {"prepare_volume", "progress", "reading_s"}
SEEN = {"exists", "connected", "silent_s"}
TEXT = "Traceback (most recent call last):\n" + '  File "train.py", line 7\nValueError: bad\n'
ABORTED = "what(): gloo/pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 4. Received data size\n"


@pytest.mark.parametrize(
    ("ending", "fault"),
    [
        (
            Ending(90 * S, None, 11, message="Segmentation fault"),
            Fault(
                *("crash", 3, "m1", 6, 90 * S, "signal 11", "rank 3 was killed by SIGSEGV"),
                *("Segmentation fault", None, 11),
            ),
        ),
        (
            Ending(90 * S, 1, fail="exception", failed_ns=80 * S, message=TEXT, raised="ValueError: bad"),
            Fault(
                *("exception", 3, "m1", 6, 80 * S, "exception ValueError at train.py:7"),
                *("rank 3 raised ValueError: bad", TEXT, 1),
            ),
        ),
        (
            Ending(90 * S, 2, fail="bad_input", message="no data", doubtful=True),
            Fault(
                *("bad_input", 3, "m1", 6, 90 * S, "bad_input 2", "rank 3 raised no data", "no data", 2),
                doubtful=True,
            ),
        ),
        (
            Ending(90 * S, 1, fail="distributed", message="Connection closed by peer"),
            Fault(
                *("victim", 3, "m1", 6, 90 * S, "distributed 1"),
                *("rank 3 lost its peers (connection closed by peer)", "Connection closed by peer", 1),
            ),
        ),
    ],
    ids=["killed", "raised", "bad input", "victim"],
)
def test_a_process_that_ended_is_exactly_this_fault(ending: Ending, fault: Fault) -> None:
    assert found(rank(2), rank(3, ending)) == (fault,)


@pytest.mark.parametrize(
    ("flag", "joins", "fault"),
    [
        (
            BadNumber("jump", 4, "9.5", 64, 70 * S, "the last 8 losses were below 0.5"),
            True,
            Fault(
                *("loss_jump", 3, "m1", 4, 70 * S, "loss_jump at step 4"),
                "rank 3 computed a loss of 9.5 (the last 8 losses were below 0.5) at step 4,"
                " batch position 64",
                position=64,
                value="9.5",
            ),
        ),
        (
            BadNumber("nan", 4, "0.5", 0, 70 * S),
            True,
            Fault(
                *("nan", 3, "m1", 4, 70 * S, "nan at step 4"),
                "rank 3 computed a gradient that is not finite, with a loss of 0.5, at step 4,"
                " batch position 0",
                position=0,
                value="0.5",
            ),
        ),
        (
            BadNumber("nan", 4, "nan", -1, 70 * S),
            True,
            Fault(
                *("nan", 3, "m1", 4, 70 * S, "nan at step 4", "rank 3 computed a loss of nan at step 4"),
                value="nan",
            ),
        ),
        (
            BadNumber("nan", 4, "nan", -1, 70 * S),
            False,
            Fault(
                *("nan", 3, "m1", 4, 70 * S, "nan at step 4"),
                "rank 3 computed a gradient that is not finite at step 4",
                value="nan",
            ),
        ),
    ],
    ids=["jump", "gradient", "loss", "a script that does not join"],
)
def test_a_bad_number_is_exactly_this_fault(flag: BadNumber, joins: bool, fault: Fault) -> None:
    assert found(rank(2), rank(3, flag=flag), joins=joins) == (fault,)


def test_a_rank_may_have_computed_a_bad_number_and_then_failed() -> None:
    flag = BadNumber("nan", 4, "nan", -1, 70 * S)
    both = found(rank(3, Ending(90 * S, 17), flag=flag))
    assert [(each.kind, each.at_ns) for each in both] == [("nan", 70 * S), ("crash", 90 * S)]


def lost(detail: str, at_s: float = 100.0, number: int = 2, step: int = 7) -> Fault:
    return Fault("member_lost", number, "m1", step, int(at_s * S), "member m1", detail)


def refused(signature: str, why: str = "no space") -> Fault:
    detail = f"member m1 cannot prepare the state: {why}"
    return Fault("restore", -1, "m1", 7, 100 * S, signature, detail)


DEAF = "its launcher has sent no heartbeat for 5 s"
WITH = "member m1 with ranks 2, 3 is lost: "
REFUSES: dict[str, Any] = {"prepare_error": "no space", "prepare_generation": 1}
WANTED = replace(LAUNCH, restore=STATE)
OLDER = launcher(generation=0)
LATE: dict[str, Any] = {"launcher": OLDER, "launch": WANTED, "started_ns": -501 * S, "since_ns": -502 * S}


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"silent_s": 5.0, "connected": False}, lost(f"{WITH}it has stopped reporting", 95.0)),
        ({"silent_s": 5.0, "exists": False}, lost(f"{WITH}its processes are gone")),
        ({"launcher_silent": DEAF}, lost(f"member m1 is lost: {DEAF}")),
        (
            {"launcher": OLDER, "settled": True},
            lost("the ranks of member m1 are lost: its launcher was restarted"),
        ),
        ({**REFUSES, "launch": WANTED}, refused("restore of slot 1/8")),
        ({**REFUSES, "launch": LAUNCH}, refused("restore")),
        ({**REFUSES, "launch": None}, refused("restore")),
        ({**REFUSES, "launch": WANTED, "prepare_occupied": True}, refused("restore")),
        (
            {**REFUSES, "launch": WANTED, "prepare_occupied": True, "prepare_volume": True},
            refused("restore: the memory volume"),
        ),
        ({**REFUSES, "launch": WANTED, "prepare_volume": True}, refused("restore of slot 1/8")),
        (
            LATE,
            refused("restore of slot 1/8", "not ready after 600 s"),
        ),
        (
            {**LATE, "reading_s": 600.1},  # storage sends no more data
            refused("restore of slot 1/8", "not ready after 600 s"),
        ),
    ],
)
def test_a_lost_member_is_exactly_this_fault(given: dict[str, Any], fault: Fault) -> None:
    assert found(rank(2), rank(3), **given) == (fault,)


@pytest.mark.parametrize(
    "given",
    [
        {"silent_s": 4.9},
        {"launcher": OLDER, "started_ns": -500 * S, "since_ns": -600 * S},
        {"launcher": OLDER, "started_ns": -600 * S, "since_ns": -500 * S},
        {**LATE, "reading_s": 0.0},
        {**LATE, "reading_s": 600.0},
        {"prepare_error": "no space", "prepare_generation": 0},
        {"prepare_error": "", "prepare_generation": 1},
    ],
)
def test_a_member_within_its_limits_has_no_fault(given: dict[str, Any]) -> None:
    assert found(rank(2), rank(3), **given) == ()


def test_a_lost_member_of_one_rank_is_named_with_that_rank() -> None:
    away = view(member("m0", report("m0", launcher(rank(0)))), member("m1", exists=False, silent_s=3.0))
    expected = lost("member m1 with rank 1 is lost: its processes are gone", number=1, step=-1)
    assert faults.find_faults(away, Policy(members=2)) == (expected,)
    assert faults.first_silent_member(away) == expected
    quiet = replace(away, members=(away.members[0], member("m1", report("m1", None), silent_s=1.5)))
    silent = lost("member m1 with rank 1 is lost: it has stopped reporting", 98.5, 1, -1)
    assert faults.first_silent_member(quiet) == silent
    unknown = replace(away, members=away.members[:1])
    assert faults.first_silent_member(unknown) == expected
    assert faults.first_silent_member(view(*(member(f"m{n}", report(f"m{n}", None)) for n in (0, 1)))) is None


def test_the_faults_of_an_incident_are_its_own_and_new_ones_of_another_rank_or_kind() -> None:
    told = report("m0", launcher(rank(0, Ending(90 * S, 17)), rank(1, Ending(91 * S, 17))))
    seen = view(member("m0", told), placement=("m0",), nproc=2, world_size=2)
    known = Fault("crash", 0, "m0", 3, 1, "before", "before")
    other = replace(known, rank=1, kind="hang")
    opened = OpenIncident(1, 1, 90 * S, 91 * S, 0.0, (known, other))
    first, second = faults.find_faults(seen, Policy())
    seen = replace(seen, memory=replace(seen.memory, incident=opened))
    assert faults.of_incident(seen, Policy()) == (known, other, second)
    older = replace(seen.memory, incident=replace(opened, generation=0))
    assert faults.of_incident(replace(seen, memory=older), Policy()) == (first, second)


# -- ranks that did fewer steps

EXITED = Ending(94 * S, 0)
FAILED = Ending(95 * S, 1, fail="distributed")


def steps(
    first: tuple[str, int, float], second: tuple[str, int, float], ending: Ending | None = FAILED
) -> View:
    """Return ranks 2, which exited, and 3, at (phase, step, time since the commit); they began at step 20."""
    told = []
    for number, (phase, step, tail_s), ended in ((2, first, EXITED), (3, second, ending)):
        page = replace(progress(number, step), phase=phase, tail_s=tail_s)
        told.append(
            member(f"m{number}", report(f"m{number}", launcher(rank(number, ended)), progress=(page,)))
        )
    return view(*reversed(told), launch=replace(LAUNCH, restore=replace(STATE, step=20)))


LOOP = "rank 2 exited with code 0 in the middle of its loop, after step"
UNEVEN = (
    "rank 2 left its loop at step 25 while rank 3 was in step 26: all ranks must do the same number of steps"
)
IN_COLLECTIVE = "rank 2 exited with code 0 at step 20 while rank 3 waited for it in a collective"


@pytest.mark.parametrize(
    ("view", "fault"),
    [
        (
            steps(("data", 25, 0.0), ("forward", 25, 0.0)),
            Fault("crash", 2, "m2", 25, 94 * S, "exit 0", f"{LOOP} 25", code=1),
        ),
        (
            steps(("idle", 21, 0.0), ("forward", 25, 0.0)),
            Fault("crash", 2, "m2", 21, 94 * S, "exit 0", f"{LOOP} 21", code=1),
        ),
        (
            steps(("idle", 25, 1.0), ("forward", 25, 0.0), None),
            Fault("bad_input", 2, "m2", 25, 94 * S, "uneven steps", UNEVEN, UNEVEN, 2),
        ),
        (
            steps(("idle", 20, 0.0), ("idle", 20, 0.0)),
            Fault("crash", 2, "m2", 20, 94 * S, "exit 0", IN_COLLECTIVE, code=1),
        ),
        (steps(("idle", 20, 0.0), ("idle", 20, 0.0), None), None),
        (steps(("idle", 25, 1.0), ("forward", 24, 0.0)), None),
        (steps(("idle", 20, 1.0), ("forward", 20, 0.0), None), None),
        (steps(("idle", 21, 1.0), ("idle", 20, 0.0)), None),
    ],
)
def test_a_rank_that_did_fewer_steps_is_exactly_this_fault(view: View, fault: Fault | None) -> None:
    assert uneven_steps.find_uneven_steps(view) == ((fault,) if fault is not None else ())


def test_of_several_ranks_that_exited_in_their_loops_the_lowest_is_at_fault() -> None:
    told = [
        member(f"m{n}", report(f"m{n}", launcher(rank(n, EXITED)), progress=(progress(n, n),)))
        for n in (3, 1, 2)
    ]
    [only] = uneven_steps.find_uneven_steps(view(*told))
    assert (only.rank, only.member, only.step) == (1, "m1", 1)
    older = [replace(each, report=older_ranks(each.report)) for each in told]
    assert uneven_steps.find_uneven_steps(view(*older)) == (), "of an older generation"


def older_ranks(told: MemberReport | None) -> MemberReport:
    assert told is not None
    assert told.launcher is not None
    old = tuple(replace(each, generation=0) for each in told.launcher.ranks)
    return replace(told, launcher=replace(told.launcher, ranks=old))


# -- faults without a rank


def test_a_generation_that_the_journal_does_not_explain_is_a_fault() -> None:
    newer = view(member("m0", report("m0", launcher(generation=3))))

    def lost_track(text: str) -> Fault:
        return Fault("lost_track", -1, "", -1, 100 * S, "lost track", text)

    text = "the members run generation 3, but the journal ends with generation 1"
    assert unknown_generation.fault(newer) == lost_track(text)
    text = "the journal does not contain the reason why generation 1 was stopped"
    assert unknown_generation.unexplained(newer) == lost_track(text)


def test_a_block_of_ranks_that_no_member_reports_is_that_of_a_member_that_has_not_reported() -> None:
    def runs(name: str, *numbers: int) -> Any:
        return member(name, report(name, launcher(*(rank(n, generation=3) for n in numbers), generation=3)))

    claims = (runs("b", 4, 5), member("quiet"), runs("a", 0, 1), member("gone", exists=False), member("late"))
    six = view(*claims, nproc=2, world_size=8)
    assert unknown_generation.claimed_placement(six, 3) == ("a", "quiet", "b", "late")
    assert unknown_generation.claimed_placement(six, 4) == ("quiet", "late")
    second_ranks = view(runs("b", 3), runs("a", 1), nproc=2, world_size=4)
    assert unknown_generation.claimed_placement(second_ranks, 3) == ("a", "b")


def test_differing_replicas_are_a_fault_that_names_the_minority() -> None:
    def seals(name: str, *crcs: int) -> Any:
        sums = tuple(HeldChecksum(1, 16 * at, 4096, crc) for at, crc in enumerate(crcs, 1))
        return member(name, report(name, launcher(), seals=sums))

    third = [seals("m0", 1, 2, 3), seals("m1", 1, 2, 0xAB), seals("m2", 1, 2, 3)]
    given: dict[str, Any] = {"placement": ("m0", "m1", "m2"), "nproc": 2, "world_size": 6}
    listed = "(checksums m0 00000003, m1 000000ab, m2 00000003); they matched at step 32"
    detail = f"replicas no longer match: at step 48 m1 differs from the others {listed}"
    expected = Fault("diverged", 2, "m1", 32, 100 * S, "diverged m1", detail)
    assert faults.find_faults(view(*third, **given), POLICY) == (expected,)
    given |= {"placement": ("m0", "m1"), "world_size": 4}
    text = "at step 48 m0 and m1 differ (checksums m0 00000003, m1 000000ab); they matched at step 32"
    unknown = Fault("diverged", -1, "", 32, 100 * S, "diverged ", f"replicas no longer match: {text}")
    assert replica_divergence.find_divergence(view(*third[:2], **given)) == unknown
    assert replica_divergence.equal_steps(view(*third[:2], equal=(4, 8), **given)) == (16, 32)
    assert replica_divergence.equal_steps(view(*third[:1], equal=(4, 8, 12), **given)) == (8, 12)
    alone: dict[str, Any] = {"placement": ("m0",), "nproc": 2, "world_size": 2}
    assert replica_divergence.equal_steps(view(third[0], **alone)) == (), "there is no other state to compare"
    again = (PastFault("diverged", -1, "", 32, "diverged", 1, 1), PastFault("hang", 0, "", 1, "", 1, 1))
    assert replica_divergence.find_divergence(view(*third[:2], history=again * 2, **given)) == unknown


# -- how a process ended


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (Ending(1, None, 9), "was killed by SIGKILL"),
        (Ending(1, None, 1), "was killed by SIGHUP"),
        (Ending(1, None, 64), "was killed by signal 64"),
        (Ending(1, None, 6, message=ABORTED), "was killed by SIGABRT: its collective does not match another"
         " rank's (it was sent 12 bytes and expected 4)"),
        (Ending(1, None, 9, message=ABORTED), "was killed by SIGKILL"),
        (Ending(1, None, 9, message="out of memory: 9 of 8 GB\nmore"),
         "was killed by SIGKILL: out of memory: 9 of 8 GB"),
        (Ending(1, None, 9, message="it was killed\nmore", out_of_memory=True),
         "was killed by SIGKILL: it was killed"),
        (Ending(1, None, 9, message="the out of memory: 9"), "was killed by SIGKILL"),
        (Ending(1, 3, fail="system_exit"), "exited with code 3"),
        (Ending(1, 3, fail="system_exit", message="no data"), "exited with code 3 (no data)"),
        (Ending(1, 1, fail="exception", message="a\nValueError: b\n", raised="KeyError: c"),
         "raised KeyError: c"),
        (Ending(1, 1, fail="exception", message="a\nValueError: b\n"), "raised ValueError: b"),
        (Ending(1, 1, fail="exception", message=" \n"), "raised an exception"),
        (Ending(1, 1, fail="exception", message="x" * 300), f"raised {'x' * 200}"),
        (Ending(1, 1, fail="distributed", message="lost"), "raised lost"),
        (Ending(1, 2, fail="bad_input", message="bad"), "raised bad"),
        (Ending(1, 1, fail="numeric", message="nan"), "raised nan"),
        (Ending(1, 17, fail="unflushed", message="no"), "exited with code 17"),
        (Ending(1, 17, message="no"), "exited with code 17"),
    ],
)  # fmt: skip
def test_the_description_of_an_ending_has_exactly_this_text(ending: Ending, text: str) -> None:
    assert endings.describe(ending) == text


@pytest.mark.parametrize(
    ("ending", "signature"),
    [
        (Ending(1, None, 9, message="out of memory: 9 of 8 GB"), "out of memory"),
        (Ending(1, None, 9, out_of_memory=True), "out of memory"),
        (Ending(1, None, 9, message="it ran out of memory: 9 of 8 GB"), "signal 9"),
        (Ending(1, 4, fail="system_exit", message=TEXT), "system_exit 4"),
        (Ending(1, 17), "exit 17"),
        (Ending(1, 1, fail="numeric", message="ValueError: bad"), "numeric 1"),
        (Ending(1, 1, message=TEXT), "exit ValueError at train.py:7"),
    ],
)
def test_each_failure_has_exactly_this_signature(ending: Ending, signature: str) -> None:
    assert endings.signature(ending) == signature


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (Ending(1, None, 11, fail="exception"), "crash"),
        (Ending(1, 1, fail="exception"), "exception"),
        (Ending(1, 1, fail="system_exit"), "exit"),
        (Ending(1, 1, fail="bad_input"), "bad_input"),
        (Ending(1, 1, fail="numeric"), "crash"),
        (Ending(1, 1), "crash"),
        (Ending(1, None, 6, message="NCCL error: remote"), "victim"),
        (Ending(1, None, 9, message="NCCL error: remote"), "crash"),
        (Ending(1, 1, fail="distributed"), "victim"),
        (Ending(1, None, 9, fail="distributed"), "victim"),
    ],
)
def test_each_ending_has_exactly_this_kind_of_fault(ending: Ending, kind: str) -> None:
    assert endings.kind_of_fault(ending) == kind


def test_only_the_messages_of_many_faults_are_shortened_and_not_that_of_the_cause() -> None:
    """The bound allows for characters of up to twelve bytes each."""
    longest = (1 << 20) // 12
    cause, *others = (Fault("crash", n, "m", 5, n, "", "", "x" * 600_000) for n in range(3))
    found = faults.with_bounded_messages((cause, *others))
    assert found[0] is cause
    assert [len(each.message) <= (1 << 20) // 3 for each in found[1:]] == [True, True]
    one = (replace(cause, message="x" * longest),)
    assert faults.with_bounded_messages(one) is one
