"""The drills: the faults that `holdfast inject` can cause, and the process that executes each. Pure.

Do not rename a drill: the API, orders and benchmark results contain the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

DrillName: TypeAlias = Literal[
    "kill", "stop", "hang", "spin", "nan", "exit", "member", "sidecar", "supervisor"
]
DrillExecutor: TypeAlias = Literal["rank", "launcher", "sidecar", "supervisor", "keeper"]

EXIT_CODE = 17  # the exit code of a rank that executes "exit"


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill. `executor` is the process that causes the fault when it receives the order."""

    name: DrillName
    description: str
    executor: DrillExecutor
    signal: Literal["", "SIGKILL", "SIGSTOP"] = ""  # the signal that a launcher sends to the rank
    at_next_step: bool = False  # whether the rank completes its current step first
    target: str = "rank {rank}"  # what the fault happens to, in messages


_ROWS = (
    Drill("kill", "SIGKILL to the rank", "launcher", "SIGKILL"),
    Drill("stop", "SIGSTOP to the rank", "launcher", "SIGSTOP"),
    Drill("hang", "the rank sleeps forever", "rank", at_next_step=True),
    Drill("spin", "the rank loops forever", "rank", at_next_step=True),
    Drill("nan", "the rank's next loss is NaN", "rank", at_next_step=True),
    Drill("exit", f"the rank exits with code {EXIT_CODE}", "rank"),
    Drill("member", "its member is lost, with its memory", "keeper", target="the member of rank {rank}"),
    Drill(
        "sidecar",
        "SIGKILL to its member's sidecar",
        "sidecar",
        target="the sidecar of rank {rank}'s member",
    ),
    Drill("supervisor", "SIGKILL to the supervisor", "supervisor", target="the supervisor"),
)
DRILLS: Mapping[str, Drill] = MappingProxyType({each.name: each for each in _ROWS})
