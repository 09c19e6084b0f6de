"""Represent a process's place in one generation of the group, and send its reports to its launcher.

All other modules of this package may import this module. It imports only `caught_errors` and `world_sizes`
from the package.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.protocol import progress, progress_writer
from holdfast.protocol.launcher_messages import BadNumber, BadNumberKind, Launch, RankStart, StartTimes
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.training import caught_errors
from holdfast.training.world_sizes import WorldSizes
from holdfast.worker import launcher_channel
from holdfast.worker.drills import RankDrill
from holdfast.worker.launcher_channel import FLAG_WAIT_S

if TYPE_CHECKING:
    import torch

    from holdfast.state.device import Device

NOTE_CHARACTERS = 500  # the status shows at most this many characters of a warning
# A rank waits this long to let the rank whose own number is bad report first. The rollback ends both ranks.
YIELD_S = 0.3
RECENT_STEPS = 32  # the median duration of a step is taken over this many steps
_NUMBER = re.compile(r"\d+")


def print_warning(text: str) -> None:
    """Print a warning in the process's own output."""
    with suppress(ValueError, OSError):  # the script may have closed stderr
        print(f"holdfast: warning: {text}", file=sys.stderr, flush=True)


def local_rank() -> int:
    """Return this process's number on its machine, from 0. It is known even before `join`."""
    if launcher_channel.current_channel is not None:
        return launcher_channel.current_channel.local_rank
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return the device of this process. It is known even before `join`, so a model can be built on it."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank() % torch.cuda.device_count())
    return torch.device("cpu")


class Rank:
    """One rank of one generation: its start order, its progress page, and the channel to its launcher.

    Without a launcher (`channel` is None) there is no page, and every report does nothing.
    """

    def __init__(
        self, launch: Launch, start: RankStart, channel: launcher_channel.LauncherChannel | None
    ) -> None:
        self.launch, self.start, self.channel = launch, start, channel
        self.number = start.rank
        self.local_rank = start.local_rank
        self.world_size = launch.world_size
        self.sizes = WorldSizes(launch.world_size, launch.restore.world_size if launch.restore else 0)
        self.generation = launch.generation
        self.device = device()
        self.accelerator: Device | None = None  # None until the device of the state's tensors is known
        # The steps to skip, because the supervisor knows that their batches are bad.
        self.skip = frozenset(launch.skip)
        self.page: progress_writer.Page | None = None
        self.peers = caught_errors.PeerConnections({})
        self.drill = RankDrill()
        self._accepted_jumps = frozenset((each.step, each.loss) for each in launch.jumped)
        self._times = StartTimes()
        self._warned: set[str] = set()

    def say(self, message: WorkerMessage) -> None:
        """Send a message to the launcher, if there is one."""
        if self.channel is not None:
            self.channel.say(message)

    def forked(self) -> None:
        """In a forked process, give up the page and the launcher, because they belong to the rank."""
        self.page, self.channel, self.drill = None, None, RankDrill()

    # -- progress of the start

    def open_page(self) -> None:
        """Map the progress page that the launcher watches, and report that the script has started."""
        if self.channel is None:
            return
        self._times = StartTimes(started_ns=time.monotonic_ns())
        restored = self.launch.restore.step if self.launch.restore else 0
        try:
            self.page = progress_writer.Page.attach(self.channel.page_path)
        except (OSError, ValueError):
            self.page = progress_writer.Page.create(self.channel.page_path)
        self.page.begin(self.generation, self.number, self.local_rank, os.getpid(), restored)
        self.say(WorkerMessage("started", marks=self._times))

    def joined(self) -> None:
        """Record that the process group has now been formed."""
        self._times = replace(self._times, joined_ns=time.monotonic_ns())

    def restored(self) -> None:
        """Record that the protected objects have now been restored."""
        self._times = replace(self._times, restored_ns=time.monotonic_ns())

    def report_first_step(self) -> None:
        """Report that the first step of the generation is complete. Later calls do nothing."""
        if self.channel is not None and not self._times.first_step_ns:
            self._times = replace(self._times, first_step_ns=time.monotonic_ns())
            self.say(WorkerMessage("settled", marks=self._times))

    def aim(self, steps: int) -> None:
        """Report the goal of the loop that begins now: the number of steps in the state at its end."""
        if self.channel is None or steps == self._times.goal:
            return
        self._times = replace(self._times, goal=steps)
        if self._times.first_step_ns:  # otherwise the report of the first step includes the goal
            self.say(WorkerMessage("settled", marks=self._times))

    def report_resizing(self, fixed_by: str) -> None:
        """Report, with the first step, why the script needs this number of ranks; "" if it does not.

        The supervisor asks for this only if the user allows other numbers.
        """
        if not self.launch.may_resize:
            return
        self._times = replace(self._times, resizes=not fixed_by, fixed_by=fixed_by[:NOTE_CHARACTERS])

    # -- bad numbers

    def yield_to_reporter(self) -> None:
        """Wait, to let the rank whose own number is bad report first, because it knows the batch."""
        if self.channel is not None:
            threading.Event().wait(YIELD_S)

    def report_bad_number(
        self, kind: BadNumberKind, step: int, loss: float, position: int, why: str = ""
    ) -> None:
        """Report a bad number and wait for the rollback, which ends this process.

        The call returns only if no rollback takes place within `FLAG_WAIT_S`. Without a launcher it does
        nothing.
        """
        if self.channel is None:
            return
        self.report(kind, step, loss, position, why)
        threading.Event().wait(FLAG_WAIT_S)

    def report(self, kind: BadNumberKind, step: int, loss: float, position: int, why: str = "") -> None:
        """Report a bad number."""
        found = BadNumber(kind, step, repr(loss), position, time.monotonic_ns(), why)
        self.say(WorkerMessage("flag", flag=found))

    def accepts(self, step: int, loss: float) -> str:
        """Return the reason for accepting a loss that has jumped, or "" if the jump is a fault."""
        if not self.launch.loss_jump_fault:
            return "training continues; --loss-jump X would roll the group back"
        if (step, repr(loss)) in self._accepted_jumps:
            return "this step had the same loss before the rollback, so it is accepted"
        return ""

    # -- warnings

    def warn(self, text: str) -> None:
        """Print a warning if this is rank 0. The other ranks would print the same warning."""
        if self.number == 0:
            print_warning(text)

    def note(self, text: str) -> None:
        """Print a warning in the rank's own output, and report it for the status."""
        print_warning(f"rank {self.number}: {text}")
        self.say(WorkerMessage("note", note=text[:NOTE_CHARACTERS]))

    def warn_once(self, text: str) -> None:
        """Print a warning in the rank's output, but only once, even if its numbers change."""
        kind = _NUMBER.sub("#", text)
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"holdfast: rank {self.number}: {text}", file=sys.stderr, flush=True)

    # -- the rest

    def median_step_s(self) -> float | None:
        """Return the median duration of the last `RECENT_STEPS` steps; None if there are none yet."""
        times_s = progress.step_times_s(self.page.memory, RECENT_STEPS) if self.page is not None else None
        return sorted(times_s)[len(times_s) // 2] if times_s else None
