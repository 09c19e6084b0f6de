"""In a pod, the exit code of the launcher is the job's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import exit_codes
from holdfast.launcher import cli, termination
from holdfast.protocol import codec, environment
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.snapshot import member_directory

LIMIT_S = 30.0
_MAIN = """\
import os
from pathlib import Path
from holdfast.launcher import cli, termination
termination.FILE = Path(os.environ.get("TERMINATION_LOG", termination.FILE))
raise SystemExit(cli.main())
"""


def started(
    directory: Path, *options: str, command: tuple[str, ...] = ("sleep", "60")
) -> subprocess.Popen[bytes]:
    words = ("--directory", str(directory), "--logs", str(directory / "logs"), *options, "--", *command)
    return subprocess.Popen([sys.executable, "-c", _MAIN, *words], stderr=subprocess.PIPE)


def order(
    directory: Path,
    launcher: subprocess.Popen[bytes],
    given: LauncherOrder,
    once: Callable[[LauncherState], bool] = lambda _: True,
) -> None:
    """Send an order as the sidecar does, when the launcher listens and has a state for which `once` holds."""
    path = str(directory / member_directory.LAUNCHER_SOCKET)
    while True:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(LIMIT_S)
            try:
                line.connect(path)
            except OSError:
                assert launcher.poll() is None, launcher.communicate()
                continue
            with line.makefile("rb") as lines:
                while not (sent := lines.readline().strip()) or not once(codec.decode(LauncherState, sent)):
                    assert launcher.poll() is None
            line.sendall(codec.encode(given))
            while line.recv(1 << 16):
                pass
            return


@pytest.mark.parametrize("code", [0, 3])
def test_a_pods_launcher_ends_with_the_code_of_the_job(memory: Path, code: int) -> None:
    """The kubelet passes the code on to the owner, which uses it to decide whether the job has failed."""
    with started(memory) as launcher:
        order(memory, launcher, LauncherOrder("stop", exit_code=code))
        assert launcher.wait(LIMIT_S) == code


def test_a_pods_launcher_that_no_sidecar_reaches_says_so_and_ends(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it would wait forever, with the pod's GPUs, and nobody would learn of it."""
    monkeypatch.setenv(environment.FIRST_STEP_S, "0.5")
    with started(memory) as launcher:
        assert launcher.wait(LIMIT_S) == exit_codes.CANNOT_START
    path = memory / member_directory.LAUNCHER_SOCKET
    said = capfd.readouterr().out
    assert "no sidecar has connected for" in said
    assert f"running as user {os.geteuid()}, socket {path}" in said


SCRIPT = """\
print("hello before join")
import holdfast
{ending}
holdfast.join()
"""


@pytest.mark.parametrize(
    ("warm", "ending", "code"),
    [
        ("auto", "import nosuchmodule", 1),
        ("spawn", "import nosuchmodule", 1),
        ("auto", "import sys; sys.exit(3)", 3),
        ("auto", "raise holdfast.BadInput('no such corpus')", 2),
        ("auto", "import sys; print('nothing to do'); sys.exit(0)", 0),
    ],
)
def test_the_output_of_a_script_that_never_joins_is_in_the_pods_log_once(
    memory: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    warm: str,
    ending: str,
    code: int,
) -> None:
    """No rank's log contains it, and the next attempt prints the same."""
    left = tmp_path / "termination-log"
    left.touch()
    monkeypatch.setenv("TERMINATION_LOG", str(left))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending=ending))
    with started(memory, "--warm", warm, command=(sys.executable, str(script))) as launcher:
        stop = LauncherOrder("stop", exit_code=code)
        order(memory, launcher, stop, lambda state: state.warm_failures >= 2)
        assert launcher.wait(LIMIT_S) == code
        _, errors = launcher.communicate()
    said = capfd.readouterr().out
    last = {1: "nosuchmodule'", 2: "no such corpus", 0: "nothing to do"}.get(code, "hello before join")
    assert said.count("hello before join") == 1, errors
    assert last in said
    assert left.read_text() == {
        0: "",
        1: "ModuleNotFoundError: No module named 'nosuchmodule'",
        2: f"no such corpus ({script}, line 3)",
        3: "hello before join",
    }.get(code)


def test_nothing_is_added_to_the_log_of_a_pod_that_ends_before_a_process_fails(
    memory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending=""))
    with started(memory, command=(sys.executable, str(script))) as launcher:
        order(memory, launcher, LauncherOrder("stop", exit_code=1), lambda state: bool(state.parked))
        assert launcher.wait(LIMIT_S) == 1
    assert capfd.readouterr().out == ""


def test_under_a_keeper_the_code_is_0_because_the_keeper_knows_how_the_run_ended(memory: Path) -> None:
    with started(memory, "--parent", str(os.getpid())) as launcher:
        order(memory, launcher, LauncherOrder("stop", exit_code=3))
        assert launcher.wait(LIMIT_S) == 0


def test_an_unreadable_command_is_bad_input(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor finds the reason in the pod's status even if no sidecar has reached the launcher."""
    left = tmp_path / "termination-log"
    left.write_text("x" * 5_000)
    monkeypatch.setattr(termination, "FILE", left)
    assert cli.main(["--directory", str(tmp_path), "--", "python", "missing.py"]) == exit_codes.BAD_INPUT
    said = capfd.readouterr().err
    assert said.startswith("holdfast launch: script 'missing.py' not found in ")
    assert f"holdfast launch: {left.read_text()}\n" == said


def test_outside_a_pod_no_termination_message_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(termination, "FILE", tmp_path / "termination-log")
    termination.leave_message("no")
    assert list(tmp_path.iterdir()) == []
    termination.FILE.touch()
    termination.leave_message("no" * 10_000)
    assert termination.FILE.stat().st_size == termination.MOST_BYTES


def test_options_come_from_the_environment_that_the_webhook_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIRECTORY", "/run/d"), ("LOGS", "/run/l"), ("MEMBER", "w-0"), ("NPROC", "4")):
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    options = cli.parse_options(["--warm", "cold", "--", "python", "-u", "train.py", "--", "x"])
    assert (options.directory, options.logs, options.name, options.nproc) == ("/run/d", "/run/l", "w-0", 4)
    assert options.command == ["python", "-u", "train.py", "--", "x"]
    assert (options.warm, options.parent) == ("cold", 0)
