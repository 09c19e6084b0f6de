"""The file of a rank's progress page: made whole, mapped to be written, and read by the ranks beside it."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from holdfast import progress as layout


def make(path: Path) -> None:
    """Put a new page at `path`, replacing any; readers of the old one keep that.

    Every byte is written, for a hole in a full tmpfs would be a SIGBUS at the first store.
    Raises `OSError`; then `path` is as before.
    """
    content = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(content, 0, layout.MAGIC, layout.VERSION, layout.PAGE_BYTES)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def map_writable(path: Path) -> mmap.mmap:
    """Return the page at `path`. Raises `OSError`, or `ValueError` if it is not one of this version."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.PAGE_BYTES:
            raise ValueError(f"{path}: {size} bytes, not a progress page of {layout.PAGE_BYTES}")
        memory = mmap.mmap(file.fileno(), layout.PAGE_BYTES, access=mmap.ACCESS_WRITE)
    if not layout.is_page(memory):
        memory.close()
        raise ValueError(f"{path}: not a progress page of version {layout.VERSION}")
    return memory


def void_steps(directory: Path, nproc: int, generation: int) -> frozenset[int]:
    """Return the steps of `generation` whose state a rank of this member changed after their commit.

    Of the pages `page-0.bin` to `page-{nproc - 1}.bin`; one that is missing or damaged says nothing.
    """
    found: set[int] = set()
    for local_rank in range(nproc):
        with suppress(OSError, ValueError), open(directory / f"page-{local_rank}.bin", "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                said = layout.read_torn_ok(memory)  # its rank may have died inside a write
            if said is not None and said.generation == generation:
                found.update(said.late)
    return frozenset(found)
