"""Have the pages of the slots in this process's tables before a copy needs them.

To write to a page of a mapped file for the first time is a fault, though the page is there: of a large state
they take twice as long as its copy. A new process has met none of them, and the first copy that it makes may
be the one that a recovery waits for. So they are met beside the first steps, a little at a time: whoever maps
or unmaps memory waits for a piece, not for all. What the slots hold is neither read nor changed.
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

LEAST_BYTES = 64 << 20  # of a state: the faults of a smaller one take less than what a recovery takes anyway
PIECE_BYTES = 1 << 20  # takes about 0.3 ms
PAUSES = 2.0  # times what a piece took, until the next one: of what is met already, hardly any


def populate_ahead(arena: Arena, total_bytes: int) -> threading.Thread | None:
    """Begin with the slots that a snapshot of so many bytes fits; return the thread, None if there are none.

    Not beside another thread that uses this arena: the thread itself does not. Raises OSError.
    """
    found = arena.whole(total_bytes) if total_bytes >= LEAST_BYTES else ()
    if not found:
        return None
    thread = threading.Thread(target=_meet, args=(found,), name="holdfast-ahead", daemon=True)
    thread.start()
    return thread


def _meet(mappings: Sequence[mmap.mmap]) -> None:
    for mapping in mappings:
        address = address_of(mapping)
        for at in range(0, len(mapping), PIECE_BYTES):
            began = time.perf_counter()
            if not populate(address + at, min(PIECE_BYTES, len(mapping) - at)):
                break  # the file is shorter by now, or the kernel cannot
            time.sleep(PAUSES * (time.perf_counter() - began))
