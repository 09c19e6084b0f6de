"""The ending of a rank is derived from its own report and the kernel's: each cell of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.launcher.workers.worker_process import final_ending
from holdfast.protocol.launcher_messages import Ending

FAILED = Ending(5, 1, fail="exception", failed_ns=4, message="ValueError: a word", paused=7)
VICTIM = Ending(5, 1, fail="distributed", failed_ns=4)
UNWINDING = replace(FAILED, unwinding=True, overdue=True)
UNWINDING_VICTIM = replace(VICTIM, unwinding=True)

GOOD, BAD = Ending(9, 0), Ending(9, 3)
OURS, FOREIGN = Ending(9, None, 9, ours=True), Ending(9, None, 6, message="the end of its log")


@pytest.mark.parametrize("ended", [GOOD, BAD, OURS, FOREIGN])
def test_without_a_report_the_kernel_decides(ended: Ending) -> None:
    assert final_ending(None, ended) is ended


@pytest.mark.parametrize("ended", [GOOD, BAD, OURS])
@pytest.mark.parametrize("reported", [FAILED, VICTIM])
def test_a_report_takes_precedence_over_the_exit_code_and_the_launchers_signal(
    reported: Ending, ended: Ending
) -> None:
    assert final_ending(reported, ended) is reported


@pytest.mark.parametrize("reported", [FAILED, UNWINDING, UNWINDING_VICTIM])
def test_another_signal_takes_precedence_and_keeps_the_pause(reported: Ending) -> None:
    assert final_ending(reported, FOREIGN) == replace(FOREIGN, paused=reported.paused)


def test_a_victim_remains_one_when_its_library_aborts_it() -> None:
    assert final_ending(VICTIM, FOREIGN) is VICTIM


@pytest.mark.parametrize(
    ("ended", "code"), [(BAD, 3), (OURS, 1)], ids=["it exits", "the launcher ends it meanwhile"]
)
@pytest.mark.parametrize("reported", [UNWINDING, UNWINDING_VICTIM])
def test_an_exception_that_was_unwinding_becomes_final(reported: Ending, ended: Ending, code: int) -> None:
    assert final_ending(reported, ended) == replace(reported, code=code, unwinding=False, overdue=False)


@pytest.mark.parametrize("reported", [UNWINDING, UNWINDING_VICTIM])
def test_an_exit_code_of_0_shows_that_the_exception_was_handled(reported: Ending) -> None:
    assert final_ending(reported, GOOD) is GOOD
