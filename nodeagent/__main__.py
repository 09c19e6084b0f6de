"""`holdfast node`: `python -m nodeagent`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress

from holdfast import exit_codes, parts
from holdfast.errors import BadInput
from nodeagent.cli import output

# Python's default of 5 ms is too long: a flood overwrites a log of 128 KiB in 10 ms, and the thread that
# reads it yields to another thread at each record.
SWITCH_S = 0.0005


def main(argv: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    For bad input or a missing package, print one line and return 2 (64 for `check`). If the output cannot be
    written, return 120, or 141 if the reader has closed the pipe. However, a `check` that has evaluated the
    node always returns the code of its verdict. A `check` that fails in any other way has not evaluated the
    node: it prints the traceback and returns 3.
    """
    sys.setswitchinterval(SWITCH_S)
    checks = argv[:1] == ["check"]
    try:
        return _obey(argv)
    except BadInput as error:
        return _refused(str(error), checks)
    except BrokenPipeError:
        output.discard()
        return exit_codes.UNREAD
    except output.Unwritten as error:
        _say(f"holdfast: {error}\n")
        output.discard()
        return exit_codes.NOT_WRITTEN
    except Exception as error:  # a script must not mistake a failed `check` for the verdict "degraded"
        if isinstance(error, ModuleNotFoundError) and (lacks := parts.lacking("nodeagent", error)):
            return _refused(lacks, checks)
        if not checks:
            raise
        _say(f"{traceback.format_exc()}holdfast: the check failed, so the node was not evaluated\n")
        return exit_codes.NOT_JUDGED


def _obey(argv: Sequence[str]) -> int:
    # Import here, because a failed import must not look like a verdict either.
    from nodeagent.cli import options

    asked = options.parse(argv)
    from nodeagent.cli import commands

    return commands.COMMANDS[asked.command](asked)


def _refused(why: str, checks: bool) -> int:
    _say(f"holdfast: {why}\n")
    # For `check`, 2 means an unhealthy node, and a script must not mistake a typo for that.
    return exit_codes.USAGE if checks else exit_codes.BAD_INPUT


def _say(text: str) -> None:
    with suppress(OSError):  # stderr may be on the same full disk, and the exit code matters more
        sys.stderr.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
