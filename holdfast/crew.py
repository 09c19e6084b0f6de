"""The ranks of one generation on one member: who runs, who waits for a process, how each ended."""

from __future__ import annotations

import json
import mmap
import os
import signal
from dataclasses import asdict, dataclass, field

from holdfast import channel, osproc, page, progress
from holdfast.channel import Do, Say
from holdfast.launcher_messages import (
    NO_ROOM,
    Ending,
    Flag,
    Launch,
    LauncherState,
    Marks,
    RankStart,
    RankState,
    Secured,
)
from holdfast.nest import Home, Process
from holdfast.torchrun import rank_environment


@dataclass(slots=True, eq=False)
class Seat:
    """One rank of the present generation."""

    rank: int
    local_rank: int
    order: RankStart
    process: Process | None = None
    ending: Ending | None = None
    flag: Flag | None = None
    marks: Marks = field(default_factory=Marks)
    exited: bool = False

    @property
    def state(self) -> str:
        if self.exited:
            return "exited"
        if self.ending is not None:
            return "failing"
        return "running" if self.marks.started_ns else "starting"


class Crew:
    """Seats of the newest generation. Processes of older ones are killed at `begin`."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.launch: Launch | None = None
        self.seats: tuple[Seat, ...] = ()
        self.dying: set[Process] = set()
        self.secure_asked = 0
        self.secured: dict[int, Secured] = {}
        self._asked: set[int] = set()
        self._impatient = False

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def state(self) -> LauncherState:
        ranks = tuple(
            RankState(
                seat.rank,
                seat.local_rank,
                seat.process.pid if seat.process else 0,
                self.generation,
                seat.state,
                seat.ending,
                seat.flag,
                seat.marks,
            )
            for seat in self.seats
        )
        secured = tuple(self.secured[rank] for rank in sorted(self.secured))
        done = self.secure_asked
        return LauncherState(os.getpid(), self.generation, ranks, (), 0, done, secured)

    def begin(self, launch: Launch, ranks: tuple[RankStart, ...]) -> None:
        """Kill what is left of the generation before and seat the ranks of the new one.

        SIGKILL takes effect before any more of the old processes' code runs, and survivors that were
        asked to secure are frozen before their optimizer: nothing old writes into the new generation.
        """
        self.kill_all()
        self.dying |= {s.process for s in self.seats if s.process and not s.exited}
        self.launch = launch
        self.seats = tuple(Seat(each.rank, each.local_rank, each) for each in ranks)
        self.secured, self._asked, self._impatient = {}, set(), False

    def waiting(self) -> tuple[Seat, ...]:
        return tuple(seat for seat in self.seats if seat.process is None and not seat.exited)

    def start(self, seat: Seat, process: Process, descriptors: tuple[int, ...]) -> bool:
        """Release a parked process into `seat`. False when it died meanwhile."""
        order = Do("start", self.launch, seat.order, local_rank=seat.local_rank)
        try:
            channel.send(process.control, order, descriptors)
        except channel.Closed:
            return False
        self.take(seat, process)
        return True

    def take(self, seat: Seat, process: Process) -> None:
        seat.process = process
        folder = self.home.logs / f"gen-{self.generation:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"rank-{seat.rank}.log"
        try:
            process.log.replace(target)  # the descriptors that are open on it stay valid
            process.log = target
        except OSError:  # a full disk costs the log its place, not the run
            return

    def environment(self, seat: Seat) -> dict[str, str]:
        """Return the environment of a rank that no warm process carries."""
        assert self.launch is not None
        order = Do("start", self.launch, seat.order, local_rank=seat.local_rank)
        mine = {
            "HOLDFAST_START": json.dumps(asdict(order)),
            "HOLDFAST_DIRECTORY": str(self.home.directory),
            "HOLDFAST_NPROC": str(self.home.nproc),
        }
        return {**os.environ, **rank_environment(self.launch, seat.order), **mine}

    def hear(self, process: Process, said: Say) -> None:
        seat = next((s for s in self.seats if s.process is process), None)
        if seat is None:
            return
        if said.what == "failing" and said.ending is not None:
            seat.ending = seat.ending or said.ending
        elif said.what == "flag" and said.flag is not None:
            seat.flag = said.flag
        elif said.marks is not None:
            seat.marks = said.marks
        elif said.what == "secured" and said.secured is not None:
            self._secured(said.secured)

    def lose(self, process: Process, ended: Ending) -> None:
        self.dying.discard(process)
        for seat in self.seats:
            if seat.process is process:
                seat.ending = ended if seat.ending is None or ended.signal else seat.ending
                seat.exited = True
                self._finish_securing()

    # -- just in time

    def ask_lowest(self) -> bool:
        """Ask the survivors at the lowest step for their state: what they hold, all can have.

        A rank inside the optimizer's writes has left its private state of the step being made, so it
        counts as one step further. True when somebody was asked or there is nobody to ask.
        """
        if self.secure_asked == self.generation or self._asked:
            return False
        steps = {seat: self._position(seat) for seat in self._survivors()}
        able = {seat: step for seat, step in steps.items() if step is not None}
        if not able:
            self._done_securing()
            return True
        lowest = min(able.values())
        self._ask([seat for seat, step in able.items() if step == lowest])
        return True

    def ask_rest(self, generation: int) -> None:
        if generation != self.generation or self.secure_asked == generation:
            return
        self._ask([seat for seat in self._survivors() if seat.rank not in self._asked])

    def end_stopped(self) -> None:
        """Kill those that are stopped: they answer nothing, and one within a copy holds the others' place."""
        for seat in self._survivors():
            if seat.process and osproc.state_of(seat.process.pid)[0] == "T":
                seat.process.kill(signal.SIGKILL)

    def lose_patience(self, generation: int) -> None:
        """From now on, who has not answered is killed for one that found no place for its whole state."""
        if generation == self.generation and self.secure_asked != generation:
            self._impatient = True
            self._make_room()

    def _make_room(self) -> None:
        """Who answered is not within a copy; the others may be, and get no further (a rank that spins)."""
        refused = [s for s in self._survivors() if (a := self.secured.get(s.rank)) and a.why == NO_ROOM]
        silent = [s for s in self._survivors() if s.rank not in self.secured]
        if not refused or not silent:
            return
        for seat in silent:
            assert seat.process is not None
            seat.process.kill(signal.SIGKILL)
        for seat in refused:
            del self.secured[seat.rank]
        self._ask(refused)

    def copy_s(self) -> float:
        """Return what a snapshot has taken last on this member, 0 if there was none."""
        found = [read for seat in self._survivors() if (read := self._read(seat)) is not None]
        return max(map(progress.copy_s, found), default=0.0)

    def give_up_securing(self, generation: int) -> None:
        if generation == self.generation:
            self._done_securing()

    def _survivors(self) -> list[Seat]:
        return [s for s in self.seats if s.process and s.process.pid and not s.exited]

    def _position(self, seat: Seat) -> int | None:
        """Return the step that this rank could give, None while it cannot run at all."""
        assert seat.process is not None
        if seat.process.killed or osproc.state_of(seat.process.pid)[0] in "TZXt":
            return None
        found = self._read(seat)
        return None if found is None else found.step + (found.write_seq & 1)

    def _read(self, seat: Seat) -> page.Progress | None:
        """Return what this rank's page says, None when it says nothing of this generation."""
        try:
            with (self.home.directory / f"page-{seat.local_rank}.bin").open("rb") as file:
                view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        with view:
            found = page.read(view)
        return found if found is not None and found.generation == self.generation else None

    def _ask(self, seats: list[Seat]) -> None:
        for seat in seats:
            assert seat.process is not None
            self._asked.add(seat.rank)
            try:
                channel.send(seat.process.control, Do("secure", generation=self.generation))
            except (channel.Closed, OSError):
                continue
        self._finish_securing()

    def _secured(self, answer: Secured) -> None:
        self.secured[answer.rank] = answer
        if answer.whole:
            self._done_securing()
        elif self._impatient:
            self._make_room()
        self._finish_securing()

    def _finish_securing(self) -> None:
        """Stop waiting once nobody who could still answer is left."""
        left = {s.rank for s in self._survivors()} & self._asked - set(self.secured)
        if self._asked and not left and not {s.rank for s in self._survivors()} - self._asked:
            self._done_securing()

    def _done_securing(self) -> None:
        self.secure_asked = self.generation

    # -- ends

    def drill(self, local_rank: int, what: str) -> None:
        for seat in self._survivors():
            if seat.local_rank != local_rank or seat.process is None:
                continue
            if what in ("kill", "stop"):
                process = seat.process
                os.kill(process.pid, 9 if what == "kill" else 19)
                continue
            try:
                channel.send(seat.process.control, Do("drill", drill=what))
            except (channel.Closed, OSError):
                continue

    def alive(self) -> bool:
        return bool(self._survivors()) or bool(self.dying)

    def has(self, process: Process) -> bool:
        return any(seat.process is process for seat in self.seats)

    def pids(self) -> set[int]:
        mine = {seat.process.pid for seat in self.seats if seat.process}
        return mine | {process.pid for process in self.dying}

    def kill_all(self) -> None:
        self.signal_all(9)

    def signal_all(self, signum: int) -> None:
        for seat in self._survivors():
            assert seat.process is not None
            seat.process.kill(signum)
