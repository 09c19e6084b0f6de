from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.__main__ import main
from holdfast.version import __version__
from supervisor.cli import command_options
from supervisor.store.run_directory import open_for_run
from tests.local.command.test_parts import installation, python
from tests.unit.supervisor.status_samples import incident

WHO = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(7)"
MAIN = "import os, sys; print(os.getpid(), flush=True); from holdfast.__main__ import main; main()"


def test_the_version_is_printed_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"holdfast {__version__}\n"


def test_a_version_that_cannot_be_written_is_reported_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "holdfast", "--version"]
        ended = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 120
    assert ended.stderr == "holdfast: the output cannot be written: No space left on device\n"


def test_the_node_command_becomes_the_node_agent_in_the_same_process(tmp_path: Path) -> None:
    site = installation(tmp_path, nodeagent=WHO).parent.parent
    ended = python("-c", MAIN, "node", "check", "--json", cwd=tmp_path, PYTHONPATH=str(site))
    before, after = ended.stdout.splitlines()
    assert after == f"{before} ['check', '--json']"
    assert ended.returncode == 7


@pytest.mark.parametrize("arguments", [[], ["status", "--json"], ["run", "--", "python", "--version"]])
def test_a_command_becomes_the_supervisor_in_the_same_process(tmp_path: Path, arguments: list[str]) -> None:
    site = installation(tmp_path, supervisor=WHO).parent.parent
    ended = python("-c", MAIN, *arguments, cwd=tmp_path, PYTHONPATH=str(site))
    before, after = ended.stdout.splitlines()
    assert after == f"{before} {arguments}"
    assert ended.returncode == 7


def test_a_reader_that_closes_the_pipe_early_causes_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = open_for_run(None, 0.0)
    for number in range(50):
        run.write_incident(incident(number, message="x" * 4000))
    script = "import sys; from supervisor.__main__ import main\nsys.exit(main(['incidents', '--json']))\n"
    ours, theirs = os.pipe()
    os.close(ours)
    root = Path(command_options.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", script],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    os.close(theirs)
    assert (ended.returncode, ended.stderr) == (141, b"")
    run.close()


def test_closed_outputs_are_no_error_and_a_full_one_exits_with_the_interpreters_code(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("print('trained')\n")
    run = f"{sys.executable} -m holdfast run --plain --run-dir first -- python train.py"
    for closed in ("", "<&- >&- 2>&-", ">&-"):
        done = subprocess.run(f"{run} {closed}", shell=True, cwd=tmp_path, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    for words in (run, f"{sys.executable} -m holdfast status --run-dir first"):
        full = subprocess.run(
            f"{words} > /dev/full", shell=True, cwd=tmp_path, capture_output=True, check=False
        )
        said = b"holdfast: the output cannot be written: No space left on device\n"
        assert (full.returncode, full.stderr) == (120, said)
