"""Collect the announcements that members of one job are about to end.

The sources are the pod itself (its deletion, its condition DisruptionTarget), its node (`node_notices`), and
requests to leave a node. Clocks of different machines are never compared: the time of an announcement is when
this supervisor first saw it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from supervisor.cluster.departures.node_notices import NodeNotice, departure_of
from supervisor.cluster.pods import PodMember
from supervisor.kubernetes.client import KubernetesObject
from supervisor.kubernetes.watch import ObjectName
from supervisor.view.model import SECOND_NS, Departure

EVICT_AGAIN_S = 10.0  # the time between two requests to evict the same pod
# The reasons of the condition DisruptionTarget: https://kubernetes.io/docs/concepts/workloads/pods/disruptions/
_DISRUPTIONS: Mapping[str, str] = {
    "PreemptionByScheduler": "it is being preempted by a pod with a higher priority",
    "DeletionByTaintManager": "it does not tolerate a taint of its node",
    "EvictionByEvictionAPI": "it is being evicted",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "the kubelet is terminating it",
}


class AnnouncedDepartures:
    """The departures of one job's members, and the pods that must be evicted after their ranks have moved."""

    def __init__(self) -> None:
        self._asked: dict[str, str] = {}  # why a pod must leave its node, by the pod's uid
        self._unfit: dict[str, str] = {}  # the same for pods that are a last choice until they have left
        # when each announcement was first seen, by the pod's uid and the announcement
        self._since_s: dict[tuple[str, str], float] = {}
        self._evicted_s: dict[str, float] = {}  # when the eviction was last requested, by uid

    def leave(self, pods: Iterable[PodMember], node: str, why: str) -> None:
        """Make the pods that are now on a node leave it. Later pods are not affected. Idempotent."""
        self._asked |= {pod.uid: why for pod in pods if pod.node == node and not pod.has_ended}

    def leave_as_members(self, pods: Iterable[PodMember], members: Container[str], why: str) -> None:
        """Make the pods of these members, which have no ranks, leave their nodes. Idempotent.

        Until a pod is gone, its member gets ranks only if there is no other member.
        """
        self._unfit |= {pod.uid: why for pod in pods if pod.member in members and not pod.has_ended}

    def observe(
        self,
        pods: Iterable[PodMember],
        nodes: Mapping[ObjectName, KubernetesObject],
        now_s: float,
        heeded: frozenset[str] = frozenset(),
        placed: Container[str] = (),
    ) -> dict[str, Departure]:
        """Record all announcements, and return the members that are about to end. `nodes` may be incomplete.

        A member with ranks (one in `placed`) moves because of a node agent's verdict only if its node is in
        `heeded`. For a member without ranks, the verdict of any node's agent is an announcement.
        """
        before, self._since_s = self._since_s, {}
        found: dict[str, Departure] = {}
        uids = set[str]()
        for pod in pods:
            uids.add(pod.uid)
            notice = (
                self._notice(pod, nodes, pod.node in heeded or pod.member not in placed)
                if pod.is_running
                else None
            )
            if notice is None:
                continue
            since_s = self._since_s[pod.uid, notice.why] = before.get((pod.uid, notice.why), now_s)
            if now_s >= since_s + notice.patience_s:
                ends_ns = int((since_s + notice.after_s) * SECOND_NS) if notice.after_s is not None else 0
                found[pod.member] = Departure(notice.why, ends_ns, pod.is_ending, notice.is_of_agent)
        self._asked = {uid: why for uid, why in self._asked.items() if uid in uids}
        self._unfit = {uid: why for uid, why in self._unfit.items() if uid in uids}
        self._evicted_s = {uid: at_s for uid, at_s in self._evicted_s.items() if uid in uids}
        return found

    def _notice(
        self, pod: PodMember, nodes: Mapping[ObjectName, KubernetesObject], heeds_verdict: bool
    ) -> NodeNotice | None:
        because = _DISRUPTIONS.get(pod.disruption, "")
        if pod.is_leaving:
            return NodeNotice(f"its pod is being deleted{f': {because}' if because else ''}", pod.grace_s)
        if pod.disruption:
            return NodeNotice(because or f"its pod is about to be disrupted ({pod.disruption})")
        if pod.uid in self._asked:
            return NodeNotice(self._asked[pod.uid])
        if pod.uid in self._unfit:
            return NodeNotice(self._unfit[pod.uid], is_of_agent=True)
        node = nodes.get(ObjectName("", pod.node))
        if node is None:
            return None
        return departure_of(node, pod.tolerations, heeds_verdict=heeds_verdict)

    def take_due_evictions(
        self, pods: Iterable[PodMember], departing: Mapping[str, Departure], now_s: float
    ) -> list[PodMember]:
        """Return the pods that must leave now and that no other program deletes. `pods` have no ranks.

        These are pods that were asked to leave their node, and standbys, each of which is replaced by another
        standby. If a node's agent merely reports a fault, a standby stays on the node, because its
        replacement might be scheduled on the same node. A later call returns a pod again only after
        `EVICT_AGAIN_S`.
        """
        due = [
            pod
            for pod in pods
            if pod.member in departing
            and not pod.is_leaving
            and (
                pod.uid in self._asked
                or pod.uid in self._unfit
                or (pod.is_standby and not departing[pod.member].may_stay)
            )
            and now_s >= self._evicted_s.get(pod.uid, -EVICT_AGAIN_S) + EVICT_AGAIN_S
        ]
        self._evicted_s |= {pod.uid: now_s for pod in due}
        return due
