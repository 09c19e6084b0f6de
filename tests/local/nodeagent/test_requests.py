"""What operators request from a running agent, and what the agent reports if its sensors see nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakenvml.state import Fake
from tests.local.nodeagent.serving import node, serving


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    with Fake(tmp_path / "fake", gpus=2, links=2) as made:
        yield made


def test_a_release_closes_nvml_until_it_ends_and_is_not_counted_as_clean(tmp_path: Path, fake: Fake) -> None:
    state = tmp_path / "state"
    with serving(state, fake, "--node-name", "node-7", "--provider-id", "aws:///i-1") as agent:
        agent.until(lambda health: health["clean_s"] > 0)
        done = node("release", "--for", "10m", "--why", "MIG", "--state-dir", str(state))
        assert done.returncode == 0, done.stderr
        assert fake.state.attached == 0, "the command returns once NVML is closed"
        # The command has seen the agent's answer, which may be newer than its last published health.
        closed = agent.until(lambda health: bool(health["released"]) and health["released"]["closed"])
        assert (closed["node"], closed["provider_id"]) == ("node-7", "aws:///i-1")
        assert "machine_id" in closed
        assert "holdfast_node_released 1.0" in agent.get("/metrics")
        later = agent.until(lambda health: health["at_s"] > closed["at_s"] + 2.0)
        assert later["clean_s"] == pytest.approx(closed["clean_s"], abs=0.01)
        assert [each["why"] for each in later["sensors"] if each["name"].startswith("nvml")] == [
            "closed, because an operator has released the GPUs"
        ] * 2
        assert agent.events() == [], "a release is no fault"
        looked = node("check", "--for", "0.5", "--state-dir", str(state), fake=fake)
        assert "an operator has released the GPUs" in looked.stdout
        assert fake.state.attached == 0
        agent.end()
    with serving(state, fake) as agent:  # a restart does not end the release
        agent.until(lambda health: bool(health["released"]) and health["sensors"][2]["calls"] > 0)
        assert fake.state.attached == 0
        assert node("release", "--end", "--state-dir", str(state)).returncode == 0
        health = agent.until(lambda health: health["released"] is None and health["sensors"][1]["sees"])
        assert health["clean_s"] >= later["clean_s"], "the release has not restarted the count"
        assert fake.state.attached == 1
        agent.end()


def test_an_agent_does_not_obey_a_release_that_failed_because_none_was_running(
    tmp_path: Path, fake: Fake
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    done = node("release", "--for", "10m", "--state-dir", str(tmp_path / "state"))
    assert (done.returncode, done.stdout) == (1, ""), "the agent that holds NVML may use another folder"
    assert "nothing was released: no agent is running on" in done.stderr
    assert list((tmp_path / "state").iterdir()) == []
    with serving(tmp_path / "state", fake) as agent:
        health = agent.until(lambda health: bool(len(health["sensors"]) > 1 and health["sensors"][1]["sees"]))
        assert health["released"] is None
        agent.end()


@pytest.mark.parametrize("words", [("release", "--for", "10m"), ("release", "--end"), ("forget", "gpus")])
def test_a_request_to_a_folder_that_does_not_exist_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    state = tmp_path / "typo"
    done = node(*words, "--state-dir", str(state))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--state-dir {state}: no such folder: expected the one that the agent uses" in done.stderr
    assert not state.exists()


@pytest.mark.parametrize("function", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_node_whose_xids_nobody_can_see_is_degraded(tmp_path: Path, fake: Fake, function: str) -> None:
    fake.fail(function, 999)
    with serving(tmp_path / "state", fake) as agent:  # --kernel-log none
        assert agent.finding("sensor/xids", "xids_unseen")["level"] == "degraded"
        words = ("check", "--for", "0.5", "--state-dir", str(tmp_path / "none"), "--kernel-log", "none")
        assert node(*words, fake=fake).returncode == 1
        agent.end()
