"""Carry out a command that accesses a cluster."""

from __future__ import annotations

import sys
from typing import TypeAlias

from holdfast.errors import BadInput
from supervisor.cli import checkpoints, command_options, incidents, status
from supervisor.cli.on_cluster import control, doctor, job_source, jobs, nodes
from supervisor.cli.on_cluster.connection import connected
from supervisor.cli.on_cluster.job_source import NamedJob

JobCommand: TypeAlias = "command_options.ReadCommand | command_options.Stop | command_options.Inject"


def obey(command: JobCommand | command_options.Jobs | command_options.Doctor | command_options.Nodes) -> int:
    """Carry out the command and return the exit code.

    Raises:
        BadInput: The command cannot be carried out. The message is one line.
    """
    if isinstance(command, command_options.Checkpoints) and command.verify:
        raise BadInput(
            "--verify needs --run-dir DIR, because a job's storage can be read only where it is mounted"
        )
    with connected(command) as connection:
        if isinstance(command, command_options.Jobs):
            return jobs.show(connection, command)
        if isinstance(command, command_options.Doctor):
            return doctor.show(connection, command)
        if isinstance(command, command_options.Nodes):
            return nodes.show(connection, command)
        return _carry_out(job_source.find(connection, command), command)


def _carry_out(job: NamedJob, command: JobCommand) -> int:
    if isinstance(command, command_options.Stop):
        return control.stop(job, command)
    if isinstance(command, command_options.Inject):
        return control.inject(job, command)
    if isinstance(command, command_options.Status):
        return status.show(job, command)
    if isinstance(command, command_options.Checkpoints):
        return checkpoints.show_reported(job, command)
    if job.omitted and not command.json:
        kept = len(job.incidents())
        sys.stderr.write(f"holdfast: the resource of job {job.path} holds only the last {kept} incidents\n")
    return (
        incidents.show(job, command)
        if isinstance(command, command_options.Incidents)
        else incidents.explain(job, command)
    )
