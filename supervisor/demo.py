"""`holdfast demo`: train a GPT, break it nine times, and prove that nothing came of it."""

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

from holdfast import parts
from holdfast.errors import BadInput
from supervisor import commands, drilling
from supervisor.printing import say
from supervisor.rundir import RunDir
from supervisor.style import Style
from supervisor.terminal import style_of
from supervisor.wording import percent, seconds

WORLD = ("--members", "2", "--nproc-per-node", "1")
TRAIN = ("-m", "trainer.gpt", "--log-every", "50", "--val-every", "150")
LIMIT_S = 600.0  # for one of the two runs, on a machine many times slower than ours
NOTHING = hashlib.sha256().hexdigest()  # the digest of a part that has no tensors
_BAR = 40


@dataclass(frozen=True, slots=True)
class Drill:
    """One way to break a run, and what it stands for."""

    what: str
    rank: int
    words: str


DRILLS = (
    Drill("kill", 1, "kill -9 of rank 1 (out of memory, a segfault, a node's kernel)"),
    Drill("stop", 0, "SIGSTOP of rank 0 (a process that is there and does nothing)"),
    Drill("hang", 1, "rank 1 never enters the next collective"),
    Drill("nan", 0, "rank 0 computes a NaN, and every gradient is spoiled"),
    Drill("exit", 1, "rank 1 leaves without a word (exit code 17)"),
    Drill("member", 1, "the whole member of rank 1 is gone: processes, sockets and memory"),
    Drill("sidecar", 0, "kill -9 of our own sidecar"),
    Drill("supervisor", 0, "kill -9 of our own supervisor"),
    Drill("kill", 0, "kill -9 of rank 0, on a supervisor that has just come back"),
)


@dataclass(frozen=True, slots=True)
class Show:
    """What is trained, for how long, and how it is broken."""

    steps: int
    pace_s: float  # of a step of the broken run: on a fast machine it would end before the faults have come
    train: tuple[str, ...]
    drills: tuple[Drill, ...]


_TINY = (*TRAIN, "--tiny", "--context", "128", "--batch", "8")
WHOLE = Show(450, 0.12, TRAIN, DRILLS)
QUICK = Show(240, 0.06, _TINY, (DRILLS[0], DRILLS[3], DRILLS[5]))


def run(command: commands.Demo) -> int:
    """Run the demo; 0 when all faults were recovered from and the weights are equal, 1 otherwise."""
    style = style_of(sys.stdout)
    missing = _missing()
    if missing is not None:
        say(missing)
        return 2
    folder = _folder(command.run_dir)
    began = time.monotonic()
    try:
        good = _demo(folder, style, QUICK if command.quick else WHOLE)
    finally:
        if not command.keep and command.run_dir is None:
            shutil.rmtree(folder, ignore_errors=True)
    if command.keep or command.run_dir is not None:
        say(f"Everything is in {folder}: try `holdfast explain i-0002 --run-dir {folder / 'broken'}`")
    say(f"The demo took {seconds(time.monotonic() - began)}.")
    return 0 if good else 1


def _folder(given: Path | None) -> Path:
    """Return where the demo's runs go, made. Raises `BadInput`."""
    try:
        folder = (given or Path(tempfile.mkdtemp(prefix="holdfast-demo-"))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise BadInput(f"--run-dir {str(given)!r} is a file: name a directory, or a new one") from None
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        why = error.strerror if isinstance(error, OSError) else str(error)
        what = "the temporary directory" if given is None else f"--run-dir {str(given)!r}"
        raise BadInput(f"{what} cannot be made: {why}: name another directory with --run-dir") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"--run-dir {str(given)!r} cannot be written to: name another directory")
    return folder


def _missing() -> str | None:
    if all(importlib.util.find_spec(name) for name in ("torch", "numpy")):
        return None
    return f"holdfast demo needs torch and numpy: {sys.executable} -m pip install torch numpy"


def _demo(folder: Path, style: Style, show: Show) -> bool:
    what = f"a GPT of bytes, 2 members and a standby, {show.steps} steps"
    say(f"{style.paint('holdfast demo', '1')}: {what}")
    say("", style.paint("1  The undisturbed run", "1"))
    calm = _start(folder, "calm", style, show)
    if calm.wait() != 0:
        return _gave_up(calm, "the undisturbed run failed")
    say("", style.paint(f"2  The same again, broken {len(show.drills)} times", "1"))
    broken = _start(folder, "broken", style, show, ("--standby", "1"), ("--pace", str(show.pace_s)))
    if not _break(broken, style, show) or broken.wait() != 0:
        return _gave_up(broken, "the broken run did not end well")
    say("", style.paint("3  What it cost", "1"))
    _show_ledger(broken.run.status() or {}, style)
    say("", style.paint("4  The proof", "1"))
    return _compare(folder, style)


class _Run:
    """A run beside us: `holdfast run` as anybody would start it, its output in a file."""

    def __init__(
        self, process: subprocess.Popen[bytes], run: RunDir, log: Path, style: Style, steps: int
    ) -> None:
        self.process = process
        self.steps = steps
        self.run = run
        self.log = log
        self.watch = drilling.Watch(run, process, style)

    def wait(self) -> int:
        """Show the progress until the run has ended, and return its exit code."""
        return self.watch.until_end(self.steps, LIMIT_S)


def _start(
    folder: Path,
    name: str,
    style: Style,
    show: Show,
    options: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
) -> _Run:
    path, log = folder / name, folder / f"{name}.log"
    if path.exists():
        shutil.rmtree(path)  # our own of an earlier demo: `folder` was given to us for this
    known = os.environ.get("PYTHONPATH", "")
    place = str(parts.folder())
    environment = {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{known}" if known else place}
    words = parts.command("supervisor", "run", *WORLD, *options, "--run-dir", str(path))
    words += ["--checkpoint-every", "5s", "--plain", "--", sys.executable, *show.train]
    words += ["--steps", str(show.steps), "--digest", str(folder / f"{name}.json"), *more]
    with log.open("wb") as out:
        # In its own folder: where the demo is started there may be somebody else's `trainer`.
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=out, stderr=out)
    return _Run(process, RunDir(path), log, style, show.steps)


def _break(broken: _Run, style: Style, show: Show) -> bool:
    """Inject every drill, spread over the run, and show what came of each."""
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


def _gave_up(run: _Run, why: str) -> bool:
    say(f"  {why}; the end of its log:", "")
    say(*[f"    {line}" for line in run.log.read_text(errors="replace").splitlines()[-25:]])
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait()
    return False


def _show_ledger(status: Mapping[str, Any], style: Style) -> None:
    """Show where every second of the broken run went."""
    total_s = float(status.get("total_s") or 0.0) or 1.0
    rows = {str(k): float(v) for k, v in (status.get("buckets_s") or {}).items()}
    rows["productive"] = rows.get("productive", 0.0) + float(status.get("pending_s") or 0.0)
    for bucket, spent_s in sorted(rows.items(), key=lambda row: -row[1]):
        if spent_s < 0.0005:
            continue
        bar = style.sign("bar") * max(1, round(_BAR * spent_s / total_s))
        say(f"  {bucket:11s} {spent_s:8.3f} s  {percent(spent_s / total_s):>6s}  {bar}")
    say(f"  {'together':11s} {total_s:8.3f} s  the wall clock, each second once")
    say(f"  effective training time ratio (ETTR): {style.paint(percent(float(status['ettr'])), '1', '32')}")


def _compare(folder: Path, style: Style) -> bool:
    """Hold every rank's digests of the two runs against each other."""
    calm, broken = (json.loads((folder / f"{name}.json").read_text()) for name in ("calm", "broken"))
    good = True
    for rank in sorted(calm, key=int):
        for part in ("parameters", "optimizer", "buffers", "rng"):
            ours, theirs = calm[rank].get(part), broken[rank].get(part)
            good = good and ours == theirs
            if ours == theirs == NOTHING:
                say(f"  rank {rank}  {part:10s} none: this model has none")
                continue
            mark = style.paint("equal", "32") if ours == theirs else style.paint("DIFFERENT", "31")
            say(f"  rank {rank}  {part:10s} {str(ours)[:24]}  {mark}")
    if good:
        say("  Bit for bit what the undisturbed run ended with.")
    return good
