"""How a script that formed a process group ends: as under an interpreter, whatever it did to its streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import sys
from pathlib import Path
from holdfast import ending
from holdfast.command import parse
program = parse(["python", sys.argv[1]], Path.cwd())
sys.exit(ending.run(program, None))
"""
_SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=0, world_size=1)
print("trained", flush=True)
"""


def _ended(folder: Path, last: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(_SCRIPT + last)
    words = [sys.executable, "-c", _RUN, str(script)]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder, timeout=120)


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
    ended = _ended(tmp_path, last)
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_cannot_be_written_at_the_end_has_the_interpreters_own_code(tmp_path: Path) -> None:
    ended = _ended(tmp_path, "sys.stdout = open('/dev/full', 'w'); print('lost')")
    assert ended.returncode == 120
    assert "No space left on device" in ended.stderr
