"""Refuse a bench that needs more memory than there is, before it allocates any."""

from __future__ import annotations

import os
from pathlib import Path

from bench.harness.launchers import Failed
from bench.text import size
from holdfast.protocol.member_messages import MemoryUse
from sidecar.state import memory_limits

MEMORY = Path("/dev/shm")
SPARE = 1.05  # private states, progress pages, and the processes themselves


def check(option: str, state_bytes: int, shared: int, beside: int, other_bytes: int = 0) -> None:
    """Raise `Failed` unless `shared` states fit into shared memory, and `beside` more into all memory.

    `option` is the option that set the size; `other_bytes` are needed for any size.
    """
    refused = refusal(option, state_bytes, shared, beside, other_bytes, memory_limits.measure(MEMORY, 0))
    if refused and state_bytes and os.access(MEMORY, os.W_OK):
        raise Failed(refused)


def refusal(
    option: str, state_bytes: int, shared: int, beside: int, other_bytes: int, there: MemoryUse
) -> str | None:
    """Return one line that says why it does not fit and which size would; None when it fits."""
    shared_bytes = int(SPARE * shared * state_bytes)
    all_bytes = int(SPARE * (shared + beside) * state_bytes) + other_bytes
    if shared_bytes <= there.free_bytes and all_bytes <= there.available_bytes:
        return None
    least = min(there.free_bytes / shared, max(0, there.available_bytes - other_bytes) / (shared + beside))
    fits = int(least / SPARE / 1e7)  # in tens of MB, rounded down
    limit = f" under the memory limit of {size(there.limit_bytes)} of the cgroup" if there.limit_bytes else ""
    would = f"{option} {fits * 10}M would fit" if fits else "nothing would fit"
    return (
        f"{option} {size(state_bytes)} takes {size(all_bytes)} of memory, {size(shared_bytes)} of it in"
        f" {MEMORY}: {size(there.available_bytes)} are free{limit}, {size(there.free_bytes)} in"
        f" {MEMORY}; {would}"
    )
