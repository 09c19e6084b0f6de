"""`holdfast launch -- COMMAND`: parses the options and runs the launcher of one member."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from holdfast import exit_codes, parts
from holdfast.errors import BadInput
from holdfast.fileio import folder_rights
from holdfast.launcher import termination
from holdfast.launcher.launcher import Launcher
from holdfast.launcher.output_forwarder import forwarder_of
from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.zygote_handle import Zygote
from holdfast.process import linux
from holdfast.protocol import defaults, environment
from holdfast.protocol.launcher_messages import Ending
from holdfast.snapshot import member_directory
from holdfast.worker import program, script_source
from holdfast.worker.script_source import ProgramSources

OUTPUT_S = 5.0  # the time limit for writing the last output, whose reader may be slow
_ABOUT = """\
Start and watch the ranks of one member, as ordered by its sidecar. `holdfast run` and the pod injector put
this command in front of the training command. Without a sidecar, it does not start any ranks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one member until it is stopped, and return the exit code of this process.

    The exit code is 2 for bad input, and 1 if the parent process (`--parent`) has already exited. Otherwise
    it is 0 for a member of a local run, and the job's exit code in a pod.
    """
    return serve(parse_options(list(sys.argv[1:] if argv is None else argv)))


def serve(
    options: argparse.Namespace, zygote: Zygote | None = None, sources: ProgramSources | None = None
) -> int:
    """Serve one member like `main`, using an existing zygote and sources if they are given."""
    linux.adopt_orphans()
    try:
        if options.parent:
            linux.end_with_parent(options.parent, signal.SIGTERM)
        sources = sources or _load_sources(options)
        directory = Path(options.directory)
        folder_rights.make_folder(directory / member_directory.ARENA)
        root = parts.import_root(directory / member_directory.IMPORT)
    except linux.ParentGone:
        member_directory.leave_member(Path(options.directory), options.parent)
        return 1
    except (BadInput, OSError) as error:
        print(f"holdfast launch: {error}", file=sys.stderr)
        if not options.parent:
            termination.leave_message(str(error))
        return exit_codes.BAD_INPUT
    _put_on_path(root)
    settings = MemberSettings(directory, Path(options.logs), options.name, options.nproc, root, os.getppid())
    launcher = Launcher(sources, settings, _strategy(sources.program, options.warm), zygote)
    forwarder = forwarder_of(settings.logs, options.nproc, options.parent)
    launcher.serve()
    if forwarder is not None:
        forwarder.close(OUTPUT_S)
    if options.parent:
        member_directory.leave_member(directory, options.parent)
        # `holdfast run` knows how the run ended, and treats any other exit code as a crash of the launcher.
        return 0
    if launcher.unjoined_ending is not None:
        _report_unjoined(launcher.unjoined_ending, launcher.exit_code)
    return launcher.exit_code


def _report_unjoined(ending: Ending, exit_code: int) -> None:
    """Print the output of a process that failed before it joined, because no rank's log contains it."""
    lines = [line for line in ending.message.splitlines() if line.strip()]
    if not lines:
        return
    with suppress(OSError):  # the output is closed
        print(ending.message.rstrip("\n"), flush=True)
    if exit_code:
        termination.leave_message(ending.raised or lines[-1])


def _load_sources(options: argparse.Namespace) -> ProgramSources:
    """Return the sources that the keeper has read, or read them from disk. Raises `BadInput`, `OSError`."""
    if options.kept >= 0:
        return script_source.load(options.kept)
    return script_source.read_sources(program.parse(options.command, Path.cwd()))


def _strategy(program: program.Program, asked: str) -> str:
    """Return the `strategy` for `WarmPool`. A command that is not a Python script has no warm processes."""
    if program.kind == "other":
        return "cold"
    return "park" if asked == "auto" else asked


def _put_on_path(root: Path) -> None:
    """Put `root` last on PYTHONPATH, to let the script and its children import `holdfast`."""
    os.environ["PYTHONPATH"] = parts.with_path(os.environ, root)


def parse_options(argv: list[str]) -> argparse.Namespace:
    given = os.environ.get
    parser = argparse.ArgumentParser("holdfast launch", description=_ABOUT)
    parser.add_argument("--directory", default=given(environment.DIRECTORY, defaults.MEMBER_DIRECTORY))
    parser.add_argument("--logs", default=given(environment.LOGS, defaults.MEMBER_LOGS))
    parser.add_argument("--name", default=given(environment.MEMBER, "member"))
    parser.add_argument("--nproc", type=int, default=int(given(environment.NPROC, "1")))
    strategies = defaults.WARM_STRATEGIES
    parser.add_argument("--warm", choices=strategies, default=strategies[0])
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    # The descriptor to read the script's sources from.
    parser.add_argument("--kept", type=int, default=-1, help=argparse.SUPPRESS)
    own, rest = argv, []
    if "--" in argv:
        place = argv.index("--")
        own, rest = argv[:place], argv[place + 1 :]
    options = parser.parse_args(own)
    options.command = rest
    return options
