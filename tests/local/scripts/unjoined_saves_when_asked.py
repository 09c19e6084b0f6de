"""A script that does not use holdfast and saves when it is asked to end: python SCRIPT HOW.

HOW: "interrupt" saves on Ctrl-C; "terminate" also has a handler for SIGTERM; "deaf" ignores Ctrl-C;
"stubborn" ignores both signals.
"""

from __future__ import annotations

import signal
import sys
import time

how = sys.argv[1]


def save(why: str) -> None:
    """Save slowly, and print a line when done."""
    time.sleep(0.5)
    print(f"saved on {why}", flush=True)


def terminated(*_: object) -> None:
    save("SIGTERM")
    sys.exit(0)


if how != "interrupt":
    signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "stubborn" else terminated)
if how in ("deaf", "stubborn"):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    save("SIGINT")
