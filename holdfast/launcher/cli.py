"""`holdfast launch -- COMMAND`: what stands before the training command in a member."""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast import parts
from holdfast.errors import BadInput
from holdfast.launcher.launcher import Launcher
from holdfast.launcher.warm_pool import MemberSettings, WarmPool
from holdfast.launcher.worker_group import WorkerGroup
from holdfast.process import linux
from holdfast.protocol import environment
from holdfast.snapshot import member_directory
from holdfast.worker import program, script_source
from holdfast.worker.script_source import ProgramSources
from holdfast.worker.zygote import Zygote

_ABOUT = """\
Start and watch the ranks of one member, as its sidecar says. `holdfast run` and the pod injector
put this before the training command; by hand it is of use only beside a sidecar.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one member until told to stop. Returns the exit code; 2 for bad input."""
    return serve(parse_options(list(sys.argv[1:] if argv is None else argv)))


def serve(
    options: argparse.Namespace, zygote: Zygote | None = None, kept: ProgramSources | None = None
) -> int:
    """Serve one member, with the zygote and the sources that there are already, if any. Returns as `main`."""
    linux.adopt_orphans()
    try:
        if options.parent:
            linux.end_with_parent(options.parent, signal.SIGTERM)
        kept = kept or _load_sources(options)
        directory = Path(options.directory)
        (directory / member_directory.ARENA).mkdir(parents=True, exist_ok=True)
        root = parts.import_root(directory / member_directory.IMPORT)
    except linux.ParentGone:
        member_directory.leave(Path(options.directory), options.parent)
        return 1
    except (BadInput, OSError) as error:
        print(f"holdfast launch: {error}", file=sys.stderr)
        return 2
    _put_on_path(root)
    home = MemberSettings(directory, Path(options.logs), options.name, options.nproc, root, os.getppid())
    _serve(kept, home, _strategy(kept.program, options.warm), zygote)
    if options.parent:
        member_directory.leave(directory, options.parent)
    return 0


def _load_sources(options: argparse.Namespace) -> ProgramSources:
    """Return the run's sources: those handed down, or of now. Raises `BadInput`, `OSError`."""
    if options.kept >= 0:
        return script_source.load(options.kept)
    return script_source.read_sources(program.parse(options.command, Path.cwd()))


def _serve(kept: ProgramSources, home: MemberSettings, strategy: str, zygote: Zygote | None) -> None:
    selector = selectors.DefaultSelector()
    crew = WorkerGroup(home)
    launcher: Launcher | None = None

    def say(process: object, said: object) -> None:
        assert launcher is not None
        launcher.on_say(process, said)  # type: ignore[arg-type]

    def gone(process: object) -> None:
        assert launcher is not None
        launcher.on_gone(process)  # type: ignore[arg-type]

    nest = WarmPool(kept.program, home, selector, say, gone, strategy, zygote=zygote, kept=kept)
    launcher = Launcher(crew, nest, home.directory)
    launcher.serve()


def _strategy(program: program.Program, asked: str) -> str:
    """Return how warm processes are made: "park" forks them, "spawn" starts each by itself."""
    if program.kind == "other":
        return "cold"
    return "park" if asked == "auto" else asked


def _put_on_path(root: Path) -> None:
    """Let the script and its children import `holdfast`, after everything of their own."""
    os.environ["PYTHONPATH"] = parts.with_path(os.environ, root)


def parse_options(argv: list[str]) -> argparse.Namespace:
    given = os.environ.get
    parser = argparse.ArgumentParser("holdfast launch", description=_ABOUT)
    parser.add_argument("--directory", default=given(environment.DIRECTORY, "/run/holdfast"))
    parser.add_argument("--logs", default=given(environment.LOGS, "/run/holdfast/logs"))
    parser.add_argument("--name", default=given(environment.MEMBER, "member"))
    parser.add_argument("--nproc", type=int, default=int(given(environment.NPROC, "1")))
    parser.add_argument("--warm", choices=("auto", "park", "spawn", "cold"), default="auto")
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kept", type=int, default=-1, help=argparse.SUPPRESS)  # descriptor: see `sources`
    own, rest = argv, []
    if "--" in argv:
        place = argv.index("--")
        own, rest = argv[:place], argv[place + 1 :]
    options = parser.parse_args(own)
    options.command = rest
    return options
