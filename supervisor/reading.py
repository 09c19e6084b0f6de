"""The commands that look at a run, living or ended, and the two that ask something of it."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from supervisor import commands, explaining, listing, rundir, terminal
from supervisor.asking import Api, Refused, Unreachable, api_of
from supervisor.rundir import RunDir

# A restart of the supervisor takes well under a second; a command must not fail because of one.
PATIENCE_S = 5.0
STOP_S = 180.0  # the last checkpoint may take 120 s, the ranks' grace 30 s
_POLL_S = 0.1


def obey(command: commands.Reading) -> int:
    """Carry out one of the reading commands and return the exit code.

    Raises:
        BadInput: It cannot be obeyed; one line for stderr, exit code 2.
    """
    try:
        code = _obey(command)
        sys.stdout.flush()
    except BrokenPipeError:  # `holdfast incidents | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _obey(command: commands.Reading) -> int:
    if isinstance(command, commands.Show):
        _say(command.text.rstrip("\n"))
        return 0
    run = rundir.find(command.run_dir, Path.cwd())
    if isinstance(command, commands.Status):
        return _status(run, command)
    if isinstance(command, commands.Incidents):
        return _incidents(run, command)
    if isinstance(command, commands.Explain):
        return _explain(run, command)
    if isinstance(command, commands.Checkpoints):
        return _checkpoints(run, command)
    if isinstance(command, commands.Stop):
        return _stop(run, command)
    return _inject(run, command)


def _status(run: RunDir, command: commands.Status) -> int:
    found, alive, live = _newest_status(run)
    if command.json:
        _json({**(found or {}), "alive": alive})
        return 0
    if found is None:
        starting = "is starting: it has no status yet" if alive else "ended before it had a status"
        _say(f"run {run.path.name} {starting}")
        return 0
    now_s = time.time()
    for line in listing.status(found, alive=alive, live=live, now_s=now_s, path=run.path):
        _say(line)
    return 0


def _newest_status(run: RunDir) -> tuple[dict[str, Any] | None, bool, bool]:
    """Return the status, whether the run is alive, and whether the status is live."""
    alive = run.is_in_use()
    api = api_of(run) if alive else None
    if api is not None:
        try:
            found = api.get("/v1/status")
        except (Unreachable, Refused):
            found = None
        if isinstance(found, dict):
            return found, True, True
    return run.status(), alive, False


def _known(run: RunDir) -> list[dict[str, Any]]:
    """Return all incidents, the open one too."""
    found = {str(each["id"]): each for each in run.incidents()}
    status, alive, _ = _newest_status(run)
    opened = (status or {}).get("open_incident")
    if alive and isinstance(opened, dict) and opened.get("id"):
        found.setdefault(str(opened["id"]), opened)
    return list(found.values())


def _incidents(run: RunDir, command: commands.Incidents) -> int:
    found = _known(run)
    if command.json:
        _json(found)
        return 0
    for line in listing.incidents(found):
        _say(line)
    return 0


def _explain(run: RunDir, command: commands.Explain) -> int:
    found = _known(run)
    chosen = _choose(found, command.incident)
    if command.json:
        _json(chosen)
        return 0
    for line in explaining.explain(chosen, terminal.style_of(sys.stdout)):
        _say(line)
    return 0


def _choose(found: list[dict[str, Any]], word: str) -> dict[str, Any]:
    """Return the incident that `word` means: i-0003, 3 or last."""
    names = [str(each["id"]) for each in found]
    if not names:
        raise BadInput(f"incident {word!r}: this run has had none")
    wanted = names[-1] if word == "last" else f"i-{int(word):04d}" if word.isdecimal() else word
    if wanted in names:
        return found[names.index(wanted)]
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[-3:]
    raise BadInput(f"incident {word!r}: accepted are {', '.join(sorted(near))}, or last")


def _checkpoints(run: RunDir, command: commands.Checkpoints) -> int:
    def told(name: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kreading {name}" if name else "\r\x1b[K")
            sys.stderr.flush()

    try:
        found = listing.survey(run.checkpoints, verify=command.verify, told=told)
    except OSError as error:
        raise BadInput(f"{run.checkpoints} cannot be read: {error.strerror}") from None
    if command.json:
        _json([each.as_json() for each in found])
    else:
        for line in listing.checkpoints(found, time.time(), verified=command.verify):
            _say(line)
    return 1 if command.verify and any(each.fault for each in found) else 0


def _stop(run: RunDir, command: commands.Stop) -> int:
    api = _alive(run, "stop")
    _post(api, run, "/v1/stop", {"now": command.now})
    said = (lambda _: None) if command.json else _say
    ended = _wait_for_end(run, said)
    status = run.status() or {}
    if command.json:
        keys = ("exit_code", "message", "step", "checkpoint")
        _json({"ended": ended, **{key: status.get(key) for key in keys}})
    elif ended:
        _say(f"ended: {_first_line(status.get('message')) or 'the run is over'}")
    else:
        _say(f"still not ended after {STOP_S:.0f} s: `holdfast stop --now` ends it at once")
    return 0 if ended else 1


def _wait_for_end(run: RunDir, said: Callable[[str], object]) -> bool:
    """Wait until the run's processes are gone, and tell each phase on the way."""
    deadline = time.monotonic() + STOP_S
    phase = ""
    while run.is_in_use():
        now = str((run.status() or {}).get("phase", ""))
        if now != phase and now not in ("", "running", "ended"):
            said(terminal.PHASES.get(now, now))
        phase = now
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _inject(run: RunDir, command: commands.Inject) -> int:
    api = _alive(run, "inject")
    answer = _post(api, run, "/v1/inject", {"what": command.kind, "rank": command.rank})
    if command.json:
        _json(answer)
        return 0
    where = {
        "supervisor": "the supervisor",
        "sidecar": f"the sidecar of rank {command.rank}'s member",
        "member": f"the member of rank {command.rank}",
    }.get(command.kind, f"rank {command.rank}")
    _say(f"{command.kind} sent to {where}: `holdfast incidents` will show what comes of it")
    return 0


def _alive(run: RunDir, what: str) -> Api:
    """Return the API of a run that is going on."""
    deadline = time.monotonic() + PATIENCE_S
    while run.is_in_use():
        api = api_of(run)
        if api is not None:
            return api
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    if run.is_in_use():
        raise BadInput(f"{what}: run {run.path.name} does not say where its supervisor is")
    raise BadInput(f"{what}: run {run.path.name} is not going on; accepted is one that is")


def _post(api: Api, run: RunDir, path: str, body: dict[str, object]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return api.post(path, body)
        except Refused as error:
            raise BadInput(f"{path.rpartition('/')[2]} was refused: {error}") from None
        except Unreachable as error:
            if not run.is_in_use() or time.monotonic() >= deadline:
                raise BadInput(
                    f"the supervisor of run {run.path.name} is silent: {error}"
                ) from None
            time.sleep(_POLL_S)


def _first_line(text: object) -> str:
    return next(iter(str(text or "").strip().splitlines()), "")


def _say(line: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(line.encode(encoding, errors="replace").decode(encoding) + "\n")


def _json(value: object) -> None:
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    """Replace what JSON has no word for by null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
