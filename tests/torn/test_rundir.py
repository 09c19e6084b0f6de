from __future__ import annotations

from pathlib import Path

import pytest

from supervisor import rundir, rundirlock, smallfile
from supervisor.rundir import newest, open_for_run
from tests.torn import killing

NOW = 1_700_000_000.0


@pytest.mark.parametrize("had_a_run", [False, True])
def test_a_run_killed_at_any_line_of_its_birth_loses_nothing_and_is_gone_on_with(
    memory: Path, monkeypatch: pytest.MonkeyPatch, had_a_run: bool
) -> None:
    ours = {module.__file__ for module in (rundir, rundirlock, smallfile)}
    monkeypatch.setattr(killing, "TRACED", killing.TRACED | ours)
    template = memory / "template"
    template.mkdir()
    if had_a_run:
        run = open_for_run(Path("d"), NOW, template)
        run.write_incident({"id": "i-0001"})
        run.close()
        (template / "holdfast-runs" / "latest").unlink()  # the copies would make it a directory

    def check(work: Path, finished: bool) -> None:
        again = open_for_run(Path("d"), NOW, work)
        assert len(again.token()) == 64
        assert len(again.incidents()) == had_a_run
        assert not [path for path in again.path.iterdir() if path.name.startswith(".tmp")]
        assert newest(work) == again.path.resolve()
        again.close()

    kills = killing.killed_at_every_line(
        template, lambda work: work, lambda work: open_for_run(Path("d"), NOW, work), check
    )
    assert kills > 5
