"""Start, stop, signal and reap the ranks of one member; tell the sidecar, over a unix socket, what is.

Runs in the user's image: standard library only. It decides nothing. The sidecar sends whole wishes
(`LauncherOrder`), the launcher its whole state (`LauncherState`) at every change; generations fence both.
A sidecar that dies and returns finds the ranks running and is told everything again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from holdfast.inspection import left_processes, process_stats
from holdfast.inspection.left_processes import BackgroundProcesses
from holdfast.inspection.out_of_memory import MemoryGroup
from holdfast.inspection.rank_inspector import InspectedRank, RankInspector
from holdfast.launcher import warm_pool, worker_process
from holdfast.launcher.just_in_time import JustInTimeSnapshot
from holdfast.launcher.sidecar_server import OrderRefused, SidecarServer
from holdfast.launcher.warm_pool import UNJOINED_BYTES, WarmPool
from holdfast.launcher.worker_group import WorkerGroup
from holdfast.launcher.worker_process import Worker, WorkerProcess, live_workers
from holdfast.process import event_loop, linux, logs, network
from holdfast.process.clock import seconds_to_next_tick
from holdfast.process.executable import Unstartable
from holdfast.protocol import environment, progress
from holdfast.protocol.launcher_messages import Ending, LauncherOrder, LauncherState, RankInspection
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.snapshot import member_directory
from holdfast.worker import nested_scripts
from holdfast.worker.script_source import SourceChanges

HEARTBEAT_S = 1.0  # between signs of life: its sidecar misses five before it gives us up
AGAIN_S = 0.05  # between two looks at what is left at the end
REFILL_S = 5.0  # a generation that has not settled by then no longer delays the next warm processes
SECURE_S = 1.0  # the whole wait for survivors; a late copy is of no use to a fast recovery
SECURE_FIRST_S = 0.15  # for those at the lowest step, before the others are asked too
SECURE_SUSPECT_S = 0.25  # for those that hang: named wrongly, they answer in a tenth of it
SECURE_WATCH_S = 0.1  # between two looks at the copies under way
END_S = 5.0  # for what was killed to be gone: to give gigabytes back takes the kernel a second and more
CANNOT_START = 126  # the exit code that a shell gives a command that it cannot execute
SECURE_STUCK_S = 0.6  # then who does not answer is in the way of who does


class Launcher:
    """One member's launcher. Everything happens on one thread, at events."""

    def __init__(self, crew: WorkerGroup, warm: WarmPool, directory: Path) -> None:
        self.crew = crew
        self.nest = warm
        self.nest.later = self.after
        self.selector = warm.selector
        self.sidecar = SidecarServer(directory / member_directory.LAUNCHER_SOCKET, self.selector, self.obey)
        self.offer = _listen_tcp()
        self.memory = MemoryGroup()
        self.stopping = False
        self._end_s = 0.0  # when what is left then is killed
        self._told: set[int] = set()  # to end: what the ranks had started
        self._background: BackgroundProcesses | None = None  # of ranks that ended well
        self._looks_again = False
        self.epoch = 0  # of the newest supervisor that has had something done here
        self._has_started = False  # the command, once at least
        self._began: dict[int, int] = {}  # when those began that have ended, in ticks, by pid
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._looker = RankInspector(self._has_looked)
        self._changes = SourceChanges(warm.kept) if warm.kept is not None else None
        self._seen: deque[tuple[int, int, tuple[RankInspection, ...]]] = (
            deque()
        )  # what the looker's thread has for us
        self._looks: tuple[int, int, tuple[RankInspection, ...]] = (0, 0, ())  # generation, number

    # -- the loop

    def serve(self) -> None:
        """Serve until told to stop. On return no process of ours is left."""
        self.sidecar.open()
        wakeup = self._on_signals()
        self.nest.open()
        self.nest.fill()
        self._beat()
        try:
            while not (self.stopping and not self.crew.alive() and self._is_empty()):
                self._turn()
        finally:
            self.crew.kill_all()
            self.nest.close()
            self.sidecar.tell(self.state())
            self.sidecar.close()
            wakeup.close()
            _reap_all()

    def _turn(self) -> None:
        now = time.monotonic()
        due = min((at for at, _ in self._timers), default=now + 60.0)
        for key in event_loop.ready(self.selector, max(0.0, due - now)):
            key.data()
        now = time.monotonic()
        ready = [call for at, call in self._timers if at <= now]
        self._timers = [(at, call) for at, call in self._timers if at > now]
        for call in ready:
            call()
        self.sidecar.tell(self.state())

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    def _beat(self) -> None:
        self.sidecar.stay()
        self.sidecar.beat()
        self.crew.look_for_stops(time.monotonic())
        if self._changes is not None:
            self._changes.look(time.monotonic())
        self.after(seconds_to_next_tick(HEARTBEAT_S), self._beat)

    # -- what is

    def state(self) -> LauncherState:
        generation, looked, looks = self._looks
        if generation != self.crew.generation:
            looked, looks = 0, ()
        return replace(
            self.crew.state(),
            parked=tuple(sorted(n for n, each in self.nest.warm.items() if each.parked)),
            port=self.offer.getsockname()[1],
            warm_failures=self.nest.failures,
            warm_tries=self.nest.tries,
            warm_ending=self.nest.last_ending,
            strategy=self.nest.strategy,
            joins=self.nest.program.joins,
            stopped=self.stopping,
            looks=looks,
            looked=looked,
            epoch=self.epoch,
            changed=self._changes.told if self._changes is not None else (),
        )

    # -- orders

    def obey(self, order: LauncherOrder) -> None:
        """Carry out `order`, unless a newer generation is here already. Repeats are harmless.

        Raises:
            Refused: It is of a supervisor that another has replaced.
        """
        if order.epoch < self.epoch:
            newest = f"a supervisor of epoch {self.epoch} has taken the run over"
            raise OrderRefused(f"{order.do!r} of epoch {order.epoch}: {newest}")
        self.epoch = order.epoch
        if order.do == "stop":
            self.stop(order.grace_s, order.ending_only, order.first)
        elif order.do == "run" and order.launch is not None:
            self._run(order)
        elif order.do in _CURRENT_ONLY and order.generation == self.crew.generation:
            _CURRENT_ONLY[order.do](self, order)

    def _run(self, order: LauncherOrder) -> None:
        assert order.launch is not None
        if order.launch.generation <= self.crew.generation:
            return
        self.crew.begin(order.launch, order.ranks)
        self.nest.needed()
        generation = order.launch.generation
        self.after(REFILL_S, lambda: self._refill_for(generation))
        self.match()

    def match(self) -> None:
        """Hand warm processes to the ranks that wait for one; make those that are missing."""
        if self.stopping:
            return
        if self.crew.waiting():
            self.nest.fill()
        for slot in self.crew.waiting():
            if self.nest.program.kind == "other" or self.nest.strategy == "cold":
                if slot.rank == 0:  # it listens on the port itself
                    self._let_go()
                variables = self.crew.environment(slot)
                try:
                    process = self.nest.make_cold(slot.local_rank, self.nest.program.argv, variables)
                except Unstartable as error:
                    self.crew.unstarted(slot, self._unstarted(error))
                    continue
                self._has_started = True
                self.crew.take(slot, process)
                continue
            found = self._take(slot.local_rank)
            if found is not None:
                self._release(slot, found)

    def _release(self, seat: Worker, found: WorkerProcess) -> None:
        """Start a rank in a warm process. Rank 0 gets the rendezvous' socket, or finds its port free."""
        descriptors: tuple[int, ...] = ()
        if seat.rank == 0 and self.nest.program.joins:
            descriptors = (self.offer.fileno(),)
        elif seat.rank == 0:  # before it runs: its script's first line may bind the port
            self._let_go()
        if self.crew.start(seat, found, descriptors) and descriptors:
            self._let_go()

    def _let_go(self) -> None:
        """Free the port of this rendezvous, and hold another for the next: never the same."""
        before, self.offer = self.offer, _listen_tcp()
        before.close()

    def _unstarted(self, error: Unstartable) -> Ending:
        """Say why a rank has no process. Where the command has run before, that may pass: no bad input."""
        now_ns = time.monotonic_ns()
        launch = self.crew.launch
        ran = self._has_started or (launch is not None and launch.restore is not None)
        if ran:
            return Ending(now_ns, CANNOT_START, failed_ns=now_ns, message=str(error))
        return Ending(now_ns, 2, fail="bad_input", failed_ns=now_ns, message=str(error))

    def _take(self, local_rank: int) -> WorkerProcess | None:
        """Return a parked process that runs; one that somebody has stopped is ended, and another made."""
        found = self.nest.take(local_rank)
        if found is not None and linux.state_of(found.pid)[0] == "T":
            found.kill(signal.SIGKILL)
            self.crew.dying.add(found)
            self.nest.fill()
            return None
        return found

    def _refill_for(self, generation: int) -> None:
        if generation == self.crew.generation:
            self._refill()

    def _refill(self) -> None:
        self.nest.fill()
        if not self.nest.unborn:
            self.sweep()

    def _look(self, order: LauncherOrder) -> None:
        folder = self.crew.home.directory
        targets = tuple(
            InspectedRank(seat.rank, process.pid, folder / member_directory.page_name(seat.local_rank))
            for seat, process in live_workers(self.crew.seats)
        )
        generation = self.crew.generation
        self._looker.begin(order.look, targets, generation, order.asked)

    def _has_looked(self, generation: int, number: int, found: tuple[RankInspection, ...]) -> None:
        """Take what the looker's thread has seen, on that thread."""
        self._seen.append((generation, number, found))
        with contextlib.suppress(OSError):  # full: it will be read all the same
            self._wakeup.send(b"\0")

    def _secure(self, order: LauncherOrder) -> None:
        securing = self.crew.securing
        self.crew.ask_where()
        if not securing.begin():
            return
        more_s = progress.COPIES * securing.copy_s()
        self._watch(securing)
        self.after(SECURE_FIRST_S, securing.ask_rest)
        self._when_still(SECURE_SUSPECT_S + more_s, securing, lambda: securing.give_up(order.suspects))
        self._when_still(SECURE_STUCK_S + more_s, securing, securing.lose_patience)
        self._when_still(SECURE_S + more_s, securing, securing.stop)

    def _watch(self, securing: JustInTimeSnapshot) -> None:
        if not securing.done:
            securing.watch(time.monotonic())
            self.after(SECURE_WATCH_S, lambda: self._watch(securing))

    def _when_still(self, seconds: float, securing: JustInTimeSnapshot, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, but not while a copy grows."""

        def due() -> None:
            if not securing.done and securing.watch(time.monotonic()):
                self.after(SECURE_WATCH_S, due)
            else:
                act()

        self.after(seconds, due)

    def stop(self, grace_s: float, ending_only: bool = False, first: str = "") -> None:
        """Begin to end: SIGTERM now, SIGKILL after `grace_s`, and at once when there is none.

        Ranks that are ending by themselves are not signalled; with `ending_only` all others are killed. With
        `first` they are asked in that way before (see `LauncherOrder`), and SIGTERM comes after `grace_s`.
        """
        if self.stopping and grace_s > 0:
            return
        self.stopping = True
        asked_s = grace_s if first and not ending_only else 0.0
        self._end_s = time.monotonic() + asked_s + grace_s
        self._background = BackgroundProcesses() if self.crew.is_done() else None
        self.nest.close()
        if grace_s > 0:
            if asked_s:
                self.crew.ask(first)
                self.after(asked_s, lambda: self.crew.end(signal.SIGTERM))
            else:
                self.crew.end(signal.SIGKILL if ending_only else signal.SIGTERM)
            self.after(asked_s + grace_s, self.crew.kill_all)
        else:
            self.crew.kill_all()

    def _is_empty(self) -> bool:
        """True when nothing is left of what the ranks have started, or its time to end is over.

        What ranks that ended well have left goes on for as long as it works.
        """
        now_s = time.monotonic()
        for pid in linux.children():
            _reap(pid)
        left = set(linux.children())
        if now_s >= self._end_s:
            if self._background is not None:
                self._name(left, "is killed: it has not ended within --grace")
            return True
        rests = left if self._background is None else self._background.resting(left, now_s)
        if self._background is not None:
            self._name(rests - self._told, "is told to end (SIGTERM): it only waits, and the run is over")
        for pid in rests - self._told:
            linux.kill_group(pid, signal.SIGTERM)
        self._told = rests
        if not left:
            return True
        if not self._looks_again:
            self._looks_again = True
            self.after(AGAIN_S, self._look_again)
        return False

    def _name(self, left: Iterable[int], what: str) -> None:
        """Say what becomes of processes that the script has put in the background."""
        for pid in sorted(left):
            command = left_processes.command_of(pid)
            if command:
                self.crew.say(f"process {pid} ({command}), which the script left in the background, {what}")

    def _look_again(self) -> None:
        self._looks_again = False

    # -- the processes' side

    def on_say(self, process: WorkerProcess, said: WorkerMessage) -> None:
        if said.what in ("parked", "unparkable"):
            self.match()
        elif process.parked or self.crew.has(process):
            self.crew.hear(process, said)

    def on_gone(self, process: WorkerProcess) -> None:
        if process.pidfd >= 0:
            self.selector.unregister(process.pidfd)
        self.nest.hear_out(process)
        self._began |= _began([process.pid])
        ended = self.memory.explain(worker_process.reap(process))
        if self.nest.warm.get(process.local_rank) is process:
            del self.nest.warm[process.local_rank]
            if not self.stopping:
                printed = logs.tail(process.log, UNJOINED_BYTES)
                took_s = 0.0 if process.parked else time.monotonic() - process.made_s
                refused = nested_scripts.was_refused(self.crew.home.directory, process.local_rank)
                ending = warm_pool.unjoined_ending(ended, printed, refused=refused)
                changed = self._changes.look_at_once() if self._changes is not None else ()
                said = "\n".join(
                    (ending.message.rstrip(), *(f"holdfast: {each}" for each in changed))
                ).lstrip()
                self.nest.failed(replace(ending, message=said) if changed else ending, process.log, took_s)
        else:
            self.crew.lose(process, ended)
        self.nest.unhear(process)
        process.close()

    def sweep(self) -> None:
        """Kill what dead ranks left behind (data loader workers), and reap what has no owner.

        What a rank that lives has put in the background is its own.
        """
        present = self.crew.present() | {process.pid for process in self.nest.warm.values()}
        dying = {process.pid for process in self.crew.dying}
        past = {pid: began for pid, began in self._began.items() if pid not in present} | _began(dying)
        began = {pid: self._began[pid] for pid in present & self._began.keys()} | _began(present)
        for pid in linux.children():
            if pid in present or pid in dying or self.nest.owns(pid):
                continue
            found = left_processes.origin(pid)
            if linux.state_of(pid)[0] == "Z":
                _reap(pid)
            elif found is not None and left_processes.is_left(found, began, past, self.crew.generation):
                for each in (pid, *process_stats.descendants(pid)):
                    linux.kill_group(each)
                _reap(pid)

    def _on_signals(self) -> socket.socket:
        """Make SIGTERM and SIGINT events of the loop."""
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)
        self._wakeup = theirs

        def woken() -> None:
            signalled = any(ours.recv(4096))  # a signal's number; a look wakes with a zero
            while self._seen:
                self._looks = self._seen.popleft()
            if signalled:
                self.stop(0.0)

        self.selector.register(ours, selectors.EVENT_READ, woken)
        return ours


_CURRENT_ONLY: Mapping[str, Callable[[Launcher, LauncherOrder], None]] = MappingProxyType(
    {  # orders that are for the ranks of one generation
        "secure": Launcher._secure,
        "look": Launcher._look,
        "where": lambda here, _: here.crew.ask_where(),
        "settle": lambda here, _: here._refill(),
        "drill": lambda here, order: here.crew.drill(order.local_rank, order.what),
        "kill": lambda here, _: here.crew.kill_all(),
    }
)


def _listen_tcp() -> socket.socket:
    """Hold a port open for the next rendezvous: it cannot be taken between choice and use."""
    return network.listen(os.environ.get(environment.BIND, "127.0.0.1"))


def _began(pids: Iterable[int]) -> dict[int, int]:
    """Return when those of `pids` began that are there, zombies included."""
    found = {pid: left_processes.origin(pid) for pid in pids if pid}
    return {pid: each.began for pid, each in found.items() if each is not None}


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _reap_all() -> None:
    """Kill and wait for whatever is still below us, so that nothing outlives the launcher.

    What the kernel does not let go within `END_S`, because it waits for a device or a file system, goes to
    whoever adopts our orphans.
    """
    dead: set[int] = set()
    give_up_at = time.monotonic() + END_S
    while left := set(linux.children()) - dead:
        for pid in left:
            linux.kill_group(pid)
            if linux.collected(pid) is not None:
                dead.add(pid)
        if time.monotonic() > give_up_at:
            return
        time.sleep(linux.PAUSE_S)
