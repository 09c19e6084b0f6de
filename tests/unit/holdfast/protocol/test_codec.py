"""Messages are encoded as JSON and decoded again, and invalid ones are refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec, launcher_messages, member_messages, rank_channel
from holdfast.protocol.launcher_messages import BadNumber, LauncherState, StartTimes
from holdfast.protocol.member_messages import (
    HeldPrivateState,
    MemberOrder,
    MemberReport,
    RankProgress,
    StateSource,
)
from holdfast.protocol.progress import MAX_AMENDED, MAX_VOID

KINDS: dict[str, type[Any]] = {
    name: kind
    for module in (member_messages, rank_channel)
    for name, kind in vars(module).items()
    if dataclasses.is_dataclass(kind) and isinstance(kind, type)
}

_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    str: st.text(max_size=8),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    Any: st.integers(0, 9),  # the receiver checks such values itself
}

_SECONDS = st.floats(-codec.MAX_SECONDS, codec.MAX_SECONDS)
_BUILT: dict[type[Any], st.SearchStrategy[Any]] = {}  # a message is a part of others


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values that a field of type `hint` may have."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if dataclasses.is_dataclass(hint):
        return instances(typing.cast("type[Any]", hint))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return st.sampled_from(args) | _SCALARS[str]  # a newer peer may send other words
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    if origin is not None and issubclass(origin, Mapping):
        return st.dictionaries(values(args[0]), values(args[1]), max_size=2)
    [given_kind] = [each for each in args if each is not type(None)]
    return st.none() | values(given_kind)


def instances(kind: type[Any]) -> st.SearchStrategy[Any]:
    if kind not in _BUILT:
        hints = typing.get_type_hints(kind)
        fields = {
            f.name: _SECONDS if codec.is_seconds(f.name, hints[f.name]) else values(hints[f.name])
            for f in dataclasses.fields(kind)
        }
        _BUILT[kind] = st.builds(kind, **fields)
    return _BUILT[kind]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_message_survives_encoding_and_decoding(kind: type[Any], data: st.DataObject) -> None:
    message = data.draw(instances(kind))
    line = codec.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert codec.decode(kind, line) == message
    assert codec.encode(codec.decode(kind, line.decode())) == line


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_a_message_or_invalid_and_nothing_else(value: Any) -> None:
    for kind in (MemberReport, MemberOrder, LauncherState, BadNumber, rank_channel.WorkerMessage):
        try:
            found = codec.decode(kind, json.dumps(value))
        except codec.InvalidMessage:
            continue
        assert isinstance(found, kind)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[type[Any], Any]:
    """Return a kind and its JSON with one field replaced by anything."""
    kind = draw(
        st.sampled_from(
            [RankProgress, StateSource, BadNumber, launcher_messages.Launch, launcher_messages.Ending]
        )
    )
    found = json.loads(codec.encode(draw(instances(kind))))
    found[draw(st.sampled_from(sorted(found)))] = draw(JSON)
    return kind, found


@given(damaged())
def test_a_field_of_another_type_is_refused_by_name(case: tuple[type[Any], Any]) -> None:
    kind, found = case
    try:
        message = codec.from_json(kind, found)
    except codec.InvalidMessage as error:
        refused = str(error)
    else:
        hints = typing.get_type_hints(kind)
        assert all(type(getattr(message, n)) is h for n, h in hints.items() if h in _SCALARS)
        return
    assert refused.startswith(f"{kind.__name__}.")


FLAG = '{"kind":"nan","step":%s,"loss":"nan","position":0,"at_ns":0}'


@pytest.mark.parametrize(
    ("kind", "line", "why"),
    [
        (BadNumber, "", "BadNumber: not JSON"),
        (BadNumber, b"\xff", "BadNumber: not JSON"),
        (BadNumber, "[" * 100_000, "BadNumber: not JSON"),
        (BadNumber, "[]", "BadNumber: [] is not an object"),
        (BadNumber, FLAG % "true", "BadNumber.step: True is not int"),
        (BadNumber, FLAG % "1.0", "BadNumber.step: 1.0 is not int"),
        (BadNumber, FLAG % (1 << 64), "BadNumber.step: out of range"),
        (BadNumber, FLAG % ("9" * 5000), "BadNumber: not JSON"),
        (BadNumber, '{"kind":"nan"}', "BadNumber.step: missing"),
        (BadNumber, '{"x":1}', "BadNumber.'x': unknown field"),
        (
            member_messages.CheckpointReport,
            '{"seconds":1e999}',
            "CheckpointReport.seconds: inf is not a finite number",
        ),
        (
            member_messages.CheckpointReport,
            '{"seconds":NaN}',
            "CheckpointReport.seconds: nan is not a finite number",
        ),
        (member_messages.CheckpointReport, '{"seconds":1%s}' % ("0" * 400), "CheckpointReport.seconds: 1"),
        (LauncherState, '{"parked":[1,"x"]}', "LauncherState.pid: missing"),
        (launcher_messages.Launch, '{"skip":3}', "Launch.generation: missing"),
        (MemberOrder, '{"do":"run","generation":1,"sources":[{}]}', "MemberOrder.sources[0].url: missing"),
        (MemberOrder, '{"do":"run","generation":1,"ranks":{}}', "MemberOrder.ranks: {} is not a list"),
    ],
)
def test_the_error_names_the_defect(kind: type[Any], line: str | bytes, why: str) -> None:
    with pytest.raises(codec.InvalidMessage) as caught:
        codec.decode(kind, line)
    assert str(caught.value).startswith(why)
    assert len(str(caught.value)) < 300


def test_a_message_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(codec.InvalidMessage, match="the limit is 4194304"):
        codec.decode(BadNumber, b" " * (codec.MAX_MESSAGE_BYTES + 1))
    long = json.dumps({"url": "x" * (codec.MAX_TEXT + 1)})
    with pytest.raises(codec.InvalidMessage, match=r"Source\.url: a text of 1048577 characters"):
        codec.decode(StateSource, long)
    many = json.dumps({"do": "run", "generation": 1, "ranks": [0] * (codec.MAX_ITEMS + 1)})
    with pytest.raises(codec.InvalidMessage, match="not a list of at most 16384"):
        codec.decode(MemberOrder, many)


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _NamedAndAged(_Named):
    age: int = 0


@dataclasses.dataclass(frozen=True)
class _WithoutSlots:
    age: int = 0


@pytest.mark.parametrize(
    "message",
    [StartTimes(1, 2, 3, 4, 5), _NamedAndAged("a", 3), _WithoutSlots(4)],
    ids=lambda m: type(m).__name__,
)
def test_a_decoded_message_cannot_be_told_from_one_that_was_constructed(message: Any) -> None:
    decoded = codec.decode(type(message), codec.encode(message))
    assert type(decoded) is type(message)
    assert decoded == message
    assert hash(decoded) == hash(message)
    assert repr(decoded) == repr(message)
    assert pickle.loads(pickle.dumps(decoded)) == message
    name = dataclasses.fields(message)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(decoded, name, getattr(message, name))


def test_whole_numbers_are_accepted_as_fractions() -> None:
    found = codec.decode(member_messages.CheckpointReport, '{"seconds":3}')
    assert (found.seconds, type(found.seconds)) == (3.0, float)


def test_values_that_a_class_refuses_are_an_invalid_message() -> None:
    @dataclasses.dataclass(frozen=True)
    class Picky:
        size: int

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError(f"size: {self.size} is below 0")

    with pytest.raises(codec.InvalidMessage, match="Picky: size: -1 is below 0"):
        codec.decode(Picky, '{"size":-1}')


def test_the_report_of_the_largest_member_is_accepted() -> None:
    ranks = range(codec.MAX_RANKS)
    text, late = "x" * 32, tuple(range(10**9, 10**9 + 8))
    report = MemberReport(
        protocol=1,
        member="member-0",
        node="",
        sidecar_pid=1,
        sequence=1,
        now_ns=1,
        nproc=codec.MAX_RANKS,
        launcher=None,
        peer_url="",
        progress=tuple(
            RankProgress(
                rank=rank,
                step=10**9,
                phase="forward",
                label=text,
                loss=text,
                grad_norm=text,
                samples=10**12,
                tokens=10**12,
                flops=1e18 / 7,
                step_s=1 / 7,
                p99_s=1 / 7,
                snapshot_step=10**9,
                late=late,
                amended=late,
            )
            for rank in ranks
        ),
        privates=tuple(
            HeldPrivateState(rank, 100, 10**9 + each, final=True) for rank in ranks for each in range(32)
        ),
    )
    assert codec.decode(MemberReport, codec.encode(report)) == report


@given(st.lists(st.binary(max_size=20).map(lambda each: each.replace(b"\n", b"")), max_size=4), st.data())
def test_lines_are_the_same_however_the_stream_is_split(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    at = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    buffer = codec.LineBuffer()
    pieces = [stream[a:b] for a, b in zip([0, *at], [*at, len(stream)], strict=True)]
    assert [line for piece in pieces for line in buffer.split(piece)] == lines
    assert buffer.split(b"\n") == [b"rest"]


def test_a_line_beyond_the_limit_is_cut_and_the_next_one_is_whole() -> None:
    buffer = codec.LineBuffer()
    longest = b"y" * codec.MAX_MESSAGE_BYTES
    assert buffer.split(longest) == []
    assert not buffer.is_overlong
    assert buffer.split(b"\n") == [longest]
    for _ in range(3):
        assert buffer.split(b"x" * (codec.MAX_MESSAGE_BYTES // 2)) == []
    assert buffer.is_overlong
    [cut, after] = buffer.split(b"x\nafter\n")
    assert cut == b"x" * (codec.MAX_MESSAGE_BYTES + 1)
    assert after == b"after"
    assert not buffer.is_overlong
    with pytest.raises(codec.InvalidMessage, match="the limit is"):
        codec.decode(BadNumber, cut)


def _parts(kind: Any) -> set[Any]:
    """Return `kind` and all dataclasses within it."""
    found, pending = set(), [kind]
    while pending:
        hint = pending.pop()
        if dataclasses.is_dataclass(hint) and hint not in found:
            found.add(hint)
            pending += typing.get_type_hints(hint).values()
        pending += typing.get_args(hint)
    return found


def test_every_list_in_a_report_has_its_own_limit() -> None:
    """A list of small numbers takes ten times the memory of its text, and reports have lists within lists."""
    unlimited = {
        (kind.__name__, each.name)
        for kind in _parts(MemberReport)
        for each in dataclasses.fields(kind)
        if typing.get_origin(typing.get_type_hints(kind)[each.name]) is tuple
        if each.metadata.keys().isdisjoint(codec.at_most(1))
    }
    assert unlimited == {("MemberReport", "privates")}


@pytest.mark.parametrize(("name", "most"), [("late", MAX_VOID), ("amended", MAX_AMENDED)])
def test_a_list_that_is_longer_than_its_limit_is_refused(name: str, most: int) -> None:
    progress = RankProgress(0, 5, "data", "", "1.0", "1.0", 0, 0, 0.0, 0.1, 0.2, 4)
    value = json.loads(codec.encode(progress))
    longest = codec.from_json(RankProgress, {**value, name: list(range(most))})
    assert getattr(longest, name) == tuple(range(most))
    with pytest.raises(codec.InvalidMessage, match=rf"\.{name}: .* is not a list of at most {most}"):
        codec.from_json(RankProgress, {**value, name: list(range(most + 1))})


@dataclasses.dataclass(frozen=True)
class Grown:
    """A message with a field that older versions do not know."""

    step: int
    places: tuple[int, ...] = dataclasses.field(default=(), metadata=codec.added())


def test_a_field_that_older_versions_do_not_know_is_sent_only_if_it_is_needed() -> None:
    """An older receiver refuses a message with a field that it does not know."""
    assert codec.encode(Grown(3)) == b'{"step":3}\n'
    for message in (Grown(3), Grown(3, (1, 0))):
        assert codec.decode(Grown, codec.encode(message)) == message
