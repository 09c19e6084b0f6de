"""A replacement for journalctl: it records its arguments, and prints the lines that a test provides.

In the folder that the variable JOURNAL names, `lines`, a file or a pipe, is printed as it arrives;
`calls` receives a line for each call. If there is a file `fails`, it exits with that text as its error.
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
