"""Services that run together end together, however often their caller is cancelled in the meantime."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from holdfast.process import event_loop

LIMIT_S = 20.0


class Service:
    """Runs until a test requests its end, and then takes `rounds` of the event loop to end."""

    def __init__(self, name: str, ended: list[str], rounds: int = 0) -> None:
        self.began, self.told, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.act: Callable[[], object] = lambda: None
        self._name, self._ended, self._rounds = name, ended, rounds

    async def run(self) -> None:
        self.began.set()
        try:
            await self.told.wait()
            self.act()
        finally:
            for _ in range(self._rounds):
                try:
                    await asyncio.sleep(0)
                except asyncio.CancelledError:
                    continue
            self._ended.append(self._name)
            self.over.set()

    def fail(self) -> None:
        raise OSError("it failed")


def services(ended: list[str], rounds: int = 0) -> list[Service]:
    return [Service(name, ended, rounds) for name in ("a", "b", "c")]


async def begun(made: list[Service]) -> asyncio.Task[None]:
    running = asyncio.create_task(event_loop.until_one_ends(*(each.run() for each in made)))
    for each in made:
        await asyncio.wait_for(each.began.wait(), LIMIT_S)
    return running


@pytest.mark.parametrize(("number", "order"), [(0, "acb"), (1, "bca"), (2, "cba")])
async def test_when_one_service_returns_the_others_are_cancelled_from_last_to_first(
    number: int, order: str
) -> None:
    ended: list[str] = []
    made = services(ended)
    running = await begun(made)
    made[number].told.set()
    await asyncio.wait_for(running, LIMIT_S)
    assert "".join(ended) == order


async def test_an_exception_of_one_service_is_raised_once_the_others_have_ended() -> None:
    ended: list[str] = []
    made = services(ended, rounds=3)
    running = await begun(made)
    made[1].act = made[1].fail
    made[1].told.set()
    with pytest.raises(OSError, match="it failed"):
        await asyncio.wait_for(running, LIMIT_S)
    assert sorted(ended) == ["a", "b", "c"]


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_a_caller_that_is_cancelled_repeatedly_leaves_no_service_behind(times: int) -> None:
    """`end` itself cancels repeatedly: a second cancellation must not interrupt the end of the services."""
    ended: list[str] = []
    running = await begun(services(ended, rounds=10))
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["a", "b", "c"]


async def test_a_caller_cancelled_while_the_services_end_is_cancelled_after_that() -> None:
    ended: list[str] = []
    made = services(ended, rounds=10)
    running = await begun(made)
    made[0].told.set()
    await asyncio.wait_for(made[0].over.wait(), LIMIT_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["a", "b", "c"]


async def test_tasks_that_ignore_a_cancellation_are_cancelled_again() -> None:
    ended: list[str] = []
    stubborn = asyncio.create_task(_ignore(3, ended))
    await asyncio.sleep(0)
    await asyncio.wait_for(event_loop.end([stubborn]), LIMIT_S)
    assert ended == ["ignored"] * 3
    await event_loop.end([])


async def _ignore(times: int, ended: list[str]) -> None:
    for _ in range(times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("ignored")
    await asyncio.Event().wait()
