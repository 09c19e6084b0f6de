"""The status and the incidents of a run that has no directory."""

from __future__ import annotations

from typing import Any

from supervisor.observability.recent_status import RecentStatus


def incident(number: int, **given: Any) -> dict[str, Any]:
    return {"id": f"i-{number:04d}", "open": False, **given}


def test_a_new_memory_begins_with_the_predecessors_status_and_incidents() -> None:
    assert RecentStatus("a run", 3).status() is None
    memory = RecentStatus("a run", 3, {"step": 4}, [incident(1), {"id": "i-/../x"}, {"id": 4}, {}])
    assert memory.status() == {"step": 4}
    assert memory.incidents() == [incident(1)]


def test_the_newest_incidents_are_kept_in_order() -> None:
    memory = RecentStatus("a run", 3)
    for number in (9_999, 2, 10_000, 10_001, 3):
        memory.write_incident(incident(number))
    memory.write_incident(incident(10_000, open=True))
    assert memory.incidents() == [incident(9_999), incident(10_000, open=True), incident(10_001)]


def test_incidents_are_read_as_json_would_return_them() -> None:
    memory = RecentStatus("a run", 3)
    memory.write_incident(incident(1, stacks=((1, 2),)))
    assert memory.incidents() == [incident(1, stacks=[[1, 2]])]
