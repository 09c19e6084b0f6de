"""Identify the namespace and the job whose reports a limit counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReportOwner:
    """A job and its namespace. Limits are shared among namespaces, then among the jobs of each namespace."""

    namespace: str
    job: str


UNSHARED = ReportOwner("", "")  # a run on one machine, which has one user and one job
