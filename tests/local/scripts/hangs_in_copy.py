"""Train; once the file argv[1] exists, rank 0 hangs in the middle of a copy into its arena.

argv[2] says how: stopped, stuck (alive, and able to answer), or slow (for three seconds).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tiny_model import train

from holdfast.snapshot.tensor_copy import ParallelCopy

order, how = Path(sys.argv[1]), sys.argv[2]
copy = ParallelCopy.run


def freeze(self: ParallelCopy, moved: Callable[[], None]) -> None:
    if os.environ.get("RANK") == "0" and order.exists():
        order.unlink()
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            threading.Event().wait(3.0 if how == "slow" else None)
    copy(self, moved)


ParallelCopy.run = freeze
train(10_000_000)
