"""End asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.1


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel `tasks` and wait until they are done; what they raise is theirs to keep.

    Again and again: before Python 3.12 `asyncio.wait_for` forgets a cancellation that comes in the same
    turn of the loop as what it waits for.
    """
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
