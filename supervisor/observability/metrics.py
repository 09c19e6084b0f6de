"""Every metric of a run, taken from its status. Names follow Prometheus' practices; labels are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from supervisor.fault_kinds import FAULT_KINDS, kind_of
from supervisor.observability.ledger import Bucket
from supervisor.view.model import PHASES, ROLES

RECOVERY_BUCKETS_S = (0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300)


class Metrics:
    """One instance per process; tests make their own registry."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        r = self.registry
        self._seconds = Counter(
            "holdfast_run_seconds",  # exported with _total
            "Wall clock of the run, each second in one bucket.",
            ("bucket",),
            registry=r,
        )
        self._incidents = Counter("holdfast_incidents", "Faults seen.", ("kind",), registry=r)
        self._recovery = Histogram(
            "holdfast_recovery_duration_seconds",
            "From a fault's first symptom to the first new step.",
            buckets=RECOVERY_BUCKETS_S,
            registry=r,
        )
        self._lost = Counter("holdfast_lost_steps", "Steps trained and rolled back.", registry=r)
        self._ettr = Gauge("holdfast_ettr_ratio", "Effective training time ratio.", registry=r)
        self._step = Gauge("holdfast_step", "Steps that all ranks have done.", registry=r)
        self._loss = Gauge("holdfast_loss", "Loss of the last step of rank 0.", registry=r)
        self._step_s = Gauge("holdfast_step_seconds", "Median of the last steps.", registry=r)
        self._own_s = Gauge(
            "holdfast_rank_own_seconds",
            "A rank's own time in a step, before it waits for others: mean of the last 50 steps and more.",
            ("rank",),
            registry=r,
        )
        self._slow = Gauge(
            "holdfast_rank_slow_ratio",
            "Own time of a slow rank, in medians of the others'; nothing for one that is not slow.",
            ("rank",),
            registry=r,
        )
        self._generation = Gauge("holdfast_generation", "Times the group was formed.", registry=r)
        self._members = Gauge("holdfast_members", "Members by role.", ("role",), registry=r)
        self._phase = Gauge("holdfast_phase", "1 for the present phase.", ("phase",), registry=r)
        self._checkpoint = Gauge("holdfast_checkpoint_step", "Steps in the newest checkpoint.", registry=r)
        self._failing = Gauge(
            "holdfast_checkpoint_failing", "1 while checkpoints cannot be written.", registry=r
        )
        self._lag = Gauge(
            "holdfast_loop_lag_seconds",
            "Time in which the event loop of a part looked at nothing, over the last minute.",
            ("part", "stat"),
            registry=r,
        )
        self._memory = Gauge(
            "holdfast_memory_bytes",
            "Memory for snapshots and private states, of the volume that has the least to spare.",
            ("what",),
            registry=r,
        )
        self._booked = dict.fromkeys((b.value for b in Bucket), 0.0)
        self._seen: set[str] = set()
        self._hidden: set[Gauge] = set()
        for gauge in (self._ettr, self._step, self._loss, self._step_s, self._checkpoint):
            self._show(gauge, None)
        for bucket in Bucket:  # zeros at once, so that rate() sees the first event
            self._seconds.labels(bucket.value)
        for kind in FAULT_KINDS:
            self._incidents.labels(kind)

    def update(self, status: Mapping[str, Any]) -> None:
        """Bring every metric to what `status` says. Counters only grow."""
        for bucket, seconds in status["buckets_s"].items():
            grown = seconds - self._booked[bucket]
            if grown > 0:
                self._seconds.labels(bucket).inc(grown)
                self._booked[bucket] = seconds
        self._show(self._ettr, status["ettr"])
        self._generation.set(status["generation"])
        for gauge, key in ((self._step, "step"), (self._loss, "loss"), (self._step_s, "step_s")):
            self._show(gauge, status[key])
        for role in ROLES:
            self._members.labels(role).set(sum(m["role"] == role for m in status["members"]))
        for gauge, key in ((self._own_s, "own_s"), (self._slow, "slow")):
            gauge.clear()
            for each in status["ranks"]:
                if each[key] is not None:
                    gauge.labels(each["rank"]).set(each[key])
        for phase in PHASES:
            self._phase.labels(phase).set(status["phase"] == phase)
        self._lag.clear()
        for part, lag in status.get("lag", {}).items():
            for stat in ("max", "p99"):
                self._lag.labels(part, stat).set(lag[f"{stat}_s"])
        memory = status.get("memory")
        for what in ("needed", "available", "used"):
            if memory is not None:
                self._memory.labels(what).set(memory[f"{what}_bytes"])
        saved = status["checkpoint"] or {}
        self._show(self._checkpoint, saved.get("step"))
        self._failing.set(bool(saved.get("error")))

    def _show(self, gauge: Gauge, value: float | None) -> None:
        """Set a gauge; one whose value is not known is not there at all, which is not 0."""
        if gauge not in self._hidden and value is None:
            self.registry.unregister(gauge)
            self._hidden.add(gauge)
        elif gauge in self._hidden and value is not None:
            self.registry.register(gauge)
            self._hidden.discard(gauge)
        if value is not None:
            gauge.set(value)

    def incident(self, found: Mapping[str, Any]) -> None:
        """Count an incident once, when it is over."""
        if found["id"] in self._seen:
            return
        self._seen.add(found["id"])
        self._incidents.labels(kind_of(found["kind"]).name).inc()
        self._lost.inc(found["lost_steps"] or 0)
        if found["recovered_s"] is not None:
            self._recovery.observe(found["recovered_s"])
