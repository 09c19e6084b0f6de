"""Validate the options of `holdfast run` in combination, before any process is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.worker import program
from supervisor.cli import run_messages
from supervisor.cli.command_options import RunOptions
from supervisor.local import gpus as devices
from supervisor.options.value_types import span


def checked(
    values: Mapping[str, object],
    words: list[str],
    *,
    as_module: bool,
    as_it_stands: bool,
    notes: tuple[str, ...],
    given: tuple[str, ...],
    environment: Mapping[str, str],
    directory: Path,
) -> RunOptions:
    """Return the checked options of a run.

    Args:
        values: Fields of `RunOptions` by name.
        words: The command as the user wrote it.
        as_module: True if the first word is the name of a module.
        as_it_stands: True if the command is started unchanged, even if its name ends in .py.
        notes: Messages to show to the user before the run starts.
        given: The words of the command line without the run directory.
        environment: The environment variables, for CUDA_VISIBLE_DEVICES.
        directory: The working directory of the command.

    Raises:
        BadInput: The command or an option is missing or invalid, or there are fewer GPUs than ranks.
    """
    gpus = devices.gpus(environment)
    nproc = ranks(values.get("nproc_per_node", 1), gpus)
    command = _entered(words, as_module, as_it_stands)
    fields: Any = {**values, "nproc_per_node": nproc}
    options = RunOptions(command=tuple(command), notes=notes, given=given, **fields)
    if command[:1] == [sys.executable] and not as_module and (directory / command[1]).is_dir():
        raise BadInput(f"script {command[1]!r} is a directory: give a Python file that exists")
    refused = program.launcher_refusal(command)
    if refused:
        raise BadInput(refused)
    try:
        program.parse(command, directory)
    except BadInput as error:
        hint = run_messages.time_hint(given)
        if not hint:
            raise
        raise BadInput(f"{error}; or {hint}") from None
    if options.resume and options.run_dir is None:
        raise BadInput("--resume needs --run-dir DIR: the directory of the run to resume")
    if options.resume and options.from_scratch:
        raise BadInput("--resume and --from-scratch cannot be combined: resume the run or start from step 0")
    check_devices(options, gpus)
    if options.min_members > options.members:
        raise BadInput(
            f"invalid value '{options.min_members}' for --min-members: expected at most --members"
            f" ({options.members})"
        )
    if options.hang_floor_s > options.first_step_timeout_s:
        raise BadInput(
            f"invalid value {span(options.hang_floor_s)!r} for --hang-floor: expected at most"
            f" --first-step-timeout ({span(options.first_step_timeout_s)})"
        )
    return options


def _entered(words: list[str], as_module: bool, as_it_stands: bool) -> list[str]:
    """Return the command, preceded by the Python interpreter where torchrun would add it."""
    if as_module:
        if not words:
            raise BadInput("missing module after -m: expected a name, as in `-m package.train`")
        return [sys.executable, "-m", *words]
    is_script = bool(words) and words[0].endswith(".py") and not as_it_stands
    if is_script or (words[:1] == ["-m"] and words[1:]):
        return [sys.executable, *words]
    return words


def ranks(asked: object, gpus: int | None) -> int:
    if isinstance(asked, int):
        return asked
    cores = os.cpu_count() or 1
    if asked == "gpu" and not gpus:
        raise BadInput(
            "invalid value 'gpu' for --nproc-per-node: no GPU found; expected a number, auto or cpu"
        )
    return cores if asked == "cpu" or not gpus else gpus


def check_devices(
    options: RunOptions,
    gpus: int | None,
    uses_cuda: Callable[[], bool] = devices.torch_uses_cuda,
) -> None:
    """Raise `BadInput` if there are more ranks than GPUs, because NCCL fails if ranks share a GPU."""
    wanted = options.nproc_per_node * options.members
    if not gpus or wanted <= gpus or not uses_cuda():
        return
    most = gpus // options.members
    accepted = f"1-{most}" if most else f"--members 1-{gpus}"
    by = f" with {options.members} members" if options.members > 1 else ""
    here = f"{gpus} GPU" + ("" if gpus == 1 else "s")
    raise BadInput(
        f"invalid value '{options.nproc_per_node}' for --nproc-per-node{by}: {wanted} ranks, but {here};"
        f" expected {accepted}, or CUDA_VISIBLE_DEVICES='' to train on the CPU"
    )
