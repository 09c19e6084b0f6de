"""Wait for work on files without holding up the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import TypeVar

from holdfast.fileio.storage_thread import Unresponsive

T = TypeVar("T")


async def answer(work: Future[T], limit_s: float) -> T:
    """Return what `work` returns, or raise what it raises.

    Raises:
        Unresponsive: It is not done after `limit_s`. It may still be, later.
    """
    waiting = asyncio.wrap_future(work)
    waiting.add_done_callback(_looked_at)
    done, _ = await asyncio.wait({waiting}, timeout=limit_s)
    if not done:
        raise Unresponsive(limit_s)
    return waiting.result()


def _looked_at(future: asyncio.Future[T]) -> None:
    """Let nobody complain of an error that came after its time."""
    if not future.cancelled():
        future.exception()
