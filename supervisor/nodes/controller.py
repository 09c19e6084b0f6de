"""Observe the Nodes, plan, and carry out one write at a time while this process leads.

Each write is conditional on the version of the Node that the plan has seen, and is sent only while the term
of the Lease lasts. The answer to a write updates the data for the next plan, which therefore knows about a
node that was just taken out.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NoReturn, Protocol

from holdfast.process import event_loop
from supervisor.admission import pod_layout
from supervisor.kubernetes.client import CONFIG_MAPS, NODES, PODS, ApiServer, KubernetesObject
from supervisor.kubernetes.errors import ApiError, Conflict, EvictionBlocked, NotFound
from supervisor.kubernetes.events import EventRecorder, ObjectReference, api_time
from supervisor.kubernetes.leadership import sent_within
from supervisor.kubernetes.lease import LEASES
from supervisor.kubernetes.watch import Mirror, ObjectName
from supervisor.nodes import agent_reports, drain, node_objects, patches, settings
from supervisor.nodes.agent_reports import AgentReports, ClockError
from supervisor.nodes.announcements import Announcer
from supervisor.nodes.drain import OtherPod
from supervisor.nodes.names import CONFIG, MANAGER
from supervisor.nodes.node_mirror import NodeMirror
from supervisor.nodes.node_objects import KnownNode
from supervisor.nodes.plan import NodePlan, NodeWrite, plan
from supervisor.nodes.settings import BadSettings, QuarantineSettings
from supervisor.nodes.verdicts import AgentVerdicts, NodesInService, VerdictSwaps
from supervisor.quarantine import breaker, evidence, waivers
from supervisor.quarantine.model import MAX_RUNS, NO_NEW_WORK, NodeView, RunFault
from supervisor.quarantine.transition import RUNS_S, not_later

log = logging.getLogger(__name__)

WRITE_S = 10.0  # the time limit of one request, if the term lasts longer
MIN_PLAN_INTERVAL_S = 0.05
# A plan that took 1 ms is followed by a pause of 50 ms, so plans take 2 % of a core, however many agents
# report. A plan for 2,000 nodes takes 20 ms. The pause is limited, because a fault must not wait longer.
PAUSE_FACTOR, MAX_PAUSE_S = 50, 1.0
# Verdicts that arrive in a burst are considered together. For 5,000 bad nodes, this takes 15 ms, so the next
# verdicts are considered 0.15 s later.
HEED_FACTOR = 10
MAX_PLAN_INTERVAL_S = 10.0  # a node that falls silent triggers no event, so plan at least this often
DRAINING_S = 1.0  # the time between two plans while a node is being drained
# the time between two listings of other people's pods on a node that is out
OTHERS_S, OTHERS_DRAINING_S = 30.0, 3.0
DEFECT_S = 5.0
MAX_WRITES = 100  # the maximum number of writes between two pauses
NOT_FOUND_PAUSE_S = 2.0  # the pause before the next request about an object that does not exist
CONFLICT_S = 0.1  # a short pause after a conflict, because the watch delivers what has changed
REFUSED_S, MAX_REFUSED_S = 2.0, 60.0  # the pause after a failed write of one node, doubled each time
MAX_NOTED = 1000  # nodes with faults that runs have seen and that are not stored yet


class QuarantinedJobs(Protocol):
    """The jobs, as the quarantine sees them."""

    def leave(self, node: str, why: str) -> None:
        """Replace the members on this node as planned. Safe to repeat."""

    def members_on(self, node: str) -> int:
        """Return the number of members that are still on the node."""

    def heed_verdicts(self, nodes: frozenset[str]) -> None:
        """Move members to standbys if their node is one of these, and its agent reports a fault."""


class QuarantineController:
    """Carries out the quarantine of one term. `left_s` returns how long the term still lasts."""

    def __init__(
        self,
        server: ApiServer,
        events: EventRecorder,
        namespace: str,
        jobs: QuarantinedJobs,
        left_s: Callable[[], float],
        nodes: NodeMirror,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`namespace` contains the Lease and the settings.

        `nodes` mirrors the nodes that may be in the pool; the caller runs it.
        """
        self.settings = QuarantineSettings()
        self._server, self._jobs, self._left_s, self._wall = server, jobs, left_s, wall
        self._namespace = namespace
        self._announcer = Announcer(events)
        self._known: dict[str, KnownNode] = {}
        self._reports = AgentReports()
        self._clock = ClockError(is_checked=False)  # as of the last plan
        self._runs: dict[str, tuple[RunFault, ...]] = {}
        # pods by node, with the time to list them again
        self._others: dict[str, tuple[Sequence[OtherPod], float]] = {}
        # by node or pod: the number of failures, and until when to pause
        self._paused: dict[str, tuple[int, float]] = {}
        self._draining: set[str] = set()  # nodes where this process has seen work during the drain
        self._installed_s: float | None = None
        self._changed = asyncio.Event()
        self._turned = asyncio.Event()  # a verdict has changed
        self._verdicts = AgentVerdicts()
        self._swaps = VerdictSwaps()
        self._service: NodesInService | None = None  # None before the first plan
        self._waived: set[str] = set()  # nodes with an operator's release that the last plan does not contain
        self._nodes = nodes
        nodes.observe(self._note_node)
        self.synced = nodes.synced  # set when all nodes are known
        self._config = Mirror(
            server, CONFIG_MAPS, self._note_config, namespace=namespace, fields=f"metadata.name={CONFIG}"
        )

    def note_run_fault(self, node: str, fault: RunFault) -> None:
        """Record that a training run saw a fault of this node. Never blocks or raises."""
        if node not in self._runs and len(self._runs) >= MAX_NOTED:
            return
        known = replace(fault, at_s=min(fault.at_s, self._time_s()))
        self._runs[node] = (*self._runs.get(node, ()), known)[-MAX_RUNS:]
        self._changed.set()

    async def run(self) -> NoReturn:
        """Carry out the quarantine. Never returns."""
        await event_loop.until_one_ends(self._config.run(), self._carry_out(), self._heed_changes())
        raise AssertionError("none of them returns")

    # -- observing

    def _note_node(self, name: ObjectName, _: object, new: KubernetesObject | None) -> None:
        if new is None:
            self._known.pop(name.name, None)
            self._reports.forget(name.name)
            self._others.pop(name.name, None)
        else:
            self._take(new)
        if self._note_verdict(name.name):
            self._turned.set()
        self._changed.set()

    def _take(self, found: KubernetesObject) -> None:
        """Store a Node that the server has sent, unless a newer version is known."""
        new = node_objects.read(found)
        old = self._known.get(new.name)
        if old is not None and old.uid == new.uid and _is_older(new.view.version, old.view.version):
            return
        self._known[new.name] = new
        ahead_s = _since_s(new.report_at, self._wall())
        self._reports.note(new, asyncio.get_running_loop().time(), ahead_s)

    def _note_verdict(self, name: str) -> bool:
        """Note a node's verdict. Return True if other members may have to move now."""
        now_s, known = asyncio.get_running_loop().time(), self._known.get(name)
        if known is None:
            has_ended = self._end_release(name)
            return self._verdicts.note(name, None, now_s) or has_ended
        wall_s, age_s, calm_s = self._time_s(), 0.0, math.inf
        if not self._verdicts.knows(name):
            age_s = _age_s(known.verdict_times, wall_s)
            changed_s = min((_age_s((each,), wall_s) for each in known.calm_times), default=math.inf)
            if not known.verdict:
                calm_s = agent_reports.calm_s(known, changed_s, _age_s((known.report_at,), wall_s))
        waived_at_s = self._waived_at_s(known)
        has_ended = False
        if waived_at_s is not None:
            self._waived.add(name)
        else:
            has_ended = self._end_release(name)
        is_known = waived_at_s is not None and waived_at_s <= wall_s - age_s
        has_turned = self._verdicts.note(
            name,
            known.verdict,
            now_s,
            known.view.rack,
            is_expected=known.is_tainted or known.view.cordoned or is_known,
            age_s=age_s,
            calm_s=calm_s,
        )
        return has_turned or has_ended

    def _end_release(self, name: str) -> bool:
        """Stop treating a node as released by an operator. Return False if it was not treated so.

        The next plan would do the same, but a round with many writes can take long.
        """
        was_waived = name in self._waived
        self._waived.discard(name)
        if self._service is not None and name in self._service.waived:
            self._service = replace(self._service, waived=self._service.waived - {name})
            was_waived = True
        return was_waived

    def _waived_at_s(self, node: KnownNode) -> float | None:
        """Return when an operator released a node with a bad verdict; None if it has a newer fault.

        Until this process has heard from the agent, the report that an earlier leader has seen is used.
        """
        if not node.verdict or node.view.waiver is None:
            return None
        view = self._reports.view(node, asyncio.get_running_loop().time(), self.settings.policy)
        if view.report is None and not view.refused:
            reported_s = _age_s((node.report_at,), self._time_s())
            view = replace(view, report=agent_reports.stored_report(node), silent_s=reported_s)
        return node.view.waiver.at_s if self._is_waived(view) else None

    async def _heed_changes(self) -> NoReturn:
        """Heed the verdicts as soon as one has changed, because a node may fail within a second."""
        loop = asyncio.get_running_loop()
        while True:
            await self._turned.wait()
            self._turned.clear()
            begun_s = loop.time()
            try:
                self._heed_verdicts()
            except Exception:  # jobs must survive a defect here, in the same process
                log.exception("verdicts not heeded")
            await asyncio.sleep(min(MAX_PAUSE_S, HEED_FACTOR * (loop.time() - begun_s)))

    def _heed_verdicts(self) -> None:
        """Make members leave the nodes whose agents report a fault, as far as the limits allow."""
        if self._service is None or self._left_s() <= 0:
            return
        now_s, is_dry = asyncio.get_running_loop().time(), self.is_dry
        policy = self.settings.policy
        silent = frozenset(name for name in self._known if self._reports.is_silent(name, now_s, policy))
        service = replace(self._service, silent=silent, waived=self._service.waived | self._waived)
        self._swaps = self._verdicts.swaps(service, policy, now_s, is_dry=is_dry)
        self._jobs.heed_verdicts(self._swaps.moving)

    def _note_config(self, _: ObjectName, __: object, new: KubernetesObject | None) -> None:
        self._changed.set()
        try:
            self.settings = settings.parse((new.get("data") or {}) if new is not None else {})
        except BadSettings as error:
            about = ObjectReference("v1", "ConfigMap", self._namespace, CONFIG, "")
            if self._config.synced.is_set():
                kept = "the last good settings remain in force"
            else:  # this process does not know the previous settings
                self.settings = QuarantineSettings(dry_run="true")
                kept = "actions are only announced until the settings are good"
            self._announcer.warn(about, "BadSettings", f"{error}; {kept}")

    # -- carrying out

    async def _carry_out(self) -> NoReturn:
        await self._nodes.synced.wait()
        await self._config.synced.wait()
        while True:
            self._changed.clear()
            try:
                pause_s, due_s = await self._round()
            except Exception:  # jobs must survive a defect here, in the same process
                log.exception("quarantine failed")
                pause_s = due_s = DEFECT_S
            await asyncio.sleep(pause_s)
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, due_s - pause_s))
            except asyncio.TimeoutError:
                continue

    async def _round(self) -> tuple[float, float]:
        """Plan and act until no write is due. Return how long to pause, and when to plan again."""
        loop = asyncio.get_running_loop()
        if self._left_s() <= 0:
            return DRAINING_S, DRAINING_S
        await self._learn_installation()
        for _ in range(MAX_WRITES):
            begun_s = loop.time()
            found = self._plan()
            spent_s = loop.time() - begun_s
            write = next((each for each in found.writes if not self._is_paused(each.node)), None)
            if write is None or self._left_s() <= 0:
                break
            await self._write(write)
        self._update_service(found)
        self._heed_verdicts()
        self._announce(found)
        await self._correct_conditions()
        await self._drain(found)
        await self._update_others()
        return min(MAX_PAUSE_S, max(MIN_PLAN_INTERVAL_S, PAUSE_FACTOR * spent_s)), self._due_s(found)

    def _plan(self) -> NodePlan:
        now_s, policy = asyncio.get_running_loop().time(), self.settings.policy
        self._clock = self._reports.clock_error(self._clock, now_s, policy)
        wall_s = self._time_s()
        views = agent_reports.views(self._known.values(), self._reports, now_s, policy)
        views = {name: self._with_work(view) for name, view in views.items()}
        self._runs = {name: not_later(faults, wall_s) for name, faults in self._runs.items()}
        return plan(self._known, views, self._runs, policy, wall_s, is_dry=self.is_dry, clock=self._clock)

    def _time_s(self) -> float:
        """Return the time since 1970: this process's clock, corrected by those of the nodes."""
        return self._wall() - self._clock.ahead_s

    @property
    def is_dry(self) -> bool:
        """True while actions are only announced."""
        return self.settings.is_dry(self._installed_s, self._time_s())

    def _announce(self, found: NodePlan) -> None:
        """Announce the plan. Call this after all due writes, because before that, the holds ignore them."""
        awaited = [each.name for each in found.pool.nodes if self._is_awaited(each)]
        policy = self.settings.policy
        self._announcer.planned(found, self._known, awaited, policy, self._swaps, is_dry=self.is_dry)

    def _is_awaited(self, node: NodeView) -> bool:
        return self._reports.is_awaited(node.name, asyncio.get_running_loop().time(), self.settings.policy)

    def _update_service(self, found: NodePlan) -> None:
        """Take the nodes in service from a plan. Nodes that this process has yet to hear from count as known.

        Otherwise, verdicts would not move any members for half a minute after each change of the leader.
        """
        out = frozenset(each.name for each in found.pool.nodes if breaker.is_out(each))
        awaited = sum(each.name not in out and self._is_awaited(each) for each in found.pool.nodes)
        waived = frozenset(each.name for each in found.pool.nodes if self._is_waived(each))
        self._waived.clear()
        state = replace(found.breaker, unknown=found.breaker.unknown - awaited)
        self._service = NodesInService(state, out, waived)

    def _is_waived(self, node: NodeView) -> bool:
        """True if an operator has released the node, and knew everything that is wrong with it now."""
        if node.waiver is None or node.report is None or not evidence.unhealthy(node.report):
            return False
        return not waivers.counted(node, self._time_s(), self.settings.policy)

    def _with_work(self, view: NodeView) -> NodeView:
        others, _ = self._others.get(view.name, ((), 0.0))
        is_busy = self._jobs.members_on(view.name) > 0 or (self.settings.drain_others and bool(others))
        return replace(view, busy=True) if is_busy else view

    async def _learn_installation(self) -> None:
        """Read the installation time from the Lease, which outlives restarts, upgrades and leaders."""
        is_known = self._installed_s is not None or self.settings.dry_run != settings.FIRST_HOUR
        if is_known or self._is_paused(pod_layout.SUPERVISOR_LEASE):
            return
        request = self._server.get(LEASES, pod_layout.SUPERVISOR_LEASE, self._namespace)
        lease = await self._asked(pod_layout.SUPERVISOR_LEASE, request)
        created = (lease or {}).get("metadata", {}).get("creationTimestamp")
        if created:
            self._installed_s = _timestamp_s(str(created))

    def _due_s(self, found: NodePlan) -> float:
        """Return how many seconds to wait before planning again, if nothing happens."""
        now_s, wall_s = asyncio.get_running_loop().time(), self._time_s()
        ends = [each.until_s - wall_s for each in found.holds]
        ends += [until_s - now_s for _, until_s in self._paused.values() if until_s > now_s]
        if found.draining:
            ends.append(DRAINING_S)
        return min(MAX_PLAN_INTERVAL_S, max(MIN_PLAN_INTERVAL_S, min(ends, default=MAX_PLAN_INTERVAL_S)))

    # -- writing

    async def _write(self, write: NodeWrite) -> None:
        node = self._known[write.node]
        body = patches.main_patch(node, write.after, write.note, self._now_text())
        request = self._server.patch(NODES, node.name, body, manager=MANAGER)
        answer = await self._asked(node.name, request)
        if answer is None:
            return
        self._take(node_objects.prune(answer))
        self._forget_runs(node.name, write.after.runs)
        self._announcer.wrote(node, write)

    def _now_text(self) -> str:
        return api_time(datetime.fromtimestamp(self._time_s(), timezone.utc))

    def _forget_runs(self, name: str, written: Sequence[RunFault] = ()) -> None:
        """Forget faults that have been written to the Node, or are too old to be evidence."""
        oldest_s = self._time_s() - RUNS_S
        left = [each for each in self._runs.pop(name, ()) if each not in written and each.at_s > oldest_s]
        if left:
            self._runs[name] = tuple(left)

    async def _correct_conditions(self) -> None:
        """Make Holdfast's conditions agree with the records, even where an earlier leader did not."""
        for node in list(self._known.values()):
            condition = patches.condition_of(node)
            if condition is None or self._is_paused(node.name) or self._left_s() <= 0:
                continue
            body = patches.status_apply(node, condition)
            request = self._server.apply(NODES, body, MANAGER, force=True, subresource="status")
            answer = await self._asked(node.name, request)
            if answer is not None:
                self._take(node_objects.prune(answer))

    async def _asked(
        self, name: str, request: Coroutine[Any, Any, KubernetesObject]
    ) -> KubernetesObject | None:
        """Return the answer. If the request fails, return None and send nothing about `name` for a while.

        If no answer has arrived, the write may have taken effect. The watch then shows it, and the next plan
        no longer contains it.
        """
        try:
            answer = await asyncio.wait_for(sent_within(self._left_s, request), WRITE_S)
        except NotFound:
            self._pause(name, NOT_FOUND_PAUSE_S)
            self._known.pop(name, None)
        except Conflict:
            self._pause(name, CONFLICT_S)
            current = self._nodes.objects.get(ObjectName("", name))
            if current is not None:  # for example after a restore from a backup, when versions are lower
                self._known[name] = node_objects.read(current)
        except (ApiError, OSError, asyncio.TimeoutError) as error:
            failures = self._paused.get(name, (0, 0.0))[0] + 1
            if failures == 1:
                log.warning("node not changed", extra={"about": name, "error": str(error) or "no answer"})
            self._pause(name, min(MAX_REFUSED_S, REFUSED_S * 2.0 ** min(failures - 1, 10)), failures)
        else:
            self._paused.pop(name, None)
            return answer
        return None

    def _pause(self, name: str, pause_s: float, failures: int = 0) -> None:
        self._paused[name] = (failures, asyncio.get_running_loop().time() + pause_s)

    def _is_paused(self, name: str) -> bool:
        """True if the last request about `name` failed a short time ago. The number of failures is kept."""
        found = self._paused.get(name)
        if found is None or asyncio.get_running_loop().time() < found[1]:
            return found is not None
        if not found[0]:
            del self._paused[name]
        return False

    # -- draining

    async def _drain(self, found: NodePlan) -> None:
        """Make members leave the drained nodes. Other people's pods follow, if the operator allows it."""
        self._draining &= {name for name, _ in found.draining}
        for name, why in found.draining:
            node = self._known.get(name)
            if node is None or self._left_s() <= 0:
                continue
            if self._jobs.members_on(name):
                self._draining.add(name)
                self._jobs.leave(name, why)
            elif self.settings.drain_others:
                await self._evict_others(node)
            elif name in self._draining:
                self._end_drain(node)

    def _end_drain(self, node: KnownNode) -> None:
        if node.name in self._draining:
            self._draining.discard(node.name)
            self._announcer.about(node, "Drained", "its work has been ended: the remedy can begin")

    async def _evict_others(self, node: KnownNode) -> None:
        others, due_s = self._others.get(node.name, ((), 0.0))
        if asyncio.get_running_loop().time() >= due_s:
            listed = await self._list_others(node.name, OTHERS_DRAINING_S)
            if listed is None:
                return
            others = listed
        if not others:
            self._end_drain(node)
            return
        self._draining.add(node.name)
        for pod in others:
            if not self._is_paused(pod.uid) and self._left_s() > 0:
                await self._evict(node, pod)

    async def _evict(self, node: KnownNode, pod: OtherPod) -> None:
        request = self._server.evict(pod.namespace, pod.name, pod.uid)
        failures = self._paused.get(pod.uid, (0, 0.0))[0] + 1
        try:
            await asyncio.wait_for(sent_within(self._left_s, request), WRITE_S)
        except NotFound:
            self._paused.pop(pod.uid, None)
            return
        except (EvictionBlocked, ApiError, OSError, asyncio.TimeoutError) as error:
            if failures == 1:
                why = f"pod {pod.namespace}/{pod.name} is not evicted yet: {error or 'no answer'}"
                self._announcer.about(node, "DrainBlocked", why, "Warning")
        self._pause(pod.uid, drain.retry_s(failures), failures)

    async def _update_others(self) -> None:
        """List other people's pods on the nodes that are out, if they may be evicted for a remedy."""
        now_s = asyncio.get_running_loop().time()
        for name in list(self._runs):
            self._forget_runs(name)
        self._paused = {key: each for key, each in self._paused.items() if each[1] > now_s - MAX_REFUSED_S}
        if not self.settings.drain_others:
            self._others.clear()
            return
        for node in list(self._known.values()):
            held = node.view.quarantine
            if held is None or held.effect != NO_NEW_WORK:
                self._others.pop(node.name, None)
            elif now_s >= self._others.get(node.name, ((), 0.0))[1]:
                await self._list_others(node.name, OTHERS_S)

    async def _list_others(self, name: str, again_s: float) -> Sequence[OtherPod] | None:
        """Return the pods on a node that may be evicted; None if they cannot be listed now."""
        now_s = asyncio.get_running_loop().time()
        try:
            found = await self._server.list(PODS, fields=f"spec.nodeName={name}", prune=drain.prune_pod)
        except (ApiError, OSError) as error:
            log.warning("pods not listed", extra={"about": name, "error": str(error)})
            self._others[name] = (self._others.get(name, ((), 0.0))[0], now_s + again_s)
            return None
        others = drain.evictable(found.objects)
        self._others[name] = (others, now_s + again_s)
        return others


def _timestamp_s(text: str) -> float:
    """Return a time of the API in seconds since 1970. Raises `ValueError`."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _since_s(text: str, wall_s: float) -> float | None:
    """Return how long ago a time was, negative if it is in the future; None if it is unknown."""
    try:
        return wall_s - _timestamp_s(text)
    except (ValueError, OverflowError):
        return None


def _age_s(times: Sequence[str], wall_s: float) -> float:
    """Return how long ago the first of these times was; 0.0 if it is in the future, or if one is unknown."""
    try:
        return max(0.0, wall_s - min(map(_timestamp_s, times), default=wall_s))
    except (ValueError, OverflowError):
        return 0.0


def _is_older(version: str, known: str) -> bool:
    return version.isdecimal() and known.isdecimal() and int(version) < int(known)
