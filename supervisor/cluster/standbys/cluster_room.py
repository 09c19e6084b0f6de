"""Keep standbys out of the way of other pods of the cluster, for all jobs of one leader.

A standby has its job's priority, because a pod cannot change its priority when it takes over ranks. To make
it yield nevertheless, it is created only on nodes that have room for it (`nodes_for`). While it is idle, it
is deleted if a pod without a node would fit in its place (`run`). docs/adr/0019 explains why.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from supervisor.cluster.standbys import waiting_pods
from supervisor.cluster.standbys.node_fit import NodeRoom, PodNeeds, fits, read_node_room, read_pod_needs
from supervisor.cluster.standbys.waiting_pods import HOLD_S, SCHEDULER_S, WaitingPod
from supervisor.cluster.standbys.yielding import NodeStandbys, choose, read_standbys
from supervisor.kubernetes.client import NODES, PODS, ApiServer, KubernetesObject
from supervisor.kubernetes.errors import ApiError, NotFound
from supervisor.kubernetes.watch import Mirror, ObjectName

log = logging.getLogger(__name__)

POLL_S = 0.5  # the time between two checks of the waiting pods
# How long the cached data of a node may be used to reject the node. The node is read again before a standby
# on it is deleted.
FRESH_S = 5.0
READS = 16  # nodes that are read in one round, so a large cluster takes several rounds
MAX_WAITING = 20  # waiting pods that are considered at a time
AGAIN_S = 5.0  # if no standby can yield to a pod, the pod is considered again after this time
# The time before a second standby may yield to the same pod. Deleting the first one did not help, so the pod
# has a requirement that `node_fit` does not consider.
IN_VAIN_S = 600.0
# A list of all pods is reused for at least `SURVEY_S`, and for at least `SURVEY_SHARE` times as long as it
# took to read. Jobs that lack standbys on a full cluster therefore cost little.
SURVEY_S = 5.0
SURVEY_SHARE = 50.0
CANDIDATES = 4  # nodes that a standby may be scheduled on
PROMISED_S = 10.0  # how long a created standby may be missing from the mirror
# How long the room of a yielding standby is reserved for the pod: enough for the standby to end and for the
# scheduler to try again.
RESERVED_S = 45.0
_SCHEDULED = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class IdleStandby:
    """A standby without ranks, in a job that trains well, and a function to delete it.

    `give_way` is called with the waiting pod and the resource; it returns True if the standby is deleted.
    """

    uid: str
    node: str
    own: Collection[str]  # uids of its job's pods, which would only replace it, so it does not yield to them
    give_way: Callable[[PodNeeds, str], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No node has room for a standby. `why` is for users."""

    why: str


@dataclass(slots=True)
class _Survey:
    """All nodes with their pods, as they were at one time. This is only a hint, because it may be old."""

    rooms: tuple[NodeRoom, ...] = ()
    until_s: float = float("-inf")


@dataclass(slots=True)
class ClusterRoom:
    """The room on the nodes of the cluster, and the pods that wait for it. `run` must be running."""

    server: ApiServer
    idle: Callable[[], Iterable[IdleStandby]] = tuple
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)  # hold it from `nodes_for` to the creation
    _mirror: Mirror = field(init=False)
    _survey: _Survey = field(default_factory=_Survey)
    _surveying: asyncio.Lock = field(default_factory=asyncio.Lock)
    # each with the time when it was read
    _rooms: dict[str, tuple[float, NodeRoom]] = field(default_factory=dict)
    _seen_s: dict[str, float] = field(default_factory=dict)  # when each pod began to wait, by uid
    _lacks_s: dict[str, float] = field(default_factory=dict)  # when each pod began to lack room, by uid
    _again_s: dict[str, float] = field(default_factory=dict)  # when each pod is considered again, by uid
    # each standby, with the time until which room is reserved for it
    _promised: list[tuple[float, PodNeeds]] = field(default_factory=list)
    # until when the room of each yielding standby is reserved, by its uid
    _going_s: dict[str, float] = field(default_factory=dict)
    # until when room is reserved, on which node, and for which pod
    _coming: list[tuple[float, str, PodNeeds]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mirror = Mirror(self.server, PODS, fields=waiting_pods.SELECTOR, prune=waiting_pods.kept)

    # -- pods that wait

    async def run(self) -> None:
        """Mirror the pods without a node, and make idle standbys yield to them. Never returns."""
        await asyncio.gather(self._mirror.run(), self._make_way())

    async def _make_way(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.make_way(time.monotonic())
            except (ApiError, OSError) as error:  # the next round tries again
                log.warning("no standby can yield at present", extra={"error": str(error)})

    async def make_way(self, now_s: float) -> None:
        """Delete idle standbys for the pods that have lacked room for long enough."""
        waiting = self._waiting(now_s)
        lacking = [each for each in waiting if each.lacks_room]
        uids = {each.needs.uid for each in lacking}
        self._lacks_s = {uid: self._lacks_s.get(uid, now_s) for uid in uids}
        # Also keep this for pods that briefly lack something else, because each attempt of the scheduler may
        # meet a different obstacle first.
        there = {each.needs.uid for each in waiting}
        self._again_s = {uid: at_s for uid, at_s in self._again_s.items() if uid in there}
        due = waiting_pods.by_importance(
            each
            for each in lacking
            if now_s >= self._lacks_s[each.needs.uid] + SCHEDULER_S
            and now_s >= self._again_s.get(each.needs.uid, now_s)
        )[:MAX_WAITING]
        if not due:
            return
        idle = {each.uid: each for each in self.idle() if each.uid not in self._going_s}
        self._going_s = {uid: until_s for uid, until_s in self._going_s.items() if until_s > now_s}
        due_uids = {each.needs.uid for each in due}  # the room reserved for a pod must not keep that pod out
        self._coming = [
            (until_s, node, pod)
            for until_s, node, pod in self._coming
            if until_s > now_s and pod.uid not in due_uids
        ]
        nodes = sorted(
            {*(each.node for each in idle.values()), *(node for _, node, _ in self._coming)} - {""}
        )
        unread = [each for each in nodes if now_s >= self._rooms.get(each, (-FRESH_S,))[0] + FRESH_S]
        for node in random.sample(unread, min(READS, len(unread))):
            await self._read(node, now_s)
        self._rooms = {name: each for name, each in self._rooms.items() if name in nodes}
        # This is shared by all due pods. `_yield_to` updates it when it finds room for one of them.
        found = {name: read_standbys(self._expected(room), idle) for name, (_, room) in self._rooms.items()}
        for pod in due:
            await asyncio.sleep(0)  # the jobs come first: they share this event loop
            self._again_s[pod.needs.uid] = now_s + (AGAIN_S if len(unread) <= READS else POLL_S)
            if await self._yield_to(pod.needs, found, idle, now_s):
                self._again_s[pod.needs.uid] = now_s + IN_VAIN_S
                return  # the freed room may be enough for other pods as well

    async def _yield_to(
        self,
        pod: PodNeeds,
        nodes: dict[str, NodeStandbys],
        idle: Mapping[str, IdleStandby],
        now_s: float,
    ) -> bool:
        """Delete standbys for a pod. Return True if one is deleted.

        `nodes` contains the nodes in their expected state. If this learns more about a node, it replaces the
        node's entry.
        """
        fitting = next((each.room.name for each in nodes.values() if fits(pod, each.room)), "")
        if fitting:  # the scheduler has not tried again yet
            self._coming.append((now_s + RESERVED_S, fitting, pod))
            nodes[fitting] = read_standbys(nodes[fitting].room.beside([pod]), idle)
            return False
        able = {uid: each for uid, each in idle.items() if pod.uid not in each.own}
        hint = choose(pod, nodes.values(), able.keys())
        if hint is None:
            return False
        node = hint.standbys[0].node
        room = await self._read(node, now_s)  # as it is now
        if room is None:
            del nodes[node]
            return False
        nodes[node] = read_standbys(self._expected(room), idle)
        found = choose(pod, [nodes[node]], able.keys())
        if found is None:
            return False
        gone = [each for each in found.standbys if await idle[each.uid].give_way(pod, found.resource)]
        self._going_s |= {each.uid: now_s + RESERVED_S for each in gone}
        if len(gone) == len(found.standbys):
            self._coming.append((now_s + RESERVED_S, gone[0].node, pod))
        return bool(gone)

    def _expected(self, room: NodeRoom) -> NodeRoom:
        """Return a node as it will be after the yielding standbys are gone and the pods have arrived."""
        coming = [pod for _, node, pod in self._coming if node == room.name]
        return room.without(self._going_s.keys()).beside(coming)

    def _waiting(self, now_s: float) -> list[WaitingPod]:
        found = waiting_pods.found_in(self._mirror.objects.values())
        self._seen_s = {each.needs.uid: self._seen_s.get(each.needs.uid, now_s) for each in found}
        return found

    def why_unscheduled(self, namespace: str, name: str) -> str:
        """Return the scheduler's message about a pod without a node; "" if there is none."""
        found = self._mirror.objects.get(ObjectName(namespace, name))
        return waiting_pods.found_in([found])[0].why if found is not None else ""

    # -- room for a standby

    async def nodes_for(
        self, standby: PodNeeds, avoid: Collection[str], now_s: float
    ) -> tuple[str, ...] | NoRoom:
        """Return nodes outside `avoid` with room for a standby that no other pod is waiting for.

        Nodes without pods of a lower priority are preferred, because the scheduler has nothing to preempt on
        them if the room is taken in the meantime. Other nodes are returned only if there are none of these.
        Raises the exceptions of `ApiServer`.
        """
        if not self._mirror.synced.is_set():
            return NoRoom("it is not known yet which pods are waiting for a node")
        claims = self._claims(now_s)
        rooms = [each for each in await self._surveyed(now_s) if each.name not in avoid]
        fitting = [each for each in rooms if fits(standby, each)]
        random.shuffle(fitting)
        fitting.sort(key=lambda each: (_may_preempt(standby, each), _is_avoided(standby, each)))
        found: list[NodeRoom] = []
        for each in fitting[: 2 * CANDIDATES]:
            room = await self._read(each.name, now_s)
            if room is not None and fits(standby, _claimed(room, claims)):
                found.append(room)
            if len(found) == CANDIDATES:
                break
        harmless = [each for each in found if not _may_preempt(standby, each)]
        if found:
            return tuple(sorted(each.name for each in harmless or found))
        return NoRoom(_why_no_room(claims, fitting))

    def promise(self, standby: PodNeeds, now_s: float) -> None:
        """Reserve room for a standby that was created, until it appears in the mirror."""
        self._promised.append((now_s + PROMISED_S, standby))

    def _claims(self, now_s: float) -> list[PodNeeds]:
        """Return the pods that may be scheduled soon, for which room must be left."""
        waiting = self._waiting(now_s)
        there = {each.needs.place for each in waiting}
        self._promised = [
            (until_s, each) for until_s, each in self._promised if until_s > now_s and each.place not in there
        ]
        held = [
            each.needs
            for each in waiting
            if not each.is_gated
            and (each.lacks_room or not each.why or each.is_standby)
            and now_s < self._seen_s[each.needs.uid] + HOLD_S
        ]
        return held + [each for _, each in self._promised]

    async def _surveyed(self, now_s: float) -> tuple[NodeRoom, ...]:
        """Return all nodes with their pods. This information may be somewhat old."""
        async with self._surveying:
            if now_s < self._survey.until_s:
                return self._survey.rooms
            begun_s = time.monotonic()
            pods: dict[str, list[PodNeeds]] = {}

            def keep(pod: KubernetesObject) -> KubernetesObject:
                needs = read_pod_needs(pod)
                if not _has_ended(pod):
                    pods.setdefault(needs.node, []).append(needs)
                return {}

            nodes = await self.server.list(NODES, prune=_node_only)
            await self.server.list(PODS, fields=_SCHEDULED, prune=keep)
            rooms = tuple(
                read_node_room(each, pods.get(each["metadata"]["name"], ())) for each in nodes.objects
            )
            took_s = time.monotonic() - begun_s
            self._survey = _Survey(rooms, now_s + max(SURVEY_S, SURVEY_SHARE * took_s))
            return rooms

    async def _read(self, node: str, now_s: float) -> NodeRoom | None:
        """Read one node and its pods, including pods for which the scheduler is making room there."""
        try:
            found = await self.server.get(NODES, node)
        except NotFound:
            self._rooms.pop(node, None)
            return None
        listed = await self.server.list(PODS, fields=f"spec.nodeName={node}", prune=_needs_only)
        pods = [each["needs"] for each in listed.objects if each]
        room = read_node_room(found, (each for each in pods if each.node == node))
        nominated = [each.needs for each in self._waiting(now_s) if each.nominated == node]
        room = room.beside(nominated)
        self._rooms[node] = now_s, room
        return room


def _node_only(node: KubernetesObject) -> KubernetesObject:
    """Drop the part of a Node that takes the most memory: the list of its images."""
    status = {"allocatable": (node.get("status") or {}).get("allocatable")}
    return {"metadata": node["metadata"], "spec": node.get("spec") or {}, "status": status}


def _needs_only(pod: KubernetesObject) -> KubernetesObject:
    return {} if _has_ended(pod) else {"needs": read_pod_needs(pod)}


def _has_ended(pod: KubernetesObject) -> bool:
    return (pod.get("status") or {}).get("phase") in _ENDED


def _may_preempt(standby: PodNeeds, room: NodeRoom) -> bool:
    return standby.preempts and any(each.priority < standby.priority for each in room.pods)


def _is_avoided(standby: PodNeeds, room: NodeRoom) -> bool:
    """Return True if the node has a taint that asks the pod to go elsewhere, such as the quarantine's."""
    asks = (each for each in room.taints if each.get("effect") == "PreferNoSchedule")
    return any(not any(known.tolerates(each) for known in standby.tolerations) for each in asks)


def _claimed(room: NodeRoom, claims: Iterable[PodNeeds]) -> NodeRoom:
    """Return a node as it would be if all waiting pods that fit were scheduled there."""
    for each in claims:
        if fits(each, room):
            room = room.beside([each])
    return room


def _why_no_room(claims: Iterable[PodNeeds], fitting: Iterable[NodeRoom]) -> str:
    for room in fitting:
        for each in claims:
            if fits(each, room):
                waits = f"pod {each.place}, which is waiting for a node"
                return f"the room on node {room.name} is reserved for {waits}"
    return "no node without a member of the job has room for it"
