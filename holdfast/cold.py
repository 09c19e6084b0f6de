"""A rank that no warm process carries, of a script whose file has changed since the run began."""

from __future__ import annotations

import os

from holdfast import ending, sources, warm

BOOT = warm.boot("holdfast.cold")
SOURCES = "HOLDFAST_SOURCES"  # the variable with the descriptor of what the run keeps


def main() -> None:
    """Run the script as it was. What it raises is the interpreter's to print."""
    descriptor = int(os.environ.pop(SOURCES))
    kept = sources.load(descriptor)
    os.close(descriptor)
    ending.enter(kept.program, kept.main)
