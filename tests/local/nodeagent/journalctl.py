"""A replacement for journalctl: it records its arguments, and prints the lines that a test provides.

It uses the folder that the variable JOURNAL names. It prints `lines`, a file or a pipe, as it arrives, and
adds a line to `calls` for each call. If a file `fails` exists, it prints that file's text as an error and
exits. If asked for one entry, it prints the file `newest` if there is one. If a file `hangs` exists, it
prints nothing and does not end.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

FOLDER = Path(os.environ["JOURNAL"])
with (FOLDER / "calls").open("a") as calls:
    print(os.getpid(), *sys.argv[1:], file=calls, flush=True)
if (FOLDER / "fails").exists():
    sys.exit((FOLDER / "fails").read_text())
if "-n" in sys.argv:
    if (FOLDER / "hangs").exists():
        signal.pause()
    if (FOLDER / "newest").exists():
        os.write(1, (FOLDER / "newest").read_bytes() + b"\n")
    sys.exit()
with (FOLDER / "lines").open("rb", buffering=0) as lines:
    while data := lines.read(65536):
        os.write(1, data)
