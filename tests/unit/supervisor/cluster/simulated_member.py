"""A pod's sidecar, launcher and ranks, at the other end of a real connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from aiohttp import ClientError, ClientSession, ClientWebSocketResponse, WSMsgType
from yarl import URL

from holdfast.process import event_loop
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending, LauncherState, RankState, StartTimes
from holdfast.protocol.member_messages import (
    HeldPrivateState,
    HeldSnapshot,
    MemberOrder,
    MemberReport,
    RankStall,
    StorageListing,
)
from tests.unit.supervisor.job_views import progress, report

LIMIT_S = 20.0


class SimulatedPod:
    """Obeys its orders, and connects again whenever its connection ends."""

    def __init__(self, name: str) -> None:
        self.orders: list[MemberOrder] = []
        self.connected = 0  # how often
        self.storage: StorageListing | None = StorageListing(1)
        self.step = 0
        self.is_mute = False  # whether it sends nothing, on a connection that stays open
        self.stalls: tuple[RankStall, ...] = ()
        self.holds_state = False  # whether its memory has a snapshot of its last step
        self.unreachable = ""  # why it cannot connect to its launcher, which it then does not report
        self.peer_url = f"http://{name}:1"
        self._name = name
        self._state = LauncherState(9, 0, (), (0,), 4000)
        self._secured = self._epoch = 0
        self._changed = asyncio.Event()
        self._socket: ClientWebSocketResponse[bool] | None = None

    @property
    def order(self) -> MemberOrder:
        return self.orders[-1]

    @property
    def generation(self) -> int:
        return self._state.generation

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds. It is checked after every order and report."""

        async def wait() -> None:
            while not condition():
                await self._changed.wait()

        await asyncio.wait_for(wait(), LIMIT_S)

    async def until_formed(self, generation: int) -> None:
        await self.until(lambda: self.generation == generation)

    async def until_settled(self) -> None:
        await self.until(lambda: self.orders and self.order.settled)

    async def until_stopped(self) -> None:
        await self.until(lambda: self.orders and self.order.do == "stop")

    async def until_obeying(self, epoch: int) -> None:
        await self.until(lambda: self.orders and self.order.epoch == epoch)

    async def until_connected(self, more_than: int) -> None:
        await self.until(lambda: self.connected > more_than)

    @asynccontextmanager
    async def connecting(self, url: URL, token: str = "") -> AsyncIterator[None]:
        serving = asyncio.create_task(self._connect(url, token))
        try:
            yield
        finally:
            await event_loop.end([serving])

    async def train(self, step: int) -> None:
        """Make the ranks reach a step."""
        self.step = step
        await self.send()

    async def end_rank(self, code: int | None, **given: Any) -> None:
        """Make the process of every rank end with an exit code, or as `given`."""
        ending = Ending(time.monotonic_ns(), code, **given)
        ended = tuple(replace(each, state="exited", ending=ending) for each in self._state.ranks)
        self._state = replace(self._state, ranks=ended)
        await self.send()

    async def send(self) -> None:
        """Send a report if there is a connection."""
        if self._socket is not None and not self.is_mute:
            with suppress(ConnectionError):
                await self._socket.send_str(codec.encode(self._report()).decode())
            self._tell()

    # -- its own side

    async def _connect(self, url: URL, token: str) -> None:
        async with ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            while True:
                with suppress(OSError, ClientError):
                    async with session.ws_connect(url) as socket:
                        self.connected += 1
                        await self._talk(socket)
                self._socket = None
                self._tell()
                await asyncio.sleep(0.01)  # as a sidecar does

    async def _talk(self, socket: ClientWebSocketResponse[bool]) -> None:
        self._socket = socket
        beating = asyncio.create_task(self._beat())
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    return
                self._obey(codec.decode(MemberOrder, message.data))
                await self.send()
        finally:
            await event_loop.end([beating])

    async def _beat(self) -> None:
        while True:
            await self.send()
            await asyncio.sleep(0.05)  # a sidecar does so every 0.5 s

    def _obey(self, order: MemberOrder) -> None:
        if order.epoch < self._epoch:
            return
        self._epoch = order.epoch
        self.orders.append(order)
        if order.do == "run" and order.generation > self._state.generation:
            now_ns = time.monotonic_ns()
            marks = StartTimes(now_ns, now_ns, now_ns, now_ns)
            ranks = tuple(
                RankState(each.rank, each.local_rank, 100, order.generation, "running", marks=marks)
                for each in order.ranks
            )
            self._state = replace(self._state, generation=order.generation, ranks=ranks)
            restore = order.launch.restore if order.launch is not None else None
            self.step = restore.step if restore is not None else 0
        elif order.do == "secure":
            self._secured = order.generation
            self._state = replace(self._state, secure_asked=order.generation)
        elif order.do == "stop":
            self._state = replace(self._state, stopped=True)
        self._tell()

    def _report(self) -> MemberReport:
        ranks = [each.rank for each in self._state.ranks]
        made = report(self._name, replace(self._state, epoch=self._epoch), now_ns=time.monotonic_ns())
        return replace(
            made,
            launcher=None if self.unreachable else made.launcher,
            launcher_unreachable=self.unreachable,
            clock="this one",
            peer_url=self.peer_url,
            storage=self.storage,
            stalls=self.stalls,
            progress=tuple(progress(number, self.step) for number in ranks),
            slots=(HeldSnapshot(self.generation, self.step, 8),) if self.holds_state and ranks else (),
            privates=tuple(
                HeldPrivateState(number, self.generation, self.step, True)
                for number in ranks
                if self.holds_state
            ),
            secured_for=self._secured,
            epoch=self._epoch,
        )

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
