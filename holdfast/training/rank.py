"""This process's place in one generation of the group, and its reports to its launcher.

The other modules of this package may import this module, which imports only `caught_errors` of them.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.protocol import progress, progress_writer
from holdfast.protocol.launcher_messages import BadNumber, BadNumberKind, Launch, RankStart, StartTimes
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.state import misuse
from holdfast.training import caught_errors
from holdfast.worker import launcher_channel
from holdfast.worker.drills import RankDrill

if TYPE_CHECKING:
    import torch

    from holdfast.state.device import Device

NOTE_CHARACTERS = 500  # a warning is cut to this length for the status
# A delay that lets the rank whose own number is bad report first; that rolls back this rank as well.
YIELD_S = 0.3
# How long to wait for the rollback after a bad number, before the script ends with an exception.
FLAG_WAIT_S = 600.0
RECENT_STEPS = 32  # how many steps the median time of a step covers
_NUMBER = re.compile(r"\d+")


def local_rank() -> int:
    """Return this process's number on its machine, from 0; it is known before `join`."""
    if launcher_channel.current_channel is not None:
        return launcher_channel.current_channel.local_rank
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """Return the device of this process; it is known before `join`, so the model can be built on it."""
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
        self.generation = launch.generation
        self.device = device()
        self.accelerator: Device | None = None  # None until the device of the state's tensors is known
        # Steps to skip, because the supervisor reported their batches as bad.
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
        """In a process that the script forked, drop the page and the launcher, which belong to the rank."""
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
        """Record that the process group was formed now."""
        self._times = replace(self._times, joined_ns=time.monotonic_ns())

    def restored(self) -> None:
        """Record that the state was restored into the protected objects now."""
        self._times = replace(self._times, restored_ns=time.monotonic_ns())

    def report_first_step(self) -> None:
        """Report, once, that the first step of the generation is done."""
        if self.channel is not None and not self._times.first_step_ns:
            self._times = replace(self._times, first_step_ns=time.monotonic_ns())
            self.say(WorkerMessage("settled", marks=self._times))

    def aim(self, steps: int) -> None:
        """Report the goal of the loop that begins now: the training will then have `steps` steps."""
        if self.channel is None or steps == self._times.goal:
            return
        self._times = replace(self._times, goal=steps)
        if self._times.first_step_ns:  # otherwise the report of the first step includes the goal
            self.say(WorkerMessage("settled", marks=self._times))

    # -- bad numbers

    def yield_to_reporter(self) -> None:
        """Let the rank whose own number is bad report it first, because it knows the batch."""
        if self.channel is not None:
            threading.Event().wait(YIELD_S)

    def report_bad_number(
        self, kind: BadNumberKind, step: int, loss: float, position: int, why: str = ""
    ) -> None:
        """Report a bad number and wait for the rollback, which ends this process.

        Returns if no rollback happens within `FLAG_WAIT_S`, or at once without a launcher.
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
        """Return why a loss that jumped is accepted, or "" if it is a fault."""
        if not self.launch.loss_jump_fault:
            return "training continues; --loss-jump X would roll the group back"
        if (step, repr(loss)) in self._accepted_jumps:
            return "this step had the same loss before the rollback, so it is accepted"
        return ""

    # -- warnings

    def note(self, text: str) -> None:
        """Print a warning in the rank's own output, and show it in the status."""
        misuse.warn(0, f"rank {self.number}: {text}")
        self.say(WorkerMessage("note", note=text[:NOTE_CHARACTERS]))

    def warn_once(self, text: str) -> None:
        """Print a warning once in the rank's output. Texts that differ only in numbers count as the same."""
        kind = _NUMBER.sub("#", text)
        if kind not in self._warned:
            self._warned.add(kind)
            print(f"holdfast: rank {self.number}: {text}", file=sys.stderr, flush=True)

    # -- the rest

    def median_step_s(self) -> float | None:
        """Return the median time of the last `RECENT_STEPS` steps; None before there are any."""
        times_s = progress.step_times_s(self.page.memory, RECENT_STEPS) if self.page is not None else None
        return sorted(times_s)[len(times_s) // 2] if times_s else None
