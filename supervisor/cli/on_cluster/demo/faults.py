"""Cause the demo's faults, and find out how Holdfast and the kubelet responded to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from supervisor.admission import pod_layout
from supervisor.cli.on_cluster import control
from supervisor.cli.on_cluster.connection import ClusterConnection
from supervisor.cli.on_cluster.demo import pods
from supervisor.cli.on_cluster.demo.pods import PodChanges
from supervisor.cli.on_cluster.demo.training import SUPERVISED, NotInTime, Observed, PodTraining
from supervisor.kubernetes.errors import NotFound
from supervisor.kubernetes.lease import LEASES
from supervisor.wording import count

RECOVERED_S = 120.0  # the limit for a job to train again, if necessary with a new pod
T = TypeVar("T")
FaultTarget: TypeAlias = Literal["rank", "pod", "sidecar", "supervisor"]


@dataclass(frozen=True, slots=True)
class ClusterFault:
    """A fault to cause. `drill` is the KIND for `holdfast inject`; "" if a pod is deleted instead."""

    target: FaultTarget
    drill: str
    rank: int
    words: str  # the announcement


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The outcome of a fault. `incident` is its record; None if the fault does not affect the training."""

    text: str
    pods: str  # says which pods and containers were restarted
    good: bool
    incident: dict[str, Any] | None = None


KILL = ClusterFault("rank", "kill", 1, "kill -9 of rank 1 (as the kernel does when memory runs out)")
STOP = ClusterFault("rank", "stop", 0, "SIGSTOP of rank 0 (the process exists but does nothing)")
NAN = ClusterFault("rank", "nan", 0, "rank 0 computes a NaN, which spoils every gradient")
SIDECAR = ClusterFault("sidecar", "sidecar", 0, "kill -9 of the sidecar of rank 0")
POD = ClusterFault("pod", "", 1, "kubectl delete pod, for the pod of rank 1")
SUPERVISOR = ClusterFault("supervisor", "", 0, "kubectl delete pod --force, for the supervisor's pod")

FAULTS = (KILL, STOP, NAN, SIDECAR, POD, SUPERVISOR)
QUICK = (KILL, NAN, POD)


def as_expected(fault: ClusterFault, changed: PodChanges) -> bool:
    """Return True if only the pod or container that the fault ended was replaced or restarted. Pure."""
    if fault.target == "pod":
        return (len(changed.gone), len(changed.new), changed.restarted) == (1, 1, ())
    if changed.gone or changed.new:
        return False
    names = [container for _, container in changed.restarted]
    return names == ([pod_layout.SIDECAR] if fault.target == "sidecar" else [])


class FaultMaker:
    """Causes faults in the job, one at a time."""

    def __init__(self, connection: ClusterConnection, training: PodTraining) -> None:
        self._connection, self._training = connection, training

    def cause(self, fault: ClusterFault, describe: Callable[[dict[str, Any]], str]) -> FaultOutcome:
        """Cause the fault, wait for the recovery, and return the outcome.

        `describe` puts an incident into words. Raises `BadInput` if a drill is refused, and `NotInTime` if
        the job does not recover.
        """
        before = self._training.observe()
        self._strike(fault)
        if fault.target == "supervisor":
            words = "its successor has taken over"
            return self._after_return(fault, before, words, lambda: self._successor_leads(before))
        if fault.target == "sidecar":
            words = "the sidecar is back"
            return self._after_return(fault, before, words, lambda: self._sidecar_is_back(fault, before))
        incident = self._until(lambda: self._closed_incident(before), f"the job recovers from: {fault.words}")
        return self._judged(fault, before, describe(incident), incident)

    def _strike(self, fault: ClusterFault) -> None:
        training = self._training
        if fault.target == "pod":
            training.delete_pod(training.pod_of_rank(fault.rank))
        elif fault.target == "supervisor":
            leader = training.until(self._leader, "a supervisor leads", RECOVERED_S)
            training.delete_pod(leader, pod_layout.NAMESPACE, grace_s=0)
        else:
            job = training.job()
            assert job is not None  # the job is training
            control.carry_out(job, fault.drill, fault.rank)

    def _leader(self) -> str | None:
        """Return the name of the pod that holds the Lease; None if no pod does."""
        try:
            lease = self._connection.ask(
                lambda server: server.get(LEASES, pod_layout.SUPERVISOR_LEASE, pod_layout.NAMESPACE)
            )
        except NotFound:
            return None
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
        return holder.rpartition("_")[0] or None  # the suffix distinguishes successive processes of the pod

    def _closed_incident(self, before: Observed) -> dict[str, Any] | None:
        """Return the newest incident if it has ended and is not part of `before`; None otherwise."""
        job = self._training.job()
        recent = job.incidents() if job is not None else []
        known = {each["id"] for each in (before.view.get("last_incident") or {},) if "id" in each}
        if job is None or int(job.summary.get("incidents") or 0) <= before.incidents or not recent:
            return None
        last = recent[-1]
        is_new = last["id"] not in known and int(str(last["id"]).partition("-")[2] or 0) > before.incidents
        return last if is_new and last.get("recovered_s") is not None and not last.get("open") else None

    def _after_return(
        self, fault: ClusterFault, before: Observed, words: str, is_back: Callable[[], bool]
    ) -> FaultOutcome:
        """Wait until a part of Holdfast is back, and then until a newer status shows that the job trains."""
        training = self._training
        stale = self._until(
            lambda: training.view() if is_back() else None, f"the {fault.target} is back after: {fault.words}"
        )

        def poll() -> int | None:
            view = training.view()
            is_new = view.get("updated") != stale.get("updated")
            return int(view["step"]) - before.step if is_new and training.is_calm(before.step + 1) else None

        gained = self._until(poll, f"the job is supervised after: {fault.words}")
        return self._judged(
            fault, before, f"{words}; {count(gained, 'step')} were trained in the meantime", None
        )

    def _sidecar_is_back(self, fault: ClusterFault, before: Observed) -> bool:
        found = self._training.pods_of(SUPERVISED)
        return as_expected(fault, pods.changes(before.pods, pods.seen(found))) and pods.all_run(found)

    def _successor_leads(self, before: Observed) -> bool:
        job = self._training.job()
        return job is not None and int(job.summary.get("epoch") or 0) > before.epoch

    def _until(self, poll: Callable[[], T | None], what: str) -> T:
        """Wait as `PodTraining.until` does, but raise `NotInTime` as soon as the job has ended."""

        def poll_or_refuse() -> T | None:
            found = poll()
            if found is None and self._training.view().get("phase") == "ended":
                raise NotInTime(f"the job ended while the demo waited for this: {what}")
            return found

        return self._training.until(poll_or_refuse, what, RECOVERED_S)

    def _judged(
        self, fault: ClusterFault, before: Observed, text: str, incident: dict[str, Any] | None
    ) -> FaultOutcome:
        after = self._training.observe()
        changed = pods.changes(before.pods, after.pods)
        expected = before.incidents + (incident is not None)
        good = as_expected(fault, changed) and after.incidents == expected
        if after.incidents != expected:
            text += f"; there were {after.incidents - before.incidents} incidents"
        outcome = str(changed)
        if incident is not None and changed.new:
            listed = self._training.pods_of(SUPERVISED)
            times = pods.replacement_times(listed, changed.new[0], float(incident["at"]))
            outcome += f"; {times}" if times else ""
        return FaultOutcome(text, outcome, good, incident)
