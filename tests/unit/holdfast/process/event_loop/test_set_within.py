from __future__ import annotations

import asyncio

from holdfast.process import event_loop


async def test_an_event_that_nobody_sets_is_set_when_the_time_is_up() -> None:
    event = asyncio.Event()
    await event_loop.set_within(event, 0.001)
    assert event.is_set()


async def test_an_event_ends_the_wait_and_is_not_set_again_later() -> None:
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.call_soon(event.set)
    await event_loop.set_within(event, 0.001)
    event.clear()
    later: asyncio.Future[None] = loop.create_future()
    loop.call_later(0.002, later.set_result, None)  # after the time, if it still ran
    await later
    assert not event.is_set()


async def test_other_tasks_run_although_the_event_is_set_again_before_each_wait() -> None:
    event, ran = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(_set(ran))
    for _ in range(3):
        event.set()
        await event_loop.set_within(event, 60.0)
        event.clear()
    assert ran.is_set()
    await other


async def _set(event: asyncio.Event) -> None:
    event.set()
