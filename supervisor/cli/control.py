"""`holdfast stop` and `holdfast inject`: send requests to the supervisor of a run in progress."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import BadInput
from holdfast.protocol.drills import DRILLS
from supervisor.cli import command_options
from supervisor.cli.api_client import (
    ApiClient,
    RequestRefused,
    RunRecords,
    Unreachable,
    api_of,
    title,
)
from supervisor.controller.drills import LIMIT_S
from supervisor.display import frame
from supervisor.display.screen import say, say_json
from supervisor.observability.incident_record import SCHEMA
from supervisor.store.run_directory import RunDir

# Long enough for the supervisor to restart, which takes well under a second.
RESTART_S = 5.0
STOP_S = 180.0  # the final checkpoint may stall for 120 s, and the ranks then have 30 s to exit
_POLL_S = 0.1


def stop(run: RunDir, command: command_options.Stop) -> int:
    """Stop the run, wait until it has ended, and return the exit code. Raises `BadInput`."""
    send_request(run, "stop", {"now": command.now}, repeat=True)
    return follow_end(run, run.path.name, command)


def follow_end(
    run: RunRecords, name: str, command: command_options.Stop, more: Mapping[str, object] | None = None
) -> int:
    """Wait for a stopping run to end, show how it ended, and return the command's exit code.

    `more` contains additional fields for the output with `--json`. After Ctrl-C, this prints that the run is
    still stopping, and raises `KeyboardInterrupt`.
    """
    try:
        if not command.json:
            say(f"stopping {title(run)}")
        ended = _wait_for_end(run, (lambda _: None) if command.json else say)
    except KeyboardInterrupt:
        where = f"--job {shlex.quote(name)}" if command.job else f"--run-dir {shlex.quote(str(run.path))}"
        shows = f"`holdfast status {where}` shows whether it has ended"
        sys.stderr.write(f"holdfast: {title(run)} is still stopping: {shows}\n")
        raise
    status = run.status() or {}
    message = str(status.get("message") or "").strip().partition("\n")[0]
    if command.json:
        keys = ("exit_code", "message", "step", "checkpoint")
        shown = {key: status.get(key) for key in (*keys, *(("unended",) if command.job else ()))}
        say_json({"schema": SCHEMA, "run": name, "ended": ended, **shown, **(more or {})})
    elif ended:
        say(f"ended: {message or 'the run is over'}")
    else:
        say(f"the run has not ended after {STOP_S:.0f} s: use `holdfast stop --now` to stop it immediately")
        if status.get("unended"):
            say(f"message: {message}")
    return 0 if ended else 1


def inject(run: RunDir, command: command_options.Inject) -> int:
    """Inject a fault into the run, and return the exit code. Raises `BadInput`."""
    body = {"what": command.kind, "rank": command.rank}
    answer = send_request(run, "inject", body, repeat=False)
    show_caused(run, run.path.name, command, answer)
    return 0


def show_caused(
    run: RunRecords, name: str, command: command_options.Inject, answer: Mapping[str, object] | None = None
) -> None:
    """Print that a fault was injected. `answer` is the supervisor's response."""
    if command.json:
        named = {"run": name, "injected": command.kind, "rank": command.rank}
        say_json({"schema": SCHEMA, **named, **(answer or {})})
        return
    where = DRILLS[command.kind].target.format(rank=command.rank)
    note = " ".join(str((answer or {}).get("note") or "").split())
    but = f", but {note}" if note else ""
    say(f"{command.kind} sent to {where} of {title(run)}{but}; {_outcome(command)}")


def _outcome(command: command_options.Inject) -> str:
    """Return a clause that says where the user sees what becomes of the drill."""
    if command.kind not in ("sidecar", "supervisor"):
        return "`holdfast incidents` shows the outcome"
    shown = "" if command.job else ", and the output of `holdfast run` says when a new process has taken over"
    return f"training continues, so this is not an incident{shown}"


def send_request(run: RunDir, what: str, body: dict[str, object], *, repeat: bool) -> dict[str, Any]:
    """Send a request to the run's supervisor and return the response. Retry for up to `RESTART_S`.

    With `repeat`, send the request again even if the supervisor may already have received it. Raises
    `BadInput` if the run is not running, or if its supervisor refuses the request or does not respond.
    """
    deadline = time.monotonic() + RESTART_S
    while run.check_in_use():
        api = api_of(run)
        why = "its address is not known yet"
        if api is not None:
            try:
                return _once(api, what, body)
            except Unreachable as error:
                why = str(error)
                if error.sent and not repeat:
                    break
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    else:
        raise BadInput(not_running(run, what))
    heard = "" if repeat else "; the fault may have been injected: see `holdfast incidents`"
    raise BadInput(f"{what}: the supervisor of run {run.path.name} does not respond: {why}{heard}")


def not_running(run: RunRecords, what: str) -> str:
    """Return the error message that the command `what` shows when the run has ended."""
    code = (run.status() or {}).get("exit_code")
    ended = f" (it ended with exit code {code})" if code is not None else ""
    return f"{what}: {title(run)} is not running{ended}"


def _once(api: ApiClient, what: str, body: dict[str, object]) -> dict[str, Any]:
    try:
        answer = api.post(f"/v1/{what}", body, LIMIT_S if what == "inject" else 0.0)
    except Unreachable as error:
        if error.sent and body.get("what") == "supervisor":
            return {}  # this drill kills the supervisor before it can respond
        raise
    except RequestRefused as error:
        raise BadInput(f"{what} was refused: {error}") from None
    return answer if isinstance(answer, dict) else {}


def _wait_for_end(run: RunRecords, show: Callable[[str], object]) -> bool:
    """Wait until the run has ended, and pass each new phase to `show`.

    Return False if this takes longer than `STOP_S`, excluding the time spent saving the state.
    """
    deadline = time.monotonic() + STOP_S
    before = ""
    while run.check_in_use():
        status = run.status() or {}
        phase = str(status.get("phase", ""))
        words = frame.phase(status)
        if phase not in ("", "running", "ended") and words != before:
            show(words)
            before = words
        if phase == "saving":  # the supervisor gives up on its own if saving makes no progress
            deadline = time.monotonic() + STOP_S
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
