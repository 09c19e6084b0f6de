from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.store import json_file, run_directory
from supervisor.store.run_directory import RunDir, newest, open_for_run
from tests.crash import killing

NOW = 1_700_000_000.0


def started(work: Path) -> RunDir:
    """Open the directory as a run does after a successful start."""
    run = open_for_run(Path("d"), NOW, work)
    run.name_latest(work)
    return run


@pytest.mark.parametrize("had_a_run", [False, True])
def test_a_run_killed_at_any_line_of_its_creation_loses_nothing_and_can_be_resumed(
    memory: Path, monkeypatch: pytest.MonkeyPatch, had_a_run: bool
) -> None:
    ours = {module.__file__ for module in (run_directory, run_directory, json_file)}
    monkeypatch.setattr(killing, "TRACED", killing.TRACED | ours)
    template = memory / "template"
    template.mkdir()
    if had_a_run:
        run = started(template)
        run.write_incident({"id": "i-0001"})
        run.close()
        # Copies of the template would turn the link into a directory.
        (template / "holdfast-runs" / "latest").unlink(missing_ok=True)

    def check(work: Path, finished: bool) -> None:
        again = started(work)
        assert len(again.token()) == 64
        assert len(again.incidents()) == had_a_run
        assert not [path for path in again.path.iterdir() if path.name.startswith(".tmp")]
        assert newest(work) == again.path.resolve()
        again.close()

    kills = killing.killed_at_every_line(template, lambda work: work, started, check)
    assert kills > 5
