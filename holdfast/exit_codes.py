"""The exit codes that Holdfast itself chooses; all others come from the script."""

from __future__ import annotations

BAD_INPUT = 2  # the same command would be refused again
CUT_SHORT = 3  # the script finished, but work after some of its commits was cut off and not repeated
NOT_WRITTEN = 120  # Python's exit code for output that cannot be written at exit
INTERRUPTED = 130  # the code with which a shell reports a process that SIGINT ended
UNREAD = 141  # that of one that SIGPIPE ended: the reader of its output has closed the pipe
