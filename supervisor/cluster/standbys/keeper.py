"""Create and delete the standby pods of one job, as `plan` says.

Each round observes the pods anew, so a request whose response was lost is never repeated blindly: a standby
that exists already has the name that the next round would use, and a deletion names the pod's uid. Nothing is
created or deleted without a confirmed term, because another supervisor may lead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from supervisor.cluster.pods import PodMember
from supervisor.cluster.standbys import pod_copy
from supervisor.cluster.standbys.plan import StandbyPlan, plan
from supervisor.cluster.standbys.pod_copy import NoCopy
from supervisor.kubernetes.client import PODS, ApiServer
from supervisor.kubernetes.errors import AlreadyThere, ApiError, Conflict, NotFound
from supervisor.kubernetes.leadership import sent_within
from supervisor.view.model import ENDING_PHASES, JobState, Policy

log = logging.getLogger(__name__)

POLL_S = 1.0  # between two rounds
SEEN_S = 10.0  # a pod that was created or deleted is visible to the next round after this time at the latest
RETRY_S = (5.0, 10.0, 30.0, 60.0)  # after the first, second, third and later failures in a row


@dataclass(frozen=True, slots=True)
class StandbyNeeds:
    """What determines a job's standbys: its state, its policy, its pods and its Supervision."""

    memory: JobState
    policy: Policy
    pods: Collection[PodMember]
    supervision: str
    supervision_uid: str


class StandbyKeeper:
    """Keeps the standbys of one job."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        needs: Callable[[], StandbyNeeds | None],
        term_left_s: Callable[[], float],
        report: Callable[[str, str, bool], None],
    ) -> None:
        """`needs` returns None while the job has no run.

        `term_left_s` returns for how long this process certainly leads. `report` records an event: its
        reason, its message, and whether it is bad.
        """
        self._server, self._namespace = server, namespace
        self._needs, self._term_left_s, self._report = needs, term_left_s, report
        self._over_since_s: float | None = None
        self._touched: dict[object, float] = {}  # numbers and uids of recent requests, until when they count
        self._failures = 0
        self._resume_s = 0.0  # no creation before this time
        self._problem = ""  # as last reported

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            needs = self._needs()
            if needs is not None:
                await self._round(needs, time.monotonic())

    async def _round(self, needs: StandbyNeeds, now_s: float) -> None:
        found = self._plan(needs, now_s)
        if not (found.create or found.delete) or self._term_left_s() <= 0:
            return
        try:
            await sent_within(self._term_left_s, self._carry_out(found, needs, now_s))
        except (ApiError, OSError) as error:
            self._failed(str(error), now_s)

    def _plan(self, needs: StandbyNeeds, now_s: float) -> StandbyPlan:
        memory = needs.memory
        is_over = memory.phase in ENDING_PHASES
        if not is_over:
            self._over_since_s = None
        elif self._over_since_s is None:
            self._over_since_s = now_s
        found = plan(
            needs.pods,
            memory.placement,
            needs.policy.members,
            needs.policy.standby,
            may_create=memory.phase == "running" and memory.settled and not memory.stop,
            over_s=None if self._over_since_s is None else now_s - self._over_since_s,
        )
        self._touched = {key: until_s for key, until_s in self._touched.items() if until_s > now_s}
        create = () if now_s < self._resume_s else found.create
        return StandbyPlan(
            tuple(number for number in create if number not in self._touched),
            tuple((pod, why) for pod, why in found.delete if pod.uid not in self._touched),
        )

    async def _carry_out(self, found: StandbyPlan, needs: StandbyNeeds, now_s: float) -> None:
        for pod, why in found.delete:
            self._touched[pod.uid] = now_s + SEEN_S
            try:
                await self._server.delete(PODS, pod.name, self._namespace, uid=pod.uid)
            except (NotFound, Conflict):
                continue
            log.info("standby deleted", extra={"pod": pod.name, "why": why})
        for number in found.create:
            if not await self._create(number, needs, now_s):
                return

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
        avoid = [pod.node for pod in needs.pods if pod.node and not pod.has_ended]
        body = pod_copy.standby_pod(model, needs.supervision, needs.supervision_uid, number, avoid)
        if isinstance(body, NoCopy):
            self._failed(body.why, now_s)
            return False
        self._touched[number] = now_s + SEEN_S
        try:
            await self._server.create(PODS, body, self._namespace)
        except AlreadyThere:  # created by an earlier request, or by an earlier leader
            return True
        self._failures, self._problem = 0, ""
        name = body["metadata"]["name"]
        self._report(
            "StandbyCreated", f"pod {name} is created as a standby, a copy of pod {source.name}", False
        )
        return True

    def _failed(self, why: str, now_s: float) -> None:
        """Wait before the next attempt to create a standby, and report each new problem once."""
        self._resume_s = now_s + RETRY_S[min(self._failures, len(RETRY_S) - 1)]
        self._failures += 1
        if why != self._problem:
            self._problem = why
            self._report("StandbyNotCreated", f"the job lacks a standby: {why}", True)


def _model(needs: StandbyNeeds) -> PodMember | None:
    """Return the pod to copy: one that has ranks and, if possible, was created by the owner."""
    able = [
        pod
        for pod in needs.pods
        if pod.member in needs.memory.placement and pod.is_running and not pod.is_leaving
    ]
    return min(able, key=lambda pod: (pod.is_standby, pod.order, pod.name), default=None)
