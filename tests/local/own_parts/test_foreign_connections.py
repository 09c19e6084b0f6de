"""Any process on this host can connect to the parts of a run; that does not disturb the run."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from holdfast.process.network import MOST
from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

SILENT = 1100  # more than the 1024 descriptors that a process may usually have


@contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def address(run: Run) -> tuple[str, int]:
    api = urlsplit(json.loads((run.run_dir / "run.json").read_text())["api"])
    assert api.hostname
    assert api.port
    return api.hostname, api.port


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_silent_connections_without_the_token_do_not_block_the_supervisor(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", 10_000_000)
    before = run.steady()
    pid = before["supervisor_pid"]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
    usual = descriptors(pid)
    with many_files(), ExitStack() as opened:
        for _ in range(SILENT):
            opened.enter_context(socket.create_connection(address(run), 10))
        os.kill(before["members"][0]["sidecar_pid"], signal.SIGKILL)
        run.wait(
            lambda s: (
                s["members"][0]["sidecar_pid"] not in (None, before["members"][0]["sidecar_pid"])
                and s["members"][0]["connected"]
            ),
            "the sidecar is back",
        )
        assert run.broken(lambda: run.hit(1, signal.SIGKILL))["lost_steps"] <= 1
        assert descriptors(pid) < usual + 2 * MOST
    assert len(run.incidents()) == 1
    assert "not written" not in run.logs("supervisor.log")
    assert run.stop().code == 130
