"""Consecutive readings of /proc show which processes a signal has stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import LATE_S, STOPPED_S, Stops
from tests.local.waiting import until


def test_a_process_stopped_at_every_reading_for_a_while_counts_as_stopped() -> None:
    stops = Stops()
    assert stops.later([7], 100.0) == frozenset()
    assert stops.later([7, 8], 101.0) == frozenset()
    assert stops.later([7, 8], 102.0) == {7}
    assert stops.later([8], 103.0) == {8}


def test_a_process_that_was_continued_in_between_counts_from_its_second_stop() -> None:
    stops = Stops()
    for now_s, stopped in ((100.0, [7]), (101.0, []), (102.0, [7])):
        assert stops.later(stopped, now_s) == frozenset()


def test_time_in_which_the_reader_did_not_run_proves_nothing() -> None:
    stops = Stops()
    stops.later([7], 100.0)
    away_s = 100.0 + LATE_S + 3600.0  # all were stopped, and the reader was continued first
    assert stops.later([7], away_s) == frozenset()
    assert stops.later([], away_s + 1.0) == frozenset()
    assert STOPPED_S >= 1.0


def test_a_real_process_is_stopped_and_continued() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    try:
        assert not process_stats.is_stopped(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: process_stats.is_stopped(child.pid) or None, "it is stopped", 30.0)
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: None if process_stats.is_stopped(child.pid) else True, "it is continued", 30.0)
    finally:
        child.kill()
        child.wait()
    assert not process_stats.is_stopped(child.pid)
