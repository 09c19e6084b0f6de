"""Work in a storage thread: its result, its limit, and a failure that comes after the loop has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop


def held(released: threading.Event, error: Exception) -> Callable[[], None]:
    def work() -> None:
        released.wait(20)
        raise error

    return work


def test_the_result_or_the_exception_of_the_work_is_the_callers() -> None:
    async def run() -> None:
        thread = StorageThread("test")
        assert await event_loop.result_of(thread.submit(lambda: 3), 20.0) == 3
        released = threading.Event()
        released.set()
        with pytest.raises(ValueError, match="full"):
            await event_loop.result_of(thread.submit(held(released, ValueError("full"))), 20.0)

    asyncio.run(run())


def test_a_failure_that_nobody_waits_for_any_more_is_not_logged() -> None:
    """asyncio would log it when the garbage is collected, in the middle of any other code."""
    errors: list[str] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["message"]))
    released, thread = threading.Event(), StorageThread("test")
    work = thread.submit(held(released, OSError("too late")))
    waiting = loop.create_task(event_loop.result_of(work, 20.0))
    loop.call_soon(loop.stop)
    loop.run_forever()
    released.set()
    assert isinstance(work.exception(20), OSError)
    thread.submit(lambda: None).result(20)  # the loop has been notified
    loop.call_soon(loop.stop)
    loop.run_forever()  # one turn: the loop ends before the waiting task runs again
    loop.close()
    del work, waiting
    gc.collect()
    assert [each for each in errors if "never retrieved" in each] == []
