"""Map the pages of the slots into this process's page tables before a copy needs them.

A process's first write to each page of a mapped file causes a page fault, even if the page is in memory. For
a large state, these faults take twice as long as the copy itself, and a recovery may have to wait for a new
process's first copy. So a thread populates the page tables during the first steps. It works in small pieces,
because other threads cannot map or unmap memory until the current piece is finished. The thread neither reads
nor changes the content of the slots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.snapshot.tensor_copy import address_of, populate

if TYPE_CHECKING:
    import mmap

    from holdfast.snapshot.arena import Arena

LEAST_BYTES = 64 << 20  # for smaller states, the time for the faults is negligible in a recovery
PIECE_BYTES = 1 << 20  # populating a piece takes about 0.3 ms
PAUSES = 2.0  # after each piece, the thread pauses this many times as long as the piece took


def populate_ahead(arena: Arena, total_bytes: int) -> threading.Thread | None:
    """Start and return a thread that populates the slots whose size is exactly `total_bytes`.

    The result is None if there is no such slot, or if the state is smaller than `LEAST_BYTES`. No other
    thread may use `arena` during the call. After the call, any thread may use `arena`, because the new thread
    uses only the mappings. Raises OSError.
    """
    found = arena.whole(total_bytes) if total_bytes >= LEAST_BYTES else ()
    if not found:
        return None
    thread = threading.Thread(target=_populate_slots, args=(found,), name="holdfast-ahead", daemon=True)
    thread.start()
    return thread


def _populate_slots(mappings: Sequence[mmap.mmap]) -> None:
    for mapping in mappings:
        address = address_of(mapping)
        for at in range(0, len(mapping), PIECE_BYTES):
            began = time.perf_counter()
            if not populate(address + at, min(PIECE_BYTES, len(mapping) - at)):
                break  # the file was truncated, or the kernel is too old
            time.sleep(PAUSES * (time.perf_counter() - began))
