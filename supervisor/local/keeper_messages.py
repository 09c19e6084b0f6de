"""Messages between the keeper (`holdfast run`) and the supervisor of a local run.

Each message is one JSON line on a socket pair. The supervisor sends requests, which are safe to repeat. The
keeper sends its whole state to a new supervisor, at every change, and after every request except `Alive`.
Each side ignores unknown fields, because an upgrade of Holdfast during a run can start a supervisor that is
newer than the keeper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from holdfast.protocol import codec, foreign_text
from supervisor.view.model import Completion, StopRequest

# The limit for each text in `Finish`. If the keeper refused the message, it would restart the supervisor
# endlessly.
MAX_TEXT_BYTES = 1 << 20
_MAX_NAME = 60  # how many characters of an unknown name are shown


@dataclass(frozen=True, slots=True)
class Hello:
    """A new supervisor requests the state."""


@dataclass(frozen=True, slots=True)
class Alive:
    """The event loop of the supervisor is running."""


@dataclass(frozen=True, slots=True)
class Want:
    """Maintain `count` members besides those in `discard`, and end the members in `discard`."""

    count: int
    discard: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GiveUpMember:
    """End a member, with the same effect as a power loss."""

    name: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Check the sidecar of a member, and replace it if it is stopped or stuck."""

    name: str


@dataclass(frozen=True, slots=True)
class StopRun:
    """The user has asked the supervisor to end the run. `how` has the same values as `JobState.stop`."""

    how: StopRequest


@dataclass(frozen=True, slots=True)
class Finish:
    """The run has ended. `code` is the exit code of `holdfast run`.

    `completion` has the parts of `why` if the script has finished and the parts are known.
    """

    code: int
    why: str
    message: str
    completion: Completion | None = None


Request: TypeAlias = Hello | Alive | Want | GiveUpMember | Renew | StopRun | Finish

REQUESTS: Mapping[str, type[Request]] = {
    "hello": Hello,
    "alive": Alive,
    "want": Want,
    "kill": GiveUpMember,
    "renew": Renew,
    "stop": StopRun,
    "finish": Finish,
}
_NAMES = {kind: name for name, kind in REQUESTS.items()}


@dataclass(frozen=True, slots=True)
class KeeperState:
    """All of the keeper's state that the supervisor needs."""

    members: Mapping[str, str]  # "running" for each existing member, by name
    stop: StopRequest  # how the user asked the run to stop: see `JobState.stop`
    volume_error: str = ""  # why the states in the members' memory cannot be used


def encode_request(request: Request) -> bytes:
    """Return a request as one JSON line with its newline. `do` is the name of the request."""
    if isinstance(request, Finish):
        request = _bounded(request)
    named = {"do": _NAMES[type(request)], **asdict(request)}
    return json.dumps(named, separators=(",", ":")).encode() + b"\n"


def _bounded(finish: Finish) -> Finish:
    """Return `finish` with its texts cut to the limit. If `why` is cut, `completion` is left out."""
    short = foreign_text.each(finish, MAX_TEXT_BYTES)
    return short if short.why == finish.why else replace(short, completion=None)


def decode_request(line: bytes) -> Request:
    """Return the request in `line`. Raises only `InvalidMessage`."""
    value = codec.parse(line, "request")
    if not isinstance(value, dict):
        raise codec.InvalidMessage(f"request: {_short(value)} is not an object")
    do = value.pop("do", None)
    kind = REQUESTS.get(do) if isinstance(do, str) else None
    if kind is None:
        raise codec.InvalidMessage(f"request.do: {_short(do)} is not one of {', '.join(REQUESTS)}")
    return codec.from_json(kind, value, lenient=True)


def decode_state(line: bytes) -> KeeperState:
    """Return the state in `line`. Raises only `InvalidMessage`."""
    return codec.from_json(KeeperState, codec.parse(line, "KeeperState"), lenient=True)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 3] + "..."
