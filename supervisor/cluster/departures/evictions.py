"""Evict pods of one job, unless the supervisor may be unable to reach its members."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from supervisor.cluster.pods import PodMember
from supervisor.cluster.supervision.job_events import JobEvents

log = logging.getLogger(__name__)

_NOT_REACHED = "no pod is evicted: none of the job's members has connected to this supervisor"
_OUT_OF_REACH = (
    "no pod is evicted: most jobs in this namespace or in most namespaces have lost the connections of most"
    " of their members to this supervisor, so its network may be at fault"
)


@dataclass(slots=True)
class JobEvictions:
    """The evictions of one job's pods.

    `evict` evicts a pod. `has_heard` returns True once a member has connected to this supervisor.
    `is_out_of_reach` returns True if this supervisor may be unable to reach the job's namespace.
    """

    evict: Callable[[PodMember], None]
    has_heard: Callable[[], bool]
    is_out_of_reach: Callable[[], bool]
    events: JobEvents
    _reported: str = ""  # why no pod may be evicted, as last reported

    def why_blocked(self) -> str:
        """Return why no pod may be evicted at present; "" if pods may be evicted.

        Evictions are blocked while this supervisor, rather than a member, may have lost its network.
        """
        if not self.has_heard():
            return _NOT_REACHED
        return _OUT_OF_REACH if self.is_out_of_reach() else ""

    def report_blocked(self, why: str) -> None:
        """Report why an eviction is blocked, once for each reason."""
        if why and why != self._reported:
            log.warning("evictions blocked", extra={"why": why})
            self.events.record("EvictionBlocked", why, bad=True)
        self._reported = why
