"""The warm processes of one member: made from a zygote, parked, handed out."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.launcher.worker_process import WorkerProcess
from holdfast.process import executable, linux, logs
from holdfast.process.executable import Unstartable
from holdfast.protocol import codec, environment, rank_channel
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker import cold_start, nested_scripts, script_source
from holdfast.worker import zygote as warm
from holdfast.worker.program import Program
from holdfast.worker.script_source import ProgramSources
from holdfast.worker.zygote import Zygote

UNJOINED_BYTES = 16_000  # of what one printed that ended before it joined: nobody has seen that
MAX_FAILURES = 3  # warm processes in a row that died before they were parked: from then on with pauses
LONGEST_PAUSE_S = 60.0  # what the script reads before it joins may come back at any time
REST = 4  # a pause is this times as long as the try before it, at least: ranks that train need the cores
MOST_REST_S = 600.0  # a try may also take long because what it reads does not answer
LOGS = 64  # of processes that failed in a row
PAUSE_S = 1.0  # before the next try, and twice as long each time


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """Where a member's processes live, and what they are told at birth."""

    directory: Path
    logs: Path
    name: str
    nproc: int
    import_root: Path
    tracer: int


@dataclass(slots=True)
class WarmPool:
    """Keeps one parked process per local rank, made ahead of need.

    One that dies before it is parked is made again for as long as the nest is open: at once the first times,
    then with pauses that grow. `failures` counts them since one was parked, `tries` since ranks were last
    `needed` too.
    """

    program: Program
    home: MemberSettings
    selector: selectors.BaseSelector
    on_say: Callable[[WorkerProcess, WorkerMessage], None]
    on_gone: Callable[[WorkerProcess], None]
    strategy: str = "park"
    warm: dict[int, WorkerProcess] = field(default_factory=dict)
    failures: int = 0
    tries: int = 0
    last_ending: Ending | None = None
    zygote: Zygote | None = None
    kept: ProgramSources | None = None  # the program's sources, as the run began
    _forkable: bool = True
    _count: int = 0
    _closed: bool = False
    later: Callable[[float, Callable[[], None]], None] = lambda _seconds, _call: None
    _pauses: int = 0  # since one was parked, or ranks were needed
    _pause: object = None  # the one that is going on
    _needed: bool = False  # ranks wait for processes
    _opened_s: float = 0.0  # when the zygote was started

    def open(self) -> None:
        """Listen to the zygote, started now unless there is one; none if processes are made one by one."""
        if self.strategy != "park" or self.program.kind == "other" or not self._forkable:
            return
        if self.zygote is None:
            ours, theirs = rank_channel.pair()
            log, self._opened_s = self._new_log("zygote"), time.monotonic()
            try:
                with theirs:
                    child = self._spawn(single=False, control=theirs, log=log, local_rank=-1)
            except Unstartable as error:
                ours.close()
                self._give_up(error)
                return
            self.zygote = Zygote(child.pid, ours, log=log)
            child.returncode = 0  # we collect it; Popen must not
        self.selector.register(self.zygote.line, selectors.EVENT_READ, self._on_zygote)

    def fill(self) -> None:
        """Begin a warm process for every local rank that has none. Returns at once."""
        if self._closed or self._pause is not None or self.program.kind == "other":
            return
        if self.strategy == "cold":
            return
        if self.zygote is not None and linux.state_of(self.zygote.pid)[0] == "T":
            self.zygote.kill()  # stopped: it would never fork again; its end is heard, and another is made
            return
        for local_rank in range(self.home.nproc):
            if local_rank not in self.warm and self._pause is None:
                self._make(local_rank)

    def needed(self) -> None:
        """Let the next `fill` try at once: ranks are to be started, and what failed before may work now."""
        self.tries, self._pauses, self._pause, self._needed = 0, 0, None, True

    def failed(self, ending: Ending, log: Path | None = None, took_s: float = 0.0) -> None:
        """Note how a process ended that was to become a warm one, and make another, perhaps after a pause.

        What it printed is kept of the first `LOGS` in a row only: they may be days of tries.
        """
        if log is not None and self.failures >= LOGS:
            with contextlib.suppress(OSError):
                log.unlink()
        self.failures += 1
        self.tries += 1
        self.last_ending = ending
        if self.failures < MAX_FAILURES:
            self.fill()
        elif self._pause is None and not self._closed:
            self._rest(0.0 if self._needed else min(REST * took_s, MOST_REST_S))

    def _rest(self, least_s: float) -> None:
        mine = self._pause = object()

        def over() -> None:
            if self._pause is mine:
                self._pause = None
                self.fill()

        self.later(max(least_s, pause_s(self._pauses)), over)
        self._pauses += 1

    def take(self, local_rank: int) -> WorkerProcess | None:
        """Return the parked process of `local_rank` and forget it; None while there is none."""
        process = self.warm.get(local_rank)
        if process is None or not process.parked:
            return None
        return self.warm.pop(local_rank)

    def make_cold(self, local_rank: int, argv: tuple[str, ...], variables: dict[str, str]) -> WorkerProcess:
        """Start `argv` with the rank's `variables`, and return it running.

        As it stands, but for a script whose file is not as it was: then the one of the run's start.

        Raises `Unstartable` where the program is to blame, `OSError` where the machine is.
        """
        ours, theirs = rank_channel.pair()
        process = self._process(local_rank, ours)
        mark = nested_scripts.rank_variables(self.home.directory, local_rank)
        variables = {**variables, **mark, environment.CONTROL: str(theirs.fileno())}
        passed = [theirs.fileno()]
        if (
            self.kept is not None
            and self.kept.main is not None
            and script_source.change_of(self.kept.files[0])
        ):
            argv = self.program.entered(cold_start.BOOT_CODE, self.home.import_root)
            variables[environment.SOURCES] = str(self.kept.descriptor)
            passed.append(self.kept.descriptor)
        try:
            with theirs, logs.opened(process.log) as log:
                child = self._started(
                    argv,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
                    start_new_session=True,
                )
        except BaseException:
            self.selector.unregister(ours)
            ours.close()
            raise
        self._adopt(process, child.pid)
        child.returncode = 0  # we reap it by its pidfd; Popen must not
        return process

    def close(self) -> None:
        """Kill the zygote and all that is warm, and make no more; the launcher reaps them."""
        self._closed = True
        for process in self.warm.values():
            process.kill(9)
        if self.zygote is not None:
            self.zygote.kill()

    def owns(self, pid: int) -> bool:
        return self.zygote is not None and self.zygote.pid == pid

    @property
    def unborn(self) -> bool:
        return any(process.pid == 0 for process in self.warm.values())

    def _make(self, local_rank: int) -> None:
        if self.strategy == "park" and self._forkable:
            if self.zygote is None:
                self.open()
            if self.zygote is None or not self.zygote.ready:
                return  # `fill` is called again when the zygote has spoken
            ours, theirs = rank_channel.pair()
            process = self._process(local_rank, ours)
            with logs.opened(process.log) as log:
                asked = self.zygote.fork(local_rank, theirs.fileno(), log.fileno())
            theirs.close()
            if not asked:
                self.selector.unregister(ours)
                ours.close()
                return
        else:
            ours, theirs = rank_channel.pair()
            process = self._process(local_rank, ours)
            try:
                with theirs:
                    child = self._spawn(single=True, control=theirs, log=process.log, local_rank=local_rank)
            except Unstartable as error:
                self.selector.unregister(ours)
                ours.close()
                self._give_up(error)
                return
            child.returncode = 0
        self.warm[local_rank] = process

    def _spawn(
        self, *, single: bool, control: socket.socket, log: Path, local_rank: int
    ) -> subprocess.Popen[bytes]:
        with logs.opened(log) as out:
            number = os.dup(out.fileno())
            kept = self.kept.descriptor if self.kept is not None else -1
            given = warm.zygote_spec(
                self.program,
                parent=os.getpid(),
                tracer=self.home.tracer,
                directory=str(self.home.directory),
                nproc=self.home.nproc,
                single=single,
                control=control.fileno(),
                log=number,
                kept=kept,
                local_rank=local_rank,
            )
            try:
                return self._started(
                    self.program.entered(warm.BOOT_CODE, self.home.import_root),
                    env={**os.environ, environment.WARM: given},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=[each for each in (control.fileno(), number, kept) if each >= 0],
                )
            finally:
                os.close(number)

    def _give_up(self, error: Unstartable) -> None:
        """The interpreter is to blame: it would be no better at once."""
        now_ns = time.monotonic_ns()
        self.failures = max(self.failures, MAX_FAILURES - 1)
        self.failed(Ending(now_ns, 2, fail="bad_input", failed_ns=now_ns, message=str(error)))

    def _started(self, argv: Sequence[str], **given: Any) -> subprocess.Popen[bytes]:
        """Start a process. Raises `Unstartable`, `OSError`."""
        try:
            return subprocess.Popen(argv, **given)
        except OSError as error:
            if not executable.is_for_good(error):
                raise
            path = Path(shutil.which(argv[0]) or argv[0])
            raise Unstartable(executable.explained(argv[0], path, error)) from None

    def _process(self, local_rank: int, ours: socket.socket) -> WorkerProcess:
        process = WorkerProcess(local_rank, ours, self._new_log(str(local_rank)))
        nested_scripts.clear(self.home.directory, local_rank)
        self.selector.register(ours, selectors.EVENT_READ, lambda: self._on_rank(process))
        return process

    def _new_log(self, what: str) -> Path:
        self._count += 1
        return self.home.logs / "warm" / f"{self.home.name}-{what}-{os.getpid()}-{self._count}.log"

    def _on_zygote(self) -> None:
        assert self.zygote is not None
        try:
            said, _ = rank_channel.receive(self.zygote.line, WorkerMessage)
        except rank_channel.Closed:
            self._lose_zygote()
            return
        self.zygote.ready = said.what == "ready"
        if said.what == "unforkable":
            self._forkable = False  # an import started threads: a fork would copy their locks
            self._lose_zygote()
        self.fill()

    def _lose_zygote(self) -> None:
        assert self.zygote is not None
        zygote, self.zygote = self.zygote, None
        self.selector.unregister(zygote.line)
        if not self._forkable:
            zygote.end()
            return
        status = zygote.lost()
        printed = logs.tail(zygote.log, UNJOINED_BYTES) if zygote.log is not None else ""
        took_s = time.monotonic() - self._opened_s if not zygote.ready else 0.0
        self.failed(zygote_ending(status, printed, time.monotonic_ns()), zygote.log, took_s)

    def hear_out(self, process: WorkerProcess) -> None:
        """Take what a process has said before it ended: the kernel may tell of its end first."""
        while process.control.fileno() in self.selector.get_map() and self._on_rank(process):
            pass

    def unhear(self, process: WorkerProcess) -> None:
        """Listen to a process no longer."""
        if process.control.fileno() in self.selector.get_map():
            self.selector.unregister(process.control)

    def _on_rank(self, process: WorkerProcess) -> bool:
        """Take one message. False when there is none now, or no more will come."""
        try:
            said, _ = rank_channel.receive(process.control, WorkerMessage, wait=False)
        except BlockingIOError:
            return False
        # what the script forks holds the line as well, and may write anything to it
        except codec.InvalidMessage:
            return True
        except rank_channel.Closed:
            self.selector.unregister(process.control)
            if process.pid == 0:
                self.on_gone(process)
            return False
        if said.what == "born" and process.pid == 0:
            self._adopt(process, said.pid)
        elif said.what == "parked":
            process.parked = True
            self.failures = self.tries = self._pauses = 0
            self._needed = False
        elif said.what == "unparkable":
            self._go_cold()
        elif said.what == "failing" and said.pid in (0, process.pid):
            if process.said is None or process.said.unwinding:
                process.said = said.ending
        elif said.what == "withdrawn" and process.said is not None and process.said.unwinding:
            process.said = None
        self.on_say(process, said)
        return True

    def _go_cold(self) -> None:
        """The script has used a GPU before it waits: each process must be made when its GPU is known."""
        self.strategy = "cold"
        for process in self.warm.values():
            process.kill(9)
        self.warm.clear()
        if self.zygote is not None:
            self.selector.unregister(self.zygote.line)
            self.zygote.end()
            self.zygote = None

    def _adopt(self, process: WorkerProcess, pid: int) -> None:
        process.pid = pid
        try:
            process.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # died at once and reaped by a sweep: the channel tells
            return
        if process.killed:
            process.kill(process.killed)
        self.selector.register(process.pidfd, selectors.EVENT_READ, lambda: self.on_gone(process))


def pause_s(before: int) -> float:
    """Return how long to wait for the next try, after so many pauses in a row."""
    return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(before, 16))


def zygote_ending(status: int | None, printed: str, now_ns: int) -> Ending:
    """Say how a zygote ended that nobody asked to, from its wait status: what it printed last, and with what.

    None is one that was killed, or closed its line and went on.
    """
    code, signum, how = 1, None, "closed its connection"
    if status is not None and os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        how = f"was killed by {linux.signal_name(signum)}"
    elif status is not None:
        code = os.WEXITSTATUS(status) or 1  # 0: it did not get to the script, whatever it thinks
        how = f"exited with code {os.WEXITSTATUS(status)}"
    what = f"the process that imports what the script imports {how}"
    said = printed.rstrip()
    what += "" if said else ", and printed nothing"
    message = f"{said}\n{what}" if said else what
    return Ending(now_ns, None if signum else code, signum, False, "", 0, message)


def unjoined_ending(ended: Ending, printed: str, *, refused: bool) -> Ending:
    """Say how one ended that had not joined; `refused`: something that its script has started would have.

    Then it is no good end, whatever its exit code says: nothing is trained.
    """
    if refused and ended.signal is None:
        said = (
            printed
            if nested_scripts.LAUNCHED_INDIRECTLY in printed
            else f"{printed}{nested_scripts.REFUSED_BELOW}"
        )
        return replace(ended, code=2, fail="bad_input", message=said)
    return replace(ended, message=printed or ended.message)  # nobody has seen that: it says more
