from __future__ import annotations

import re
from typing import Any

import pytest

from supervisor.display import live as terminal
from supervisor.display import screen as screens
from supervisor.display.ansi import Style
from supervisor.display.live import LiveDisplay, PlainDisplay
from supervisor.display.news import IncidentRecords
from tests.unit.supervisor.status_samples import Terminal, incident, opened, rank, status

PLAIN = Style(False, True)
RULE = "─"


class Pipe(Terminal):
    """Keeps the text that is written to it."""

    def write(self, text: str) -> None:
        self.writes.append(text)


def frame_of(shown: list[str]) -> list[str]:
    """Return the frame. The text above it must not contain another one."""
    [at] = [n for n, line in enumerate(shown) if line.startswith(RULE)]
    return shown[at + 1 :]


def test_the_frame_is_drawn_in_place() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    for step in range(50):
        live.update(status(step=step), step * 1.0)
    frame = frame_of(screen.shown())
    assert len(frame) == 4
    assert "step 49" in frame[0]


def test_output_of_ranks_scrolls_above_the_frame() -> None:
    screen = Terminal(lines=10)
    live = LiveDisplay(screen)
    for step in range(30):
        live.line(step % 2, f"line {step}")
        live.update(status(step=step, last_incident=None), step * 1.0)
    shown = screen.shown()
    assert shown[:30] == [f"[rank {n % 2}] line {n}" for n in range(30)]
    assert len(frame_of(shown)) == 4


def test_lines_longer_than_the_terminal_wrap_and_are_whole() -> None:
    screen = Terminal(columns=40)
    live = LiveDisplay(screen)
    live.update(status(last_incident=None), 0.0)
    live.line(0, "x" * 100)
    live.update(status(last_incident=None), 0.1)
    shown = screen.shown()
    assert "".join(shown[:3]) == "[rank 0] " + "x" * 100
    assert len(frame_of(shown)) == 4


def test_the_frame_is_drawn_at_most_five_times_a_second_and_only_after_a_change() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    for tick in range(100):
        live.update(status(step=tick, last_incident=None), tick * 0.01)
    assert len(screen.writes) == 5
    for tick in range(100, 200):
        live.update(status(step=99, last_incident=None), 1 + tick * 0.01)
    assert len(screen.writes) == 6


def test_every_write_is_one_piece_that_a_terminal_shows_at_once() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    live.line(0, "hello")
    live.update(status(), 0.0)
    live.close()
    assert all(w.startswith("\x1b[?2026h") and w.endswith("\x1b[?2026l") for w in screen.writes)


def test_a_narrowed_terminal_shows_no_remains_of_the_old_frame() -> None:
    screen = Terminal(columns=100)
    live = LiveDisplay(screen)
    live.update(status(), 0.0)
    wide = screen.shown()
    screen = Terminal(columns=50)
    for line in wide:  # as a terminal would rewrap them
        screen.write(f"{line}\n")
    live._out = screen
    live.update(status(step=1235), 1.0)
    assert len(frame_of(screen.shown())) == 4


def test_a_low_terminal_shows_as_many_lines_as_fit() -> None:
    screen = Terminal(lines=4)
    live = LiveDisplay(screen)
    for step in range(5):
        live.update(status(step=step, last_incident=None), step * 1.0)
    assert len(screen.shown()) == 2


def test_holdfasts_messages_are_shown_at_once_above_the_frame() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    live.say("run directory d")
    assert screen.shown() == ["run directory d"]
    live.update(status(last_incident=None), 0.0)
    live.say("stopping:\na checkpoint first")
    assert screen.shown()[:3] == ["run directory d", "stopping:", "a checkpoint first"]
    assert len(frame_of(screen.shown())) == 4


def test_before_the_first_status_output_of_ranks_is_shown_at_once() -> None:
    screen = Terminal()
    LiveDisplay(screen).line(3, "early")
    assert screen.shown() == ["[rank 3] early"]


def test_an_incident_leaves_a_permanent_line() -> None:
    screen = Terminal(columns=100)
    live = LiveDisplay(screen)
    live.update(status(last_incident=None), 0.0)
    live.update(status(last_incident=None, open_incident=opened()), 1.0)
    live.update(status(last_incident=incident()), 2.0)
    live.update(status(last_incident=incident()), 3.0)
    said = "rank 1 was killed by SIGKILL at step 812"
    assert screen.shown()[:2] == [
        f"holdfast: incident i-0001: {said}",
        f"holdfast: incident i-0001: {said}; back in 0.13 s, 0 steps lost",
    ]
    assert len(frame_of(screen.shown())) == 4


def slow(**changed: object) -> dict[str, object]:
    return rank(1, "m-1", own_s=0.084, own_data_s=0.06, slow=2.71, slow_since=1204, peers_s=0.031, **changed)


SLOW = (
    "rank 1 is slow: 84 ms of its own work per step, its peers 31 ms (median), since step 1,204: "
    "data 60 ms, forward 24 ms"
)


def told(shown: list[str]) -> list[str]:
    return [line.removeprefix("holdfast: ") for line in shown if "slow" in line]


def test_a_slow_rank_leaves_a_line_at_its_beginning_and_at_its_end() -> None:
    screen = Terminal(columns=160)
    plain = PlainDisplay(screen)
    for ranks in ([rank(0, "m-0"), rank(1, "m-1")], [slow()], [slow()], [], [slow()], [rank(1, "m-1")]):
        plain.update(status(ranks=ranks), 0.0)
    assert told(screen.shown()) == [SLOW, "rank 1 is no longer slow"]


@pytest.mark.parametrize("later", [{"supervisor_pid": 78}, {"generation": 4}])
def test_another_supervisor_or_generation_starts_without_slow_ranks(later: dict[str, int]) -> None:
    screen = Terminal(columns=160)
    plain = PlainDisplay(screen)
    plain.update(status(ranks=[slow()]), 0.0)
    plain.update(status(ranks=[rank(1, "m-1")], **later), 1.0)
    plain.update(status(ranks=[slow()], **later), 2.0)
    assert told(screen.shown()) == [SLOW, SLOW]


def test_a_sidecar_or_supervisor_that_was_replaced_leaves_a_line() -> None:
    screen = Terminal(columns=160)
    plain = PlainDisplay(screen)
    first = {"name": "m0", "connected": True, "sidecar_pid": 10, "ranks": [0]}
    away, back = {**first, "connected": False}, {**first, "sidecar_pid": 11}
    for pid, each in (
        (77, first),
        (77, away),
        (77, back),
        (77, back),
        (78, back),
        (78, {**back, "sidecar_pid": None}),
    ):
        plain.update(status(supervisor_pid=pid, members=[each]), 0.0)
    assert [each for each in screen.shown() if "taken over" in each] == [
        "holdfast: a new process has taken over as the sidecar of member m0",
        "holdfast: a new process has taken over as the supervisor",
    ]


RUNS = "holdfast: generation 3 runs: 2 ranks on 2 members, from step 40 (checkpoint)"


@pytest.mark.parametrize(
    "seen",
    [
        [{"phase": "ended", "finished": True, "exit_code": 0, "ranks": []}],
        [
            {"phase": "saving", "message": "all ranks have finished: saving a checkpoint of the last step"},
            {"phase": "ended", "finished": True},
        ],
        [
            {"phase": "running"},
            {"phase": "running"},
            {"phase": "ended", "finished": True},
        ],
        [{"phase": "stopping", "message": "stopped as requested"}],
    ],
)
def test_a_group_whose_run_ended_before_it_was_shown_is_named_once(seen: list[dict[str, Any]]) -> None:
    screen = Terminal(columns=160)
    plain = PlainDisplay(screen)
    for second, changed in enumerate(seen):
        resumed = {"step": 40, "source": "checkpoint"}
        plain.update(status(resumed=resumed, last_incident=None, **changed), 1.0 * second)
    assert [line for line in screen.shown() if "generation" in line] == [RUNS]


@pytest.mark.parametrize(
    "changed",
    [
        {"phase": "ended", "message": "the script cannot start", "ranks": []},
        {"phase": "stopping", "message": "a bug, not a fault", "last_incident": incident(2, generation=3)},
        {"phase": "forming", "message": "1 of 2 members ready"},
    ],
)
def test_a_group_that_did_not_run_or_failed_is_not_named_at_the_end(changed: dict[str, Any]) -> None:
    screen = Terminal(columns=160)
    PlainDisplay(screen).update(status(**{"last_incident": None, **changed}), 0.0)
    assert not [line for line in screen.shown() if "generation 3 runs" in line]


def test_the_last_state_stays_visible_after_closing() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    live.update(status(step=1), 0.0)
    live.update(status(step=2, last_incident=None), 0.01)
    live.line(0, "the end")
    live.close()
    assert "[rank 0] the end" in screen.shown()
    assert "step 2" in frame_of(screen.shown())[0]
    assert screen.closed


def test_a_supervisor_without_new_messages_is_shown_as_silent() -> None:
    screen = Terminal(columns=110)
    live = LiveDisplay(screen)
    for second in range(6):
        live.update(status(updated=7.0), 100.0 + second)
    assert "no update from the supervisor for 5.0 s" in frame_of(screen.shown())[0]
    live.update(status(updated=8.0), 106.0)
    assert "no word" not in frame_of(screen.shown())[0]


def test_while_the_reader_is_behind_nothing_is_drawn_and_lines_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terminal, "LIVE_BYTES", 20 * len("[rank 0] line 00\n"))
    screen = Terminal()
    live = LiveDisplay(screen)
    screen.busy = True
    for number in range(10, 40):
        live.line(0, f"line {number}")
        live.update(status(), number * 1.0)
    assert screen.writes == []
    screen.busy = False
    live.update(status(), 1e6)
    shown = screen.shown()
    assert re.match(r"\[1\d lines not shown: the run's logs contain them\]", shown[0])
    assert "[rank 0] line 39" in shown


def test_a_file_or_a_pipe_that_keeps_up_gets_every_line_of_a_burst() -> None:
    screen = Pipe(style=PLAIN)
    plain = PlainDisplay(screen)
    lines = [f"{number:06d} {'x' * 100}" for number in range(20_000)]
    for number, line in enumerate(lines):
        screen.busy = number % 3 == 0
        plain.line(0, line)
    screen.busy = True
    plain.close()
    assert "".join(screen.writes) == "".join(f"[rank 0] {line}\n" for line in lines)
    assert max(map(len, screen.writes)) < 2 * terminal.PIECE_BYTES


def test_a_pipe_without_a_reader_gets_what_fits_and_the_number_of_missing_lines() -> None:
    screen = Pipe(style=PLAIN)
    plain = PlainDisplay(screen)
    screen.busy = True
    line = "[rank 0] " + "é" * 1000
    for _ in range(terminal.PLAIN_BYTES // len(line.encode()) + 100):
        plain.line(0, "é" * 1000)
    assert screen.writes == []
    plain.close()
    written = "".join(screen.writes)
    assert len(written.encode()) <= screens.FULL_BYTES - screens.BUSY_BYTES, "the output can take it"
    assert re.match(r"\[1\d\d lines not shown: the run's logs contain them\]\n", written)


def test_ranks_have_distinct_colours_and_none_without_colour() -> None:
    screen = Terminal()
    live = LiveDisplay(screen)
    live.line(0, "a")
    live.line(1, "b")
    first, second = (text.partition("[rank")[0][-5:] for text in screen.writes)
    assert first != second
    bare = Terminal(style=PLAIN)
    LiveDisplay(bare).line(0, "\x1b[31mred\x1b[0m")
    assert "\x1b[31m" not in bare.writes[0]


def test_a_log_gets_a_line_per_change_and_one_every_ten_seconds() -> None:
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    plain.update({"phase": "forming", "message": "0 of 2 members are ready"}, 0.0)
    plain.update({"phase": "forming", "message": "1 of 2 members are ready"}, 1.0)
    for second in range(2, 23):
        plain.update(status(step=second, last_incident=None, generation=1), float(second))
    assert screen.shown() == [
        "holdfast: forming: 0 of 2 members are ready",
        "holdfast: generation 1 runs: 2 ranks on 2 members",
        "holdfast: step 12  loss 2.413  14.2 steps/s  generation 1  ETTR 99.21 %",
        "holdfast: step 22  loss 2.413  14.2 steps/s  generation 1  ETTR 99.21 %",
    ]


def test_a_log_reports_an_incident_at_its_beginning_and_its_end() -> None:
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    plain.update(status(last_incident=None, generation=1), 0.0)
    plain.update(status(phase="securing", open_incident=opened(), last_incident=None), 1.0)
    plain.update(status(open_incident=opened(), last_incident=None, generation=2), 2.0)
    plain.update(status(generation=2), 3.0)
    plain.update(status(generation=2), 4.0)
    said = "incident i-0001: rank 1 was killed by SIGKILL at step 812"
    assert screen.shown() == [
        "holdfast: generation 1 runs: 2 ranks on 2 members",
        f"holdfast: {said}",
        f"holdfast: {said}; back in 0.13 s, 0 steps lost",
        "holdfast: generation 2 runs: 2 ranks on 2 members",
    ]


@pytest.mark.parametrize(
    ("changed", "shown"),
    [({}, True), ({"kind": "crash"}, False), ({"remedy": "stop"}, False)],
    ids=["nobody else failed", "another rank died", "the last line contains it"],
)
def test_ranks_that_lost_their_peers_without_a_cause_are_shown_with_the_first_ones_traceback(
    changed: dict[str, Any], shown: bool
) -> None:
    message = 'Traceback:\n  File "train.py", line 7\nRuntimeError: Timed out waiting\n'
    found = {**incident(), "kind": "victim", "message": message, **changed}
    screen = Pipe()
    log = PlainDisplay(screen)
    log.update(status(last_incident=found), 0.0)
    log.close()
    told = "".join(screen.writes).splitlines()
    lines = [line.partition("holdfast:\x1b[0m ")[2] for line in told]
    assert (lines[1:4] == message.splitlines()) == shown


def test_a_log_reports_when_checkpoints_fail_and_when_they_work_again() -> None:
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    for second, error in enumerate(
        ("", "No space left on device: 8 bytes", "No space left: 9 bytes", "", "")
    ):
        saved = {"step": 32, "path": "", "error": error}
        plain.update(status(last_incident=None, generation=1, checkpoint=saved), float(second))
    failing = "no checkpoint can be written: No space left on device: 8 bytes"
    assert screen.shown() == [
        "holdfast: generation 1 runs: 2 ranks on 2 members",
        f"holdfast: {failing}; training continues, and saving is retried",
        "holdfast: checkpoints can be written again",
    ]


def test_an_incident_that_passed_between_two_polls_is_one_line() -> None:
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    plain.update(status(last_incident=None), 0.0)
    plain.update(status(last_incident=incident(7), generation=4), 0.2)
    assert len([line for line in screen.shown() if "i-0007" in line]) == 1


def ids(screen: Terminal) -> list[str]:
    return [line.split()[2] for line in screen.shown() if line.startswith("holdfast: incident ")]


def test_a_closed_incident_is_not_reported_as_open_again() -> None:
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    plain.update(status(phase="running", last_incident=None), 0.0)
    over = incident(1, remedy="stop", recovered_s=None)
    plain.update(status(phase="saving", last_incident=over, open_incident=opened(1)), 1.0)
    plain.update(status(phase="ended", last_incident=over), 2.0)
    assert ids(screen) == ["i-0001:"]


def test_a_new_incident_is_reported_after_those_that_ended_before_it() -> None:
    screen = Terminal(columns=200, style=Style())
    held = {1: incident(1), 2: incident(2), 3: incident(3, open=True)}
    plain = PlainDisplay(screen, IncidentRecords(held.get))
    plain.update(status(last_incident=None), 0.0)
    plain.update(status(last_incident=None, open_incident=opened(3)), 1.0)
    assert ids(screen) == ["i-0001:", "i-0002:", "i-0003:"]
    held[3] = incident(3)
    plain.update(status(last_incident=None, open_incident=opened(4)), 2.0)
    plain.update(status(last_incident=incident(4)), 3.0)
    assert ids(screen)[3:] == ["i-0003:", "i-0004:", "i-0004:"]


def test_incidents_that_passed_between_two_polls_are_reported_in_order() -> None:
    screen = Terminal(columns=200, style=Style())
    held = {number: incident(number) for number in range(1, 6)}
    del held[4]
    plain = PlainDisplay(screen, IncidentRecords(held.get, before=2))
    plain.update(status(last_incident=None), 0.0)
    plain.update(status(last_incident=incident(5), open_incident=opened(6)), 1.0)
    assert ids(screen) == ["i-0003:", "i-0005:", "i-0006:"]


def test_the_final_line_is_left_to_the_caller_that_knows_the_exit_code() -> None:
    screen = Terminal(style=Style())
    PlainDisplay(screen).update(status(phase="ended", last_incident=None), 0.0)
    assert screen.shown() == []


def test_a_quiet_log_has_only_output_of_ranks_and_holdfasts_messages() -> None:
    screen = Terminal(style=Style())
    plain = PlainDisplay(screen, quiet=True)
    plain.line(0, "loss 1")
    plain.update(status(), 0.0)
    plain.say("the end")
    plain.close()
    assert screen.shown() == ["[rank 0] loss 1", "the end"]
    assert screen.closed


@pytest.mark.parametrize("busy", [True, False])
def test_a_log_without_a_reader_blocks_nothing(busy: bool) -> None:
    screen = Terminal(style=Style())
    screen.busy = busy
    plain = PlainDisplay(screen)
    for number in range(100):
        plain.line(0, str(number))
    plain.update({}, 0.0)
    assert bool(screen.writes) is not busy


def test_messages_of_scripts_reach_the_frame_without_escape_codes() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x1b[1;1Hboom"
    for shown in (opened(1, why=hostile, message=hostile), None):
        screen = Terminal()
        last = incident(1, why=hostile, message=hostile)
        LiveDisplay(screen).update(status(open_incident=shown, last_incident=last, message=hostile), 1.0)
        written = "".join(screen.writes)
        assert "\x1b]" not in written
        assert "\x1b[2J" not in written


def test_failure_to_create_warm_processes_is_reported_once_and_so_is_its_end() -> None:
    out = Pipe()
    plain = PlainDisplay(out)
    why = "warm processes for member m0 cannot be created: a process raised OSError; a fault now requires"
    other = why.replace("OSError", "another OSError")
    need = "warm processes for member m0 cannot be created: a process raised OSError; the ranks wait for them"
    for error, parked in (
        ("", 1),
        (why, 0),
        (other, 0),
        (why, 0),
        (need, 0),
        ("", 0),
        ("", 1),
        (why, 0),
    ):
        member = {"name": "m0", "parked": parked, "warm_error": error}
        member |= {"warm_awaited": True} if error == need else {}
        plain.update(status(members=[member], warnings=[error] * bool(error), last_incident=None), 0.0)
    told = [line for line in "".join(out.writes).splitlines() if "warm" in line]
    again = "warm processes for member m0 are available again"
    assert [re.sub(r"^.*?(?=warm)", "", line) for line in told] == [why, need, again, why]


def test_a_recovery_that_takes_long_is_not_silent() -> None:
    """A rank that hangs again in its first step is restarted only after `--first-step-timeout`."""
    screen = Terminal(columns=200, style=Style())
    plain = PlainDisplay(screen)
    plain.update(status(), 0.0)
    plain.update(status(phase="securing", open_incident=opened(), last_incident=None), 1.0)
    for now_s in (5.0, 10.9):
        plain.update(status(open_incident=opened(), generation=2), now_s)
    assert not [line for line in screen.shown() if "not recovered" in line]
    for now_s in (11.1, 15.0, 21.2):
        plain.update(status(open_incident=opened(), generation=2), now_s)
    plain.update(status(generation=2), 22.0)
    assert [line for line in screen.shown() if "not recovered" in line] == [
        f"holdfast: not recovered for {age}: generation 2 has completed no step yet"
        " (its limit is --first-step-timeout)"
        for age in ("10 s", "20 s")
    ]
