"""Write checkpoints to storage, and the plain files that they are compared with."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint import writer
from holdfast.checkpoint.manifest import REPLICATED

CHUNK_BYTES = 8 << 20


def checkpointer(source: Path, folder: Path) -> Callable[[], float | None]:
    """Return a call that writes a durable checkpoint of `source` and returns the seconds it took."""
    steps = iter(range(1, 1 << 60))
    root = folder / "checkpoints"

    def write() -> float:
        shutil.rmtree(root, ignore_errors=True)  # frees its page cache, as the plain writer does
        step = next(steps)
        began = time.perf_counter()
        writer.write(
            root,
            generation=1,
            step=step,
            world_size=1,
            files={REPLICATED: source},
            meta={},
            created_at=time.time(),
        )
        return time.perf_counter() - began

    return write


def plain_writer(source: Path, folder: Path) -> Callable[[], float | None]:
    """Return a call that copies `source` like `dd conv=fsync bs=8M` and returns the seconds it took."""
    target = folder / "plain"

    def write() -> float:
        target.unlink(missing_ok=True)
        buffer = memoryview(bytearray(CHUNK_BYTES))
        began = time.perf_counter()
        with open(source, "rb", buffering=0) as reading, open(target, "wb", buffering=0) as out:
            while count := reading.readinto(buffer):
                left = buffer[:count]
                while left:
                    left = left[os.write(out.fileno(), left) :]
            os.fsync(out.fileno())
        return time.perf_counter() - began

    return write
