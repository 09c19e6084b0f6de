"""`holdfast demo`: train a GPT twice, once undisturbed and once with nine faults, and compare the weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import exit_codes, parts
from holdfast.errors import BadInput
from holdfast.protocol import drills
from holdfast.protocol.drills import DrillName
from supervisor.cli import command_options, control
from supervisor.cli.status import LEDGER_WORDS
from supervisor.display.ansi import Style
from supervisor.display.screen import say, style_of
from supervisor.store.run_directory import RunDir
from supervisor.wording import count, outcome, percent, seconds, what

WORLD = ("--members", "2", "--nproc-per-node", "1")
TRAIN = ("-m", "trainer.gpt", "--log-every", "50", "--val-every", "150")
LIMIT_S = 600.0  # for each of the two runs; enough even for a very slow machine
NOTHING = hashlib.sha256().hexdigest()  # the digest of a part without tensors
_BAR = 40


@dataclass(frozen=True, slots=True)
class DemoFault:
    """A fault to inject."""

    what: DrillName
    rank: int
    words: str  # the announcement


FAULTS = (
    DemoFault("kill", 1, "kill -9 of rank 1 (as the kernel does when memory runs out)"),
    DemoFault("stop", 0, "SIGSTOP of rank 0 (the process exists but does nothing)"),
    DemoFault("hang", 1, "rank 1 never enters the next collective"),
    DemoFault("nan", 0, "rank 0 computes a NaN, which spoils every gradient"),
    DemoFault("exit", 1, f"rank 1 exits without a message (exit code {drills.EXIT_CODE})"),
    DemoFault("member", 1, "the member of rank 1 is killed: processes, sockets and memory"),
    DemoFault("sidecar", 0, "kill -9 of the sidecar of rank 0"),
    DemoFault("supervisor", 0, "kill -9 of the supervisor"),
    DemoFault("kill", 0, "kill -9 of rank 0, right after the supervisor was restarted"),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to train, for how long, and which faults to inject."""

    steps: int
    pace_s: float  # the minimum step time of the broken run, which must last until the last fault
    train: tuple[str, ...]
    drills: tuple[DemoFault, ...]


_TINY = (*TRAIN, "--tiny", "--context", "128", "--batch", "8")
WHOLE = Scenario(450, 0.12, TRAIN, FAULTS)
QUICK = Scenario(240, 0.06, _TINY, (FAULTS[0], FAULTS[3], FAULTS[5]))


def run(command: command_options.Demo) -> int:
    """Run the demo and return the exit code.

    The exit code is 0 if the run recovered from all faults and the weights are equal, 2 if a package is
    missing, and 1 otherwise. Raises `BadInput` if the directory is unusable.
    """
    style = style_of(sys.stdout)
    missing = _missing()
    if missing is not None:
        say(missing)
        return exit_codes.BAD_INPUT
    folder = _folder(command.run_dir)
    began = time.monotonic()
    try:
        good = _demo(folder, style, QUICK if command.quick else WHOLE)
    finally:
        if not command.keep and command.run_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    if command.keep or command.run_dir is not None:
        say(f"All files are in {folder}; try `holdfast explain i-0002 --run-dir {folder / 'broken'}`")
    say(f"The demo took {seconds(time.monotonic() - began)}.")
    return 0 if good else 1


def _folder(given: Path | None) -> Path:
    """Create and return the parent directory of the demo's runs. Raises `BadInput`."""
    try:
        folder = (given or Path(tempfile.mkdtemp(prefix="holdfast-demo-"))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"--run-dir {str(given)!r} is a file: give a directory, which may be new") from None
    except (OSError, RuntimeError) as error:  # a loop of symbolic links raises RuntimeError
        why = error.strerror if isinstance(error, OSError) else str(error)
        what = "the temporary directory" if given is None else f"--run-dir {str(given)!r}"
        raise BadInput(f"{what} cannot be created ({why}): choose another directory with --run-dir") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--run-dir {str(given)!r} is not writable: choose another directory")
    return folder


def _missing() -> str | None:
    if all(importlib.util.find_spec(name) for name in ("torch", "numpy")):
        return None
    return f"holdfast demo needs torch and numpy: {sys.executable} -m pip install torch numpy"


def _demo(folder: Path, style: Style, show: Scenario) -> bool:
    what = f"a byte-level GPT, 2 members and a standby, {show.steps} steps"
    say(f"{style.paint('holdfast demo', '1')}: {what}")
    say("", style.paint("1  The undisturbed run", "1"))
    calm = _start(folder, "calm", style, show)
    if calm.wait() != 0:
        return _report_failure(calm, "the undisturbed run failed")
    say("", style.paint(f"2  The same run, broken {len(show.drills)} times", "1"))
    broken = _start(folder, "broken", style, show, ("--standby", "1"), ("--pace", str(show.pace_s)))
    if not _break(broken, style, show) or broken.wait() != 0:
        return _report_failure(broken, "the broken run failed")
    say("", style.paint("3  What it cost", "1"))
    show_ledger(broken.run.status() or {}, style)
    say("", style.paint("4  The proof", "1"))
    return _compare(folder, style)


class _Run:
    """A child process `holdfast run`, started as a user would start it. Its output goes to the file `log`."""

    def __init__(
        self, process: subprocess.Popen[bytes], run: RunDir, log: Path, style: Style, steps: int
    ) -> None:
        self.process = process
        self.steps = steps
        self.run = run
        self.log = log
        self.watch = DemoRun(run, process, style)

    def wait(self) -> int:
        """Show progress until the run has ended, and return its exit code."""
        return self.watch.until_end(self.steps, LIMIT_S)


def _start(
    folder: Path,
    name: str,
    style: Style,
    show: Scenario,
    options: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> _Run:
    path, log = folder / name, folder / f"{name}.log"
    if path.exists():
        shutil.rmtree(path)  # from an earlier demo; this happens if the user chose `folder`
    known = os.environ.get("PYTHONPATH", "")
    place = str(parts.folder())
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{known}" if known else place}
    words = parts.command("supervisor", "run", *WORLD, *options, "--run-dir", str(path))
    words += ["--checkpoint-every", "5s", "--plain", "--", sys.executable, *show.train]
    words += ["--steps", str(show.steps), "--digest", str(folder / f"{name}.json"), *more]
    with log.open("wb") as out:
        # Run in the demo's folder, because the working directory may contain another package named `trainer`.
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)
    return _Run(process, RunDir(path), log, style, show.steps)


def _break(broken: _Run, style: Style, show: Scenario) -> bool:
    """Inject the faults at intervals and print their outcomes. Return True if the run recovered from all."""
    every = (show.steps - 60) // len(show.drills)
    for number, drill in enumerate(show.drills):
        at = broken.watch.until_ready(10 + number * every)
        if at is None:
            return False
        say(f"  step {at:4d}  {style.paint(drill.words, '1')}")
        found = broken.watch.drill(drill.what, drill.rank)
        if found is None:
            return False
        say(f"             {found}")
    return True


def _report_failure(run: _Run, why: str) -> bool:
    """Print `why` and the last lines of the run's log, terminate the run, and return False."""
    say(f"  {why}; its log ends with:", "")
    say(*[f"    {line}" for line in run.log.read_text(errors="replace").splitlines()[-25:]])
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait()
    return False


def show_ledger(status: Mapping[str, Any], style: Style) -> None:
    """Print where the time of the broken run went."""
    total_s = float(status.get("total_s") or 0.0) or 1.0
    rows = {str(k): float(v) for k, v in (status.get("buckets_s") or {}).items()}
    rows["productive"] = rows.get("productive", 0.0) + float(status.get("pending_s") or 0.0)
    shown = [
        (LEDGER_WORDS.get(bucket, bucket), spent_s) for bucket, spent_s in rows.items() if spent_s >= 0.0005
    ]
    width = max([len("total"), *(len(name) for name, _ in shown)])
    for name, spent_s in sorted(shown, key=lambda row: -row[1]):
        bar = style.sign("bar") * max(1, round(_BAR * spent_s / total_s))
        say(f"  {name:{width}s} {spent_s:8.3f} s  {percent(spent_s / total_s):>6s}  {bar}")
    say(f"  {'total':{width}s} {total_s:8.3f} s  wall-clock time, each second counted once")
    say(f"  effective training time ratio (ETTR): {style.paint(percent(float(status['ettr'])), '1', '32')}")


def _compare(folder: Path, style: Style) -> bool:
    """Compare each rank's digests in the two runs, and print the result. Return True if all match."""
    calm, broken = (json.loads((folder / f"{name}.json").read_text()) for name in ("calm", "broken"))
    good = True
    for rank in sorted(calm, key=int):
        for part in ("parameters", "optimizer", "buffers", "rng"):
            undisturbed, disturbed = calm[rank].get(part), broken[rank].get(part)
            good = good and undisturbed == disturbed
            if undisturbed == disturbed == NOTHING:
                say(f"  rank {rank}  {part:10s} none in this model")
                continue
            mark = style.paint("equal", "32") if undisturbed == disturbed else style.paint("DIFFERENT", "31")
            say(f"  rank {rank}  {part:10s} {str(undisturbed)[:24]}  {mark}")
    if good:
        say("  All state is bit-for-bit identical in both runs.")
    return good


POLL_S = 0.05
READY_S = 120.0  # the limit for replacing a member and warming up its processes
DRILL_S = 60.0
WITHOUT_INCIDENT = ("sidecar", "supervisor")  # drills that do not affect the training


class DemoRun:
    """Watches a run through the files in its directory, and injects faults."""

    def __init__(self, run: RunDir, process: subprocess.Popen[bytes], style: Style) -> None:
        self._run = run
        self._process = process
        self._style = style
        self._live = sys.stdout.isatty()

    def status(self) -> dict[str, Any]:
        return self._run.status() or {}

    def until_end(self, steps: int, limit_s: float) -> int:
        """Show progress until the process has ended or `limit_s` has passed, and return its exit code."""
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None:
            self._progress(steps)
            if time.monotonic() > deadline:
                self._process.terminate()
                self._process.wait()
            time.sleep(POLL_S)
        self._clear()
        found = self.status()
        if found.get("step") is not None:
            loss = f", last loss of rank 0: {found['loss']:.3f}" if found.get("loss") else ""
            print(f"  {count(found['step'], 'step')}{loss}", flush=True)
        return self._process.returncode

    def until_ready(self, step: int) -> int | None:
        """Wait until `step` is done and replacement processes are warm. Return the current step.

        Return None if the run ends before that, or if this takes longer than `READY_S`.
        """
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self._process.poll() is None:
            found = self.status()
            self._progress(0)
            calm = found.get("phase") == "running" and found.get("open_incident") is None
            if calm and found.get("warm_ready") and (found.get("step") or 0) >= step:
                self._clear()
                return int(found["step"])
            time.sleep(POLL_S)
        self._clear()
        return None

    def drill(self, kind: str, rank: int) -> str | None:
        """Inject a fault and return its outcome in words; None if the run did not recover."""
        before = self.status()
        try:
            control.send_request(self._run, "inject", {"what": kind, "rank": rank}, repeat=False)
        except BadInput as error:
            print(f"  {error}")
            return None
        if kind in WITHOUT_INCIDENT:
            return self._until_back(kind, before)
        deadline = time.monotonic() + DRILL_S
        while time.monotonic() < deadline and self._process.poll() is None:
            last = self.status().get("last_incident")
            known = (before.get("last_incident") or {}).get("id")
            if last is not None and last["id"] != known and last.get("recovered_s") is not None:
                return describe(last, self._style)
            time.sleep(POLL_S)
        return None

    def _until_back(self, kind: str, before: dict[str, Any]) -> str | None:
        """Wait until the killed sidecar or supervisor is back, and return the outcome in words.

        Return None if there was an incident, or if this takes longer than `DRILL_S`.
        """
        deadline = time.monotonic() + DRILL_S
        while time.monotonic() < deadline and self._process.poll() is None:
            found = self.status()
            back = _pids(found, kind) not in ((), _pids(before, kind))
            if back and found.get("step") is not None:
                if found.get("incidents") != before.get("incidents"):
                    return None
                gained = int(found.get("step") or 0) - int(before.get("step") or 0)
                good = self._style.paint("no step lost, no incident", "32")
                trained = f"{count(gained, 'step')} {'was' if gained == 1 else 'were'} trained"
                return f"the {kind} is back; {trained} in the meantime: {good}"
            time.sleep(POLL_S)
        return None

    def _progress(self, steps: int) -> None:
        if not self._live:
            return
        found = self.status()
        done, loss = found.get("step"), found.get("loss")
        if done is not None and loss is not None:
            total = f" of {steps}" if steps else ""
            print(f"\r\x1b[K  step {done}{total}  loss {loss:.3f}", end="", flush=True)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", flush=True)


def _pids(status: dict[str, Any], kind: str) -> tuple[int, ...]:
    if kind == "supervisor":
        pid = status.get("supervisor_pid")
        return (pid,) if pid else ()
    found = [m.get("sidecar_pid") for m in status.get("members") or []]
    connected = [m.get("connected") for m in status.get("members") or []]
    return tuple(found) if all(found) and all(connected) else ()


def describe(incident: Mapping[str, Any], style: Style) -> str:
    """Return what happened, how soon it was noticed, and how the run recovered."""
    noticed = f"noticed after {_brief(incident['detected_s'])}"
    return f"{what(incident)}: {noticed}, {style.paint(outcome(incident), '32')}"


def _brief(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"
