from __future__ import annotations

import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.display.run_follower import HANGS_S, OLD_S, RunFollower, WarningFilter
from supervisor.store.run_directory import RunDir, open_for_run


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    made = open_for_run(tmp_path / "run", 0.0, tmp_path)
    yield made
    made.close()


def printed(run: RunDir, text: str) -> None:
    folder = run.logs / "gen-0001"
    folder.mkdir(exist_ok=True)
    with (folder / "rank-0.log").open("a") as log:
        log.write(text)


def polled(following: RunFollower) -> list[tuple[int, str]]:
    """Poll, and wait for the thread if it is slow."""
    lines = following.poll(0.0)
    following._files.do(lambda: None, 30.0)
    return lines + following.poll(0.0)


def test_lines_status_and_incidents_are_returned_as_they_are_written(run: RunDir) -> None:
    following = RunFollower(run)
    assert (polled(following), following.status, following.news(0.0)) == ([], {}, "")
    printed(run, "one\ntwo")
    run.write_status({"step": 3})
    run.write_incident({"id": "i-0001"})
    assert polled(following) == [(0, "one")]
    assert following.status == {"step": 3}
    assert following.incident(1) == {"id": "i-0001"}
    assert following.incident(2) is None
    run.write_status({"step": 4})
    assert following.close() == [(0, "two")]
    assert following.status == {"step": 4}


def test_unresponsive_storage_blocks_nothing_and_is_reported_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("END_S", "READ_S"):
        monkeypatch.setattr(f"supervisor.display.run_follower.{name}", 0.02)
    following, answers = RunFollower(run), threading.Event()
    run.write_status({"step": 3})
    polled(following)
    usual = following._tails.poll
    monkeypatch.setattr(following._tails, "poll", lambda: answers.wait() and usual())
    assert following.poll(10.0) == []
    assert following.poll(10.1) == []
    assert following.news(10.1) == ""
    assert "does not respond" in following.news(10.1 + HANGS_S)
    assert following.news(10.2 + HANGS_S) == ""
    assert following.incident(1) is None
    assert following.close() == []
    assert following.status == {"step": 3}, "the last known status must be kept"
    answers.set()
    following._files.do(lambda: None, 30.0)
    following.poll(20.0)
    assert following.news(20.0).endswith("is available again")


def test_results_of_a_slow_poll_are_returned_once_and_before_the_last_lines(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    following, reads, goes_on = RunFollower(run), threading.Event(), threading.Event()
    polled(following)
    printed(run, "one\n")
    run.write_status({"step": 3})
    usual = following._read_all

    def slow() -> object:
        seen = usual()
        reads.set()
        goes_on.wait()
        return seen

    monkeypatch.setattr("supervisor.display.run_follower.SOON_S", 0.0)
    monkeypatch.setattr(following, "_read_all", slow)
    assert following.poll(0.0) == []
    reads.wait()
    printed(run, "two\n")
    run.write_status({"step": 9})
    goes_on.set()
    assert following.close() == [(0, "one"), (0, "two")]
    assert (polled(following), following.status) == ([], {"step": 9})


def test_a_removed_run_directory_is_reported_once(run: RunDir) -> None:
    following = RunFollower(run)
    polled(following)
    shutil.rmtree(run.path)
    polled(following)
    assert "was removed: training continues" in following.news(1.0)
    polled(following)
    assert following.news(2.0) == ""


def test_a_removed_run_directory_is_reported_even_if_a_checkpoint_has_recreated_it(tmp_path: Path) -> None:
    run = open_for_run(tmp_path / "a-run", 0.0)
    following = RunFollower(run)
    polled(following)
    assert following.news(0.0) == ""
    shutil.rmtree(run.path)
    run.checkpoints.mkdir(parents=True)
    run.write_status({"step": 9})
    for turn in range(3):
        polled(following)
        assert ("was removed: training continues" in following.news(1.0 + turn)) == (turn == 0)
    (run.path / "lock").touch()  # that of another run
    assert run.is_gone()
    run.close()


LATE = "holdfast: rank {}: model.0.weight was written after the commit of step {}: put it right"


def test_a_warning_already_printed_by_another_rank_or_generation_is_not_shown_again() -> None:
    warned = WarningFilter()
    shown = [LATE.format(0, 1), "holdfast: warning: AdamW steps but is not protected", "loss 3 at step 4"]
    jumps = [f"holdfast: warning: rank 0: loss {loss} at step 9" for loss in (50, 60)]
    assert [line for line in (*shown, *jumps) if warned.admit(line)] == [*shown, *jumps]
    again = [LATE.format(1, 1), LATE.format(0, 77), shown[1], jumps[0]]
    assert not [line for line in again if warned.admit(line)]
    assert warned.admit(shown[2]), "the script's own lines must be shown every time"
    assert warned.admit("holdfast: lost its peers (connection closed by peer)")
    assert warned.admit("holdfast: lost its peers (connection closed by peer)")


def test_a_directory_that_refuses_files_is_reported_and_so_is_its_recovery(run: RunDir) -> None:
    following = RunFollower(run)
    run.write_status({"step": 3})
    at_s = 100.0
    assert following._refusal(following._follower.read(), at_s) == ""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert following._refusal(following._follower.read(), at_s + 1.0) == "", "a status may be late"
        at_s += OLD_S + 1.0
        why = following._refusal(following._follower.read(), at_s)
        assert why == "File too large", "the write fails half way, like on a full disk"
        assert following._refusal(following._follower.read(), at_s + 1.0) == why
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.write_status({"step": 4})
    assert following._refusal(following._follower.read(), at_s + 2.0) == ""
    assert [path.name for path in run.path.iterdir() if "probe" in path.name] == []


def test_the_message_about_a_directory_that_refuses_files_is_printed_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = RunFollower(run)
    monkeypatch.setattr(following, "_refusal", lambda *_: "No space left on device")
    polled(following)
    assert "No space left on device. Training continues" in following.news(0.0)
    assert following.news(0.0) == ""
    monkeypatch.setattr(following, "_refusal", lambda *_: "")
    polled(following)
    assert following.news(0.0).endswith("can be written to again")


def test_an_old_status_does_not_mean_that_the_directory_cannot_be_written(run: RunDir) -> None:
    following = RunFollower(run)
    run.write_status({"step": 3})
    for at_s in (0.0, OLD_S + 1.0, 3 * OLD_S):
        assert following._refusal(following._follower.read(), at_s) == ""
