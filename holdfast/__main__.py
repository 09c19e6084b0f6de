"""The `holdfast` command: runs or starts the program behind the given command.

This file also runs in the user's image, for `holdfast launch`, so it must not depend on other packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from holdfast import exit_codes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's own) and return its exit code.

    `launch`, `install-runtime` and `--version` run in this process. For all other commands, this function
    does not return. The program behind the command replaces this process, receives Ctrl-C and sets the exit
    code. It is the node agent for `node`, the sidecar for `sidecar`, and otherwise the supervisor.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_standard()
    if arguments == ["--version"]:
        from holdfast.version import __version__

        return _print(f"holdfast {__version__}\n")
    if arguments[:1] == ["launch"]:
        from holdfast.launcher import cli

        return cli.main(arguments[1:])
    if arguments[:1] == ["install-runtime"]:
        from holdfast.launcher import runtime_install

        return runtime_install.main(arguments[1:])
    from holdfast import parts

    if arguments == ["sidecar"]:
        program = parts.command("sidecar")
    elif arguments[:1] == ["node"]:
        program = parts.command("nodeagent", *arguments[1:])
    else:
        program = parts.command("supervisor", *arguments)
    return os.execv(program[0], program)


def _print(text: str) -> int:
    """Print `text` and return 0, or the supervisor's exit code for a failed write."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    except OSError as error:
        # Python would otherwise try to flush the remaining output at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return exit_codes.UNREAD
        sys.stderr.write(f"holdfast: the output cannot be written: {error.strerror or error}\n")
        return exit_codes.NOT_WRITTEN


def _open_standard() -> None:
    """Open /dev/null for each standard stream that the shell has closed (`>&-`). Children inherit it.

    Otherwise the next file or connection would get the free descriptor and would receive the output.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # `os.open` returns the lowest free descriptor, which is `number`.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
