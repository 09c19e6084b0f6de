"""The faults of a chaos run: what each needs, how long it lasts, and what it may cost. Pure.

Everything that depends on the kind of a fault is in this table. A fault is injected only when all jobs are
calm, and the next one only when they are calm again, so the jobs always have what they need to survive it: a
second member on another node, and the standbys that they ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from holdfast.protocol.drills import DRILLS

FaultPlace: TypeAlias = Literal[
    "rank", "sidecar", "launcher", "pod", "missed pod", "leader", "node", "api", "webhook", "storage"
]
JobKind: TypeAlias = Literal["Job", "PyTorchJob", "StatefulSet"]

KILL_NODE, START_NODE = "HOLDFAST_NODE_KILL", "HOLDFAST_NODE_START"
CUT_NODE, HEAL_NODE = "HOLDFAST_NODE_CUT", "HOLDFAST_NODE_HEAL"
STOP_API, CONT_API = "HOLDFAST_API_SERVER_STOP", "HOLDFAST_API_SERVER_CONT"

ALL: frozenset[JobKind] = frozenset({"Job", "PyTorchJob", "StatefulSet"})
# If a Job's pods have the restart policy Never, the Job counts each container that ends, and each pod that is
# deleted without being evicted, as a failure. Holdfast cannot prevent that.
RESTARTED: frozenset[JobKind] = frozenset({"PyTorchJob", "StatefulSet"})

# If a Job's pods have often been evicted, Kubernetes takes up to 10 minutes to create its next pod. After
# that, the pod needs as long to become warm as after any other fault.
JOB_BACKOFF_S = 600.0
ONE_STEP = 1
ANY: None = None  # a NaN may spoil the state, so the steps since the last snapshot may be lost


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One kind of fault.

    Attributes:
        place: What is struck. Faults of a node strike all jobs. Faults of a leader, the API server, the
            webhook or the storage strike no job directly.
        words: What happens, for the report.
        calm_s: All jobs must be calm within this time after the end of the fault.
        lasts_s: The shortest and the longest time until the fault is ended; (0, 0) if it is momentary.
        most_lost: The largest number of steps that an incident may cost; None for any number.
        needs: The environment variables with the commands that cause and end the fault.
        owners: The kinds of jobs whose own failure counters the fault does not change.
        trains_meanwhile: All jobs that can train during the fault must do so before it is ended.
        job_counts: A Job counts its pods on the node as failures. So does every Job whose pods have the
            restart policy Never: a kubelet that boots before they were evicted reports them as failed.
    """

    name: str
    place: FaultPlace
    words: str
    calm_s: float
    lasts_s: tuple[float, float] = (0.0, 0.0)
    most_lost: int | None = ONE_STEP
    needs: tuple[str, ...] = ()
    owners: frozenset[JobKind] = ALL
    trains_meanwhile: bool = False
    job_counts: bool = False

    @property
    def sign(self) -> FaultSign:
        # If no other replica takes the Lease of a frozen leader, the leader continues with the same epoch.
        return "" if self.name == "leader-freeze" else SIGNS[self.place]

    @property
    def is_in_place(self) -> bool:
        """True if only processes in a pod end, so that another fault may hit another job at the same time."""
        return self.place in ("rank", "sidecar")

    @property
    def strikes_one_job(self) -> bool:
        """True if the schedule chooses a rank of a job; a fault of a node strikes the node of that rank."""
        return self.place in ("rank", "sidecar", "launcher", "pod", "missed pod", "node")


def _of_drills() -> list[ChaosFault]:
    """Return the drills that a rank or its launcher executes."""
    return [
        ChaosFault(
            name,
            "rank",
            f"holdfast inject {name}: {each.description}",
            120,
            most_lost=None if name == "nan" else 1,
        )
        for name, each in DRILLS.items()
        if each.executor in ("rank", "launcher")
    ]


_ROWS = (
    *_of_drills(),
    ChaosFault("sidecar", "sidecar", "SIGKILL to the sidecar of a rank", 120),
    ChaosFault("launcher", "launcher", "SIGKILL to the launcher of a rank", 180, owners=RESTARTED),
    ChaosFault("evict", "pod", "the pod of a rank is evicted", 240),
    ChaosFault("delete", "pod", "the pod of a rank is deleted", 240, owners=RESTARTED),
    ChaosFault("leader-kill", "leader", "SIGKILL to the leading supervisor", 120),
    ChaosFault(
        "leader-freeze", "leader", "SIGSTOP to the leading supervisor, longer than its Lease", 150, (20, 30)
    ),
    ChaosFault("leader-delete", "leader", "forced deletion of the leading supervisor's pod", 150),
    ChaosFault(
        "drain", "node", "kubectl drain of the node of a rank", 300, (5, 15), trains_meanwhile=True
    ),
    ChaosFault(
        "node-kill", "node", "the node of a rank loses its power, and boots later", 360, (5, 20),
        needs=(KILL_NODE, START_NODE), trains_meanwhile=True, job_counts=True,
    ),
    ChaosFault(
        "node-cut", "node", "the node of a rank loses its network for a minute", 360, (40, 60),
        needs=(CUT_NODE, HEAL_NODE), trains_meanwhile=True,
    ),
    ChaosFault(
        "api-stop", "api", "the API server does not answer", 150, (10, 30), needs=(STOP_API, CONT_API)
    ),
    ChaosFault("webhook-away", "webhook", "no replica of the webhook runs", 180, (5, 15)),
    # The owner's next pod starts without Holdfast. The supervisor evicts it once the webhook works again.
    # Until then, the script fails, because its image does not contain Holdfast. A Job counts this failure.
    ChaosFault(
        "evict-missed", "missed pod", "the pod of a rank is evicted while no replica of the webhook runs",
        300, (5, 15), owners=RESTARTED, trains_meanwhile=True,
    ),
    ChaosFault("storage-refuses", "storage", "the object storage refuses all requests", 120, (5, 20)),
)  # fmt: skip
CHAOS_FAULTS: Mapping[str, ChaosFault] = MappingProxyType({each.name: each for each in _ROWS})

# The sign that a fault was noticed: an incident of each job that is struck, a higher epoch of all jobs, or a
# restarted container. Without it, a job could look calm only because its status is older than the fault.
FaultSign: TypeAlias = Literal["incident", "epoch", "restart", ""]
SIGNS: Mapping[FaultPlace, FaultSign] = MappingProxyType(
    {
        "rank": "incident",
        "launcher": "incident",
        "pod": "incident",
        "missed pod": "incident",
        "node": "incident",
        "sidecar": "restart",
        "leader": "epoch",
        "api": "",
        "webhook": "",
        "storage": "",
    }
)

# The second of two faults, which may occur while the job or the leader recovers from the first one.
SECOND = ("kill", "leader-kill")


def usable(environment: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the faults whose commands are given, and a line for each of the others."""
    missing = {
        name: [need for need in each.needs if not environment.get(need, "").strip()]
        for name, each in CHAOS_FAULTS.items()
    }
    left_out = [
        f"left out: {name}, because {' and '.join(needs)} {_is(needs)} not set"
        for name, needs in missing.items()
        if needs
    ]
    return tuple(name for name, needs in missing.items() if not needs), tuple(left_out)


def _is(needs: list[str]) -> str:
    return "is" if len(needs) == 1 else "are"
