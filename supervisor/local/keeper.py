"""The keeper of a local run, which starts the supervisor and the members and restarts those that die.

The keeper does what Kubernetes does on a cluster. A member consists of a sidecar and a launcher. If a sidecar
or supervisor dies, the keeper restarts it. If a supervisor's heartbeats stop, the keeper replaces it. If a
launcher dies, the keeper kills the whole member. Orphans of the run become children of the keeper, which
kills them. If the keeper itself is killed, the kernel signals each process of the run.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast import exit_codes
from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from holdfast.process import event_loop, linux
from holdfast.protocol import codec
from holdfast.protocol.rank_channel import WorkerOrder
from supervisor.local import keeper_messages, process_specs
from supervisor.local.keeper_messages import (
    Alive,
    Finish,
    GiveUpMember,
    Hello,
    KeeperState,
    Renew,
    Request,
    StopRun,
    Want,
)
from supervisor.local.process_specs import PartSpec, RunSpec
from supervisor.local.processes import PARTS_S, ForkServerClient, ManagedProcess, ProcessTable
from supervisor.local.removal_watcher import RemovalWatcher
from supervisor.local.restarts import LOOP, RestartKey, Restarts
from supervisor.local.volume_repair import VolumeRepair
from supervisor.local.watchdog import Watchdog
from supervisor.view.model import Completion, StopRequest

STOP_S = 8.0  # the time for a part to end after SIGTERM
SEND_S = 0.5  # a supervisor that takes longer to read a state is stuck
IDLE_S = 0.5  # a working sidecar polls its ranks twice in this time, which uses CPU time
REPAIR_S = 0.25  # the interval between checks that the run's folder in memory is complete
NEW_S = 2.0  # the time for a sidecar to import its modules and connect
SUPERVISOR, NEW_MEMBER = RestartKey("supervisor"), RestartKey("member")
FREE_S = 30.0  # the time at the end for the kernel to release the memory of lost members
MAX_REFUSALS = 16  # how many causes of refused requests are reported
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class LocalMember:
    name: str
    launcher: ManagedProcess | None = None  # None until the template has imported
    sidecar: ManagedProcess | None = None
    lost: bool = False  # the supervisor knows that the member is lost, and its processes are being ended
    gone: bool = False


@dataclass(slots=True)
class Finished:
    code: int
    why: str
    message: str
    completion: Completion | None = None  # the parts of `why`, if the script has finished and they are known


@dataclass(slots=True)
class LocalKeeper:
    """Owns the processes of one run. All work is done in `poll`, on one thread."""

    plan: RunSpec
    api: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    members: dict[str, LocalMember] = field(default_factory=dict)
    stop: StopRequest = ""
    finished: Finished | None = None
    news: list[str] = field(default_factory=list)  # lines for the user; the reader empties the list
    _supervisor: ManagedProcess | None = None
    _connection: socket.socket | None = None  # the connection to the supervisor
    _received: codec.LineBuffer = field(default_factory=codec.LineBuffer)
    _refusals: set[str] = field(default_factory=set)  # the causes that were reported
    _count: int = 0  # members created
    _wanted: int = 0  # members that the supervisor has requested
    _freeing: list[threading.Thread] = field(default_factory=list)
    _restarts: Restarts = field(default_factory=Restarts)
    _watchdog: Watchdog = field(default_factory=Watchdog)
    _stops: Stops = field(default_factory=Stops)  # which sidecars are stopped
    # the CPU time of each silent sidecar, and when it was read; the key is the PID
    _silent: dict[int, tuple[float, float]] = field(default_factory=dict)
    _polled_s: float = 0.0  # when the last `poll` returned
    _hurry: bool = False
    _reported_unkillable: bool = False
    _repaired_s: float = 0.0  # when the run's folder was last checked
    _repair: VolumeRepair = field(init=False)
    _removals: RemovalWatcher = field(
        default_factory=RemovalWatcher
    )  # reports removals from the run's folder
    _children: ProcessTable = field(init=False)
    _template: ForkServerClient = field(init=False)  # forks the members' launchers
    _parts: ForkServerClient = field(init=False)  # forks the supervisor and the sidecars

    def __post_init__(self) -> None:
        self._repair = VolumeRepair(self.plan.runtime)
        self._children = ProcessTable(self.plan.logs, self.selector, self._on_end, self._on_exit)
        self._template = ForkServerClient("template", self._children, self._launch_waiting)
        self._parts = ForkServerClient(
            "parts", self._children, lambda: self._start_again(SUPERVISOR), PARTS_S
        )

    def start(self) -> None:
        linux.adopt_orphans()
        self._watch_volume()
        parent, now_s = os.getpid(), time.monotonic()
        self._parts.start(lambda control: process_specs.part_fork_server(parent, control, os.environ), now_s)
        self._template.start(
            lambda control: process_specs.member_fork_server(self.plan, parent, control, os.environ), now_s
        )

    def _watch_volume(self) -> None:
        """Keep the run's folder complete from now on. It is checked at each removal and every `REPAIR_S`.

        Raises `OSError`.
        """
        self._repair.begin()
        self._removals.open()
        if self._removals.descriptor >= 0:
            self.selector.register(self._removals.descriptor, selectors.EVENT_READ, self._on_removal)

    def poll(self, limit_s: float) -> None:
        """Wait up to `limit_s` for events, and handle them."""
        due_s = (self._polled_s or time.monotonic()) + limit_s + event_loop.NORMAL_LATENESS_S
        for key in event_loop.ready(self.selector, limit_s):
            key.data()
        for template in (self._parts, self._template):
            template.poll(time.monotonic())
        self._children.collect_held()
        now_s = time.monotonic()
        for part in self._restarts.pop_due(now_s):
            self._start_again(part)
        if not self._closing:
            self._watch(now_s, max(0.0, now_s - due_s))
            if now_s - self._repaired_s >= REPAIR_S:
                self._repaired_s = now_s
                self._repair_volume(now_s)
        self._polled_s = time.monotonic()

    # -- the supervisor

    def _watch(self, now_s: float, late_s: float) -> None:
        """Kill stuck supervisors and sidecars. If no supervisor ends a run that should stop, end the run."""
        self._watchdog = self._watchdog.later(now_s, late_s)
        if self._supervisor is not None:
            self._check(self._supervisor, now_s)
        self._replace_stuck_sidecars(now_s)
        why = self._watchdog.overdue(now_s)
        if why:
            self.end(f"stopped without a last checkpoint: {why}")

    def _check(self, part: ManagedProcess, now_s: float) -> None:
        pid = part.process.pid
        doubtful = self._watchdog.doubtful(now_s)
        why = self._watchdog.stuck(now_s, linux.state_of(pid)[0]) if doubtful else ""
        if why:
            self._watchdog = self._watchdog.killed(now_s)
            self.news.append(f"{why}: killing and replacing it")
            part.process.kill()
        elif self._watchdog.unkillable(now_s) and not self._reported_unkillable:
            self._reported_unkillable = True
            self.news.append(
                f"process {pid}, a supervisor, was killed but does not end, because the kernel waits for a"
                " device or a file system. The ranks keep training, but no fault is recovered until it ends"
            )

    def _repair_volume(self, now_s: float) -> None:
        """Restore what was removed from the run's folder. Tell the user if that is not possible."""
        before = self._repair.error
        self.news += self._repair.repair(now_s)
        self._removals.watch(self._repair.folders())
        if self._repair.error != before:
            self._send_state()

    def _on_removal(self) -> None:
        """Restore what was removed immediately, because a fault can occur before the next periodic check."""
        self._removals.drain()
        if self._closing:
            return
        with suppress(OSError):  # the removal is still under way, and the next event or check tries again
            self._repair.put_back()
        self._removals.watch(self._repair.folders())

    def _replace_stuck_sidecars(self, now_s: float) -> None:
        """Replace sidecars that are stopped, or neither report nor use CPU time; their ranks keep training.

        A sidecar that waits for a core or a disk is left alone. If the launcher is stopped too, the whole
        member or machine was stopped, and its sidecar is also left alone.
        """
        pids = {
            m.sidecar.process.pid: m
            for m in self.members.values()
            if m.sidecar is not None and not m.gone and not _is_frozen(m)
        }
        for pid in self._stops.later([pid for pid in pids if process_stats.is_stopped(pid)], now_s):
            self._replace_sidecar(pids[pid], "it is stopped")
        for pid, (cpu_s, at_s) in list(self._silent.items()):
            if now_s - at_s < IDLE_S:
                continue
            del self._silent[pid]
            found = process_stats.sample(pid)
            if pid in pids and found.state == "S" and not found.traced and found.cpu_s == cpu_s:
                self._replace_sidecar(pids[pid], "it sends no reports and uses no CPU time")

    def _sample_silent_sidecar(self, name: str) -> None:
        """Record the CPU time of a silent sidecar, for `_replace_stuck_sidecars` to compare it later."""
        member, now_s = self.members.get(name), time.monotonic()
        if member is None or member.sidecar is None or now_s - member.sidecar.born_s < NEW_S:
            return
        pid = member.sidecar.process.pid
        self._silent[pid] = (process_stats.sample(pid).cpu_s, now_s)

    def _replace_sidecar(self, member: LocalMember, why: str) -> None:
        """Kill a sidecar. The next one starts only after its end, so that a member never has two."""
        assert member.sidecar is not None
        self.news.append(f"replacing {member.sidecar.name}: {why}. The ranks keep training")
        member.sidecar.process.kill()

    def end(self, why: str) -> None:
        """End the run without a supervisor. `close` then ends the processes."""
        self.finished = self.finished or Finished(exit_codes.INTERRUPTED, why, "")

    def _start_supervisor(self) -> None:
        if self._closing:
            return
        self._close_connection()
        here, there = socket.socketpair()
        here.settimeout(SEND_S)
        try:
            with there:
                start = process_specs.supervisor(self.plan, os.getpid(), there.fileno(), self.api.fileno())
                self._supervisor = self._start(SUPERVISOR.name, start)
        except OSError:
            here.close()
            raise
        self._watchdog = self._watchdog.born(time.monotonic())
        self._reported_unkillable = False
        self._connection, self._received = here, codec.LineBuffer()
        self.selector.register(here, selectors.EVENT_READ, self._receive)
        self._send_state()

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(_READ_BYTES)
        except TimeoutError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._close_connection()
            return
        for line in self._received.split(data):
            try:
                request = keeper_messages.decode_request(line)
            except codec.InvalidMessage as error:
                self._refuse(str(error))
                self._send_state()
            else:
                self._handle(request)

    def _close_connection(self) -> None:
        if self._connection is not None:
            self.selector.unregister(self._connection)
            self._connection.close()
            self._connection = None

    def _refuse(self, why: str) -> None:
        """Tell the user about a refused request, once for each cause. The run continues without it."""
        if why not in self._refusals and len(self._refusals) < MAX_REFUSALS:
            self._refusals.add(why)
            self.news.append(f"a message from the supervisor was refused: {why}")

    def _handle(self, request: Request) -> None:
        """Carry out a request from the supervisor. Reply with the state, except to `Alive`."""
        match request:
            case Alive():
                self._watchdog = self._watchdog.heard(time.monotonic())
                return
            case Want(count, discard):
                if self.stop != "now":
                    self._want(count, set(discard))
            case GiveUpMember(name):
                self._kill(name)
            case Renew(name):
                self._sample_silent_sidecar(name)
            case StopRun(how):
                if self.stop != "now":
                    self.ask_stop(how)
            case Finish(code, why, message, completion):
                self.finished = Finished(code, why, message, completion)
            case Hello():
                pass
        self._send_state()

    def _send_state(self) -> None:
        if self._connection is None:
            return
        alive = {name: "running" for name, member in self.members.items() if not (member.gone or member.lost)}
        state = KeeperState(alive, self.stop, self._repair.error)
        with suppress(OSError):  # it is dead or stuck, and the next supervisor gets the state when it starts
            self._connection.sendall(codec.encode(state))

    def ask_stop(self, how: StopRequest) -> None:
        """Ask the supervisor to end the run. If no supervisor does, `poll` ends the run.

        `how` has the same values as `JobState.stop`.
        """
        if how == "now" or not self.stop:
            self.stop = how
        self._watchdog = self._watchdog.stop_requested(self.stop, time.monotonic())
        self._send_state()

    def hurry(self) -> None:
        """End the run now, and kill each process that does not end immediately."""
        self._hurry = True
        self.end("stopped immediately, as requested")

    # -- members

    def _want(self, count: int, discard: set[str]) -> None:
        for name in discard:
            if name in self.members and not self.members[name].gone:
                self._kill(name)
        alive = sum(1 for member in self.members.values() if not member.gone)
        self._wanted = count
        if self._restarts.waits(NEW_MEMBER):
            return
        for _ in range(count - alive):
            if not self._attempt(NEW_MEMBER, self._create):
                return

    def _create(self) -> None:
        """Create one more member. If this raises `OSError`, the member does not exist."""
        name = f"m{self._count}"
        self._count += 1
        self._repair.put_back()
        self.plan.directory(name).mkdir(mode=0o700)
        try:
            self._repair.add(name)
            self._begin(name)
        except OSError:
            self._kill(name)
            raise

    def _begin(self, name: str) -> None:
        self.members[name] = LocalMember(name)
        if not self._template.importing:
            self._launch(self.members[name])
        self._start_sidecar(name)

    def _launch_waiting(self) -> None:
        """Start the launchers that waited for the template. Their sidecars are already running."""
        if self._closing or self.stop == "now":
            return
        for member in self.members.values():
            if member.launcher is None and not member.gone:
                try:
                    self._launch(member)
                except OSError as error:
                    self._kill(member.name)
                    self._try_later(NEW_MEMBER, error)

    def _launch(self, member: LocalMember) -> None:
        name = f"launcher {member.name}"
        argv = process_specs.launcher_argv(self.plan, member.name, os.getpid())
        member.launcher = self._template.fork(name, WorkerOrder("member", argv=argv))
        if member.launcher is None:
            start = process_specs.launcher(self.plan, member.name, os.getpid(), os.environ)
            member.launcher = self._children.spawn(name, start)

    def _start_sidecar(self, name: str) -> None:
        self._repair.put_back()  # otherwise the sidecar would replace removed files with new ones
        start = process_specs.sidecar(self.plan, name, os.getpid())
        self.members[name].sidecar = self._start(RestartKey("sidecar", name).name, start)

    def _start(self, name: str, start: PartSpec) -> ManagedProcess:
        forked = self._parts.fork(name, start.order(), tuple(start.inherits.values()))
        return forked or self._children.spawn(name, start.alone(os.environ))

    def _kill(self, name: str) -> None:
        """End all processes of a member at once and remove its memory, like a power loss."""
        member = self.members.get(name)
        if member is None or member.gone:
            return
        member.gone = True
        for part in (member.launcher, member.sidecar):
            if part is not None:
                part.process.kill()
        self._children.sweep()
        self._freeing.append(self._repair.free(name))

    # -- processes

    def _on_exit(self, part: ManagedProcess) -> None:
        """Report the loss of a member as soon as its ranks are killed.

        The kernel can take seconds to free their memory, and the recovery need not wait for that. With GPUs,
        however, the loss is reported only once the ranks are gone, because their replacements need the
        memory.
        """
        for member in self.members.values():
            if part is member.launcher and not member.gone and not self._closing and not self.plan.gpus:
                if member.sidecar is not None:
                    member.sidecar.process.kill()
                member.lost = True
                self._send_state()

    def _on_end(self, part: ManagedProcess) -> None:
        if part is self._supervisor:
            self._supervisor = None
            self._watchdog = self._watchdog.died()
            if not self._closing:
                self._restart(SUPERVISOR, part)
            return
        for member in self.members.values():
            if part is member.sidecar:
                member.sidecar = None
                if not member.gone and not self._closing:
                    self._restart(RestartKey("sidecar", member.name), part)
            elif part is member.launcher and not member.gone:
                self._kill(member.name)
                # A launcher exits with code 0 only if it was ordered to end.
                ordered = part.process.returncode == 0
                if not self._closing and not ordered and _has_failed(part):
                    self._delay_members(part)
                self._send_state()

    def _restart(self, part: RestartKey, died: ManagedProcess) -> None:
        """Schedule the next start of a part. If the part keeps failing, delay the start and tell the user."""
        left_s = self._restarts.died(part, died.born_s, time.monotonic(), _has_failed(died))
        if self._restarts.failures(part) == LOOP:
            without = "no fault is recovered" if part == SUPERVISOR else "its member is not supervised"
            self._report_loop(died, part.name, left_s)
            self.news.append(f"the ranks keep training without {part.name}, but until it restarts, {without}")

    def _delay_members(self, launcher: ManagedProcess) -> None:
        """Schedule the next member after one has failed, as `_restart` does for other parts."""
        failures = self._restarts.failures(NEW_MEMBER)
        left_s = self._restarts.died(NEW_MEMBER, launcher.born_s, time.monotonic(), failed=True)
        if self._restarts.failures(NEW_MEMBER) == LOOP > failures:
            self._report_loop(launcher, "a member's launcher", left_s)

    def _report_loop(self, part: ManagedProcess, what: str, left_s: float) -> None:
        code, log = part.process.returncode, self._children.log(part.name).name
        self.news.append(
            f"{what} has ended {LOOP} times in a row, last with code {code} (see logs/{log}):"
            f" trying again in {left_s:.0f} s, then at increasing intervals"
        )

    @property
    def _closing(self) -> bool:
        return self.finished is not None

    def _start_again(self, part: RestartKey) -> None:
        if self._closing:
            return
        if part == SUPERVISOR:
            self._attempt(part, self._start_supervisor)
        elif part == NEW_MEMBER:
            self._want(self._wanted, set())
            self._send_state()
        else:
            member = self.members[part.member]
            if not member.gone and member.sidecar is None:
                self._attempt(part, lambda: self._start_sidecar(member.name))

    def _attempt(self, part: RestartKey, start: Callable[[], None]) -> bool:
        """Start `part` and return True. If the system lacks resources, schedule a retry and return False."""
        try:
            start()
        except OSError as error:
            self._try_later(part, error)
            return False
        return True

    def _try_later(self, part: RestartKey, error: OSError) -> None:
        now_s = time.monotonic()
        left_s = self._restarts.died(part, now_s, now_s, failed=True)
        if self._restarts.failures(part) == 1:
            self.news.append(
                f"{part.name} cannot be started: {error}; trying again in {left_s:.0f} s,"
                " then at increasing intervals"
            )

    def close(self) -> None:
        """End every process of the run and remove its folder in memory."""
        self.finished = self.finished or Finished(1, "the keeper was closed", "")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for part in self._children.alive():
                part.process.send_signal(signum)
                part.process.send_signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
            deadline = time.monotonic() + STOP_S
            while self._children.alive() and time.monotonic() < deadline and not self._skips_wait(signum):
                self.poll(0.05)
        self._children.sweep()
        for thread in self._freeing:
            thread.join(FREE_S)
        shutil.rmtree(self.plan.runtime, ignore_errors=True)
        self._repair.close()
        self._removals.close()
        self.api.close()

    def _skips_wait(self, signum: int) -> bool:
        """True if SIGKILL must follow `signum` without waiting, because the user is in a hurry."""
        return self._hurry and signum != signal.SIGKILL


def _is_frozen(member: LocalMember) -> bool:
    """True if the member's launcher is stopped (state T)."""
    return member.launcher is not None and process_stats.is_stopped(member.launcher.process.pid)


def _has_failed(part: ManagedProcess) -> bool:
    """True if a part crashed or exited and was not killed from outside."""
    return part.process.returncode not in (-signal.SIGKILL, -signal.SIGTERM)
