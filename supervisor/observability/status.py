"""What the run leaves in its directory for people and scripts: status.json and a file per incident."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.fileio.storage_thread import StorageThread
from holdfast.protocol.launcher_messages import RankState
from holdfast.protocol.member_messages import MemberReport, RankProgress
from supervisor.decision import remedy, resume_point
from supervisor.hangs import detection
from supervisor.observability import incident_record as incidents
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.store.leadership import Deposed, Lead
from supervisor.store.run_directory import RunDir
from supervisor.view import memory_needed, reports
from supervisor.view.model import UNREAD, Checkpoint, JobState, MemberView, Policy, View
from supervisor.view.stragglers import Straggler, find_stragglers

STEPS_STILL = 3.0  # usual step times without a step, after which no rate is shown

log = logging.getLogger(__name__)

_ENDING = ("saving", "stopping", "ended")

MOST_UNWRITTEN = 64  # incidents that wait for room


class StatusPublisher:
    """Writes are atomic and come behind, in a thread; a full disk costs the record, never the run."""

    def __init__(
        self,
        run: RunDir,
        lag: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        policy: Policy | None = None,
        lead: Lead | None = None,
    ) -> None:
        """`lag` gives the longest lag of the supervisor's own loop, and its p99. `policy` is what judges a
        group that stands still. Without the `lead` nothing is written, and `deposed` says so."""
        self.run = run
        self._lag = lag
        self.policy = policy or Policy()
        self.last: dict[str, Any] | None = None
        self.newest: dict[str, Any] = {}
        self._slow: tuple[Straggler, ...] = ()
        self.journal_error = ""  # why the last decision is not on disk
        self.volume_error = ""  # why what the members have in memory cannot be used
        self._unwritten: dict[str, dict[str, Any]] = {}  # incidents for which there was no room
        self._status_error = ""  # why the last status could not be written
        self.files = StorageThread("records")
        self.deposed: Deposed | None = None
        self._lead = lead or Lead()

    def taken_over(self) -> dict[str, Any] | None:
        """Return the last status of the supervisor before, None if there is none; what it knew still holds.

        It may have been written by anybody: of what this takes over itself the types are right.
        """
        found = self.run.status()
        if found is not None:
            kinds = {"step": int, "secured_step": int, "total_steps": int, "own_state": bool, "loss": float}
            self.newest = {name: found[name] for name in kinds if type(found.get(name)) is kinds[name]}
        return found

    def incident(self, found: dict[str, Any]) -> None:
        self.last = found
        self.files.submit(lambda: self._write_incident(found), str(found["id"]))

    def _write_incident(self, found: dict[str, Any]) -> bool:
        """Write an incident, or keep it until there is room for it again: what `_write_status` finds out."""
        name = str(found["id"])
        self._unwritten.pop(name, None)
        try:
            with self._lead.acting():
                self.run.write_incident(found)
        except Deposed as error:
            self.deposed = error
        except OSError as error:
            log.warning("incident not written", extra={"id": name, "error": str(error)})
            self._unwritten[name] = found
            for oldest in list(self._unwritten)[:-MOST_UNWRITTEN]:
                del self._unwritten[oldest]
            return False
        return True

    def status(self, view: View, accounts: Bookkeeping) -> dict[str, Any]:
        """Return the status, and have it left in the run directory."""
        before = self.newest
        self._slow = find_stragglers(self._slow, view)
        self.newest = build(
            view, accounts, self.run.path.name, self.last, self._slow, self._lag(), self.policy
        )
        self.newest["journal_error"] = self.journal_error
        self.newest["volume_error"] = self.volume_error
        self.newest["passed_over"] = [each.note for each in view.stored.unusable]
        self._keep_known(before, view)
        newest = self.newest
        self.files.submit(lambda: self._write_status(newest), "status")
        return newest

    def _write_status(self, newest: dict[str, Any]) -> None:
        try:
            with self._lead.acting():
                self.run.write_status(newest)
        except Deposed as error:
            self.deposed = error
            return
        except OSError as error:
            if str(error.strerror) != self._status_error:  # once a second is too often
                self._status_error = str(error.strerror)
                log.warning("status not written", extra={"error": str(error)})
            return
        self._status_error = ""
        for found in tuple(self._unwritten.values()):
            if not self._write_incident(found):
                return

    def _keep_known(self, before: Mapping[str, Any], view: View) -> None:
        """Where no rank says any more how far it is, the last that was known still holds."""
        if self.newest["step"] is None:
            self.newest |= {name: before.get(name) for name in ("step", "secured_step")}
            self.newest["total_steps"] = self.newest["total_steps"] or before.get("total_steps")
            if view.memory.phase in _ENDING:  # a rank may have done one more than it last said
                done = max((self.newest["step"] or 0, view.memory.save_step))
                self.newest |= {"step": done or None, "secured_step": done or None}
            self.newest["own_state"] |= bool(before.get("own_state"))
            if self.newest["own_state"]:
                self.newest["secured_step"] = None
        if not any(each.rank == 0 for each in _progress(view)):
            self.newest["loss"] = before.get("loss")


def _progress(view: View) -> list[RankProgress]:
    return [each for m in view.members if m.report is not None for each in m.report.progress]


def build(
    view: View,
    accounts: Bookkeeping,
    name: str,
    last: Mapping[str, Any] | None,
    slow: tuple[Straggler, ...] = (),
    lag: tuple[float, float] = (0.0, 0.0),
    policy: Policy | None = None,
) -> dict[str, Any]:
    """Return the status as JSON: the contract of `holdfast status --json` and GET /v1/status."""
    memory, ledger = view.memory, accounts.ledger
    progress = _progress(view)
    loss = next((each.loss for each in progress if each.rank == 0), None)
    steps = [each.step for each in progress]
    step_s = max((each.step_s for each in progress), default=0.0)
    settled = memory.settled and memory.phase == "running"
    per_step = _per_step(progress, steps, _base(view))
    opened = memory.incident if memory.phase not in ("stopping", "ended") else None
    standing = _standing(view, policy or Policy())
    no_step_s = standing["no_step_s"] or 0.0
    still_ns = int(no_step_s * 1e9)
    own_state = reports.script_keeps_own_state(view)
    moves = settled and no_step_s <= STEPS_STILL * step_s
    return {
        "schema": incidents.SCHEMA,
        "run": name,
        "phase": memory.phase,
        "generation": memory.generation,
        "world_size": memory.world_size,
        "step": min(steps) if steps else None,
        "total_steps": _goal(view),
        "loss": _finite(loss) if loss is not None else None,
        "step_s": step_s or None,
        "rate": round(1 / step_s, 3) if step_s and moves else None,
        "samples_per_s": round(per_step[0] / step_s, 1) if step_s and moves else None,
        "tokens_per_s": round(per_step[1] / step_s, 1) if step_s and moves else None,
        **standing,
        "warnings": [*(each.text for each in memory.warned), *(text for _, text in _unmade(view))],
        "ettr": _rounded(ledger.ettr(still_ns)),
        "ettr_hour": _rounded(ledger.ettr_over(3600.0, ledger.at_ns, still_ns)),
        "buckets_s": {b.value: ns / 1e9 for b, ns in ledger.buckets_ns().items()},
        "pending_s": ledger.pending_ns / 1e9,
        "total_s": ledger.total_ns / 1e9,
        "members": [_member(each, view) for each in view.members],
        "ranks": _ranks(view, slow),
        "incidents": memory.incidents,
        "last_incident": last,
        "open_incident": incidents.record(opened, None) if opened else None,
        "own_state": own_state,
        "secured_step": min(steps) if steps and not own_state else None,
        "snapshot_step": max((each.snapshot_step for each in progress), default=None),
        "proven_step": memory.equal[-1] if memory.equal else None,
        "checkpoint": _checkpoint(view, resume_point.newest_checkpoint(view)),
        "resumed": _resumed(view),
        "skip": list(memory.skip),
        "cut_short": [
            {
                "incident": incidents.identity(each.incident),
                "rank": each.rank,
                "step": each.step,
                "before_commit": each.early,
            }
            for each in memory.missed
        ],
        "exit_code": memory.exit_code,
        "message": memory.why or _awaited(view, policy or Policy()),
        "traceback": memory.message,
        "updated": round(time.time(), 3),
        "supervisor_pid": os.getpid(),
        "warm_ready": _warm_ready(view),
        "memory": memory_needed.as_status(view),
        "lag": _lags(view, lag),
    }


def _lags(view: View, own: tuple[float, float]) -> dict[str, dict[str, float]]:
    """Return for each part with an event loop how long it looked at nothing, over the last minute."""
    found = {"supervisor": own}
    found |= {m.name: (m.report.lag_s, m.report.lag_p99_s) for m in view.members if m.report is not None}
    return {name: {"max_s": round(most, 6), "p99_s": round(p99, 6)} for name, (most, p99) in found.items()}


def _awaited(view: View, policy: Policy) -> str:
    """Say what a group that is to be formed waits for; "" when it has been."""
    memory = view.memory
    if memory.phase not in ("forming", "securing"):
        return ""
    if view.stored.error and (view.stored.looked_ns or view.stored.error != UNREAD):
        return f"storage cannot be read, trying again: {view.stored.error}"
    doubted = remedy.checkpoint_to_verify(view, policy)
    if doubted is not None:
        return f"reading the checkpoint of step {doubted.step} whole before it is used"
    return _start(view) if memory.phase == "forming" else ""


def _start(view: View) -> str:
    memory = view.memory
    launchers = [m.report.launcher if m.report is not None else None for m in view.members if m.exists]
    ready = sum(each is not None and len(each.parked) >= memory.nproc for each in launchers)
    needed = memory.world_size // memory.nproc
    if not any(each is not None and each.parked for each in launchers):
        return "importing what the script imports, and running it up to where it waits"
    return f"{min(ready, needed)} of {needed} members ready"


def _goal(view: View) -> int | None:
    """Return the number of steps that the script's loop is to end with; None when it has not said."""
    generation = view.memory.generation
    ranks = [rank for m in view.members if m.report and m.report.launcher for rank in m.report.launcher.ranks]
    return max((rank.marks.goal for rank in ranks if rank.generation == generation), default=0) or None


def _standing(view: View, policy: Policy) -> dict[str, Any]:
    """Return since when no step has ended, whom the group waits for, and when Holdfast acts on it."""
    found = detection.judge(view, policy) if view.memory.phase == "running" else None
    if found is None:
        return {"no_step_s": None, "hang_limit_s": None, "held_up_by": None, "waiting_for": ""}
    return {
        "no_step_s": round(max(0, view.now_ns - view.watch.since_ns) / 1e9, 3),
        "hang_limit_s": found.limit_s,
        "held_up_by": found.rank if found.rank >= 0 else None,
        "waiting_for": found.why,
    }


def _base(view: View) -> int:
    launch = view.memory.launch
    return launch.restore.step if launch is not None and launch.restore is not None else 0


def _per_step(progress: list[RankProgress], steps: list[int], base: int) -> tuple[float, float]:
    """Return samples and tokens of one step; the pages hold sums over the generation."""
    if not progress:
        return 0.0, 0.0
    done = max(steps) - base
    if done <= 0:
        return 0.0, 0.0
    return max(p.samples for p in progress) / done, max(p.tokens for p in progress) / done


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 6)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _member(member: MemberView, view: View) -> dict[str, Any]:
    report = member.report
    launcher = report.launcher if report else None
    block = view.memory.placement
    active = member.name in block and view.memory.phase != "forming"
    first = block.index(member.name) * view.memory.nproc if active else 0
    role = "active" if active else "standby" if block else "new"  # before the first group nobody stands by
    if not member.exists or not member.connected:
        role = "lost" if report is not None or not member.exists else "new"
    if (
        role == "lost"
        and view.memory.phase in ("stopping", "ended")
        and not _was_lost(member.name, view.memory)
    ):
        role = "left"
    return {
        "name": member.name,
        "node": report.node if report else "",
        "role": role,
        "connected": member.connected,
        "parked": len(launcher.parked) if launcher else 0,
        "warm_error": dict(_unmade(view)).get(member.name, ""),
        "ranks": list(range(first, first + view.memory.nproc)) if active else [],
        "launcher_pid": launcher.pid if launcher else None,
        "sidecar_pid": report.sidecar_pid if report else None,
    }


def _unmade(view: View) -> list[tuple[str, str]]:
    """Return the members for which no warm process can be made, and why, while that matters."""
    if view.memory.phase not in ("running", "securing"):
        return []
    found = ((m.name, remedy.warm_pool_problem(view, m)) for m in view.members if m.exists and m.connected)
    return [(name, text) for name, text in found if text]


def _was_lost(name: str, memory: JobState) -> bool:
    """True for a member that went while its run was not over."""
    found = memory.incident.faults if memory.incident is not None else ()
    return name in memory.lost or any((each.kind, each.member) == ("member_lost", name) for each in found)


def _ranks(view: View, slow: tuple[Straggler, ...]) -> list[dict[str, Any]]:
    found, slow_by_rank = [], {each.rank: each for each in slow}
    for member in view.members:
        report = member.report
        if report is None or report.launcher is None or member.name not in view.memory.placement:
            continue
        by_rank = {each.rank: each for each in report.progress}
        found += [
            _rank(report, rank, by_rank.get(rank.rank), slow_by_rank.get(rank.rank))
            for rank in report.launcher.ranks
            if rank.generation == view.memory.generation
        ]
    return sorted(found, key=lambda each: int(each["rank"]))


def _rank(
    report: MemberReport, rank: RankState, at: RankProgress | None, slow: Straggler | None
) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "member": report.member,
        "pid": rank.pid,
        "state": rank.state,
        "step": at.step if at else None,
        "phase": at.phase if at else "",
        "label": at.label if at else "",
        "loss": _finite(at.loss) if at else None,
        "step_s": at.step_s if at else None,
        "p99_s": at.p99_s if at else None,
        "own_s": (at.own_s or None) if at else None,
        "own_data_s": at.own_data_s if at and at.own_s else None,
        "note": rank.note,
        "slow": round(slow.factor, 2) if slow else None,
        "slow_since": slow.since if slow else None,
        "peers_s": slow.peers_s if slow else None,
    }


def _resumed(view: View) -> dict[str, Any] | None:
    """Return what the present generation has gone on from; None if it began at step 0."""
    found = view.memory.launch.restore if view.memory.launch is not None else None
    return {"step": found.step, "source": found.source} if found is not None else None


def _checkpoint(view: View, found: Checkpoint | None) -> dict[str, Any] | None:
    errors = [m.report.durable.error for m in view.members if m.report and m.report.durable.error]
    if found is None and not errors:
        return None
    return {
        "step": found.step if found else None,
        "path": found.path if found else None,
        "error": errors[0] if errors else "",
    }


def _warm_ready(view: View) -> bool:
    """True when every member has a parked process for each of its ranks: the next recovery is a fast one."""
    parked = [
        m.report is not None
        and m.report.launcher is not None
        and (m.report.launcher.strategy == "cold" or len(m.report.launcher.parked) >= view.memory.nproc)
        for m in view.members
        if m.exists
    ]
    return bool(parked) and all(parked)
