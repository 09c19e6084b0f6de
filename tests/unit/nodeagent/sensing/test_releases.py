from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing.releases import MAX_KEPT, GpuRelease, Releases

NONE = Releases("boot")


def asked(at_s: float, for_s: float, **fields: Any) -> dict[str, Any]:
    return {"release_s": for_s, "boottime_s": at_s, "boot_id": "boot", "why": "", **fields}


def withdrawn(at_s: float, until_s: float) -> dict[str, Any]:
    return asked(at_s, 0.0, withdraws=GpuRelease("boot", until_s).name)


def until_s(*requests: dict[str, Any]) -> float | None:
    """Return when the release ends that is in force after these requests."""
    found = NONE
    for each in requests:
        found = found.after(each)
    return None if found.newest is None else found.newest.until_boottime_s


def test_the_newest_release_is_in_force_even_if_it_is_shorter() -> None:
    assert until_s(asked(0.0, 600.0)) == 600.0
    assert until_s(asked(0.0, 600.0), asked(1.0, 60.0)) == 61.0


def test_an_end_ends_all_releases_also_that_of_an_earlier_command_that_failed() -> None:
    assert until_s(asked(0.0, 600.0), asked(1.0, 900.0), asked(2.0, 0.0)) == 2.0
    assert until_s(asked(0.0, 600.0), asked(2.0, 0.0, why="withdrawn")) == 2.0


def test_a_withdrawal_does_not_end_a_later_release() -> None:
    assert until_s(asked(0.0, 600.0), asked(1.0, 900.0), withdrawn(30.0, 600.0)) == 901.0


def test_a_withdrawal_restores_the_release_that_was_replaced() -> None:
    first, second, third = asked(0.0, 900.0), asked(1.0, 600.0), asked(2.0, 300.0)
    assert until_s(first, second, withdrawn(30.0, 601.0)) == 900.0
    assert until_s(first, second, third, withdrawn(30.0, 302.0)) == 601.0
    assert until_s(first, second, third, withdrawn(30.0, 601.0), withdrawn(31.0, 302.0)) == 900.0


def test_a_withdrawal_restores_no_release_that_has_ended_or_that_was_replaced_on_purpose() -> None:
    assert until_s(asked(0.0, 20.0), asked(1.0, 600.0), withdrawn(30.0, 601.0)) == 30.0
    shortened = [asked(0.0, 900.0), asked(1.0, 10.0)]  # ended at 11
    assert until_s(*shortened, asked(50.0, 600.0), withdrawn(80.0, 650.0)) == 80.0
    assert until_s(*shortened, asked(5.0, 600.0), withdrawn(35.0, 605.0)) == 35.0


def test_a_withdrawal_does_not_prolong_a_release_that_has_ended() -> None:
    assert until_s(asked(0.0, 10.0), withdrawn(30.0, 10.0)) == 10.0


def test_a_withdrawal_of_an_unknown_release_and_requests_of_another_boot_have_no_effect() -> None:
    assert until_s(asked(0.0, 600.0), withdrawn(1.0, 5.0)) == 600.0
    assert until_s(asked(0.0, 600.0), asked(1.0, 0.0, withdraws=None)) == 600.0
    assert until_s(asked(0.0, 600.0), asked(1.0, 0.0, boot_id="next")) == 600.0
    assert until_s(withdrawn(1.0, 5.0)) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=60))
def test_whatever_is_withdrawn_the_requests_that_remain_decide(steps: list[tuple[int, int]]) -> None:
    """A release that is withdrawn while it is in force is as if it had never been asked for."""
    found, without = NONE, NONE
    for at_s, (kind, for_s) in enumerate(steps):
        if kind == 0:
            found, without = (each.after(asked(at_s, 0.0)) for each in (found, without))
        elif kind == 1:
            request = asked(at_s, float(for_s + 100))
            found, without = (each.after(request) for each in (found, without))
        else:
            attempt = asked(at_s, for_s + 200.5)
            found = found.after(attempt).after(withdrawn(at_s, at_s + for_s + 200.5))
        assert len(found.kept) <= MAX_KEPT
        assert in_force(found, at_s) == in_force(without, at_s)


def in_force(found: Releases, at_s: float) -> GpuRelease | None:
    newest = found.newest
    return newest if newest is not None and newest.until_boottime_s > at_s else None
