"""Processes that a script has left in the background are classified as working or resting."""

from __future__ import annotations

from holdfast.inspection.left_processes import WINDOW_S, WORK_BYTES, WORK_CPU, BackgroundProcesses, WorkDone


def looked(*found: WorkDone, pid: int = 7) -> list[bool]:
    """Return, for each of the readings `found` in turn, whether the process counts as resting."""
    seen = iter(found)
    background = BackgroundProcesses(lambda _: next(seen))
    return [bool(background.resting([pid], at * WINDOW_S)) for at in range(len(found))]


def test_a_waiting_process_rests_after_one_window_and_a_working_one_does_not() -> None:
    assert looked(WorkDone(1.0, 10), WorkDone(1.0, 10)) == [False, True]
    cpu_s = 2 * WORK_CPU * WINDOW_S
    assert looked(WorkDone(1.0, 10), WorkDone(1.0 + cpu_s, 10), WorkDone(1.0 + 2 * cpu_s, 10)) == [
        False,
        False,
        False,
    ]
    assert looked(WorkDone(0.0, 0), WorkDone(0.0, WORK_BYTES), WorkDone(0.0, WORK_BYTES)) == [
        False,
        False,
        True,
    ]


def test_a_heartbeat_and_a_log_line_are_not_work() -> None:
    assert looked(WorkDone(0.0, 0), WorkDone(0.001, 200)) == [False, True]


def test_short_lived_children_and_waits_for_storage_are_work() -> None:
    assert looked(WorkDone(0.5, 9, frozenset({3})), WorkDone(0.2, 1, frozenset({4}))) == [False, False]
    assert looked(WorkDone(0.0, 0), WorkDone(0.0, 0, waits_for_storage=True)) == [False, False]


def test_each_process_is_examined_once_per_window() -> None:
    looks: list[int] = []

    def measure(pid: int) -> WorkDone:
        looks.append(pid)
        return WorkDone(float(len(looks)), 0)

    background = BackgroundProcesses(measure)
    for at in range(40):
        assert not background.resting([7], at * WINDOW_S / 10)
    assert len(looks) == 1 + 3
