"""Limit the memory that members' connections and newest reports take, for each namespace and in total. Pure.

The newest report of each member is kept, because decisions need the reports of all members of a job. Its
decoded form takes several times as much memory as its text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Together with reports that are being received or decoded and with the rest of the process, this stays below
# the memory limit in manifests/base/supervisor.yaml. 2,000 members with 8 ranks take about 340 MiB.
TOTAL_BYTES = 512 << 20
NAMESPACE_BYTES = 384 << 20
CONNECTION_BYTES = 96 << 10  # for each member: its socket, its TLS state, its task, its pod and its orders
# The part of a report beyond this is counted twice, because a decision may still use the previous report.
ONCE_BYTES = 256 << 10


def member_bytes(report_bytes: int) -> int:
    """Return how much memory to reserve for a member whose report takes `report_bytes`."""
    return CONNECTION_BYTES + report_bytes + max(0, report_bytes - ONCE_BYTES)


@dataclass(slots=True, eq=False)
class MemoryHolder:
    """One member, how much memory is reserved for it, and how to make it release all of that."""

    namespace: str
    release_all: Callable[[], None]
    reserved_bytes: int = 0


class ReportMemory:
    """The memory that is reserved for all members of one process.

    If all of it is reserved, namespaces that exceed their share give way. One half of the memory is divided
    equally among the namespaces, and the other half in proportion to their members. A user of one namespace
    can therefore take memory only from that namespace.
    """

    def __init__(self, total_bytes: int = TOTAL_BYTES, namespace_bytes: int = NAMESPACE_BYTES) -> None:
        self._total_bytes, self._namespace_bytes = total_bytes, namespace_bytes
        self._holders: dict[str, dict[MemoryHolder, None]] = {}  # by namespace
        self._reserved: dict[str, int] = {}  # by namespace
        self.reserved_bytes = 0

    def reserve(self, holder: MemoryHolder, size: int) -> str:
        """Change the memory reserved for `holder` to `size`. Return "", or why that is not possible.

        If it is not possible, the earlier reservation remains. If another namespace has to give way, its
        members with the largest reservations lose them.
        """
        more = size - holder.reserved_bytes
        if more > 0 and self._reserved.get(holder.namespace, 0) + more > self._namespace_bytes:
            return _refusal(holder.namespace, self._namespace_bytes)
        self._holders.setdefault(holder.namespace, {})[holder] = None
        self._add(holder, more)
        while more > 0 and self.reserved_bytes > self._total_bytes:
            namespace = self._most_excessive()
            if namespace == holder.namespace:
                self._add(holder, -more)
                if not holder.reserved_bytes:
                    self.release(holder)
                return _refusal(namespace, self._total_bytes)
            largest = max(self._holders[namespace], key=lambda each: each.reserved_bytes)
            self.release(largest)
            largest.release_all()
        return ""

    def release(self, holder: MemoryHolder) -> None:
        """Release the memory reserved for `holder`. Safe to repeat."""
        holders = self._holders.get(holder.namespace, {})
        if holder not in holders:
            return
        self._add(holder, -holder.reserved_bytes)
        del holders[holder]
        if not holders:
            del self._holders[holder.namespace], self._reserved[holder.namespace]

    def _add(self, holder: MemoryHolder, more: int) -> None:
        holder.reserved_bytes += more
        self._reserved[holder.namespace] = self._reserved.get(holder.namespace, 0) + more
        self.reserved_bytes += more

    def _most_excessive(self) -> str:
        """Return the namespace that exceeds its share by the most. If the total is exceeded, there is one."""
        members = sum(map(len, self._holders.values()))

        def excess(namespace: str) -> float:
            shares = 1 / len(self._holders) + len(self._holders[namespace]) / members
            return self._reserved[namespace] - self._total_bytes * shares / 2

        return max(self._holders, key=excess)


def _refusal(namespace: str, limit_bytes: int) -> str:
    of = f"of the namespace {namespace} " if namespace else ""
    limit = f"the limit is {limit_bytes >> 20} MiB"
    return f"the reports of the members {of}take too much of the supervisor's memory: {limit}"
