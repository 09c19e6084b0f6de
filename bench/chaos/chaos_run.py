"""Carry out a chaos run: train undisturbed, inject the faults, and find out how each job ended."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.chaos.chaos_schedule import PlannedFault
from bench.chaos.fault_injector import FaultInjector, WouldNotSurvive
from bench.chaos.fault_table import CHAOS_FAULTS, JOB_BACKOFF_S, ChaosFault, FaultSign
from bench.chaos.job_condition import JobCondition, missing_sign, why_not_back
from bench.chaos.job_objects import PACE_S, SECRET, objects
from bench.chaos.job_table import CHAOS_JOBS, UNDISTURBED, ChaosJob
from bench.chaos.repairs import DueRepairs
from bench.chaos.report import ChaosOutcome, StruckFault, fault_line
from bench.chaos.watched_job import WatchedJob, answered, checked_checkpoints
from bench.harness.console import say
from holdfast.errors import BadInput
from tests.cluster.apparatus.bucket import secret
from tests.cluster.apparatus.kubernetes_cluster import GONE_S, PROGRAMS, READY_S, SYSTEM, ClusterUnderTest
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.node_processes import NodeProcesses
from tests.cluster.apparatus.training_job import TrainingJob
from tests.s3server.server import ObjectServer, credentials

POLL_S = 0.5  # between two checks of all jobs; a status is up to 5 s old
START_S = 240.0  # until all jobs train and their standbys are warm
STALLED_S = 300.0  # without a new step, an undisturbed job has failed
SUCCEEDED_S = 180.0  # from the end of the training until the owner reports it
TAINT = "holdfast.dev/unhealthy"


class NotBack(Exception):
    """A job has not recovered from a fault within the limit."""


class ChaosRun:
    """The jobs of one run, and what has happened to them so far, which is stored in `outcome`."""

    def __init__(
        self,
        cluster: ClusterUnderTest,
        namespaces: Namespaces,
        storage: ObjectServer,
        repairs: DueRepairs,
        nodes: list[str],
        outcome: ChaosOutcome,
    ) -> None:
        self._cluster, self._namespaces, self._storage = cluster, namespaces, storage
        self._repairs, self._nodes, self._outcome = repairs, nodes, outcome
        self._jobs: dict[str, WatchedJob] = {}
        processes = NodeProcesses(cluster, namespaces.make("privileged"))
        self._injector = FaultInjector(cluster, self._jobs, processes, storage, repairs)
        self._began_s = 0.0

    # -- the parts of a run

    def train_undisturbed(self, minutes: float) -> None:
        """Run the same training without faults, at full speed, and store its digests."""
        began_s = time.monotonic()
        found = self._start(UNDISTURBED, _steps(minutes), 0.0)
        self._until_ended([found])
        self._outcome.reference = found.digests
        say(f"undisturbed: {_steps(minutes)} steps in {time.monotonic() - began_s:.0f} s")
        found.remove()
        self._namespaces.delete(found.training.namespace)
        if found.digests is None:
            raise BadInput(f"the undisturbed run failed: {found.result().detail}")

    def chaos(self, planned: Iterator[PlannedFault], minutes: float) -> None:
        """Start the jobs, and inject faults for `minutes`, or until a job does not recover or has ended."""
        for job in CHAOS_JOBS:
            self._jobs[job.name] = self._start(job, _steps(minutes), PACE_S)
        self._injector.prepare(self._nodes)
        try:
            self._until_back(dict.fromkeys(self._jobs, _NOTHING), START_S, whole=True)
        except NotBack as error:
            self._give_up(f"the jobs did not start: {error}")
            return
        for each in self._jobs.values():
            each.take_incidents()
        self._began_s = time.monotonic()
        say("all jobs train")
        while time.monotonic() < self._began_s + 60 * minutes:
            one = next(planned)
            time.sleep(one.gap_s)
            if all(
                each.condition is not None and each.condition.exit_code == 0 for each in self._jobs.values()
            ):
                break
            found = StruckFault(one, round(time.monotonic() - self._began_s, 1))
            self._outcome.faults.append(found)
            try:
                self._cause_fault(found)
            finally:
                say(fault_line(found))
            if found.outcome == "stuck":
                self._give_up(f"not back after {one.kind}: {found.detail}")
                return

    def conclude(self) -> None:
        """Wait until all jobs have ended, and store how each has ended and what is left of it."""
        if not self._outcome.problem:
            self._until_ended(list(self._jobs.values()))
            self._until(lambda: not self._unfinished(), SUCCEEDED_S)
        for each in self._jobs.values():
            result = each.result()
            if each.digests is None and not self._outcome.problem:
                self._outcome.evidence.append(self._cluster.report(each.training.namespace))
            if each.job.stored:
                with tempfile.TemporaryDirectory() as local:
                    checked = checked_checkpoints(each.job, credentials(self._storage.url), Path(local))
                result.checkpoints, result.torn = checked
            self._outcome.jobs.append(result)
        for each in self._jobs.values():
            each.remove()
        self._until(lambda: not self._leftovers(), GONE_S)
        self._outcome.left_behind += self._leftovers()

    # -- one fault

    def _cause_fault(self, found: StruckFault) -> None:
        """Cause a fault, end it, and wait until all jobs are calm again; store the outcome in `found`."""
        since, restarts = self._looked(), self._restarts()
        began_s = time.monotonic()
        signs = self._strike(found)
        if found.outcome == "withheld":
            return
        try:
            self._outlast(found, signs, since, restarts)
            ended, calm_s = self._looked(), found.planned.fault.calm_s
            self._until_back(ended, calm_s, whole=False)
            self._until_back(ended, calm_s + JOB_BACKOFF_S, whole=True)  # a Job's next pod may be the standby
        except NotBack as error:
            found.outcome, found.detail = "stuck", str(error)
        found.calm_after_s = round(time.monotonic() - began_s, 2)
        found.outcome = found.outcome or "recovered"
        taken = {name: each.take_incidents() for name, each in self._jobs.items()}
        found.incidents = {name: those for name, those in taken.items() if those}
        self._note_taints()

    def _strike(self, found: StruckFault) -> dict[FaultSign, set[str]]:
        """Cause the fault, and return, for each sign of it, the jobs in which it is expected."""
        planned = found.planned
        signs: dict[FaultSign, set[str]] = {}
        try:
            struck = self._injector.strike(planned.kind, planned.job, planned.rank)
            found.node, found.counted, found.detail = struck.node, struck.counted, struck.detail
            signs.setdefault(planned.fault.sign, set()).update(struck.jobs)
            if planned.second:
                time.sleep(planned.second_s)
                struck = self._injector.strike(planned.second, planned.second_job, planned.second_rank)
                signs.setdefault(CHAOS_FAULTS[planned.second].sign, set()).update(struck.jobs)
        except WouldNotSurvive as error:
            found.outcome, found.detail = "withheld", str(error)
        except (BadInput, AssertionError, subprocess.SubprocessError) as error:
            found.outcome, found.detail = "refused", str(error).partition("\n")[0]
        return signs

    def _outlast(
        self,
        found: StruckFault,
        signs: Mapping[FaultSign, set[str]],
        since: Mapping[str, JobCondition],
        restarts: Mapping[str, int],
    ) -> None:
        """Wait until the fault has been noticed and has lasted long enough, and then end it.

        Jobs that can train during the fault must do so before it is ended. If the only supervisor is lost
        with its node, nothing is noticed until the node is back. Raises `NotBack`.
        """
        planned, fault = found.planned, found.planned.fault
        is_blind = bool(found.node) and self._injector.hosts_all_supervisors(found.node)
        if not is_blind:
            self._until_noticed(signs, since, restarts, fault.calm_s)
            if fault.trains_meanwhile:
                able = {
                    name: at for name, at in self._conditions().items() if self._trains_without(fault, name)
                }
                self._until_back(able, fault.calm_s, whole=False)
        time.sleep(planned.lasts_s)
        self._injector.end(planned)
        if is_blind:
            self._until_noticed(signs, since, restarts, fault.calm_s)

    def _until_noticed(
        self,
        signs: Mapping[FaultSign, set[str]],
        since: Mapping[str, JobCondition],
        restarts: Mapping[str, int],
        limit_s: float,
    ) -> None:
        """Wait for the sign of the fault in all jobs that it has struck. Raises `NotBack`.

        Reads nothing if no sign is expected, because the API server may be stopped.
        """
        expected = [(sign, name) for sign, names in signs.items() for name in names if sign]

        def unnoticed() -> list[str]:
            now = self._looked() if expected else {}
            again = self._restarts() if "restart" in signs else restarts
            found = (
                missing_sign(sign, now[name], since[name], again[name] - restarts[name])
                for sign, name in expected
            )
            return [f"{name}: {why}" for (_, name), why in zip(expected, found, strict=True) if why]

        self._until(lambda: not unnoticed(), limit_s)
        if left := unnoticed():
            raise NotBack(f"unnoticed after {limit_s:.0f} s: {'; '.join(left)}")

    def _conditions(self) -> dict[str, JobCondition]:
        return {name: each.condition or _NOTHING for name, each in self._jobs.items()}

    def _looked(self) -> dict[str, JobCondition]:
        for each in self._jobs.values():
            each.look()
        return self._conditions()

    def _restarts(self) -> dict[str, int]:
        return {name: answered(each.restarts) or 0 for name, each in self._jobs.items()}

    def _trains_without(self, fault: ChaosFault, name: str) -> bool:
        """Return True if a job can train while a node is lost: on a standby, or on a new pod after a drain.

        Kubernetes does not replace the pods of a lost node until it has given up on the node.
        """
        return bool(self._jobs[name].job.standby) or fault.name == "drain"

    def _note_taints(self) -> None:
        listed = answered(lambda: self._cluster.read("/api/v1/nodes")["items"]) or []
        for node in listed:
            name, taints = node["metadata"]["name"], node["spec"].get("taints") or ()
            if any(each["key"] == TAINT for each in taints) and name not in self._outcome.tainted:
                self._outcome.tainted.append(name)

    # -- waiting

    def _until_back(self, since: Mapping[str, JobCondition], limit_s: float, *, whole: bool) -> None:
        """Return when the jobs in `since` train and, with `whole`, are ready for the next fault.

        They are ready if their standbys are warm and the programs in holdfast-system are available. Raises
        `NotBack`.
        """
        deadline = time.monotonic() + limit_s
        why = {"": "nothing was read"}
        while why:
            why = self._why_not_back(since, whole=whole)
            if not why:
                break
            if time.monotonic() > deadline:
                told = "; ".join(f"{name}: {each}" for name, each in why.items())
                raise NotBack(f"not within {limit_s:.0f} s: {told}")
            time.sleep(POLL_S)
        if whole:
            self._wait_for_programs()

    def _why_not_back(self, since: Mapping[str, JobCondition], *, whole: bool) -> dict[str, str]:
        found = {}
        for name, before in since.items():
            watched = self._jobs[name]
            now = watched.look()
            why = "it has no status" if now is None else why_not_back(watched.job, now, before, whole=whole)
            if why:
                found[name] = why
        return found

    def _wait_for_programs(self) -> None:
        for name in PROGRAMS:
            words = ("wait", "--for=condition=Available", f"deployment/{name}", "-n", SYSTEM)
            done = self._cluster.attempt(*words, f"--timeout={READY_S:.0f}s", limit_s=READY_S + 10)
            if done.returncode:
                raise NotBack(f"{name} is not available: {done.stderr.strip()}")

    def _until_ended(self, jobs: list[WatchedJob]) -> None:
        """Return when all jobs have ended, or when no remaining job has completed a step for `STALLED_S`."""
        last, since_s = -1, time.monotonic()
        while True:
            seen = [each.look() for each in jobs]
            running = [each for each in seen if each is None or each.exit_code is None]
            if not running:
                return
            step = sum(each.step for each in running if each is not None) - 1_000_000 * len(running)
            if step != last:
                last, since_s = step, time.monotonic()
            if time.monotonic() - since_s > STALLED_S:
                self._give_up(f"no step within {STALLED_S:.0f} s")
                return
            time.sleep(POLL_S)

    def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Return when the condition holds, or after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    # -- the jobs

    def _start(self, job: ChaosJob, steps: int, pace_s: float) -> WatchedJob:
        made = objects(job, steps, pace_s)
        if job.stored:
            made = [secret(self._storage, SECRET), *made]
        training = TrainingJob(self._cluster, self._namespaces.make("baseline"), made)
        training.start()
        return WatchedJob(job, training)

    def _unfinished(self) -> list[str]:
        for each in self._jobs.values():
            each.look()
        return [name for name, each in self._jobs.items() if not each.owner_has_succeeded()]

    def _leftovers(self) -> list[str]:
        return [line for each in self._jobs.values() for line in each.leftovers()]

    def _give_up(self, why: str) -> None:
        """End the run early: store the state of the cluster for the report, and then end all faults."""
        self._outcome.problem = why
        say(f"ends early: {why}")
        for namespace in (SYSTEM, *(each.training.namespace for each in self._jobs.values())):
            self._outcome.evidence.append(self._cluster.report(namespace))
        self._outcome.left_behind += self._repairs.carry_out_all()


_NOTHING = JobCondition(-1, 0, 0, 0, "", False, None)  # a job that has not trained yet


def _steps(minutes: float) -> int:
    """Return how many steps take at least `minutes` of undisturbed training at the jobs' pace."""
    return int(60 * minutes / PACE_S)
