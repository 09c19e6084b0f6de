"""How a process ended that was to import what the script imports, and what it printed."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from holdfast import nest
from holdfast.zygote import Zygote


@pytest.mark.parametrize(
    ("status", "printed", "code", "message"),
    [
        (5 << 8, "", 5, "PROCESS exited with code 5, and printed nothing"),
        (5 << 8, "Traceback\nImportError: no\n", 5, "Traceback\nImportError: no\nPROCESS exited with code 5"),
        (11, "about to\n", None, "about to\nPROCESS was killed by SIGSEGV"),
        (0, "done\n", 1, "done\nPROCESS exited with code 0"),
        (None, "", 1, "PROCESS closed its connection, and printed nothing"),
    ],
)
def test_a_zygote_that_is_lost_says_how_and_what_it_printed(
    status: int | None, printed: str, code: int | None, message: str
) -> None:
    ended = nest.of_zygote(status, printed, 7)
    assert (ended.code, ended.signal) == (code, None if code else 11)
    what = message.replace("PROCESS", "the process that imports what the script imports")
    assert ended.message == what


@pytest.mark.parametrize(
    ("code", "status"), [("import os; os._exit(5)", 5 << 8), ("import os; os.abort()", 6)]
)
def test_the_status_is_its_own_though_its_line_closes_first(code: str, status: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        child = subprocess.Popen([sys.executable, "-c", code], pass_fds=(theirs.fileno(),))
    assert ours.recv(1) == b""
    assert Zygote(child.pid, ours).lost() == status
    child.returncode = 0  # collected


def test_one_that_only_closes_its_line_is_ended() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert Zygote(child.pid, ours).lost() is None
    child.returncode = 0
