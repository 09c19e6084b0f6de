"""Misuse of the API is reported in one line that names the script's line and the right way."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import SCRIPTS

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]


def line_of(text: str, after: str = "") -> str:
    """Return the place of the script's line that ends with `text`, as messages name it."""
    lines = (SCRIPTS / "misuse.py").read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith(after))
    number = next(number for number in range(begin, len(lines)) if lines[number].endswith(text))
    return f"misuse.py, line {number + 1}"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "before",
            (
                "init_process_group(): holdfast.join() does this; remove the call",
                line_of('init_process_group("gloo")', 'what == "before":'),
            ),
        ),
        (
            "after",
            (
                "init_process_group(): holdfast.join() does this; remove the call",
                line_of('init_process_group("gloo")', 'what == "after":'),
            ),
        ),
        ("twice", ("commit() was already called in step 0", line_of("commit()", 'what == "twice":'))),
        ("epochs", ("steps(20) is the whole training, not one epoch", line_of("in state.steps(20):"))),
        ("never", ("step 40 began 3 times without a commit", line_of("in state.steps(steps):"))),
        (
            "uneven",
            ("rank 0 left its loop at step 40 while rank 1 was in step 41", "all ranks must do the same"),
        ),
    ],
)
def test_a_mistake_ends_the_run_at_once_and_the_message_says_what_is_right(
    start: Start, what: str, says: tuple[str, ...]
) -> None:
    run = start("--nproc-per-node 2", "misuse.py", what)
    ended = run.finish()
    assert ended.code == 2, ended.output
    assert all(each in "\n".join(ended.lines[-2:]) for each in says), ended.output
    assert "Traceback" not in ended.output
    assert len(run.incidents()) <= 1


def test_a_rank_that_swallows_the_error_of_a_lost_peer_is_its_victim(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2", "misuse.py", "swallows", tmp_path)
    run.steady(8)
    for _ in range(2):
        run.broken(lambda: run.hit(1, signal.SIGKILL))
        run.trains(8)
    (tmp_path / "enough").touch()
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert [(each["kind"], each["rank"]) for each in run.incidents()] == [("crash", 1)] * 2
    assert "began 3 times" in run.logs("gen-0001/rank-0.log") + str(run.incidents()), (
        "the rank must have swallowed the error"
    )


def test_a_rank_that_exits_with_0_in_its_loop_is_named_instead_of_its_victim(start: Start) -> None:
    run = start("--nproc-per-node 2", "misuse.py", "early")
    ended = run.finish()
    assert ended.code == 1, ended.output
    assert "rank 1 exited with code 0 in the middle of its loop, after step 31" in ended.lines[-1]
    assert {each["rank"] for each in run.incidents()} == {1}


@pytest.mark.parametrize(
    ("what", "says", "never"),
    [
        ("forgets", "SGD steps but is not protected", "was written after the commit"),
        ("late", "scheduler was changed after the commit of step", "is not protected"),
        (
            "accumulates",
            f"accumulated across commit() ({line_of('commit()', 'in state.steps(steps):')}), which does",
            "after the commit of",
        ),
    ],
)
def test_a_warning_is_printed_once_per_run_despite_restarts(
    start: Start, tmp_path: Path, what: str, says: str, never: str
) -> None:
    run = start("--nproc-per-node 2", "misuse.py", what, tmp_path)
    run.steady(8)
    for _ in range(2):
        run.broken(lambda: run.hit(1, signal.SIGKILL))
        run.trains(8)
    (tmp_path / "enough").touch()
    ended = run.finish()
    assert run.logs("gen-0003/rank-0.log").count(says) == 1
    assert ended.output.count(says) == 1, ended.output
    assert never not in ended.output
    assert "pair.cc" not in ended.output, "the output shows a library's message about dead peers"
