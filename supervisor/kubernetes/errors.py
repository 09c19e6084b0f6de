"""Define the exceptions for failed requests to the API server, and map responses to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MESSAGE_CHARS = 2000  # a longer message from the server is truncated


class ApiError(Exception):
    """The API server refused a request. `message` is the server's message, and `status` the HTTP status.

    `warnings` are those of the admission webhooks that saw the request before it was refused.
    """

    def __init__(self, request: str, message: str, status: int) -> None:
        super().__init__(f"{request}: {message}")
        self.request, self.message, self.status = request, message, status
        self.warnings: tuple[str, ...] = ()


class NotFound(ApiError):
    """The object, or its kind, does not exist."""


class AlreadyThere(ApiError):
    """An object with this name already exists."""


class Conflict(ApiError):
    """The object no longer satisfies the request's condition; read it again."""


class Gone(ApiError):
    """The server no longer has this resource version or continuation; list again."""


class Forbidden(ApiError):
    """The account lacks the permission, or a quota or an admission check refuses the request."""


class Unauthenticated(ApiError):
    """The server does not accept the credentials, even after they were reloaded."""


class InvalidObject(ApiError):
    """The server refused the object or the request. The message says which field is wrong, and why."""


class EvictionBlocked(ApiError):
    """A PodDisruptionBudget does not allow this eviction now."""


class ServerUnreachable(OSError):
    """No usable response arrived.

    There was no connection, or the response was late, too long, not JSON, or had the status 429 or 5xx.
    `sent` is False only if the request cannot have reached the server. Otherwise, the request may have been
    carried out.
    """

    def __init__(self, request: str, message: str, sent: bool = True) -> None:
        super().__init__(f"{request}: {message}")
        self.request, self.message, self.sent = request, message, sent


class AnswerTooLong(ServerUnreachable):
    """The response is longer than the limit. A request for less may succeed."""


_BY_STATUS: Mapping[int, type[ApiError]] = {
    400: InvalidObject,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: InvalidObject,
    422: InvalidObject,
}


class WatchStalled(ServerUnreachable):
    """A watch delivered neither an event nor a bookmark for too long; list again.

    There are two possible causes. The connection may be half open. Or the server's store was restored from a
    backup, and the server waits for a version that the store has not reached yet.
    """


def refusal(request: str, status: int, answer: Mapping[str, Any]) -> Exception:
    """Return the exception for `answer`, a Status object from the API server."""
    message = " ".join(str(answer.get("message") or answer.get("reason") or "").split())[:MESSAGE_CHARS]
    causes = _causes(answer, "reason")
    kind = _BY_STATUS.get(status, ApiError)
    if status == 409 and answer.get("reason") == "AlreadyExists":
        kind = AlreadyThere
    elif status == 422 and "metadata.uid" in _causes(answer, "field"):  # the patch was conditional on the uid
        kind = Conflict
    elif status == 429 and "DisruptionBudget" in causes:
        kind = EvictionBlocked
    elif "ResourceVersionTooLarge" in causes:  # its store was restored from a backup, or lags behind
        kind = Gone
    elif status == 429 or status >= 500:
        return ServerUnreachable(request, f"HTTP {status}: {message}")
    return kind(request, message or f"HTTP {status}", status)


def _causes(answer: Mapping[str, Any], name: str) -> set[object]:
    details = answer.get("details")
    causes = details.get("causes") if isinstance(details, dict) else None
    return {each.get(name) for each in causes or [] if isinstance(each, dict)}
