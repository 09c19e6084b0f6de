from __future__ import annotations

import re
from typing import get_args

from supervisor.cli import incidents
from supervisor.cli.incidents import explanation
from supervisor.display.ansi import Style
from supervisor.observability.incident_record import RecoveryStage
from tests.unit.supervisor.status_samples import incident, opened

PLAIN = Style(False, True)


def section(lines: list[str], title: str) -> list[str]:
    begin = lines.index(title) + 1
    end = lines.index("", begin) if "" in lines[begin:] else len(lines)
    return [line.strip() for line in lines[begin:end]]


def test_the_end_of_the_log_of_a_rank_that_was_killed_is_not_called_its_message() -> None:
    """Its last line may be about anything, such as the last checkpoint."""
    killed = explanation(incident(kind="crash", message="INFO saved step 5"), PLAIN)
    assert section(killed, "Last output of the rank") == ["INFO saved step 5"]
    assert "Message of the rank" not in killed
    raised = "Traceback (most recent call last):\nValueError: no"
    for kind in ("crash", "exception"):
        found = explanation(incident(kind=kind, message=raised), PLAIN)
        assert section(found, "Message of the rank")[-1] == "ValueError: no"


def test_waiting_for_a_member_is_not_called_securing() -> None:
    timeline = [
        {"what": "fault", "at_s": 0.0},
        {"what": "secured", "at_s": 0.05},
        {"what": "manned", "at_s": 6.3},
        {"what": "decided", "at_s": 6.3},
    ]
    lines = section(explanation(incident(timeline=timeline), PLAIN), "From the fault to the first new step")
    rows = [re.split(r"  +", line.strip())[:2] for line in lines]
    assert rows == [
        ["the fault", "0.0 ms"],
        ["the survivors' state secured", "50.0 ms"],
        ["enough members ready", "6,300.0 ms"],
        ["decided", "6,300.0 ms"],
    ]


def test_an_incident_is_explained_from_evidence_to_the_first_new_step() -> None:
    lines = explanation(incident(), PLAIN)
    assert lines[0] == "i-0001  rank 1 was killed by SIGKILL at step 812"
    assert lines[1].endswith("back in 0.13 s, 0 steps lost")
    assert section(lines, "What was seen") == [
        "rank 1 was killed by SIGKILL",
        "rank 0 is only a victim",
    ]
    assert section(lines, "What was decided") == [
        "restart the processes in place, from the snapshot of step 812",
        "resumed at step 812, from a snapshot in memory, taken by the group that failed (generation 2)",
        "0 steps lost",
    ]


def test_a_decision_known_only_as_a_sentence_is_shown_whole() -> None:
    why = incident()["why"]
    older = incident(decision={"action": "restart", "why": why})
    assert section(explanation(older, PLAIN), "What was decided")[0] == why


def test_a_state_from_before_the_failed_group_is_distinguished_from_that_groups_own() -> None:
    older = {**incident()["resume"], "generation": 1}
    assert section(explanation(incident(resume=older), PLAIN), "What was decided")[1] == (
        "resumed at step 812, from a snapshot in memory, taken by an earlier group"
        " (generation 1; generation 2 failed)"
    )


def test_the_cause_is_shown_before_its_victims() -> None:
    victim = {"kind": "victim", "rank": 0, "detail": "rank 0 lost its peers (connection closed by peer)"}
    found = incident(faults=[victim, *incident()["faults"]])
    assert section(explanation(found, PLAIN), "What was seen")[:2] == [
        "rank 1 was killed by SIGKILL",
        "rank 0 lost its peers (rank 1 ended)",
    ]


RAISED = """Traceback (most recent call last):
  File "/home/u/train.py", line 31, in <module>
    main()
  File "/home/u/data.py", line 17, in batch
    raise ValueError("no such shard")
  File "/opt/venv/lib/python3.11/site-packages/torch/x.py", line 5, in f
    pass
ValueError: no such shard
"""


def test_an_exception_is_shown_with_the_line_of_the_script_that_raised_it() -> None:
    fault = {"kind": "exception", "rank": 1, "detail": "rank 1 raised ValueError: no", "message": RAISED}
    victim = {"kind": "victim", "rank": 0, "detail": "rank 0 lost its peers", "message": RAISED}
    lines = explanation(incident(kind="exception", faults=[victim, fault], message=RAISED), PLAIN)
    assert lines[0] == "i-0001  rank 1 raised ValueError: no at step 812 (data.py, line 17)"
    assert section(lines, "What was seen")[:2] == [
        "rank 1 raised ValueError: no (data.py, line 17)",
        "rank 0 lost its peers (rank 1 ended)",
    ]


def test_the_timeline_shows_where_the_time_went() -> None:
    lines = explanation(incident(), PLAIN)
    assert section(lines, "From the fault to the first new step") == [
        "the fault             0.0 ms",
        "noticed               3.0 ms  █",
        "decided              50.0 ms   ███████████████████",
        "first new step      100.0 ms                      ████████████████████",
    ]


def test_equal_stacks_are_shown_once_with_their_ranks() -> None:
    lines = explanation(incident(), PLAIN)
    assert section(lines, "Where ranks 0, 2-3 were") == [
        'Thread "MainThread"',
        "all_reduce (dist.py)",
    ]
    assert section(lines, "Where rank 1 was")[-1] == "sleep (train.py)"


def test_the_last_output_of_the_ranks_is_shown_whole() -> None:
    lines = explanation(incident(message="Traceback\n  File\nValueError: x\n"), PLAIN)
    assert lines[-3:] == ["  Traceback", "    File", "  ValueError: x"]


def test_a_run_that_started_over_is_reported_as_such() -> None:
    resume = {"step": 0, "source": "none", "generation": 0}
    lines = explanation(incident(resume=resume, lost_steps=812), PLAIN)
    assert "  resumed from the beginning, because no usable state was left" in lines
    assert "  812 steps lost" in lines


def test_an_open_incident_is_explained_as_far_as_it_is_known() -> None:
    found = opened(resume=None, timeline=[], stacks=[], decision=None, why="", evidence=None)
    lines = explanation(found, PLAIN)
    assert lines[1].endswith("not recovered yet")
    assert "What was decided" not in lines
    assert "From the fault to the first new step" not in lines


def test_a_sparse_incident_is_still_explained() -> None:
    assert explanation({"id": "i-0009", "at": float("inf")}, PLAIN)[0] == "i-0009  a rank failed"


def test_output_of_a_script_cannot_move_the_cursor() -> None:
    found = incident(message="\x1b[2Jboo", stacks=[{"ranks": [0], "stack": "\x1b]0;t\x07x"}])
    text = "".join(explanation(found, PLAIN))
    assert "\x1b" not in text
    assert "boo" in text


def test_titles_are_bold_on_a_colour_terminal() -> None:
    assert "\x1b[1mWhat was seen\x1b[0m" in "\n".join(explanation(incident(), Style(True, True)))


def test_a_script_that_keeps_its_own_state_is_reported_to_start_over_with_it() -> None:
    resume = {"step": 0, "source": "none", "generation": 0}
    timeline = [{"what": what, "at_s": 0.01} for what in ("fault", "secured", "decided")]
    found = incident(resume=resume, lost_steps=None, own_state=True, timeline=timeline)
    lines = explanation(found, PLAIN)
    assert "secured" not in "".join(lines)
    began = "restarted the script from its first line, because it keeps its own state"
    assert f"  {began}; the number of steps to repeat is unknown" in lines


def test_uncountable_steps_are_reported_as_unknown() -> None:
    lines = explanation(incident(lost_steps=None), PLAIN)
    assert lines[1].endswith("back in 0.13 s, number of lost steps unknown")
    assert "  steps lost: unknown, because all processes that knew the step died" in lines


def test_each_stage_of_a_recovery_has_its_words() -> None:
    assert tuple(incidents._MEANING) == get_args(RecoveryStage)


def test_an_incident_says_which_pods_were_created_without_holdfast() -> None:
    said = "pod gpt-1 was created without Holdfast"
    assert section(explanation(incident(missed_pods=[said]), PLAIN), "Pods without Holdfast") == [said]
    assert "Pods without Holdfast" not in explanation(incident(), PLAIN)
