"""Build the command lines and environments for the processes of a local run."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import launch_commands, parts
from holdfast.protocol import environment
from holdfast.protocol.rank_channel import WorkerOrder
from holdfast.snapshot import member_directory
from holdfast.worker import program, script_source, zygote
from supervisor.local import gpus
from supervisor.store.run_directory import RunDir

_PART_MODULES = ("supervisor.local.preloaded", "sidecar.preloaded")

# The parts of a local run use plain HTTP on 127.0.0.1. However, aiohttp always loads the system's
# certificates when it is imported, which takes a fifth of a part's start time.
_NO_TLS = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The parameters of a run's processes."""

    command: tuple[str, ...]
    nproc: int
    gpus: int | None
    warm: str
    runtime: Path
    run_dir: Path
    settings: Mapping[str, str]  # the environment of each sidecar
    supervisor: tuple[str, ...]  # the arguments of the supervisor's process
    kept: script_source.ProgramSources | None = None  # the sources of `command` when the run began

    @property
    def sources_fd(self) -> int:
        """The descriptor of the program's sources, which members inherit; -1 if there is none."""
        return self.kept.descriptor if self.kept is not None else -1

    @property
    def logs(self) -> Path:
        return RunDir(self.run_dir).logs

    def directory(self, member: str) -> Path:
        """Return the folder for a member's sockets, progress pages and snapshots."""
        return self.runtime / member


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """How to start one process."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How to start a supervisor or a sidecar, as a fork or as a separate process."""

    words: tuple[str, ...]  # the name of the part and its arguments
    settings: Mapping[str, str]  # environment variables
    inherits: Mapping[str, int] = field(default_factory=dict)  # descriptors by the variable that names them

    def order(self) -> WorkerOrder:
        return WorkerOrder("part", argv=self.words, settings=self.settings, inherits=tuple(self.inherits))

    def alone(self, base: Mapping[str, str]) -> ProcessSpec:
        descriptors = {name: str(descriptor) for name, descriptor in self.inherits.items()}
        variables = {**base, **_NO_TLS, **self.settings, **descriptors}
        return ProcessSpec(tuple(parts.command(*self.words)), variables, tuple(self.inherits.values()))


def launcher(plan: RunSpec, member: str, parent: int, base: Mapping[str, str]) -> ProcessSpec:
    """Return how to start the launcher of `member` without a fork server."""
    root = parts.import_root(plan.runtime / member_directory.IMPORT)
    argv = (sys.executable, "-c", launch_commands.START, str(root), *launcher_argv(plan, member, parent))
    kept = (plan.sources_fd,) if plan.sources_fd >= 0 else ()
    return ProcessSpec(argv, {**base, **gpus.device_environment(base, plan.gpus)}, kept)


def launcher_argv(plan: RunSpec, member: str, parent: int) -> tuple[str, ...]:
    """Return the options and the command of `holdfast launch` for `member`."""
    return (
        *("--directory", str(plan.directory(member)), "--logs", str(plan.logs)),
        *("--name", member, "--nproc", str(plan.nproc), "--warm", plan.warm),
        *("--parent", str(parent), "--kept", str(plan.sources_fd), "--", *plan.command),
    )


def member_fork_server(
    plan: RunSpec, parent: int, control: int, base: Mapping[str, str]
) -> ProcessSpec | None:
    """Return how to start the fork server of the members; None if each member must import separately.

    With GPUs, members import separately, because CUDA does not work in the forks if an import has used it.
    """
    parsed = plan.kept.program if plan.kept else program.parse(list(plan.command), Path.cwd())
    kept = plan.sources_fd
    if plan.gpus or plan.warm not in ("auto", "park") or parsed.kind == "other":
        return None
    root = parts.import_root(plan.runtime / member_directory.IMPORT)
    return ProcessSpec(
        parsed.entered(zygote.MEMBERS_BOOT_CODE, root),
        {
            **base,
            "PYTHONPATH": parts.with_path(base, root),
            environment.WARM: zygote.zygote_spec(parsed, parent=parent, control=control, kept=kept),
        },
        (control,) if kept < 0 else (control, kept),
    )


def part_fork_server(parent: int, control: int, base: Mapping[str, str]) -> ProcessSpec:
    """Return how to start the fork server of the supervisor and the sidecars."""
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
    """Return how to start the supervisor.

    The supervisor inherits `keeper`, its connection to the keeper, and `api`, the API's listening socket.
    """
    return PartSpec(
        ("supervisor", "serve", *plan.supervisor),
        {environment.PARENT: str(parent)},
        {environment.KEEPER_FD: keeper, environment.API_FD: api},
    )
