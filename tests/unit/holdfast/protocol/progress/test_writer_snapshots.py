"""A snapshot is Holdfast's work, so its time is not part of a step."""

from __future__ import annotations

import math
from pathlib import Path

from holdfast.protocol.progress import Phase, read, step_times_s
from holdfast.protocol.progress_writer import Page

S = 1_000_000_000


class Clock:
    now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns

    def passes(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)


def begun(path: Path, clock: Clock) -> Page:
    page = Page.create(path / "page.bin", clock)
    page.begin(1, 0, 0, 7, 0)
    page.phase(Phase.DATA)
    for step in (1, 2):
        clock.passes(1.0)
        page.commit(step, math.nan, math.nan, 0, 0, 0.0, 0)
    return page


def test_a_snapshot_has_its_own_phase_and_limit_and_stops_the_clocks_of_the_step(tmp_path: Path) -> None:
    clock = Clock()
    page = begun(tmp_path, clock)
    page.copy_begins(61.5)
    found = read(page.memory)
    assert found is not None
    assert (found.phase, found.pause_limit_s, found.pause_label) == (Phase.SNAPSHOT, 61.5, "snapshot")
    clock.passes(30.0)
    page.note_snapshot(2, 30.0)
    page.copy_ends()
    found = read(page.memory)
    assert found is not None
    assert (found.phase, found.step_started_ns) == (Phase.DATA, clock.now_ns)
    clock.passes(1.0)
    page.phase(Phase.FORWARD)
    page.commit(3, math.nan, math.nan, 0, 0, 0.0, 0)
    times_s = step_times_s(page.memory)
    assert times_s is not None
    assert times_s[-1] == 1.0
    found = read(page.memory)
    assert found is not None
    assert found.data_ns <= 3 * S, "the wait does not count as the rank's own time either"
    page.close()


def test_the_phase_before_a_snapshot_continues_after_it(tmp_path: Path) -> None:
    clock = Clock()
    page = begun(tmp_path, clock)
    for phase in (Phase.TAIL, Phase.IDLE, Phase.RESTORING):
        if phase is Phase.TAIL:
            page.commit(3, math.nan, math.nan, 0, 0, 0.0, 0, phase=phase)
        else:
            page.phase(phase)
        before = read(page.memory)
        page.copy_begins(60.0)
        clock.passes(5.0)
        page.copy_ends()
        found = read(page.memory)
        assert found is not None
        assert before is not None
        assert (found.phase, found.pause_label) == (phase, "")
        assert found.phase_since_ns == before.phase_since_ns + 5 * S
    page.close()
