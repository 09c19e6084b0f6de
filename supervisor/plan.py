"""What the processes of a local run are started with: command lines and environments."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast import command, parts, warm
from holdfast import template as holdfast_template
from supervisor import devices

_LAUNCH = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from holdfast.launch import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run and its members are made of."""

    command: tuple[str, ...]
    nproc: int
    gpus: int | None
    warm: str
    runtime: Path
    run_dir: Path
    settings: Mapping[str, str]  # for the sidecar
    supervisor: tuple[str, ...]  # arguments of the supervisor's process

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs"

    def directory(self, member: str) -> Path:
        """Return where a member has its sockets, its pages and its memory."""
        return self.runtime / member


@dataclass(frozen=True, slots=True)
class Start:
    """One process to be."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    descriptors: tuple[int, ...] = ()


def launcher(plan: Plan, member: str, block: int, parent: int, base: Mapping[str, str]) -> Start:
    """Return the launcher of `member`, whose place on this machine's devices is number `block`."""
    root = parts.import_root(plan.runtime / "import")
    argv = (sys.executable, "-c", _LAUNCH, str(root), *launch_words(plan, member, parent))
    return Start(argv, {**base, **devices.share(base, plan.gpus, block, plan.nproc)})


def launch_words(plan: Plan, member: str, parent: int) -> tuple[str, ...]:
    """Return the options and the command of `holdfast launch` for `member`."""
    return (
        *("--directory", str(plan.directory(member)), "--logs", str(plan.logs)),
        *("--name", member, "--nproc", str(plan.nproc), "--warm", plan.warm),
        *("--parent", str(parent), "--", *plan.command),
    )


def template(plan: Plan, parent: int, control: int, base: Mapping[str, str]) -> Start | None:
    """Return the process that imports for all members; None where each must import for itself.

    With GPUs each member sees its own, from before the first import on.
    """
    program = command.parse(list(plan.command), Path.cwd())
    if plan.gpus or plan.warm not in ("auto", "park") or program.kind == "other":
        return None
    root = parts.import_root(plan.runtime / "import")
    return Start(
        program.entered(holdfast_template.BOOT, root),
        {
            **base,
            "PYTHONPATH": parts.with_path(base, root),
            warm.SPEC: warm.spec(program, parent=parent, control=control),
        },
        (control,),
    )


def sidecar(plan: Plan, member: str, parent: int, base: Mapping[str, str]) -> Start:
    environment = {
        **base,
        **plan.settings,
        "HOLDFAST_MEMBER": member,
        "HOLDFAST_NODE": f"{socket.gethostname()}/{member}",
        "HOLDFAST_NPROC": str(plan.nproc),
        "HOLDFAST_DIRECTORY": str(plan.directory(member)),
        "HOLDFAST_PARENT": str(parent),
    }
    return Start(tuple(parts.command("sidecar")), environment)


def supervisor(plan: Plan, parent: int, keeper: int, api: int, base: Mapping[str, str]) -> Start:
    """Return the supervisor, which inherits its line to the keeper and the API's listening socket."""
    environment = {
        **base,
        "HOLDFAST_KEEPER_FD": str(keeper),
        "HOLDFAST_API_FD": str(api),
        "HOLDFAST_PARENT": str(parent),
    }
    return Start(tuple(parts.command("supervisor", "serve", *plan.supervisor)), environment, (keeper, api))
