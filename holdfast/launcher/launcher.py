"""Start, stop, signal and reap the ranks of one member; report their state to the sidecar over a unix socket.

Runs in the user's image: standard library only. It decides nothing. The sidecar sends whole wishes
(`LauncherOrder`), the launcher its whole state (`LauncherState`) at every change; generations fence both.
A sidecar that dies and returns finds the ranks running and gets the whole state again.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from holdfast.inspection import left_processes, process_stats
from holdfast.inspection.left_processes import BackgroundProcesses
from holdfast.inspection.out_of_memory import MemoryGroup
from holdfast.inspection.rank_inspector import InspectedRank, RankInspector
from holdfast.launcher import warm_pool, worker_process
from holdfast.launcher.sidecar_server import OrderRefused, SidecarServer
from holdfast.launcher.survivor_snapshot import SurvivorSnapshot
from holdfast.launcher.warm_pool import UNJOINED_BYTES, MemberSettings, WarmPool
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
from holdfast.worker.script_source import ProgramSources, SourceChanges
from holdfast.worker.zygote import Zygote

_Inspections: TypeAlias = tuple[int, int, tuple[RankInspection, ...]]  # generation, number, of each rank

HEARTBEAT_S = 1.0  # between signs of life: the sidecar misses five before it gives the launcher up
AGAIN_S = 0.05  # between two looks at what is left at the end
REFILL_S = 5.0  # a generation that has not settled by then no longer delays the next warm processes
SECURE_S = 1.0  # the whole wait for survivors; a late copy is of no use to a fast recovery
SECURE_FIRST_S = 0.15  # for those at the lowest step, before the others are asked too
SECURE_SUSPECT_S = 0.25  # for those that hang: named wrongly, they answer in a tenth of it
SECURE_WATCH_S = 0.1  # between two looks at the copies under way
END_S = 5.0  # for what was killed to be gone: to give gigabytes back takes the kernel a second and more
CANNOT_START = 126  # the exit code that a shell gives a command that it cannot execute
SECURE_STUCK_S = 0.6  # then a rank that does not answer is in the way of those that do


class Launcher:
    """One member's launcher. Everything happens on one thread, at events."""

    def __init__(
        self,
        sources: ProgramSources,
        settings: MemberSettings,
        strategy: str,
        zygote: Zygote | None = None,
    ) -> None:
        """`strategy`: see `WarmPool`. `zygote`: of this process, if it has one already."""
        self.selector = selectors.DefaultSelector()
        self.group = WorkerGroup(settings)
        self.pool = WarmPool(
            sources,
            settings,
            self.selector,
            self.on_message,
            self.on_process_end,
            self.after,
            strategy,
            zygote,
        )
        socket_path = settings.directory / member_directory.LAUNCHER_SOCKET
        self.sidecar = SidecarServer(socket_path, self.selector, self.obey)
        self.rendezvous = _listen_tcp()
        self.memory = MemoryGroup()
        self.stopping = False
        self._end_s = 0.0  # when what is left then is killed
        self._asked_to_end: set[int] = set()  # processes that the ranks had started
        self._background: BackgroundProcesses | None = None  # of ranks that ended well
        self._is_turn_planned = False  # to see whether they have ended
        self.epoch = 0  # of the newest supervisor that has had an order carried out here
        self._has_started = False  # the command, once at least
        self._past_starts: dict[int, int] = {}  # when processes began that have ended, in ticks, by pid
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._inspector = RankInspector(self._has_inspected)
        self._changes = SourceChanges(sources)
        self._new_inspections: deque[_Inspections] = deque()  # from the inspector's thread
        self._inspections: _Inspections = (0, 0, ())

    # -- the loop

    def serve(self) -> None:
        """Serve until an order or a signal to stop. On return no process of this member is left."""
        self.sidecar.open()
        self._wakeup = event_loop.SignalWakeup(self.selector, (signal.SIGTERM, signal.SIGINT), self._on_wake)
        self.pool.open()
        self.pool.fill()
        self._beat()
        try:
            while True:
                if self.stopping and not self.group.alive() and not self._end_children():
                    break
                self._turn()
        finally:
            self.group.kill_all()
            self.pool.close()
            self.sidecar.send_state(self.state())
            self.sidecar.close()
            self._wakeup.close()
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
        self.sidecar.send_state(self.state())

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` once, `seconds` from now, on the loop."""
        self._timers.append((time.monotonic() + seconds, call))

    def _beat(self) -> None:
        self.sidecar.keep_socket()
        self.sidecar.beat()
        self.group.look_for_stops(time.monotonic())
        self._changes.look(time.monotonic())
        self.after(seconds_to_next_tick(HEARTBEAT_S), self._beat)

    # -- the state

    def state(self) -> LauncherState:
        """Return everything that the sidecar gets to know."""
        generation, looked, looks = self._inspections
        if generation != self.group.generation:
            looked, looks = 0, ()
        return replace(
            self.group.state(),
            parked=tuple(sorted(n for n, each in self.pool.processes.items() if each.parked)),
            port=self.rendezvous.getsockname()[1],
            warm_failures=self.pool.failures,
            warm_tries=self.pool.tries,
            warm_ending=self.pool.last_ending,
            strategy=self.pool.strategy,
            joins=self.pool.program.joins,
            stopped=self.stopping,
            looks=looks,
            looked=looked,
            epoch=self.epoch,
            changed=self._changes.told,
        )

    # -- orders

    def obey(self, order: LauncherOrder) -> None:
        """Carry out `order`, unless a newer generation is here already. Repeats are harmless.

        Raises:
            OrderRefused: It is of a supervisor that another has replaced.
        """
        if order.epoch < self.epoch:
            newest = f"a supervisor of epoch {self.epoch} has taken the run over"
            raise OrderRefused(f"{order.do!r} of epoch {order.epoch}: {newest}")
        self.epoch = order.epoch
        if order.do == "stop":
            self.stop(order.grace_s, order.ending_only, order.first)
        elif order.do == "run" and order.launch is not None:
            self._run(order)
        elif order.do in _CURRENT_ONLY and order.generation == self.group.generation:
            _CURRENT_ONLY[order.do](self, order)

    def _run(self, order: LauncherOrder) -> None:
        assert order.launch is not None
        if order.launch.generation <= self.group.generation:
            return
        self.group.begin(order.launch, order.ranks)
        self.pool.retry_at_once()
        generation = order.launch.generation
        self.after(REFILL_S, lambda: self._refill_for(generation))
        self.assign_processes()

    def assign_processes(self) -> None:
        """Start the ranks that wait, in warm processes if there are any; make those that are missing."""
        if self.stopping:
            return
        if self.group.waiting():
            self.pool.fill()
        for worker in self.group.waiting():
            if self.pool.program.kind == "other" or self.pool.strategy == "cold":
                self._start_cold(worker)
                continue
            found = self._take(worker.local_rank)
            if found is not None:
                self._release(worker, found)

    def _start_cold(self, worker: Worker) -> None:
        if worker.rank == 0:  # it listens on the port itself
            self._release_port()
        variables = self.group.cold_environment(worker)
        try:
            process = self.pool.make_cold(worker.local_rank, self.pool.program.argv, variables)
        except Unstartable as error:
            self.group.not_started(worker, self._unstartable_ending(error))
            return
        self._has_started = True
        self.group.assign(worker, process)

    def _release(self, worker: Worker, found: WorkerProcess) -> None:
        """Start a rank in a warm process. Rank 0 gets the rendezvous socket, or finds its port free."""
        descriptors: tuple[int, ...] = ()
        if worker.rank == 0 and self.pool.program.joins:
            descriptors = (self.rendezvous.fileno(),)
        elif worker.rank == 0:  # before it runs: its script's first line may bind the port
            self._release_port()
        if self.group.start(worker, found, descriptors) and descriptors:
            self._release_port()

    def _release_port(self) -> None:
        """Free the port of this rendezvous, and hold another for the next: never the same."""
        before, self.rendezvous = self.rendezvous, _listen_tcp()
        before.close()

    def _unstartable_ending(self, error: Unstartable) -> Ending:
        """Return why a rank has no process. Where the command has run before, that may pass: no bad input."""
        now_ns = time.monotonic_ns()
        launch = self.group.launch
        ran = self._has_started or (launch is not None and launch.restore is not None)
        if ran:
            return Ending(now_ns, CANNOT_START, failed_ns=now_ns, message=str(error))
        return Ending(now_ns, 2, fail="bad_input", failed_ns=now_ns, message=str(error))

    def _take(self, local_rank: int) -> WorkerProcess | None:
        """Return a parked process that runs. One that a signal has stopped is killed, and another made."""
        found = self.pool.take(local_rank)
        if found is not None and linux.state_of(found.pid)[0] == "T":
            found.kill(signal.SIGKILL)
            self.group.dying.add(found)
            self.pool.fill()
            return None
        return found

    def _refill_for(self, generation: int) -> None:
        if generation == self.group.generation:
            self._refill()

    def _refill(self) -> None:
        self.pool.fill()
        if not self.pool.has_unstarted:
            self.sweep()

    def _look(self, order: LauncherOrder) -> None:
        folder = self.group.settings.directory
        targets = tuple(
            InspectedRank(worker.rank, process.pid, folder / member_directory.page_name(worker.local_rank))
            for worker, process in live_workers(self.group.workers)
        )
        generation = self.group.generation
        self._inspector.begin(order.look, targets, generation, order.asked)

    def _has_inspected(self, generation: int, number: int, found: tuple[RankInspection, ...]) -> None:
        """Take an inspection, on the inspector's thread."""
        self._new_inspections.append((generation, number, found))
        self._wakeup.wake()

    def _secure(self, order: LauncherOrder) -> None:
        securing = self.group.securing
        self.group.ask_where()
        if not securing.begin(order.copy):
            return
        more_s = progress.COPIES * securing.copy_s()
        self._watch(securing)
        self.after(SECURE_FIRST_S, securing.ask_rest)
        self._when_still(SECURE_SUSPECT_S + more_s, securing, lambda: securing.give_up(order.suspects))
        self._when_still(SECURE_STUCK_S + more_s, securing, securing.lose_patience)
        self._when_still(SECURE_S + more_s, securing, securing.stop)

    def _watch(self, securing: SurvivorSnapshot) -> None:
        if not securing.done:
            securing.watch(time.monotonic())
            self.after(SECURE_WATCH_S, lambda: self._watch(securing))

    def _when_still(self, seconds: float, securing: SurvivorSnapshot, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`, but not while a copy grows."""

        def due() -> None:
            if not securing.done and securing.watch(time.monotonic()):
                self.after(SECURE_WATCH_S, due)
            else:
                act()

        self.after(seconds, due)

    def stop(self, grace_s: float, ending_only: bool = False, first: str = "") -> None:
        """Begin to end: SIGTERM now, SIGKILL after `grace_s`, and at once when there is none.

        Ranks that are ending already are not signalled; with `ending_only` all others are killed. With
        `first` they are asked in that way before (see `LauncherOrder`), and SIGTERM comes after `grace_s`.
        """
        if self.stopping and grace_s > 0:
            return
        self.stopping = True
        asked_s = grace_s if first and not ending_only else 0.0
        self._end_s = time.monotonic() + asked_s + grace_s
        self._background = BackgroundProcesses() if self.group.is_done() else None
        self.pool.close()
        if grace_s > 0:
            if asked_s:
                self.group.ask_to_end(first)
                self.after(asked_s, lambda: self.group.end(signal.SIGTERM))
            else:
                self.group.end(signal.SIGKILL if ending_only else signal.SIGTERM)
            self.after(asked_s + grace_s, self.group.kill_all)
        else:
            self.group.kill_all()

    def _end_children(self) -> set[int]:
        """End the processes that ended ranks had started; return those to wait for, none once time is over.

        A process that a rank left behind when it ended well may run for as long as it works; the others, and
        those that only wait, are asked to end.
        """
        now_s = time.monotonic()
        for pid in linux.children():
            _reap(pid)
        alive = set(linux.children())
        if now_s >= self._end_s:
            if self._background is not None:
                self._print_background(alive, "is killed: it has not ended within --grace")
            return set()
        resting = alive if self._background is None else self._background.resting(alive, now_s)
        new = resting - self._asked_to_end
        if self._background is not None:
            self._print_background(new, "is told to end (SIGTERM): it only waits, and the run is over")
        for pid in new:
            linux.kill_group(pid, signal.SIGTERM)
        self._asked_to_end = resting
        if alive and not self._is_turn_planned:
            self._is_turn_planned = True
            self.after(AGAIN_S, self._forget_planned_turn)
        return alive

    def _print_background(self, pids: Iterable[int], what: str) -> None:
        """Print what happens to processes that the script has put in the background."""
        for pid in sorted(pids):
            command = left_processes.command_of(pid)
            if command:
                self.group.print_line(
                    f"process {pid} ({command}), which the script left in the background, {what}"
                )

    def _forget_planned_turn(self) -> None:
        self._is_turn_planned = False

    # -- what processes report, and how they end

    def on_message(self, process: WorkerProcess, message: WorkerMessage) -> None:
        """Take a message that the pool has received from one of its processes."""
        if message.what in ("parked", "unparkable"):
            self.assign_processes()
        elif process.parked or self.group.has(process):
            self.group.receive(process, message)

    def on_process_end(self, process: WorkerProcess) -> None:
        """Collect a process that has ended, and note how; one that was to become warm is made again."""
        if process.pidfd >= 0:
            self.selector.unregister(process.pidfd)
        self.pool.receive_rest(process)
        self._past_starts |= _start_ticks([process.pid])
        ended = self.memory.explain(worker_process.reap(process))
        if self.pool.processes.get(process.local_rank) is process:
            del self.pool.processes[process.local_rank]
            if not self.stopping:
                self._warm_process_failed(process, ended)
        else:
            self.group.process_ended(process, ended)
        self.pool.stop_receiving(process)
        process.close()

    def _warm_process_failed(self, process: WorkerProcess, ended: Ending) -> None:
        printed = logs.tail(process.log, UNJOINED_BYTES)
        took_s = 0.0 if process.parked else time.monotonic() - process.made_s
        refused = nested_scripts.was_refused(self.group.settings.directory, process.local_rank)
        ending = warm_pool.unjoined_ending(ended, printed, refused=refused)
        changed = self._changes.look_at_once()
        if changed:
            lines = (ending.message.rstrip(), *(f"holdfast: {each}" for each in changed))
            ending = replace(ending, message="\n".join(lines).lstrip())
        self.pool.failed(ending, process.log, took_s)

    def sweep(self) -> None:
        """Kill what dead ranks left behind (data loader workers), and reap what has no owner.

        What a live rank has put in the background is left alone.
        """
        present = self.group.pids() | {process.pid for process in self.pool.processes.values()}
        dying = {process.pid for process in self.group.dying}
        known = self._past_starts
        past = {pid: began for pid, began in known.items() if pid not in present} | _start_ticks(dying)
        began = {pid: known[pid] for pid in present & known.keys()} | _start_ticks(present)
        for pid in linux.children():
            if pid in present or pid in dying or self.pool.is_zygote(pid):
                continue
            found = left_processes.origin(pid)
            if linux.state_of(pid)[0] == "Z":
                _reap(pid)
            elif found is not None and left_processes.is_left(found, began, past, self.group.generation):
                for each in (pid, *process_stats.descendants(pid)):
                    linux.kill_group(each)
                _reap(pid)

    def _on_wake(self, received: bytes) -> None:
        """Take new inspections, and stop on a signal: its number is not 0, with which an inspection wakes."""
        while self._new_inspections:
            self._inspections = self._new_inspections.popleft()
        if any(received):
            self.stop(0.0)


_CURRENT_ONLY: Mapping[str, Callable[[Launcher, LauncherOrder], None]] = MappingProxyType(
    {  # orders that are for the ranks of one generation
        "secure": Launcher._secure,
        "look": Launcher._look,
        "where": lambda launcher, _: launcher.group.ask_where(),
        "settle": lambda launcher, _: launcher._refill(),
        "drill": lambda launcher, order: launcher.group.drill(order.local_rank, order.what),
        "kill": lambda launcher, _: launcher.group.kill_all(),
    }
)


def _listen_tcp() -> socket.socket:
    """Hold a port open for the next rendezvous: it cannot be taken between choice and use."""
    return network.listen(os.environ.get(environment.BIND, "127.0.0.1"))


def _start_ticks(pids: Iterable[int]) -> dict[int, int]:
    """Return when those of `pids` began that exist, zombies included, in ticks since boot."""
    found = {pid: left_processes.origin(pid) for pid in pids if pid}
    return {pid: each.began for pid, each in found.items() if each is not None}


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _reap_all() -> None:
    """Kill and wait for all descendants that are left, so that nothing outlives the launcher.

    What the kernel does not let go within `END_S`, because it waits for a device or a file system, goes to
    the process that adopts the launcher's orphans.
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
