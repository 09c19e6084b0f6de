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

    Bad input and a package that is not installed print one line and return 2, or 64 for `check`. Output that
    cannot be written returns 120, or 141 if its reader has closed the pipe, but a `check` that has judged the
    node returns the code of its verdict. A `check` that fails in any other way has judged nothing: it prints
    the traceback and returns 3.
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
    except Exception as error:  # a script must not take the failure of `check` for the verdict "degraded"
        if isinstance(error, ModuleNotFoundError) and (lacks := parts.lacking("nodeagent", error)):
            return _refused(lacks, checks)
        if not checks:
            raise
        _say(f"{traceback.format_exc()}holdfast: the check failed, so the node was not judged\n")
        return exit_codes.NOT_JUDGED


def _obey(argv: Sequence[str]) -> int:
    # The imports are inside, because a failure to import must not look like a verdict either.
    from nodeagent.cli import options

    asked = options.parse(argv)
    from nodeagent.cli import commands

    return commands.COMMANDS[asked.command](asked)


def _refused(why: str, checks: bool) -> int:
    _say(f"holdfast: {why}\n")
    # 2 is the code of an unhealthy node, which a script must not confuse with a typo.
    return exit_codes.USAGE if checks else exit_codes.BAD_INPUT


def _say(text: str) -> None:
    with suppress(OSError):  # stderr may be on the same full disk, and the exit code matters more
        sys.stderr.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
