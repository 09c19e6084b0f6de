from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supervisor.cli import incidents
from supervisor.cli.status import lines
from tests.unit.supervisor.status_samples import incident, member, opened, rank, status

HERE = Path("runs/a")


def page(*, alive: bool = True, live: bool = True, age_s: float = 0.0, **changed: Any) -> list[str]:
    found = status(**changed)
    return lines(found, alive=alive, live=live, now_s=1_000_000.0 + age_s, path=HERE, name="run a-run")


def test_the_output_that_explains_the_end_follows_the_status() -> None:
    said = 'hello\nTraceback (most recent call last):\n  File "a.py", line 2\nNameError: \x1b[2Jx\n'
    shown = page(alive=False, phase="ended", exit_code=1, traceback=said)
    assert shown[shown.index("Last output of the process that failed") :] == [
        "Last output of the process that failed",
        "  hello",
        "  Traceback (most recent call last):",
        '    File "a.py", line 2',
        "  NameError: x",
    ]
    long = page(phase="ended", traceback="\n".join(map(str, range(5_000))))
    assert long[-1] == "  4999"
    assert len(long) < 100
    assert "Last output of the process that failed" not in page(traceback="")


def test_nothing_is_safe_in_memory_after_the_end() -> None:
    lines = page(alive=False, phase="ended", checkpoint=None)
    assert not any("secured" in line or "snapshot" in line for line in lines)


def test_the_status_shows_the_phase_what_is_safe_and_where_the_time_went() -> None:
    assert page() == [
        "run a-run: running",
        "",
        "  progress    step 1,234  loss 2.413  14.2 steps/s  generation 3  ETTR 99.21 %  (70 ms per step)",
        "  state       secured 1,234  snapshot 1,230  checkpoint 1,200",
        "  ETTR        99.21 % of 100 s; 99.00 % of the last hour",
        "  incidents   1; last i-0001: rank 1 was killed by SIGKILL at step 812; back in 0.13 s,"
        " 0 steps lost",
        "  message     generation 3 has completed its first step",
        "  directory   runs/a",
        "",
        "Ranks",
        "  RANK  MEMBER   PID  STATE     STEP  STEP TIME    P99    OWN  DOING",
        "     0  m-0     4000  running  1,234      70 ms  80 ms  31 ms  forward",
        "     1  m-1     4001  running  1,234      70 ms  80 ms  31 ms  forward",
        "     -  m-2        -  standby      -          -      -      -  2 warm",
        "",
        "Where the time went",
        "  training                                  96 s    95.5 %",
        "  fetching state, starting processes       4.0 s     4.0 %",
        "  lost (trained, then rolled back)        0.50 s     0.5 %",
        "  noticing faults                           4 ms   < 0.1 %",
    ]


def test_while_no_step_ends_the_status_does_not_look_like_training() -> None:
    shown = page(no_step_s=45.0, hang_limit_s=61.0, waiting_for="rank 1 has been in a", pending_s=50.0)
    assert shown[0] == "run a-run: running, but no step for 45 s (limit 61 s)"
    assert "no step for 45 s (limit 61 s): rank 1 has been in a" in shown[2]
    times = [line.split() for line in shown[shown.index("Where the time went") + 1 :]]
    assert times[0][:3] == ["training", "100", "s"]
    assert " ".join(times[1]) == "no step completed (slow step, or a hang) 45 s 45.0 %"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"live": True}, "running"),
        ({"live": False, "age_s": 1.0}, "running"),
        ({"live": False, "age_s": 9.0}, "running, 9.0 s ago; its supervisor does not respond"),
        ({"live": False, "alive": False, "age_s": 90.0}, "died while running, 90 s ago"),
        ({"live": False, "alive": False, "phase": "ended", "exit_code": 0}, "ended with exit code 0"),
        ({"live": False, "alive": False, "phase": "ended"}, "ended"),
    ],
)
def test_the_first_line_shows_the_age_of_the_status(changed: dict[str, Any], said: str) -> None:
    assert page(**changed)[0] == f"run a-run: {said}"


def test_the_ranks_of_a_run_that_was_killed_are_not_shown_as_running() -> None:
    shown = page(alive=False, live=False, age_s=90.0)
    rows = [line.split() for line in shown[shown.index("Ranks") + 2 :]][:2]
    assert [(row[3], row[-1]) for row in rows] == [("unknown", "-"), ("unknown", "-")]
    assert not any(line.split()[3:4] == ["running"] for line in shown[shown.index("Ranks") :])


def test_the_open_incident_failing_storage_and_skipped_steps_are_shown() -> None:
    lines = "\n".join(
        page(
            open_incident=opened(2),
            incidents=2,
            checkpoint={"step": None, "error": "No space left on device"},
            skip=[7, 9],
        )
    )
    assert "incidents   2; now i-0002: rank 1 was killed by SIGKILL at step 812" in lines
    assert "storage error: No space left on device" in lines
    assert "skipped steps 7, 9" in lines


def test_slow_ranks_are_listed_slowest_first_up_to_a_limit() -> None:
    slow = [rank(n, "m-0", own_s=0.03 * n, slow=float(n), slow_since=1200, peers_s=0.03) for n in range(2, 9)]
    lines = [line for line in page(ranks=slow) if line.startswith("  slow")]
    peers = "its peers 30 ms (median), since step 1,200: data 4 ms, forward"
    assert lines[0] == f"  slow        rank 8: 0.24 s of its own work per step, {peers} 0.24 s"
    assert len(lines) == 6
    assert lines[5] == "  slow        and 2 more"


def test_a_run_that_has_just_started_has_a_short_page() -> None:
    found = {"phase": "forming", "message": "1 of 2 members are ready", "members": [member("m", [])]}
    shown = lines(found, alive=True, live=True, now_s=0.0, path=HERE, name="run a")
    assert shown[:5] == [
        "run a: forming",
        "",
        "  incidents   0",
        "  message     1 of 2 members are ready",
        "  directory   runs/a",
    ]


def test_incidents_are_a_table() -> None:
    lost = incident(2, kind="member_lost", rank=-1, step=None, recovered_s=None, lost_steps=None)
    lost["faults"] = [{"kind": "member_lost", "rank": -1, "detail": "member m-1 is lost"}]
    assert incidents.lines([incident(), lost]) == [
        "ID      KIND         RANK  STEP  NOTICED  BACK IN  LOST  REMEDY   WHAT HAPPENED",
        "i-0001  crash           1   812     3 ms   0.13 s     0  restart  rank 1 was killed by SIGKILL",
        "i-0002  member_lost     -     -     3 ms        -     -  restart  member m-1 is lost",
    ]
    assert incidents.lines([]) == ["no incidents"]


def test_unknown_figures_of_a_script_that_keeps_its_own_state_are_marked() -> None:
    buckets = {"productive": 35.0, "unknown": 50.0, "start": 15.0}
    its_own: dict[str, Any] = {"ettr": None, "ettr_hour": None, "own_state": True, "secured_step": None}
    lines = page(**its_own, buckets_s=buckets, pending_s=0.0)
    assert "  ETTR        unknown (the script keeps its own state)" in lines
    assert any(line.startswith("  progress    optimizer step 1,234 since the restart") for line in lines)
    assert not any("secured" in line for line in lines)
    [told] = [line.split() for line in lines if "before a restart" in line]
    assert told[-4:] == ["50", "s", "50.0", "%"]


def test_the_cost_of_a_restart_of_a_script_that_keeps_its_own_state_is_a_question_mark() -> None:
    resume = {"step": 0, "source": "none", "generation": 2}
    old = incident(lost_steps=None, resume=resume)  # from a version that did not record whose state it is
    new = incident(lost_steps=None, resume={**resume, "source": "checkpoint"}, own_state=True)
    ended = incident(lost_steps=None, resume=None, remedy="stop", own_state=True)
    rows = incidents.lines([old, new, ended])[1:]
    assert [row[row.index("0.13 s") :].split()[2] for row in rows] == ["?", "?", "-"]


def test_the_cost_of_a_loss_without_survivors_is_a_question_mark() -> None:
    resume = {"step": 128, "source": "checkpoint", "generation": 1}
    [row] = incidents.lines([incident(lost_steps=None, step=-1, rank=0, resume=resume)])[1:]
    cells = row.split()
    assert (cells[3], cells[cells.index("restart") - 1]) == ("?", "?")
    ettr = [line for line in page(ettr=None, ettr_hour=None) if line.startswith("  ETTR")]
    assert ettr == ["  ETTR        unknown (all processes that knew the step count were lost)"]


def test_standbys_and_members_that_are_about_to_end_are_shown() -> None:
    standbys = {
        "wanted": 2,
        "ready": 1,
        "problem": "no node has room",
        "pods": [
            {"name": "gpt-standby-1", "node": "n3", "state": "idle"},
            {"name": "gpt-standby-2", "node": "", "state": "unscheduled"},
        ],
        "gpus": 8,
        "cores": "1.5",
        "gpuHours": "4",
        "coreHours": "0.75",
    }
    shown = page(
        members=[{**member("m-0", [0]), "leaving": "node n1 is quarantined:\nXid 79"}], standbys=standbys
    )
    assert [each.strip() for each in shown if each.strip().startswith(("leaving", "standbys"))] == [
        "leaving     m-0 is about to end: node n1 is quarantined: Xid 79",
        "standbys    1 of 2 ready; gpt-standby-1 idle on n3; gpt-standby-2 unscheduled",
        "standbys    reserve 8 GPUs and 1.5 cores; 4 GPU hours and 0.75 core hours so far",
        "standbys    missing: no node has room",
    ]


def test_the_note_of_a_script_is_one_line_of_the_status() -> None:
    ranks = [{"rank": 0, "note": "slow disk\n  state  all is saved\x1b[2J"}]
    assert "  warning     slow disk   state  all is saved" in page(ranks=ranks)
