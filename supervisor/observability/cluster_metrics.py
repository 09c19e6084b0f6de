"""The metrics of a cluster's supervisor about itself and its jobs. Each replica exports them."""

from __future__ import annotations

from prometheus_client import Gauge

LEADS_METRIC = Gauge("holdfast_supervisor_leads", "1 while this process holds the Lease.")
JOBS_METRIC = Gauge("holdfast_supervised_jobs", "Jobs that this process supervises.")
STANDBYS_METRIC = Gauge(
    "holdfast_standbys_missing", "Standbys that running jobs want and that are not ready."
)
METRICS = (LEADS_METRIC, JOBS_METRIC, STANDBYS_METRIC)


def measure(*, leads: bool, jobs: int, standbys_missing: int) -> None:
    """Set the metrics. Call this before they are read."""
    LEADS_METRIC.set(leads)
    JOBS_METRIC.set(jobs)
    STANDBYS_METRIC.set(standbys_missing)
