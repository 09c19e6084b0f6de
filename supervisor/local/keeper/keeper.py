"""A local run's keeper: starts the supervisor and the members, and restarts those that die.

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
import time
from dataclasses import dataclass

from holdfast import exit_codes
from holdfast.process import clock, linux, selector_loop
from supervisor.local.keeper import process_specs
from supervisor.local.keeper.members import LocalMembers
from supervisor.local.keeper.process_specs import RunSpec
from supervisor.local.keeper.processes import PARTS_S, ForkServerClient, ManagedProcess, ProcessTable
from supervisor.local.keeper.restarts import RestartKey
from supervisor.local.keeper.sidecar_watch import SidecarWatch
from supervisor.local.keeper.starts import NEW_MEMBER, SUPERVISOR, Starts
from supervisor.local.keeper.supervisor_process import SupervisorProcess
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
from supervisor.local.volume.volume_guard import VolumeGuard
from supervisor.view.model import Completion, StopRequest

STOP_S = 8.0  # how long a part may take to end after SIGTERM


@dataclass(slots=True)
class Finished:
    code: int
    why: str
    message: str
    completion: Completion | None = None  # the parts of `why` if the script has finished and they are known


class LocalKeeper:
    """Owns the processes of one run. All work is done in `poll`, on one thread."""

    def __init__(self, plan: RunSpec, api: socket.socket) -> None:
        self.plan, self.api = plan, api
        self.selector = selectors.DefaultSelector()
        self.stop: StopRequest = ""
        self.finished: Finished | None = None
        self.news: list[str] = []  # lines for the user; the reader empties the list
        self._polled_s = 0.0  # when the last `poll` returned
        self._hurry = False
        self._volume = VolumeGuard(plan.runtime, self._say)
        self._children = ProcessTable(plan.logs, self.selector, self._on_end, self._on_exit)
        # The first fork server forks the members' launchers, the second the supervisor and the sidecars.
        self._template = ForkServerClient("template", self._children, self._launch_waiting)
        self._parts = ForkServerClient(
            "parts", self._children, lambda: self._start_again(SUPERVISOR), PARTS_S
        )
        self._starts = Starts(self._say, self._children.log)
        self._members = LocalMembers(
            plan, self._children, self._template, self._parts, self._volume.repair, self._starts
        )
        self._sidecars = SidecarWatch(self._say)
        self._supervisor = SupervisorProcess(self.selector, self._say, self._handle, self._send_state)

    def start(self) -> None:
        linux.adopt_orphans()
        self._watch_volume()
        parent, now_s = os.getpid(), time.monotonic()
        self._parts.start(lambda control: process_specs.part_fork_server(parent, control, os.environ), now_s)
        self._template.start(
            lambda control: process_specs.member_fork_server(self.plan, parent, control, os.environ), now_s
        )

    def _watch_volume(self) -> None:
        """Keep the run's folder complete from now on. Raises `OSError`."""
        self._volume.begin()
        if self._volume.descriptor >= 0:
            self.selector.register(
                self._volume.descriptor,
                selectors.EVENT_READ,
                lambda: self._volume.restore_removed(wanted=not self._closing),
            )

    def poll(self, limit_s: float) -> None:
        """Wait up to `limit_s` for events, and handle them."""
        due_s = (self._polled_s or time.monotonic()) + limit_s + clock.NORMAL_LATENESS_S
        for key in selector_loop.ready(self.selector, limit_s):
            key.data()
        for template in (self._parts, self._template):
            template.poll(time.monotonic())
        self._children.collect_held()
        now_s = time.monotonic()
        for part in self._starts.pop_due(now_s):
            self._start_again(part)
        if not self._closing:
            self._watch(now_s, max(0.0, now_s - due_s))
            if self._volume.check(now_s):
                self._send_state()
        self._polled_s = time.monotonic()

    def _watch(self, now_s: float, late_s: float) -> None:
        """Kill stuck supervisors and sidecars.

        If the run should stop but no supervisor ends it, end the run.
        """
        self._supervisor.watch(now_s, late_s)
        self._sidecars.replace_stuck(self._members.by_name.values(), now_s)
        why = self._supervisor.overdue(now_s)
        if why:
            self.end(f"stopped without a last checkpoint: {why}")

    def _say(self, line: str) -> None:
        self.news.append(line)

    @property
    def _closing(self) -> bool:
        return self.finished is not None

    # -- requests of the supervisor, and responses

    def _handle(self, request: Request) -> None:
        """Carry out a request from the supervisor."""
        match request:
            case Want(count, discard):
                if self.stop != "now":
                    self._members.want(count, discard)
            case GiveUpMember(name):
                self._members.end_member(name)
            case Renew(name):
                if name in self._members.by_name:
                    self._sidecars.note_silence(self._members.by_name[name], time.monotonic())
            case StopRun(how):
                if self.stop != "now":
                    self.ask_stop(how)
            case Finish(code, why, message, completion):
                self.finished = Finished(code, why, message, completion)
            case Hello() | Alive():
                pass

    def _send_state(self) -> None:
        running = dict.fromkeys(self._members.running(), "running")
        self._supervisor.send(KeeperState(running, self.stop, self._volume.repair.error))

    # -- starts and exits of processes

    def _start_again(self, part: RestartKey) -> None:
        if self._closing:
            return
        if part == SUPERVISOR:
            self._starts.attempt(part, self._start_supervisor)
        elif part == NEW_MEMBER:
            self._members.create_missing()
            self._send_state()
        else:
            self._members.start_sidecar_again(part.member)

    def _start_supervisor(self) -> None:
        self._supervisor.start(self._spawn_supervisor)
        self._send_state()

    def _spawn_supervisor(self, connection: int) -> ManagedProcess:
        start = process_specs.supervisor(self.plan, os.getpid(), connection, self.api.fileno())
        return self._parts.start_part(
            SUPERVISOR.name, start.order(), lambda: start.alone(os.environ), tuple(start.inherits.values())
        )

    def _launch_waiting(self) -> None:
        if not self._closing and self.stop != "now":
            self._members.launch_waiting()

    def _on_exit(self, part: ManagedProcess) -> None:
        """Report a member as lost as soon as its ranks are killed.

        The kernel can take seconds to free their memory, but the recovery does not have to wait for that.
        With GPUs, however, the loss is reported only after the ranks are gone, because their replacements
        need the GPUs' memory.
        """
        if not self._closing and not self.plan.gpus and self._members.launcher_exited(part):
            self._send_state()

    def _on_end(self, part: ManagedProcess) -> None:
        if part is self._supervisor.process:
            self._supervisor.died()
            if not self._closing:
                self._starts.died(SUPERVISOR, part)
        elif self._members.ended(part, closing=self._closing):
            self._send_state()

    # -- the end of the run

    def ask_stop(self, how: StopRequest) -> None:
        """Ask the supervisor to end the run. If no supervisor does, `poll` ends the run.

        `how` has the same values as `JobState.stop`.
        """
        if how == "now" or not self.stop:
            self.stop = how
        self._supervisor.stop_requested(self.stop)
        self._send_state()

    def hurry(self) -> None:
        """End the run now, and kill each process that does not end immediately."""
        self._hurry = True
        self.end("stopped immediately, as requested")

    def end(self, why: str) -> None:
        """End the run without a supervisor. `close` then ends the processes."""
        self.finished = self.finished or Finished(exit_codes.INTERRUPTED, why, "")

    def close(self) -> None:
        """End every process of the run, and remove the run's folder in memory."""
        self.finished = self.finished or Finished(1, "the keeper was closed", "")
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for part in self._children.alive():
                part.process.send_signal(signum)
                part.process.send_signal(signal.SIGCONT)  # a stopped process would not handle SIGTERM
            deadline = time.monotonic() + STOP_S
            while self._children.alive() and time.monotonic() < deadline and not self._skips_wait(signum):
                self.poll(0.05)
        self._children.sweep()
        self._members.wait_until_freed()
        shutil.rmtree(self.plan.runtime, ignore_errors=True)
        self._volume.close()
        self.api.close()

    def _skips_wait(self, signum: int) -> bool:
        """True if SIGKILL must follow `signum` without waiting, because the user is in a hurry."""
        return self._hurry and signum != signal.SIGKILL
