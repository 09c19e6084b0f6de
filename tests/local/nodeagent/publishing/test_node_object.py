"""The client of the Node object, against a server that answers in unusual ways."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nodeagent.publishing.node_object import NodeObject, NotWritten
from tests.local.nodeagent.publishing.nodes_api import HOST, NodesApi

pytestmark = pytest.mark.local


@pytest.fixture
def api(tmp_path: Path) -> Iterator[NodesApi]:
    server = NodesApi(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def node(api: NodesApi) -> NodeObject:
    return NodeObject(HOST, api.port, "node1", api.account)


def test_a_server_that_is_busy_says_how_long_to_wait(api: NodesApi, node: NodeObject) -> None:
    api.answer = lambda: (429, {"Retry-After": "7"})
    assert node.patch_status({}) == NotWritten(
        "429", "the API server refuses the write: 429 it is refused", 7.0
    )
    api.answer = lambda: (503, {"Retry-After": "Thu, 26 Nov 2026 09:00:00 GMT"})
    failed = node.patch_status({})
    assert failed is not None
    assert (failed.kind, failed.wait_s) == ("503", 0.0)


def test_a_name_cannot_leave_its_place_in_the_path(api: NodesApi, node: NodeObject) -> None:
    assert replace(node, node="a/../b?c").patch_status({}) is None
    assert api.heads[0][0] == "/api/v1/nodes/a%2F..%2Fb%3Fc/status?fieldManager=holdfast-nodeagent"


@pytest.mark.parametrize("text", ["", "secret\nX-Header: y", "secr\x00et"])
def test_a_file_without_a_token_is_told_without_its_content(
    text: str, api: NodesApi, node: NodeObject
) -> None:
    (api.account / "token").write_text(text)
    failed = node.patch_status({})
    assert failed is not None
    assert failed.kind == "account"
    assert "secr" not in failed.why
    assert api.tries == 0


def test_missing_files_are_a_failure_that_names_them(api: NodesApi, node: NodeObject, tmp_path: Path) -> None:
    (api.account / "token").unlink()
    failed = node.patch_status({})
    assert failed is not None
    assert "token" in failed.why
    failed = replace(node, account=tmp_path / "missing").patch_status({})
    assert failed is not None
    assert (failed.kind, "missing" in failed.why) == ("account", True)


def test_a_server_that_accepts_and_says_nothing_is_given_up(node: NodeObject) -> None:
    with socket.create_server((HOST, 0)) as silent:
        failed = replace(node, port=silent.getsockname()[1]).patch_status({}, 0.2)
    assert failed is not None
    assert failed.kind == "unreachable"


def test_the_answer_is_asked_to_be_short(api: NodesApi, node: NodeObject) -> None:
    assert node.patch_status({"status": {}}) is None
    assert api.heads[0][1]["Accept"].startswith("application/json;as=PartialObjectMetadata")
    assert api.received == [{"status": {}}]
