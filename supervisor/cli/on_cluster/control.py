"""`holdfast stop --job` and `holdfast inject --job`: write requests into the job's Supervision."""

from __future__ import annotations

import time

from holdfast.errors import BadInput
from supervisor.cli import command_options, control
from supervisor.cli.on_cluster import stopped_owner
from supervisor.cli.on_cluster.job_source import READ_S, NamedJob
from supervisor.cluster.supervision.status_fields import DRILL_DONE
from supervisor.controller.drills import LIMIT_S
from supervisor.display.screen import say_all
from supervisor.kubernetes.errors import Conflict, NotFound, ServerUnreachable

# How long the supervisor has to read the request, carry out the drill, and write the result.
DRILL_S = 10.0 + LIMIT_S
DRILL_TRIES = 8  # attempts at a conditional write, which fails if the supervisor has written to the resource


def stop(job: NamedJob, command: command_options.Stop) -> int:
    """Stop the job, wait until it has ended, and return the exit code. Raises `BadInput`.

    Afterwards, print what the owner of the pods does next, because only a user can end or suspend the owner.
    """
    _check_running(job, "stop")
    job.change({"stop": "now" if command.now else "graceful"})
    follow_up = stopped_owner.follow_up(job.spec, job.namespace, job.name, command.context)
    code = control.follow_end(job, str(job.path), command, {"owner": follow_up.as_json()})
    has_finished = (job.status() or {}).get("exit_code") == 0  # the owner has finished too
    if not command.json and not job.is_gone and not has_finished:
        say_all(follow_up.lines())
    return code


def inject(job: NamedJob, command: command_options.Inject) -> int:
    """Inject a fault into the job, and return the exit code. Raises `BadInput`."""
    _check_running(job, "inject")
    carry_out(job, command.kind, command.rank)
    control.show_caused(job, str(job.path), command)
    return 0


def carry_out(job: NamedJob, kind: str, rank: int) -> None:
    """Request a fault from the supervisor, and wait until it has been injected. Raises `BadInput`."""
    refused = _result(job, _request(job, kind, rank))
    if refused:
        raise BadInput(f"inject was refused: {refused}")


def _check_running(job: NamedJob, what: str) -> None:
    if job.summary.get("phase") == "ended":
        raise BadInput(control.not_running(job, what))


def _request(job: NamedJob, kind: str, rank: int) -> int:
    """Write a drill into the resource, and return the drill's unique number."""
    for _ in range(DRILL_TRIES):
        asked = job.spec.get("drill")
        numbers = (job.summary.get("drilled"), asked.get("number") if isinstance(asked, dict) else None)
        number = max((each for each in numbers if type(each) is int), default=0) + 1
        drill = {"number": number, "what": kind, "rank": rank}
        try:
            job.change({"drill": drill}, version=job.version)
        except Conflict:
            job.read()
        except ServerUnreachable as error:
            raise BadInput(f"inject: {error.message}{_doubt() if error.sent else ''}") from None
        else:
            return number
    raise BadInput(
        f"inject: the resource of job {job.path} changed during each of {DRILL_TRIES} attempts: try again"
    )


def _result(job: NamedJob, number: int) -> str:
    """Wait for the result of a drill. Return why it was refused; "" if it was carried out.

    Raises `BadInput` if there is no result within `DRILL_S`.
    """
    deadline = time.monotonic() + DRILL_S
    while True:
        drilled, result = job.summary.get("drilled"), str(job.summary.get("drillResult") or "")
        if drilled == number and result:
            return "" if result == DRILL_DONE else result
        if type(drilled) is int and drilled > number:
            raise BadInput(f"inject: another drill of job {job.path} has replaced this one{_doubt()}")
        if job.summary.get("phase") == "ended":  # the supervisor no longer reads requests
            began = drilled == number
            missed = f"the result was reported{_doubt()}" if began else "the fault was injected"
            raise BadInput(f"inject: job {job.path} has ended before {missed}")
        if time.monotonic() >= deadline:
            seen = "has not reported the result" if drilled == number else "has not read the request"
            raise BadInput(f"inject: the supervisor of job {job.path} {seen} within {DRILL_S:g} s{_doubt()}")
        time.sleep(READ_S / 2)
        try:
            job.read()
        except ServerUnreachable:
            continue  # the next read may succeed
        except NotFound:
            raise BadInput(f"inject: job {job.path} was deleted in the meantime") from None


def _doubt() -> str:
    return "; the fault may have been injected: see `holdfast incidents`"
