"""A real agent publishes to an HTTPS server."""

from __future__ import annotations

import functools
import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.quarantine.reports import read_report
from tests.fakenvml.state import Fake
from tests.local.nodeagent.publishing.nodes_api import NodesApi, Patch, statuses
from tests.local.nodeagent.serving import Serving, node, serving

pytestmark = pytest.mark.local

REPORT, REPORT_AT = "holdfast.dev/node-health", "holdfast.dev/node-health-at"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[NodesApi]:
    folder = tmp_path / "account"
    folder.mkdir()
    server = NodesApi(folder)
    yield server
    server.stop()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with Fake(tmp_path / "nvml", 2) as found:
        yield found


def healthy(patch: Patch) -> bool:
    return statuses(patch)["GpuHealthy"] == "True Healthy"


def faulty(patch: Patch) -> bool:
    return statuses(patch)["GpuHealthy"] == "False Xid79"


def watches_gpus(health: dict[str, Any]) -> bool:
    """Return whether the agent has seen both GPUs and is registered for their events."""
    seeing = {each["name"] for each in health["sensors"] if each["sees"]}
    return len(health["gpus"]) == 2 and "nvml-events" in seeing


def test_it_starts_as_unknown_becomes_healthy_then_faulty_and_ends_as_unknown(
    tmp_path: Path, api: NodesApi, fake: Fake
) -> None:
    with serving(tmp_path / "state", fake, *api.words) as agent:
        api.until(healthy)
        assert set(statuses(api.received[0]).values()) == {"Unknown AgentStarting"}
        assert "metadata" not in api.received[0], "a report that is not whole yet is not published"
        fake.xid(0, 79)
        found = api.until(faulty)
        notes = found["metadata"]["annotations"]
        report = read_report(json.loads(notes[REPORT]))
        assert [(each.level, each.entity, each.action) for each in report.findings] == [
            ("unhealthy", fake.entity(0), "reboot_node")
        ]
        assert report.boot_id == agent.first["boot_id"]
        assert agent.end() < 2.0
    last = api.received[-1]
    assert set(statuses(last).values()) == {"Unknown AgentStopped"}
    assert "metadata" not in last, "the report of an agent that has ended must go stale"
    path, head = api.heads[-1]
    assert path == "/api/v1/nodes/node1/status?fieldManager=holdfast-nodeagent"
    assert head["Content-Type"] == "application/strategic-merge-patch+json"
    assert head["Authorization"] == "Bearer first"


def test_a_change_is_published_within_a_second(tmp_path: Path, api: NodesApi, fake: Fake) -> None:
    with serving(tmp_path / "state", fake, *api.words):
        api.until(healthy)
        took_s: list[float] = []
        for name in (fake.entity(0), fake.entity(1)):
            before, began = len(api.received), time.monotonic()
            fake.xid(len(took_s), 79)
            api.until(functools.partial(mentions, name), before)
            took_s.append(time.monotonic() - began)
    assert min(took_s) < 1.0, took_s


def mentions(name: str, patch: Patch) -> bool:
    return name in json.dumps(patch.get("metadata", ""))


def test_it_reads_a_renewed_token(tmp_path: Path, api: NodesApi, fake: Fake) -> None:
    with serving(tmp_path / "state", fake, *api.words):
        api.until(healthy)
        (api.account / "token").write_text("second")
        fake.xid(0, 79)
        api.until(faulty)
    assert api.heads[-1][1]["Authorization"] == "Bearer second"


def notes(agent: Serving) -> list[dict[str, str]]:
    """End the agent, and return what its log says about publishing."""
    agent.process.send_signal(signal.SIGTERM)
    text = agent.process.communicate(timeout=30)[0]
    lines = [json.loads(each) for each in text.splitlines()]
    return [each for each in lines if each["event"].startswith("publishing")]


def test_a_server_that_refuses_is_told_once_and_tried_again(
    tmp_path: Path, api: NodesApi, fake: Fake
) -> None:
    api.answer = lambda: (403, {})
    with serving(tmp_path / "state", fake, *api.words) as agent:
        api.until_tried(3)
        text = agent.get("/metrics")
        assert "holdfast_node_publishing_writes_total 0.0" in text
        assert agent.get("/healthz") == "ok\n", "publishing says nothing about the agent's own health"
        api.answer = lambda: (200, {})
        api.until(healthy)
        told = notes(agent)
    assert [each["event"] for each in told] == ["publishing_failed", "publishing_resumed"]
    assert told[0]["why"] == "the API server refuses the write: 403 it is refused"


def test_an_api_server_that_is_away_delays_nothing_and_hears_the_newest_state_when_it_is_back(
    tmp_path: Path, api: NodesApi, fake: Fake
) -> None:
    api.stop()
    with serving(tmp_path / "state", fake, *api.words) as agent:
        agent.until(watches_gpus)
        fake.xid(0, 79)
        agent.finding(fake.entity(0), "xid", 79)
        api.start()
        api.until(faulty)
        told = notes(agent)
    assert [each["event"] for each in told] == ["publishing_failed", "publishing_resumed"]
    assert "does not answer" in told[0]["why"]


def test_a_server_that_does_not_answer_delays_neither_a_finding_nor_the_end(
    tmp_path: Path, api: NodesApi, fake: Fake
) -> None:
    released = threading.Event()

    def hang() -> tuple[int, dict[str, str]]:
        released.wait(30)
        return 200, {}

    api.answer = hang
    with serving(tmp_path / "state", fake, *api.words) as agent:
        agent.until(watches_gpus)
        fake.xid(0, 79)
        agent.finding(fake.entity(0), "xid", 79)
        assert agent.end() < 2.5
    released.set()


def test_a_server_with_a_certificate_of_another_authority_gets_no_token(
    tmp_path: Path, api: NodesApi, fake: Fake
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = NodesApi(other)
    stranger.stop()
    (api.account / "ca.crt").write_text((other / "ca.crt").read_text())
    with serving(tmp_path / "state", fake, *api.words) as agent:
        agent.until(watches_gpus)
        told = notes(agent)
    assert api.tries == 0
    assert len(told) == 1
    assert "certificate" in told[0]["why"]


def test_a_command_line_that_does_not_say_where_to_publish_is_refused(tmp_path: Path) -> None:
    where = ("--state-dir", str(tmp_path / "state"))
    done = node("serve", *where, "--publish", "--api-server", "127.0.0.1:1")
    assert (done.returncode, done.stderr) == (
        2, "holdfast: --publish: the node's name is unknown: expected --node-name, or $NODE_NAME\n",
    )  # fmt: skip
    done = node("serve", *where, "--publish", "--node-name", "n")
    assert "expected --api-server, or $KUBERNETES_SERVICE_HOST" in done.stderr
