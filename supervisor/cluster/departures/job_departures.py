"""Find out which members of one job are about to end, and evict the pods that their ranks have left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from supervisor.cluster.departures.announced import AnnouncedDepartures
from supervisor.cluster.departures.evictions import JobEvictions
from supervisor.cluster.pods import PodBackend
from supervisor.cluster.supervision.job_events import JobEvents
from supervisor.decision import unreachable_members
from supervisor.kubernetes.client import KubernetesObject
from supervisor.kubernetes.watch import ObjectName
from supervisor.view.model import Departure, JobState

log = logging.getLogger(__name__)


class JobDepartures:
    """Keeps the departures in a job's `PodBackend` up to date, and evicts pods without ranks that must leave.

    `wake` makes the job decide again.
    """

    def __init__(
        self, backend: PodBackend, evictions: JobEvictions, events: JobEvents, wake: Callable[[], None]
    ) -> None:
        self._backend, self._evictions, self._events, self._wake = backend, evictions, events, wake
        self._announced = AnnouncedDepartures()
        self._nodes: Mapping[ObjectName, KubernetesObject] = {}
        self._heeded: frozenset[str] = frozenset()  # nodes whose agent's verdict moves members

    def update_nodes(
        self, nodes: Mapping[ObjectName, KubernetesObject] | None, heeded: frozenset[str] | None
    ) -> None:
        """Set the Node objects that are known, and the names of heeded nodes; None changes nothing."""
        if nodes is not None:
            self._nodes = nodes
        if heeded is not None:
            self._heeded = heeded

    def leave(self, node: str, why: str) -> None:
        """Make the pods that are now on a node leave it. Takes effect with the next `observe`. Idempotent."""
        self._announced.leave(self._backend.pods.values(), node, why)

    def observe(self, memory: JobState | None) -> None:
        """Update which members are about to end, and evict pods without ranks that must leave.

        `memory` is the state of the current run; None before the first run.
        """
        now_s, pods = time.monotonic(), self._backend.pods.values()
        is_settled = memory is not None and memory.phase == "running" and memory.settled
        if memory is not None and is_settled and (away := unreachable_members.were_cut_off(memory)):
            self._announced.leave_as_members(pods, away, "its peers did not reach it")
        placed = memory.positions if memory is not None else {}
        found = self._announced.observe(pods, self._nodes, now_s, self._heeded, placed)
        known = self._backend.announced
        if self._backend.announce(found):
            self._wake()
            self._report(known, placed)
        if memory is not None and found and (is_settled or memory.phase == "forming"):
            self._evict_idle(memory, found, now_s)

    def _report(self, known: Mapping[str, Departure], placed: Mapping[str, object]) -> None:
        """Report each departure that is not in `known`, unless its member has no ranks and may stay."""
        for name, each in self._backend.departures.items():
            is_idle = each.may_stay and name not in placed
            if not is_idle and (name not in known or known[name].why != each.why):
                log.info("member is about to end", extra={"member": name, "why": each.why})
                self._events.record("MemberLeaves", f"member {name} is about to end: {each.why}")

    def _evict_idle(self, memory: JobState, found: Mapping[str, Departure], now_s: float) -> None:
        pods = self._backend.pods.values()
        idle = [pod for pod in pods if pod.is_running and pod.member not in memory.positions]
        if any(pod.member in found for pod in idle) and not self._evictions.why_blocked():
            for pod in self._announced.take_due_evictions(idle, found, now_s):
                log.info("evicting a pod that has left its ranks", extra={"pod": pod.name})
                self._evictions.evict(pod)
