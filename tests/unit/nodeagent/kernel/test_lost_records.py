from __future__ import annotations

from nodeagent.kernel.line_reader import REPORT_S, LostRecords
from nodeagent.sensing.clock import Anchor, Clock


class At(Clock):
    s = 0.0

    def now_s(self) -> float:
        return self.s


def test_the_first_reading_is_zero_so_that_the_next_one_shows_growth() -> None:
    clock = At(Anchor("boot", 0.0))
    losses = LostRecords(clock, "kmsg", "records were overwritten")
    losses.count = 5
    assert [(each.value, each.text) for each in losses.due_readings()] == [(0.0, "")]
    assert [(each.value, each.text) for each in losses.due_readings()] == [(5.0, "records were overwritten")]
    assert losses.due_readings() == []
    clock.s = REPORT_S
    [again] = losses.due_readings()
    assert (again.check, again.entity, again.source, again.value) == (
        "observations_dropped", "sensor/kmsg", "kmsg", 5.0,
    )  # fmt: skip
