"""The `holdfast` commands that no other part carries out: `python -m supervisor`.

`holdfast.__main__` carries out `launch`, `install-runtime` and `--version` itself, and starts the sidecar for
`sidecar` and the node agent for `node`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from supervisor.cli import command_options

# Long-lived parts start here too, and a killed one must be back soon. Each command therefore imports only
# what it needs, and a part none of that.


def main(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code. On bad input, print one line to stderr."""
    if argv[:1] == ["serve"]:
        from supervisor.local import serve

        return serve.main(argv[1:])
    if argv == ["cluster", "supervisor"]:
        from supervisor.cluster import main as cluster

        return cluster.main()
    if argv == ["cluster", "webhook"]:
        from supervisor.admission import webhook

        return webhook.main()
    return _carry_out(argv)


def _carry_out(argv: Sequence[str]) -> int:
    from holdfast import exit_codes
    from holdfast.errors import BadInput
    from supervisor.cli import parser
    from supervisor.display import screen

    try:
        return obey(parser.parse(argv))
    except BadInput as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return exit_codes.BAD_INPUT
    except screen.Unwritable as error:
        print(f"holdfast: {error}", file=sys.stderr)
        _discard_output()
        return exit_codes.NOT_WRITTEN
    except BrokenPipeError:
        _discard_output()
        return exit_codes.UNREAD
    except KeyboardInterrupt:  # the user pressed Ctrl-C, so a traceback would look like a defect
        return exit_codes.INTERRUPTED


def obey(command: command_options.Command) -> int:
    """Carry out one command and return its exit code. Each command imports only what it needs.

    Raises:
        BadInput: The command cannot be carried out; the message is one line.
        BrokenPipeError: The reader of the output has closed the pipe.
        Unwritable: The output cannot be written.
    """
    from supervisor.cli import command_options

    if isinstance(command, command_options.RunOptions):
        from supervisor.cli import run

        return run.run(command)
    if isinstance(command, command_options.Demo) and command.cluster:
        from supervisor.cli.on_cluster.demo import course

        return course.run(command)
    if isinstance(command, command_options.Demo):
        from supervisor.cli import demo

        return demo.run(command)
    if isinstance(command, command_options.Show):
        from supervisor.display import screen

        screen.say(command.text)
        return 0
    if isinstance(command, command_options.InjectManifest):
        from supervisor.cli.on_cluster import manifest

        return manifest.show(command)
    if isinstance(command, command_options.PlanOptions):
        from supervisor.cli.sizing import plan

        return plan.show(command)
    if (
        isinstance(command, command_options.Jobs | command_options.Doctor | command_options.Nodes)
        or command.job
    ):
        from supervisor.cli.on_cluster import dispatch

        return dispatch.obey(command)
    if isinstance(command, command_options.Stop | command_options.Inject):
        return _control(command)
    return _display(command)


def _control(command: command_options.Stop | command_options.Inject) -> int:
    from pathlib import Path

    from supervisor.cli import command_options, control
    from supervisor.store import run_directory

    if isinstance(command, command_options.Stop):
        words = "stop --now" if command.now else "stop"
        return control.stop(run_directory.find_living(command.run_dir, Path.cwd(), words), command)
    words = f"inject {command.kind} --rank {command.rank}"
    return control.inject(run_directory.find_living(command.run_dir, Path.cwd(), words), command)


def _display(command: command_options.ReadCommand) -> int:
    from pathlib import Path

    from supervisor.cli import checkpoints, command_options, incidents, status
    from supervisor.store import run_directory

    found = run_directory.find(command.run_dir, Path.cwd())
    if isinstance(command, command_options.Status):
        return status.show(found, command)
    if isinstance(command, command_options.Incidents):
        return incidents.show(found, command)
    if isinstance(command, command_options.Explain):
        return incidents.explain(found, command)
    return checkpoints.show(found, command)


def _discard_output() -> None:
    """Redirect stdout to /dev/null, because the interpreter would fail to flush it at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
