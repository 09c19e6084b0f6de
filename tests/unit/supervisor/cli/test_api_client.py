from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.cli import api_client
from supervisor.cli.api_client import ApiClient, RequestRefused, Unreachable, api_of
from supervisor.store.run_directory import RunDir
from tests.unit.supervisor.api_stub import api


@pytest.fixture
def nobody() -> Iterator[str]:
    """Yield an address where no process listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def test_the_request_has_the_token_and_body_and_the_json_answer_is_returned() -> None:
    asked: list[object] = []
    answers = {"/v1/status": b'{"step": 7}', "/v1/stop": b'{"asked": true}'}

    def answer(method: str, path: str, token: str, body: object) -> tuple[int, bytes]:
        asked.append((method, path, token, body))
        return 200, answers[path]

    with api(answer) as url:
        there = ApiClient(url, "secret")
        assert there.get("/v1/status") == {"step": 7}
        assert there.post("/v1/stop", {"now": False}) == {"asked": True}
    assert asked == [
        ("GET", "/v1/status", "Bearer secret", None),
        ("POST", "/v1/stop", "Bearer secret", {"now": False}),
    ]


def test_a_refusal_is_the_supervisors_message_on_one_line() -> None:
    refusal = pytest.raises(RequestRefused, match=r"^rank 9: there are 2 ranks$")
    with api(lambda *_: (409, b"rank 9: there are\n2 ranks")) as url, refusal:
        ApiClient(url, "").post("/v1/inject", {})
    with api(lambda *_: (500, b"")) as url, pytest.raises(RequestRefused, match="HTTP 500"):
        ApiClient(url, "").get("/v1/status")


def test_without_a_listener_nothing_was_sent(nobody: str) -> None:
    with pytest.raises(Unreachable) as error:
        ApiClient(nobody, "").post("/v1/inject", {})
    assert not error.value.sent


def test_a_server_that_hangs_up_or_never_answers_may_have_received_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api_client, "TIMEOUT_S", 0.05)
    with api(lambda *_: None) as url, pytest.raises(Unreachable) as error:
        ApiClient(url, "").get("/v1/status")
    assert error.value.sent
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(Unreachable) as error:
        ApiClient(f"http://127.0.0.1:{silent.getsockname()[1]}", "").get("/v1/status")
    assert error.value.sent


def test_an_answer_that_is_not_json_is_not_from_a_supervisor() -> None:
    with api(lambda *_: (200, b"<html>")) as url, pytest.raises(Unreachable, match="not JSON"):
        ApiClient(url, "").get("/")


def test_proxies_are_not_used(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setenv("http_proxy", nobody)
    with api(lambda *_: (200, b"1")) as url:
        assert ApiClient(url, "").get("/") == 1


@pytest.mark.parametrize("said", [None, 7, "file:///etc/passwd", "https://x"])
def test_a_run_without_a_recorded_address_has_no_api(tmp_path: Path, said: object) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "run.json").write_text(json.dumps({"api": said}))
    assert api_of(RunDir(tmp_path)) is None


def test_address_and_token_are_read_from_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert api_of(run) is None
    run.write_run({"api": "http://127.0.0.1:1/"})
    assert api_of(run) is None
    run.token_file.write_text("secret\n")
    assert api_of(run) == ApiClient("http://127.0.0.1:1", "secret")
