"""Ctrl-C ends a command on a cluster with exit code 130 and without a traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import exit_codes
from tests.unit.supervisor.cli.on_cluster.stand_in import CONFIG, standing_in

LIMIT_S = 60.0


def begin(line: str, config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (sys.executable, "-m", "supervisor", *line.split()),
        env={**os.environ, "KUBECONFIG": str(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupt(running: subprocess.Popen[str]) -> str:
    """Send what Ctrl-C sends, and return what the command prints to stderr before it ends with 130."""
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == exit_codes.INTERRUPTED
    return err


@pytest.mark.parametrize("line", ["jobs", "stop --job gpt", "doctor"])
def test_a_command_that_waits_for_the_api_server_ends_without_a_traceback(tmp_path: Path, line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(LIMIT_S)
        (tmp_path / "config").write_text(CONFIG % f"http://127.0.0.1:{silent.getsockname()[1]}")
        with begin(line, tmp_path / "config") as running:
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(LIMIT_S)
                assert connection.recv(4), "the request has arrived, and is never answered"
                assert interrupt(running) == ""


def test_while_a_job_stops_ctrl_c_says_that_the_stop_continues(tmp_path: Path) -> None:
    with standing_in() as server:
        job = server.job()
        (tmp_path / "config").write_text(CONFIG % server.url)
        with begin("stop --job gpt", tmp_path / "config") as running:
            assert running.stdout is not None
            assert running.stdout.readline() == "stopping job research/gpt\n"
            assert interrupt(running) == (
                "holdfast: job research/gpt is still stopping:"
                " `holdfast status --job research/gpt` shows whether it has ended\n"
            )
        assert job["spec"]["stop"] == "graceful"
