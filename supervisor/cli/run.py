"""`holdfast run`: start and supervise a run, display it, and return the script's exit code."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import exit_codes
from holdfast.errors import BadInput
from holdfast.process import selector_loop
from holdfast.process.clock import seconds_to_next_tick
from holdfast.protocol import environment
from holdfast.worker import program, script_source
from supervisor.cli import run_messages
from supervisor.cli.command_options import RunOptions
from supervisor.controller.policy_options import policy_of, sidecar_environment
from supervisor.display.live import Display, display
from supervisor.display.news import IncidentRecords
from supervisor.display.run_follower import RunFollower
from supervisor.local import gpus
from supervisor.local.keeper.keeper import Finished, LocalKeeper
from supervisor.local.keeper.process_specs import RunSpec
from supervisor.local.volume import memory_volume
from supervisor.store import journal
from supervisor.store.run_directory import RunDir, open_for_run
from supervisor.view.model import Policy

TICK_S = 0.25
_ANNOUNCING = (signal.SIGUSR1, signal.SIGUSR2)  # a batch system sends one of these before SIGTERM
_ONCE = (signal.SIGHUP, *_ANNOUNCING)  # a repetition is not treated as a second request
_ALWAYS = (signal.SIGINT, signal.SIGQUIT)  # a shell has its background jobs ignore these two
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, *_ONCE)


def run(options: RunOptions) -> int:
    """Run the command to its end, and return its exit code. Raises `BadInput` before starting any process."""
    parsed = program.parse(list(options.command), Path.cwd())
    missing = program.check_start(parsed) or program.check_module(parsed, Path.cwd())
    if missing:
        raise BadInput(missing)
    wrong = program.check_syntax(parsed)
    if wrong is not None:
        print(wrong, file=sys.stderr)
        return 1
    if options.skip_bad_batches and not parsed.joins and parsed.kind != "other":
        raise BadInput(
            "--skip-bad-batches needs a script that calls holdfast.join, because Holdfast cannot skip batches"
            " in other scripts: omit the option"
        )
    api = _listen(options.port)
    run_dir = open_for_run(options.run_dir, time.time(), must_exist=options.resume)
    policy = policy_of_run(options)
    try:
        kept = script_source.read_sources(parsed)  # later edits to the script do not affect the run
        runtime, owner = memory_volume.create()
        _describe(run_dir, options, policy, runtime, api)
    except OSError as error:
        raise BadInput(f"the run cannot be set up: {error}") from None
    run_dir.name_latest(Path.cwd())
    keeper = LocalKeeper(_plan(options, run_dir, runtime, api, kept), api)
    try:
        return RunConsole(keeper, run_dir, options).until_end()
    finally:
        keeper.close()
        os.close(owner)


def policy_of_run(options: RunOptions) -> Policy:
    return policy_of(options, options.members, options.nproc_per_node, from_scratch=options.from_scratch)


def _listen(port: int) -> socket.socket:
    """Return a listening socket for the API. It stays open when the supervisor is restarted.

    Raises:
        BadInput: The port cannot be opened.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        raise BadInput(f"--port {port} {why}: choose another port, or 0 for any free port") from None
    return listener


def _describe(
    run_dir: RunDir, options: RunOptions, policy: Policy, runtime: Path, api: socket.socket
) -> None:
    described: dict[str, Any] = {
        "command": list(options.command),
        "policy": asdict(policy),
        "drills": not options.no_drills,
        "started": time.time(),
        "started_ns": time.monotonic_ns(),
        "journal_bytes": journal.size(run_dir.journal),  # the lines of earlier runs end here
        "pid": os.getpid(),
        "runtime": str(runtime),
        "api": f"http://127.0.0.1:{api.getsockname()[1]}",
    }
    run_dir.write_run(described)


def _plan(
    options: RunOptions,
    run_dir: RunDir,
    runtime: Path,
    api: socket.socket,
    kept: script_source.ProgramSources,
) -> RunSpec:
    if options.nproc_per_node * options.members > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    os.environ.setdefault(environment.PY_SPY, str(Path(sys.executable).with_name("py-spy")))
    settings = {
        environment.CHECKPOINTS: str(run_dir.checkpoints),
        environment.SUPERVISOR: f"http://127.0.0.1:{api.getsockname()[1]}",
        environment.TOKEN_FILE: str(run_dir.token_file),
        **sidecar_environment(options),
    }
    return RunSpec(
        command=tuple(options.command),
        nproc=options.nproc_per_node,
        gpus=gpus.gpus(os.environ),
        warm=options.warm,
        runtime=runtime,
        run_dir=run_dir.path,
        settings=settings,
        supervisor=(str(run_dir.path),),
        kept=kept,
    )


class RunConsole:
    """Displays a run in the terminal, and stops it on signals."""

    def __init__(self, keeper: LocalKeeper, run_dir: RunDir, options: RunOptions) -> None:
        self.keeper = keeper
        self.run_dir = run_dir
        self.notes = () if options.quiet else options.notes
        self.options = options
        self.following = RunFollower(run_dir)
        known = IncidentRecords(self.following.incident, run_dir.newest_incident())
        self.screen: Display = display(sys.stdout, known, plain=options.plain, quiet=options.quiet)
        self.interrupts = 0
        self.repeats = selector_loop.SignalRepeats()
        self.announced = False  # True if the last signal announced a SIGTERM
        self.unshown = False  # True after the user was told that the status cannot be displayed

    def until_end(self) -> int:
        self._take_signals()
        for note in (*self.notes, *self._trained_before()):
            self.screen.say(f"holdfast: {note}")
        self.keeper.start()
        try:
            while self.keeper.finished is None:
                self.keeper.poll(seconds_to_next_tick(TICK_S))
                self._show()
            code = self._end(self.keeper.finished)
        finally:
            lost = self.screen.close()
        if lost:
            with suppress(OSError):  # stderr may be a file on the same disk
                print(f"holdfast: the output cannot be written: {lost}", file=sys.stderr, flush=True)
        return code or (exit_codes.NOT_WRITTEN if lost else 0)

    def _trained_before(self) -> list[str]:
        if self.options.from_scratch:
            return []
        before, stored = self.run_dir.before, self.run_dir.has_checkpoints()
        return run_messages.before(before, self.run_dir.path, stored, self.options.resume)

    def _show(self) -> None:
        now_s = time.monotonic()
        for rank, text in self.following.poll(now_s):
            self.screen.line(rank, text)
        for news in (*self._taken_news(), self.following.news(now_s)):
            if news:
                self.screen.say(f"holdfast: {news}")
        self._update(now_s)

    def _update(self, now_s: float) -> None:
        try:
            self.screen.update(self.following.status, now_s)
        except Exception as error:  # no content of status.json may end the run
            if not self.unshown:
                self.unshown = True
                self.screen.say(f"holdfast: the status cannot be displayed: {type(error).__name__}: {error}")

    def _taken_news(self) -> list[str]:
        news, self.keeper.news = self.keeper.news, []
        return news

    def _end(self, finished: Finished) -> int:
        self.keeper.close()
        for rank, text in self.following.close():
            self.screen.line(rank, text)
        self._show()
        if finished.message:
            self.screen.say(finished.message.rstrip())
        status = self.following.status
        for line in run_messages.after(status, finished.code, self.options.given, self.run_dir.path):
            self.screen.say(f"holdfast: {line}")
        why = run_messages.closing_line(finished.why, finished.completion, status)
        self.screen.say(f"holdfast: {why} (exit code {finished.code})")
        return finished.code

    def _take_signals(self) -> None:
        """Handle the signals that end or suspend the run.

        A signal that is ignored at startup, as under nohup, remains ignored. SIGINT and SIGQUIT are always
        handled.
        """
        handled = (
            signum
            for signum in (*ENDING, signal.SIGTSTP)
            if signum in _ALWAYS or signal.getsignal(signum) != signal.SIG_IGN
        )
        self._wakeup = selector_loop.SignalWakeup(self.keeper.selector, handled, self._signalled)

    def _signalled(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum == signal.SIGTSTP:
                self._suspend()
            elif signum in ENDING:
                self._interrupted(signum)

    def _interrupted(self, signum: int) -> None:
        """End the run: cleanly at the first signal, immediately at the second, and with SIGKILL at the third.

        Signals within a second of each other are one request, because senders repeat it (`SignalRepeats`). A
        later SIGHUP is also treated as a repetition. A batch system announces the end of the allotted time
        with SIGUSR1 or SIGUSR2. The SIGTERM that follows is not treated as a second request.
        """
        now_s = time.monotonic()
        if signum == signal.SIGTERM and self.announced:
            self.announced = False
            self.repeats.counted(now_s)
            return
        if self.repeats.is_repeat(now_s) or (signum in _ONCE and self.interrupts):
            return
        self.announced = signum in _ANNOUNCING
        self.interrupts += 1
        if self.interrupts == 1:
            name = signal.Signals(signum).name
            line = run_messages.stopping(self.following.status, name, self.options.grace_s)
            self.screen.say(f"holdfast: {line}; press Ctrl-C again to stop immediately")
            self.keeper.ask_stop("interrupt" if signum == signal.SIGINT else "terminate")
        elif self.interrupts == 2:
            self.keeper.ask_stop("now")
        else:
            self.keeper.hurry()
        self.repeats.counted(time.monotonic())  # the terminal may have delayed the line above

    def _suspend(self) -> None:
        """Stop this process after Ctrl-Z, as usual, but first print what this means for the run."""
        self.screen.say(
            "holdfast: suspended: training continues, but processes that die are not restarted until `fg`"
            " or `bg`"
        )
        self.screen.flush()
        os.kill(os.getpid(), signal.SIGSTOP)
