from __future__ import annotations

from bench.chaos.repairs import DueRepairs


def test_repairs_are_carried_out_once_and_the_newest_first() -> None:
    done: list[str] = []
    repairs = DueRepairs()
    for name in ("a", "b", "c"):
        repairs.owe(name, lambda name=name: done.append(name))  # type: ignore[misc]
    repairs.carry_out("b")
    repairs.carry_out("b")
    assert repairs.carry_out_all() == []
    assert done == ["b", "c", "a"]
    assert repairs.due == ()


def test_a_repair_that_fails_is_reported_stays_due_and_does_not_keep_others_from_happening() -> None:
    done: list[str] = []
    repairs = DueRepairs()

    def fail() -> None:
        raise OSError("no such node")

    repairs.owe("a", lambda: done.append("a"))
    repairs.owe("b", fail)
    assert repairs.carry_out_all() == ["b: no such node"]
    assert done == ["a"]
    assert repairs.due == ("b",)
