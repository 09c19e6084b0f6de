"""The local stand-in for a cluster: starts the supervisor and the members, restarts what must run.

A member is a sidecar and a launcher. As a kubelet would, it restarts a sidecar and a supervisor that die,
and a supervisor that gives no sign of life; a launcher that dies takes its member with it. Orphans of the
run come to this process and are ended, and when it is killed itself, the kernel tells all of them.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from holdfast.inspection import process_stats
from holdfast.inspection.liveness import Stops
from holdfast.process import event_loop, linux
from holdfast.protocol.rank_channel import WorkerOrder
from supervisor.local import process_specs
from supervisor.local.process_specs import PartSpec, RunSpec
from supervisor.local.processes import PARTS_S, ForkServerClient, ManagedProcess, ProcessTable
from supervisor.local.restarts import LOOP, Restarts, Watchdog
from supervisor.local.volume_repair import RemovalWatcher, VolumeRepair

STOP_S = 8.0  # for a part to end after SIGTERM
LATE_S = 0.1  # that a machine at work may be late: no excuse for anybody
TELL_S = 0.5  # for a supervisor to take what it is told: one that does not is stuck
EXIT_INTERRUPTED = 130
IDLE_S = 0.5  # a sidecar whose loop runs looks at its ranks twice in this time
UPKEEP_S = 0.25  # between two looks whether all is there that the run has in memory
NEW_S = 2.0  # for a sidecar to import and connect
SUPERVISOR, MEMBERS = "supervisor", "another member"  # what is started again, beside sidecars

FREE_S = 30.0  # for the memory of lost members to be given back, at the end


@dataclass(slots=True)
class LocalMember:
    name: str
    launcher: ManagedProcess | None = None  # until the template has imported
    sidecar: ManagedProcess | None = None
    lost: bool = False  # it is to be gone in a moment: the supervisor knows
    gone: bool = False


@dataclass(slots=True)
class Finished:
    code: int
    why: str
    message: str


@dataclass(slots=True)
class LocalCluster:
    """Everything happens in `turn`, on one thread."""

    plan: RunSpec
    api: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    members: dict[str, LocalMember] = field(default_factory=dict)
    stop: str = ""
    finished: Finished | None = None
    news: list[str] = field(default_factory=list)  # what people should hear, until somebody takes it
    _supervisor: ManagedProcess | None = None
    _line: socket.socket | None = None
    _heard: bytes = b""
    _count: int = 0
    _wanted: int = 0  # members
    _freeing: list[threading.Thread] = field(default_factory=list)
    _restarts: Restarts = field(default_factory=Restarts)
    _watchdog: Watchdog = field(default_factory=Watchdog)
    _stops: Stops = field(default_factory=Stops)  # of sidecars
    _mute: dict[int, tuple[float, float]] = field(default_factory=dict)  # sidecar -> CPU time, and when
    _turned_s: float = 0.0  # when the last turn was over
    _hurry: bool = False
    _told_unkillable: bool = False
    _upkept_s: float = 0.0  # when the last look at the run's memory was
    _upkeep: VolumeRepair = field(init=False)
    _removals: RemovalWatcher = field(default_factory=RemovalWatcher)  # from the run's memory
    _children: ProcessTable = field(init=False)
    _template: ForkServerClient = field(init=False)  # of members
    _parts: ForkServerClient = field(init=False)  # of our own

    def __post_init__(self) -> None:
        self._upkeep = VolumeRepair(self.plan.runtime)
        self._children = ProcessTable(self.plan.logs, self.selector, self._ended, self._left)
        self._template = ForkServerClient("template", self._children, self._launch_waiting)
        self._parts = ForkServerClient(
            "parts", self._children, lambda: self._start_again(SUPERVISOR), PARTS_S
        )

    def start(self) -> None:
        linux.adopt_orphans()
        self._keep_memory()
        us, now_s = os.getpid(), time.monotonic()
        self._parts.start(lambda line: process_specs.part_fork_server(us, line, os.environ), now_s)
        self._template.start(
            lambda line: process_specs.member_fork_server(self.plan, us, line, os.environ), now_s
        )

    def _keep_memory(self) -> None:
        """Look after the run's folder from now on: at every event, and now and then. Raises `OSError`."""
        self._upkeep.begin()
        self._removals.open()
        if self._removals.descriptor >= 0:
            self.selector.register(self._removals.descriptor, selectors.EVENT_READ, self._removed)

    def poll(self, limit_s: float) -> None:
        """Wait for events up to `limit_s` and handle them."""
        due_s = (self._turned_s or time.monotonic()) + limit_s + LATE_S
        for key in event_loop.ready(self.selector, limit_s):
            key.data()
        for template in (self._parts, self._template):
            template.poll(time.monotonic())
        self._children.collect_held()
        now_s = time.monotonic()
        for name in self._restarts.take(now_s):
            self._start_again(name)
        if not self._closing:
            self._watch(now_s, max(0.0, now_s - due_s))
            if now_s - self._upkept_s >= UPKEEP_S:
                self._upkept_s = now_s
                self._look_after_memory(now_s)
        self._turned_s = time.monotonic()

    # -- the supervisor

    def _watch(self, now_s: float, late_s: float) -> None:
        """Kill a supervisor that does nothing any more, and end a run that none ends."""
        self._watchdog = self._watchdog.later(now_s, late_s)
        if self._supervisor is not None:
            self._check(self._supervisor, now_s)
        self._look_at_sidecars(now_s)
        why = self._watchdog.overdue(now_s)
        if why:
            self.end(f"stopped without a last checkpoint: {why}")

    def _check(self, part: ManagedProcess, now_s: float) -> None:
        pid = part.process.pid
        doubtful = self._watchdog.doubtful(now_s)
        why = self._watchdog.stuck(now_s, linux.state_of(pid)[0]) if doubtful else ""
        if why:
            self._watchdog = self._watchdog.killed(now_s)
            self.news.append(f"{why}: it is killed and replaced")
            part.process.kill()
        elif self._watchdog.unkillable(now_s) and not self._told_unkillable:
            self._told_unkillable = True
            self.news.append(
                f"process {pid}, a supervisor that was killed, does not end: the kernel waits for a"
                " device or a file system. The ranks train on, but no fault is recovered until it is gone"
            )

    def _look_after_memory(self, now_s: float) -> None:
        """Put back what somebody has removed of the run's memory, and say if that cannot be done."""
        before = self._upkeep.error
        self.news += self._upkeep.look(now_s)
        self._removals.watch(self._upkeep.folders())
        if self._upkeep.error != before:
            self._tell()

    def _removed(self) -> None:
        """Put back at once what was removed: a fault may come before the next look."""
        self._removals.hear()
        if self._closing:
            return
        with suppress(OSError):  # whoever removes it is not done: the next event or look tries again
            self._upkeep.put_back()
        self._removals.watch(self._upkeep.folders())

    def _look_at_sidecars(self, now_s: float) -> None:
        """Replace a sidecar that is stopped, or does nothing at all, as one that is dead.

        Its ranks have no part in that. What is left alone is one that the machine holds up, and one whose
        launcher is stopped as well: that is a host that does not run.
        """
        pids = {
            m.sidecar.process.pid: m
            for m in self.members.values()
            if m.sidecar is not None and not m.gone and not _is_frozen(m)
        }
        for pid in self._stops.later([pid for pid in pids if process_stats.is_stopped(pid)], now_s):
            self._replace_sidecar(pids[pid], "it is stopped")
        for pid, (cpu_s, at_s) in list(self._mute.items()):
            if now_s - at_s < IDLE_S:
                continue
            del self._mute[pid]
            found = process_stats.sample(pid)
            if pid in pids and found.state == "S" and not found.traced and found.cpu_s == cpu_s:
                self._replace_sidecar(pids[pid], "it says nothing, and does nothing")

    def _renew(self, name: str) -> None:
        """The supervisor hears nothing of a sidecar: look at what that does for a moment."""
        member, now_s = self.members.get(name), time.monotonic()
        if member is None or member.sidecar is None or now_s - member.sidecar.born_s < NEW_S:
            return
        pid = member.sidecar.process.pid
        self._mute[pid] = (process_stats.sample(pid).cpu_s, now_s)

    def _replace_sidecar(self, member: LocalMember, why: str) -> None:
        """Kill a sidecar. Only when it is gone another is started: two never speak for one member."""
        assert member.sidecar is not None
        self.news.append(f"{member.sidecar.name} is killed and replaced: {why}. The ranks train on")
        member.sidecar.process.kill()

    def end(self, why: str) -> None:
        """End the run without a supervisor: `close` does the rest."""
        self.finished = self.finished or Finished(EXIT_INTERRUPTED, why, "")

    def _start_supervisor(self) -> None:
        if self._closing:
            return
        self._hang_up()
        ours, theirs = socket.socketpair()
        ours.settimeout(TELL_S)
        try:
            with theirs:
                start = process_specs.supervisor(self.plan, os.getpid(), theirs.fileno(), self.api.fileno())
                self._supervisor = self._start(SUPERVISOR, start)
        except OSError:
            ours.close()
            raise
        self._watchdog = self._watchdog.born(time.monotonic())
        self._told_unkillable = False
        self._line, self._heard = ours, b""
        self.selector.register(ours, selectors.EVENT_READ, self._hear)
        self._tell()

    def _hear(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(1 << 16)
        except TimeoutError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._hang_up()
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _hang_up(self) -> None:
        if self._line is not None:
            self.selector.unregister(self._line)
            self._line.close()
            self._line = None

    def _obey(self, said: Mapping[str, object]) -> None:
        if said["do"] == "alive":
            self._watchdog = self._watchdog.heard(time.monotonic())
            return
        if said["do"] == "want" and self.stop != "now":
            discard = said["discard"]
            assert isinstance(discard, list)
            self._want(int(str(said["count"])), {str(name) for name in discard})
        elif said["do"] == "kill":
            self._kill(str(said["name"]))
        elif said["do"] == "renew":
            self._renew(str(said["name"]))
        elif said["do"] == "stop":
            if self.stop != "now":
                self.ask_stop(str(said["how"]))
        elif said["do"] == "finish":
            self.finished = Finished(int(str(said["code"])), str(said["why"]), str(said["message"]))
        self._tell()

    def _tell(self) -> None:
        alive = {name: "running" for name, member in self.members.items() if not (member.gone or member.lost)}
        told = {"members": alive, "stop": self.stop, "volume_error": self._upkeep.error}
        if self._line is not None:
            try:
                self._line.sendall(json.dumps(told).encode() + b"\n")
            except OSError:  # it died, or is stuck: the next one is told at its start
                return

    def ask_stop(self, how: str) -> None:
        """Have the run ended, by its supervisor or, when none does that, without: see `JobState.stop`."""
        if how == "now" or not self.stop:
            self.stop = how
        self._watchdog = self._watchdog.told_to_stop(self.stop, time.monotonic())
        self._tell()

    def hurry(self) -> None:
        """End the run now, and kill what takes its time."""
        self._hurry = True
        self.end("stopped at once, as asked")

    # -- members

    def _want(self, count: int, discard: set[str]) -> None:
        for name in discard:
            if name in self.members and not self.members[name].gone:
                self._kill(name)
        alive = sum(1 for member in self.members.values() if not member.gone)
        self._wanted = count
        if self._restarts.waits(MEMBERS):
            return
        for _ in range(count - alive):
            if not self._attempt(MEMBERS, self._create):
                return

    def _create(self) -> None:
        """Start one more member. On `OSError` there is none."""
        name = f"m{self._count}"
        self._count += 1
        self._upkeep.put_back()
        self.plan.directory(name).mkdir(mode=0o700)
        try:
            self._upkeep.add(name)
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
        """Start the launchers that have waited for the template; their sidecars are there already."""
        if self._closing or self.stop == "now":
            return
        for member in self.members.values():
            if member.launcher is None and not member.gone:
                try:
                    self._launch(member)
                except OSError as error:
                    self._kill(member.name)
                    self._try_later(MEMBERS, error)

    def _launch(self, member: LocalMember) -> None:
        name = f"launcher {member.name}"
        words = process_specs.launcher_argv(self.plan, member.name, os.getpid())
        member.launcher = self._template.fork(name, WorkerOrder("member", argv=words))
        if member.launcher is None:
            start = process_specs.launcher(self.plan, member.name, os.getpid(), os.environ)
            member.launcher = self._children.spawn(name, start)

    def _start_sidecar(self, name: str) -> None:
        self._upkeep.put_back()  # before it finds nothing, and makes other files in their place
        start = process_specs.sidecar(self.plan, name, os.getpid())
        self.members[name].sidecar = self._start(f"sidecar {name}", start)

    def _start(self, name: str, start: PartSpec) -> ManagedProcess:
        forked = self._parts.fork(name, start.order(), tuple(start.inherits.values()))
        return forked or self._children.spawn(name, start.alone(os.environ))

    def _kill(self, name: str) -> None:
        """End a member as a power loss would: all its processes and its memory, at once."""
        member = self.members.get(name)
        if member is None or member.gone:
            return
        member.gone = True
        for part in (member.launcher, member.sidecar):
            if part is not None:
                part.process.kill()
        self._children.sweep()
        self._freeing.append(self._upkeep.free(name))

    # -- processes

    def _left(self, part: ManagedProcess) -> None:
        """Tell of the loss of a member while the kernel takes down its ranks: gigabytes take it a while.

        They are killed and do nothing any more. Where there are GPUs the loss is told when they are gone:
        only then has a device its memory back, and who takes their place needs it.
        """
        for member in self.members.values():
            if part is member.launcher and not member.gone and not self._closing and not self.plan.gpus:
                if member.sidecar is not None:
                    member.sidecar.process.kill()
                member.lost = True
                self._tell()

    def _ended(self, part: ManagedProcess) -> None:
        if part is self._supervisor:
            self._supervisor = None
            self._watchdog = self._watchdog.died()
            if not self._closing:
                self._restart(part)
            return
        for member in self.members.values():
            if part is member.sidecar:
                member.sidecar = None
                if not member.gone and not self._closing:
                    self._restart(part)
            elif part is member.launcher and not member.gone:
                self._kill(member.name)
                told = part.process.returncode == 0  # a launcher ends so when it is told to, and only then
                if not self._closing and not told and _has_failed(part):
                    self._put_off_members(part)
                self._tell()

    def _restart(self, part: ManagedProcess) -> None:
        """Start a part again soon, later if it fails each time; then people hear of it."""
        left_s = self._restarts.died(part.name, part.born_s, time.monotonic(), _has_failed(part))
        if self._restarts.failures(part.name) == LOOP:
            without = "no fault is recovered" if part.name == SUPERVISOR else "its member is not supervised"
            self._say_loop(part, part.name, left_s)
            self.news.append(f"the ranks train on without {part.name}, but meanwhile {without}")

    def _put_off_members(self, launcher: ManagedProcess) -> None:
        """A member has failed: have the next one made soon, later if each fails; then people hear of it."""
        failures = self._restarts.failures(MEMBERS)
        left_s = self._restarts.died(MEMBERS, launcher.born_s, time.monotonic(), failed=True)
        if self._restarts.failures(MEMBERS) == LOOP > failures:
            self._say_loop(launcher, "a member's launcher", left_s)

    def _say_loop(self, part: ManagedProcess, what: str, left_s: float) -> None:
        code, log = part.process.returncode, self._children.log(part.name).name
        self.news.append(
            f"{what} has ended {LOOP} times in a row, last with code {code} (see logs/{log}):"
            f" tried again in {left_s:.0f} s, then less and less often"
        )

    @property
    def _closing(self) -> bool:
        return self.finished is not None

    def _start_again(self, part: str) -> None:
        if self._closing:
            return
        if part == SUPERVISOR:
            self._attempt(part, self._start_supervisor)
        elif part == MEMBERS:
            self._want(self._wanted, set())
            self._tell()
        else:
            name = part.partition(" ")[2]
            member = self.members[name]
            if not member.gone and member.sidecar is None:
                self._attempt(part, lambda: self._start_sidecar(name))

    def _attempt(self, part: str, start: Callable[[], None]) -> bool:
        """Return whether `part` is started. When the machine has no room for it, it is tried again later."""
        try:
            start()
        except OSError as error:
            self._try_later(part, error)
            return False
        return True

    def _try_later(self, part: str, error: OSError) -> None:
        now_s = time.monotonic()
        left_s = self._restarts.died(part, now_s, now_s, failed=True)
        if self._restarts.failures(part) == 1:
            self.news.append(
                f"{part} cannot be started: {error}; tried again in {left_s:.0f} s and after that"
            )

    def close(self) -> None:
        """End every process of the run and remove its memory. On return nothing of it is left."""
        self.finished = self.finished or Finished(1, "the keeper was closed", "")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for part in self._children.alive():
                part.process.send_signal(signum)
                part.process.send_signal(signal.SIGCONT)  # one that is stopped would not hear the first
            deadline = time.monotonic() + STOP_S
            while self._children.alive() and time.monotonic() < deadline and not self._hurry_to(signum):
                self.poll(0.05)
        self._children.sweep()
        for thread in self._freeing:
            thread.join(FREE_S)
        shutil.rmtree(self.plan.runtime, ignore_errors=True)
        self._upkeep.close()
        self._removals.close()
        self.api.close()

    def _hurry_to(self, signum: int) -> bool:
        """True when the next signal is to be sent at once."""
        return self._hurry and signum != signal.SIGKILL


def _is_frozen(member: LocalMember) -> bool:
    """True for a member whose launcher is stopped."""
    return member.launcher is not None and process_stats.is_stopped(member.launcher.process.pid)


def _has_failed(part: ManagedProcess) -> bool:
    """True for a part that has ended by itself, and by no signal from outside."""
    return part.process.returncode not in (-signal.SIGKILL, -signal.SIGTERM)
