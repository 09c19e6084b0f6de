"""Watch a run from outside through what it leaves in its directory, and break it on purpose."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from holdfast.errors import BadInput
from supervisor import asking
from supervisor.rundir import RunDir
from supervisor.style import Style
from supervisor.wording import count, outcome, what

POLL_S = 0.05
READY_S = 120.0  # for a member to be made anew and its processes to be warm
DRILL_S = 60.0
OURS = ("sidecar", "supervisor")


class Watch:
    """One run, from its start to its end."""

    def __init__(self, run: RunDir, process: subprocess.Popen[bytes], style: Style) -> None:
        self._run = run
        self._process = process
        self._style = style
        self._live = sys.stdout.isatty()

    def status(self) -> dict[str, Any]:
        return self._run.status() or {}

    def until_end(self, steps: int, limit_s: float) -> int:
        """Show progress until the process has ended; kill it at the limit. Returns its exit code."""
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
            loss = f", loss of rank 0 in the last one {found['loss']:.3f}" if found.get("loss") else ""
            print(f"  {count(found['step'], 'step')}{loss}", flush=True)
        return self._process.returncode

    def until_ready(self, step: int) -> int | None:
        """Wait until `step` is done and a fast recovery is possible; return the step, None at an end."""
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
        """Break the run; return in words what came of it, None when it did not recover."""
        before = self.status()
        try:
            asking.tell(self._run, "inject", {"what": kind, "rank": rank}, repeat=False)
        except BadInput as error:
            print(f"  {error}")
            return None
        if kind in OURS:
            return self._until_back(kind, before)
        deadline = time.monotonic() + DRILL_S
        while time.monotonic() < deadline and self._process.poll() is None:
            last = self.status().get("last_incident")
            known = (before.get("last_incident") or {}).get("id")
            if last is not None and last["id"] != known and last.get("recovered_s") is not None:
                noticed = f"noticed after {_brief(last['detected_s'])}"
                good = self._style.paint(outcome(last), "32")
                return f"{what(last)}: {noticed}, {good}"
            time.sleep(POLL_S)
        return None

    def _until_back(self, kind: str, before: dict[str, Any]) -> str | None:
        """Wait until a part of ours has been started again; the training must not have noticed."""
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


def _brief(value_s: float) -> str:
    return f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.1f} s"
