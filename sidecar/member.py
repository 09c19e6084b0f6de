"""The sidecar itself: knows its member's whole state, obeys the supervisor's newest order.

Orders are wishes that hold until replaced, so obeying is level-triggered: at every change `_pursue` looks
what the order still lacks and does the next thing. A sidecar that was restarted starts from nothing and
gets everything again from both sides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace

from holdfast.arena import Gone
from holdfast.messages import (
    PROTOCOL,
    Drill,
    Launch,
    LauncherOrder,
    Look,
    MemberOrder,
    MemberReport,
    PrivateHeld,
    RankStart,
    Slot,
    Stall,
)
from sidecar import background, stacks
from sidecar.config import Config
from sidecar.hang import HangPolicy
from sidecar.holdings import Holdings
from sidecar.links import LauncherLink, SupervisorLink
from sidecar.pages import Pages
from sidecar.peers import Fetcher
from sidecar.prepare import Preparer, Unprepared
from sidecar.saver import RETRY_S, Saver

log = logging.getLogger(__name__)

UNMODIFIED_FLOOR_S = 60.0  # a script that declares nothing may evaluate or save at any time
AGAIN_S = 1.0  # until something is tried again that should not have failed
SEAL_S = 0.25  # a bit that flips in the meantime goes unseen
SEAL_SHARE = 0.003  # of a core


class Member:
    """One per process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.holdings = Holdings(config.arena, config.directory / "restore")
        self.fetcher = Fetcher(self.holdings, config.token)
        policy = HangPolicy(
            factor=config.hang_factor,
            floor_s=config.hang_floor_s,
            first_step_s=config.first_step_s,
            pause_s=config.pause_s,
        )
        floor_s = max(policy.floor_s, UNMODIFIED_FLOOR_S)
        self._policy, self._patient = policy, replace(policy, floor_s=floor_s, few_floor_s=floor_s)
        self.pages = Pages(config.directory, config.nproc, policy)
        self.launcher = LauncherLink(config.directory / "launcher.sock", self._changed)
        self.supervisor = SupervisorLink(
            config.supervisor_url, config.token, self.report, self.obey, config.report_s
        )
        self.preparer = Preparer(self.holdings, self.fetcher, config.directory)
        self.saver = Saver(self.holdings, self.fetcher, config.checkpoints)
        self.peer_url = ""
        self.order = MemberOrder("idle", 0)
        self.stalls: tuple[Stall, ...] = ()
        self.looks: tuple[Look, ...] = ()
        self.looked_for = 0
        self.secured_for = 0
        self.unusable: tuple[Slot, ...] = ()
        self.prepare_error = ""
        self.prepare_generation = 0
        self._launch: tuple[Launch, tuple[RankStart, ...]] | None = None
        self._privates: tuple[PrivateHeld, ...] = ()
        self._sequence = 0
        self._wake = asyncio.Event()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._drilled = 0

    # -- telling

    def report(self) -> MemberReport:
        """Return everything that the supervisor may want to know."""
        self._sequence += 1
        state = self.launcher.state
        return MemberReport(
            protocol=PROTOCOL,
            member=self.config.member,
            node=self.config.node,
            sidecar_pid=os.getpid(),
            sequence=self._sequence,
            now_ns=time.monotonic_ns(),
            nproc=self.config.nproc,
            launcher=state,
            peer_url=self.peer_url,
            progress=self.pages.progress(state.generation) if state else (),
            stalls=self.stalls,
            looks=self.looks,
            looked_for=self.looked_for,
            slots=self.holdings.slots(),
            privates=self._privates,
            secured_for=self.secured_for,
            unusable=self.unusable,
            prepare_error=self.prepare_error,
            prepare_generation=self.prepare_generation,
            durable=self.saver.durable,
        )

    def _changed(self) -> None:
        self.supervisor.dirty.set()
        self._wake.set()

    # -- obeying

    async def obey(self, order: MemberOrder) -> None:
        """Take `order` as the wish to pursue, unless it is older than what is pursued already."""
        if order.generation < self.order.generation:
            return
        if order.generation > self.order.generation:
            self._launch, self.prepare_error = None, ""
        self.order = order
        if order.drill is not None:
            self._drill(order.drill)
        self._wake.set()

    async def pursue(self) -> None:
        """Do what the order lacks, at every change, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._pursue()

    def _pursue(self) -> None:
        order, state = self.order, self.launcher.state
        if order.do == "run" and order.launch is not None and state is not None:
            if state.generation < order.generation:
                if not self.prepare_error:
                    self._begin(f"prepare-{order.generation}", self._run(order))
            elif order.settled:
                self.launcher.send(LauncherOrder("settle", order.generation))
        elif order.do == "secure" and self.secured_for < order.generation:
            self._secure(order)
        elif order.do == "look" and self.looked_for < order.generation:
            self._begin(f"look-{order.generation}", self._look(order.generation))
        elif order.do == "idle" and state is not None and state.generation < order.generation:
            if any(rank.state != "exited" for rank in state.ranks):  # others have taken their places
                self.launcher.send(LauncherOrder("kill", state.generation))
        elif order.do == "stop" and state is not None and not state.stopped:
            self.launcher.send(LauncherOrder("stop", grace_s=order.grace_s))
        if order.save > self.saver.durable.asked:
            self._begin(f"save-{order.save}", self._save_asked(order))

    def _begin(self, name: str, work: object) -> None:
        """Run `work` once at a time under `name`; it is looked at again at the next change."""
        assert asyncio.iscoroutine(work)
        if name in self._busy:
            work.close()
            return
        task = asyncio.create_task(work, name=name)
        self._busy[name] = task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        del self._busy[name]
        if task.cancelled() or task.exception() is None:
            self._changed()
            return
        log.error("task failed", extra={"task": name}, exc_info=task.exception())
        asyncio.get_running_loop().call_later(AGAIN_S, self._changed)

    async def _run(self, order: MemberOrder) -> None:
        try:
            launch, ranks = await self.preparer.prepare(order)
        except (Unprepared, OSError) as error:  # or the memory volume is full
            if isinstance(error, Unprepared) and error.slot is not None:
                self.unusable = (*self.unusable, error.slot)
            if self.order.generation == order.generation:
                self.prepare_error, self.prepare_generation = str(error), order.generation
            return
        if self.order.generation == order.generation and self.order.do == "run":
            self.stalls = ()
            self.launcher.send(LauncherOrder("run", order.generation, launch, ranks))
            await asyncio.sleep(0.05)  # its new state comes by itself; if not, this is tried again

    def _secure(self, order: MemberOrder) -> None:
        state = self.launcher.state
        if state is None:  # we are new here, and it tells in a moment; if not, nobody waits for us for long
            return
        waiting = state.generation == order.generation
        if waiting and order.just_in_time and state.secure_asked < order.generation:
            self.launcher.send(LauncherOrder("secure", order.generation))
            return
        self._privates = self.holdings.privates()
        self.secured_for = order.generation
        self._changed()

    async def _look(self, generation: int) -> None:
        self.looks = await stacks.look_at_all(self.pages.raw(generation))
        self.looked_for = generation

    def _drill(self, drill: Drill) -> None:
        """Carry out a fault on purpose, once."""
        if drill.number <= self._drilled or self.launcher.state is None:
            return
        self._drilled = drill.number
        if drill.what == "sidecar":
            os.kill(os.getpid(), 9)
        for rank in self.launcher.state.ranks:
            if rank.rank == drill.rank:
                self.launcher.send(
                    LauncherOrder("drill", rank.generation, local_rank=rank.local_rank, what=drill.what)
                )

    # -- watching

    async def watch(self) -> None:
        """Poll the pages, for ever. Our own lateness is taken into account, not the ranks'."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(self.config.poll_s)
            now = time.monotonic()
            lateness_s = max(0.0, now - last - 2 * self.config.poll_s)
            last = now
            state = self.launcher.state
            if state is None or self.order.do != "run":
                continue
            self.pages.policy = self._policy if state.joins else self._patient
            alive = {r.rank for r in state.ranks if r.state in ("starting", "running")}
            found = self.pages.poll(state.generation, time.monotonic_ns(), lateness_s)
            stalls = tuple(stall for stall in found if stall.rank in alive)
            if {s.rank for s in stalls} != {s.rank for s in self.stalls}:
                self.stalls = stalls
                self._changed()

    # -- saving

    async def seal(self) -> None:
        """Give new snapshots their checksum beside the training, with a small share of a core. For ever."""
        arena = self.holdings.arena
        while True:
            await asyncio.sleep(SEAL_S)
            for record in arena.records()[:1]:
                if arena.sealed(record):
                    continue
                began = time.monotonic()
                try:
                    await background.run(arena.seal, record)
                except (Gone, OSError) as error:  # a newer one is being written into it
                    log.debug("not sealed", extra={"step": record.step, "error": str(error)})
                await asyncio.sleep((time.monotonic() - began) / SEAL_SHARE)

    async def checkpoints(self) -> None:
        """Save at the interval, if this member has rank 0. For ever."""
        while True:
            await asyncio.sleep(0.2)
            order = self.order
            if order.do != "run" or order.checkpoint_every_s <= 0 or not self._leads():
                continue
            now = time.monotonic()
            if self.saver.next_at_s == 0.0:
                self.saver.next_at_s = now + order.checkpoint_every_s
            if now < self.saver.next_at_s:
                continue
            await self._save_newest(order)
            failed = bool(self.saver.durable.error)
            pause_s = min(RETRY_S, order.checkpoint_every_s) if failed else order.checkpoint_every_s
            self.saver.next_at_s = now + pause_s
            self._changed()

    async def _save_newest(self, order: MemberOrder) -> None:
        """Save the newest snapshot that the whole group has gone beyond: then all found it good."""
        steps = [p.step for p in self.pages.progress(order.generation)]
        for record in self.holdings.arena.records():
            if record.generation != order.generation or not steps or record.step >= max(steps):
                continue
            if (record.step, record.generation) == self._durable_key():
                return
            await self.saver.save(record, order.sources, self._meta(order), keep=order.keep, asked=0)
            if not self.saver.durable.error:
                return

    async def _save_asked(self, order: MemberOrder) -> None:
        record = self.holdings.record(order.save_generation, order.save_step)
        if record is None and order.do == "run":  # a newer one has taken its place: that is as good
            self.saver.durable = replace(self.saver.durable, asked=order.save)
            return
        if record is None:
            why = f"the snapshot of step {order.save_step} is not here"
            self.saver.durable = replace(self.saver.durable, error=why, asked=order.save)
            return
        await self.saver.save(record, order.sources, self._meta(order), keep=order.keep, asked=order.save)

    def _durable_key(self) -> tuple[int, int]:
        return self.saver.durable.step, self.saver.durable.generation

    def _leads(self) -> bool:
        state = self.launcher.state
        return state is not None and any(each.rank == 0 for each in state.ranks)

    def _meta(self, order: MemberOrder) -> dict[str, object]:
        skip = list(order.launch.skip) if order.launch else []
        return {"skip": skip, "member": self.config.member}
