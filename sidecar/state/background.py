"""Run work in lowest-priority threads, without slowing down the training.

The ranks use every core, so hashing a snapshot at normal priority would slow down one rank, and all others
would wait for it. Child threads inherit the priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from holdfast.process import linux

_P = ParamSpec("_P")
_R = TypeVar("_R")


def yield_to_all() -> None:
    """Give the calling thread the lowest priority."""
    with suppress(OSError):  # a container may forbid this; the thread then keeps the sidecar's priority
        linux.lower_thread_priority()


_pool = ThreadPoolExecutor(2, "background", initializer=yield_to_all)


async def run_in_background(work: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
    """Run `work` without blocking the event loop; return its result or raise its exception."""
    return await asyncio.get_running_loop().run_in_executor(_pool, lambda: work(*args, **named))
