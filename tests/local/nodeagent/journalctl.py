"""Stands where journalctl would: says what it was called with, and prints what it was given to print.

In the folder that the environment's JOURNAL names, `lines`, a file or a pipe, is printed as it comes; `calls`
gets a line for each call; with `fails` there, it complains and ends.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FOLDER = Path(os.environ["JOURNAL"])
with (FOLDER / "calls").open("a") as calls:
    print(os.getpid(), *sys.argv[1:], file=calls, flush=True)
if (FOLDER / "fails").exists():
    sys.exit((FOLDER / "fails").read_text())
with (FOLDER / "lines").open("rb", buffering=0) as lines:
    while data := lines.read(65536):
        os.write(1, data)
