from __future__ import annotations

from pathlib import PurePath
from typing import Any

import pytest

from supervisor.cli import run_messages
from supervisor.view.model import Completion
from tests.unit.supervisor.status_samples import status

HERE = PurePath("runs/a b")
WORDS = ("--members", "2", "--", "python", "train.py", "--name", "a b")


def said(code: int, **changed: Any) -> list[str]:
    return run_messages.after(status(**changed), code, WORDS, HERE)


@pytest.mark.parametrize("code", [1, 3, 130, 137])
def test_a_run_that_failed_says_how_to_resume_it(code: int) -> None:
    line = "holdfast run --resume --run-dir 'runs/a b' --members 2 -- python train.py --name 'a b'"
    where = "the checkpoint of step 1,200 is runs/a b/checkpoints/step-00001200"
    assert said(code) == [where, f"resume with: {line}"]


def test_a_run_that_a_bad_batch_has_ended_is_resumed_without_that_batch() -> None:
    last = {"kind": "nan", "rank": 1, "step": 70}
    *_, line = said(1, last_incident=last)
    assert line == (
        "resume, which skips the batch that produces a bad number, with:"
        " holdfast run --resume --run-dir 'runs/a b' --skip-bad-batches"
        " --members 2 -- python train.py --name 'a b'"
    )
    for code, changed in ((130, {}), (1, {"own_state": True}), (1, {"last_incident": {"kind": "crash"}})):
        *_, line = said(code, **{"last_incident": last} | changed)
        assert "--skip-bad-batches" not in line
    given = ("--skip-bad-batches", *WORDS)
    *_, line = run_messages.after(status(last_incident=last), 1, given, HERE)
    assert line.count("--skip-bad-batches") == 1


@pytest.mark.parametrize("earlier", [None, {"exit_code": 1, "step": 0}, {"exit_code": None, "step": None}])
def test_a_resumed_run_that_finds_nothing_says_where_it_looked(earlier: dict[str, Any] | None) -> None:
    found = "--resume: there is no checkpoint in runs/a b/checkpoints, so training starts at step 0"
    assert run_messages.before(earlier, HERE, stored=False, resumes=True) == [found]
    assert run_messages.before(earlier, HERE, stored=True, resumes=True) == []
    assert run_messages.before({"own_state": True, "step": 3}, HERE, stored=False, resumes=True) == []
    died = {"exit_code": 1, "step": 1170, "checkpoint": None}
    [line] = run_messages.before(died, HERE, stored=False, resumes=True)
    assert "had reached step 1,170" in line


def test_resuming_is_not_offered_without_a_checkpoint_or_with_refused_input() -> None:
    assert said(130, checkpoint=None) == []
    assert said(130, checkpoint={"step": None, "path": None, "error": "No space left"}) == []
    assert said(2, step=0) == []
    assert said(2, step=None) == []
    assert said(2, step=1200, resumed={"step": 1200, "source": "checkpoint"}) == []


@pytest.mark.parametrize(
    "resumed", [None, {"step": 1200, "source": "checkpoint"}, {"step": 1234, "source": "slot"}]
)
def test_a_script_that_failed_after_training_says_how_to_resume(
    resumed: dict[str, Any] | None,
) -> None:
    *_, line = said(2, resumed=resumed)
    assert line.startswith("resume with: holdfast run --resume --run-dir ")


def test_a_run_resumed_at_its_end_reports_that_there_was_nothing_to_do() -> None:
    done = {"step": 1234, "source": "checkpoint"}
    [line] = said(0, resumed=done, step=1234)
    assert line.startswith("nothing to do: the state in runs/a b is already at step 1,234")
    assert said(0, resumed=done, step=1235) == []
    assert said(0, resumed=None, step=0) == []
    assert said(0, resumed={"step": 1234, "source": "slot"}, step=1234) == []


def test_a_finished_run_is_not_trained_again_silently() -> None:
    ended = {"exit_code": 0, "step": 1200, "checkpoint": {"step": 1050}}
    [line] = run_messages.before(ended, HERE, stored=True)
    assert "already finished, at step 1,200; its newest checkpoint is from step 1,050" in line
    assert "so the later steps will be trained again" in line
    [line] = run_messages.before({**ended, "checkpoint": None}, HERE, stored=True)
    assert "it has no checkpoint" in line
    assert run_messages.before({**ended, "checkpoint": {"step": 1200}}, HERE, stored=True) == [], (
        "nothing is left to do, as the run's last line said"
    )
    assert run_messages.before({**ended, "exit_code": 1}, HERE, stored=True) == []
    assert run_messages.before({**ended, "exit_code": None}, HERE, stored=True) == []
    assert run_messages.before({**ended, "step": "x"}, HERE, stored=True) == []
    assert run_messages.before(None, HERE, stored=True) == []


@pytest.mark.parametrize("code", [None, 1, 130, 137])
def test_a_run_without_a_checkpoint_does_not_start_over_silently(code: int | None) -> None:
    died = {"exit_code": code, "step": 1170, "checkpoint": None, "own_state": False}
    assert run_messages.before(died, HERE, stored=False) == [
        "the run in runs/a b had reached step 1,170 and left no checkpoint: there is nothing to resume from,"
        " so training starts at step 0"
    ]
    assert run_messages.before({**died, "own_state": True}, HERE, stored=False) == [], (
        "the script knows where to continue"
    )
    assert run_messages.before({**died, "step": 0}, HERE, stored=False) == []
    assert run_messages.before(died, HERE, stored=True) == [], (
        "the run resumes, or is refused with a list of the states"
    )


def test_the_first_signal_promises_a_checkpoint_only_if_there_will_be_one() -> None:
    assert run_messages.stopping(status(), "SIGINT", 30.0) == "saving a checkpoint, then stopping"
    for early in ({}, status(phase="forming")):
        assert run_messages.stopping(early, "SIGINT", 30.0) == "stopping"
    for name, sent in (("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")):
        line = f"stopping: the script receives {sent} and has 30 s to save its state and exit"
        assert run_messages.stopping(status(own_state=True), name, 30.0) == line


LEFT = "rank 0 left its loop"
UNSAVED = "no checkpoint of step 61 could be written: full; there is no other"


@pytest.mark.parametrize(
    ("completion", "changed", "says"),
    [
        (Completion(), {"checkpoint": {"step": 500}}, ", with a checkpoint of step 500"),
        (
            Completion(incidents=2),
            {"checkpoint": {"step": 500}},
            " after 2 incidents, with a checkpoint of step 500",
        ),
        (Completion(), {"checkpoint": {"step": 480}}, ""),
        (
            Completion(),
            {"step": 61, "checkpoint": {"step": 61}},
            ", after 61 of 500 steps, with a checkpoint of step 61",
        ),
        (Completion(), {"step": 61, "checkpoint": None}, ", after 61 of 500 steps, without a checkpoint"),
        (
            Completion(notes=(LEFT, "and so did rank 1")),
            {"step": 61, "checkpoint": {"step": 40}},
            f", after 61 of 500 steps, the newest checkpoint is from step 40; {LEFT}; and so did rank 1",
        ),
        (
            Completion(UNSAVED, (LEFT,), 1),
            {"step": 61, "checkpoint": None},
            f" after 1 incident, after 61 of 500 steps, but {UNSAVED}; {LEFT}",
        ),
        (Completion(), {"step": 0, "total_steps": None, "checkpoint": {"step": 0}}, ""),
    ],
)
def test_the_last_line_states_how_far_the_script_got_and_what_is_saved(
    completion: Completion, changed: dict[str, Any], says: str
) -> None:
    last = status(**{"step": 500, "total_steps": 500, "checkpoint": None, "own_state": False, **changed})
    assert run_messages.closing_line("the sentence", completion, last) == f"all ranks have finished{says}"


@pytest.mark.parametrize(
    ("completion", "changed"),
    [
        pytest.param(None, {}, id="the script has not finished, or only the sentence is known"),
        pytest.param(Completion(), {"own_state": True}, id="the script keeps its own state"),
        pytest.param(Completion(), {"step": None}, id="the step is not known"),
    ],
)
def test_the_last_line_is_only_the_sentence_if_nothing_can_be_added(
    completion: Completion | None, changed: dict[str, Any]
) -> None:
    last = status(**{"step": 61, "total_steps": 500, "checkpoint": None, "own_state": False, **changed})
    why = "all ranks have finished; rank 0 left its loop, but not rank 1"
    assert run_messages.closing_line(why, completion, last) == why


def test_a_time_in_two_words_gets_a_hint() -> None:
    given = ("--checkpoint-every", "5", "minutes", "train.py")
    assert run_messages.time_hint(given) == "write a time as one word, 5m"
    assert run_messages.time_hint(("--checkpoint-every", "5", "Sec", "train.py")).endswith(" 5s")
    assert run_messages.time_hint(("--nproc-per-node", "2", "train.py", "minutes")) == ""
    for unit in ("ms", "s", "m", "h", "d"):
        assert run_messages.time_hint(("--hang-floor", "1.5", unit, "--", "x")).endswith(f" 1.5{unit}")
