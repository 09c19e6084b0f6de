from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.inspection import thread_waits
from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import evidence

SCRIPT = "evaluate (train.py:42)"
WAIT = "Condition.wait (threading.py:331)"


def stack(*frames: str) -> str:
    return "\n".join(['Thread 7 (idle): "MainThread"', *(f"    {frame}" for frame in frames)])


PLAIN = RankInspection(0, 5, 3, 0, "S", 0.0, stack(SCRIPT), window_s=0.2, at=SCRIPT, where=SCRIPT)
LOCKED = replace(PLAIN, calls=("lock",), at=WAIT, stack=stack(WAIT, SCRIPT))
REDUCING = stack("all_reduce (torch/distributed/distributed_c10d.py:2806)", "<module> (train.py:9)")
BACKWARD = stack("_engine_run_backward (torch/autograd/graph.py:825)", "<module> (train.py:9)")
DEVICE = stack(
    "synchronize (torch/cuda/streams.py:231)",
    "wait (holdfast/state/device.py:171)",
    "keep_pace (holdfast/training/protection/write_gate.py:95)",
    "commit (holdfast/training/state.py:250)",
    "<module> (train.py:9)",
)
OURS = stack(
    "receive (holdfast/training/protection/private_exchange.py:90)",
    "commit (holdfast/training/state.py:250)",
    "<module> (train.py:9)",
)


def seen(inspection: RankInspection = PLAIN, **given: Any) -> evidence.Findings:
    return evidence.findings(replace(inspection, **given))


@pytest.mark.parametrize(
    ("inspection", "role", "work"),
    [
        pytest.param(replace(PLAIN, process_state="T"), evidence.STOPPED, "", id="stopped"),
        pytest.param(replace(PLAIN, process_state="t"), evidence.TRACED, "", id="in a debugger"),
        pytest.param(
            replace(PLAIN, process_state="T", traced=True), evidence.TRACED, "", id="stopped by a debugger"
        ),
        pytest.param(replace(PLAIN, process_state="X"), evidence.GONE, "", id="gone"),
        pytest.param(
            replace(PLAIN, stack=REDUCING), evidence.WAITS, evidence.COLLECTIVE, id="in a collective"
        ),
        pytest.param(
            replace(PLAIN, stack=BACKWARD), evidence.WAITS, evidence.COLLECTIVE, id="in a backward pass"
        ),
        pytest.param(
            replace(PLAIN, stack=OURS), evidence.WAITS, evidence.COLLECTIVE, id="in an exchange of Holdfast"
        ),
        pytest.param(
            replace(PLAIN, stack=DEVICE), evidence.WAITS, evidence.COLLECTIVE, id="waits for its GPU"
        ),
        pytest.param(
            replace(PLAIN, stack=BACKWARD, cpu_s=0.2),
            evidence.BUSY,
            evidence.COMPUTES,
            id="computes in backward",
        ),
        pytest.param(
            replace(PLAIN, cpu_s=0.2), evidence.BUSY, evidence.COMPUTES, id="computes in one function"
        ),
        pytest.param(replace(PLAIN, cpu_s=0.2, moved=True), evidence.WORKS, evidence.COMPUTES, id="works"),
        pytest.param(replace(PLAIN, children=2), evidence.WORKS, evidence.CHILDREN, id="loader workers"),
        pytest.param(replace(PLAIN, io_bytes=9), evidence.WORKS, evidence.BYTES, id="saves"),
        pytest.param(replace(PLAIN, process_state="D"), evidence.IDLE, evidence.FILE, id="a disk"),
        pytest.param(replace(PLAIN, calls=("file",)), evidence.IDLE, evidence.FILE, id="a file"),
        pytest.param(replace(PLAIN, calls=("poll",)), evidence.IDLE, evidence.NETWORK, id="a pipe"),
        pytest.param(replace(PLAIN, calls=("network",)), evidence.IDLE, evidence.NETWORK, id="a download"),
        pytest.param(replace(PLAIN, calls=("sleep",)), evidence.IDLE, evidence.SLEEP, id="sleeps"),
        pytest.param(replace(PLAIN, calls=("child",)), evidence.IDLE, evidence.CHILD, id="a child"),
        pytest.param(
            replace(LOCKED, calls=("lock that a signal handler may release", "lock")),
            *(evidence.IDLE, evidence.LOCK),
            id="lock with a signal handler",
        ),
        pytest.param(
            replace(PLAIN, calls=("shared lock",)), evidence.IDLE, evidence.LOCK, id="lock of another process"
        ),
        pytest.param(replace(PLAIN, calls=()), evidence.IDLE, evidence.UNKNOWN, id="unknown call"),
    ],
)
def test_each_inspection_has_its_role_and_kind_of_work(
    inspection: RankInspection, role: str, work: str
) -> None:
    found = evidence.findings(inspection)
    assert (found.role, found.work) == (role, work)


def test_child_processes_that_only_sleep_are_as_uncertain_as_a_long_call() -> None:
    polls = replace(PLAIN, children=2, sleeping=2)
    assert evidence.findings(polls) == evidence.Findings(evidence.BUSY, evidence.CHILDREN)
    assert evidence.findings(replace(polls, children=3)).role == evidence.WORKS
    assert evidence.findings(replace(LOCKED, children=1, sleeping=1)).role == evidence.BUSY
    assert evidence.shows_work(polls), "before the first step of a script that does not join"
    waits = evidence.findings(replace(polls, stack=REDUCING))
    assert (waits.role, waits.shows_progress) == (evidence.WAITS, True), "it may still save a file"


def test_movement_is_evidence_of_work_even_where_others_are_waited_for() -> None:
    assert seen(moved=True).shows_progress
    assert seen(children=1).shows_progress
    assert seen(io_bytes=1).shows_progress
    assert seen(stack=REDUCING, cpu_s=0.2).shows_progress
    assert not seen(cpu_s=0.2).shows_progress, "a loop without progress looks the same"
    assert not seen().shows_progress


@pytest.mark.parametrize(
    ("given", "certain"),
    [
        ({}, True),
        ({"calls": ("lock", "lock")}, True),
        ({"calls": ("lock", "lock for a time")}, False),  # a thread that backs off, a timer
        ({"calls": ("lock", "sleep")}, False),
        ({"calls": ("lock", "other")}, False),  # a native thread that waits for a signal
        ({"calls": ("lock for a time",)}, False),  # it will wake up by itself
        ({"calls": ("shared lock",)}, False),  # another process may release it
        ({"calls": ("lock", "poll")}, False),  # a thread that may receive data
        ({"calls": ("lock", "unknown")}, False),
        ({"calls": ("unknown",)}, False),
        ({"at": "acquire (_thread)"}, True),
        ({"at": SCRIPT}, False),  # in an extension, a thread that Python does not know may end the wait
        ({"at": "get (multiprocessing/queues.py:103)"}, False),
        ({"children": 1}, False),
        ({"io_bytes": 1}, False),
        ({"moved": True}, False),
        ({"cpu_s": 0.1}, False),  # a thread of an extension that computes
        ({"process_state": "D"}, False),
    ],
)
def test_a_lock_is_a_certain_hang_only_if_nothing_could_release_it(
    given: dict[str, Any], certain: bool
) -> None:
    assert (seen(LOCKED, **given).role == evidence.LOCKED) is certain


def test_each_wait_that_a_launcher_reports_is_understood() -> None:
    words = {
        thread_waits.FILE,
        thread_waits.NETWORK,
        thread_waits.POLL,
        thread_waits.SLEEP,
        thread_waits.CHILD,
        thread_waits.SHARED_LOCK,
    }
    assert all(seen(calls=(word,)).work != evidence.UNKNOWN for word in words)


def test_the_evidence_of_an_inspection_is_one_line() -> None:
    assert evidence.describe(LOCKED) == (
        "rank 0: step 5, state S, 0.00 s of CPU in 0.20 s, its main thread waits in: lock,"
        " in evaluate (train.py:42)"
    )
    told = evidence.describe(replace(PLAIN, io_bytes=9, children=2, traced=True))
    assert "9 bytes read and written, 2 child processes at work, a debugger is attached" in told
