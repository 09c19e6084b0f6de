"""`holdfast node`: `python -m nodeagent`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast import exit_codes
from holdfast.errors import BadInput
from nodeagent.cli import options

# Python's default of 5 ms is too long: a flood overwrites a log of 128 KiB in 10 ms, and the thread that
# reads it yields to another thread at each record.
SWITCH_S = 0.0005


def main(argv: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Bad input prints one line and returns 2, or 64 for `check`.
    """
    sys.setswitchinterval(SWITCH_S)
    try:
        asked = options.parse(argv)
        from nodeagent.cli import commands

        return commands.COMMANDS[asked.command](asked)
    except BadInput as error:
        sys.stderr.write(f"holdfast: {error}\n")
        # 2 is the code of an unhealthy node, which a script must not confuse with a typo.
        return exit_codes.USAGE if argv[:1] == ["check"] else exit_codes.BAD_INPUT
    except BrokenPipeError:
        return exit_codes.UNREAD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
