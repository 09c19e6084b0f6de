"""A launcher says within seconds that no sidecar is connected, and gives up if none ever was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.launcher.sidecar_contact import SAY_S, SidecarContact

LIMIT_S = 600.0
BEGAN = SidecarContact(LIMIT_S, 100.0)


def said_by(*beats: tuple[float, bool], begun: SidecarContact = BEGAN) -> list[tuple[float, str]]:
    """Return what is printed at each beat, which is (seconds since the start, whether connected)."""
    contact, found = begun, []
    for at_s, is_connected in beats:
        contact, said = contact.later(is_connected, 100.0 + at_s)
        if said:
            found.append((at_s, said))
    return found


def test_a_launcher_without_a_sidecar_says_so_once_and_says_that_it_ends() -> None:
    said = said_by(
        (1, False), (SAY_S, False), (30, False), (LIMIT_S - 1, False), (LIMIT_S, False), (601, False)
    )
    assert said == [
        (
            SAY_S,
            "no sidecar has connected for 8 s, and no rank starts until one does: the launcher exits"
            " after 600 s (first-step-timeout)",
        ),
        (LIMIT_S, "no sidecar has connected for 600 s: exiting"),
    ]


def test_a_limit_of_a_second_is_kept() -> None:
    begun = SidecarContact(1.0, 100.0)
    assert said_by((0.5, False), (1, False), begun=begun) == [
        (1, "no sidecar has connected for 1 s: exiting")
    ]
    assert (begun.is_over(100.9), begun.is_over(101.0)) == (False, True)


def test_a_sidecar_that_is_replaced_quickly_is_not_mentioned() -> None:
    assert said_by((0, True), (50, True), (51, False), (51 + SAY_S - 1, False), (70, True), (90, False)) == []


def test_a_lost_sidecar_is_said_once_and_so_is_its_return() -> None:
    said = said_by((0, True), (50, False), (70, False), (80, False), (90, True), (91, True))
    assert [at_s for at_s, _ in said] == [70, 90]
    assert said[0][1].startswith("no sidecar has been connected for 20 s: running ranks continue")
    assert said[1][1] == "the sidecar is connected"


@given(st.lists(st.tuples(st.floats(0.0, 400.0), st.booleans()), max_size=30))
def test_it_gives_up_exactly_if_no_sidecar_has_ever_been_connected(waits: list[tuple[float, bool]]) -> None:
    contact, now_s = BEGAN, 100.0
    for wait_s, is_connected in waits:
        now_s += wait_s
        contact, _ = contact.later(is_connected, now_s)
    ever = any(is_connected for _, is_connected in waits)
    assert contact.is_over(now_s) == (not ever and now_s - 100.0 >= LIMIT_S)
