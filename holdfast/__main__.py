"""The `holdfast` command: start the part of Holdfast that a command belongs to.

It also runs in the user's image, for `holdfast launch`, so it needs nothing but this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code.

    `node` belongs to the node agent, all others except `launch` and `--version` to the supervisor. Both
    replace this process, so that Ctrl-C and the exit code are their own: for those this does not return.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard()
    if arguments == ["--version"]:
        from holdfast.version import __version__

        return _print(f"holdfast {__version__}\n")
    if arguments[:1] == ["launch"]:
        from holdfast.launcher import cli

        return cli.main(arguments[1:])
    from holdfast import parts

    if arguments[:1] == ["node"]:
        program = parts.command("nodeagent", *arguments[1:])
    else:
        program = parts.command("supervisor", *arguments)
    return os.execv(program[0], program)


def _print(text: str) -> int:
    """Print `text` and return the exit code: the one that the supervisor gives if it cannot be written."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries the rest again
        if isinstance(error, BrokenPipeError):
            return 141
        sys.stderr.write(f"holdfast: the output cannot be written: {error.strerror or error}\n")
        return 120


def _open_standard() -> None:
    """Open a standard stream that the shell has closed (`>&-`) on /dev/null, also for its children.

    Otherwise the next file or connection would get its number, and what is printed would be written there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
