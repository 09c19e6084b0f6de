"""Messages between keeper and supervisor are encoded and decoded, and other bytes do no harm."""

from __future__ import annotations

import asyncio
import json
import socket
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from supervisor.local import backend as backend_module
from supervisor.local import keeper_messages
from supervisor.local.backend import LocalBackend
from supervisor.local.keeper.keeper import LocalKeeper
from supervisor.local.keeper.process_specs import RunSpec
from supervisor.local.keeper.supervisor_process import MAX_REFUSALS
from supervisor.local.keeper_messages import (
    Alive,
    Finish,
    GiveUpMember,
    Hello,
    KeeperState,
    Renew,
    Request,
    StopRun,
    Want,
)
from supervisor.view.model import Completion

STATE = KeeperState({"m0": "running"}, "")
_texts = st.text(max_size=20)
_requests: st.SearchStrategy[Request] = st.one_of(
    st.just(Hello()),
    st.just(Alive()),
    st.builds(Want, st.integers(0, 1 << 20), st.lists(_texts, max_size=3).map(tuple)),
    st.builds(GiveUpMember, _texts),
    st.builds(Renew, _texts),
    st.builds(StopRun, _texts),
    st.builds(Finish, st.integers(0, 255), _texts, _texts),
)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[tuple[LocalKeeper, socket.socket]]:
    """Return a keeper without processes, and the supervisor's end of its connection."""
    with socket.socket() as api:
        kept = LocalKeeper(RunSpec(("train.py",), 1, 0, "auto", tmp_path, tmp_path, {}, ()), api)
        here, there = socket.socketpair()
        kept._supervisor.connect(here)
        with there:
            yield kept, there
        kept._supervisor.disconnect()


def deliver(keeper: tuple[LocalKeeper, socket.socket], data: bytes) -> list[KeeperState]:
    """Send `data` to the keeper as one piece, and return its answers."""
    kept, there = keeper
    there.setblocking(False)
    for at in range(0, len(data), 1 << 16):
        there.sendall(data[at : at + (1 << 16)])
        kept._supervisor.receive()
    answers = b""
    while True:
        try:
            answers += there.recv(1 << 16)
        except BlockingIOError:
            break
    return [keeper_messages.decode_state(line) for line in answers.splitlines()]


@given(_requests)
def test_every_request_is_read_as_written(request: Request) -> None:
    line = keeper_messages.encode_request(request)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert keeper_messages.decode_request(line) == request


def test_the_table_has_every_request() -> None:
    assert set(keeper_messages.REQUESTS.values()) == set(typing.get_args(keeper_messages.Request))


def test_a_request_is_an_object_with_its_name_and_its_fields() -> None:
    line = keeper_messages.encode_request(Want(2, ("m0",)))
    assert json.loads(line) == {"do": "want", "count": 2, "discard": ["m0"]}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "request: not JSON"),
        (b"\xff", "request: not JSON"),
        (b'{"do":"want","cou', "request: not JSON"),
        (b"[" * 100_000, "request: not JSON"),
        (b"[]", "request: [] is not an object"),
        (b"{}", "request.do: None is not one of hello, alive"),
        (b'{"do":"dance"}', "request.do: 'dance' is not one of hello, alive"),
        (b'{"do":["want"]}', "request.do: ['want'] is not one of"),
        (b'{"do":"want","discard":[]}', "Want.count: missing"),
        (b'{"do":"want","count":"2","discard":[]}', "Want.count: '2' is not int"),
        (b'{"do":"kill","name":7}', "GiveUpMember.name: 7 is not str"),
        (b" " * (codec.MAX_MESSAGE_BYTES + 1), f"the limit is {codec.MAX_MESSAGE_BYTES}"),
    ],
)
def test_a_line_that_is_not_a_request_is_refused_by_name(line: bytes, why: str) -> None:
    with pytest.raises(codec.InvalidMessage) as refused:
        keeper_messages.decode_request(line)
    assert why in str(refused.value)
    assert len(str(refused.value)) < 300


@given(st.binary(max_size=100))
def test_any_bytes_are_read_or_refused(line: bytes) -> None:
    for decode in (keeper_messages.decode_request, keeper_messages.decode_state):
        try:
            decode(line)
        except codec.InvalidMessage:
            continue


def test_fields_of_a_later_version_are_ignored() -> None:
    assert keeper_messages.decode_request(b'{"do":"kill","name":"m0","soon":true}') == GiveUpMember("m0")
    line = b'{"members":{"m0":"running"},"stop":"","more":1}'
    assert keeper_messages.decode_state(line) == STATE


def test_the_message_about_the_end_of_a_run_always_fits() -> None:
    line = keeper_messages.encode_request(Finish(1, "\x00" * 10_000_000, "\N{SNOWMAN}" * 10_000_000))
    found = keeper_messages.decode_request(line)
    assert isinstance(found, Finish)
    assert "characters is omitted" in found.why or "[...]" in found.why
    long = Finish(0, "done; " + "\x00" * 10_000_000, "", Completion(notes=("\x00" * 10_000_000,)))
    found = keeper_messages.decode_request(keeper_messages.encode_request(long))
    assert isinstance(found, Finish)
    assert found.completion is None, "the parts of a sentence that was shortened"


def test_the_parts_of_the_last_sentence_arrive(keeper: tuple[LocalKeeper, socket.socket]) -> None:
    parts = Completion("no checkpoint", ("one note", "another"), 2)
    deliver(keeper, keeper_messages.encode_request(Finish(0, "done", "", parts)))
    assert keeper[0].finished is not None
    assert keeper[0].finished.completion == parts


def test_a_supervisor_of_an_earlier_version_sends_no_parts() -> None:
    line = b'{"do":"finish","code":0,"why":"done","message":""}'
    assert keeper_messages.decode_request(line) == Finish(0, "done", "")


# -- the keeper's side


def test_the_keeper_answers_every_request_but_a_sign_of_life(
    keeper: tuple[LocalKeeper, socket.socket],
) -> None:
    for request in (Hello(), Want(0, ()), GiveUpMember("m7"), Renew("m7"), Finish(3, "why", "")):
        assert deliver(keeper, keeper_messages.encode_request(request)) == [KeeperState({}, "")]
    assert (
        deliver(keeper, keeper_messages.encode_request(StopRun("graceful")))
        == [KeeperState({}, "graceful")] * 2
    )
    assert deliver(keeper, keeper_messages.encode_request(Alive())) == []


def test_a_repeated_request_has_no_further_effect(keeper: tuple[LocalKeeper, socket.socket]) -> None:
    kept, _ = keeper
    for request in (Hello(), Alive(), Want(0, ("m0",)), GiveUpMember("m0"), Renew("m0"), StopRun("graceful")):
        deliver(keeper, keeper_messages.encode_request(request))
        before = (dict(kept._members.by_name), kept.stop, kept.finished, list(kept.news))
        deliver(keeper, keeper_messages.encode_request(request))
        assert (dict(kept._members.by_name), kept.stop, kept.finished, list(kept.news)) == before
    twice = keeper_messages.encode_request(Finish(3, "why", "how")) * 2
    deliver(keeper, twice)
    assert kept.finished is not None
    assert (kept.finished.code, kept.finished.why, kept.finished.message) == (3, "why", "how")


def test_a_request_is_carried_out_once_however_it_is_split(keeper: tuple[LocalKeeper, socket.socket]) -> None:
    line = keeper_messages.encode_request(Finish(3, "why", ""))
    for at in range(len(line)):
        keeper[0].finished = None
        assert deliver(keeper, line[:at]) == [], "an incomplete line is not a request"
        assert len(deliver(keeper, line[at:])) == 1
        assert keeper[0].finished is not None


def test_the_keeper_reports_a_malformed_request_once_and_carries_out_the_next(
    keeper: tuple[LocalKeeper, socket.socket],
) -> None:
    stop = keeper_messages.encode_request(StopRun("graceful"))
    assert len(deliver(keeper, b'{"do":"dance"}\n{"do":"dance"}\n' + stop)) == 4
    [line] = keeper[0].news
    assert line.startswith("a message from the supervisor was refused: request.do: 'dance' is not one of")
    assert keeper[0].stop == "graceful"


def test_an_overlong_line_costs_the_keeper_bounded_memory_and_no_other_line(
    keeper: tuple[LocalKeeper, socket.socket],
) -> None:
    too_long = b'{"do":"stop","how":"' + b"x" * (2 * codec.MAX_MESSAGE_BYTES)
    assert deliver(keeper, too_long) == []
    assert len(keeper[0]._supervisor._received._unfinished) == codec.MAX_MESSAGE_BYTES + 1
    stop = keeper_messages.encode_request(StopRun("graceful"))
    assert [state.stop for state in deliver(keeper, b'"}\n' + stop)] == ["", "graceful", "graceful"]
    assert f"the limit is {codec.MAX_MESSAGE_BYTES}" in keeper[0].news[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(st.binary(max_size=50), max_size=5))
def test_any_bytes_leave_the_keeper_running(
    keeper: tuple[LocalKeeper, socket.socket], pieces: list[bytes]
) -> None:
    for piece in pieces:
        deliver(keeper, piece)
    assert deliver(keeper, b"\n" + keeper_messages.encode_request(Hello()))
    assert len(keeper[0].news) <= MAX_REFUSALS


# -- the supervisor's side


async def test_the_supervisor_takes_states_and_logs_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    taken: list[list[str]] = []
    refused: list[str] = []
    monkeypatch.setattr(backend_module.log, "warning", lambda _, extra: refused.append(extra["error"]))
    backend = LocalBackend(here, lambda: taken.append(list(backend.members)))
    state = codec.encode(STATE)
    too_long = b"x" * (2 * codec.MAX_MESSAGE_BYTES) + b"\n"
    _, writer = await asyncio.open_connection(sock=there)
    running = asyncio.create_task(backend.run())
    for piece in (state[:7], state[7:], b"\xff\n", b'{"members":3}\n', too_long, state, state):
        writer.write(piece)
        await writer.drain()
    writer.close()
    await asyncio.wait_for(running, 30.0)
    assert backend._writer is not None
    backend._writer.close()
    assert taken == [["m0"]] * 3
    assert backend.known.is_set()
    assert refused == [
        "KeeperState: not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "KeeperState.members: 3 is not an object",
        f"KeeperState: {codec.MAX_MESSAGE_BYTES + 1} bytes; the limit is {codec.MAX_MESSAGE_BYTES}",
    ]


async def test_the_supervisor_repeats_a_request_only_when_a_member_has_appeared_or_disappeared() -> None:
    here, there = socket.socketpair()
    backend = LocalBackend(here, lambda: None)
    reader, writer = await asyncio.open_connection(sock=there)
    running = asyncio.create_task(backend.run())
    for state in (KeeperState({}, ""), STATE, STATE):
        writer.write(codec.encode(state))
        await asyncio.sleep(0.05)
        backend.want(2, ())
        backend.want(2, ())
    backend.finish(0, "done", "", None)
    writer.write_eof()
    await asyncio.wait_for(running, 30.0)
    assert backend._writer is not None
    backend._writer.close()
    lines = [await reader.readline() for _ in range(4)]
    writer.close()
    found = [keeper_messages.decode_request(line) for line in lines]
    assert found == [Hello(), Want(2, ()), Want(2, ()), Finish(0, "done", "")]
