"""Create and delete the standby pods of one job, as `plan` decides.

Each round observes the pods again, so a request whose response was lost is never repeated blindly: if the
standby exists, it has the name that the next round would use, and a deletion specifies the pod's uid. A pod
with that name belongs to this job only if its owner is this job's Supervision. Nothing is created or deleted
without a confirmed term, because another supervisor may lead. Just before its deletion is requested, a
standby is excluded from getting ranks, because the watch shows the deletion only later.

A standby is created only for nodes that have room for it, and deleted if it is not scheduled there soon.
While it is idle, it yields to pods that cannot be scheduled: see `cluster_room`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from supervisor.cluster.pods import PodMember
from supervisor.cluster.standbys import pod_copy, waiting_pods
from supervisor.cluster.standbys.account import StandbyAccount
from supervisor.cluster.standbys.cluster_room import ClusterRoom, IdleStandby, NoRoom
from supervisor.cluster.standbys.node_fit import PodNeeds, read_pod_needs
from supervisor.cluster.standbys.plan import NOT_PLACED, START_S, StandbyPlan, plan
from supervisor.cluster.standbys.pod_copy import NoCopy
from supervisor.cluster.standbys.pod_requests import requests_of
from supervisor.cluster.supervision.contents import supervision_of
from supervisor.kubernetes.client import PODS, ApiServer, KubernetesObject
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Conflict, NotFound, ServerUnreachable
from supervisor.kubernetes.leadership import sent_within
from supervisor.view.model import ENDING_PHASES, JobState, Policy

log = logging.getLogger(__name__)

POLL_S = 1.0  # the time between two rounds
IDLE_POLL_S = 5.0  # the time between two rounds of a job that wants no standby and has none
SEEN_S = 10.0  # the longest time until the next round sees a created or deleted pod
RETRY_S = (5.0, 10.0, 30.0, 60.0)  # the pause after the first, second, third and later failures in a row
ROOM_S = 30.0  # replaces longer times of `RETRY_S` while no node has room
# The pause after a standby has yielded, during which the pod that it yielded to is scheduled.
YIELDED_S = 30.0
AVOID_S = 300.0  # how long to avoid nodes on which a standby was not scheduled


@dataclass(frozen=True, slots=True)
class StandbyNeeds:
    """What determines a job's standbys: its state, its policy, its pods and its Supervision."""

    memory: JobState
    policy: Policy
    pods: Collection[PodMember]
    supervision: str
    supervision_uid: str
    departures: Collection[str] = ()  # the members that are about to end
    queue: str = ""  # see `PodGroup.queue`


class StandbyPods:
    """Keeps the requested number of standbys for one job."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        needs: Callable[[], StandbyNeeds | None],
        term_left_s: Callable[[], float],
        report: Callable[[str, str, bool], None],
        room: ClusterRoom,
        withdraw: Callable[[str, bool], None],
    ) -> None:
        """`needs` returns None while the job has no run.

        `term_left_s` returns how long this process certainly still leads. `report` records an event: its
        reason, its message, and whether it is bad. `withdraw` is called with a pod's uid and True before the
        pod's deletion is requested. The pod gets no ranks from then on. `withdraw` is called with False if
        the pod stays.
        """
        self._server, self._namespace = server, namespace
        self._needs, self._term_left_s, self._report = needs, term_left_s, report
        self._ended_s: float | None = None  # when the job ended
        self._touched: dict[object, float] = {}  # until when each recent request counts, by number or uid
        self._failures = 0
        self._resume_s = 0.0  # no creation before this time
        self._problem = ""  # as last reported
        self._room, self._withdraw = room, withdraw
        self._uncertain: set[str] = set()  # uids of pods whose deletion may have been requested
        self._unplaced_s: dict[str, float] = {}  # since when each pod has had no node, by uid
        # the nodes that each standby may use, by the standby's name
        self._limits: dict[str, tuple[str, ...]] = {}
        # nodes on which a standby was not scheduled, and until when to avoid each
        self._avoided: dict[str, float] = {}
        self._account = StandbyAccount()

    async def run(self) -> None:
        """Work until cancelled."""
        poll_s = POLL_S
        while True:
            await asyncio.sleep(poll_s)
            needs = self._needs()
            poll_s = POLL_S
            if needs is not None:
                if not needs.policy.standby and not _standbys(needs):
                    poll_s = IDLE_POLL_S
                await self._round(needs, time.monotonic())

    def restore(self, shown: Mapping[str, Any]) -> None:
        """Continue the account of an earlier leader from the status that it wrote."""
        self._account.restore(shown)

    def shown(self) -> dict[str, Any]:
        """Return what users see of the standbys; {} if the job never wanted one."""
        needs = self._needs()
        if needs is None:
            return {}
        placed = needs.memory.placement
        return self._account.shown(_standbys(needs), placed, needs.policy.standby, self._problem)

    def idle(self) -> list[IdleStandby]:
        """Return the standbys that may yield to another pod now.

        There are none while the group recovers, or if it soon needs a standby for a member that is about to
        end.
        """
        needs = self._needs()
        if needs is None or not _is_calm(needs.memory):
            return []
        if not set(needs.departures).isdisjoint(needs.memory.placement):
            return []
        own = frozenset(pod.uid for pod in needs.pods)
        return [
            IdleStandby(pod.uid, pod.node, own, partial(self._give_way, pod.uid))
            for pod in _standbys(needs)
            if pod.node
            and not (pod.is_leaving or pod.has_ended or pod.uid in self._touched)
            and pod.member not in needs.memory.placement
        ]

    async def _give_way(self, uid: str, to: PodNeeds, resource: str) -> bool:
        """Delete an idle standby to make room for the pod `to`. Return True if it is deleted."""
        needs, now_s = self._needs(), time.monotonic()
        is_idle = uid in {each.uid for each in self.idle()}
        if needs is None or not is_idle or self._term_left_s() <= 0:
            return False  # it has ranks now, or the group recovers
        pod = next(each for each in needs.pods if each.uid == uid)
        self._resume_s = max(self._resume_s, now_s + YIELDED_S)
        if not await self._delete(pod, now_s):
            return False
        self._problem = f"pod {pod.name} has yielded to pod {to.place}, which lacks {resource}"
        why = f"standby {pod.name} on node {pod.node} yields to pod {to.place}, which lacks {resource}"
        self._report("StandbyYielded", why, False)
        return True

    async def _delete(self, pod: PodMember, now_s: float) -> bool:
        """Delete a pod without ranks, and give it none from now on. Return False if it is already gone."""
        uid = pod.uid
        self._touched[uid] = now_s + SEEN_S
        self._withdraw(uid, True)
        self._uncertain.add(uid)
        try:
            request = self._server.delete(PODS, pod.name, self._namespace, uid=uid)
            await sent_within(self._term_left_s, request)
        except (NotFound, Conflict):
            self._uncertain.discard(uid)
            return False
        except ApiError:
            self._let_stay(uid)
            raise
        except ServerUnreachable as error:
            if not error.sent:
                self._let_stay(uid)
            raise
        self._uncertain.discard(uid)
        return True

    def _let_stay(self, uid: str) -> None:
        self._uncertain.discard(uid)
        self._withdraw(uid, False)

    async def _round(self, needs: StandbyNeeds, now_s: float) -> None:
        await self._keep_account(needs, now_s)
        found = self._plan(needs, now_s)
        if not (found.create or found.delete) or self._term_left_s() <= 0:
            return
        try:
            await sent_within(self._term_left_s, self._carry_out(found, needs, now_s))
        except (ApiError, OSError) as error:
            self._failed(str(error), now_s)

    async def _keep_account(self, needs: StandbyNeeds, now_s: float) -> None:
        standbys = _standbys(needs)
        for pod in standbys:
            if pod.node and not self._account.knows(pod.uid):  # created by an earlier leader, or just now
                self._account.learn(pod.uid, {})
                with suppress(ApiError, OSError):
                    found = await self._server.get(PODS, pod.name, self._namespace)
                    self._account.learn(pod.uid, requests_of(found))
        self._account.note(standbys, now_s)
        there = [each for each in standbys if not (each.is_leaving or each.has_ended)]
        if len([each for each in there if each.uid not in self._touched]) >= needs.policy.standby:
            self._problem = ""

    def _plan(self, needs: StandbyNeeds, now_s: float) -> StandbyPlan:
        memory = needs.memory
        if memory.phase != "ended":
            self._ended_s = None
        elif self._ended_s is None:
            self._ended_s = now_s
        # The last checkpoint may take minutes, and a standby with ranks may be what writes it.
        over_s = 0.0 if self._ended_s is None else now_s - self._ended_s
        unplaced = [each.uid for each in needs.pods if not each.node]
        self._unplaced_s = {uid: self._unplaced_s.get(uid, now_s) for uid in unplaced}
        found = plan(
            needs.pods,
            memory.placement,
            needs.policy.members,
            needs.policy.standby,
            may_create=_is_calm(memory),
            over_s=over_s if memory.phase in ENDING_PHASES else None,
            unplaced_s={uid: now_s - since_s for uid, since_s in self._unplaced_s.items()},
            kept_out=self._kept_out(needs.pods, now_s),
        )
        self._touched = {key: until_s for key, until_s in self._touched.items() if until_s > now_s}
        for uid in self._uncertain - self._touched.keys():  # its deletion would be visible by now
            self._let_stay(uid)
        create = () if now_s < self._resume_s else found.create
        return StandbyPlan(
            # only one per round, because the next one depends on where the scheduler has put this one
            tuple(number for number in create if number not in self._touched)[:1],
            tuple((pod, why) for pod, why in found.delete if pod.uid not in self._touched),
        )

    def _kept_out(self, pods: Collection[PodMember], now_s: float) -> str:
        """Return an owner's pod that has had no node for `START_S` because of other pods; "" for none."""
        for pod in pods:
            is_waiting = not (pod.is_standby or pod.node or pod.is_leaving or pod.has_ended)
            if is_waiting and now_s - self._unplaced_s.get(pod.uid, now_s) >= START_S:
                why = self._room.why_unscheduled(self._namespace, pod.name)
                if any(each in why for each in waiting_pods.TAKEN):
                    return pod.name
        return ""

    async def _carry_out(self, found: StandbyPlan, needs: StandbyNeeds, now_s: float) -> None:
        for pod, why in found.delete:
            # the reason is unknown after the pod is gone
            unscheduled = self._room.why_unscheduled(self._namespace, pod.name)
            if self._has_new_ranks(pod, needs) or not await self._delete(pod, now_s):
                continue
            log.info("standby deleted", extra={"pod": pod.name, "why": why})
            if why == NOT_PLACED:
                limits = self._limits.pop(pod.name, ())
                self._avoided |= dict.fromkeys(limits, now_s + AVOID_S)
                self._failed(f"pod {pod.name}: {why}{': ' if unscheduled else ''}{unscheduled}", now_s)
        for number in found.create if now_s >= self._resume_s else ():
            if not await self._create(number, needs, now_s):
                return

    def _has_new_ranks(self, pod: PodMember, before: StandbyNeeds) -> bool:
        """Return True if a pod has received ranks since `before`, on which the plan to delete it is based."""
        now = self._needs()
        return now is not None and pod.member in {*now.memory.placement} - {*before.memory.placement}

    async def _create(self, number: int, needs: StandbyNeeds, now_s: float) -> bool:
        """Create a standby. Return False if none can be created now."""
        source = _model(needs)
        if source is None:
            return False
        try:
            model = await self._server.get(PODS, source.name, self._namespace)
        except NotFound:
            return False
        if model["metadata"].get("uid") != source.uid:
            return False
        copied = pod_copy.standby_pod(model, needs.supervision, needs.supervision_uid, number, needs.queue)
        if isinstance(copied, NoCopy):
            self._failed(copied.why, now_s)
            return False
        async with self._room.creating:
            return await self._create_on(copied, model, needs, number, now_s)

    async def _create_on(
        self,
        copied: Mapping[str, Any],
        model: KubernetesObject,
        needs: StandbyNeeds,
        number: int,
        now_s: float,
    ) -> bool:
        """Create the standby `copied` where there is room for it. Return False if there is none."""
        self._avoided = {node: until_s for node, until_s in self._avoided.items() if until_s > now_s}
        taken = {pod.node for pod in needs.pods if pod.node and not pod.has_ended}
        wants = read_pod_needs(_with_priority(copied, model))
        nodes = await self._room.nodes_for(wants, taken | self._avoided.keys(), now_s)
        if isinstance(nodes, NoRoom):
            # A brief lack of room is not worth an event.
            self._failed(nodes.why, now_s, most_s=ROOM_S, is_news=self._failures > 0)
            return False
        body = pod_copy.on_nodes(copied, nodes)
        name = body["metadata"]["name"]
        self._touched[number] = now_s + SEEN_S
        try:
            await self._server.create(PODS, body, self._namespace)
        except AlreadyThere:
            return await self._is_ours(name, needs, now_s)
        self._room.promise(wants, now_s)
        self._limits[name] = nodes
        self._failures, self._problem = 0, ""
        gangs = pod_copy.gangs_left(model, body)
        outside = f"; it is outside the job's gang ({', '.join(gangs)})" if gangs else ""
        why = f"pod {name} is created as a standby, a copy of pod {model['metadata']['name']}{outside}"
        self._report("StandbyCreated", why, False)
        return True

    async def _is_ours(self, name: str, needs: StandbyNeeds, now_s: float) -> bool:
        """Return True if the pod of this name was created by an earlier request, or by an earlier leader."""
        try:
            found = await self._server.get(PODS, name, self._namespace)
        except NotFound:
            return False
        if supervision_of(found) == needs.supervision_uid:
            return True
        # A standby of an earlier Supervision with this name is soon gone, so only a lasting problem is worth
        # an event.
        why = f"pod {name}, which does not belong to this job's Supervision, has the standby's name"
        self._failed(why, now_s, is_news=self._failures > 0)
        return False

    def _failed(self, why: str, now_s: float, most_s: float = RETRY_S[-1], *, is_news: bool = True) -> None:
        """Wait before the next attempt to create a standby, and report each new problem once."""
        pause_s = min(most_s, RETRY_S[min(self._failures, len(RETRY_S) - 1)])
        self._resume_s = max(self._resume_s, now_s + pause_s)
        self._failures += 1
        if is_news and why != self._problem:
            self._report("StandbyNotCreated", f"the job lacks a standby: {why}", True)
        if is_news:
            self._problem = why


def _standbys(needs: StandbyNeeds) -> list[PodMember]:
    return [each for each in needs.pods if each.is_standby]


def _is_calm(memory: JobState) -> bool:
    """Return True while the group trains and no recovery needs a standby."""
    return memory.phase == "running" and memory.settled and not memory.stop


def _with_priority(copied: Mapping[str, Any], model: KubernetesObject) -> KubernetesObject:
    """Return the standby with the priority that the API server gives it: the priority of its model."""
    given = {key: model["spec"][key] for key in ("priority", "preemptionPolicy") if key in model["spec"]}
    return {**copied, "spec": {**copied["spec"], **given}}


def _model(needs: StandbyNeeds) -> PodMember | None:
    """Return the pod to copy: one that has ranks and, if possible, was created by the owner."""
    able = [
        pod
        for pod in needs.pods
        if pod.member in needs.memory.placement and pod.is_running and not pod.is_leaving
    ]
    return min(able, key=lambda pod: (pod.is_standby, pod.order, pod.name), default=None)
