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
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast import osproc
from holdfast.channel import Do
from supervisor import plan
from supervisor.children import Children, Part
from supervisor.plan import PartStart, Plan
from supervisor.restarts import Restarts
from supervisor.template import PARTS_S, Template

STOP_S = 8.0  # for a part to end after SIGTERM


@dataclass(slots=True)
class Member:
    name: str
    block: int  # which of the machine's devices are its own
    launcher: Part | None = None  # until the template has imported
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
    _restarts: Restarts = field(default_factory=Restarts)
    _children: Children = field(init=False)
    _template: Template = field(init=False)  # of members
    _parts: Template = field(init=False)  # of our own

    def __post_init__(self) -> None:
        self._children = Children(self.plan.logs, self.selector, self._ended)
        self._template = Template("template", self._children, self._launch_waiting)
        self._parts = Template("parts", self._children, self._start_supervisor, PARTS_S)

    def start(self) -> None:
        osproc.adopt_orphans()
        us, now_s = os.getpid(), time.monotonic()
        self._parts.start(lambda line: plan.part_template(us, line, os.environ), now_s)
        self._template.start(lambda line: plan.template(self.plan, us, line, os.environ), now_s)

    def turn(self, limit_s: float) -> None:
        """Wait for events up to `limit_s` and handle them."""
        for key, _ in self.selector.select(limit_s):
            key.data()
        for template in (self._parts, self._template):
            template.turn(time.monotonic())
        for name in self._restarts.take(time.monotonic()):
            self._start_again(name)

    # -- the supervisor

    def _start_supervisor(self) -> None:
        if self._closing:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            start = plan.supervisor(self.plan, os.getpid(), theirs.fileno(), self.api.fileno())
            self._supervisor = self._start("supervisor", start)
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
        self.plan.directory(name).mkdir(mode=0o700)
        self.members[name] = Member(name, self._free_block())
        if not self._template.importing:
            self._launch(self.members[name])
        self._start_sidecar(name)

    def _launch_waiting(self) -> None:
        """Start the launchers that have waited for the template; their sidecars are there already."""
        if self._closing or self.stop == "now":
            return
        for member in self.members.values():
            if member.launcher is None and not member.gone:
                self._launch(member)

    def _launch(self, member: Member) -> None:
        name = f"launcher {member.name}"
        words = plan.launch_words(self.plan, member.name, os.getpid())
        member.launcher = self._template.fork(name, Do("member", argv=words))
        if member.launcher is None:
            start = plan.launcher(self.plan, member.name, member.block, os.getpid(), os.environ)
            member.launcher = self._children.spawn(name, start)

    def _free_block(self) -> int:
        """Return the lowest number that no living member has: its place on this machine."""
        taken = {member.block for member in self.members.values() if not member.gone}
        return next(block for block in range(len(taken) + 1) if block not in taken)

    def _start_sidecar(self, name: str) -> None:
        start = plan.sidecar(self.plan, name, os.getpid())
        self.members[name].sidecar = self._start(f"sidecar {name}", start)

    def _start(self, name: str, start: PartStart) -> Part:
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
        shutil.rmtree(self.plan.directory(name), ignore_errors=True)

    # -- processes

    def _ended(self, part: Part) -> None:
        if part is self._supervisor:
            self._supervisor = None
            if self.finished is None:
                self._restarts.died(part.name, part.born_s, time.monotonic())
            return
        for member in self.members.values():
            if part is member.sidecar:
                member.sidecar = None
                if not member.gone and not self._closing:
                    self._restarts.died(part.name, part.born_s, time.monotonic())
            elif part is member.launcher and not member.gone:
                self._kill(member.name)
                self._tell()

    @property
    def _closing(self) -> bool:
        return self.finished is not None

    def _start_again(self, part: str) -> None:
        if part == "supervisor":
            self._start_supervisor()
            return
        name = part.partition(" ")[2]
        member = self.members[name]
        if not member.gone and member.sidecar is None:
            self._start_sidecar(name)

    def close(self) -> None:
        """End every process of the run and remove its memory. On return nothing of it is left."""
        self.finished = self.finished or Finished(1, "the keeper was closed", "")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for part in self._children.alive():
                part.process.send_signal(signum)
                part.process.send_signal(signal.SIGCONT)  # one that is stopped would not hear the first
            deadline = time.monotonic() + STOP_S
            while self._children.alive() and time.monotonic() < deadline:
                self.turn(0.05)
        self._children.sweep()
        shutil.rmtree(self.plan.runtime, ignore_errors=True)
        self.api.close()
