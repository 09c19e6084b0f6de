"""Start `holdfast run` as a user does, break it, and check that it leaves nothing behind.

Every wait uses `until`, which polls until a deadline and fails at once if the run has ended. `finish` checks
that nothing is left behind, and `kill` ends everything that a test leaves behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from holdfast.process import selector_loop
from tests.local.processes import Marked
from tests.local.waiting import GONE_S, START_S, WAIT_S, until
from tests.local.whole_command import Ended

SCRIPTS = Path(__file__).with_name("scripts")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # a single rank would use all cores, with threads that spin

Json = dict[str, Any]

ANSWER_S = 5.0
DRILL_S = 20.0  # a sidecar may have to be started first


class Refused(AssertionError):
    """The supervisor refused a drill. The message contains its reason and a report of the run."""


class Run:
    """One `holdfast run`, from its start to its last process."""

    def __init__(self, folder: Path, options: str, command: Sequence[str | Path], **environment: str) -> None:
        """Start it in `folder`; the run directory is `folder/run` unless `options` name another."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.run_dir = folder / "run"
        self._marked = Marked()
        words = options.split()
        if "--run-dir" not in words:
            words += ["--run-dir", str(self.run_dir)]
        self._output = (folder / "output.txt").open("ab+")
        self._began_wall = time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "run", *words, "--", *map(str, command)],
            cwd=folder,
            env={**os.environ, **ONE_THREAD, **self._marked.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._first = self._newest_incident()
        self.runtime: Path | None = None

    # -- looking

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def status(self) -> Json | None:
        """Return the supervisor's current status, or None while it does not respond."""
        try:
            return self._ask("/v1/status")
        except (OSError, ValueError, KeyError):
            return None

    def wait(self, holds: Callable[[Json], object], what: str, limit_s: float = WAIT_S) -> Json:
        """Return the first status that satisfies `holds`."""

        def look() -> Json | None:
            status = self.status()
            if status is not None and holds(status):
                return status
            assert self.process.poll() is None, f"ended while waiting: {what}\n{self.report()}"
            return None

        try:
            return until(look, what, limit_s, self._pidfd)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    def steady(self, step: int = 3, limit_s: float = START_S) -> Json:
        """Wait until the group trains, `step` is complete, and warm processes are ready for a recovery."""
        found = self.wait(lambda status: _is_steady(status, step), f"steady at step {step}", limit_s)
        described = json.loads((self.run_dir / "run.json").read_text())
        self.runtime = Path(described["runtime"])
        return found

    def running(self, limit_s: float = WAIT_S) -> Json:
        """Wait until the group trains, even without warm processes."""
        return self.wait(_is_settled, "running", limit_s)

    def reach(self, step: int) -> Json:
        """Wait until the group has done `step` steps."""
        return self.wait(lambda status: (status["step"] or 0) >= step, f"step {step}")

    def after(self, generation: int) -> Json:
        """Wait until a generation newer than `generation` is formed."""
        return self.wait(lambda status: status["generation"] > generation, f"generation {generation + 1}")

    def trains(self, steps: int = 20) -> Json:
        """Wait until the group has done `steps` more steps."""
        first = self.running()["step"]
        return self.wait(lambda s: _is_settled(s) and s["step"] >= first + steps, f"{steps} more steps")

    def pid(self, rank: int) -> int:
        """Return the pid of a rank of the running generation."""

        def pids(status: Json) -> list[int]:  # 0: no process yet, so it must not be signalled
            return [each["pid"] for each in status["ranks"] if each["rank"] == rank and each["pid"] > 1]

        return pids(self.wait(pids, f"a process of rank {rank}"))[0]

    def incidents(self) -> list[Json]:
        """Return the incidents of this run, oldest first."""
        found = [self.incident(number) for number in range(1, self._newest_incident() + 1)]
        return [each for each in found[self._first :] if each is not None]

    def incident(self, number: int) -> Json | None:
        try:
            found = json.loads((self.run_dir / "incidents" / f"i-{number:04d}.json").read_text())
        except (OSError, ValueError):
            return None
        assert isinstance(found, dict)
        return found

    def last_status(self) -> Json:
        """Return what the run left in status.json."""
        found = json.loads((self.run_dir / "status.json").read_text())
        assert isinstance(found, dict)
        return found

    def logs(self, pattern: str) -> str:
        """Return the content of the files in logs/ that match `pattern`, in order of their names."""
        paths = sorted((self.run_dir / "logs").glob(pattern))
        return "".join(path.read_text(errors="replace") for path in paths)

    def report(self) -> str:
        """Return output, logs and status, to explain a failure."""
        status = json.dumps(self.status(), indent=1)
        logs = self.logs("supervisor.log")[-2000:] + self.logs("sidecar-*.log")[-2000:]
        return f"--- output\n{self.output()[-4000:]}\n--- logs\n{logs}\n--- status\n{status}"

    # -- breaking

    def inject(self, what: str, rank: int = 0) -> None:
        """Request a drill, as `holdfast inject` does. Raises `Refused`."""
        try:
            self._ask("/v1/inject", {"what": what, "rank": rank}, DRILL_S)
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            why = error.read().decode(errors="replace")
            raise Refused(f"{what} of rank {rank}: {why}\n{self.report()}") from None

    def hit(self, rank: int, signum: int, whatever: bool = False) -> None:
        """Send a signal to the process of a rank. With `whatever`, the process may already be dead."""
        with contextlib.suppress(*[ProcessLookupError] if whatever else []):
            os.kill(self.pid(rank), signum)

    def kill_ranks(self, *ranks: int) -> None:
        """Kill each of `ranks`. Stop all of them first, so that none can react to another's end."""
        pids = [self.pid(rank) for rank in ranks]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, signum)

    def broken(self, act: Callable[[], object], limit_s: float = WAIT_S) -> Json:
        """Call `act`, which causes one fault, and return the fault's incident after it is over.

        The script may hold the ranks within a step before the call. The status then has no rate.
        """
        number = int(self.wait(_is_whole, "running", WAIT_S)["incidents"]) + 1
        act()
        return self.recovered(number, limit_s)

    def recovered(self, number: int, limit_s: float = WAIT_S) -> Json:
        """Return incident `number` after the group has completed its first new step."""

        def look() -> Json | None:
            found = self.incident(number)
            if found is not None and found["recovered_s"] is not None:
                return found
            assert self.process.poll() is None, f"ended in incident {number}\n{self.report()}"
            return None

        try:
            return until(look, f"incident {number} is over", limit_s, self._pidfd)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    # -- ending

    def interrupt(self, signum: int = signal.SIGINT) -> None:
        """Signal `holdfast run` itself, as a terminal's Ctrl-C does."""
        self.process.send_signal(signum)

    def finish(self, limit_s: float = WAIT_S) -> Ended:
        """Wait for the end, and check that the run has left nothing behind."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            report = self.report()
            self.kill()
            raise AssertionError(f"no end within {limit_s:g} s\n{report}") from None
        self._clean()
        self._close()
        return Ended(code, self.output())

    def stop(self) -> Ended:
        """End the run immediately, and check that it has left nothing behind."""
        self.interrupt()
        self.interrupt_again()
        ended = self.finish()
        # If the run ends by itself before the second signal, that one may end the process while it exits. A
        # shell shows this as 130 too.
        return Ended(130, ended.output) if ended.code == -signal.SIGINT else ended

    def interrupt_again(self) -> None:
        """Signal `holdfast run` when it no longer takes the signal for a repetition of the last one."""
        with contextlib.suppress(
            subprocess.TimeoutExpired
        ):  # if the run ends by itself, there is nothing to wait for
            self.process.wait(selector_loop.REPEAT_S + 0.5)
        self.interrupt()

    def kill(self) -> None:
        """Kill everything that is left of the run."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._marked.kill()
        self._close()

    def _clean(self) -> None:
        """Check that an ended run has left no process, memory or socket."""
        until(lambda: None if self._marked.alive() else True, lambda: f"left: {self._marked.named()}", GONE_S)
        runtime = self.runtime or _runtime(self.run_dir)
        if runtime is not None:
            until(lambda: None if runtime.exists() else True, f"{runtime} is left", GONE_S)
            assert str(runtime) not in Path("/proc/net/unix").read_text()

    def _close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._output.close()

    # -- inside

    def _newest_incident(self) -> int:
        numbers = [
            int(path.stem[2:])
            for path in (self.run_dir / "incidents").glob("i-*.json")
            if re.fullmatch(r"i-\d+", path.stem)
        ]
        return max(numbers, default=0)

    def _ask(self, path: str, body: Json | None = None, limit_s: float = ANSWER_S) -> Json:
        described = json.loads((self.run_dir / "run.json").read_text())
        if described["started"] < self._began_wall:
            raise OSError("run.json still describes the previous run")
        request = urllib.request.Request(
            described["api"] + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {(self.run_dir / 'token').read_text().strip()}"},
        )
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            found = json.loads(answer.read())
        assert isinstance(found, dict)
        return found


def _is_whole(status: Json) -> bool:
    return (
        status["phase"] == "running"
        and status["open_incident"] is None
        and len(status["ranks"]) == status["world_size"]
    )


def _is_settled(status: Json) -> bool:
    return _is_whole(status) and status["rate"] is not None


def _is_steady(status: Json, step: int) -> bool:
    return _is_settled(status) and status["warm_ready"] and (status["step"] or 0) >= step


def _runtime(run_dir: Path) -> Path | None:
    try:
        return Path(json.loads((run_dir / "run.json").read_text())["runtime"])
    except (OSError, ValueError, KeyError):
        return None
