"""In a pod, the exit code of the launcher is the job's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import exit_codes
from holdfast.launcher import cli
from holdfast.protocol import codec, environment
from holdfast.protocol.launcher_messages import LauncherOrder
from holdfast.snapshot import member_directory

LIMIT_S = 30.0
_MAIN = "from holdfast.launcher import cli; raise SystemExit(cli.main())"


def started(directory: Path, *options: str) -> subprocess.Popen[bytes]:
    words = ("--directory", str(directory), "--logs", str(directory / "logs"), *options, "--", "sleep", "60")
    return subprocess.Popen([sys.executable, "-c", _MAIN, *words], stderr=subprocess.PIPE)


def order(directory: Path, launcher: subprocess.Popen[bytes], given: LauncherOrder) -> None:
    """Send an order as the sidecar does, once the launcher listens."""
    path = str(directory / member_directory.LAUNCHER_SOCKET)
    while True:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(LIMIT_S)
            try:
                line.connect(path)
            except OSError:
                assert launcher.poll() is None, launcher.communicate()
                continue
            assert line.recv(1 << 16)  # the launcher sends its state, so it now accepts orders
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
    """Otherwise it would wait for ever, with the pod's GPUs, and nobody would learn of it."""
    monkeypatch.setenv(environment.FIRST_STEP_S, "0.5")
    with started(memory) as launcher:
        assert launcher.wait(LIMIT_S) == exit_codes.CANNOT_START
    path = memory / member_directory.LAUNCHER_SOCKET
    said = capfd.readouterr().out
    assert "no sidecar has connected for" in said
    assert f"this is user {os.geteuid()}, the socket is {path}" in said


def test_under_a_keeper_the_code_is_0_because_the_keeper_knows_how_the_run_ended(memory: Path) -> None:
    with started(memory, "--parent", str(os.getpid())) as launcher:
        order(memory, launcher, LauncherOrder("stop", exit_code=3))
        assert launcher.wait(LIMIT_S) == 0


def test_an_unreadable_command_is_bad_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--directory", str(tmp_path), "--", "python", "missing.py"]) == exit_codes.BAD_INPUT
    assert "holdfast launch: " in capfd.readouterr().err


def test_options_come_from_the_environment_that_the_webhook_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIRECTORY", "/run/d"), ("LOGS", "/run/l"), ("MEMBER", "w-0"), ("NPROC", "4")):
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    options = cli.parse_options(["--warm", "cold", "--", "python", "-u", "train.py", "--", "x"])
    assert (options.directory, options.logs, options.name, options.nproc) == ("/run/d", "/run/l", "w-0", 4)
    assert options.command == ["python", "-u", "train.py", "--", "x"]
    assert (options.warm, options.parent) == ("cold", 0)
