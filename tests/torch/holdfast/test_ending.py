"""How a script that formed a process group ends: as under an interpreter, whatever it did to its streams."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast import channel
from holdfast.channel import Say
from holdfast.launcher_messages import UNFLUSHED

_RUN = """
import socket, sys
from pathlib import Path
from holdfast import ending
from holdfast.command import parse
from holdfast.runtime import Runtime
program = parse(["python", sys.argv[1]], Path.cwd())
sys.exit(ending.run(program, Runtime(socket.socket(fileno=int(sys.argv[2])), Path.cwd(), 0, 1)))
"""
_SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=0, world_size=1)
print("trained", flush=True)
"""


Ended = tuple[subprocess.CompletedProcess[str], list[Say]]


def _ended(folder: Path, last: str) -> Ended:
    """Return how it ended, and what it said to its launcher."""
    script = folder / "script.py"
    script.write_text(_SCRIPT + last)
    ours, theirs = channel.pair()
    with ours:
        with theirs:
            words = [sys.executable, "-c", _RUN, str(script), str(theirs.fileno())]
            ended = subprocess.run(
                words,
                capture_output=True,
                text=True,
                check=False,
                cwd=folder,
                timeout=120,
                pass_fds=(theirs.fileno(),),
            )
        said = []
        with suppress(channel.Closed):
            while True:
                said.append(channel.receive(ours, Say)[0])
    return ended, said


@pytest.mark.parametrize(
    "last",
    [
        "sys.stdout.close()",
        "sys.stdout = None",
        "sys.stderr.close()",
        "sys.stdout.close(); sys.stderr = None",
        "sys.stdout = open('log', 'w'); sys.stdout.close()",
    ],
)
def test_a_script_that_closed_its_streams_ends_well(tmp_path: Path, last: str) -> None:
    ended, said = _ended(tmp_path, last)
    assert (ended.returncode, ended.stdout, said) == (0, "trained\n", []), ended.stderr
    assert "Traceback" not in ended.stderr


FULL = "sys.stdout = open('/dev/full', 'w'); print('lost')"
CLOSED = "read, write = os.pipe(); os.close(read); sys.stdout = os.fdopen(write, 'w'); print('lost')"
GONE = "dist.destroy_process_group(); "
AT_EXIT = "sys.stdout = open('/dev/full', 'w'); import atexit; atexit.register(print, 'lost')"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (FULL, "No space left on device"),
        (GONE + FULL, "No space left on device"),
        (CLOSED, "Broken pipe"),
        (GONE + CLOSED, "Broken pipe"),
        (AT_EXIT, "No space left on device"),
        (GONE + AT_EXIT, "No space left on device"),
        (f"{FULL}; sys.exit(0)", "No space left on device"),
    ],
)
def test_what_cannot_be_written_at_the_end_has_the_interpreters_own_code_and_is_no_failure_of_the_script(
    tmp_path: Path, last: str, why: str
) -> None:
    ended, [said] = _ended(tmp_path, last)
    assert ended.returncode == 120
    assert why in ended.stderr
    assert said.what == "failing"
    assert said.ending is not None
    assert said.ending.is_good
    assert (said.ending.code, said.ending.fail) == (120, UNFLUSHED)
    assert why in said.ending.message


def test_a_script_that_fails_or_chooses_to_exit_says_that_first(tmp_path: Path) -> None:
    _, said = _ended(tmp_path, f"{FULL}; sys.exit(5)")
    assert said[0].ending is not None
    assert (said[0].ending.code, said[0].ending.fail) == (5, "system_exit")
    _, said = _ended(tmp_path, f"{FULL}; raise ValueError")
    assert said[0].ending is not None
    assert (said[0].ending.code, said[0].ending.fail) == (1, "exception")
