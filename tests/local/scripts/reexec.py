"""Restart itself before joining, to set a variable that is read at a program's start: reexec.py HOW."""

from __future__ import annotations

import os
import subprocess
import sys

if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    if sys.argv[1] == "exec":
        os.execv(sys.executable, [sys.executable, *sys.argv])
    subprocess.run([sys.executable, *sys.argv], capture_output=True, check=False)  # without any output
    sys.exit(0)

import holdfast

session = holdfast.join()
print("rank", session.rank, "of", session.world_size)
