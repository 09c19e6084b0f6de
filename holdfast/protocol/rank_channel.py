"""Exchange messages, one per packet, and file descriptors between a rank's process and its launcher."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar

from holdfast.protocol import codec
from holdfast.protocol.drills import DrillName
from holdfast.protocol.launcher_messages import BadNumber, Ending, Launch, RankStart, SecureAnswer, StartTimes

_MAX_PACKET_BYTES = 160 << 10  # less than the default socket buffer, so every packet fits into it
_MAX_DESCRIPTORS = 4
_CUT = " [...]"

T = TypeVar("T")

# The reports of ranks and fork servers (`WorkerMessage.what`), grouped by the module that receives them.
PoolReport: TypeAlias = Literal["born", "parked", "unparkable"]
RankReport: TypeAlias = Literal[
    "started", "settled", "flag", "failing", "withdrawn", "secured", "note", "where", "left"
]
ForkServerReport: TypeAlias = Literal["ready", "unforkable"]
# The orders to ranks and fork servers (`WorkerOrder.do`).
RankAction: TypeAlias = Literal["start", "secure", "where", "drill"]
ForkAction: TypeAlias = Literal["fork", "member", "part"]


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A report from a rank or a fork server to its launcher, or from a member or a part to its keeper.

    `what` is "ready" or "unforkable" (from a fork server, after its imports), "born" (a new process, with its
    `pid`), "parked" or "unparkable" (from a warm process), "started" and "settled" (with `marks`), "flag" (a
    bad number), "failing" (with `ending`, and with `secured` if the rank has tried to copy its state),
    "withdrawn" (that ending no longer applies), "secured", "note", "where", and "left" (the `note` says why
    no copy has the script's final state).
    """

    what: Literal[ForkServerReport, PoolReport, RankReport]
    pid: int = 0
    marks: StartTimes | None = None
    flag: BadNumber | None = None
    ending: Ending | None = None
    secured: SecureAnswer | None = None
    note: str = ""
    where: str = ""  # a result of `holdfast.worker.thread_frames`


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """An order from a launcher to its rank, or from a launcher or keeper to a fork server.

    "fork" is for a zygote; "member" and "part" are for the keeper's fork servers.
    """

    do: Literal[RankAction, ForkAction]
    launch: Launch | None = None
    rank: RankStart | None = None
    generation: int = 0
    drill: Literal[DrillName, ""] = ""
    local_rank: int = 0
    argv: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables
    copy: bool = True  # for "secure": whether to copy the state, in addition to taking no further steps
    inherits: tuple[str, ...] = ()  # the variables with the numbers of the descriptors that a part inherits


class Closed(Exception):
    """The other end is closed."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    sock: socket.socket,
    message: WorkerMessage | WorkerOrder,
    descriptors: tuple[int, ...] = (),
    *,
    wait: bool = True,
) -> None:
    """Send one message. If a `WorkerMessage` is too long, its longest text is truncated.

    Raises:
        BlockingIOError: The buffer is full, because the other end has not read for a long time. Nothing was
            sent. This is raised only if `wait` is False.
        Closed: The other end is closed.
        InvalidMessage: An order is too long. Unlike a report, it cannot be shortened.
    """
    data = codec.encode(message)
    while len(data) > _MAX_PACKET_BYTES:
        if isinstance(message, WorkerOrder):
            raise codec.InvalidMessage(f"{message.do}: {len(data)} bytes do not fit into a packet")
        message = _shortened(message, len(data) - _MAX_PACKET_BYTES)
        data = codec.encode(message)
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
    try:
        sock.sendmsg([data], passed if descriptors else [], 0 if wait else socket.MSG_DONTWAIT)
    except (BrokenPipeError, ConnectionError):
        raise Closed from None


def _shortened(message: WorkerMessage, excess: int) -> WorkerMessage:
    """Return `message` with its longest text shortened by at least `excess` encoded bytes."""
    texts = _texts(message)
    path = max(texts, key=lambda each: _sent_bytes(texts[each]))
    text = texts[path]
    kept, left = text, _sent_bytes(text) - excess - len(_CUT)
    assert left > 0, "a message without its longest text fits in a packet"
    while _sent_bytes(kept) > left:
        kept = kept[: min(len(kept) - 1, len(kept) * left // _sent_bytes(kept))]
    return _replaced(message, path, kept + _CUT)


def _texts(part: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Return the texts of a message, keyed by the path of field names that leads to each."""
    found: dict[tuple[str, ...], str] = {}
    for field_ in fields(part):
        value, here = getattr(part, field_.name), (*path, field_.name)
        if isinstance(value, str):
            found[here] = value
        elif is_dataclass(value):
            found |= _texts(value, here)
    return found


def _replaced(part: T, path: tuple[str, ...], text: str) -> T:
    name, *rest = path
    value = _replaced(getattr(part, name), tuple(rest), text) if rest else text
    return replace(part, **{name: value})  # type: ignore[type-var]


def _sent_bytes(text: str) -> int:
    return len(json.dumps(text))


def receive(sock: socket.socket, kind: type[T], wait: bool = True) -> tuple[T, list[int]]:
    """Return the next message and its descriptors, which the caller must close.

    Raises `Closed` if the other end is closed, `BlockingIOError` if no message is ready and `wait` is false,
    or `InvalidMessage` if the message cannot be decoded.
    """
    room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
    try:
        data, passed, _, _ = sock.recvmsg(_MAX_PACKET_BYTES, room, 0 if wait else socket.MSG_DONTWAIT)
    except ConnectionError:
        raise Closed from None
    if not data:
        raise Closed
    descriptors = array.array("i")
    for level, what, raw in passed:
        if level == socket.SOL_SOCKET and what == socket.SCM_RIGHTS:
            descriptors.frombytes(raw[: len(raw) - len(raw) % 4])
    return codec.decode(kind, data), list(descriptors)
