"""Follow the output of all training containers in a namespace, and record its steps and digests.

One `kubectl logs --follow` runs for each container. If its connection ends while the container runs, as it
does when a node is cut off, another one starts and skips the lines that have already been read.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.cluster.nodes.training_record import PrintedDigest, PrintedStep, parse

POLL_S = 1.0  # between two checks for new containers
LIVE_S = 3.0  # a follower that has run for this long is connected, because a failed one ends at once


@dataclass(frozen=True, slots=True)
class _Follower:
    process: subprocess.Popen[str]
    thread: threading.Thread  # reads what the process prints
    since_s: float

    @property
    def is_alive(self) -> bool:
        """True until the last line of the process has been recorded."""
        return self.thread.is_alive()


class StepLog:
    """The steps and digests of one namespace, from its creation until `close`."""

    def __init__(self, namespace: str, container: str, pods: Callable[[], list[Mapping[str, Any]]]) -> None:
        """`pods` returns the pods of the namespace, and is called from another thread."""
        self._namespace, self._container, self._pods = namespace, container, pods
        self._lock = threading.Lock()
        self._steps: list[PrintedStep] = []
        self._digests: list[PrintedDigest] = []
        self._read: Counter[str] = Counter()  # the lines that were read, by the container's id
        self._followers: dict[str, _Follower] = {}  # by the container's id
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name=f"step log of {namespace}", daemon=True)
        self._watcher.start()

    @property
    def steps(self) -> list[PrintedStep]:
        with self._lock:
            return list(self._steps)

    @property
    def digests(self) -> list[PrintedDigest]:
        with self._lock:
            return list(self._digests)

    def follows(self, container_id: str) -> bool:
        """Return True if the next line of a container will be received without delay."""
        with self._lock:
            found = self._followers.get(container_id)
        return found is not None and found.is_alive and time.monotonic() - found.since_s > LIVE_S

    def close(self) -> None:
        """End all followers."""
        self._closing.set()
        self._watcher.join()
        for each in self._followers.values():
            each.process.kill()
            each.thread.join()

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            try:
                pods = self._pods()
            except (OSError, AssertionError, ValueError):  # the API server is busy; look again
                continue
            for pod in pods:
                found = running_container(pod, self._container)
                if found and not self._is_followed(found):
                    self._follow(str(pod["metadata"]["name"]), found)

    def _is_followed(self, container_id: str) -> bool:
        known = self._followers.get(container_id)
        return known is not None and known.is_alive

    def _follow(self, pod: str, container_id: str) -> None:
        words = ("kubectl", "logs", "--follow", "-n", self._namespace, pod, "-c", self._container)
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        thread = threading.Thread(target=self._receive, args=(process, container_id), daemon=True)
        thread.start()
        with self._lock:
            self._followers[container_id] = _Follower(process, thread, time.monotonic())

    def _receive(self, process: subprocess.Popen[str], container_id: str) -> None:
        assert process.stdout is not None
        known = self._read[container_id]
        with process:
            for number, line in enumerate(process.stdout, start=1):
                if number > known:
                    self._record(parse(line, time.monotonic()))
                    self._read[container_id] = number

    def _record(self, found: PrintedStep | PrintedDigest | None) -> None:
        with self._lock:
            if isinstance(found, PrintedStep):
                self._steps.append(found)
            elif found is not None:
                self._digests.append(found)


def running_container(pod: Mapping[str, Any], name: str) -> str:
    """Return the id of a pod's container; "" if it is not running."""
    for each in (pod.get("status") or {}).get("containerStatuses") or ():
        if each.get("name") == name and "running" in (each.get("state") or {}):
            return str(each.get("containerID") or "")
    return ""
