"""Baselines, and operators' requests to forget them, which one sensor passes on to the others.

A baseline is what a sensor has seen on a node and expects to see again: its GPUs, the NVLinks that were up,
the widths of its PCIe links. After a planned hardware change, an operator tells the sensor to forget it with
`holdfast node forget`, and the sensor relearns the baseline from what it sees next.

Only the sensor that reads the operators' requests (`operator_requests`) uses the disk of the saved state. It
hands each request over in memory, so that a hanging disk blinds no sensor with baselines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# The most requests that wait for a sensor, for example while it hangs; beyond that, the oldest are dropped,
# and counted. `forget` accepts only entities of the node, and a node has fewer than this for all of its
# baselines together.
MAX_KEPT = 4096
MAX_ENTITY = 200  # characters

GPUS, NVLINKS, WIDTHS, PORTS, INTERFACES = "gpus", "nvlinks", "pcie-widths", "ports", "interfaces"
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        GPUS: "how many GPUs the node had",
        NVLINKS: "which NVLinks of each GPU were up",
        WIDTHS: "the greatest width of each PCIe link",
        PORTS: "which InfiniBand ports the node had and were up, and their best rates",
        INTERFACES: "which network interfaces were up",
    }
)
# The kind of entity that has the baseline; a baseline that is not listed here belongs to the whole node.
KIND_OF: Mapping[str, str] = MappingProxyType(
    {NVLINKS: "gpu", WIDTHS: "device", PORTS: "port", INTERFACES: "net"}
)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An operator's request to forget a baseline."""

    baseline: str
    entity: str = ""  # "": of all entities


class ForgetRequests:
    """The newest requests, with numbers that rise across restarts.

    One thread adds requests, and any thread may read them. The sensor that adds requests saves them, and each
    sensor with baselines saves the number of the last one that took effect. So each request takes effect
    once, even if the agent ends while a sensor hangs.
    """

    def __init__(self, saved: Any = None) -> None:
        """Continue from the result of `dump` before a restart; start without requests if it is malformed."""
        self._count, self._numbers = _restored(saved)
        self.dropped = 0  # requests that may have been dropped before a sensor took them

    def add(self, request: Forgotten) -> None:
        """Number a request. It replaces an earlier one for the same baseline and entity."""
        self._count += 1
        numbers = {each: number for each, number in self._numbers.items() if each != request}
        numbers[request] = self._count
        for oldest in list(numbers)[:-MAX_KEPT]:
            del numbers[oldest]
            self.dropped += 1
        self._numbers = numbers  # replaced as a whole, because other threads read it

    def after(self, number: int) -> Iterator[tuple[int, Forgotten]]:
        """Yield the requests with a greater number, oldest first."""
        for request, each in self._numbers.items():
            if each > number:
                yield each, request

    def dump(self) -> dict[str, Any]:
        """Return the requests as JSON."""
        kept = [[number, each.baseline, each.entity] for each, number in self._numbers.items()]
        return {"count": self._count, "kept": kept}


class ForgottenBaselines:
    """The requests as one sensor with baselines sees them."""

    def __init__(self, requests: ForgetRequests | None, position: Any = None) -> None:
        """Take the requests, if any, and the result of `position` before a restart."""
        self._requests = requests
        self._done = position if type(position) is int and position >= 0 else 0

    def position(self) -> int:
        """Return the number of the last request that was taken."""
        return self._done

    def take(self) -> Iterator[Forgotten]:
        """Yield the new requests. Does not block."""
        for number, request in () if self._requests is None else self._requests.after(self._done):
            self._done = number
            yield request


def parse_request(baseline: object, entity: object) -> Forgotten | None:
    """Return a request; None if there is no such baseline, or a field is malformed."""
    if isinstance(baseline, str) and baseline in BASELINES and isinstance(entity, str):
        return Forgotten(baseline, entity[:MAX_ENTITY])
    return None


def _restored(saved: Any) -> tuple[int, dict[Forgotten, int]]:
    try:
        numbers = {
            request: int(number)
            for number, baseline, entity in saved["kept"][-MAX_KEPT:]
            if (request := parse_request(baseline, entity)) is not None
        }
        return max([int(saved["count"]), *numbers.values()]), numbers
    except (TypeError, KeyError, ValueError, OverflowError):
        return 0, {}
