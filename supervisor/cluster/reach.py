"""Find out whether members are lost, or only out of this supervisor's reach. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """How many of a job's running members have ever connected to a leader, and how many are connected now.

    Members that never connected say nothing about the network of this supervisor, because a NetworkPolicy may
    keep them away, or a user may have written the annotations of a member onto any pod.
    """

    known: int
    connected: int

    @property
    def is_lost(self) -> bool:
        """True if fewer than half of the known members are connected."""
        return 2 * self.connected < self.known


@dataclass(frozen=True, slots=True)
class OutOfReach:
    """What this supervisor may be unable to reach although members run: everything, or some namespaces."""

    everything: bool = False
    namespaces: frozenset[str] = frozenset()

    def includes(self, namespace: str) -> bool:
        return self.everything or namespace in self.namespaces


def out_of_reach(reaches: Iterable[tuple[str, Reach]]) -> OutOfReach:
    """Return what the supervisor may be unable to reach, given the namespace and the reach of each job.

    Each job counts once, however large it is, and each namespace counts once, however many jobs it has.
    Therefore, neither the pods of one user nor one large job can stop the evictions of all others, or cause
    them. A namespace is lost if most of its jobs are lost, and everything is lost if most namespaces are. In
    a lost namespace, no pod is evicted either, because the namespace's network is more likely to be at fault
    than its jobs. A single job does not show this, because the job itself may be at fault.
    """
    lost_jobs: dict[str, list[bool]] = {}
    for namespace, reach in reaches:
        if reach.known:
            lost_jobs.setdefault(namespace, []).append(reach.is_lost)
    lost = frozenset(namespace for namespace, found in lost_jobs.items() if 2 * sum(found) > len(found))
    several = frozenset(namespace for namespace in lost if len(lost_jobs[namespace]) > 1)
    return OutOfReach(2 * len(lost) > len(lost_jobs), several)
