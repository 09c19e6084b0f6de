"""A real `holdfast node serve` with the fake GPU library, and requests to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakenvml.build import build
from tests.fakenvml.state import Fake

ROOT = Path(__file__).parents[3]
PATIENCE_S = 30.0


def environment(fake: Fake | None = None) -> dict[str, str]:
    """Return an environment where the agent finds the fake library, or none."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if fake is not None:
        found |= {"LD_LIBRARY_PATH": str(build().parent), "FAKE_NVML_STATE": str(fake.path)}
    return found


def node(
    *words: str, fake: Fake | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    command = [sys.executable, "-m", "holdfast", "node", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment(fake),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


class Serving:
    """The process, what it has printed, and its address."""

    def __init__(self, state: Path, fake: Fake | None, *words: str) -> None:
        command = [sys.executable, "-m", "holdfast", "node", "serve", "--listen", "127.0.0.1:0"]
        command += ["--state-dir", str(state), "--kernel-log", "none", *words]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(fake),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        assert first.startswith("{"), first + self.process.stdout.read()
        self.first: dict[str, Any] = json.loads(first)
        self.address = str(self.first.get("listen", ""))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=PATIENCE_S) as answer:
            raw = answer.read()
        return json.loads(raw) if path.startswith("/v1") else raw.decode()

    def events(self, after: int = 0, wait_s: float = 10.0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(f"/v1/events?after={after}&wait_s={wait_s}")["events"]
        return found

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first health report that satisfies `holds`."""
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            found: dict[str, Any] = self.get("/v1/health")
            if holds(found):
                return found
            time.sleep(0.1)
        raise AssertionError(json.dumps(self.get("/v1/health"), indent=1))

    def finding(self, entity: str, check: str, code: int | None = None) -> dict[str, Any]:
        """Wait for a finding and return it."""
        found: list[dict[str, Any]] = []

        def there(health: dict[str, Any]) -> bool:
            found[:] = [
                each
                for one in health["entities"]
                if one["entity"] == entity
                for each in one["findings"]
                if each["check"] == check and each["code"] == code
            ]
            return bool(found)

        self.until(there)
        return found[0]

    def end(self, signum: int = signal.SIGTERM) -> float:
        """Send a signal; return the seconds until the process has ended."""
        began = time.monotonic()
        self.process.send_signal(signum)
        self.process.communicate(timeout=PATIENCE_S)
        return time.monotonic() - began


@contextmanager
def serving(state: Path, fake: Fake | None, *words: str) -> Iterator[Serving]:
    made = Serving(state, fake, *words)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate(timeout=PATIENCE_S)
