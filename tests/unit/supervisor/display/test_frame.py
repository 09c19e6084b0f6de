from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.display import frame as rendering
from supervisor.display.ansi import Style, width_of
from tests.unit.supervisor.status_samples import member, opened, rank, status

PLAIN = Style(False, True)


def test_a_healthy_run_is_five_lines() -> None:
    assert rendering.frame(status(), 79, PLAIN) == [
        "─" * 79,
        "● running   step 1,234   loss 2.413   14.2 steps/s   ETTR 99.21 %",
        "  generation 3   secured 1,234   checkpoint 1,200   454 samples/s   up 100 s",
        "  m-0 ●   m-1 ●   m-2 ○○ standby",
        "  back in 0.13 s, 0 steps lost: rank 1 was killed by SIGKILL at step 812",
    ]


def test_without_unicode_and_colour_the_frame_is_plain_ascii() -> None:
    lines = rendering.frame(status(open_incident=opened()), 100, Style(False, False))
    assert all(line.isascii() and line.isprintable() for line in lines)


def test_before_the_first_status_the_frame_says_that_the_run_starts() -> None:
    lines = rendering.frame({}, 79, PLAIN)
    assert lines[1:] == ["◐ forming", "  no members yet", "  no incidents"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"phase": "looking", "open_incident": opened()}, "◐ finding out which rank hangs"),
        ({"phase": "securing", "open_incident": opened()}, "◐ securing the state"),
        ({"phase": "securing", "own_state": True}, "◐ stopping"),
        ({"phase": "securing", "own_state": True, "open_incident": opened()}, "◐ restarting"),
        ({"open_incident": opened()}, "◐ restarting"),
        ({"step": None}, "◐ starting"),
        ({"phase": "stopping"}, "◐ stopping"),
        ({"phase": "ended"}, "● ended"),
        ({"phase": "of a later version"}, "◐ of a later version"),
    ],
)
def test_every_phase_is_described_in_plain_words(changed: dict[str, Any], said: str) -> None:
    assert rendering.frame(status(**changed), 79, PLAIN)[1].startswith(said)


def test_an_open_incident_is_shown_before_the_last_one() -> None:
    last = rendering.frame(status(phase="securing", open_incident=opened(2)), 79, PLAIN)[-1]
    assert last == "  rank 1 was killed by SIGKILL at step 812"


def test_many_incidents_are_counted() -> None:
    assert rendering.frame(status(incidents=3), 100, PLAIN)[-1].endswith("step 812  (3 incidents)")


def test_a_narrow_terminal_shortens_the_description_of_an_incident_but_not_its_outcome() -> None:
    last = rendering.frame(status(), 40, PLAIN)[-1]
    assert last.startswith("  back in 0.13 s, 0 steps lost: ")


def test_the_end_time_is_shown_if_the_script_gives_its_number_of_steps() -> None:
    told = rendering.frame(status(total_steps=6000), 100, PLAIN)[1]
    assert "step 1,234 of 6,000   loss 2.413   14.2 steps/s   5 min 36 s left" in told
    assert "step 1,234 of 6,000  loss" in rendering.progress(status(total_steps=6000))


@pytest.mark.parametrize("total", [None, 0, 1000])
def test_an_implausible_number_of_steps_is_not_shown(total: int | None) -> None:
    told = rendering.frame(status(total_steps=total), 100, PLAIN)[1]
    assert "step 1,234   loss" in told
    assert "left" not in told


def test_the_final_frame_states_the_reason_for_the_end() -> None:
    found = status(phase="ended", message="all ranks\nhave finished")
    lines = rendering.frame(found, 79, PLAIN)
    assert lines[-1] == "  all ranks have finished"
    assert not [line for line in lines if "m-0" in line], "ended members are not worth a line"


def test_a_silent_supervisor_is_reported() -> None:
    assert "no update from the supervisor" not in rendering.frame(status(), 79, PLAIN, 2.0)[1]
    assert "no update from the supervisor for 5.0 s" in rendering.frame(status(), 79, PLAIN, 5.0)[1]


def test_failing_storage_is_reported() -> None:
    failing = {"step": 1200, "path": "p", "error": "No space left on device"}
    line = rendering.frame(status(checkpoint=failing), 100, PLAIN)[2]
    assert "storage: No space left on device" in line


def test_members_show_their_ranks_as_signs() -> None:
    found = status(
        members=[
            member("m-0", [0, 1]),
            member("m-1", [2], connected=False),
            member("m-2", [], role="lost"),
            member("m-3", [], parked=0),
        ],
        ranks=[rank(0, "m-0"), rank(1, "m-0", state="starting"), rank(2, "m-1")],
    )
    shown = rendering.frame(found, 79, PLAIN)[3]
    assert shown == "  m-0 ●◐   m-1 ✕   m-2 ✕ lost   m-3 ◐ standby"


def test_members_that_do_not_fit_are_counted() -> None:
    names = [f"member-{number}" for number in range(64)]
    members = [member(name, [2 * n, 2 * n + 1]) for n, name in enumerate(names)]
    ranks = [rank(number, "m", state="running") for number in range(127)]
    line = rendering.frame(status(members=members, ranks=ranks), 79, PLAIN)[3]
    assert line == "  64 members   ● 127 running   ◐ 1 starting"


@given(st.integers(0, 200), st.booleans(), st.booleans(), st.sampled_from([2, 40]))
def test_no_line_is_wider_than_the_terminal(width: int, colour: bool, unicode: bool, members: int) -> None:
    found = status(
        members=[member(f"メンバー-{n}", [n]) for n in range(members)],
        checkpoint={"step": 1, "path": "p", "error": "x" * 300},
        message="é" * 300,
    )
    for changed in ({}, {"open_incident": opened()}, {"phase": "saving"}):
        for line in rendering.frame({**found, **changed}, width, Style(colour, unicode), 9.0):
            assert width_of(line) <= max(1, width)


def test_a_log_line_has_the_essential_figures() -> None:
    assert rendering.progress(status()) == "step 1,234  loss 2.413  14.2 steps/s  generation 3  ETTR 99.21 %"
    bare = json.loads('{"step": null, "phase": "forming"}')
    assert rendering.progress(bare) == "forming  generation 0  ETTR 0.0 %"


def test_a_change_of_phase_is_a_line() -> None:
    assert rendering.phase_line(status()) == "generation 3 runs: 2 ranks on 2 members"
    assert rendering.phase_line({"phase": "forming", "message": "1 of 2 members\nare ready"}) == (
        "forming: 1 of 2 members are ready"
    )


HELD = {
    "no_step_s": 14.0,
    "hang_limit_s": 60.0,
    "waiting_for": "rank 0 has been in load (data.py:7) (waiting for a file system) since step 5",
    "rate": None,
}


def test_while_no_step_ends_the_screen_and_the_log_state_the_reason_and_the_limit() -> None:
    held = status(**HELD)
    assert rendering.stalled(held) == "no step for 14 s (limit 60 s)"
    assert f"no step for 14 s (limit 60 s): {HELD['waiting_for']}" in rendering.progress(held)
    frame = rendering.frame(held, 100, PLAIN)
    assert "no step for 14 s (limit 60 s)" in frame[1]
    assert frame[1].startswith(PLAIN.sign("half")), "the sign of a run that needs attention"
    assert frame[-1] == f"  {HELD['waiting_for']}"
    assert rendering.stalled(status(**HELD | {"hang_limit_s": None})) == "no step for 14 s"


def test_a_moment_without_a_step_and_a_recovery_are_not_mentioned() -> None:
    for changed in ({"no_step_s": None}, {"no_step_s": 1.0}, {"phase": "securing"}):
        assert rendering.stalled(status(**HELD | changed)) == ""


def test_the_steps_of_a_script_that_keeps_its_own_state_start_over_with_it() -> None:
    its_own = {"own_state": True, "ettr": None, "total_steps": None}
    again = rendering.progress(status(**its_own))
    assert again == (
        "optimizer step 1,234 since the restart  loss 2.413  14.2 steps/s  generation 3  ETTR unknown"
    )
    first = rendering.progress(status(**{**its_own, "ettr": 0.5}, generation=1))
    assert first == "step 1,234  loss 2.413  14.2 steps/s  generation 1  ETTR 50.0 %"
    assert "ETTR unknown" in rendering.frame(status(**its_own), 120, PLAIN)[1]


def test_a_group_that_is_smaller_than_requested_is_shown_with_both_numbers() -> None:
    assert " on 2 members" in rendering.generation(status())
    assert " on 2 of 3 members" in rendering.generation(status(group={"members": 2, "of": 3}))
