from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.foreign_text import sent_bytes
from holdfast.protocol.launcher_messages import BadNumber, Ending, Restore
from supervisor.view import endings, faults
from supervisor.view.model import Fault, OpenIncident, Policy
from tests.unit.supervisor.job_views import (
    LAUNCH,
    S,
    fault,
    launcher,
    member,
    progress,
    rank,
    report,
    view,
)

POLICY = Policy(members=2)
WELL = member("m0", report("m0", launcher(rank(0)), progress=(progress(0, 7),)))
ABORTED = "what(): gloo/pair.cc:456] op.preamble.length <= op.nbytes. 12 vs 4. Received data size\n"
BUG = '  File "train.py", line 7\nValueError: bad\n'


def seen(*endings: Ending | None, **given: Any) -> tuple[Fault, ...]:
    """Return the faults of member m1 if its ranks ended in this way."""
    ranks = tuple(rank(number, each) for number, each in enumerate(endings, 1))
    told = report("m1", launcher(*ranks), progress=(progress(1, 5),))
    return faults.find_faults(view(WELL, member("m1", told), **given), POLICY)


@pytest.mark.parametrize(
    ("ending", "kind", "signature", "detail"),
    [
        (Ending(90 * S, None, 9), "crash", "signal 9", "rank 1 was killed by SIGKILL"),
        (Ending(90 * S, None, 31), "crash", "signal 31", "rank 1 was killed by SIGSYS"),
        (Ending(90 * S, None, 40), "crash", "signal 40", "rank 1 was killed by signal 40"),
        (
            Ending(90 * S, None, 6, message=ABORTED),
            "crash",
            "signal 6",
            "rank 1 was killed by SIGABRT: its collective does not match another rank's"
            " (it was sent 12 bytes and expected 4)",
        ),
        (Ending(90 * S, 17), "crash", "exit 17", "rank 1 exited with code 17"),
        (
            Ending(90 * S, 1, fail="exception", failed_ns=80 * S, message=BUG),
            "exception",
            "exception ValueError at train.py:7",
            "rank 1 raised ValueError: bad",
        ),
        (
            Ending(90 * S, 3, fail="system_exit", message="sys.exit(3)"),
            "exit",
            "system_exit 3",
            "rank 1 exited with code 3 (sys.exit(3))",
        ),
        (Ending(90 * S, 2, fail="bad_input", message="no"), "bad_input", "bad_input 2", "rank 1 raised no"),
        (
            Ending(90 * S, 1, fail="distributed", message="Connection closed by peer"),
            "victim",
            "distributed 1",
            "rank 1 lost its peers (connection closed by peer)",
        ),
    ],
)
def test_an_ending_becomes_a_fault_with_kind_signature_and_detail(
    ending: Ending, kind: str, signature: str, detail: str
) -> None:
    [found] = seen(ending)
    assert (found.kind, found.signature, found.detail) == (kind, signature, detail)
    assert (found.rank, found.member, found.step) == (1, "m1", 5)
    assert found.at_ns == (ending.failed_ns or ending.at_ns)


@pytest.mark.parametrize(
    "ending", [None, Ending(0, 0), Ending(0, None, 9, ours=True), Ending(0, 1, ours=True)]
)
def test_normal_states_are_not_faults(ending: Ending | None) -> None:
    assert seen(ending) == ()


def test_an_ending_of_an_older_generation_is_not_a_fault_of_this_one() -> None:
    old = report("m1", launcher(rank(1, Ending(0, None, 9), generation=1)))
    assert faults.find_faults(view(WELL, member("m1", old), generation=2), POLICY) == ()


def test_a_bad_number_is_named_with_step_and_batch() -> None:
    flag = BadNumber("jump", 4, "123.0", 64, 70 * S)
    told = report("m1", launcher(rank(1, flag=flag)))
    [found] = faults.find_faults(view(WELL, member("m1", told)), POLICY)
    assert (found.kind, found.step, found.position, found.at_ns) == ("loss_jump", 4, 64, 70 * S)
    assert found.detail == "rank 1 computed a loss of 123.0 at step 4, batch position 64"


@pytest.mark.parametrize(
    ("given", "lost"),
    [
        ({"silent_s": 4.999}, False),
        ({"silent_s": 5.0}, True),
        ({"silent_s": 4.999, "connected": False}, False),
        ({"exists": False}, True),
        ({"report": None, "connected": False, "silent_s": 5.0}, True),
    ],
)
def test_a_member_with_ranks_is_lost_when_it_is_gone_or_silent(given: dict[str, Any], lost: bool) -> None:
    away = member("m1", report("m1", launcher(rank(1))), **given)
    found = faults.find_faults(view(WELL, away), POLICY)
    assert [each.kind for each in found] == ["member_lost"] * lost


DEAF = "its launcher has sent no heartbeat for 5 s and is stopped"


def test_a_member_with_a_silent_launcher_is_lost_from_then_on_with_the_reason() -> None:
    deaf = member("m1", report("m1", launcher(rank(1)), launcher_silent=DEAF))
    [found] = faults.find_faults(view(WELL, deaf), POLICY)
    assert (found.kind, found.member, found.rank, found.at_ns) == ("member_lost", "m1", 1, 100 * S)
    assert found.detail == f"member m1 is lost: {DEAF}"


def test_the_last_members_with_state_are_kept_until_something_else_needs_their_launchers() -> None:
    told = report("m0", launcher(rank(0)), launcher_silent=DEAF)
    alone = view(member("m0", told), placement=("m0",))
    assert faults.find_faults(alone, POLICY) == ()
    died = rank(0, Ending(1, None, 9))
    stuck = view(member("m0", replace(told, launcher=launcher(died))), placement=("m0",))
    assert {each.kind for each in faults.find_faults(stuck, POLICY)} == {"crash", "member_lost"}
    other = member("m1", report("m1", launcher(rank(1)), launcher_silent=DEAF))
    assert faults.find_faults(view(member("m0", told), other), POLICY) == ()


def test_a_restarted_launcher_has_lost_its_ranks() -> None:
    anew = member("m1", report("m1", launcher(generation=0)))
    assert faults.find_faults(view(WELL, anew, settled=False), POLICY) == ()
    [found] = faults.find_faults(view(WELL, anew, settled=True), POLICY)
    assert (found.kind, found.member) == ("member_lost", "m1")


def test_a_failed_preparation_is_a_fault_of_its_generation() -> None:
    launch = replace(LAUNCH, generation=2, restore=Restore(8, 1, "slot"))
    behind = report("m1", launcher(generation=1), prepare_error="no", prepare_generation=2)
    [found] = faults.find_faults(view(WELL, member("m1", behind), generation=2, launch=launch), POLICY)
    assert (found.kind, found.signature) == ("restore", faults.restore_signature("slot", 1, 8))
    assert faults.find_faults(view(WELL, member("m1", behind), generation=3, launch=launch), POLICY) == ()


def test_a_slot_that_was_not_free_does_not_discredit_the_state() -> None:
    launch = replace(LAUNCH, generation=2, restore=Restore(8, 1, "slot"))
    behind = report(
        "m1", launcher(generation=1), prepare_error="no", prepare_generation=2, prepare_occupied=True
    )
    [found] = faults.find_faults(view(WELL, member("m1", behind), generation=2, launch=launch), POLICY)
    assert (found.kind, found.signature) == ("restore", faults.OTHER_RESTORE)
    assert found.signature != faults.restore_signature("slot", 1, 8)


def test_a_full_memory_volume_does_not_discredit_the_state() -> None:
    launch = replace(LAUNCH, generation=2, restore=Restore(8, 1, "slot"))
    behind = report(
        "m1",
        launcher(generation=1),
        prepare_error="no",
        prepare_generation=2,
        prepare_occupied=True,
        prepare_volume=True,
    )
    [found] = faults.find_faults(view(WELL, member("m1", behind), generation=2, launch=launch), POLICY)
    assert (found.kind, found.signature) == ("restore", faults.VOLUME)


def test_causes_come_before_their_symptoms_and_earlier_before_later() -> None:
    early, late = fault("crash", at_ns=1), fault("exception", at_ns=2)
    assert faults.root_cause((fault("victim", at_ns=0), late, early)) is early
    assert faults.root_cause((fault("hang", at_ns=0), late)) is late
    assert faults.root_cause((early, fault("nan", at_ns=9))).kind == "nan"
    assert faults.root_cause((fault("nan", at_ns=0), fault("member_lost", at_ns=9))).kind == "member_lost"


def test_an_uncommitted_step_is_explained_by_the_failure_of_another_rank() -> None:
    """If a script catches the error of a lost peer and repeats the step, its own error hides the loss."""
    ended = Ending(80 * S, 2, fail="bad_input", message="begun 3 times", doubtful=True)
    [misuse] = seen(ended)
    assert (misuse.kind, misuse.doubtful) == ("bad_input", True)
    assert faults.root_cause(seen(ended, Ending(90 * S, None, 9))).kind == "crash"
    assert faults.root_cause((misuse, fault("member_lost", 2, at_ns=99 * S))).kind == "member_lost"
    assert faults.root_cause((misuse, fault("victim", 2, at_ns=1))) is misuse
    certain = fault("bad_input", at_ns=99 * S)
    assert faults.root_cause((misuse, fault("crash", 2, at_ns=1), certain)) is certain


@given(st.permutations([fault("crash", at_ns=3), fault("nan"), fault("victim"), fault("hang", at_ns=1)]))
def test_the_root_cause_does_not_depend_on_the_order_of_the_reports(found: list[Fault]) -> None:
    assert faults.root_cause(tuple(found)).kind == "nan"


def test_later_faults_are_added_to_the_incident_once() -> None:
    known = fault("victim", 1)
    incident = OpenIncident(1, 1, 0, 0, 0.0, (known,))
    both = report("m1", launcher(rank(1, Ending(95 * S, None, 9))), progress=(progress(1, 5),))
    found = faults.of_incident(view(WELL, member("m1", both), incident=incident), POLICY)
    assert [each.kind for each in found] == ["victim", "crash"]
    older = OpenIncident(1, 0, 0, 0, 0.0, (known,))
    assert [e.kind for e in faults.of_incident(view(WELL, member("m1", both), incident=older), POLICY)] == [
        "crash"
    ]


def test_victims_may_belong_to_a_silent_member() -> None:
    quiet = member("m1", report("m1", None), silent_s=2.0)
    explained = faults.first_silent_member(view(WELL, quiet))
    assert explained is not None
    assert (explained.kind, explained.member) == ("member_lost", "m1")
    assert faults.first_silent_member(view(WELL, member("m1", report("m1", None)))) is None


def test_a_bad_number_of_a_script_that_keeps_its_own_state_is_counted_from_its_last_start() -> None:
    def said(generation: int) -> str:
        bad = rank(1, generation=generation, flag=BadNumber("nan", 754, "nan", -1, 90 * S))
        told = progress(1, 754, -1)
        state = launcher(bad, generation=generation, joins=False)
        [found] = faults.find_faults(
            view(
                member("m1", report("m1", state, progress=(told,))),
                placement=("m1",),
                generation=generation,
                world_size=1,
            ),
            POLICY,
        )
        return found.detail

    assert said(1) == "rank 1 computed a gradient that is not finite at step 754"
    assert said(2) == "rank 1 computed a gradient that is not finite at optimizer step 754 since the restart"


def test_an_exception_of_many_lines_is_named_by_its_type_and_its_first_line() -> None:
    """The last line of a compiler's message can be any line of a program."""
    text = f"{BUG}  %398 = call_function\n  %399 = call_function[target=add](args = (%398, 1))\n"
    ended = Ending(90 * S, 1, fail="exception", failed_ns=80 * S, message=text, raised="ValueError: bad")
    [found] = seen(ended)
    assert found.detail == "rank 1 raised ValueError: bad"
    assert found.signature == "exception ValueError at train.py:7"


def test_the_end_of_a_script_is_reported_in_a_line_of_bounded_length() -> None:
    [found] = seen(Ending(90 * S, 1, fail="system_exit", message=f"sys.exit({'x' * 20_000!r})"))
    assert len(found.detail) < 1100


@pytest.mark.parametrize("count", [3, 5000])
def test_the_messages_of_an_incident_have_a_bounded_total_length_and_that_of_the_cause_is_whole(
    count: int,
) -> None:
    known = tuple(
        fault("crash", number, at_ns=(7 * number) % count, message="я" * 30_000) for number in range(count)
    )
    found = faults.with_bounded_messages(known)
    assert sum(sent_bytes(each.message) for each in found) < 1_600_000
    assert [replace(each, message="") for each in found] == [replace(each, message="") for each in known]
    assert faults.root_cause(found).message == "я" * 30_000
    assert all("[...]" in each.message for each in found if each is not faults.root_cause(found)) is (
        count > 3
    )
    assert faults.with_bounded_messages(found) == found


def test_signals_have_the_names_that_this_system_gives_them() -> None:
    assert {n: signal.Signals(n).name for n in range(1, 32)} == endings._SIGNALS


def test_the_ranks_of_a_member_that_is_lost_are_named() -> None:
    lost = faults._lost(view(nproc=2), 1, "m1", None)
    assert lost.detail == "member m1 with ranks 2, 3 is lost: its processes are gone"
