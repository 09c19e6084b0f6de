"""The file of a rank's progress page: made whole, and mapped to be written."""

from __future__ import annotations

import mmap
import os
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
