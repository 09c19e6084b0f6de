"""Report to the quarantine which incidents of one job are evidence against a node. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from supervisor.cluster.hardware import repeats
from supervisor.cluster.hardware.repeats import HardwareHistory
from supervisor.quarantine.model import RunFault
from supervisor.view.model import JobState

MAX_MEMBERS_KNOWN = 50_000  # members whose node is remembered; a job has at most 32,768 at a time


class HardwareEvidence:
    """The evidence that the current run of one job contains, and the nodes of the job's members."""

    def __init__(self, job: str, report: Callable[[str, RunFault], None]) -> None:
        """`job` names the job in the evidence. `report` receives a node and a fault, often repeatedly."""
        self._job, self._report = job, report
        self._history = HardwareHistory()  # of the current run
        self._nodes_of: dict[str, str] = {}  # by member, including members that are gone

    def begin_run(self, records: Iterable[Mapping[str, Any]]) -> HardwareHistory:
        """Report the evidence of a run with these recorded incidents, and return its history.

        The earlier supervisor may have ended before the evidence was written to the Node.
        """
        self._history = HardwareHistory(records)
        self._report_all()
        return self._history

    def locate(self, nodes: Mapping[str, str]) -> None:
        """Remember the node of each current member; "" if it has none yet."""
        self._nodes_of.update((member, node) for member, node in nodes.items() if node)
        if len(self._nodes_of) > MAX_MEMBERS_KNOWN:
            self._nodes_of = dict(nodes)

    def observe(self, memory: JobState, places: Iterable[tuple[str, str]]) -> None:
        """Report the open incident if it is evidence. `places` are the addresses and nodes of pods."""
        incident = memory.incident
        if incident is None:
            return
        node_at = {address: node for address, node in places if address}
        found = repeats.of_incident(
            incident,
            memory.world_size,
            lambda member: self._nodes_of.get(member, ""),
            lambda address: node_at.get(address, ""),
        )
        if found is not None and self._history.note(found):
            self._report_all()

    def _report_all(self) -> None:
        for each in self._history.counted:
            self._report(each.node, each.fault(self._job))
