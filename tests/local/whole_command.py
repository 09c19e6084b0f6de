"""Run one `holdfast` command from its start to its end, and capture its output."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.local.waiting import WAIT_S


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code and the output of a command."""

    code: int
    output: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()


def holdfast(*words: str | Path, cwd: Path, **environment: str) -> Ended:
    """Run one short `holdfast` command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    return Ended(done.returncode, done.stdout)
