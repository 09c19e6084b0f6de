"""The exit codes that Holdfast itself chooses; all others come from the script."""

from __future__ import annotations

BAD_INPUT = 2  # the same command would be refused again
# The script finished, but a restart cut off work after some commits, and this work was not repeated.
CUT_SHORT = 3
NOT_WRITTEN = 120  # Python's exit code for output that cannot be written at exit
CANNOT_START = 126  # the code that a shell reports for a command that it cannot execute
INTERRUPTED = 130  # the code that a shell reports for a process ended by SIGINT
UNREAD = 141  # the same for SIGPIPE: the reader of the output has closed the pipe
TERMINATED = 143  # the same for SIGTERM: with 0, a Kubernetes Job would count a deleted pod as a success
