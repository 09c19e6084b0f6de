"""Give commands access to a run's records and its HTTP API. Every request has a timeout."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol

from supervisor.store.run_directory import RunDir
from supervisor.wording import seconds

TIMEOUT_S = 2.0  # a supervisor responds within milliseconds, or not at all while it is being restarted
_MAX_BYTES = 64 << 20
# A cluster job's status is considered current up to this age. It is written every 5 to 15 s, and the clocks
# of the writer and the reader may differ.
CURRENT_S = 30.0
AGED_S = 10.0  # from this age on, the age of a cluster job's status is shown


class RunRecords(Protocol):
    """The records that commands need, from a run's directory or a job's resource."""

    @property
    def path(self) -> PurePath:
        """The directory of the run, or NAMESPACE/NAME for a job."""

    def status(self) -> dict[str, Any] | None:
        """Return the last status; None if it is missing or unreadable."""

    def has_status(self) -> bool:
        """Return True if a status exists, even if it is unreadable."""

    def check_in_use(self) -> bool:
        """Check whether the run is in use. Return True until it has ended."""

    def incidents(self) -> list[dict[str, Any]]:
        """Return the known incidents, oldest first."""

    def unreadable_incidents(self) -> list[str]:
        """Return the names of the incident files that cannot be read."""


def title(run: RunRecords) -> str:
    """Return the name of a run in messages, such as "run 20260101-120000-ab12" or "job research/gpt"."""
    return f"run {run.path.name}" if isinstance(run, RunDir) else f"job {run.path}"


class Unreachable(Exception):
    """No supervisor responded. If `sent` is true, the supervisor may still have received the request."""

    def __init__(self, why: str, sent: bool = True) -> None:
        super().__init__(why)
        self.sent = sent


class RequestRefused(Exception):
    """The supervisor refused the request. The message is the supervisor's response, on one line."""


@dataclass(frozen=True, slots=True)
class ApiClient:
    """A client of one supervisor, with the token of its run."""

    url: str
    token: str

    def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises `Unreachable` or `RequestRefused`."""
        return self._ask(urllib.request.Request(self.url + path, headers=self._headers()))

    def post(self, path: str, body: Mapping[str, object], more_s: float = 0.0) -> Any:
        """Post `body` to `path` and return the JSON response. Wait `more_s` seconds longer than usual.

        Raises:
            Unreachable: No response arrived, but the request may have been carried out.
            RequestRefused: The request was not carried out.
        """
        headers = {**self._headers(), "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(self.url + path, data, headers, method="POST"), more_s)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def _ask(self, request: urllib.request.Request, more_s: float = 0.0) -> Any:
        # No proxy, because the address is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT_S + more_s) as answer:
                raw = answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                answer_text = error.read(4096).decode(errors="replace")
            raise RequestRefused(" ".join(answer_text.split()) or f"HTTP {error.code}") from None
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError)
            raise Unreachable(str(error.reason), sent=not refused) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Unreachable(str(error) or type(error).__name__) from None
        try:
            return json.loads(raw)
        except ValueError:
            raise Unreachable("the response is not JSON") from None


def api_of(run: RunDir) -> ApiClient | None:
    """Return a client for the run's API; None if the run's directory has no usable address or token."""
    url = (run.run() or {}).get("api")
    if not isinstance(url, str) or not url.startswith("http://"):
        return None
    try:
        return ApiClient(url.rstrip("/"), run.token())
    except OSError:
        return None


def age_of(status: Mapping[str, Any] | None, now_s: float) -> float | None:
    """Return the age of a status at `now_s`, in seconds since the epoch; None if it has no time."""
    updated = (status or {}).get("updated")
    return max(0.0, now_s - updated) if isinstance(updated, int | float) else None


def is_current(status: Mapping[str, Any] | None, now_s: float) -> bool | None:
    """True if a cluster job's status is less than `CURRENT_S` old; None if its age is unknown.

    The last status of a job that has ended is always current.
    """
    if (status or {}).get("phase") == "ended":
        return True
    age_s = age_of(status, now_s)
    return None if age_s is None else age_s < CURRENT_S


def outdated(what: str, age_s: float) -> str:
    """Return the warning that the status of `what` is out of date."""
    return (
        f"the status of {what} is {seconds(age_s)} old, so the supervisor may not be running or may be"
        " unable to write it: see `holdfast doctor`"
    )


def newest_status(run: RunRecords) -> tuple[dict[str, Any] | None, bool, bool]:
    """Return a run's newest status, whether the run is alive, and whether the status is current.

    A status is current if the supervisor has just sent it or, for a job, if it is less than `CURRENT_S` old.
    While a run's supervisor is restarting, this returns the last status that it wrote.
    """
    alive = run.check_in_use()
    if not isinstance(run, RunDir):
        found = run.status()
        return found, alive, alive and is_current(found, time.time()) is True
    api = api_of(run) if alive else None
    if api is not None:
        try:
            found = api.get("/v1/status")
        except (Unreachable, RequestRefused):
            found = None
        if isinstance(found, dict):
            return found, True, True
    return run.status(), alive, False
