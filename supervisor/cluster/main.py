"""Run the supervisor of a cluster, `holdfast cluster supervisor`.

The process serves the members' connections over TLS, and supervises all jobs while it holds the Lease.
Without the Lease, it tells members that it does not lead, and they try another address.

If the API server does not respond, the leader carries on, because its orders contain its epoch, and members
obey the highest epoch that they know. Until the server responds again, it evicts no pods, because no epoch
protects an eviction.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop, logs
from holdfast.process.network import Door, bearer_token, listen_everywhere
from holdfast.protocol import environment
from holdfast.protocol.member_messages import MEMBER_PATH
from supervisor.admission import pod_layout
from supervisor.cluster.adoption import node_racks
from supervisor.cluster.adoption.pod_facts import KeptPods
from supervisor.cluster.departures.node_notices import kept_node, read_conditions
from supervisor.cluster.host_probe import HostProbes
from supervisor.cluster.jobs import MEMBERS, ClusterJobs
from supervisor.cluster.missed.replacement import MissedPods
from supervisor.cluster.pods import PodGroup, PodMember
from supervisor.cluster.standbys.cluster_room import ClusterRoom
from supervisor.cluster.supervised_job import ClusterContext, SupervisedJob
from supervisor.cluster.supervision import contents
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.controller.limits.incoming import MeteredConnection
from supervisor.controller.limits.shared import SharedLimits
from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AuthoritySecret
from supervisor.kubernetes.client import PODS, ApiServer, KubernetesObject, connect
from supervisor.kubernetes.errors import ApiError, EvictionBlocked, NotFound
from supervisor.kubernetes.events import EventRecorder
from supervisor.kubernetes.identity import Caller, ReviewUnavailable, TokenRefused, TokenReviewer
from supervisor.kubernetes.leadership import LeaderProbes, Leadership, lead, sent_within
from supervisor.kubernetes.lease import EarlyTakeover, LeaseLock, LeaseLost, LeaseTerms, pod_of
from supervisor.kubernetes.own_pod import OwnPod, certificate_for, is_gone, service_names
from supervisor.kubernetes.replicas import EPOCH, HOLDER, PATH, Replicas
from supervisor.kubernetes.watch import Mirror, ObjectName
from supervisor.nodes.controller import QuarantineController
from supervisor.nodes.node_mirror import NodeMirror
from supervisor.observability import cluster_metrics

log = logging.getLogger("supervisor")

HEALTH_PORT = 8080
# Reference counting frees each report when the next one arrives, so a pass of the garbage collector finds
# almost nothing while members stay connected. With 2,000 members, a pass over all objects blocks the event
# loop for 1 to 3 s, and one over new objects for half a second, because the newest reports are among them.
# Only ended connections leave garbage behind, most of it young.
COLLECT_S = 600.0  # the time between two passes over all objects
# The first number is how many new objects are created and not freed before a pass over new objects runs. The
# second is the number of such passes before one also covers the objects that survived them. The third is the
# number of those passes before one covers all objects.
COLLECT_AFTER = (1_000_000, 10, 10)
# The limit for connections that have not sent a token yet. When a new leader starts, all members connect at
# the same time, and closing a connection to make room for others costs another TLS handshake.
MAX_IDLE = 1024
BACKLOG = 128  # if more connections wait, the kernel drops them, and members wait for a second or longer
# the limit for concurrent reviews; pods in a node's network share the node's address
REVIEWS_PER_ADDRESS = 16
AGAIN_S = 0.5  # the time between two attempts to read what a new leader needs
# While this process expects to lead soon, or has just begun to lead, a member's request waits for up to this
# long. If it were refused, the member would try again only after up to a second.
HELD_S = 4.0
MAX_HELD = 2048  # requests that wait
BRIEF_S = 60.0  # an older process that loses the Lease re-executes itself; a younger one exits
SHUTDOWN_S = 1.0  # the limit for disconnecting the members, which then connect to the next supervisor


class ClusterSupervisor:
    """The supervisor of one process, with its servers and, while it leads, the jobs."""

    def __init__(self, server: ApiServer, me: OwnPod, measured: event_loop.Lag) -> None:
        self.events = EventRecorder(server, "holdfast-supervisor", me.name)
        self._server, self._me, self._measured = server, me, measured
        self._reviewer = TokenReviewer(server, pod_layout.AUDIENCE)
        self._reviewing: Counter[str] = Counter()  # the number of requests being reviewed, by address
        self._jobs: ClusterJobs | None = None  # None unless this process leads
        self._term: Leadership | None = None  # None unless this process leads
        self._probes: LeaderProbes | None = None  # of the leader's host, while another process leads
        self._is_decided = asyncio.Event()  # set unless this process expects to lead soon: see `_decide`
        self._is_decided.set()
        self._held = 0  # the number of requests that wait until this process leads
        self._deleting: set[asyncio.Task[None]] = set()
        self._authorities = AuthoritySecret(server, me.namespace)
        self.limits = SharedLimits()

    # -- leading

    async def lead(self, replicas: Replicas) -> None:
        """Supervise all jobs whenever this process holds the Lease, and wait for it otherwise. Never returns.

        Raises `LeaseLost` when the lease is lost. The process must then end, because its successor continues
        from the cluster's state.
        """
        me = self._me
        name, terms = pod_layout.SUPERVISOR_LEASE, LeaseTerms(early=EarlyTakeover())
        lock = LeaseLock(self._server, me.namespace, name, me.name, terms, pod_uid=me.uid)
        self._probes = LeaderProbes(lock, replicas.answers, self._decide)
        while True:
            await lead(lock, self._supervise, replicas.rival, replicas.end_of, self._probes)

    async def pod_is_gone(self, holder: str) -> bool:
        """Return True if the pod of this holder of the lease is known to have ended."""
        name, uid = pod_of(holder)
        return await is_gone(self._server, self._me.namespace, name, uid)

    async def _supervise(self, term: Leadership) -> None:
        log.info("leads", extra={"epoch": term.epoch})
        self._term = term  # a former leader that cannot reach the API server asks this process for the term
        self._decide()
        try:
            await self._supervise_all(term)
        finally:
            self._jobs = self._term = None
            self._decide()

    async def _supervise_all(self, term: Leadership) -> None:
        authorities = await self._load_authorities()
        changed = asyncio.Event()

        racks = node_racks.rack_labels(os.environ.get(environment.RACK_LABELS, ""))
        nodes = NodeMirror(self._server, kept_labels=racks, kept_conditions=read_conditions())

        def note_node(_: object, old: KubernetesObject | None, new: KubernetesObject | None) -> None:
            """Make the jobs check the nodes, unless only a report has changed: that is for the quarantine."""
            if old is None or new is None or kept_node(old, racks) != kept_node(new, racks):
                changed.set()

        nodes.observe(note_node)

        def rack_of(name: str) -> str:
            node = nodes.objects.get(ObjectName("", name))
            return node_racks.rack_of(node["metadata"].get("labels") or {}, racks) if node is not None else ""

        room = ClusterRoom(self._server)
        context = ClusterContext(
            server=self._server,
            events=self.events,
            records=StorageThread("records"),
            epoch=term.epoch,
            secret=_secret(authorities),
            lag=self._measured.over_last_minute,
            evict=self._evict,
            is_out_of_reach=lambda namespace: (
                self._jobs is not None and self._jobs.is_out_of_reach(namespace)
            ),
            jobs=lambda: len(self._jobs.jobs) if self._jobs is not None else 1,
            term_left_s=lambda: term.left_s,
            limits=self.limits,
            rack_of=rack_of,
            note_run_fault=lambda node, fault: quarantine.note_run_fault(node, fault),
            may_order=lambda: term.may_order,
            paused_s=self._measured.paused_s,
            room=room,
        )
        pods, supervisions = self._mirror_pods(changed), self._mirror_supervisions(changed)

        def make(group: PodGroup) -> SupervisedJob:
            return SupervisedJob(context, group)

        jobs = ClusterJobs(self._server, pods, supervisions, self.events, make, nodes.objects)
        jobs.changed = changed
        jobs.leads = lambda: term.left_s > 0
        room.idle = jobs.idle_standbys
        quarantine = QuarantineController(
            self._server, self.events, self._me.namespace, jobs, lambda: term.left_s, nodes
        )
        probes = HostProbes(lambda: (each for job in jobs.jobs.values() for each in job.probed))
        missed = MissedPods(
            *(self._server, lambda: jobs.jobs, jobs.place_of, jobs.notice),
            term_left_s=lambda: term.left_s,
            is_dry=lambda: quarantine.is_dry,
        )
        self._jobs = jobs
        self._decide()
        await event_loop.until_one_ends(
            pods.run(),
            supervisions.run(),
            nodes.run(),
            jobs.find_unsupervised(),
            missed.run(),
            probes.run(),
            self._suspect_node(term, probes),
            jobs.run(),
            room.run(),
            quarantine.run(),
        )

    async def _suspect_node(self, term: Leadership, probes: HostProbes) -> None:
        """Tell `probes` about the node of the previous leader if it does not answer. Never returns."""
        name, _ = pod_of(term.replaced.holder) if term.replaced is not None else ("", "")
        if name:
            try:
                pod = await self._server.get(PODS, name, self._me.namespace)
            except (ApiError, OSError) as error:
                log.warning("node of the previous leader not found", extra={"error": str(error)})
            else:
                node = str(pod.get("spec", {}).get("nodeName", ""))
                log.warning(
                    "the previous leader's node does not answer",
                    extra={"node": node, "silent_s": round(term.silent_for_s, 1)},
                )
                probes.suspect(node, term.silent_for_s)
        await asyncio.Event().wait()

    def _mirror_pods(self, changed: asyncio.Event) -> Mirror:
        """Return a mirror of the pods that may be members, which sets `changed` at each change."""
        keeping = KeptPods()

        def note(name: ObjectName, _: object, new: KubernetesObject | None) -> None:
            if new is None:
                keeping.forget(*name)
            changed.set()

        return Mirror(
            self._server, PODS, note, labels=MEMBERS, prune=keeping.keep, listing=keeping.forget_all
        )

    def _mirror_supervisions(self, changed: asyncio.Event) -> Mirror:
        """Return a mirror of users' requests to jobs, which sets `changed` at each new request."""

        def note(_: object, old: KubernetesObject | None, new: KubernetesObject | None) -> None:
            if contents.is_news(old, new):
                changed.set()

        return Mirror(self._server, SUPERVISIONS, note, prune=contents.requests_only)

    async def _load_authorities(self) -> tuple[certificates.Authority, ...]:
        """Return the authorities. Retry until the API server responds, because giving up would not help."""
        while True:
            try:
                return await self._authorities.load()
            except (ApiError, OSError) as error:
                log.warning("authority not read", extra={"error": str(error)})
                await asyncio.sleep(AGAIN_S)

    def _evict(self, namespace: str, pod: PodMember) -> None:
        """Evict a pod in the background. If this fails, the job requests it again.

        Without a confirmed term, evict no pod, because another process may lead and need the pod.
        """
        if self._term is None or self._term.left_s <= 0:
            log.warning("pod not evicted: the lease is not renewed", extra={"pod": pod.name})
            return
        task = asyncio.create_task(self._evict_now(namespace, pod, self._term))
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def _evict_now(self, namespace: str, pod: PodMember, term: Leadership) -> None:
        """Evict the pod, and abandon the request when the term ends.

        The pod is evicted, not deleted, because some owners do not count an eviction as a failure, and
        because an eviction respects PodDisruptionBudgets.
        """
        try:
            await sent_within(lambda: term.left_s, self._server.evict(namespace, pod.name, pod.uid))
        except NotFound:
            return
        except (EvictionBlocked, ApiError, OSError) as error:
            log.warning("pod not evicted", extra={"pod": pod.name, "error": str(error)})

    # -- serving

    async def member(self, request: web.Request) -> web.StreamResponse:
        """Serve the connection of a member, which its token identifies.

        A replica that does not lead refuses the connection before the token is reviewed, because the API
        server may not respond to this replica. The member then tries another address. If this replica expects
        to lead soon, the member waits.
        """
        await self._until_decided()
        self._refuse_unless_leading()
        caller = await self._review(request)
        if isinstance(caller, ReviewUnavailable):
            raise web.HTTPServiceUnavailable(text=f"{caller.why}\n")
        if not isinstance(caller, Caller):
            raise web.HTTPUnauthorized(text=f"{caller.why}\n")
        jobs = self._refuse_unless_leading()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(jobs.formed.wait(), HELD_S)
        jobs = self._refuse_unless_leading()
        job = jobs.job_of(caller.pod_uid)
        if job is None:
            jobs.changed.set()
            raise web.HTTPServiceUnavailable(
                text=f"pod {caller.pod} is not a member of a job, at least not yet\n"
            )
        return await job.serve(request, caller.pod_uid)

    async def _until_decided(self) -> None:
        """Return when this process leads, or as soon as it does not expect to, or after `HELD_S`."""
        if self._is_decided.is_set() or self._held >= MAX_HELD:
            return
        self._held += 1
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._is_decided.wait(), HELD_S)
        finally:
            self._held -= 1

    def _decide(self) -> None:
        """Let members wait while this process expects to lead soon, or reads what a new leader needs."""
        expects = self._term is not None or (self._probes is not None and self._probes.is_suspected)
        if expects and self._jobs is None:
            self._is_decided.clear()
        else:
            self._is_decided.set()

    def _refuse_unless_leading(self) -> ClusterJobs:
        """Return the jobs. Raises `HTTPServiceUnavailable` if this process does not lead."""
        if self._jobs is None:
            raise web.HTTPServiceUnavailable(text="this supervisor does not lead\n")
        return self._jobs

    async def _review(self, request: web.Request) -> Caller | TokenRefused | ReviewUnavailable:
        """Return the pod that the request's token belongs to.

        The number of reviews for one address is limited, to keep forged tokens from delaying the reviews of
        members' tokens.
        """
        address = request.remote or ""
        if self._reviewing[address] >= REVIEWS_PER_ADDRESS:
            return ReviewUnavailable("the tokens of too many requests from this address are being reviewed")
        self._reviewing[address] += 1
        try:
            return await self._reviewer.review(bearer_token(request.headers.get("Authorization", "")))
        finally:
            self._reviewing[address] -= 1
            if not self._reviewing[address]:
                del self._reviewing[address]

    async def leader(self, _: web.Request) -> web.Response:
        """Respond to another replica with the current term; its epoch is 0 if this process does not lead."""
        term = self._term
        return web.json_response({EPOCH: term.epoch if term else 0, HOLDER: term.holder if term else ""})

    def measure(self) -> None:
        """Set the metrics about the Lease and the jobs."""
        jobs = self._jobs.jobs.values() if self._jobs is not None else ()
        cluster_metrics.measure(
            leads=self._term is not None and self._term.left_s > 0,
            jobs=len(jobs),
            standbys_missing=sum(each.standbys_missing for each in jobs),
        )

    async def ready(self, _: web.Request) -> web.Response:
        """Respond to a probe. The process is ready whether or not it leads."""
        return web.Response(text="leads\n" if self._jobs is not None else "waits for the lease\n")


async def serve(measured: event_loop.Lag) -> None:
    """Run the process until SIGTERM or SIGINT, or until one of its services fails."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    me = OwnPod.read()
    async with await connect() as server:
        names = service_names(pod_layout.SUPERVISOR_SERVICE, me.namespace)
        certificate = await certificate_for(server, me, names)
        supervisor = ClusterSupervisor(server, me, measured)
        replicas = Replicas(
            names[0],
            pod_layout.SUPERVISOR_PORT,
            me.address,
            certificate,
            pod_is_gone=supervisor.pod_is_gone,
        )
        door = Door(MAX_IDLE)
        members = await _member_app(supervisor, door)
        runners = [members, await _listen_for_probes(supervisor)]
        listener = listen_everywhere(pod_layout.SUPERVISOR_PORT, BACKLOG)
        try:
            await event_loop.until_one_ends(
                supervisor.events.run(),
                certificate.run(),
                door.accept(listener, _protocol(members), certificate.context),
                door.watch(),
                supervisor.limits.incoming.watch(),
                collect_garbage(),
                supervisor.lead(replicas),
                stop.wait(),
            )
            log.info("ends")
        except LeaseLost as error:
            log.error("the lease is lost", extra={"error": str(error)})
            raise
        finally:
            listener.close()
            await supervisor.events.flush(1.0)
            for runner in runners:
                await runner.cleanup()


async def collect_garbage() -> None:
    """Collect garbage at long intervals, replacing Python's automatic collection. Never returns."""
    loop = asyncio.get_running_loop()
    last_s = loop.time()
    while True:
        await asyncio.sleep(1.0)
        generation = due_generation(gc.get_count(), loop.time() - last_s)
        if generation is not None:
            gc.collect(generation)
        if generation == 2:
            last_s = loop.time()


def due_generation(counts: tuple[int, int, int], passed_s: float) -> int | None:
    """Return the oldest generation of objects that the collector must examine now; None if it need not run.

    `counts` is what `gc.get_count` returns, and `passed_s` is the time since the last pass over all objects.
    """
    if passed_s >= COLLECT_S:
        return 2
    found = [number for number, count in enumerate(counts) if count >= COLLECT_AFTER[number]]
    return max(found, default=None)


def _guard(door: Door) -> Any:
    """Return middleware that tells `door` which connections are idle."""

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        # No connection has to be marked as trusted: a member's connection is never idle, because its only
        # request lasts as long as the connection.
        with door.answering(request.protocol):
            try:
                answer: web.StreamResponse = await handler(request)
            except ConnectionError:  # the client is gone; aiohttp would log a traceback
                raise web.HTTPServiceUnavailable from None
            return answer

    return guard


async def _member_app(supervisor: ClusterSupervisor, door: Door) -> web.AppRunner:
    """Return the application on the members' port; `door` accepts the connections."""
    app = web.Application(middlewares=[_guard(door)], client_max_size=1024)
    app.router.add_get(MEMBER_PATH, supervisor.member)
    app.router.add_get(PATH, supervisor.leader)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    return runner


def _protocol(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Return the function that makes the protocol of each connection to the application."""
    server = runner.server
    assert server is not None  # set by `setup`
    loop = asyncio.get_running_loop()
    # None for no log, as for the runner
    return lambda: MeteredConnection(server, loop=loop, access_log=None)  # type: ignore[arg-type]


async def _listen_for_probes(supervisor: ClusterSupervisor) -> web.AppRunner:
    """Serve probes and metrics, which require no token, on a separate port."""

    async def metrics(_: web.Request) -> web.Response:
        supervisor.measure()
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application(client_max_size=1024)
    app.router.add_get("/healthz", supervisor.ready)
    app.router.add_get("/readyz", supervisor.ready)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, port=HEALTH_PORT).start()
    return runner


def _secret(authorities: tuple[certificates.Authority, ...]) -> bytes:
    """Return a secret that is the same for all leaders of this installation."""
    key = certificates.encode(authorities[:1])["ca.key"]
    return hashlib.sha256(b"holdfast job secrets " + key.encode()).digest()


def main() -> int:
    """Serve until SIGTERM. If the lease is lost, begin again as a replica that waits for it.

    The process re-executes itself, so no state survives from the lost term. If the container ended instead,
    the kubelet would wait for up to five minutes before it starts the next one, and nobody could take over
    from the new leader. A term that has ended within `BRIEF_S` is no accident, so the container ends then.
    """
    logs.setup()
    event_loop.limit_tls_buffers()
    gc.disable()
    began_s = time.monotonic()
    try:
        event_loop.run(serve)
    except LeaseLost:
        if time.monotonic() - began_s < BRIEF_S:
            return 1
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0
