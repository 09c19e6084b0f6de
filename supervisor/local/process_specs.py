"""What the processes of a local run are started with: command lines and environments."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import parts
from holdfast.launcher import member_template as holdfast_template
from holdfast.protocol import environment
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.snapshot import member_directory
from holdfast.worker import program as command
from holdfast.worker import script_source, zygote
from supervisor.local import gpus

_LAUNCH = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from holdfast.launcher.cli import main; sys.exit(main(sys.argv[1:]))"
)

_PART_MODULES = ("supervisor.local.serve", "sidecar.reconciler", "sidecar.state.peers")

# The parts of a local run speak plain HTTP on 127.0.0.1. aiohttp reads the system's certificates when it is
# imported, whoever needs them: a fifth of a part's start.
_NO_TLS = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run and its members are made of."""

    command: tuple[str, ...]
    nproc: int
    gpus: int | None
    warm: str
    runtime: Path
    run_dir: Path
    settings: Mapping[str, str]  # for the sidecar
    supervisor: tuple[str, ...]  # arguments of the supervisor's process
    kept: script_source.ProgramSources | None = None  # the command's, as the run began

    @property
    def handed_down(self) -> int:
        """The descriptor of what members are to know of the sources, -1 for none."""
        return self.kept.descriptor if self.kept is not None else -1

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    def directory(self, member: str) -> Path:
        """Return where a member has its sockets, its pages and its memory."""
        return self.runtime / member


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to be."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of ours to be, started by itself or forked. `inherits`: descriptors, each by its variable."""

    words: tuple[str, ...]  # its name, and its arguments
    settings: Mapping[str, str]
    inherits: Mapping[str, int] = field(default_factory=dict)

    def order(self) -> WorkerOrder:
        return WorkerOrder("part", argv=self.words, settings=self.settings, inherits=tuple(self.inherits))

    def alone(self, base: Mapping[str, str]) -> ProcessSpec:
        told = {name: str(descriptor) for name, descriptor in self.inherits.items()}
        variables = {**base, **_NO_TLS, **self.settings, **told}
        return ProcessSpec(tuple(parts.command(*self.words)), variables, tuple(self.inherits.values()))


def launcher(plan: RunSpec, member: str, parent: int, base: Mapping[str, str]) -> ProcessSpec:
    """Return the launcher of `member`."""
    root = parts.import_root(plan.runtime / member_directory.IMPORT)
    argv = (sys.executable, "-c", _LAUNCH, str(root), *launcher_argv(plan, member, parent))
    kept = (plan.handed_down,) if plan.handed_down >= 0 else ()
    return ProcessSpec(argv, {**base, **gpus.dealt_out(base, plan.gpus)}, kept)


def launcher_argv(plan: RunSpec, member: str, parent: int) -> tuple[str, ...]:
    """Return the options and the command of `holdfast launch` for `member`."""
    return (
        *("--directory", str(plan.directory(member)), "--logs", str(plan.logs)),
        *("--name", member, "--nproc", str(plan.nproc), "--warm", plan.warm),
        *("--parent", str(parent), "--kept", str(plan.handed_down), "--", *plan.command),
    )


def member_fork_server(
    plan: RunSpec, parent: int, control: int, base: Mapping[str, str]
) -> ProcessSpec | None:
    """Return the process that imports for all members; None where each must import for itself.

    With GPUs each does: an import that calls CUDA would leave it unusable in what is forked from there.
    """
    program = plan.kept.program if plan.kept else command.parse(list(plan.command), Path.cwd())
    kept = plan.handed_down
    if plan.gpus or plan.warm not in ("auto", "park") or program.kind == "other":
        return None
    root = parts.import_root(plan.runtime / member_directory.IMPORT)
    return ProcessSpec(
        program.entered(holdfast_template.BOOT, root),
        {
            **base,
            "PYTHONPATH": parts.with_path(base, root),
            environment.WARM: zygote.zygote_spec(program, parent=parent, control=control, kept=kept),
        },
        (control,) if kept < 0 else (control, kept),
    )


def part_fork_server(parent: int, control: int, base: Mapping[str, str]) -> ProcessSpec:
    """Return the process that imports for the supervisor and all sidecars."""
    argv = parts.template_command(parent, control, *_PART_MODULES)
    return ProcessSpec(tuple(argv), {**base, **_NO_TLS}, (control,))


def sidecar(plan: RunSpec, member: str, parent: int) -> PartSpec:
    settings = {
        **plan.settings,
        environment.MEMBER: member,
        environment.NODE: f"{socket.gethostname()}/{member}",
        environment.NPROC: str(plan.nproc),
        environment.DIRECTORY: str(plan.directory(member)),
        environment.PARENT: str(parent),
    }
    return PartSpec(("sidecar",), settings)


def supervisor(plan: RunSpec, parent: int, keeper: int, api: int) -> PartSpec:
    """Return the supervisor, which inherits its line to the keeper and the API's listening socket."""
    return PartSpec(
        ("supervisor", "serve", *plan.supervisor),
        {environment.PARENT: str(parent)},
        {environment.KEEPER_FD: keeper, environment.API_FD: api},
    )
