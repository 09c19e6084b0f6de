"""The steps of all containers are recorded once, although the connections to their logs end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.nodes import step_log
from bench.cluster.nodes.step_log import StepLog, running_container
from bench.cluster.nodes.training_record import PrintedDigest

WAIT_S = 20.0
HASH = "0" * 64

# Prints what the container has printed so far, and ends, as a connection does that is cut.
KUBECTL = """#!/bin/sh
cat "$0.$5"
"""


def pod(name: str, container_id: str, state: str = "running") -> dict[str, Any]:
    status = {"name": "trainer", "containerID": container_id, "state": {state: {}}}
    return {"metadata": {"name": name}, "status": {"containerStatuses": [status]}}


@pytest.fixture
def pods() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def log(kubectl: Path, pods: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[StepLog]:
    kubectl.write_text(KUBECTL)
    monkeypatch.setattr(step_log, "POLL_S", 0.01)
    made = StepLog("space", "trainer", lambda: list(pods))
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lines_are_recorded_once_by_each_container(
    log: StepLog, kubectl: Path, pods: list[dict[str, Any]]
) -> None:
    first, second = kubectl.with_name("kubectl.a"), kubectl.with_name("kubectl.b")
    first.write_text("holdfast: hello\ntick 1 rank 0 generation 1\n")
    second.write_text(f"tick 1 rank 1 generation 1\ndigest 1 {HASH}\n")
    pods += [pod("a", "id-a"), pod("b", "id-b"), pod("c", "id-c", "waiting")]
    until(lambda: len(log.steps) == 2 and len(log.digests) == 1)
    with first.open("a") as file:
        file.write("tick 2 rank 0 generation 1\n")
    until(lambda: len(log.steps) == 3)
    assert sorted((each.step, each.rank) for each in log.steps) == [(1, 0), (1, 1), (2, 0)]
    assert log.digests == [PrintedDigest(1, HASH)]
    pods[0] = pod("a", "id-a2")  # its container was restarted, and prints from the beginning
    first.write_text("tick 3 rank 0 generation 2\n")
    until(lambda: len(log.steps) == 4)
    assert log.steps[-1].generation == 2


def test_a_container_is_followed_while_its_connection_lasts(
    log: StepLog, kubectl: Path, pods: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "LIVE_S", 0.0)
    kubectl.write_text("#!/bin/sh\necho tick 1 rank 0 generation 1\nexec sleep 60\n")
    assert not log.follows("id-a")
    pods.append(pod("a", "id-a"))
    until(lambda: log.follows("id-a"))
    until(lambda: len(log.steps) == 1)
    assert not log.follows("")


def test_only_a_running_container_has_an_id() -> None:
    assert running_container(pod("a", "id-a"), "trainer") == "id-a"
    assert running_container(pod("a", "id-a", "terminated"), "trainer") == ""
    assert running_container(pod("a", "id-a"), "other") == ""
    assert running_container({}, "trainer") == ""
