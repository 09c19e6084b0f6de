"""Manage the members of one job on a cluster: its pods, which its owner creates, and their connections.

A member is one run of a pod's training container. If the kubelet restarts the container, the launcher's ranks
and state are lost, and the pod becomes a new member, on the same node and with the same snapshots in its
memory volume. A member's name therefore ends with the container's restart count, and changes as soon as the
kubelet reports another container.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from supervisor.admission import pod_layout
from supervisor.admission import settings as pod_settings
from supervisor.cluster.adoption import pod_facts
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.adoption.pod_facts import ENDED_PHASES
from supervisor.cluster.adoption.tolerations import Toleration, tolerations_of
from supervisor.cluster.supervision.contents import RunSize, supervision_of
from supervisor.view.model import Completion, Departure, Policy, StopRequest

log = logging.getLogger(__name__)

REVIVE_S = 2.0  # if a lost member's pod responds again, it becomes another member after this time
RESTART_S = 20.0  # how long the kubelet has to report that it has restarted a dead container
# The annotation's default on a cluster, where the kubelet takes up to 10 s to restart a sidecar that has
# ended twice.
MEMBER_TIMEOUT_S = 30.0


_PEER_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+(?:%\w+)?\]|[\w.-]+):[0-9]{1,5}", re.ASCII)
# The name of a member whose pod was another member before: see `member_name` and `PodBackend`. The numbers
# are shorter than the 8 digits of a uid, so a uid is never mistaken for one of them.
_LATER_START = re.compile(r"(.+\.[^.]{8})(?:\.[0-9]{1,7})?(?:-[0-9]{1,7})?")


@dataclass(frozen=True, slots=True)
class PodMember:
    """A pod as a member of a job."""

    uid: str
    name: str  # the pod's name
    member: str  # the name of the member that the pod is now
    node: str
    container_id: str  # the training container's id; "" before it has started
    is_running: bool  # True if the training container runs
    is_leaving: bool = False  # True if the pod is being deleted; its ranks run until they are ordered to end
    has_ended: bool = False
    first_name: str = ""  # the member's name before the pod became another member without a restart
    exit_code: int | None = None  # the exit code of a pod that has ended; not 0 if it has failed
    last_words: str = ""  # the message that its training container left for the kubelet
    is_standby: bool = False  # True if the supervisor has created the pod, as a standby
    grace_s: float | None = None  # the maximum time from its deletion to the end of its processes
    disruption: str = ""  # the reason in its condition DisruptionTarget, if the condition is true
    tolerations: tuple[Toleration, ...] = ()
    order: tuple[int, ...] = ()  # sorts a job's pods as their controller numbers them
    address: str = ""  # the pod's IP address; "" if it has none yet
    other_addresses: tuple[str, ...] = ()  # those of other IP families
    is_initializing: bool = False  # True while one of its own init containers runs

    def usual_url(self, peer_url: str) -> str:
        """Return the URL that a sidecar in this pod reports if it has the same port as `peer_url`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{port if (port := peer_url.rpartition(':')[2]).isdecimal() else ''}"

    @property
    def is_ending(self) -> bool:
        """True if the kubelet has asked the pod's processes to end."""
        return self.is_leaving or self.disruption == "TerminationByKubelet"


@dataclass(frozen=True, slots=True)
class PodGroup:
    """The pods of one job, and what they state about the job."""

    key: JobKey
    members: int
    nproc: int
    policy: Policy
    settings: Mapping[str, str]
    pods: tuple[PodMember, ...]
    queue: str = ""  # the label of an owner by which Kueue admits the pods; "" if there is none

    @property
    def size(self) -> RunSize:
        return RunSize(self.members, self.nproc)


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How the job ended. The job's pods exit with `exit_code`; the texts are for users."""

    exit_code: int
    why: str
    message: str


@dataclass(slots=True)
class PodBackend:
    """Manages the pods of one job. Implements the controller's `Backend`.

    `evict` is called with a pod that its owner must replace, because the member is lost although its
    container seems to run. `dismiss` orders a lost member to end its ranks immediately. `responds` returns
    True if a member's sidecar and launcher are connected. `stop_requested` stores a user's request to stop
    where the next supervisor finds it. `blocked` returns why no pod may be evicted at present, or "" if pods
    may be evicted: a member that seems to be lost may only be out of this supervisor's reach.
    `report_blocked` is called with the result whenever a pod would be evicted.
    """

    evict: Callable[[PodMember], None]
    dismiss: Callable[[str], None]
    stop_requested: Callable[[StopRequest], None]
    now_s: Callable[[], float]
    ended: JobEnd | None = None
    responds: Callable[[str], bool] = lambda _: False
    blocked: Callable[[], str] = lambda: ""
    report_blocked: Callable[[str], None] = lambda _: None
    user_stop: StopRequest = ""  # a user's request to stop
    ends_with_its_pods: bool = False  # True if the job has no owner that would create its pods again
    pods: Mapping[str, PodMember] = field(default_factory=dict)  # by uid
    announced: Mapping[str, Departure] = field(default_factory=dict)  # see `announce`
    _withdrawn: set[str] = field(default_factory=set)  # uids of pods that get no ranks: see `withdraw`
    _revived: dict[str, int] = field(default_factory=dict)  # how often each pod became another member, by uid
    _lost: dict[str, float] = field(default_factory=dict)  # lost members, and when each was lost

    # -- called by the controller

    @property
    def members(self) -> Collection[str]:
        """The members that can train. Leaving members are excluded, unless all members are leaving.

        Withdrawn pods are always excluded.
        """
        leaving = self.is_leaving
        there = (
            pod
            for pod in self.pods.values()
            if pod.is_running and pod.uid not in self._withdrawn and (leaving or not pod.is_leaving)
        )
        return dict.fromkeys(pod.member for pod in there)

    @property
    def departures(self) -> Mapping[str, Departure]:
        """The members that are about to end, including leaving members, whose ranks may still run.

        Empty if all members are leaving, because the run ends with them.
        """
        return {} if not self.announced or self.is_leaving else self.announced

    @property
    def is_leaving(self) -> bool:
        """True if all pods are being deleted, so that no member will be left to hold the state.

        Standbys are ignored if the job has no owner, because a user ends such a job by deleting its pods.
        """
        there = [pod for pod in self.pods.values() if not pod.has_ended]
        if self.ends_with_its_pods:
            there = [pod for pod in there if not pod.is_standby]
        return bool(there) and all(pod.is_ending for pod in there)

    @property
    def stop(self) -> StopRequest:
        """A user's request to stop; "terminate" if all pods are being deleted and the run must save."""
        return self.user_stop or ("terminate" if self.is_leaving else "")

    @property
    def volume_error(self) -> str:
        """Always "", because each pod has its own memory volume, whose errors its sidecar reports."""
        return ""

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        """Have the pods of the members in `discard` replaced, unless their containers are being restarted.

        A pod whose sidecar and launcher respond is not replaced, because it may hold the only copy of the
        state. Instead, it becomes another member, as after a restart of its container. If the pod is being
        deleted, the member is dismissed, because the pod's successor may be waiting for its name, and the
        launcher would wait for an order until shortly before the kubelet ends it. While evictions are
        `blocked`, the time before an eviction does not elapse, so that members can reconnect afterwards.
        `count` has no effect, because the owner of the pods determines their number.
        """
        known = {pod.member: pod for pod in self.pods.values()}
        for member in discard:
            pod = known.get(member)
            if pod is None:
                continue
            since_s = self._lost.setdefault(member, self.now_s())
            if pod.is_leaving:  # its ranks may still run, for example if the member was cut off
                self.dismiss(member)
            elif pod.is_running and self.responds(member):
                if self.now_s() - since_s >= REVIVE_S:
                    self._revived[pod.uid] = self._revived.get(pod.uid, 0) + 1
                    self.update(
                        replace(each, member=each.first_name or each.member) for each in self.pods.values()
                    )
            elif pod.is_running:
                why = self.blocked()
                self.report_blocked(why)
                if why:
                    self._lost[member] = self.now_s()
                elif self.now_s() - since_s >= RESTART_S:
                    self._lost[member] = self.now_s()
                    log.warning(
                        "evicting the pod of a lost member", extra={"pod": pod.name, "member": member}
                    )
                    self.evict(pod)

    def end_member(self, member: str) -> None:
        """Record that `member` is lost. Its pod is evicted later, unless its container is restarted.

        If the pod is being deleted, dismiss the member immediately, as `want` does if that begins later.
        """
        self._lost.setdefault(member, self.now_s())
        if any(pod.member == member and pod.is_ending for pod in self.pods.values()):
            self.dismiss(member)

    def renew(self, member: str) -> None:
        """Do nothing, because the kubelet restarts a sidecar that has ended or is stuck for minutes."""

    def record_stop(self, how: StopRequest) -> None:
        if self.user_stop != how:
            self.user_stop = how
            self.stop_requested(how)

    def finish(self, exit_code: int, why: str, message: str, completion: Completion | None) -> None:
        self.ended = JobEnd(exit_code, why, message)

    # -- called by the job

    def member_of(self, uid: str) -> str | None:
        """Return the name of the member that the pod `uid` is now; None if it does not belong to this job."""
        pod = self.pods.get(uid)
        return pod.member if pod is not None else None

    def why_not_at(self, uid: str, peer_url: str) -> str:
        """Return why the pod `uid` cannot have the address in `peer_url`; "" if it may have it.

        A member that names another address could make its peers send the job's secret there. Before the
        pod's own addresses are known, any address is accepted.
        """
        pod = self.pods.get(uid)
        if pod is None or not pod.address or not peer_url or peer_url == pod.usual_url(peer_url):
            return ""
        found = _PEER_URL.fullmatch(peer_url)
        host = found[1].strip("[]") if found is not None else peer_url
        known = (pod.address, *pod.other_addresses)
        if found is not None and _plain_address(host) in map(_plain_address, known):
            return ""
        return f"member {pod.member} reports the address {host[:80]!r}, but its pod has {', '.join(known)}"

    def update(self, pods: Iterable[PodMember]) -> bool:
        """Set the current pods; return True if the members have changed."""
        before = self.members
        self.pods = {pod.uid: self._named(pod) for pod in pods}
        self._withdrawn &= self.pods.keys()
        present = {pod.member for pod in self.pods.values()}
        self._lost = {name: since_s for name, since_s in self._lost.items() if name in present}
        return set(before) != set(self.members)

    def announce(self, departures: Mapping[str, Departure]) -> bool:
        """Set which members are about to end; return True if this has changed."""
        before, self.announced = self.announced, departures
        return before != departures

    def withdraw(self, uid: str, is_going: bool) -> None:
        """Set whether the pod `uid` gets no ranks, because its deletion is about to be requested.

        This covers the time from just before the request until the deletion is visible.
        """
        if is_going:
            self._withdrawn.add(uid)
        else:
            self._withdrawn.discard(uid)

    def _named(self, pod: PodMember) -> PodMember:
        times = self._revived.get(pod.uid, 0)
        return replace(pod, first_name=pod.member, member=f"{pod.member}-{times}") if times else pod


def pod_policy(annotations: Mapping[str, Any], members: int, nproc: int) -> Policy:
    """Return the policy that the annotations of a pod request. Raises `PodSettingsError`."""
    settings = pod_settings.parse(annotations)
    policy = pod_settings.policy(settings, members, nproc)
    if f"{pod_layout.PREFIX}member-timeout" not in annotations:
        policy = replace(policy, member_timeout_s=MEMBER_TIMEOUT_S)
    if not settings.checkpoints.is_durable:  # each pod would store its checkpoints separately
        policy = replace(policy, checkpoint_every_s=0.0, has_storage=False)
    return replace(policy, members_created_externally=True)  # the owner creates the pods


def held_policy(settings: Mapping[str, str], members: int, nproc: int) -> Policy:
    """Return the policy of a run whose Supervision has these settings; the defaults if they are invalid.

    The supervisor that wrote them accepted them, but it may have been another version, and users can edit the
    resource.
    """
    try:
        return pod_policy(
            {f"{pod_layout.PREFIX}{name}": text for name, text in settings.items()}, members, nproc
        )
    except pod_settings.PodSettingsError as error:
        log.warning(
            "the settings in the Supervision are invalid, so the defaults apply", extra={"error": str(error)}
        )
        return pod_policy({}, members, nproc)


def read_pod(pod: Mapping[str, Any], container: str) -> PodMember:
    """Return a valid pod as a member. `container` is the name of its training container."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    statuses: list[Mapping[str, Any]] = list(status.get("containerStatuses") or ())
    found: Mapping[str, Any] = next((each for each in statuses if each.get("name") == container), {})
    restarts = found.get("restartCount") or 0
    uid, name = metadata["uid"], metadata["name"]
    has_ended = status.get("phase") in ENDED_PHASES
    state = found.get("state") or {}
    return PodMember(
        uid=uid,
        name=name,
        member=member_name(name, uid, restarts),
        node=(pod.get("spec") or {}).get("nodeName") or "",
        container_id=found.get("containerID") or "",
        is_running="running" in state and not has_ended,
        is_leaving=metadata.get("deletionTimestamp") is not None,
        grace_s=_grace_s(metadata),
        disruption=_disruption(status),
        tolerations=tolerations_of(pod.get("spec") or {}),
        has_ended=has_ended,
        exit_code=_exit_code(status.get("phase"), state) if has_ended else None,
        last_words=pod_facts.termination_message(state.get("terminated") or {}) if has_ended else "",
        is_standby=bool(supervision_of(pod)),
        address=address if isinstance(address := status.get("podIP"), str) else "",
        other_addresses=pod_facts.other_addresses(status),
        is_initializing=_is_initializing(pod.get("spec") or {}, status),
    )


def _plain_address(text: str) -> str:
    """Return an IP address in its shortest form, and any other text unchanged."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    return str((found.ipv4_mapped if found.version == 6 else None) or found)


def _is_initializing(spec: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Return True while an init container runs, not counting sidecars, which run for as long as the pod."""
    own = {
        each.get("name") for each in spec.get("initContainers") or () if each.get("restartPolicy") != "Always"
    }
    statuses = status.get("initContainerStatuses") or ()
    return any(each.get("name") in own and "running" in (each.get("state") or {}) for each in statuses)


def _grace_s(metadata: Mapping[str, Any]) -> float | None:
    if metadata.get("deletionTimestamp") is None:
        return None
    seconds = metadata.get("deletionGracePeriodSeconds")
    return float(seconds) if type(seconds) is int else None


def _disruption(status: Mapping[str, Any]) -> str:
    """Return why a program has announced that it is about to disrupt the pod; "" if none has."""
    for each in status.get("conditions") or ():
        if isinstance(each, Mapping) and each.get("type") == pod_facts.DISRUPTION:
            return str(each.get("reason") or "unknown") if each.get("status") == "True" else ""
    return ""


def _exit_code(phase: object, state: Mapping[str, Any]) -> int:
    """Return the exit code of a pod that has ended: its training container's, or 1 if only others failed."""
    if phase != "Failed":
        return 0
    code = (state.get("terminated") or {}).get("exitCode")
    return code if type(code) is int and code else 1


def first_start(member: str) -> str:
    """Return the member that the pod of `member` was when its container first started."""
    found = _LATER_START.fullmatch(member)
    return found[1] if found is not None else member


def member_name(pod: str, uid: str, restarts: int) -> str:
    """Return the name of a member. It is short enough for a status line and never reused."""
    return f"{pod}.{uid[:8]}" + (f".{restarts}" if restarts else "")
