"""The `holdfast` commands, but for `launch`: `python -m supervisor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast.errors import BadInput
from supervisor.cli import commands
from supervisor.display import screen


def main(argv: Sequence[str]) -> int:
    """Obey one command line and return the exit code; 2, and one line, for bad input."""
    if argv[:1] == ["serve"]:
        from supervisor.local import serve

        return serve.main(argv[1:])
    from supervisor.cli import parser

    try:
        return _obey(parser.parse(argv))
    except BadInput as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 2
    except screen.Unwritable as error:
        print(f"holdfast: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries the rest again
        return 120  # Python's own code for that
    except BrokenPipeError:
        return 141  # the reader of our output has left, as 128 + SIGPIPE says


def _obey(command: commands.Command) -> int:
    if isinstance(command, commands.RunOptions):
        from supervisor.cli import run

        return run.run(command)
    if isinstance(command, commands.Demo):
        from supervisor.cli import demo

        return demo.run(command)
    from supervisor.cli import queries

    return queries.obey(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
