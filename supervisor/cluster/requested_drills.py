"""Carry out the drills that users request in the Supervision of a job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.protocol.drills import DRILLS
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.cluster.supervision.fenced_records import SupervisionRecords
from supervisor.cluster.supervision.resource import SupervisionResource
from supervisor.cluster.supervision.status_fields import DRILL_DONE, MAX_INCIDENT_BYTES
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import ApiError
from supervisor.store.run_lead import Deposed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestedDrill:
    """A drill that a user has requested. A higher number is a newer request."""

    number: int
    what: str
    rank: int


class RequestedDrills:
    """The drills of one job. Each is carried out at most once, even if the supervisor is replaced."""

    def __init__(
        self, server: ApiServer, run: Callable[[], SupervisedRun | None], evict_member: Callable[[str], None]
    ) -> None:
        """`run` returns the current run; `evict_member` evicts the pod of a member."""
        self._server, self._run, self._evict_member = server, run, evict_member
        self._begun = -1  # the number of the newest drill that this process has begun

    def begin(self, wanted: object) -> RequestedDrill | None:
        """Return the drill in `wanted`, a field of the resource's spec, for `carry_out`.

        Returns None if `wanted` contains no valid drill, or one that this process has already begun.
        """
        drill = _read_drill(wanted)
        if drill is None or drill.number <= self._begun:
            return None
        self._begun = drill.number
        return drill

    async def carry_out(
        self, drill: RequestedDrill, resource: SupervisionResource, records: SupervisionRecords
    ) -> None:
        """Carry out a drill, and write the result into the resource.

        The number is written first, so that no other process repeats the fault if this process dies.
        """
        try:
            if not await self._claim(drill, resource, records):
                return
            result = await self._cause_fault(drill)
            await _write(records, drill, result)
        except Deposed:
            records.lead.depose()
        except (ApiError, OSError) as error:
            log.warning("drill not recorded", extra={"error": str(error)})

    async def _claim(
        self, drill: RequestedDrill, resource: SupervisionResource, records: SupervisionRecords
    ) -> bool:
        """Write the number of a drill. Return False if it was already written. Raises `Deposed`."""
        try:
            found = await self._server.get(SUPERVISIONS, resource.name, resource.namespace)
            known = (found.get("status") or {}).get("drilled")
            if type(known) is int and known >= drill.number:
                return False
            await _write(records, drill, "")
        except (ApiError, OSError):
            self._begun = drill.number - 1  # the next round of the registry starts the drill again
            raise
        return True

    async def _cause_fault(self, drill: RequestedDrill) -> str:
        """Cause the fault; return `DRILL_DONE`, or why it was not caused."""
        run = self._run()
        assert run is not None  # the records exist, so the run does
        if drill.what not in DRILLS:
            return f"unknown drill {drill.what!r}: expected {', '.join(DRILLS)}"
        executor = DRILLS[drill.what].executor
        if executor == "supervisor":
            return "the supervisor of a cluster serves all of its jobs: delete its pod instead"
        try:
            pending = run.cause_fault(drill.what, drill.rank)
        except ValueError as error:
            return str(error)
        if executor == "keeper":
            self._evict_member(run.memory.placement[drill.rank // run.memory.nproc])
        refused = "" if pending is None else await run.drills.await_outcome(pending)
        return f"{refused}: the drill is withdrawn" if refused else DRILL_DONE


def _read_drill(wanted: object) -> RequestedDrill | None:
    """Return the drill in a Supervision's spec; None if there is none or it is invalid."""
    if not isinstance(wanted, Mapping):
        return None
    number, what, rank = wanted.get("number"), wanted.get("what"), wanted.get("rank", 0)
    if type(number) is not int or type(rank) is not int or not isinstance(what, str):
        return None
    return RequestedDrill(number, what, rank)


async def _write(records: SupervisionRecords, drill: RequestedDrill, result: str) -> None:
    values = {"drilled": drill.number, "drillResult": result[:MAX_INCIDENT_BYTES]}
    await records.write(values)
