"""The pool of a member's warm processes. They are forked from a zygote and parked until ranks need them."""

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

from holdfast import exit_codes
from holdfast.launcher.workers.process_watch import ProcessWatch
from holdfast.launcher.workers.worker_process import WorkerProcess
from holdfast.launcher.workers.zygote_handle import Zygote
from holdfast.process import executable, linux, logs
from holdfast.process.executable import Unstartable
from holdfast.protocol import environment, rank_channel
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker import nested_scripts, script_source
from holdfast.worker.program import Program
from holdfast.worker.script_source import ProgramSources
from holdfast.worker.zygote import BOOT_CODE, COLD_BOOT_CODE, zygote_spec

UNJOINED_BYTES = 16_000  # how much output is kept of a process that exited before it joined
# After this many consecutive failures to make a warm process, the pool pauses before each further attempt.
MAX_FAILURES = 3
# The limit on these pauses. A file that the script needs before it joins may reappear at any time.
LONGEST_PAUSE_S = 60.0
# A pause is at least this many times as long as the attempt before it, because the ranks need the cores.
PAUSE_PER_TRY = 4
# The limit on such a pause. An attempt may be slow merely because storage does not respond.
LONGEST_PAUSE_AFTER_TRY_S = 600.0
MAX_LOGS = 64  # the logs of at most this many consecutive failed processes are kept
PAUSE_S = 1.0  # the first pause; each further pause is twice as long


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """The settings that all processes of a member share."""

    directory: Path  # the member's directory in the memory volume
    logs: Path
    name: str
    nproc: int
    import_root: Path  # contains only `holdfast`; the last entry of the processes' import path
    tracer: int  # the pid of a process that, like its descendants, may read the workers' stacks


@dataclass(slots=True)
class WarmPool:
    """Keeps one parked process ready for each local rank.

    While the pool is open, it replaces each process that dies before it is parked. At first it does so
    immediately, later with increasing pauses. `failures` counts such deaths since a process was last parked.
    `tries` counts the same deaths, but is also reset to 0 when ranks begin to wait.

    `watch` watches every process that the pool makes. `after` schedules a call after a number of seconds.
    `explain` adds the reason to the ending of a process that the kernel may have killed.
    `strategy` is "park" (fork from a zygote), "spawn" (start an interpreter for each process) or "cold" (make
    no warm processes).
    """

    sources: ProgramSources  # the script's sources as they were when the run began
    settings: MemberSettings
    selector: selectors.BaseSelector
    watch: ProcessWatch
    after: Callable[[float, Callable[[], None]], None]
    strategy: str = "park"
    zygote: Zygote | None = None
    explain: Callable[[Ending], Ending] = lambda ended: ended
    # The processes in the pool, by local rank.
    processes: dict[int, WorkerProcess] = field(default_factory=dict)
    failures: int = 0
    tries: int = 0
    last_ending: Ending | None = None
    _forkable: bool = True
    _count: int = 0  # the number of logs created
    _closed: bool = False
    _pauses: int = 0  # the number of pauses since a process was parked or ranks began to wait
    _pause: object = None  # the pause in progress
    _ranks_wait: bool = False
    _opened_s: float = 0.0  # when the zygote was started

    @property
    def program(self) -> Program:
        return self.sources.program

    def open(self) -> None:
        """Start a zygote unless one exists, and receive its messages. Does nothing if no zygote is needed."""
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
                self._record_unstartable(error)
                return
            self.zygote = Zygote(child.pid, ours, log=log)
            child.returncode = 0  # keeps Popen from reaping the process; the launcher reaps it
        self.selector.register(self.zygote.line, selectors.EVENT_READ, self._on_zygote)

    def fill(self) -> None:
        """Begin to make a warm process for every local rank that has none. Never waits."""
        if self._closed or self._pause is not None or self.program.kind == "other":
            return
        if self.strategy == "cold":
            return
        if self.zygote is not None and linux.state_of(self.zygote.pid)[0] == "T":
            # A signal has stopped the zygote, so it would never fork. A new zygote starts when this one has
            # ended.
            self.zygote.kill()
            return
        for local_rank in range(self.settings.nproc):
            if local_rank not in self.processes and self._pause is None:
                self._make(local_rank)

    def receive(self, process: WorkerProcess, message: WorkerMessage) -> None:
        """Record that a process is parked, or that the script cannot be parked. Ignore other messages."""
        if message.what == "parked":
            process.parked = True
            self.failures = self.tries = self._pauses = 0
            self._ranks_wait = False
        elif message.what == "unparkable":
            self._go_cold()

    def retry_at_once(self) -> None:
        """End the pause between attempts: ranks are waiting, and the cause of the failures may be gone."""
        self.tries, self._pauses, self._pause, self._ranks_wait = 0, 0, None, True

    def failed(self, ending: Ending, log: Path | None = None, took_s: float = 0.0) -> None:
        """Record how a process exited before it became warm, and replace it, perhaps after a pause.

        Only the logs of the first `MAX_LOGS` consecutive failures are kept, because attempts may continue for
        days.
        """
        if log is not None and self.failures >= MAX_LOGS:
            with contextlib.suppress(OSError):
                log.unlink()
        self.failures += 1
        self.tries += 1
        self.last_ending = ending
        if self.failures < MAX_FAILURES:
            self.fill()
        elif self._pause is None and not self._closed:
            self._pause_for(
                0.0 if self._ranks_wait else min(PAUSE_PER_TRY * took_s, LONGEST_PAUSE_AFTER_TRY_S)
            )

    def _pause_for(self, least_s: float) -> None:
        pause = self._pause = object()

        def end_pause() -> None:
            if self._pause is pause:
                self._pause = None
                self.fill()

        self.after(max(least_s, pause_s(self._pauses)), end_pause)
        self._pauses += 1

    def pop(self, local_rank: int) -> WorkerProcess | None:
        """Remove the parked process of `local_rank` from the pool and return it; None if there is none."""
        process = self.processes.get(local_rank)
        if process is None or not process.parked:
            return None
        return self.processes.pop(local_rank)

    def make_cold(self, local_rank: int, argv: tuple[str, ...], variables: dict[str, str]) -> WorkerProcess:
        """Start `argv` with the rank's `variables`, and return the process.

        If the script's file has changed since the run began, the process runs the original version.

        Raises `Unstartable` if the kernel refuses the program, and `OSError` if the machine lacks resources.
        """
        ours, theirs = rank_channel.pair()
        process = self._process(local_rank, ours)
        mark = nested_scripts.rank_variables(self.settings.directory, local_rank)
        variables = {**variables, **mark, environment.CONTROL: str(theirs.fileno())}
        passed = [theirs.fileno()]
        if self.sources.main is not None and script_source.change_of(self.sources.files[0]):
            argv = self.program.entered(COLD_BOOT_CODE, self.settings.import_root)
            variables[environment.SOURCES] = str(self.sources.descriptor)
            passed.append(self.sources.descriptor)
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
            self.watch.remove(process)
            raise
        self.watch.born(process, child.pid)
        child.returncode = 0  # keeps Popen from reaping it; the launcher reaps it through its pidfd
        return process

    def close(self) -> None:
        """Kill the zygote and all warm processes, and make no new ones. The launcher must reap them."""
        self._closed = True
        for process in self.processes.values():
            process.kill(9)
        if self.zygote is not None:
            self.zygote.kill()

    def is_zygote(self, pid: int) -> bool:
        return self.zygote is not None and self.zygote.pid == pid

    @property
    def has_unstarted(self) -> bool:
        """True while a new process has not yet reported its pid."""
        return any(process.pid == 0 for process in self.processes.values())

    def _make(self, local_rank: int) -> None:
        if self.strategy == "park" and self._forkable:
            self._make_by_fork(local_rank)
        else:
            self._make_by_start(local_rank)

    def _make_by_fork(self, local_rank: int) -> None:
        if self.zygote is None:
            self.open()
        if self.zygote is None or not self.zygote.ready:
            return  # `fill` is called again when the zygote reports that it is ready
        ours, theirs = rank_channel.pair()
        process = self._process(local_rank, ours)
        with logs.opened(process.log) as log:
            asked = self.zygote.fork(local_rank, theirs.fileno(), log.fileno())
        theirs.close()
        if not asked:
            self.watch.remove(process)
            return
        self.processes[local_rank] = process

    def _make_by_start(self, local_rank: int) -> None:
        ours, theirs = rank_channel.pair()
        process = self._process(local_rank, ours)
        try:
            with theirs:
                child = self._spawn(single=True, control=theirs, log=process.log, local_rank=local_rank)
        except Unstartable as error:
            self.watch.remove(process)
            self._record_unstartable(error)
            return
        child.returncode = 0  # keeps Popen from reaping the process; the launcher reaps it
        self.processes[local_rank] = process

    def _spawn(
        self, *, single: bool, control: socket.socket, log: Path, local_rank: int
    ) -> subprocess.Popen[bytes]:
        with logs.opened(log) as out:
            number = os.dup(out.fileno())
            kept = self.sources.descriptor
            spec = zygote_spec(
                self.program,
                parent=os.getpid(),
                tracer=self.settings.tracer,
                directory=str(self.settings.directory),
                nproc=self.settings.nproc,
                single=single,
                control=control.fileno(),
                log=number,
                kept=kept,
                local_rank=local_rank,
            )
            try:
                return self._started(
                    self.program.entered(BOOT_CODE, self.settings.import_root),
                    env={**os.environ, environment.WARM: spec},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=[each for each in (control.fileno(), number, kept) if each >= 0],
                )
            finally:
                os.close(number)

    def _record_unstartable(self, error: Unstartable) -> None:
        """Record that the interpreter cannot be started, and pause, because a retry would fail too."""
        now_ns = time.monotonic_ns()
        self.failures = max(self.failures, MAX_FAILURES - 1)
        self.failed(
            Ending(now_ns, exit_codes.BAD_INPUT, fail="bad_input", failed_ns=now_ns, message=str(error))
        )

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
        nested_scripts.clear(self.settings.directory, local_rank)
        self.watch.add(process)
        return process

    def _new_log(self, what: str) -> Path:
        self._count += 1
        return self.settings.logs / "warm" / f"{self.settings.name}-{what}-{os.getpid()}-{self._count}.log"

    def _on_zygote(self) -> None:
        assert self.zygote is not None
        try:
            message, _ = rank_channel.receive(self.zygote.line, WorkerMessage)
        except rank_channel.Closed:
            self._lose_zygote()
            return
        self.zygote.ready = message.what == "ready"
        if message.what == "unforkable":
            self._forkable = False  # an import has started threads, and a fork would copy their locks
            self._lose_zygote()
        self.fill()

    def _lose_zygote(self) -> None:
        assert self.zygote is not None
        zygote, self.zygote = self.zygote, None
        self.selector.unregister(zygote.line)
        if not self._forkable or self._closed:  # the pool ended it on purpose, so this is not a failure
            zygote.end()
            return
        status = zygote.lost()
        printed = logs.tail(zygote.log, UNJOINED_BYTES) if zygote.log is not None else ""
        took_s = time.monotonic() - self._opened_s if not zygote.ready else 0.0
        self.failed(self.explain(zygote_ending(status, printed, time.monotonic_ns())), zygote.log, took_s)

    def _go_cold(self) -> None:
        """Stop making warm processes, because a script that uses a GPU before it joins needs its rank."""
        self.strategy = "cold"
        for process in self.processes.values():
            process.kill(9)
        self.processes.clear()
        if self.zygote is not None:
            self.selector.unregister(self.zygote.line)
            self.zygote.end()
            self.zygote = None


def pause_s(before: int) -> float:
    """Return how many seconds to wait before the next attempt, after `before` consecutive pauses."""
    return min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** min(before, 16))


def zygote_ending(status: int | None, printed: str, now_ns: int) -> Ending:
    """Describe how a zygote ended unexpectedly, using its last output and its wait status.

    `status` is None if the launcher killed it, or if it closed its channel and kept running.
    """
    code, signum, how = 1, None, "closed its connection"
    if status is not None and os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        how = f"was killed by {linux.signal_name(signum)}"
    elif status is not None:
        code = os.WEXITSTATUS(status) or 1  # even with exit code 0, it did not run the script
        how = f"exited with code {os.WEXITSTATUS(status)}"
    what = f"the process that imports the script's modules {how}"
    text = printed.rstrip()
    what += "" if text else " and printed nothing"
    message = f"{text}\n{what}" if text else what
    return Ending(now_ns, None if signum else code, signum, False, "", 0, message)


def unjoined_ending(ended: Ending, printed: str, *, refused: bool) -> Ending:
    """Return how a process that had not joined ended.

    `refused` is True if a descendant called `join` and was refused. In that case nothing was trained, so the
    process has failed, no matter which exit code it has.
    """
    if refused and ended.signal is None:
        has_reason = nested_scripts.LAUNCHED_INDIRECTLY in printed
        message = printed if has_reason else f"{printed}{nested_scripts.REFUSED_BELOW}"
        return replace(ended, code=exit_codes.BAD_INPUT, fail="bad_input", message=message)
    if ended.fail == "bad_input" and ended.message not in printed:  # the process itself does not print this
        return replace(ended, message="\n".join(filter(None, (printed.rstrip("\n"), ended.message))))
    return replace(ended, message=printed or ended.message)  # no rank's log contains this output
