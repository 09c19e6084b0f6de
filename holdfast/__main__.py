"""The `holdfast` command: hand the command line to the part that it belongs to.

It runs in the user's image too, for `holdfast launch`, so it needs nothing but this package.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Obey one command line (default: the process's own) and return its exit code.

    `node` belongs to the node agent, all others but `launch` and `--version` to the supervisor. They take
    this process over, so that Ctrl-C and the exit code are their own: for those this does not return.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        from holdfast.version import __version__

        sys.stdout.write(f"holdfast {__version__}\n")
        return 0
    if arguments[:1] == ["launch"]:
        from holdfast import launch

        return launch.main(arguments[1:])
    from holdfast import parts

    if arguments[:1] == ["node"]:
        program = parts.command("nodeagent", *arguments[1:])
    else:
        program = parts.command("supervisor", *arguments)
    return os.execv(program[0], program)


if __name__ == "__main__":
    sys.exit(main())
