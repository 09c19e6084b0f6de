"""Lines for whoever watches a measurement."""

from __future__ import annotations

import sys


def say(text: str = "") -> None:
    """Print one or more lines at once: a pipe must see progress too."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
