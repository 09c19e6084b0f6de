"""The exit codes that Holdfast itself chooses. All others come from the script."""

from __future__ import annotations

BAD_INPUT = 2  # a retry of the same command would be refused again
# The script has finished, but a restart interrupted work after a commit, and this work was not repeated.
CUT_SHORT = 3
NOT_JUDGED = 3  # from `holdfast node check`: something could not be evaluated, or the check itself failed
# `holdfast node check` reports bad input with this code from sysexits.h, because 2 means an unhealthy node.
USAGE = 64
NOT_WRITTEN = 120  # Python's exit code for output that cannot be written at exit
CANNOT_START = 126  # the code that a shell reports for a command that it cannot execute
INTERRUPTED = 130  # the code that a shell reports for a process ended by SIGINT
UNREAD = 141  # the same for SIGPIPE, if the reader of the output has closed the pipe
TERMINATED = 143  # the same for SIGTERM; a Kubernetes Job would count a deleted pod with code 0 as a success


def of_failed_process(code: int | None, signal: int | None) -> int:
    """Return the exit code with which to report a process that failed: 128 + n for signal n, and never 0."""
    return 128 + signal if signal is not None else code or 1
