"""The jobs of a chaos run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bench.chaos.fault_table import JobKind


@dataclass(frozen=True, slots=True)
class ChaosJob:
    """One job. Its members are on different nodes, so that no fault of a node ends all of them."""

    name: str
    kind: JobKind
    example: str  # a file of examples/kubernetes
    standby: int
    stored: bool  # whether it writes checkpoints to the object storage
    members: int = 2

    @property
    def prefix(self) -> str:
        """Where its checkpoints are in the bucket."""
        return f"chaos/{self.name}"


CHAOS_JOBS = (
    ChaosJob("indexed", "Job", "job.yaml", standby=1, stored=False),
    ChaosJob("pytorch", "PyTorchJob", "pytorchjob.yaml", standby=1, stored=True),
    ChaosJob("stateful", "StatefulSet", "statefulset.yaml", standby=0, stored=True),
)
UNDISTURBED = ChaosJob("undisturbed", "Job", "job.yaml", standby=0, stored=False)
