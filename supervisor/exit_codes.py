"""The exit codes that Holdfast itself chooses; every other one is the script's."""

from __future__ import annotations

BAD_INPUT = 2  # the same command would be refused again
CUT_SHORT = 3  # the script finished, and not all that it did after its commits was done
NOT_WRITTEN = 120  # Python's own, for output that cannot be written at the end
INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
