"""Create and discard the members of a local run. A member is a launcher, its ranks and a sidecar."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from holdfast.protocol.rank_channel import WorkerOrder
from supervisor.local.keeper import process_specs
from supervisor.local.keeper.process_specs import RunSpec
from supervisor.local.keeper.processes import ForkServerClient, ManagedProcess, ProcessTable
from supervisor.local.keeper.restarts import RestartKey
from supervisor.local.keeper.starts import NEW_MEMBER, Starts
from supervisor.local.volume.volume_repair import VolumeRepair

FREE_S = 30.0  # how long to wait at the end for the kernel to release the memory of lost members


@dataclass(slots=True)
class LocalMember:
    name: str
    launcher: ManagedProcess | None = None  # None while the template is importing
    sidecar: ManagedProcess | None = None
    lost: bool = False  # the supervisor knows that the member is lost, and its processes are being ended
    gone: bool = False


class LocalMembers:
    """All members that the run has had. Maintains `wanted` members, unless creating one fails."""

    def __init__(
        self,
        plan: RunSpec,
        children: ProcessTable,
        template: ForkServerClient,
        parts: ForkServerClient,
        repair: VolumeRepair,
        starts: Starts,
    ) -> None:
        """`template` forks launchers, and `parts` sidecars. `repair` restores members' folders."""
        self.by_name: dict[str, LocalMember] = {}
        self.wanted = 0  # members that the supervisor has requested
        self._plan, self._children, self._repair, self._starts = plan, children, repair, starts
        self._template, self._parts = template, parts
        self._count = 0  # members created
        self._freeing: list[threading.Thread] = []

    def running(self) -> list[str]:
        """Return the names of the members that are neither lost nor gone."""
        return [name for name, member in self.by_name.items() if not (member.gone or member.lost)]

    def want(self, count: int, discard: tuple[str, ...]) -> None:
        """Give up the members in `discard`, and maintain `count` other members from now on."""
        for name in set(discard):
            self.end_member(name)
        self.wanted = count
        self.create_missing()

    def create_missing(self) -> None:
        """Create members up to the wanted number, unless a failed one delays the next."""
        alive = sum(1 for member in self.by_name.values() if not member.gone)
        if self._starts.waits(NEW_MEMBER):
            return
        for _ in range(self.wanted - alive):
            if not self._starts.attempt(NEW_MEMBER, self._create):
                return

    def _create(self) -> None:
        """Create one more member. If this raises `OSError`, the member was not created."""
        name = f"m{self._count}"
        self._count += 1
        self._repair.put_back()
        self._plan.directory(name).mkdir(mode=0o700)
        try:
            self._repair.add(name)
            self._begin(name)
        except OSError:
            self.end_member(name)
            raise

    def _begin(self, name: str) -> None:
        member = self.by_name[name] = LocalMember(name)
        if not self._template.importing:
            self._launch(member)
        self._start_sidecar(member)

    def launch_waiting(self) -> None:
        """Start the launchers that waited for the template. Their sidecars are already running."""
        for member in self.by_name.values():
            if member.launcher is None and not member.gone:
                try:
                    self._launch(member)
                except OSError as error:
                    self.end_member(member.name)
                    self._starts.try_later(NEW_MEMBER, error)

    def _launch(self, member: LocalMember) -> None:
        keeper = os.getpid()
        argv = process_specs.launcher_argv(self._plan, member.name, keeper)
        member.launcher = self._template.start_part(
            f"launcher {member.name}",
            WorkerOrder("member", argv=argv),
            lambda: process_specs.launcher(self._plan, member.name, keeper, os.environ),
        )

    def start_sidecar_again(self, name: str) -> None:
        """Start the sidecar of a member that lacks one. If the sidecar cannot be started, try again later."""
        member = self.by_name[name]
        if not member.gone and member.sidecar is None:
            self._starts.attempt(RestartKey("sidecar", name), lambda: self._start_sidecar(member))

    def _start_sidecar(self, member: LocalMember) -> None:
        self._repair.put_back()  # without this, the sidecar would replace removed files with new ones
        start = process_specs.sidecar(self._plan, member.name, os.getpid())
        name = RestartKey("sidecar", member.name).name
        member.sidecar = self._parts.start_part(
            name, start.order(), lambda: start.alone(os.environ), tuple(start.inherits.values())
        )

    def end_member(self, name: str) -> None:
        """End all processes of a member at once and remove its memory, as a power loss would."""
        member = self.by_name.get(name)
        if member is None or member.gone:
            return
        member.gone = True
        for part in (member.launcher, member.sidecar):
            if part is not None:
                part.process.kill()
        self._children.sweep()
        self._freeing.append(self._repair.free(name))

    def launcher_exited(self, part: ManagedProcess) -> bool:
        """If `part` is the launcher of a member, record that the member is lost, and return True.

        The member's ranks have been killed, but may not have ended yet.
        """
        member = self._of(part)
        if member is None or part is not member.launcher or member.gone:
            return False
        if member.sidecar is not None:
            member.sidecar.process.kill()
        member.lost = True
        return True

    def ended(self, part: ManagedProcess, *, closing: bool) -> bool:
        """Record that a launcher or sidecar has ended. Return True if a member was given up as a result.

        Unless the run is `closing`, a sidecar is started again, and a failed launcher delays new members.
        """
        member = self._of(part)
        if member is None:
            return False
        if part is member.sidecar:
            member.sidecar = None
            if not member.gone and not closing:
                self._starts.died(RestartKey("sidecar", member.name), part)
            return False
        if member.gone:
            return False
        self.end_member(member.name)
        ordered = part.process.returncode == 0  # a launcher exits with code 0 only if it was ordered to end
        if not closing and not ordered and part.has_failed:
            self._starts.launcher_failed(part)
        return True

    def wait_until_freed(self) -> None:
        """Wait until the kernel has released the memory of the members that were given up."""
        for thread in self._freeing:
            thread.join(FREE_S)

    def _of(self, part: ManagedProcess) -> LocalMember | None:
        return next(
            (each for each in self.by_name.values() if part is each.launcher or part is each.sidecar), None
        )
