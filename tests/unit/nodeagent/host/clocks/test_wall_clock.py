from __future__ import annotations

import pytest

from nodeagent.host import wall_clock
from nodeagent.host.wall_clock import WallClock


def test_a_step_is_reported_once_with_its_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    walls = iter([1000.0, 1000.0, 993.0, 993.0])
    monkeypatch.setattr(wall_clock, "read_clocks", lambda: [(0.0, next(walls), 0.0)])
    clocks = WallClock()
    found = [next(iter(clocks.read(frozenset({"clock_step"}), 0.0))) for _ in range(4)]
    assert [each.value for each in found] == [0.0, 0.0, 7.0, 0.0]
    assert found[2].text == "7.000 s back"


def test_the_check_is_omitted_if_the_kernels_status_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise PermissionError(1, "Operation not permitted")

    clocks = WallClock()
    monkeypatch.setattr(wall_clock, "adjtimex_status", refused)
    assert list(clocks.read(frozenset({"clock_unsynchronised"}), 0.0)) == []
    assert [each.what for each in clocks.left_out()] == ["clock_unsynchronised"]
    monkeypatch.undo()
    assert len(list(clocks.read(frozenset({"clock_unsynchronised"}), 0.0))) == 1
    assert clocks.left_out() == ()
