"""Account for what a job's standbys take from the cluster, for users. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from supervisor.admission.pod_layout import ACCELERATORS
from supervisor.cluster.pods import PodMember
from supervisor.cluster.standbys.pod_requests import CPU, Requests

HOUR_S = 3600.0
MAX_PODS = 50  # standbys that are listed


@dataclass(slots=True)
class StandbyAccount:
    """The accelerator hours and core hours that standbys have reserved since the job's first one."""

    gpu_s: float = 0.0
    core_s: float = 0.0
    _at_s: float | None = None
    _requests: dict[str, Requests] = field(default_factory=dict)  # by uid

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Continue from the totals that an earlier leader published, unless the current ones are higher."""
        self.gpu_s = max(self.gpu_s, _hours(stored.get("gpuHours")) * HOUR_S)
        self.core_s = max(self.core_s, _hours(stored.get("coreHours")) * HOUR_S)

    def knows(self, uid: str) -> bool:
        return uid in self._requests

    def learn(self, uid: str, requests: Requests) -> None:
        """Record what a standby requests."""
        self._requests[uid] = requests

    def note(self, standbys: Collection[PodMember], now_s: float) -> None:
        """Charge the time since the last call for the standbys that have a node now."""
        since_s, self._at_s = self._at_s, now_s
        if since_s is not None:
            gpus, cores = self.reserved(standbys)
            self.gpu_s += gpus * (now_s - since_s)
            self.core_s += cores * (now_s - since_s)
        uids = {each.uid for each in standbys}
        self._requests = {uid: each for uid, each in self._requests.items() if uid in uids}

    def reserved(self, standbys: Iterable[PodMember]) -> tuple[int, float]:
        """Return how many accelerators and cores the standbys reserve on their nodes."""
        there = [self._requests.get(each.uid, {}) for each in standbys if each.node and not each.has_ended]
        gpus = sum(amount for each in there for name, amount in each.items() if name.endswith(ACCELERATORS))
        return gpus, sum(each.get(CPU, 0) for each in there) / 1000

    def shown(
        self, standbys: Iterable[PodMember], placement: Collection[str], wanted: int, problem: str
    ) -> dict[str, Any]:
        """Return the status field `standbys`, without the ready count; {} if there is nothing to show."""
        there = sorted((each for each in standbys if not each.has_ended), key=lambda each: each.name)
        if not (wanted or there or self.core_s or self.gpu_s):
            return {}
        gpus, cores = self.reserved(there)
        return {
            "wanted": wanted,
            "problem": problem,
            "pods": [
                {"name": each.name, "node": each.node, "state": _state(each, placement)}
                for each in there[:MAX_PODS]
            ],
            "gpus": gpus,
            "cores": _text(cores),
            "gpuHours": _text(self.gpu_s / HOUR_S),
            "coreHours": _text(self.core_s / HOUR_S),
        }


def _state(standby: PodMember, placement: Collection[str]) -> str:
    if standby.is_leaving:
        return "leaving"
    if standby.member in placement:
        return "has ranks"
    return "idle" if standby.is_running else "starting" if standby.node else "unscheduled"


def _text(number: float) -> str:
    """Return a number as a text, because the API advises against floating-point fields."""
    return f"{number:.3f}".rstrip("0").rstrip(".")


def _hours(value: object) -> float:
    try:
        found = float(value) if isinstance(value, str) else 0.0
    except ValueError:
        return 0.0
    return found if 0.0 <= found < 1e12 else 0.0
