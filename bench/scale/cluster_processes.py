"""Starts, stops and measures the scale bench's processes: API server, members, successive supervisors."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.harness.launchers import Failed
from bench.harness.results import ROOT
from holdfast.process import network
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AUTHORITY_SECRET

NAMESPACE = "holdfast-system"
ANSWER_S = 60.0  # how long a process may take to start, or to answer
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a process has used so far."""

    cpu_s: float
    rss_bytes: int
    peak_bytes: int
    threads: int


def usage(pid: int) -> Usage:
    """Return the usage of a live process. The CPU time is exact, and includes threads that have ended."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    sizes = {name: int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}
    cpu_s = time.clock_gettime((~pid << 3) | 2)  # the clock of another process: clock_getcpuclockid(3)
    return Usage(cpu_s, sizes["VmRSS"], sizes["VmHWM"], int(fields["Threads"]))


def _free_port() -> int:
    with network.listen("127.0.0.1") as listener:
        port: int = listener.getsockname()[1]
        return port


class ScaleProcesses:
    """All processes of the bench and their folder. `close` ends the processes and removes the folder."""

    def __init__(self, jobs: int, members: int, nproc: int, rate: float, complete: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holdfast-scale-")
        self.folder = Path(self._folder.name)
        self._size = {"jobs": jobs, "members": members, "nproc": nproc}
        self._rate, self._complete = rate, complete
        self._started: list[subprocess.Popen[bytes]] = []
        self._api_port, self._member_port, self._health_port = (_free_port() for _ in range(3))
        self._supervisors = 0
        self.api = self._start_api()
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.members: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        for each in self._started:
            if each.poll() is None:
                each.kill()
            each.wait()
            for pipe in (each.stdin, each.stdout):
                if pipe is not None:
                    pipe.close()
        self._folder.cleanup()

    # -- starting

    def start_supervisor(self) -> float:
        """Start a supervisor, as another pod of the Deployment. Return its start time (monotonic)."""
        self._supervisors += 1
        started_s = time.monotonic()
        variables = {
            "KUBECONFIG": str(self.folder / "kubeconfig"),
            "POD_NAME": f"holdfast-supervisor-{self._supervisors}",
            "POD_NAMESPACE": NAMESPACE,
            "POD_IP": "127.0.0.1",
            "TMPDIR": str(self.folder),
        }
        ports = [str(self._member_port), str(self._health_port)]
        self.supervisor = self._start("supervisor_process", ports, variables)
        return started_s

    def kill_supervisor(self) -> None:
        assert self.supervisor is not None
        self.supervisor.send_signal(signal.SIGKILL)
        self.supervisor.wait()

    def start_members(self) -> None:
        """Start the members once the supervisor has created its certificate authority."""
        secret = self._until(lambda: self.read(f"/api/v1/namespaces/{NAMESPACE}/secrets/{AUTHORITY_SECRET}"))
        ca = self.folder / "members-ca.pem"
        ca.write_bytes(base64.b64decode(secret["data"]["ca.crt"]))
        options = [*self._sizes(), "--rate", str(self._rate), "--ca", str(ca)]
        options += ["--url", f"https://127.0.0.1:{self._member_port}"]
        options += ["--complete"] if self._complete else []
        self.members = self._start("members", options, {}, piped=True)

    def _start_api(self) -> subprocess.Popen[bytes]:
        now = datetime.now(timezone.utc)
        authority = certificates.new_authority(now)
        leaf = certificates.new_leaf(authority, ("localhost",), ("127.0.0.1",), now)
        chain, self._ca = self.folder / "api.pem", self.folder / "api-ca.pem"
        chain.write_bytes(leaf.chain)
        self._ca.write_text(authority.text)
        cluster = {"server": f"https://127.0.0.1:{self._api_port}", "certificate-authority": str(self._ca)}
        config = {  # YAML is a superset of JSON
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bench",
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
            "clusters": [{"name": "bench", "cluster": cluster}],
            "users": [{"name": "bench", "user": {"token": "bench"}}],
        }
        (self.folder / "kubeconfig").write_text(json.dumps(config))
        options = [*self._sizes(), "--port", str(self._api_port), "--certificate", str(chain)]
        made = self._start("api_server", options, {}, piped=True)
        if self._line(made) != "ready":
            raise Failed(f"the API server did not start:\n{self.tail()}")
        return made

    def _sizes(self) -> list[str]:
        return [word for name, value in self._size.items() for word in (f"--{name}", str(value))]

    def _start(
        self, module: str, options: list[str], variables: dict[str, str], *, piped: bool = False
    ) -> subprocess.Popen[bytes]:
        with open(self.folder / "output.log", "ab") as log:
            made = subprocess.Popen(
                [sys.executable, "-m", f"bench.scale.{module}", *options],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else log,
                stderr=log,
            )
        self._started.append(made)
        return made

    # -- asking

    def ask(self, **command: object) -> dict[str, Any]:
        """Send the members a command, and return their answer."""
        assert self.members is not None
        assert self.members.stdin is not None
        self.members.stdin.write(json.dumps(command).encode() + b"\n")
        self.members.stdin.flush()
        found: dict[str, Any] = json.loads(self._line(self.members))
        return found

    def until(self, condition: Callable[[dict[str, Any]], bool], limit_s: float) -> float:
        """Return the time (monotonic) when `condition` holds for the members' figures. Raises `Failed`."""
        deadline_s = time.monotonic() + limit_s
        while True:
            found = self.ask()
            if condition(found):
                return time.monotonic()
            if time.monotonic() > deadline_s:
                raise Failed(f"not reached within {limit_s:g} s; the members report {found}\n{self.tail()}")
            time.sleep(POLL_S)

    def scrape(self) -> tuple[float, int]:
        """Return the seconds that a request for `/metrics` took, and the size of the response in bytes."""
        began_s = time.monotonic()
        with urllib.request.urlopen(f"http://127.0.0.1:{self._health_port}/metrics", timeout=30) as answer:
            text = answer.read()
        return time.monotonic() - began_s, len(text)

    def read(self, path: str) -> dict[str, Any] | None:
        """Return an object or a list from the API server; None if the request fails."""
        tls = ssl.create_default_context(cafile=str(self._ca))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{self._api_port}{path}", context=tls) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except OSError:
            return None

    def supervisions(self) -> list[dict[str, Any]]:
        found = self.read(f"/apis/{SUPERVISIONS.group}/{SUPERVISIONS.version}/{SUPERVISIONS.plural}")
        return list(found["items"]) if found else []

    def tail(self) -> str:
        text = (self.folder / "output.log").read_text(errors="replace")
        return text[-3000:]

    def _line(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], ANSWER_S)
        line = process.stdout.readline() if ready else b""
        if not line:
            raise Failed(f"a process of the bench has ended or does not answer:\n{self.tail()}")
        return line.decode().strip()

    def _until(self, read: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
        deadline_s = time.monotonic() + ANSWER_S
        while (found := read()) is None:
            if time.monotonic() > deadline_s:
                raise Failed(f"the supervisor did not start:\n{self.tail()}")
            time.sleep(POLL_S)
        return found
