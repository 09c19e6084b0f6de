"""The local stand-in for a cluster: starts the supervisor and the members, restarts what must run.

A member is a sidecar and a launcher. As a kubelet would, it restarts a sidecar and a supervisor that die;
a launcher that dies takes its member with it. Orphans of the run come to this process and are ended, and
when this process itself is killed, all of them are told by the kernel.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import osproc, parts
from supervisor import devices

BACKOFF_S = 1.0  # a part that lived shorter than this is not started again at once
STOP_S = 8.0  # for a part to end after SIGTERM

_LAUNCH = (
    "import sys; sys.path[0] = sys.argv.pop(1); "
    "from holdfast.launch import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a member is made of."""

    command: tuple[str, ...]
    nproc: int
    gpus: int | None
    warm: str
    runtime: Path
    run_dir: Path
    settings: Mapping[str, str]  # for the sidecar
    supervisor: tuple[str, ...]  # arguments of the supervisor's process


@dataclass(slots=True)
class Part:
    """One process that the keeper owns."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    born_s: float


@dataclass(slots=True)
class Member:
    name: str
    launcher: Part
    block: int  # which of the machine's devices are its own
    sidecar: Part | None = None
    gone: bool = False


@dataclass(slots=True)
class Finished:
    code: int
    why: str
    message: str


@dataclass(slots=True)
class Keeper:
    """Everything happens in `turn`, on one thread."""

    plan: Plan
    api: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    members: dict[str, Member] = field(default_factory=dict)
    stop: str = ""
    finished: Finished | None = None
    _supervisor: Part | None = None
    _line: socket.socket | None = None
    _heard: bytes = b""
    _count: int = 0
    _timers: list[tuple[float, str]] = field(default_factory=list)

    def start(self) -> None:
        osproc.adopt_orphans()
        self._start_supervisor()

    def turn(self, limit_s: float) -> None:
        """Wait for events up to `limit_s` and handle them."""
        for key, _ in self.selector.select(limit_s):
            key.data()
        now = time.monotonic()
        due = [what for at, what in self._timers if at <= now]
        self._timers = [(at, what) for at, what in self._timers if at > now]
        for what in due:
            self._start_again(what)

    # -- the supervisor

    def _start_supervisor(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "HOLDFAST_KEEPER_FD": str(theirs.fileno()),
            "HOLDFAST_API_FD": str(self.api.fileno()),
            "HOLDFAST_PARENT": str(os.getpid()),
        }
        self._supervisor = self._spawn(
            "supervisor",
            parts.command("supervisor", "serve", *self.plan.supervisor),
            environment,
            (theirs.fileno(), self.api.fileno()),
        )
        theirs.close()
        self._line, self._heard = ours, b""
        self.selector.register(ours, selectors.EVENT_READ, self._hear)
        self._tell()

    def _hear(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.selector.unregister(self._line)
            self._line.close()
            self._line = None
            return
        *lines, self._heard = (self._heard + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, said: Mapping[str, object]) -> None:
        if said["do"] == "want" and self.stop != "now":
            discard = said["discard"]
            assert isinstance(discard, list)
            self._want(int(str(said["count"])), {str(name) for name in discard})
        elif said["do"] == "kill":
            self._kill(str(said["name"]))
        elif said["do"] == "finish":
            self.finished = Finished(int(str(said["code"])), str(said["why"]), str(said["message"]))
        self._tell()

    def _tell(self) -> None:
        alive = {name: "running" for name, member in self.members.items() if not member.gone}
        if self._line is not None:
            try:
                self._line.sendall(json.dumps({"members": alive, "stop": self.stop}).encode() + b"\n")
            except OSError:  # it died: the next one is told at its start
                return

    def ask_stop(self, how: str) -> None:
        self.stop = how
        self._tell()

    # -- members

    def _want(self, count: int, discard: set[str]) -> None:
        for name in discard:
            if name in self.members and not self.members[name].gone:
                self._kill(name)
        alive = sum(1 for member in self.members.values() if not member.gone)
        for _ in range(count - alive):
            self._create()

    def _create(self) -> None:
        name = f"m{self._count}"
        self._count += 1
        directory = self.plan.runtime / name
        directory.mkdir(mode=0o700)
        root = parts.import_root(self.plan.runtime / "import")
        launch = [sys.executable, "-c", _LAUNCH, str(root)]
        launch += ["--directory", str(directory), "--logs", str(self.plan.run_dir / "logs")]
        launch += ["--name", name, "--nproc", str(self.plan.nproc), "--warm", self.plan.warm]
        launch += ["--parent", str(os.getpid()), "--", *self.plan.command]
        block = self._free_block()
        environment = {**os.environ, **devices.share(os.environ, self.plan.gpus, block, self.plan.nproc)}
        launcher = self._spawn(f"launcher {name}", launch, environment, ())
        self.members[name] = Member(name, launcher, block)
        self._start_sidecar(name)

    def _free_block(self) -> int:
        """Return the lowest number that no living member has: its place on this machine."""
        taken = {member.block for member in self.members.values() if not member.gone}
        return next(block for block in range(len(taken) + 1) if block not in taken)

    def _start_sidecar(self, name: str) -> None:
        environment = {
            **os.environ,
            **self.plan.settings,
            "HOLDFAST_MEMBER": name,
            "HOLDFAST_NODE": f"{socket.gethostname()}/{name}",
            "HOLDFAST_NPROC": str(self.plan.nproc),
            "HOLDFAST_DIRECTORY": str(self.plan.runtime / name),
            "HOLDFAST_PARENT": str(os.getpid()),
        }
        self.members[name].sidecar = self._spawn(f"sidecar {name}", parts.command("sidecar"), environment, ())

    def _kill(self, name: str) -> None:
        """End a member as a power loss would: all its processes and its memory, at once."""
        member = self.members.get(name)
        if member is None or member.gone:
            return
        member.gone = True
        for part in (member.launcher, member.sidecar):
            if part is not None:
                part.process.kill()
        self._sweep()
        shutil.rmtree(self.plan.runtime / name, ignore_errors=True)

    # -- processes

    def _spawn(
        self, name: str, argv: list[str], environment: dict[str, str], descriptors: tuple[int, ...]
    ) -> Part:
        folder = self.plan.run_dir / "logs"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name.replace(' ', '-')}.log"
        with path.open("ab") as log:
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is ours to hear and theirs to be told
            )
        part = Part(name, process, os.pidfd_open(process.pid), time.monotonic())
        self.selector.register(part.pidfd, selectors.EVENT_READ, lambda: self._ended(part))
        return part

    def _ended(self, part: Part) -> None:
        self.selector.unregister(part.pidfd)
        os.close(part.pidfd)
        part.process.wait()
        self._sweep()
        if part is self._supervisor:
            self._supervisor = None
            if self.finished is None:
                self._again("supervisor", part)
            return
        for member in self.members.values():
            if part is member.sidecar:
                member.sidecar = None
                if not member.gone and not self._closing:
                    self._again(f"sidecar {member.name}", part)
            elif part is member.launcher and not member.gone:
                self._kill(member.name)
                self._tell()

    @property
    def _closing(self) -> bool:
        return self.finished is not None

    def _again(self, what: str, part: Part) -> None:
        lived_s = time.monotonic() - part.born_s
        delay_s = 0.0 if lived_s > BACKOFF_S else BACKOFF_S - lived_s
        self._timers.append((time.monotonic() + delay_s, what))

    def _start_again(self, what: str) -> None:
        if what == "supervisor":
            if self.finished is None:
                self._start_supervisor()
            return
        name = what.partition(" ")[2]
        member = self.members[name]
        if not member.gone and member.sidecar is None:
            self._start_sidecar(name)

    def _sweep(self) -> None:
        """Kill what a dead part left behind: it came to us as an orphan."""
        mine = {part.process.pid for part in self._parts()}
        for _ in range(20):
            strays = [pid for pid in osproc.children() if pid not in mine]
            if not strays:
                return
            for pid in strays:
                osproc.kill_group(pid)
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    continue

    def _parts(self) -> list[Part]:
        found = [self._supervisor] if self._supervisor else []
        for member in self.members.values():
            found += [part for part in (member.launcher, member.sidecar) if part is not None]
        return [part for part in found if part.process.returncode is None]

    def close(self) -> None:
        """End every process of the run and remove its memory. On return nothing of it is left."""
        self.finished = self.finished or Finished(1, "the keeper was closed", "")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for part in self._parts():
                part.process.send_signal(signum)
            deadline = time.monotonic() + STOP_S
            while self._parts() and time.monotonic() < deadline:
                self.turn(0.05)
        self._sweep()
        shutil.rmtree(self.plan.runtime, ignore_errors=True)
        self.api.close()
