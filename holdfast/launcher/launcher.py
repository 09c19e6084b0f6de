"""Start, stop, signal and reap one member's ranks, and report their state to the sidecar on a unix socket.

The launcher runs in the user's image, so it uses only the standard library. It makes no decisions. The
sidecar sends complete orders (`LauncherOrder`), and the launcher sends its complete state (`LauncherState`)
after every change. Both carry a generation, which exposes outdated messages. If the sidecar restarts, the
ranks keep running, and the new sidecar receives the complete state.
"""

from __future__ import annotations

import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from holdfast import exit_codes
from holdfast.inspection.out_of_memory import OutOfMemoryKills
from holdfast.inspection.rank_inspector import InspectedRank, RankInspector
from holdfast.launcher.sidecar_server import OrderRefused, SidecarServer
from holdfast.launcher.workers import orphans, survivor_snapshot, warm_pool, worker_process
from holdfast.launcher.workers.orphans import Orphans
from holdfast.launcher.workers.process_watch import ProcessWatch
from holdfast.launcher.workers.warm_pool import UNJOINED_BYTES, MemberSettings, WarmPool
from holdfast.launcher.workers.worker_group import WorkerGroup
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess, live_workers
from holdfast.launcher.workers.zygote_handle import Zygote
from holdfast.process import linux, logs, network, selector_loop
from holdfast.process.clock import seconds_to_next_tick
from holdfast.process.executable import Unstartable
from holdfast.protocol import environment
from holdfast.protocol.launcher_messages import (
    Ending,
    FirstSignal,
    LauncherAction,
    LauncherOrder,
    LauncherState,
    RankInspection,
    stop_delays_s,
)
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.snapshot import member_directory
from holdfast.worker import nested_scripts
from holdfast.worker.script_source import ProgramSources, SourceChanges

# The generation, the number of the inspection, and one result per rank.
_Inspections: TypeAlias = tuple[int, int, tuple[RankInspection, ...]]
_Handler: TypeAlias = "Callable[[Launcher, LauncherOrder], None]"  # carries out one kind of order

# The time between heartbeats. After five missed heartbeats, the sidecar reports the launcher as unresponsive.
HEARTBEAT_S = 1.0
ORPHANS_S = 0.05  # the time between two checks for processes that outlive their ranks
REFILL_S = 5.0  # a generation that has not settled after this time no longer delays new warm processes


class Launcher:
    """The launcher of one member. One thread handles all events; only inspections run in another thread."""

    def __init__(
        self,
        sources: ProgramSources,
        settings: MemberSettings,
        strategy: str,
        zygote: Zygote | None = None,
    ) -> None:
        """See `WarmPool` for `strategy`. `zygote` is an existing zygote of this member, if there is one."""
        self.selector = selectors.DefaultSelector()
        self.group = WorkerGroup(settings)
        self.watch = ProcessWatch(self.selector, self.on_message, self.on_process_end)
        self.memory_kills = OutOfMemoryKills()
        explain = self.memory_kills.take_reason
        self.pool = WarmPool(
            sources, settings, self.selector, self.watch, self.after, strategy, zygote, explain=explain
        )
        socket_path = settings.directory / member_directory.LAUNCHER_SOCKET
        # Only pods have the limit, because the keeper of a local run watches the sidecars itself.
        first_s = float(os.environ.get(environment.FIRST_STEP_S) or math.inf)
        self.sidecar = SidecarServer(socket_path, self.selector, self.obey, first_s)
        self.rendezvous = _listen_tcp()
        self.stopping = False
        self.exit_code = 0  # the exit code in the newest order to stop
        # True while the launcher, having received a signal to end, waits for the supervisor's order to stop.
        self._is_leaving = False
        self.orphans = Orphans()
        self._is_turn_planned = False  # whether a check is scheduled for orphans that have not ended yet
        self.epoch = 0  # the epoch of the newest supervisor whose order this launcher has carried out
        self._has_started = False  # whether the command has been started at least once
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._inspector = RankInspector(self._on_inspected)
        self._changes = SourceChanges(sources)
        self._new_inspections: deque[_Inspections] = deque()  # filled by the inspector's thread
        self._inspections: _Inspections = (0, 0, ())

    # -- the loop

    def serve(self) -> None:
        """Serve until stopped by an order or a signal. On return, no process of this member is left."""
        self.sidecar.open()
        self._wakeup = selector_loop.SignalWakeup(
            self.selector, (signal.SIGTERM, signal.SIGINT), self._on_wake
        )
        self.pool.open()
        self.pool.fill()
        self._beat()
        try:
            while not self.stopping or self.group.alive() or self._end_orphans():
                self._turn()
        finally:
            self.group.kill_all()
            self.pool.close()
            self.sidecar.send_state(self.state())
            self.sidecar.close()
            self._wakeup.close()
            orphans.kill_all()

    def _turn(self) -> None:
        now = time.monotonic()
        due = min((at for at, _ in self._timers), default=now + 60.0)
        for key in selector_loop.ready(self.selector, max(0.0, due - now)):
            key.data()
        now = time.monotonic()
        ready = [call for at, call in self._timers if at <= now]
        self._timers = [(at, call) for at, call in self._timers if at > now]
        for call in ready:
            call()
        self.sidecar.send_state(self.state())

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` once on the loop, `seconds` from now."""
        self._timers.append((time.monotonic() + seconds, call))

    def _beat(self) -> None:
        self.sidecar.keep_socket()
        self.sidecar.beat()
        if not self.stopping:
            self.sidecar.follow_contact(time.monotonic())
            if self.sidecar.is_given_up(time.monotonic()):
                self.exit_code = exit_codes.CANNOT_START
                self.stop(0.0)
        self.group.detect_stops(time.monotonic())
        self._changes.check(time.monotonic())
        self.after(seconds_to_next_tick(HEARTBEAT_S), self._beat)

    # -- the state

    def state(self) -> LauncherState:
        """Return the launcher's complete state, which the sidecar receives."""
        generation, number, inspections = self._inspections
        if generation != self.group.generation:
            number, inspections = 0, ()
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
            looks=inspections,
            looked=number,
            epoch=self.epoch,
            changed=self._changes.messages,
        )

    @property
    def unjoined_ending(self) -> Ending | None:
        """The ending of the last process that failed before it joined; its message is the process's output.

        None if a process has become warm since then, or if the ranks have succeeded anyway.
        """
        has_succeeded = not self.exit_code and self.group.launch is not None
        return self.pool.last_ending if self.pool.failures and not has_succeeded else None

    # -- orders

    def obey(self, order: LauncherOrder) -> None:
        """Carry out `order`, unless the launcher is in a newer generation. A repeated order does no harm.

        Raises:
            OrderRefused: The order comes from a supervisor that has been replaced, or a newer sidecar has
                sent an order that this version does not know.
        """
        if order.epoch < self.epoch:
            newest = f"a supervisor of epoch {self.epoch} has taken over the run"
            raise OrderRefused(f"{order.do!r} of epoch {order.epoch}: {newest}")
        self.epoch = order.epoch
        handler = _HANDLERS.get(order.do)
        if handler is None:
            raise OrderRefused(f"unknown order {order.do!r}: expected {', '.join(_HANDLERS)}")
        handler(self, order)

    def _run(self, order: LauncherOrder) -> None:
        if order.launch is None or order.launch.generation <= self.group.generation:
            return
        self.group.begin(order.launch, order.ranks)
        self.pool.retry_at_once()
        generation = order.launch.generation
        self.after(REFILL_S, lambda: self._refill_for(generation))
        self.assign_processes()

    def assign_processes(self) -> None:
        """Start the waiting ranks in warm processes, and replace the warm processes that are used up."""
        if self.stopping:
            return
        if self.group.waiting():
            self.pool.fill()
        waiting = self.group.waiting()
        has_given_port = False
        for worker in waiting:
            if self.pool.program.kind == "other" or self.pool.strategy == "cold":
                self._start_cold(worker)
                continue
            found = self._pop_warm(worker.local_rank)
            if found is not None:
                has_given_port |= self._release(worker, found)
        # What follows waits until all ranks have their order, because ranks that run compete for the cores.
        if has_given_port:
            self._release_port()
        self.group.name_logs(waiting)

    def _start_cold(self, worker: Worker) -> None:
        if worker.rank == 0:  # the script of rank 0 listens on the port itself
            self._release_port()
        variables = self.group.cold_environment(worker)
        try:
            process = self.pool.make_cold(worker.local_rank, self.pool.program.argv, variables)
        except Unstartable as error:
            self.group.not_started(worker, self._unstartable_ending(error))
            return
        self._has_started = True
        worker.process = process

    def _release(self, worker: Worker, found: WorkerProcess) -> bool:
        """Start a rank in a warm process, and return whether it has inherited the rendezvous socket.

        Rank 0 inherits it if the script joins. Otherwise the port is freed, because the script may bind it.
        """
        descriptors: tuple[int, ...] = ()
        if worker.rank == 0 and self.pool.program.joins:
            descriptors = (self.rendezvous.fileno(),)
        elif worker.rank == 0:  # free the port first, because the script may bind it in its first line
            self._release_port()
        return self.group.start(worker, found, descriptors) and bool(descriptors)

    def _release_port(self) -> None:
        """Free the port of this rendezvous, and reserve another port for the next rendezvous."""
        before, self.rendezvous = self.rendezvous, _listen_tcp()
        before.close()

    def _unstartable_ending(self, error: Unstartable) -> Ending:
        """Return the ending to report for a rank whose process cannot be started.

        It is reported as bad input only if the command has never run. Otherwise the cause may be temporary.
        """
        now_ns = time.monotonic_ns()
        launch = self.group.launch
        ran = self._has_started or (launch is not None and launch.restore is not None)
        if ran:
            return Ending(now_ns, exit_codes.CANNOT_START, failed_ns=now_ns, message=str(error))
        return Ending(now_ns, exit_codes.BAD_INPUT, fail="bad_input", failed_ns=now_ns, message=str(error))

    def _pop_warm(self, local_rank: int) -> WorkerProcess | None:
        """Return a parked process, or None. If a signal has stopped the process, kill and replace it."""
        found = self.pool.pop(local_rank)
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
            present = self.group.pids() | {process.pid for process in self.pool.processes.values()}
            dying = {process.pid for process in self.group.dying}
            self.orphans.sweep(present, dying, self.group.generation, self.pool.is_zygote)

    def _begin_inspection(self, order: LauncherOrder) -> None:
        folder = self.group.settings.directory
        targets = tuple(
            InspectedRank(worker.rank, process.pid, folder / member_directory.page_name(worker.local_rank))
            for worker, process in live_workers(self.group.workers)
        )
        generation = self.group.generation
        self._inspector.begin(order.look, targets, generation, order.asked)

    def _on_inspected(self, generation: int, number: int, found: tuple[RankInspection, ...]) -> None:
        """Queue the result of an inspection. Called on the inspector's thread."""
        self._new_inspections.append((generation, number, found))
        self._wakeup.wake()

    def _secure(self, order: LauncherOrder) -> None:
        self.group.ask_where()
        survivor_snapshot.secure(self.group.securing, order.suspects, self.after, copy=order.copy)

    def _drill(self, order: LauncherOrder) -> None:
        self.group.drill(order.local_rank, order.what)

    def _ask_where(self, _: LauncherOrder) -> None:
        self.group.ask_where()

    def _settle(self, _: LauncherOrder) -> None:
        self._refill()

    def _kill(self, _: LauncherOrder) -> None:
        self.group.kill_all()

    def _stop(self, order: LauncherOrder) -> None:
        self.exit_code = order.exit_code
        self.stop(order.grace_s, order.ending_only, order.first)

    def stop(self, grace_s: float, ending_only: bool = False, first: FirstSignal = "") -> None:
        """Begin to stop: send SIGTERM now and SIGKILL after `grace_s` seconds, or only SIGKILL if that is 0.

        Ranks that are already ending receive no SIGTERM. With `ending_only`, all other ranks are killed. If
        `first` names another signal (see `LauncherOrder`), it is sent now, SIGTERM follows after `grace_s`,
        and SIGKILL after another `grace_s`.
        """
        if self.stopping and grace_s > 0:
            return
        self.stopping = True
        term_s, kill_s = stop_delays_s(grace_s, first, ending_only)
        self.orphans.begin_to_end(time.monotonic() + kill_s, let_work=self.group.is_done())
        self.pool.close()
        if grace_s > 0:
            if term_s:
                self.group.ask_to_end(first)
                self.after(term_s, lambda: self.group.end(signal.SIGTERM))
            else:
                self.group.end(signal.SIGKILL if ending_only else signal.SIGTERM)
            self.after(kill_s, self.group.kill_all)
        else:
            self.group.kill_all()

    def _end_orphans(self) -> bool:
        """End the processes that the ranks left behind. Return True, and check again soon, if any remain."""
        remain = self.orphans.end(time.monotonic(), self.group.print_line)
        if remain and not self._is_turn_planned:
            self._is_turn_planned = True
            self.after(ORPHANS_S, self._forget_planned_turn)
        return remain

    def _forget_planned_turn(self) -> None:
        self._is_turn_planned = False

    # -- messages from processes, and their endings

    def on_message(self, process: WorkerProcess, message: WorkerMessage) -> None:
        """Handle a message from a process of this member."""
        if message.what in ("parked", "unparkable"):
            self.pool.receive(process, message)
            self.assign_processes()
        elif process.parked or self.group.has(process):
            self.group.receive(process, message)

    def on_process_end(self, process: WorkerProcess) -> None:
        """Reap a process and record how it ended. If it belonged to the pool, the pool replaces it."""
        self.orphans.parent_ended(process.pid)
        ended = worker_process.reap(process)
        if self.pool.processes.get(process.local_rank) is process:
            del self.pool.processes[process.local_rank]
            if not self.stopping:
                self._warm_process_failed(process, ended)
        else:
            self.group.process_ended(process, self.memory_kills.take_reason(ended))

    def _warm_process_failed(self, process: WorkerProcess, ended: Ending) -> None:
        printed = logs.tail(process.log, UNJOINED_BYTES)
        took_s = 0.0 if process.parked else time.monotonic() - process.made_s
        refused = nested_scripts.was_refused(self.group.settings.directory, process.local_rank)
        ending = self.memory_kills.take_reason(warm_pool.unjoined_ending(ended, printed, refused=refused))
        changed = self._changes.check_at_once()
        if changed:
            lines = (ending.message.rstrip(), *(f"holdfast: {each}" for each in changed))
            ending = replace(ending, message="\n".join(lines).lstrip())
        self.pool.failed(ending, process.log, took_s)

    def _on_wake(self, received: bytes) -> None:
        """Take new inspection results if `received` contains a 0, and stop if it contains a signal number."""
        while self._new_inspections:
            self._inspections = self._new_inspections.popleft()
        if any(received):
            self._leave()

    def _leave(self) -> None:
        """End because of a signal. In a pod, first give the supervisor time to have the state saved.

        The supervisor orders the launcher to stop once the state is saved. If there is no sidecar, or if no
        order arrives in time, the launcher kills the ranks, as the kubelet would do anyway. Its exit code
        then represents the signal, because a Job would count a pod that exits with 0 as a success. During the
        wait, further signals have no effect: a kubelet that restarts sends its SIGTERM again.
        """
        self.exit_code = self.exit_code or exit_codes.TERMINATED
        if self._is_leaving:
            return
        wait_s = float(os.environ.get(environment.LEAVE_S) or 0.0)
        if wait_s <= 0 or not self.sidecar.is_connected or not self.group.alive():
            self.stop(0.0)
            return
        self._is_leaving = True
        self.after(wait_s, lambda: None if self.stopping else self.stop(0.0))


def _if_current(carry_out: _Handler) -> _Handler:
    """Return a handler for an order that applies only to the ranks of the current generation."""

    def carry_out_if_current(launcher: Launcher, order: LauncherOrder) -> None:
        if order.generation == launcher.group.generation:
            carry_out(launcher, order)

    return carry_out_if_current


_HANDLERS: Mapping[LauncherAction, _Handler] = MappingProxyType(
    {
        "run": Launcher._run,
        "stop": Launcher._stop,
        "secure": _if_current(Launcher._secure),
        "look": _if_current(Launcher._begin_inspection),
        "where": _if_current(Launcher._ask_where),
        "settle": _if_current(Launcher._settle),
        "drill": _if_current(Launcher._drill),
        "kill": _if_current(Launcher._kill),
    }
)


def _listen_tcp() -> socket.socket:
    """Listen on a port to reserve it for the next rendezvous."""
    return network.listen(os.environ.get(environment.BIND, "127.0.0.1"))
