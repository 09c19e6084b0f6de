"""One of two real supervisors leads at once when the other one has ended, but waits if it is frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bench.scale.cluster_processes import NAMESPACE, ScaleProcesses, usage
from holdfast.process import network
from supervisor.kubernetes.lease import LeaseTerms
from tests.unit.literals import ROOT

LIMIT_S = 60.0
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/holdfast-supervisor"
PROGRAM = "tests.local.supervisors.supervisor_process"
TERMS = LeaseTerms()

T = TypeVar("T")


def until(look: Callable[[], T | None], what: str) -> T:
    deadline_s = time.monotonic() + LIMIT_S
    while (found := look()) is None:
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.02)
    return found


def seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def free_port() -> int:
    with network.listen("127.0.0.1") as listener:
        port: int = listener.getsockname()[1]
        return port


class Pair:
    """An API server and two supervisors. The first supervisor leads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.place = ScaleProcesses(1, 2, 1, 0.0, complete=False)

    def start(self) -> None:
        ports = [free_port() for _ in range(4)]
        for number in (0, 1):
            own, health, others = ports[2 * number], ports[2 * number + 1], ports[2 - 2 * number]
            variables = {
                "KUBECONFIG": str(self.place.folder / "kubeconfig"),
                "POD_NAME": f"s-{number}",
                "POD_UID": f"u-{number}",
                "POD_NAMESPACE": NAMESPACE,
                "POD_IP": "127.0.0.1",
                "TMPDIR": str(self.place.folder),
            }
            with self.log(number).open("wb") as log:
                words = [sys.executable, "-m", PROGRAM, *map(str, (own, health, others))]
                self.processes.append(
                    subprocess.Popen(words, cwd=ROOT, env={**os.environ, **variables}, stderr=log)
                )
            if number == 0:
                until(lambda: True if self.holder() == "s-0" else None, "the first supervisor leads")
        until(lambda: "not leading" if self.lines(1, "not leading") else None, "the other one waits")
        time.sleep(2 * TERMS.retry_s)  # it looks for the leader's address, which nothing outside of it shows

    def close(self) -> None:
        for each in self.processes:
            if each.poll() is None:
                each.kill()
            each.wait()
        self.place.close()

    def log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def lines(self, number: int, event: str) -> list[dict[str, Any]]:
        found = (json.loads(line) for line in self.log(number).read_text().splitlines() if line[:1] == "{")
        return [each for each in found if each["event"] == event]

    def lease(self) -> dict[str, Any]:
        found: dict[str, Any] = (self.place.read(LEASE) or {}).get("spec", {})
        return found

    def holder(self) -> str:
        return str(self.lease().get("holderIdentity", "")).rpartition("_")[0]

    def waited_s(self, since_s: float) -> float:
        """Return how long after `since_s` the second supervisor has taken the lease."""
        until(lambda: True if self.holder() == "s-1" else None, "the other supervisor leads")
        return seconds(self.lease()["acquireTime"]) - since_s


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_other_supervisor_does_not_wait_for_the_lease_of_one_that_has_ended(
    pair: Pair, signum: signal.Signals
) -> None:
    ended_s = time.time()
    pair.processes[0].send_signal(signum)
    assert pair.waited_s(ended_s) < TERMS.duration_s - TERMS.retry_s
    (why,) = pair.lines(1, "the leader has ended") if signum == signal.SIGKILL else ({"why": "released"},)
    assert why["why"] in ("released", "nothing listens on 127.0.0.2")
    assert pair.lease()["leaseTransitions"] == 1
    assert pair.processes[0].wait(LIMIT_S) == (0 if signum == signal.SIGTERM else -signum)


def test_a_frozen_supervisor_keeps_its_lease_while_it_lasts_and_ends_when_it_wakes_up(pair: Pair) -> None:
    renewed_s = seconds(pair.lease()["renewTime"])
    pair.processes[0].send_signal(signal.SIGSTOP)
    assert pair.waited_s(renewed_s) >= TERMS.duration_s
    assert pair.lines(1, "the leader has ended") == []
    taken = pair.lease()
    pair.processes[0].send_signal(signal.SIGCONT)
    assert pair.processes[0].wait(LIMIT_S) == 1
    (lost,) = pair.lines(0, "the lease is lost")
    assert "s-1_" in lost["error"]
    assert pair.lease()["holderIdentity"] == taken["holderIdentity"]
    assert pair.processes[1].poll() is None


def test_the_supervisor_that_waits_costs_much_less_than_the_leader(pair: Pair) -> None:
    before = [usage(each.pid).cpu_s for each in pair.processes]
    time.sleep(5)  # the subject of this test: nothing happens
    leader_s, waiting_s = (
        usage(each.pid).cpu_s - earlier for each, earlier in zip(pair.processes, before, strict=True)
    )
    assert waiting_s < leader_s / 2
