"""Refuse a bench that needs more memory than is available, before it allocates any."""

from __future__ import annotations

import os
from pathlib import Path

from bench.harness.launchers import Failed
from bench.text import size
from holdfast.protocol.member_messages import MemoryUse
from sidecar.state import memory_limits

MEMORY = Path("/dev/shm")
SPARE = 1.05  # factor for private states, progress pages and the processes themselves


def check(option: str, state_bytes: int, shared: int, beside: int, other_bytes: int = 0) -> None:
    """Raise `Failed` unless the states that the bench holds at once fit into memory.

    Args:
        option: The option that set `state_bytes`, for the message.
        state_bytes: The size of one state.
        shared: How many states are in shared memory.
        beside: How many states are in other memory.
        other_bytes: Memory that is needed regardless of `state_bytes`.
    """
    refused = refusal(option, state_bytes, shared, beside, other_bytes, memory_limits.measure(MEMORY, 0))
    if refused and state_bytes and os.access(MEMORY, os.W_OK):
        raise Failed(refused)


def refusal(
    option: str, state_bytes: int, shared: int, beside: int, other_bytes: int, there: MemoryUse
) -> str | None:
    """Return one line that says why the states do not fit and which size would; None if they fit."""
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
        f" {MEMORY}, but only {size(there.available_bytes)} is free{limit}, and {size(there.free_bytes)} in"
        f" {MEMORY}; {would}"
    )
