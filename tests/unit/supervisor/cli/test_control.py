from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import BadInput
from supervisor.cli import api_client, control
from supervisor.cli.command_options import Inject, Stop
from supervisor.store.run_directory import RunDir, open_for_run
from tests.unit.supervisor.api_stub import Answer, api
from tests.unit.supervisor.status_samples import status


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RESTART_S", 0.05)
    monkeypatch.setattr(control, "_POLL_S", 0.01)
    monkeypatch.setattr(api_client, "TIMEOUT_S", 0.5)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Yield a live run."""
    opened = open_for_run(Path("a-run"), 0.0, tmp_path)
    yield opened
    opened.close()


@contextmanager
def listening(run: RunDir, answer: Answer) -> Iterator[None]:
    """Serve the run's API, and record its address in the run directory."""
    with api(answer) as url:
        run.write_run({"api": url})
        yield


def test_stop_requests_the_end_and_waits_until_the_run_has_ended(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_status(status(phase="saving"))
    asked: list[object] = []

    def answer(_: str, path: str, token: str, body: object) -> tuple[int, bytes]:
        asked.append((path, token, body))
        return 202, b'{"asked": true}'

    class Ends:
        """The phases of the run while a command waits for its end."""

        def __init__(self) -> None:
            self.phases = iter(["saving", "stopping"])

        def __call__(self, _: float) -> None:
            phase = next(self.phases, None)
            run.write_status(status(phase=phase or "ended", message="stopped as requested\nmore"))
            if phase is None:
                run.close()

    with listening(run, answer), pytest.MonkeyPatch.context() as patch:
        patch.setattr("supervisor.cli.control.time.sleep", Ends())
        assert control.stop(run, Stop(now=True)) == 0
    assert asked == [("/v1/stop", f"Bearer {run.token()}", {"now": True})]
    assert capsys.readouterr().out.splitlines() == [
        "stopping run a-run",
        "saving a checkpoint",
        "stopping",
        "ended: stopped as requested",
    ]


def test_stop_reports_a_run_that_does_not_end(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "STOP_S", 0.02)
    with listening(run, lambda *_: (202, b"{}")):
        assert control.stop(run, Stop()) == 1
        assert "`holdfast stop --now`" in capsys.readouterr().out
        assert control.stop(run, Stop(json=True)) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["ended"]) == (1, False)


def test_stop_is_repeated_until_it_is_received(run: RunDir) -> None:
    answers: list[tuple[int, bytes] | None] = [None, (202, b"{}")]

    def answer(*_: object) -> tuple[int, bytes] | None:
        said = answers.pop(0)
        if not answers:
            run.close()
        return said

    with listening(run, answer):
        assert control.stop(run, Stop(json=True)) == 0
    assert answers == []


def test_inject_prints_the_result(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    bodies: list[object] = []

    def answer(_: str, __: str, ___: str, body: object) -> tuple[int, bytes]:
        bodies.append(body)
        return 202, b"{}"

    with listening(run, answer):
        assert control.inject(run, Inject("kill", 1)) == 0
        assert control.inject(run, Inject("member", 2)) == 0
        assert control.inject(run, Inject("sidecar", 0)) == 0
        assert control.inject(run, Inject("hang", 3, json=True)) == 0
    assert bodies[0] == {"what": "kill", "rank": 1}
    out = capsys.readouterr().out
    assert "kill sent to rank 1 of run a-run; `holdfast incidents` shows the outcome" in out
    assert "sidecar sent to the sidecar of rank 0's member of run a-run; training continues, so" in out
    assert "member sent to the member of rank 2 of run a-run;" in out
    assert json.loads(out[out.index("{") :]) == {"schema": 1, "run": "a-run", "injected": "hang", "rank": 3}


def test_inject_says_why_the_drill_does_not_take_effect_now(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(run, lambda *_: (202, b'{"note": "rank 1 was already stopped"}')):
        assert control.inject(run, Inject("stop", 1)) == 0
        assert control.inject(run, Inject("stop", 1, json=True)) == 0
    out = capsys.readouterr().out
    assert "stop sent to rank 1 of run a-run, but rank 1 was already stopped;" in out
    assert json.loads(out[out.index("{") :])["note"] == "rank 1 was already stopped"


def test_a_drill_is_never_sent_twice(run: RunDir) -> None:
    heard: list[object] = []

    def answer(*said: object) -> None:
        heard.append(said)

    with listening(run, answer), pytest.raises(BadInput, match="the fault may have been injected"):
        control.inject(run, Inject("kill"))
    assert len(heard) == 1


def test_a_supervisor_that_dies_of_its_drill_has_carried_it_out(run: RunDir) -> None:
    with listening(run, lambda *_: None):
        assert control.inject(run, Inject("supervisor")) == 0


def test_a_refusal_is_one_line_with_the_supervisors_reason(run: RunDir) -> None:
    refusal = pytest.raises(BadInput, match="inject was refused: rank 9: there are 2 ranks")
    with listening(run, lambda *_: (409, b"rank 9: there are 2 ranks")), refusal:
        control.inject(run, Inject("kill", 9))


@pytest.mark.parametrize("command", [Stop(), Inject("kill")])
def test_a_run_that_has_ended_cannot_be_asked(run: RunDir, command: Stop | Inject) -> None:
    run.write_run({"api": "http://127.0.0.1:9"})
    run.close()
    ask: Any = control.stop if isinstance(command, Stop) else control.inject
    with pytest.raises(BadInput, match="run a-run is not running"):
        ask(run, command)


def test_an_unresponsive_supervisor_is_reported(run: RunDir) -> None:
    with pytest.raises(BadInput, match="a-run does not respond: its address is not known yet"):
        control.stop(run, Stop())
    with api(lambda *_: None) as url:
        gone = url
    run.write_run({"api": gone})
    with pytest.raises(BadInput, match=r"does not respond: .*refused"):
        control.stop(run, Stop())
