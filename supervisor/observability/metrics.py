"""All metrics of a run, set from its status. Names follow Prometheus conventions. Labels are bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from supervisor.fault_kinds import FAULT_KINDS, kind_of
from supervisor.observability.ledger import Bucket
from supervisor.view.model import PHASES, ROLES


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` lacks the suffix `_total`, which is added to counters on export."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # the upper bounds of a histogram's buckets

    @property
    def exported(self) -> str:
        """The name and labels, as the user guide lists them."""
        suffix = "_total" if self.kind is Counter else ""
        return f"{self.name}{suffix}" + (f"{{{','.join(self.labels)}}}" if self.labels else "")

    def register(self, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        """Register the metric in `registry`, and return it without values."""
        if self.buckets:
            return Histogram(self.name, self.help, self.labels, buckets=self.buckets, registry=registry)
        return self.kind(self.name, self.help, self.labels, registry=registry)


METRICS = (
    MetricSpec(
        Counter,
        "holdfast_run_seconds",
        "Wall clock time of the run by bucket; each second is in exactly one.",
        ("bucket",),
    ),
    MetricSpec(Counter, "holdfast_incidents", "Incidents that have ended, by kind of fault.", ("kind",)),
    MetricSpec(
        Histogram,
        "holdfast_recovery_duration_seconds",
        "Time from a fault's first symptom to the first new step.",
        buckets=(0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 300),
    ),
    MetricSpec(Counter, "holdfast_lost_steps", "Steps that were trained and then rolled back."),
    MetricSpec(Gauge, "holdfast_ettr_ratio", "Effective training time ratio."),
    MetricSpec(Gauge, "holdfast_step", "Steps that all ranks have completed."),
    MetricSpec(Gauge, "holdfast_loss", "Loss of the last step of rank 0."),
    MetricSpec(Gauge, "holdfast_step_seconds", "Median duration of the last steps."),
    MetricSpec(
        Gauge,
        "holdfast_rank_own_seconds",
        "A rank's own time in a step before it waits for others: mean over at least the last 50 steps.",
        ("rank",),
    ),
    MetricSpec(
        Gauge,
        "holdfast_rank_slow_ratio",
        "Own time of a slow rank divided by the median of the others'; absent for other ranks.",
        ("rank",),
    ),
    MetricSpec(Gauge, "holdfast_generation", "How many times the group was formed."),
    MetricSpec(Gauge, "holdfast_members", "Members by role.", ("role",)),
    MetricSpec(Gauge, "holdfast_missing_members", "Members that the group trains without."),
    MetricSpec(Gauge, "holdfast_phase", "1 for the current phase.", ("phase",)),
    MetricSpec(Gauge, "holdfast_checkpoint_step", "Steps in the newest checkpoint."),
    MetricSpec(Gauge, "holdfast_checkpoint_failing", "1 while checkpoints cannot be written."),
    MetricSpec(
        Gauge,
        "holdfast_loop_lag_seconds",
        "Time for which the event loop of a part handled no event, over the last minute.",
        ("part", "stat"),
    ),
    MetricSpec(
        Gauge,
        "holdfast_memory_bytes",
        "Memory for snapshots and private states, of the volume with the least room to spare.",
        ("what",),
    ),
)

# Gauges that are absent while their value is unknown, and the status fields that they show.
_SINGLE_VALUES = {"ettr_ratio": "ettr", "step": "step", "loss": "loss", "step_seconds": "step_s"}
_RANK_VALUES = {"rank_own_seconds": "own_s", "rank_slow_ratio": "slow"}


class Metrics:
    """The metrics of one process with their current values."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Register all metrics in `registry`, or in a new one if it is None."""
        self.registry = registry or CollectorRegistry()
        # The keys of these three are names without "holdfast_".
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for spec in METRICS:
            metric, name = spec.register(self.registry), spec.name.removeprefix("holdfast_")
            if isinstance(metric, Counter):
                self._counters[name] = metric
            elif isinstance(metric, Gauge):
                self._gauges[name] = metric
            else:
                self._histograms[name] = metric
        self._booked = dict.fromkeys((b.value for b in Bucket), 0.0)
        self._counted: set[str] = set()  # IDs of the incidents that were counted
        self._hidden: set[str] = set()  # the names of gauges without a value
        for name in (*_SINGLE_VALUES, "checkpoint_step"):
            self._show(name, None)
        for bucket in Bucket:  # start at 0, because rate() would otherwise miss the first event
            self._counters["run_seconds"].labels(bucket.value)
        for kind in FAULT_KINDS:
            self._counters["incidents"].labels(kind)

    def update(self, status: Mapping[str, Any]) -> None:
        """Set every metric to its value in `status`. Counters never decrease."""
        for bucket, seconds in status["buckets_s"].items():
            grown = seconds - self._booked[bucket]
            if grown > 0:
                self._counters["run_seconds"].labels(bucket).inc(grown)
                self._booked[bucket] = seconds
        for name, key in _SINGLE_VALUES.items():
            self._show(name, status[key])
        gauges = self._gauges
        gauges["generation"].set(status["generation"])
        group = status["group"]
        gauges["missing_members"].set(group["of"] - group["members"] if group["members"] else 0)
        for role in ROLES:
            gauges["members"].labels(role).set(sum(m["role"] == role for m in status["members"]))
        for name, key in _RANK_VALUES.items():
            gauges[name].clear()
            for each in status["ranks"]:
                if each[key] is not None:
                    gauges[name].labels(each["rank"]).set(each[key])
        for phase in PHASES:
            gauges["phase"].labels(phase).set(status["phase"] == phase)
        gauges["loop_lag_seconds"].clear()
        for part, lag in status.get("lag", {}).items():
            for stat in ("max", "p99"):
                gauges["loop_lag_seconds"].labels(part, stat).set(lag[f"{stat}_s"])
        memory = status.get("memory")
        for what in ("needed", "available", "used"):
            if memory is not None:
                gauges["memory_bytes"].labels(what).set(memory[f"{what}_bytes"])
        saved = status["checkpoint"] or {}
        self._show("checkpoint_step", saved.get("step"))
        gauges["checkpoint_failing"].set(bool(saved.get("error")))

    def _show(self, name: str, value: float | None) -> None:
        """Set a gauge. Without a value, it is not exported, because 0 would look like a measurement."""
        gauge = self._gauges[name]
        if name not in self._hidden and value is None:
            self.registry.unregister(gauge)
            self._hidden.add(name)
        elif name in self._hidden and value is not None:
            self.registry.register(gauge)
            self._hidden.discard(name)
        if value is not None:
            gauge.set(value)

    def incident(self, record: Mapping[str, Any]) -> None:
        """Count an incident that has ended. Safe to repeat, because each incident is counted only once."""
        if record["id"] in self._counted:
            return
        self._counted.add(record["id"])
        self._counters["incidents"].labels(kind_of(record["kind"]).name).inc()
        self._counters["lost_steps"].inc(record["lost_steps"] or 0)
        if record["recovered_s"] is not None:
            self._histograms["recovery_duration_seconds"].observe(record["recovered_s"])
