"""The members of one machine are forked from one process that has imported what the script imports."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import GONE_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

DIES = """
import os, pathlib
if not pathlib.Path('imported').exists():
    pathlib.Path('imported').touch()
    os._exit(9)
"""


def launchers(run: Run, count: int) -> list[Json]:
    """Wait until so many members have a launcher that has spoken; return them."""

    def look(status: Json) -> list[Json]:
        found = [each for each in status["members"] if each["launcher_pid"]]
        return found if len(found) == count else []

    return look(run.wait(look, f"{count} members"))


def replaced(run: Run) -> Json:
    """Kill the standby's launcher, and return the member that is made in its place."""
    before = run.steady()["members"]
    [lost] = [each for each in before if each["role"] == "standby"]
    os.kill(lost["launcher_pid"], signal.SIGKILL)
    run.wait(lambda status: lost["name"] not in {each["name"] for each in status["members"]}, "its loss")
    [made] = [each for each in launchers(run, 2) if each["role"] == "standby"]
    assert made["name"] not in {each["name"] for each in before}
    return made


def is_forked(member: Json) -> bool:
    return b"holdfast.template" in Path(f"/proc/{member['launcher_pid']}/cmdline").read_bytes()


def template_of(run: Run, members: list[Json]) -> int:
    """Return the child of `holdfast run` that its launchers were forked from."""
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    launchers = [each["launcher_pid"] for each in members]
    [found] = [
        int(pid)
        for pid in children
        if int(pid) not in launchers and b"holdfast.template" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def test_a_lost_member_is_forked_anew_or_starts_by_itself_where_the_template_is_stuck(start: Start) -> None:
    run = start("--members 1 --standby 1 --checkpoint-every 0", "steady.py", 10_000_000)
    before = launchers(run, 2)
    assert all(map(is_forked, before))
    assert is_forked(replaced(run))
    pid = template_of(run, launchers(run, 2))
    os.kill(pid, signal.SIGSTOP)
    assert not is_forked(replaced(run))
    until(lambda: None if Path(f"/proc/{pid}").exists() else True, "the template is ended", GONE_S)
    assert run.running()["incidents"] == 0
    assert run.stop().code == 130


def test_an_import_that_ends_the_process_ends_the_template_only(start: Start, tmp_path: Path) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "dies.py").write_text(DIES)
    script = tmp_path / "script.py"
    script.write_text("import dies\nimport threading\n\nthreading.Event().wait()\n")
    run = start("--members 1", str(script), PYTHONPATH=str(tmp_path / "packages"))
    [member] = launchers(run, 1)
    assert not is_forked(member)
    assert run.stop().code == 130
