"""What operators request from a running agent, and what the agent reports if its sensors see nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nodeagent.sensing.operator_requests import FILE
from tests.fakenvml.state import Fake
from tests.local.nodeagent.serving import PATIENCE_S, ROOT, Serving, environment, node, serving


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


@contextmanager
def stopped(agent: Serving) -> Iterator[None]:
    """Stop the agent's process meanwhile, so that it reads no request."""
    agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.process.send_signal(signal.SIGCONT)


@contextmanager
def recorded(state: Path, why: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a `release` and return it once it has recorded its request."""
    command = [sys.executable, "-m", "holdfast", "node", "release", "--state-dir", str(state), "--why", why]
    with subprocess.Popen(
        [*command, *words], cwd=ROOT, env=environment(), stdout=-1, stderr=-1, text=True
    ) as made:
        try:
            give_up_at = time.monotonic() + PATIENCE_S
            while not (state / FILE).exists() or f'"{why}"' not in (state / FILE).read_text():
                assert time.monotonic() < give_up_at
                assert made.poll() is None
                time.sleep(0.05)
            yield made
        finally:
            made.kill()


def operator_has_read(agent: Serving) -> dict[str, Any]:
    """Return the health after the agent has read all requests that are recorded now."""

    def calls(health: dict[str, Any]) -> int:
        return next(int(each["calls"]) for each in health["sensors"] if each["name"] == "operator")

    before = calls(agent.get("/v1/health"))
    return agent.until(lambda health: calls(health) >= before + 2)


def test_of_two_releases_at_the_same_time_both_succeed(tmp_path: Path, fake: Fake) -> None:
    state = tmp_path / "state"
    with serving(state, fake) as agent:
        agent.until(lambda health: health["clean_s"] > 0)
        with ExitStack() as both:
            with stopped(agent):
                first = both.enter_context(recorded(state, "first", "--for", "10m"))
                second = both.enter_context(recorded(state, "second", "--for", "1h"))
            said = [each.communicate(timeout=PATIENCE_S) for each in (first, second)]
            assert [first.returncode, second.returncode] == [0, 0], said
        assert "released: the agent keeps NVML closed for 59 min because of a later" in said[0][0]
        assert "(second)" in said[0][0]
        assert "released: the agent keeps NVML closed for 1 h, or until" in said[1][0]
        assert operator_has_read(agent)["released"]["closed"]
        agent.end()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_release_that_a_signal_ends_is_withdrawn_and_ends_no_other(
    tmp_path: Path, fake: Fake, signum: signal.Signals
) -> None:
    state = tmp_path / "state"
    with serving(state, fake) as agent:
        agent.until(lambda health: health["clean_s"] > 0)
        for before in ("none", "another"):
            with stopped(agent), recorded(state, f"after {before}", "--for", "10m") as ended:
                ended.send_signal(signum)
                _, said = ended.communicate(timeout=PATIENCE_S)
            assert ended.returncode == 128 + signum
            assert f"nothing was released: {signum.name} came first, and the request was withdrawn" in said
            assert bool(operator_has_read(agent)["released"]) == (before == "another")
            if before == "none":
                assert node("release", "--for", "1h", "--state-dir", str(state)).returncode == 0
        assert fake.state.attached == 0
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
